"""What a plan, or a part of it, costs one rank."""

from dataclasses import dataclass, fields

from hybrid_engine.extensions.parallelize.planning.setting import Setting


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What something costs one rank: seconds of one micro-batch, `reduction_s` once a step, and bytes."""

    compute_s: float = 0.0
    communication_s: float = 0.0
    reduction_s: float = 0.0
    resident_bytes: float = 0.0
    """Parameters and what the optimizer keeps of them."""
    gradient_bytes: float = 0.0
    stepping_bytes: float = 0.0
    """What is there besides while gradients are summed over units and the optimizer steps."""
    copied_bytes: float = 0.0
    """Of parts of parameters that generation reads otherwise than they are kept, while it lasts."""
    kept_bytes: float = 0.0
    """Kept from the forward pass of a micro-batch to its backward pass."""
    again_bytes: float = 0.0
    """Kept while a recomputed module runs backward."""

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(**{f: getattr(self, f) + getattr(other, f) for f in FIELDS})

    def times(self, factor: float) -> "Cost":
        """The cost of `factor` such parts."""
        return Cost(**{f: getattr(self, f) * factor for f in FIELDS})

    def seconds(self, num_micro_batches: int) -> float:
        """The time of a step of the optimizer."""
        return num_micro_batches * (self.compute_s + self.communication_s) + self.reduction_s


FIELDS = tuple(f.name for f in fields(Cost))
ZERO = Cost()


def peaks(cost: Cost, largest: float, setting: Setting, constants: float = 0.0) -> dict[str, float]:
    """The bytes of one rank at the moments of a step at which they may be most; `constants`: of generation alone."""
    if not setting.trains:
        return {"forward": cost.resident_bytes + setting.transient_coefficient * largest}
    gradients_too = cost.gradient_bytes if setting.num_micro_batches > 1 else 0.0
    found = {
        "backward": cost.resident_bytes
        + gradients_too
        + setting.in_flight * cost.kept_bytes
        + cost.again_bytes
        + setting.transient_coefficient * largest,
        "step": cost.resident_bytes + cost.gradient_bytes + cost.stepping_bytes,
    }
    if setting.generation is not None:
        found["generation"] = cost.resident_bytes + cost.copied_bytes + constants
    return found
