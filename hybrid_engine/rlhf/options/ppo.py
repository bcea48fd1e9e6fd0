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
    """Trains a language model with PPO: the model answers prompts, and updates increase the rewards of its answers.

        hybrid-engine ppo --out runs/docs
        hybrid-engine ppo --model Qwen/Qwen3-0.6B --dataset prompts.jsonl --reward my_rewards:score --out runs/mine

    Missing models are trained first: the actor by `hybrid-engine sft`, the reward model by `hybrid-engine reward`.
    Writes to --out: metrics.jsonl (one line per step), plot.png, samples.json (answers before and after), result.json,
    checkpoints/, best/ (the best weights on held-out prompts) and actor/ (the final weights), both Hugging Face
    folders. --resume continues an interrupted run from its last checkpoint.
    """

    model: str | None = option(
        None,
        "Hugging Face name or folder of the initial actor; default: the run's sft, trained if missing",
    )
    dataset: str | tuple[str, ...] | None = option(
        None,
        'Prompts: a .jsonl, .json, .csv or .parquet file, a folder or a hub name, with a column "prompt"; default: the '
        "standard library's signatures",
    )
    minibatch_size: int = option(
        0,
        "Responses per optimizer step, over all processes; 0: the largest divisor of a step's responses, up to 32, "
        "that the processes share equally",
    )
    micro_batch_size: int = 16
    ppo_epochs: int = option(2, "Passes over each rollout")
    temperature: float = 0.8
    actor_lr: float | None = option(
        None,
        "Peak learning rate of the actor; default: 1e-4, with --model 1e-6, for an adapter on it 1e-5",
    )
    critic_lr: float | None = option(None, "Peak learning rate of the critic; default: 5e-4, with --model 1e-5")
    kl_coef: float = option(0.07, "Coefficient of the KL penalty in the reward, per nat")
    gamma: float = option(1.0, "Discount factor of rewards")
    lam: float = option(0.95, "Lambda of generalized advantage estimation (GAE)")
    clip: float = option(0.2, "Clip range of the probability ratio around 1")
    value_clip: float = option(0.5, "Clip range of a value around its value at the rollout")
    missing_eos_penalty: float = option(
        0.0,
        "Penalty subtracted from the reward of a response that was cut off at --max-new-tokens",
    )
    missing_eos_score: float | None = option(
        None,
        "Deprecated, removed in the next version: score of a cut-off response, instead of its reward",
    )
    kl_bound: float = option(
        6.0,
        "Bound on the mean KL to the reference on held-out prompts, in nats per response; the run reports whether it "
        "is exceeded",
    )
    shared_base: bool = option(
        False,
        "Share one frozen base between all roles, each an adapter on it: actor, critic and reward models; needs "
        "--lora-rank",
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
                    f"--missing-eos-score={self.missing_eos_score} replaces the reward from which "
                    f"--missing-eos-penalty={self.missing_eos_penalty} is subtracted; give only the penalty"
                )
        check_divides("rollout_size", self.rollout_size, self.minibatch_size)

    @property
    def num_updates(self) -> int:
        """Optimizer steps of the whole run."""
        return self.steps * self.ppo_epochs * (self.rollout_size // self.minibatch_size)


def check_shared_base(config: "Config") -> None:
    """Raises ValueError for roles on one base without adapters, or in exact mode."""
    if config.shared_base and not config.lora_rank:
        raise ValueError("--shared-base needs adapters on the base; give --lora-rank, such as --lora-rank 8")
    if config.shared_base and config.exact:
        raise ValueError("--exact does not support --shared-base; leave one of them out")
