"""Options of `hybrid-engine serve`."""

import os
from dataclasses import dataclass
from pathlib import Path

from hybrid_engine.config.checks import LARGEST_SIZE, check_at_least, check_between, check_count, check_one_of
from hybrid_engine.rlhf.options.checks import option
from hybrid_engine.rlhf.options.generate import BaseModelOptions

KEY_VARIABLE = "HYBRID_ENGINE_API_KEY"


@dataclass(frozen=True, kw_only=True)
class Config(BaseModelOptions):
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
        "Parser of tool calls in answers: hermes, llama3, mistral, tokenizer (by its response_template), none, or auto "
        "(by the chat template)",
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
        from hybrid_engine.serving.access import Keys, Pages, check_address
        from hybrid_engine.serving.sessions import size_of
        from hybrid_engine.serving.tool_calls import PARSERS

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
