"""Options of `hybrid-engine kto`."""

from dataclasses import dataclass

from hybrid_engine.config.checks import check_above, check_count
from hybrid_engine.rlhf.options.checks import option
from hybrid_engine.rlhf.options.preference import PreferenceOptions
from hybrid_engine.rlhf.options.shared import suitable_rate


@dataclass(frozen=True, kw_only=True)
class Config(PreferenceOptions):
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
        for name in ("desirable_weight", "undesirable_weight"):
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
