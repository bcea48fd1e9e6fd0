"""Options of `hybrid-engine dpo`, `kto` and `online-dpo`, and what they share; each class checks its own fields."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybrid_engine.config.checks import (
    check_above,
    check_answers,
    check_at_least,
    check_budget_holds,
    check_count,
    check_divides,
    check_one_of,
    option,
)
from hybrid_engine.rlhf.options.shared import (
    AnswerOptions,
    DataOptions,
    PromptRunOptions,
    TrainingOptions,
    derive_minibatch,
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
        check_above("learning_rate", self.learning_rate, 0)
        check_count("eval_every", self.eval_every, 0)


@dataclass(frozen=True, kw_only=True)
class PairLossOptions:
    """The loss of DPO's family for pairs (`rl/preferences.py`)."""

    loss: str = option(
        "sigmoid",
        "Loss: sigmoid, sigmoid-length-normalised, hinge, ipo, ipo-length-normalised, conservative, robust, exo, "
        "apo-zero, apo-down, nca, bco, sppo or discopop; without a reference simpo, orpo or cpo",
    )
    beta: float | None = option(
        None,
        "Strength of the constraint to the reference; of orpo the weight of its odds-ratio term, of simpo and cpo the "
        "steepness; default: 0.1, simpo 2, sigmoid-length-normalised 5",
    )
    label_smoothing: float = option(
        0.0,
        "Assumed fraction of pairs with swapped labels, for conservative, robust and exo; below 0.5",
    )
    target_margin: float | None = option(
        None,
        "Margin by which simpo's reward of the chosen answer should exceed the other; default: 0.5",
    )
    sft_weight: float | None = option(
        None,
        "Weight of the chosen answer's negative log-likelihood per token in the loss; default: 0, orpo and cpo 1",
    )
    wpo: bool = option(False, "Weigh each pair by how likely the policy is to write its answers (WPO)")

    def __post_init__(self) -> None:
        from hybrid_engine.rl.preferences import BETA, BETAS, EVERY_LOSS, SFT_LOSSES  # imports torch

        check_one_of("loss", self.loss, EVERY_LOSS)
        if self.beta is None:
            object.__setattr__(self, "beta", BETAS.get(self.loss, BETA))
        if self.sft_weight is None:
            object.__setattr__(self, "sft_weight", float(self.loss in SFT_LOSSES))
        check_above("beta", self.beta, 0)
        check_at_least("sft_weight", self.sft_weight, 0)
        check_at_least("target_margin", self.target_margin, 0)
        self._check_owners()

    def _check_owners(self) -> None:
        """Raises ValueError for an option that the loss does not read, or needs."""
        from hybrid_engine.rl.preferences import MARGIN_LOSSES, SMOOTHED_LOSSES

        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"--label-smoothing={self.label_smoothing} must be at least 0 and below 0.5, where labels carry no "
                "information; lower it"
            )
        if (self.label_smoothing > 0) != (self.loss in SMOOTHED_LOSSES):
            raise ValueError(
                f"--label-smoothing={self.label_smoothing} does not fit --loss={self.loss}: "
                f"{', '.join(SMOOTHED_LOSSES)} need one above 0, the other losses ignore it; change one of them"
            )
        if self.target_margin is not None and self.loss not in MARGIN_LOSSES:
            raise ValueError(
                f"--target-margin={self.target_margin} does not fit --loss={self.loss}, which ignores it; give --loss "
                "simpo, or leave it out"
            )

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the policy with a reference."""
        from hybrid_engine.rl.preferences import REFERENCE_FREE

        return self.loss not in REFERENCE_FREE

    def build_loss(self) -> "PairLoss":
        """The loss of each pair."""
        from hybrid_engine.rl.preferences import TARGET_MARGIN, build_loss

        assert self.beta is not None and self.sft_weight is not None
        margin = TARGET_MARGIN if self.target_margin is None else self.target_margin
        return build_loss(self.loss, self.beta, self.label_smoothing, self.sft_weight, margin, is_weighted=self.wpo)


@dataclass(frozen=True, kw_only=True)
class DPOConfig(PairLossOptions, PreferenceOptions):
    """Trains a language model with DPO: the preferred one of two answers becomes more likely than the other.

        hybrid-engine dpo --out runs/dpo
        hybrid-engine dpo --model Qwen/Qwen3-0.6B --dataset pairs.jsonl --out runs/mine

    Without --dataset, the pairs are docstring summaries, and the rules of PEP 257 judge the model's answers. Writes to
    --out: metrics.jsonl (one line per step), plot.png, samples.json (answers before and after), result.json,
    checkpoints/, best/ (the weights with the lowest held-out loss) and actor/ (the final weights), both Hugging Face
    folders. --resume continues an interrupted run from its last checkpoint.
    """

    out: str = "runs/dpo"
    dataset: str | tuple[str, ...] | None = option(
        None,
        'Preference pairs: a .jsonl, .json, .csv or .parquet file, a folder or a hub name, with columns "prompt", '
        '"chosen" and "rejected"; default: summaries of the standard library\'s functions',
    )
    epochs: int = option(1, "Passes over the pairs")
    max_pairs: int = option(0, "Train on a random sample of this many pairs; 0 uses all")

    def __post_init__(self) -> None:
        PreferenceOptions.__post_init__(self)
        PairLossOptions.__post_init__(self)
        check_count("epochs", self.epochs, 1)
        check_count("max_pairs", self.max_pairs, 0)


@dataclass(frozen=True, kw_only=True)
class KTOConfig(PreferenceOptions):
    """Trains a language model with KTO: answers labeled desirable become more likely, the others less likely.

        hybrid-engine kto --out runs/kto
        hybrid-engine kto --model Qwen/Qwen3-0.6B --dataset labelled.jsonl --out runs/mine

    Without --dataset, the answers are docstring summaries, and the rules of PEP 257 judge the model's answers. Writes
    to --out: metrics.jsonl (one line per step), plot.png, samples.json (answers before and after), result.json,
    checkpoints/, best/ (the weights with the lowest held-out loss) and actor/ (the final weights), both Hugging Face
    folders. --resume continues an interrupted run from its last checkpoint.
    """

    out: str = "runs/kto"
    dataset: str | tuple[str, ...] | None = option(
        None,
        'Labeled answers: a .jsonl, .json, .csv or .parquet file, a folder or a hub name, with columns "prompt", '
        '"completion" and "label", or preference pairs, each of which gives two; default: summaries of the standard '
        "library's functions",
    )
    beta: float = option(0.1, "Strength of the constraint to the reference")
    epochs: int = option(1, "Passes over the answers")
    max_answers: int | None = option(
        None,
        "Train on a random sample of this many answers; 0 uses all; default: 2560, with --dataset all",
    )
    learning_rate: float | None = option(
        None,
        "Peak learning rate; default: 2e-4, with --model 1e-6, for an adapter on it 1e-5",
    )
    desirable_weight: float = option(1.0, "Loss weight of desirable answers; raise it if there are few of them")
    undesirable_weight: float = option(1.0, "Loss weight of undesirable answers")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta", "desirable_weight", "undesirable_weight"):
            check_above(name, getattr(self, name), 0)
        check_count("epochs", self.epochs, 1)
        check_count("max_answers", self.max_answers, 0)
        if self.batch_size < 2:
            raise ValueError(f"--batch-size={self.batch_size} must be at least 2 to compare answers; raise it")

    @property
    def num_answers(self) -> int:
        """Answers to train on; 0 for all."""
        return self.max_answers if self.max_answers is not None else 0 if self.dataset else 2560

    @property
    def peak_learning_rate(self) -> float:
        """The highest learning rate of the schedule."""
        return self.learning_rate or suitable_rate(self, small=2e-4)


@dataclass(frozen=True, kw_only=True)
class OnlineDPOConfig(PairLossOptions, PromptRunOptions):
    """Trains a language model with online DPO: the best of the model's answers to a prompt is preferred to the worst.

        hybrid-engine online-dpo
        hybrid-engine online-dpo --model Qwen/Qwen3-0.6B --dataset problems.jsonl --reward math --out runs/mine

    Without --model, a small model that adds numbers and forgets the carry is trained first; without --reward, correct
    sums are rewarded. Writes to --out: config.yaml, metrics.jsonl (one line per step), plot.png, samples.json (answers
    before and after), result.json, checkpoints/, best/ (the best weights on held-out prompts) and actor/ (the final
    weights), both Hugging Face folders. --resume continues an interrupted run from its last checkpoint.
    """

    HAS_RATIOS = False
    OWN_LENGTHS = (96, 48)
    ANSWERS_IN_PASS = 2
    out: str = "runs/online-dpo"
    model: str | None = option(
        None,
        "Hugging Face name or folder of the initial actor, which is also the reference; default: a small model that "
        "adds numbers, trained if missing",
    )
    dataset: str | tuple[str, ...] | None = option(
        None,
        'Prompts: a .jsonl, .json, .csv or .parquet file, a folder or a hub name, with a column "prompt" and the '
        "columns that the rewards read; default: sums",
    )
    steps: int = 40
    group_size: int = option(4, "Answers per prompt, of which the best and the worst make a pair; at least 2")
    minibatch_size: int = option(
        0,
        "Pairs per optimizer step, over all processes, including those left out; 0: the largest divisor of a step's "
        "pairs, up to 64, that the processes share equally",
    )
    micro_batch_size: int = option(32, "Maximum pairs per forward pass on each process")
    learning_rate: float | None = option(
        None,
        "Peak learning rate; default: 3e-4, with --model 1e-6, for an adapter on it 1e-5",
    )
    exact: bool = option(
        False,
        "Make rollout log-probabilities bitwise equal to the trainer's, which is slower (docs/exact.md)",
    )

    def __post_init__(self) -> None:
        PromptRunOptions.__post_init__(self)
        PairLossOptions.__post_init__(self)
        derive_minibatch(self, self.rollout_size, 64)
        check_count("minibatch_size", self.minibatch_size, 1)
        check_above("learning_rate", self.learning_rate, 0)
        check_count("group_size", self.group_size, 2)
        check_answers(self.rollout_size, self.group_size)
        check_divides("rollout_size", self.rollout_size, self.minibatch_size)
        longest = self.max_prompt_tokens + self.max_new_tokens
        check_budget_holds(self.tokens_per_micro_batch, 2 * longest, longest)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the actor with the first weights."""
        return self.has_reference
