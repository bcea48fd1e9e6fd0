"""Options of `hybrid-engine generate`."""

from dataclasses import dataclass

from hybrid_engine.config.checks import check_at_least, check_between, check_count, flag
from hybrid_engine.rlhf.options.checks import LARGEST_SEED, option
from hybrid_engine.rlhf.options.columns import DataSource, template_columns
from hybrid_engine.rlhf.options.shared import DtypeOptions, RowOptions

TERMINAL = "-"
"""The name that stands for the terminal in place of a file."""
FOR_FILES = ("split", "dataset_config", "columns")
"""Options that have no meaning for lines that are typed."""


@dataclass(frozen=True, kw_only=True)
class BaseModelOptions(DtypeOptions):
    """Options of the model that answers, without its adapters."""

    model: str | None = option(None, "Hugging Face name or folder of the model")
    chat_template: str | None = option(None, "A .jinja file that replaces the tokenizer's chat template")

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("--model is missing; say which model to answer with")
        DtypeOptions.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(BaseModelOptions):
    """Options of the model that answers, with an adapter."""

    adapter: str | None = option(None, "Folder of a peft adapter to merge into the weights")


@dataclass(frozen=True, kw_only=True)
class Config(RowOptions, ModelOptions):
    """Answers prompts, from a file into a file or in the terminal.

        hybrid-engine generate --model runs/sums/actor --prompts problems.jsonl --out answers.jsonl
        hybrid-engine generate --model Qwen/Qwen3-0.6B --prompts - --out -

    Writes one line per prompt to --out, in the order of the prompts: its columns and "responses". After an
    interruption, the same command continues with the remaining prompts. At the end it prints the tokens per second; in
    the terminal it prints only the answers.
    """

    prompts: str | None = option(
        None,
        'A .jsonl, .json, .csv or .parquet file, a folder or a hub name, with a column "prompt" of texts or '
        "conversations; - reads one prompt per line from the terminal",
    )
    out: str | None = option(None, "Output .jsonl file; - streams the answers to the terminal")
    num_samples: int = option(1, "Answers per prompt")
    max_new_tokens: int = option(256, "Maximum answer length in tokens")
    temperature: float = option(1.0, "Sampling temperature; 0 is greedy")
    top_k: int = option(0, "Sample from the k most likely tokens; 0: all tokens")
    top_p: float = option(1.0, "Sample from the most likely tokens whose probabilities sum to p")
    seed: int = option(0, "Random seed; an answer depends only on the seed, its prompt and its number")
    max_running: int | None = option(None, "Maximum answers decoded at once; default: as in a rollout")
    tp: int = option(1, "Tensor-parallel size: processes that share each layer; start them with torchrun")
    pp: int = option(1, "Pipeline-parallel size: stages that share the layers, each on --tp processes")
    restart: bool = option(False, "Start over; an earlier result is moved aside")

    def __post_init__(self) -> None:
        RowOptions.__post_init__(self)
        ModelOptions.__post_init__(self)
        for name in ("prompts", "out"):
            if not getattr(self, name):
                raise ValueError(f"--{name} is missing; name a file, or - for the terminal")
        for name in ("num_samples", "max_new_tokens", "max_running", "tp", "pp"):
            check_count(name, getattr(self, name), 1)
        check_count("top_k", self.top_k, 0)
        check_at_least("temperature", self.temperature, 0)
        check_between("seed", self.seed, 0, LARGEST_SEED)
        if self.prompts == TERMINAL:
            check_row_options(self)
        if self.is_shared and TERMINAL in (self.prompts, self.out):
            raise ValueError(
                f"--tp={self.tp} --pp={self.pp}: several processes only read and write files; name files, not -"
            )

    @property
    def source(self) -> DataSource:
        """The source of the prompts."""
        return self.source_of(str(self.prompts), option="prompts")

    @property
    def is_shared(self) -> bool:
        """Whether several processes share the model."""
        return self.tp * self.pp > 1


def check_row_options(options: RowOptions) -> None:
    """Raises ValueError for an option that needs columns where the prompts are lines of the terminal."""
    for name in FOR_FILES:
        if value := getattr(options, name):
            shown = " ".join(value) if isinstance(value, tuple) else value
            raise ValueError(
                f"{flag(name)}={shown!r} needs a dataset, but --prompts={TERMINAL!r} reads one prompt per line; leave "
                "it out, or name a file"
            )
    template = options.source_of(TERMINAL, option="prompts").prompt_template
    if template is not None and template_columns(template) != {"prompt"}:
        raise ValueError(
            f"--prompt-template={options.prompt_template!r} must name {{prompt}} and no other column, because "
            f"--prompts={TERMINAL!r} reads only prompts; change it, or name a file"
        )
