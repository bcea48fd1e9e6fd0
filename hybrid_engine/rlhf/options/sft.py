"""Options of `hybrid-engine sft`."""

from dataclasses import dataclass

from hybrid_engine.config.checks import check_above, check_count, check_divides, check_one_of
from hybrid_engine.rlhf.options.checks import option
from hybrid_engine.rlhf.options.shared import DataOptions, TrainingOptions

TASKS = ("docs", "sums", "calculator")
"""Tasks that need no data set; `tasks/corpus.py` has their rows."""
LARGEST_SIZE = 10**9
"""Parameters; with their gradients and Adam's moments they take 16 GB."""


@dataclass(frozen=True, kw_only=True)
class Config(DataOptions, TrainingOptions):
    """Trains a model to write what a data set shows; by default a small one to summarise a function's signature.

        hybrid-engine sft --out runs/docs
        hybrid-engine sft --model Qwen/Qwen3-0.6B --dataset chats.jsonl --out runs/mine

    A data set has the columns "messages", or "prompt" and "completion" (text or lists of messages), or "text". Without
    one the examples are the functions of Python's own standard library; nothing is downloaded. The model and its
    tokenizer are left in sft/ below --out, a Hugging Face folder, the figures of the training in sft-log/, with
    --eval-every the model of the lowest held-out loss in sft-best/.
    """

    out: str = option(
        "runs/docs",
        "folder of the run; this stage writes its subfolders sft, sft-log and sft-checkpoints",
    )
    model: str | None = option(
        None,
        "Hugging Face name or folder of the model that goes on learning; default: a small Llama from nothing",
    )
    dataset: str | tuple[str, ...] | None = option(
        None,
        "examples: a .jsonl, .json, .csv or .parquet file, a folder or a hub name; default: the standard library's "
        "signatures and summaries",
    )
    task: str = option(
        "docs",
        "what is learned without --dataset: docs (signatures and summaries), sums (additions by a pupil who forgets "
        "the carry) or calculator (conversations of a pupil who may ask one); the tokens of both are characters",
    )
    chat_template: str | None = option(
        None,
        "file with a Jinja chat template for a tokenizer that has none, or another",
    )
    max_tokens: int | None = option(
        None,
        "tokens of the longest example that is let in; default: the model's positions",
    )
    seed: int = option(0, "seed of the initial weights and of the order of the examples")
    save_every: int = option(500, "a checkpoint every so many steps and after the last step; 0 saves none")
    eval_every: int = option(
        0,
        "steps between measurements of the held-out loss, the best model kept; 0 measures at the end alone",
    )
    vocab_size: int = option(2048, "tokens of the BPE vocabulary, without --model")
    hidden_size: int = option(192, "width of the model without --model; a multiple of 64, two heads of 32")
    num_layers: int = option(5, "transformer layers, without --model")
    epochs: int | None = option(None, "passes over the training examples; default: 2, with --model 1")
    batch_size: int = option(16, "examples of an optimizer step over all processes")
    micro_batch_size: int = option(16, "examples of a forward pass on one process, at most")
    group_by_length: bool = option(
        True,
        "examples of a step are alike in length, which saves padding; off where the length says what an example "
        "shows: steps that learn the one kind and then the other keep a small model from learning either",
    )
    learning_rate: float | None = option(
        None,
        "peak of the learning rate; default: 1.5e-3, with --model 2e-5, of an adapter 2e-4",
    )
    max_examples: int = option(0, "use only so many training examples; 0 uses all")

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
            raise ValueError(f"--eval-every={self.eval_every} has nothing to measure on; raise --held-out-share=0")
        if self.lora_rank and not self.model:
            raise ValueError(f"--lora-rank={self.lora_rank} adapts a model that has learned already; give --model")

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
            f"{num_parameters / 1e9:.0f}e9 parameters from nothing, which must be at most {LARGEST_SIZE / 1e9:.0f}e9; "
            "lower them, or give --model"
        )
