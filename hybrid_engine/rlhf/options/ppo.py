"""Options of `hybrid-engine ppo`."""

from dataclasses import dataclass

from hybrid_engine.config.checks import (
    check_above,
    check_at_least,
    check_between,
    check_count,
    check_divides,
    check_finite,
)
from hybrid_engine.rlhf.options.checks import option
from hybrid_engine.rlhf.options.shared import (
    PromptRunOptions,
    RolloutOptions,
    derive_minibatch,
)


@dataclass(frozen=True, kw_only=True)
class Config(RolloutOptions, PromptRunOptions):
    """Trains a language model by PPO: it answers prompts, the answers are scored, its weights follow the scores.

        hybrid-engine ppo --out runs/docs
        hybrid-engine ppo --model Qwen/Qwen3-0.6B --dataset prompts.jsonl --reward my_rewards:score --out runs/mine

    What is missing is made first: the actor by `hybrid-engine sft`, the reward model by `hybrid-engine reward`. Left
    below --out: metrics.jsonl (one line per step), plot.png, samples.json (answers before and after), result.json,
    checkpoints/, best/ (the weights that did best on held-out prompts) and actor/ (the last), both Hugging Face
    folders. After an interruption the same command with --resume goes on from the last checkpoint.
    """

    model: str | None = option(
        None,
        "Hugging Face name or folder of the first actor; default: the run's sft, trained if missing",
    )
    dataset: str | tuple[str, ...] | None = option(
        None,
        'prompts: a .jsonl, .json, .csv or .parquet file, a folder or a hub name, with a column "prompt"; default: '
        "the standard library's signatures",
    )
    minibatch_size: int = option(
        0,
        "responses of an optimizer step over all processes; 0: the largest number up to 32 that divides those of a "
        "step and that the processes share equally",
    )
    micro_batch_size: int = 16
    ppo_epochs: int = option(2, "passes over each rollout")
    temperature: float = 0.8
    actor_lr: float | None = option(
        None,
        "peak learning rate of the actor; default: 1e-4, with --model 1e-6, of an adapter on it 1e-5",
    )
    critic_lr: float | None = option(None, "peak learning rate of the critic; default: 5e-4, with --model 1e-5")
    kl_coef: float = option(0.07, "weight of the KL penalty in the reward, per nat")
    gamma: float = option(1.0, "discount of later rewards")
    lam: float = option(0.95, "lambda of generalised advantage estimation")
    clip: float = option(0.2, "how far the probability ratio counts from 1")
    value_clip: float = option(0.5, "how far a value counts from the one at the rollout")
    missing_eos_penalty: float = option(
        0.0,
        "what is taken off the reward of a response that was cut off at max_new_tokens",
    )
    missing_eos_score: float | None = option(
        None,
        "deprecated; removed in the next version: score of a cut-off response, in place of the reward",
    )
    kl_bound: float = option(
        6.0,
        "mean KL to the reference, in nats per response, that the held-out prompts should stay under",
    )
    shared_base: bool = option(
        False,
        "keep one frozen base for all roles, each an adapter on it: actor, critic and reward models; needs --lora-rank",
    )

    def __post_init__(self) -> None:
        PromptRunOptions.__post_init__(self)
        RolloutOptions.__post_init__(self)
        derive_minibatch(self, self.rollout_size, 32)
        check_shared_base(self)
        for name in ("minibatch_size", "ppo_epochs"):
            check_count(name, getattr(self, name), 1)
        for name in ("kl_coef", "kl_bound", "missing_eos_penalty"):
            check_at_least(name, getattr(self, name), 0)
        for name in ("actor_lr", "critic_lr", "clip", "value_clip"):
            check_above(name, getattr(self, name), 0)
        for name in ("gamma", "lam"):
            check_between(name, getattr(self, name), 0, 1)
        if self.missing_eos_score is not None:
            check_finite("missing_eos_score", self.missing_eos_score)
            if self.missing_eos_penalty:
                raise ValueError(
                    f"--missing-eos-score={self.missing_eos_score} takes the place of the reward that "
                    f"--missing-eos-penalty={self.missing_eos_penalty} is taken off; give the penalty alone"
                )
        check_divides("rollout_size", self.rollout_size, self.minibatch_size)

    @property
    def num_updates(self) -> int:
        """Optimizer steps of the whole run."""
        return self.steps * self.ppo_epochs * (self.rollout_size // self.minibatch_size)


def check_shared_base(config: "Config") -> None:
    """Raises ValueError for roles on one base without adapters, or in exact mode."""
    if config.shared_base and not config.lora_rank:
        raise ValueError("--shared-base: the roles are adapters on one base; give --lora-rank, such as --lora-rank 8")
    if config.shared_base and config.exact:
        raise ValueError("--exact computes one role's forward pass; leave it out, or --shared-base")
