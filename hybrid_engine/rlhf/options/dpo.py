"""Options of `hybrid-engine dpo`."""

from dataclasses import dataclass

from hybrid_engine.config.checks import check_count
from hybrid_engine.rlhf.options.checks import option
from hybrid_engine.rlhf.options.preference import PairLossOptions, PreferenceOptions


@dataclass(frozen=True, kw_only=True)
class Config(PairLossOptions, PreferenceOptions):
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
