"""Options of `hybrid-engine agent`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybrid_engine.config.checks import LARGEST_SIZE, check_above, check_at_least, check_count, flag
from hybrid_engine.rlhf.options.algorithm import Algorithm
from hybrid_engine.rlhf.options.checks import check_answers, option
from hybrid_engine.rlhf.options.shared import RolloutOptions, RolloutRunOptions

if TYPE_CHECKING:
    from hybrid_engine.serving.sessions import Size

NOT_OF_EPISODES = ("dynamic_sampling", "overlong_buffer", "mask_cut_off")
"""Choices of an algorithm that concern single answers to prompts."""
MAX_TURNS = 3
"""Answers of a conversation without a detour."""
MESSAGES_BYTES = 2**14
"""Bytes of a conversation's messages, as Python objects."""


@dataclass(frozen=True, kw_only=True)
class Config(RolloutOptions, RolloutRunOptions):
    """Trains a language model on multi-turn episodes, in which it learns to use a calculator.

        hybrid-engine agent

    Without --model, a small model that sometimes uses the calculator and often guesses is trained first. Writes to
    --out: config.yaml, metrics.jsonl (one line per step), plot.png, result.json and actor/, a Hugging Face folder.
    """

    OWN_LENGTHS = (256, 24)

    out: str = "runs/agent"
    model: str | None = option(
        None,
        "Hugging Face name or folder of the initial actor; default: one trained on a pupil's conversations",
    )
    steps: int = 20
    rollout_size: int = option(32, "Problems per step")
    group_size: int = option(8, "Episodes per problem")
    num_clients: int = option(32, "Concurrent episodes")
    max_prompt_tokens: int = option(0, "Maximum tokens before the last answer; 0: what the turns before it can need")
    max_new_tokens: int = option(
        0,
        "Maximum length of an answer, per turn, in tokens; 0: 256, or what the model's positions allow (24 without "
        "--model)",
    )
    serving_memory: str | None = option(
        None,
        "KV cache memory while episodes run: a size such as 6GiB, or a fraction of the free memory; default: 0.5 on a "
        "CPU, 0.9 on a GPU",
    )
    max_session_bytes: int | None = option(
        None,
        "Memory for the conversations of a step; default: 2 GiB, or more if the longest ones need it",
    )
    stall_seconds: float = option(
        30.0,
        "Disconnect a client that reads less than 4 KiB of a waiting answer in this many seconds",
    )
    learning_rate: float | None = option(
        None,
        "Peak learning rate; default: 1.5e-3, with --model 1e-6, for an adapter 1e-5",
    )
    algorithm: Algorithm = Algorithm()  # noqa: RUF009  frozen

    def __post_init__(self) -> None:
        from hybrid_engine.generation.memory import read_memory  # imports torch

        RolloutRunOptions.__post_init__(self)
        RolloutOptions.__post_init__(self)
        for name in ("group_size", "num_clients"):
            check_count(name, getattr(self, name), 1)
        if self.learning_rate is not None:
            check_above("learning_rate", self.learning_rate, 0)
        check_answers(self.rollout_size, self.group_size)
        read_memory(self.serving_memory, "cpu", "serving_memory")
        check_at_least("stall_seconds", self.stall_seconds, 0.1)
        check_count("max_session_bytes", self.max_session_bytes, 1, LARGEST_SIZE)
        if self.max_session_bytes is not None and self.max_session_bytes < self.largest_step.num_bytes:
            raise ValueError(
                f"--max-session-bytes={self.max_session_bytes} is less than the {self.largest_step.num_bytes} that a "
                "step's conversations may need, all of which are trained on; raise it or leave it out"
            )
        self.algorithm.check_group_size("group_size", self.group_size)
        if self.algorithm.needs_reference:
            raise ValueError("--kl-place: agent has no reference model; leave it at none")
        for name in NOT_OF_EPISODES:
            if getattr(self.algorithm, name):
                raise ValueError(
                    f"{flag(name)}={getattr(self.algorithm, name)} applies to single answers, not to episodes; leave "
                    f"it out, or with --preset set it to {getattr(Algorithm, name)}"
                )

    @property
    def minibatch_size(self) -> int:
        """Episodes of an optimizer step."""
        return self.rollout_size * self.group_size

    @property
    def largest_step(self) -> "Size":
        """Memory of a step's conversations, or an evaluation's, with answers of the maximum length."""
        from hybrid_engine.serving.sessions import size_of

        num_answers = MAX_TURNS * max(self.minibatch_size, self.eval_prompts)
        num_tokens = num_answers * (self.max_prompt_tokens + self.max_new_tokens)
        return size_of(num_answers, num_tokens, num_answers * MESSAGES_BYTES)

    @property
    def server_options(self) -> dict[str, Any]:
        """Limits of the server for episodes, which stores all of a step's conversations."""
        from hybrid_engine.serving.sessions import MAX_SESSION_BYTES, MAX_SESSION_TOKENS

        return {
            "memory": self.serving_memory,
            "stall_seconds": self.stall_seconds,
            "max_session_bytes": self.max_session_bytes or max(MAX_SESSION_BYTES, self.largest_step.num_bytes),
            "max_session_tokens": max(MAX_SESSION_TOKENS, self.largest_step.num_tokens),
        }
