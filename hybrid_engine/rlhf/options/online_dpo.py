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
    beta: float = option(0.1, "Strength of the constraint to the reference")
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
        for name in ("beta", "learning_rate"):
            check_above(name, getattr(self, name), 0)
        check_count("group_size", self.group_size, 2)
        check_answers(self.rollout_size, self.group_size)
        check_divides("rollout_size", self.rollout_size, self.minibatch_size)
        longest = self.max_prompt_tokens + self.max_new_tokens
        check_budget_holds(self.tokens_per_micro_batch, 2 * longest, longest)
