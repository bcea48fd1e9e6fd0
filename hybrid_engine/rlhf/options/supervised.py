"""Options of `hybrid-engine sft` and `reward`, which learn from given answers."""

from dataclasses import dataclass

from hybrid_engine.config.checks import check_above, check_at_least, check_count, check_divides, check_one_of, option
from hybrid_engine.rlhf.options.shared import DataOptions, TrainingOptions

TASKS = ("docs", "sums", "calculator")
"""Tasks that need no dataset; `tasks/corpus.py` has their rows."""
LARGEST_SIZE = 10**9
"""Parameters; with their gradients and Adam's moments they take 16 GB."""


@dataclass(frozen=True, kw_only=True)
class SFTConfig(DataOptions, TrainingOptions):
    """Fine-tunes a model on the examples of a dataset; by default trains a small one to summarize signatures.

        hybrid-engine sft --out runs/docs
        hybrid-engine sft --model Qwen/Qwen3-0.6B --dataset chats.jsonl --out runs/mine

    A dataset needs the columns "messages", or "prompt" and "completion" (text or lists of messages), or "text". Without
    one, the examples are the functions of Python's own standard library; nothing is downloaded. Writes to --out: sft/
    (the model and its tokenizer), a Hugging Face folder, sft-log/ (metrics) and, with --eval-every, sft-best/ (the
    model with the lowest held-out loss).
    """

    out: str = option("runs/docs", "Output folder; this stage writes its subfolders sft, sft-log and sft-checkpoints")
    model: str | None = option(
        None,
        "Hugging Face name or folder of the model to fine-tune; default: a small Llama, trained from scratch",
    )
    dataset: str | tuple[str, ...] | None = option(
        None,
        "Examples: a .jsonl, .json, .csv or .parquet file, a folder or a hub name; default: the standard library's "
        "signatures and summaries",
    )
    task: str = option(
        "docs",
        "Task without --dataset: docs (signatures and summaries), sums (additions by a pupil who forgets the carry) or "
        "calculator (conversations of a pupil who may use a calculator); sums and calculator use character tokens",
    )
    chat_template: str | None = option(
        None,
        "File with a Jinja chat template, for a tokenizer that has none or to replace its own",
    )
    max_tokens: int | None = option(None, "Maximum length of an example in tokens; default: the model's positions")
    seed: int = option(0, "Random seed of the initial weights and the order of the examples")
    save_every: int = option(500, "Steps between checkpoints, with one after the last step; 0 saves none")
    eval_every: int = option(
        0,
        "Steps between evaluations of the held-out loss; the best model is kept; 0 evaluates only at the end",
    )
    vocab_size: int = option(2048, "Size of the BPE vocabulary, without --model")
    hidden_size: int = option(192, "Hidden size of the model without --model; a multiple of 64, two heads of 32")
    num_layers: int = option(5, "Transformer layers, without --model")
    epochs: int | None = option(None, "Passes over the training examples; default: 2, with --model 1")
    batch_size: int = option(16, "Examples per optimizer step, over all processes")
    micro_batch_size: int = option(16, "Maximum examples per forward pass on each process")
    group_by_length: bool = option(
        True,
        "Batch examples of similar length, which saves padding; turn it off if length correlates with content: steps "
        "that alternate between kinds of examples keep a small model from learning any",
    )
    learning_rate: float | None = option(
        None,
        "Peak learning rate; default: 1.5e-3, with --model 2e-5, for an adapter 2e-4",
    )
    max_examples: int = option(0, "Use only this many training examples; 0 uses all")

    def __post_init__(self) -> None:
        TrainingOptions.__post_init__(self)
        DataOptions.__post_init__(self)
        for name in ("num_layers", "epochs", "batch_size", "micro_batch_size", "max_tokens"):
            check_count(name, getattr(self, name), 1)
        check_count("vocab_size", self.vocab_size, 300)
        for name in ("max_examples", "eval_every"):
            check_count(name, getattr(self, name), 0)
        check_above("learning_rate", self.learning_rate, 0)
        check_count("hidden_size", self.hidden_size, 1)
        check_divides("hidden_size", self.hidden_size, 64)
        check_size(self.vocab_size, self.hidden_size, self.num_layers)
        check_one_of("task", self.task, TASKS)
        if self.eval_every and self.dataset and not self.held_out_share and self.source.held_out_source is None:
            raise ValueError(f"--eval-every={self.eval_every} has no held-out rows; raise --held-out-share=0")
        if self.lora_rank and not self.model:
            raise ValueError(f"--lora-rank={self.lora_rank} needs a pretrained model; give --model")

    @property
    def num_epochs(self) -> int:
        """Passes over the training examples."""
        return self.epochs or (1 if self.model else 2)

    @property
    def run_length(self) -> int:
        """Passes over the training examples; `epochs` may be open."""
        return self.num_epochs

    @property
    def peak_learning_rate(self) -> float:
        """The highest learning rate of the schedule."""
        return self.learning_rate or (2e-4 if self.lora_rank else 2e-5 if self.model else 1.5e-3)


def check_size(vocab_size: int, hidden_size: int, num_layers: int) -> None:
    """Raises ValueError if `build_small_llama` would make more than `LARGEST_SIZE` parameters."""
    num_parameters = 11 * num_layers * hidden_size**2 + 2 * vocab_size * hidden_size
    if num_parameters > LARGEST_SIZE:
        raise ValueError(
            f"--hidden-size={hidden_size} with --num-layers={num_layers} and --vocab-size={vocab_size} makes about "
            f"{num_parameters / 1e9:.0f}e9 parameters, which must be at most {LARGEST_SIZE / 1e9:.0f}e9; "
            "lower them, or give --model"
        )


@dataclass(frozen=True, kw_only=True)
class RewardConfig(DataOptions, TrainingOptions):
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
