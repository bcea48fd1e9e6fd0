"""Options of `hybrid-engine generate`, `evaluate` and `serve`, which answer and train nothing."""

import os
from dataclasses import dataclass
from pathlib import Path

from hybrid_engine.config.checks import (
    LARGEST_SEED,
    LARGEST_SIZE,
    check_at_least,
    check_between,
    check_count,
    check_finite,
    check_one_of,
    check_texts,
    flag,
    option,
)
from hybrid_engine.rlhf.options.columns import DataSource, template_columns
from hybrid_engine.rlhf.options.shared import LENGTHS, DatasetOptions, DtypeOptions, RewardOptions, RowOptions

TERMINAL = "-"
"""The name that stands for the terminal in place of a file."""
FOR_FILES = ("split", "dataset_config", "columns")
"""Options that have no meaning for lines that are typed."""
KEY_VARIABLE = "HYBRID_ENGINE_API_KEY"


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
class GenerateConfig(RowOptions, ModelOptions):
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


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(RewardOptions, DatasetOptions, DtypeOptions):
    """Evaluates a model: the model answers each prompt of a dataset several times, and rewards score the answers.

        hybrid-engine evaluate --model runs/docs/actor --dataset problems.jsonl --reward number -k 8
        hybrid-engine evaluate --model Qwen/Qwen3-0.6B --dataset prompts.jsonl --reward my_rewards:score --out runs/mine

    Prints pass@1, pass@k and the mean score with 95% confidence intervals by prompt, and some answers. Writes to
    --out: config.yaml, result.json and samples.jsonl (every answer with its scores).
    """

    model: str | None = option(None, "Hugging Face name or folder of the model")
    dataset: str | tuple[str, ...] | None = option(
        None,
        'Prompts: a .jsonl, .json, .csv or .parquet file, a folder or a hub name, with a column "prompt" and the '
        "columns that the rewards read",
    )
    reward_time_limit: float = option(300.0, "Time limit of one reward call, in seconds, for up to 64 prompts")
    k: int | None = option(
        None,
        "The k of pass@k: the probability that one of k answers passes; default: 8, at --temperature 0 1",
    )
    num_samples: int | None = option(None, "Answers per prompt, at least k; more make pass@k more precise; default: k")
    threshold: float = option(1.0, "Minimum score of an answer that passes")
    out: str = option("runs/evaluation", "Output folder")
    seed: int = option(20_257, "Random seed of sampling; the default is that of the recipes' own evaluations")
    restart: bool = option(
        False,
        "Start over; the results of an earlier evaluation are moved to previous-1 (or the next number) inside --out",
    )
    max_prompts: int | None = option(None, "Use only the first N prompts")
    held_out: bool = option(
        False,
        "Use only the prompts that training on this dataset holds out, with the same --held-out-share and --row-key; "
        "after training with --held-out-split or --held-out-dataset, give those as --split or --dataset instead",
    )
    max_prompt_tokens: int = option(
        0,
        "Maximum prompt length in tokens; longer prompts lose their beginning; 0: the longest in the data, within the "
        "model's positions",
    )
    max_new_tokens: int = option(
        0,
        "Maximum answer length in tokens; 0: what the longest prompt leaves of the model's positions, at most 4096",
    )
    temperature: float = option(1.0, "Sampling temperature; 0 is greedy, with one answer per prompt")
    max_running: int = option(0, "Maximum answers decoded at once on each process; 0: chosen for the device")
    rows_per_pass: int = option(0, "Maximum answers that a reward model scores at once; 0: 64")

    def __post_init__(self) -> None:
        for name in ("model", "dataset", "reward"):
            if not getattr(self, name):
                raise ValueError(f"--{name} is missing; say which {name} to evaluate with")
        RewardOptions.__post_init__(self)
        DatasetOptions.__post_init__(self)
        check_texts(self)
        for name in LENGTHS:
            check_count(name, getattr(self, name), 0)
        check_count("k", self.k, 1)
        check_at_least("temperature", self.temperature, 0)
        if not self.temperature and max(self.pass_k, self.num_samples or 1) > 1:
            raise ValueError(
                "--temperature=0 gives the same answer to a prompt every time; leave -k and --num-samples out, or "
                "raise it"
            )
        check_count("max_prompts", self.max_prompts, 1)
        check_count("num_samples", self.num_samples, self.pass_k)
        for name in ("rows_per_pass", "max_running"):
            check_count(name, getattr(self, name), 0)
        check_between("seed", self.seed, 0, LARGEST_SEED)
        check_finite("threshold", self.threshold)
        DtypeOptions.__post_init__(self)

    @property
    def tokens_in_pass(self) -> int:
        """0: no pass limits the tokens of a prompt with its answer."""
        return 0

    @property
    def pass_k(self) -> int:
        """The k of pass@k."""
        return self.k or (8 if self.temperature else 1)


@dataclass(frozen=True, kw_only=True)
class ServeConfig(BaseModelOptions):
    """Serves a model over an OpenAI-compatible API, until Ctrl-C or SIGTERM.

        hybrid-engine serve --model runs/sums/actor
        hybrid-engine serve --model Qwen/Qwen3-0.6B --adapter runs/mine/adapter --port 8001

    Endpoints: /v1/completions, /v1/chat/completions, /v1/models, /health and /metrics (docs/serving.md). At shutdown,
    running requests are finished first.
    """

    adapter: tuple[str, ...] = option(
        (),
        "Folders of peft adapters, or NAME=FOLDER; each is served as its own model next to the base model",
    )
    host: str = option("127.0.0.1", "Address to listen on; any address except this machine's loopback needs an API key")
    port: int = option(8000, "Port to listen on; 0 picks a free port")
    api_key: str | None = option(
        None,
        "Key that clients must send; safer in the environment variable HYBRID_ENGINE_API_KEY, which other users cannot "
        "see",
    )
    api_key_file: str | None = option(
        None,
        "File with a line NAME KEY for each client, or NAME KEY metrics for one that may only read /metrics; SIGHUP "
        "reloads it",
    )
    allow_host: tuple[str, ...] = option(
        (),
        "Additional host names that requests without a key may use, such as those of forwarded ports and containers",
    )
    allow_origin: tuple[str, ...] = option(
        (),
        "Origins of web pages that may send requests, such as https://chat.example",
    )
    model_name: str | None = option(None, "Name of the model for clients; default: the last part of --model")
    tool_call_parser: str = option(
        "auto",
        "Parser of tool calls in answers: hermes, llama3, mistral, qwen3_coder, gpt_oss, glm, deepseek, tokenizer (by "
        "its response_template), none, or auto (by the chat template)",
    )
    longest: int | None = option(
        None,
        "Maximum length of a prompt with its answer, in tokens; default: as much as the model and the memory allow",
    )
    max_running: int | None = option(None, "Maximum answers decoded at once; default: as in a rollout")
    memory: str | None = option(
        None,
        "KV cache memory: a size such as 6GiB, or a fraction of what the model leaves free, limited to what "
        "--max-running answers of --longest tokens need; default: 0.5 on a CPU, 0.9 on a GPU",
    )
    max_waiting: int = option(1024, "Maximum queued answers; further requests are told to retry")
    max_session_bytes: int = option(2147483648, "Memory for stored conversations; the oldest are evicted")
    stall_seconds: float = option(
        30.0,
        "Disconnect a client that reads less than 4 KiB of a waiting answer in this many seconds",
    )
    finish_seconds: float = option(60.0, "Time limit for running requests at shutdown; clients get an error after it")
    tp: int = option(
        1,
        "Tensor-parallel size: processes that share each layer; start them with torchrun; the first one listens",
    )
    pp: int = option(1, "Pipeline-parallel size: stages that share the layers, each on --tp processes")

    def __post_init__(self) -> None:
        from hybrid_engine.generation.memory import read_memory  # imports torch, as others do
        from hybrid_engine.serving.parsers import PARSERS
        from hybrid_engine.serving.sessions import size_of
        from hybrid_engine.serving.web.access import Keys, Pages, check_address

        super().__post_init__()
        check_between("port", self.port, 0, 65535)
        check_one_of("tool_call_parser", self.tool_call_parser, PARSERS)
        for name in ("max_waiting", "max_running", "tp", "pp"):
            check_count(name, getattr(self, name), 1)
        check_count("longest", self.longest, 2)  # a prompt and its answer
        check_count("max_session_bytes", self.max_session_bytes, size_of(1, 1, 0).num_bytes, LARGEST_SIZE)
        check_at_least("stall_seconds", self.stall_seconds, 0.1)
        read_memory(self.memory, "cpu")
        if self.api_key_file is not None and self.api_key is None and self.key is not None:
            raise ValueError(
                f"{KEY_VARIABLE} is set and --api-key-file is given; put the key into the file and unset the variable, "
                "or leave the file out"
            )
        check_at_least("finish_seconds", self.finish_seconds, 0)
        has_keys = bool(Keys(self.key, self.api_key_file))
        check_address(self.host, has_keys=has_keys)
        Pages(self.allow_host, self.allow_origin).check_needed(has_keys=has_keys)

    @property
    def key(self) -> str | None:
        """The key that clients must send; None: no key, or one of the file."""
        if self.api_key is not None:
            return self.api_key
        key = os.environ.get(KEY_VARIABLE)
        if key is not None and not key.strip():
            raise ValueError(f"{KEY_VARIABLE} is set and empty; give it a secret, or unset it")
        return key

    @property
    def name(self) -> str:
        """The model name for clients."""
        return self.model_name or Path(str(self.model)).name
