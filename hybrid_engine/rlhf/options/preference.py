"""Options that the recipes of this family share; each class checks its own fields."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybrid_engine.config.checks import check_above, check_at_least, check_count, check_one_of
from hybrid_engine.rlhf.options.checks import option
from hybrid_engine.rlhf.options.shared import (
    AnswerOptions,
    DataOptions,
    TrainingOptions,
    suitable_rate,
)

if TYPE_CHECKING:
    from hybrid_engine.rl.preferences import PairLoss


@dataclass(frozen=True, kw_only=True)
class PreferenceOptions(DataOptions, AnswerOptions):
    """The trained model, its reference, and how it is evaluated."""

    model: str | None = option(
        None,
        "Hugging Face name or folder of the initial actor, which is also the reference; default: the run's sft, "
        "trained if missing",
    )
    beta: float = option(0.1, "Strength of the constraint to the reference")
    epochs: int = 1
    batch_size: int = option(32, "Samples per optimizer step, over all processes")
    micro_batch_size: int = option(16, "Maximum samples per forward pass on each process")
    learning_rate: float | None = option(
        None,
        "Peak learning rate; default: 1e-4, with --model 1e-6, for an adapter on it 1e-5",
    )
    eval_every: int = option(20, "Steps between evaluations on held-out rows; 0 evaluates only before and after")
    eval_rows: int = option(256, "Maximum held-out rows to evaluate")
    temperature: float = option(0.8, "Sampling temperature")

    @property
    def peak_learning_rate(self) -> float:
        """The highest learning rate of the schedule."""
        return self.learning_rate or suitable_rate(self, small=1e-4)

    def __post_init__(self) -> None:
        TrainingOptions.__post_init__(self)
        AnswerOptions.__post_init__(self)
        DataOptions.__post_init__(self)
        for name in ("batch_size", "micro_batch_size", "eval_rows"):
            check_count(name, getattr(self, name), 1)
        for name in ("beta", "learning_rate"):
            check_above(name, getattr(self, name), 0)
        check_count("eval_every", self.eval_every, 0)


@dataclass(frozen=True, kw_only=True)
class PairLossOptions:
    """The loss of DPO's family for pairs (`rl/preferences.py`)."""

    loss: str = option("sigmoid", "Loss: sigmoid, hinge, ipo, ipo-length-normalised, conservative or robust")
    label_smoothing: float = option(
        0.0,
        "Assumed fraction of pairs with swapped labels, for conservative and robust; below 0.5",
    )
    sft_weight: float = option(0.0, "Weight of the chosen answer's negative log-likelihood per token in the loss")

    def __post_init__(self) -> None:
        from hybrid_engine.rl.preferences import LOSSES, SMOOTHED_LOSSES  # imports torch

        check_one_of("loss", self.loss, [*LOSSES, *SMOOTHED_LOSSES])
        check_at_least("sft_weight", self.sft_weight, 0)
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"--label-smoothing={self.label_smoothing} must be at least 0 and below 0.5, where labels carry no "
                "information; lower it"
            )
        if (self.label_smoothing > 0) != (self.loss in SMOOTHED_LOSSES):
            raise ValueError(
                f"--label-smoothing={self.label_smoothing} does not fit --loss={self.loss}: "
                f"{' and '.join(SMOOTHED_LOSSES)} need one above 0, the other losses ignore it; change one of them"
            )

    def build_loss(self, beta: float) -> "PairLoss":
        """The loss of each pair."""
        from hybrid_engine.rl.preferences import build_loss

        return build_loss(self.loss, beta, self.label_smoothing, self.sft_weight)
