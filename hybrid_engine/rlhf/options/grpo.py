"""Options of `hybrid-engine grpo`."""

from dataclasses import dataclass

from hybrid_engine.config.checks import check_above, check_count, check_finite
from hybrid_engine.rlhf.options.algorithm import Algorithm
from hybrid_engine.rlhf.options.checks import check_answers, option
from hybrid_engine.rlhf.options.shared import (
    PromptRunOptions,
    RolloutOptions,
    derive_minibatch,
)


@dataclass(frozen=True, kw_only=True)
class Config(RolloutOptions, PromptRunOptions):
    """Trains a language model with GRPO: the model answers each prompt several times and learns from the best answers.

        hybrid-engine grpo
        hybrid-engine grpo --model Qwen/Qwen3-0.6B --dataset problems.jsonl --reward math --out runs/mine
        hybrid-engine grpo --preset dapo --kl-place loss --kl-coef 0.01

    Without --model, a small model that adds numbers and forgets the carry is trained first; without --reward, correct
    sums are rewarded. Writes to --out: config.yaml, metrics.jsonl (one line per step), plot.png, samples.json (answers
    before and after), result.json, checkpoints/, best/ (the best weights on held-out prompts) and actor/ (the final
    weights), both Hugging Face folders. --resume continues an interrupted run from its last checkpoint.
    """

    OWN_LENGTHS = (96, 48)
    out: str = "runs/sums"
    model: str | None = option(
        None,
        "Hugging Face name or folder of the initial actor; default: a small model that adds numbers, trained if "
        "missing",
    )
    dataset: str | tuple[str, ...] | None = option(
        None,
        'Prompts: a .jsonl, .json, .csv or .parquet file, a folder or a hub name, with a column "prompt" and the '
        "columns that the rewards read; default: sums",
    )
    group_size: int = option(8, "Answers per prompt")
    minibatch_size: int = option(
        0,
        "Answers per optimizer step, over all processes; 0: the largest divisor of a step's answers, up to 256, that "
        "the processes share equally",
    )
    epochs: int = option(1, "Passes over each rollout")
    learning_rate: float | None = option(
        None,
        "Peak learning rate; default: 7e-4, with --model 1e-6, for an adapter on it 1e-5",
    )
    measure_kl: bool = option(
        True,
        "Report the KL to the initial weights even if the algorithm uses none; costs a forward pass per answer and, "
        "without an adapter, a second model",
    )
    eval_prompts: int = 128
    eval_samples: int = option(8, "Answers per held-out prompt, the k of pass@k")
    pass_score: float = option(1.0, "Minimum score of a correct answer in pass@k")
    algorithm: Algorithm = Algorithm()  # noqa: RUF009  frozen

    def __post_init__(self) -> None:
        PromptRunOptions.__post_init__(self)
        RolloutOptions.__post_init__(self)
        derive_minibatch(self, self.rollout_size * self.group_size, 256)
        for name in ("group_size", "minibatch_size", "epochs", "eval_samples"):
            check_count(name, getattr(self, name), 1)
        check_finite("pass_score", self.pass_score)
        check_above("learning_rate", self.learning_rate, 0)
        check_answers(self.rollout_size, self.group_size)
        self.algorithm.check_group_size("group_size", self.group_size)
        if self.rollout_size * self.group_size % self.minibatch_size:
            raise ValueError(
                f"--minibatch-size={self.minibatch_size} must divide the {self.rollout_size * self.group_size} "
                f"answers of a step, --rollout-size={self.rollout_size} times --group-size={self.group_size}; "
                "change one of them"
            )

    @property
    def needs_reference(self) -> bool:
        """Whether the run compares its actor with the first weights."""
        return self.measure_kl or self.algorithm.needs_reference
