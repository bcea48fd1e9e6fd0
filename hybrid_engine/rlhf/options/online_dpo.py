"""Options of `hybrid-engine online-dpo`."""

from dataclasses import dataclass

from hybrid_engine.config.checks import check_above, check_count, check_divides
from hybrid_engine.rlhf.options.checks import check_answers, check_budget_holds, option
from hybrid_engine.rlhf.options.preference import PairLossOptions
from hybrid_engine.rlhf.options.shared import (
    PromptRunOptions,
    derive_minibatch,
)


@dataclass(frozen=True, kw_only=True)
class Config(PairLossOptions, PromptRunOptions):
    """Trains a language model by online DPO: of its own answers to a prompt the best becomes likelier than the worst.

        hybrid-engine online-dpo
        hybrid-engine online-dpo --model Qwen/Qwen3-0.6B --dataset problems.jsonl --reward math --out runs/mine

    Without --model a small one is made first that adds numbers and forgets the carry; without --reward an answer's is
    whether its sum is right. Left below --out: config.yaml, metrics.jsonl (one line per step), plot.png, samples.json
    (answers before and after), result.json, checkpoints/, best/ (the weights that did best on held-out prompts) and
    actor/ (the last), both Hugging Face folders. After an interruption the same command with --resume goes on from the
    last checkpoint.
    """

    HAS_RATIOS = False
    OWN_LENGTHS = (96, 48)
    ANSWERS_IN_PASS = 2
    out: str = "runs/online-dpo"
    model: str | None = option(
        None,
        "Hugging Face name or folder of the first actor, which is the reference too; default: one that adds numbers, "
        "trained if missing",
    )
    dataset: str | tuple[str, ...] | None = option(
        None,
        'prompts: a .jsonl, .json, .csv or .parquet file, a folder or a hub name, with a column "prompt" and what the '
        "rewards read; default: sums",
    )
    beta: float = option(0.1, "how strongly the actor is held to the reference")
    steps: int = 40
    group_size: int = option(4, "answers to each prompt, of which the best and the worst make a pair; at least 2")
    minibatch_size: int = option(
        0,
        "pairs of an optimizer step over all processes, those left out included; 0: the largest number up to 64 that "
        "divides those of a step and that the processes share equally",
    )
    micro_batch_size: int = option(32, "pairs of a forward pass on one process, at most")
    learning_rate: float | None = option(
        None,
        "peak of the learning rate; default: 3e-4, with --model 1e-6, of an adapter on it 1e-5",
    )
    exact: bool = option(
        False,
        "make the rollout's log-probabilities the trainer's to the bit, which takes longer (docs/exact.md)",
    )

    def __post_init__(self) -> None:
        PromptRunOptions.__post_init__(self)
        PairLossOptions.__post_init__(self)
        derive_minibatch(self, self.rollout_size, 64)
        check_count("minibatch_size", self.minibatch_size, 1)
        for name in ("beta", "learning_rate"):
            check_above(name, getattr(self, name), 0)
        check_count("group_size", self.group_size, 2)
        check_answers(self.rollout_size, self.group_size)
        check_divides("rollout_size", self.rollout_size, self.minibatch_size)
        longest = self.max_prompt_tokens + self.max_new_tokens
        check_budget_holds(self.tokens_per_micro_batch, 2 * longest, longest)
