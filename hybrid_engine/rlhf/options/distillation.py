"""Options of `hybrid-engine distill`."""

from dataclasses import dataclass

from hybrid_engine.config.checks import (
    check_above,
    check_answers,
    check_between,
    check_count,
    check_finite,
    check_one_of,
    option,
)
from hybrid_engine.rlhf.options.shared import PromptRunOptions, check_minibatch, derive_minibatch

DIVERGENCES = ("forward-kl", "reverse-kl", "jsd")


@dataclass(frozen=True, kw_only=True)
class DistillConfig(PromptRunOptions):
    """Trains a language model to answer like a teacher: it answers, and its teacher says how likely each token was.

        hybrid-engine distill --teacher runs/sums/actor
        hybrid-engine distill --model Qwen/Qwen3-0.6B --teacher Qwen/Qwen3-8B --dataset problems.jsonl --reward math

    On-policy distillation: the divergence of the two models' distributions is minimized over the model's own answers,
    or with --on-policy-share below 1 also over those of the dataset. Without --model, a small model that adds numbers
    and forgets the carry is trained first. Rewards are not learned from: they say how good the answers are. Writes to
    --out what grpo writes.
    """

    HAS_RATIOS = False
    OWN_LENGTHS = (96, 48)
    out: str = "runs/distilled"
    teacher: str | None = option(
        None,
        "Hugging Face name or folder of the model to learn from, whose tokens must be the actor's; required",
    )
    model: str | None = option(
        None,
        "Hugging Face name or folder of the model that learns; default: a small model that adds numbers, trained if "
        "missing",
    )
    dataset: str | tuple[str, ...] | None = option(
        None,
        'Prompts: a .jsonl, .json, .csv or .parquet file, a folder or a hub name, with a column "prompt" and the '
        "columns that the rewards read; default: sums",
    )
    divergence: str = option(
        "reverse-kl",
        "Divergence from the teacher: forward-kl (teacher from student), reverse-kl or jsd (generalized "
        "Jensen-Shannon)",
    )
    beta: float | None = option(
        None,
        "With --divergence jsd: weight of the teacher in the mixture, above 0 and below 1; default: 0.5",
    )
    teacher_temperature: float = option(1.0, "Temperature of the teacher's distributions")
    teacher_top_k: int = option(
        0,
        "Divergence over the teacher's K likeliest tokens, and all others as one class; 0: over the whole vocabulary",
    )
    on_policy_share: float = option(
        1.0,
        "Probability that a step learns from the model's own answers, and not from those of the dataset's column "
        '"completion": 1 never reads these, 0 samples none in training',
    )
    group_size: int = option(1, "Answers per prompt")
    minibatch_size: int = option(
        0,
        "Answers per optimizer step, over all processes; 0: the largest divisor of a step's answers, up to 64, that "
        "the processes share equally",
    )
    learning_rate: float | None = option(
        None,
        "Peak learning rate; default: 3e-4, with --model 1e-5, for an adapter on it 1e-4",
    )
    eval_prompts: int = 128
    eval_samples: int = option(8, "Answers per held-out prompt, the k of pass@k")
    pass_score: float = option(1.0, "Minimum score of a correct answer in pass@k")

    def __post_init__(self) -> None:
        PromptRunOptions.__post_init__(self)
        derive_minibatch(self, self.rollout_size * self.group_size, 64)
        for name in ("group_size", "minibatch_size", "eval_samples"):
            check_count(name, getattr(self, name), 1)
        check_finite("pass_score", self.pass_score)
        for name in ("learning_rate", "teacher_temperature"):
            check_above(name, getattr(self, name), 0)
        check_answers(self.rollout_size, self.group_size)
        check_one_of("divergence", self.divergence, DIVERGENCES)
        if self.beta is not None and self.divergence != "jsd":
            raise ValueError(f"--beta={self.beta} applies to --divergence jsd, not {self.divergence}; leave it out")
        if self.beta is not None:
            check_between("beta", self.beta, 0, 1)
        if self.beta in (0, 1):
            name = "forward-kl" if self.beta == 0 else "reverse-kl"
            raise ValueError(f"--beta={self.beta:g} is --divergence {name}; pass that")
        check_minibatch(self.rollout_size, self.group_size, self.minibatch_size)
        check_count("teacher_top_k", self.teacher_top_k, 0)
        check_between("on_policy_share", self.on_policy_share, 0, 1)
        if self.learns_given_answers and self.dataset is None:
            raise ValueError(
                f"--on-policy-share={self.on_policy_share:g} learns from a dataset's answers; give --dataset with a "
                'column "completion", or leave it at 1'
            )
        if self.learns_given_answers and self.group_size > 1:
            raise ValueError(
                f"--group-size={self.group_size} applies to the model's own answers, and --on-policy-share="
                f"{self.on_policy_share:g} learns from the single answer that a row has; leave it at 1"
            )

    @property
    def learns_given_answers(self) -> bool:
        """Whether some steps learn from the answers of the dataset."""
        return self.on_policy_share < 1

    @property
    def needs_reference(self) -> bool:
        """The first weights are not compared with."""
        return False

    @property
    def learns_from(self) -> str | None:
        """The teacher."""
        return self.teacher

    @property
    def weight_of_teacher(self) -> float:
        """Beta of the divergence in TRL's orientation: 0 is the forward KL, 1 the reverse."""
        return {"forward-kl": 0.0, "reverse-kl": 1.0}.get(self.divergence, 0.5 if self.beta is None else self.beta)
