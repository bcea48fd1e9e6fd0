"""The options of `autodist`, the conditions that they describe (machine, processes, weights, memory), and costs.

All cost functions of the planner take a `PlanSetting` and return a `Cost`.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

import torch

from hybrid_engine.extensions.parallelize.graph.compute_config import (
    COUNT,
    SWITCH,
    TEXT,
    ComputeConfig,
    ValueRule,
    check,
    is_count,
    is_number,
)
from hybrid_engine.extensions.parallelize.planning.layouts import Layout, moves
from hybrid_engine.extensions.parallelize.planning.machine import TABLES, Machine

ADAM_STATES = 2
"""Number of tensors of a parameter's size that the optimizer keeps."""
SCHEDULERS = ("1f1b", "gpipe")
"""Schedules whose time and memory the planner can compute: those that fill and drain a pipeline."""
ABOVE_ZERO = ValueRule(lambda value: is_number(value) and value > 0, "a number above 0")
KINDS: Mapping[Any, ValueRule] = {
    int: COUNT,
    int | None: COUNT,
    float: ABOVE_ZERO,
    float | None: ABOVE_ZERO,
    bool: SWITCH,
    str: TEXT,
    str | None: TEXT,
}
"""Rules for values, by the type of an option. None is allowed if it is the default."""
MAKES_A_PLAN = ("explore_pipeline", "partition_constraints_path", "recompute_modules", "max_partition_degree")
"""Options that have no effect on a loaded plan."""
SIXTEEN_BITS = ("use_fp16", "use_bf16", "use_memory_efficient_fp16", "use_memory_efficient_bf16")
DEFAULT_TABLE = "h100"


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """How parameters are stored and stepped."""

    is_16_bit: bool = False
    """Whether the module, which was traced in fp32, is trained in 16 bits."""
    has_masters: bool = False
    """Whether the optimizer keeps fp32 copies of 16-bit parameters, and fp32 states."""
    keeps_remainders: bool = False
    """Whether the optimizer keeps only the lower 16 bits of these copies."""

    def itemsize(self, dtype: torch.dtype) -> int:
        """Bytes of an element that was traced in `dtype`, as it is computed."""
        return min(dtype.itemsize, 2) if self.is_16_bit and dtype.is_floating_point else dtype.itemsize

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the computation if the module was traced in `dtype`."""
        return torch.bfloat16 if self.is_16_bit and dtype is torch.float32 else dtype

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the optimizer's states and copies for one element of a parameter."""
        size = self.itemsize(dtype)
        if not (self.has_masters and size == 2):
            return ADAM_STATES * size
        return ADAM_STATES * 4 + (2 if self.keeps_remainders else 4)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Generation with the same weights: a unit holds keys and values of `num_tokens` tokens at once."""

    num_tokens: int
    tensor_parallel: int
    """Number of processes over which weights, keys and values are split during generation."""


@dataclass(frozen=True, kw_only=True)
class PlanSetting:
    """Everything that a plan's cost depends on, apart from the graph and the plan."""

    machine: Machine
    plan_ngpus: int = 1
    num_units: int = 1
    use_zero: bool = False
    trains: bool = True
    weights: WeightFormat = WeightFormat()
    num_micro_batches: int = 1
    """Forward and backward passes before each optimizer step."""
    in_flight: int = 1
    """Micro-batches whose activations are kept at once."""
    memory_bytes: float = float("inf")
    """Bytes of one device for everything that is planned."""
    transient_coefficient: float = 2.0
    """Memory for temporary tensors, as a multiple of the largest tensor's size."""
    max_partition_degree: int = 1 << 30
    """Maximum number of processes over which an op is split."""
    generation: Generation | None = None
    is_eager: bool = False
    """Whether layouts can change only at module borders (lowering="eager")."""

    def move_seconds(
        self, num_elements: int, itemsize: int, source: Layout, target: Layout, mesh: Sequence[int]
    ) -> float:
        """Seconds to bring a tensor from one layout to another."""
        total = 0.0
        for move in moves(num_elements, source, target, tuple(mesh)):
            num_bytes = move.num_elements * itemsize
            if move.kind == "copy":
                total += self.machine.device.seconds(0, 2 * num_bytes, torch.float32)
            else:
                stride = prod(mesh[move.axis + 1 :])
                total += self.machine.collective_seconds(move.kind, num_bytes, mesh[move.axis], stride)
        return total

    def reduction_seconds(self, num_bytes: float) -> float:
        """Seconds to sum `num_bytes` of gradients over units."""
        kinds = ("reduce_scatter", "all_gather") if self.use_zero else ("all_reduce",)
        return sum(self._over_units(kind, num_bytes) for kind in kinds)

    def _over_units(self, kind: str, num_bytes: float) -> float:
        """Seconds of a collective over units without its latency: all gradients are reduced at once."""
        size, machine = self.num_units, self.machine
        if size == 1:
            return 0.0
        some, none = (machine.collective_seconds(kind, n, size, self.plan_ngpus) for n in (num_bytes, 0))
        return some - none


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A cost for one rank: seconds of one micro-batch, `reduction_s` once per step, and bytes."""

    compute_s: float = 0.0
    communication_s: float = 0.0
    reduction_s: float = 0.0
    resident_bytes: float = 0.0
    """Parameters and their optimizer states."""
    gradient_bytes: float = 0.0
    stepping_bytes: float = 0.0
    """Additional bytes while gradients are summed over units and the optimizer steps."""
    copied_bytes: float = 0.0
    """Copies of parts of parameters that generation reads in another layout, for its duration."""
    kept_bytes: float = 0.0
    """Kept from the forward pass of a micro-batch to its backward pass."""
    again_bytes: float = 0.0
    """Kept while a recomputed module runs backward."""

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(**{f: getattr(self, f) + getattr(other, f) for f in FIELDS})

    def times(self, factor: float) -> "Cost":
        """The cost multiplied by `factor`."""
        return Cost(**{f: getattr(self, f) * factor for f in FIELDS})

    def seconds(self, num_micro_batches: int) -> float:
        """Seconds of an optimizer step."""
        return num_micro_batches * (self.compute_s + self.communication_s) + self.reduction_s


FIELDS = tuple(f.name for f in fields(Cost))


ZERO = Cost()


def peaks(cost: Cost, largest: float, setting: PlanSetting, constants: float = 0.0) -> dict[str, float]:
    """Peak bytes of one rank by moment of a step. `constants`: additional bytes of generation."""
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


def measured_path() -> Path:
    """The path of the file in which `hybrid-engine measure-links` stores its measurements."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "hybrid-engine" / "costs.json"


@dataclass(frozen=True, kw_only=True)
class Options:
    """`pas_config` of `autodist`. Names and meanings are nnScaler's, except for `costs` and `generation`."""

    update_freq: int = 1
    """Samples of each `train_step`; with stages, the micro-batches of the pipeline."""
    mem_constraint: float | None = None
    """GB (10^9 bytes) of one device for everything that is planned; default: the memory of the device."""
    task_name: str = ""
    """A name that is stored in the plan's notes."""
    use_fp16: bool = False
    use_memory_efficient_fp16: bool = False
    use_bf16: bool = False
    """16-bit weights, with fp32 copies and states in the optimizer."""
    use_memory_efficient_bf16: bool = False
    """16-bit weights and states, no copies."""
    re_profile: bool = False
    """Whether this process's device is measured now; the result replaces the device figures of the costs."""
    verbose: bool = False
    """Whether the plan is explained on stdout."""
    load_plan_path: str | None = None
    """A plan file, which is loaded instead of making a plan."""
    save_plan_path: str | None = None
    """The path to which the plan is written, in addition to the folder of `parallelize`."""
    partition_constraints_path: str | None = None
    """A YAML file of allowed splits, by globs of module paths."""
    recompute_modules: str = ""
    """Comma-separated globs of the paths of modules that are recomputed."""
    pipeline_pivots: str = ""
    """Comma-separated module paths; a stage may begin only at one of them."""
    use_apex_fused_adam_v2: bool = False
    """Whether the optimizer keeps only the lower 16 bits of fp32 copies."""
    explore_pipeline: bool = False
    """Whether plans of several stages are considered."""
    pipeline_scheduler: str = "1f1b"
    parallel_profile: bool = False
    """Accepted for compatibility with existing scripts; a profile takes one process only seconds."""
    max_partition_degree: int | None = None
    """Maximum number of processes over which an op is split."""
    transient_mem_coef: float = 2.0
    """Memory for temporary tensors, as a multiple of the largest tensor's size."""
    costs: str | None = None
    """A table of published figures, or a measured file. Default: measure-links' file, otherwise table h100."""
    generation: Mapping[str, int] | None = None
    """`num_tokens`: tokens whose keys and values a unit holds at once during generation; `tensor_parallel`: number of
    processes that generate together.
    """

    def __post_init__(self) -> None:
        """Raises ValueError that names the option, its value, the rule and the remedy."""
        for one in fields(self):
            value = getattr(self, one.name)
            if one.type in KINDS and not (value is None and one.default is None):
                check(one.name, value, KINDS[one.type])
        self._check_together()

    def _check_together(self) -> None:
        chosen = [name for name in SIXTEEN_BITS if getattr(self, name)]
        if len(chosen) > 1:
            raise ValueError(f"{chosen} exclude each other; keep one of them")
        if self.use_apex_fused_adam_v2 and not (self.use_fp16 or self.use_bf16):
            raise ValueError(
                "use_apex_fused_adam_v2=True needs use_bf16 or use_fp16, whose copies it shortens; set one"
            )
        if self.pipeline_scheduler not in SCHEDULERS:
            raise ValueError(f"pipeline_scheduler={self.pipeline_scheduler!r} must be one of {list(SCHEDULERS)}")
        if self.pipeline_pivots and not self.explore_pipeline:
            raise ValueError("pipeline_pivots needs explore_pipeline=True; set it, or leave the pivots out")
        for name in MAKES_A_PLAN if self.load_plan_path is not None else ():
            if value := getattr(self, name):
                raise ValueError(
                    f"load_plan_path takes the plan as it is, {name}={value!r} makes one; leave either out"
                )
        if self.generation is not None:
            self._check_generation(self.generation)

    def _check_generation(self, generation: Mapping[str, int]) -> None:
        is_complete = isinstance(generation, Mapping) and set(generation) == {"num_tokens", "tensor_parallel"}
        if not is_complete or not all(is_count(value) for value in generation.values()):
            raise ValueError(
                f"generation={generation!r} must have num_tokens and tensor_parallel, each a number of at least 1"
            )

    @classmethod
    def of(cls, pas_config: Mapping[str, Any]) -> "Options":
        """The options in a policy's config; keys that begin with `_` are ignored."""
        return cls(**{name: value for name, value in pas_config.items() if not name.startswith("_")})

    @property
    def weights(self) -> WeightFormat:
        """The dtypes of parameters, fp32 copies and optimizer states."""
        return WeightFormat(
            is_16_bit=any(getattr(self, name) for name in SIXTEEN_BITS),
            has_masters=self.use_fp16 or self.use_bf16,
            keeps_remainders=self.use_apex_fused_adam_v2,
        )

    def check_folder(self) -> None:
        """Raises ValueError if the plan's file could not be written at the end."""
        path = None if self.save_plan_path is None else Path(self.save_plan_path)
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ValueError(f"save_plan_path={self.save_plan_path!r} must be a file in a folder that there is")

    def machine(self) -> Machine:
        """The costs that the options name."""
        if self.costs is None:
            path = measured_path()
            return Machine.load(path) if path.is_file() else Machine.named(DEFAULT_TABLE)
        return Machine.named(self.costs) if self.costs in TABLES or "." not in self.costs else Machine.load(self.costs)

    def setting(self, config: ComputeConfig, machine: Machine) -> PlanSetting:
        """The setting that plans are made for; ValueError for options that do not go with the config."""
        for name in ("explore_pipeline", "recompute_modules") if config.lowering == "eager" else ():
            if value := getattr(self, name):
                raise ValueError(
                    f"{name}={value!r} does not go with lowering='eager', which has one stage and leaves recomputing "
                    "to the model's own gradient checkpointing; leave it out, or pass lowering='graph'"
                )
        generation = None
        if self.generation is not None:
            generation = Generation(**self.generation)
            if config.plan_ngpus % generation.tensor_parallel:
                raise ValueError(
                    f"generation: tensor_parallel={generation.tensor_parallel} must divide "
                    f"plan_ngpus={config.plan_ngpus}; change either"
                )
        memory = machine.device.memory_bytes if self.mem_constraint is None else self.mem_constraint * 1e9
        return PlanSetting(
            machine=machine,
            plan_ngpus=config.plan_ngpus,
            num_units=config.num_units,
            use_zero=config.use_zero,
            trains=not config.inference_only,
            weights=self.weights,
            num_micro_batches=self.update_freq,
            memory_bytes=memory,
            transient_coefficient=self.transient_mem_coef,
            max_partition_degree=self.max_partition_degree or config.plan_ngpus,
            generation=generation,
            is_eager=config.lowering == "eager",
        )


OPTION_NAMES = frozenset(one.name for one in fields(Options))
