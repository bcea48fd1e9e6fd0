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
    """Serves a model at an OpenAI-compatible address, until Ctrl-C or SIGTERM.

        hybrid-engine serve --model runs/sums/actor
        hybrid-engine serve --model Qwen/Qwen3-0.6B --adapter runs/mine/adapter --port 8001

    /v1/completions, /v1/chat/completions, /v1/models, /health and /metrics (docs/serving.md). What runs at the end
    is finished first.
    """

    adapter: tuple[str, ...] = option(
        (),
        "folders of peft adapters, or NAME=FOLDER: each is a model of its own beside the base model",
    )
    host: str = option("127.0.0.1", "address to listen at; any but this machine's own needs an API key")
    port: int = option(8000, "port to listen at; 0 takes a free one")
    api_key: str | None = option(
        None,
        "what clients must send; better put into the environment as HYBRID_ENGINE_API_KEY, where no other user sees it",
    )
    api_key_file: str | None = option(
        None,
        "a file with a line NAME KEY for each client, or NAME KEY metrics for one that reads /metrics alone; SIGHUP "
        "reads it again",
    )
    allow_host: tuple[str, ...] = option(
        (),
        "names by which requests without a key may call this machine, beside its own: of forwarded ports and "
        "containers",
    )
    allow_origin: tuple[str, ...] = option((), "origins of web pages that may ask, such as https://chat.example")
    model_name: str | None = option(None, "what clients call the model; default: the last part of --model")
    tool_call_parser: str = option(
        "auto",
        "how calls of tools are found in answers: hermes, llama3, mistral, tokenizer (as its response_template says), "
        "none, or auto: what the chat template shows",
    )
    longest: int | None = option(
        None,
        "tokens of a prompt and its answer together; default: as many as the model takes and memory holds",
    )
    max_running: int | None = option(None, "answers at once; default: as many as in a rollout")
    memory: str | None = option(
        None,
        "for keys and values of answers: a size such as 6GiB, or a share of what is free beside the model; at most "
        "what --max-running answers of --longest tokens take is used; default: 0.5 on a CPU, 0.9 on a GPU",
    )
    max_waiting: int = option(1024, "answers that may wait to begin; more are told to come again")
    max_session_bytes: int = option(
        2147483648,
        "memory of the conversations that are remembered; the oldest are forgotten",
    )
    stall_seconds: float = option(
        30.0,
        "a client that takes less than 4 KiB in so many seconds of an answer that waits for it is dropped",
    )
    finish_seconds: float = option(60.0, "what runs at the end may take so long; then its clients get an error")
    tp: int = option(1, "processes that share each layer; torchrun starts them, and the first one is asked")
    pp: int = option(1, "stages that the layers are dealt out to, each on --tp processes")

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
                f"{KEY_VARIABLE} is set and --api-key-file is given; put the key into the file and unset the one, or "
                "leave out the other"
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
