"""Options of `hybrid-engine reward`."""

from dataclasses import dataclass

from hybrid_engine.config.checks import check_above, check_at_least, check_count
from hybrid_engine.rlhf.options.checks import option
from hybrid_engine.rlhf.options.shared import DataOptions, TrainingOptions


@dataclass(frozen=True, kw_only=True)
class Config(DataOptions, TrainingOptions):
    """Trains a reward model on preference pairs; by default on pairs of docstring summaries.

        hybrid-engine reward --out runs/docs
        hybrid-engine reward --model Qwen/Qwen3-0.6B --dataset pairs.jsonl --out runs/mine

    A dataset needs the columns "chosen" and "rejected" (text or lists of messages) and may have "prompt", which is
    otherwise their common beginning, and "margin". Without one, the better summary of a pair follows PEP 257. The
    model is a sequence classifier with one label on the body of --model, by default of sft/ in --out. Writes to --out:
    reward/, a Hugging Face folder, reward-log/ (metrics) and, with --eval-every, reward-best/ (the model with the
    highest held-out accuracy).
    """

    out: str = option(
        "runs/docs",
        "Output folder; this stage writes its subfolders reward, reward-log and reward-checkpoints",
    )
    model: str | None = option(
        None,
        "Hugging Face name or folder of the model whose body is trained; default: the run's sft",
    )
    dataset: str | tuple[str, ...] | None = option(
        None,
        "Preference pairs: a .jsonl, .json, .csv or .parquet file, a folder or a hub name; default: built from the "
        "standard library's summaries",
    )
    chat_template: str | None = option(
        None,
        "File with a Jinja chat template, for a tokenizer that has none or to replace its own",
    )
    max_tokens: int | None = option(
        None,
        "Maximum length of a prompt with its answer, in tokens; default: the model's positions",
    )
    seed: int = option(0, "Random seed of the pairs, their order and the head's initial weights")
    save_every: int = option(500, "Steps between checkpoints, with one after the last step; 0 saves none")
    eval_every: int = option(
        0,
        "Steps between evaluations of the held-out accuracy; the best model is kept; 0 evaluates only at the end",
    )
    epochs: int = option(1, "Passes over the pairs")
    batch_size: int = option(32, "Pairs per optimizer step, over all processes")
    micro_batch_size: int = option(32, "Maximum pairs per forward pass on each process")
    learning_rate: float | None = option(
        None,
        "Peak learning rate; default: 3e-4, with --model or --dataset 1e-5, for an adapter 2e-4",
    )
    center_coef: float = option(
        0.0,
        "Weight of the squared sum of a pair's scores in the loss, which centers scores at 0",
    )
    lora_rank: int = option(0, "Rank of the LoRA adapter to train together with the head; 0 trains all weights")
    max_examples: int = option(0, "Build pairs from only this many examples of the standard library; 0 uses all")
    max_pairs: int | None = option(
        None,
        "Train on a random sample of this many pairs; 0 uses all; default: 2560, with --dataset all",
    )

    def __post_init__(self) -> None:
        TrainingOptions.__post_init__(self)
        DataOptions.__post_init__(self)
        for name in ("epochs", "batch_size", "micro_batch_size", "max_tokens"):
            check_count(name, getattr(self, name), 1)
        for name in ("max_examples", "eval_every", "max_pairs"):
            check_count(name, getattr(self, name), 0)
        check_at_least("center_coef", self.center_coef, 0)
        check_above("learning_rate", self.learning_rate, 0)
        if self.eval_every and self.dataset and not self.held_out_share and self.source.held_out_source is None:
            raise ValueError(f"--eval-every={self.eval_every} has no held-out rows; raise --held-out-share=0")

    @property
    def num_pairs(self) -> int:
        """Pairs to train on; 0 for all."""
        return self.max_pairs if self.max_pairs is not None else 0 if self.dataset else 2560

    @property
    def peak_learning_rate(self) -> float:
        """The highest learning rate of the schedule."""
        return self.learning_rate or (2e-4 if self.lora_rank else 1e-5 if self.model or self.dataset else 3e-4)
