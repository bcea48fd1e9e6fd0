"""Serves a model at an OpenAI-compatible address, until Ctrl-C.

hybrid-engine serve --model runs/sums/actor

curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
  -d '{"model": "actor", "prompt": "384+697=", "max_tokens": 40}'

torchrun --nproc-per-node 2 -m hybrid_engine.cli.cli serve --model Qwen/Qwen3-8B --tp 2
"""

import atexit
import contextlib
import gc
import math
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

from hybrid_engine.containers import InferenceModel, UnsupportedModelError
from hybrid_engine.distributed.processes import default_device, on_rank_zero
from hybrid_engine.generation.live.opening import count_tokens
from hybrid_engine.generation.memory import free_and_total_bytes, read_memory
from hybrid_engine.generation.plan import BLOCK_SIZE
from hybrid_engine.rlhf.batch.models import (
    BaseModelOptions,
    join,
    load_shared,
    load_with_adapters,
    most_tokens,
    peft_names,
    read_adapters,
)
from hybrid_engine.rlhf.runs.checks import check_at_least, check_between, check_count, check_one_of
from hybrid_engine.rlhf.runs.precision import torch_dtype
from hybrid_engine.rlhf.runs.run_log import say
from hybrid_engine.rlhf.runs.stages import explained, load_config
from hybrid_engine.serving import import_serving
from hybrid_engine.serving.address import check_address, check_free
from hybrid_engine.serving.keys import Keys
from hybrid_engine.serving.pages import Pages
from hybrid_engine.serving.sessions import size_of
from hybrid_engine.serving.tool_calls import PARSERS

KEY_VARIABLE = "HYBRID_ENGINE_API_KEY"
SECONDS_TO_END = 4.5
"""Seconds after `--finish-seconds` at which the process ends, however long a pass of the model takes."""


@dataclass(frozen=True, kw_only=True)
class Config(BaseModelOptions):
    """Serves a model at an OpenAI-compatible address, until Ctrl-C or SIGTERM.

        hybrid-engine serve --model runs/sums/actor
        hybrid-engine serve --model Qwen/Qwen3-0.6B --adapter runs/mine/adapter --port 8001

    /v1/completions, /v1/chat/completions, /v1/models, /health and /metrics (docs/serving.md). What runs at the end
    is finished first.
    """

    adapter: tuple[str, ...] = ()
    """folders of peft adapters, or NAME=FOLDER: each is a model of its own beside the base model"""
    host: str = "127.0.0.1"
    """address to listen at; any but this machine's own needs an API key"""
    port: int = 8000
    """port to listen at; 0 takes a free one"""
    api_key: str | None = None
    """what clients must send; better put into the environment as HYBRID_ENGINE_API_KEY, where no other user sees it"""
    api_key_file: str | None = None
    """a file with a line NAME KEY for each client, or NAME KEY metrics for one that reads /metrics alone; SIGHUP reads
    it again"""
    allow_host: tuple[str, ...] = ()
    """names by which requests without a key may call this machine, beside its own: of forwarded ports and containers"""
    allow_origin: tuple[str, ...] = ()
    """origins of web pages that may ask, such as https://chat.example"""
    model_name: str | None = None
    """what clients call the model; default: the last part of --model"""
    tool_call_parser: str = "auto"
    """how calls of tools are found in answers: hermes, llama3, mistral, tokenizer (as its response_template says),
    none, or auto: what the chat template shows"""
    longest: int | None = None
    """tokens of a prompt and its answer together; default: as many as the model takes and memory holds"""
    max_running: int | None = None
    """answers at once; default: as many as in a rollout"""
    memory: str | None = None
    """for keys and values of answers: a size such as 6GiB, or a share of what is free beside the model; at most what
    --max-running answers of --longest tokens take is used; default: 0.5 on a CPU, 0.9 on a GPU"""
    max_waiting: int = 1024
    """answers that may wait to begin; more are told to come again"""
    max_session_bytes: int = 2147483648
    """memory of the conversations that are remembered; the oldest are forgotten"""
    stall_seconds: float = 30.0
    """a client that takes less than 4 KiB in so many seconds of an answer that waits for it is dropped"""
    finish_seconds: float = 60.0
    """what runs at the end may take so long; then its clients get an error"""
    tp: int = 1
    """processes that share each layer; torchrun starts them, and the first one is asked"""
    pp: int = 1
    """stages that the layers are dealt out to, each on --tp processes"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("port", self.port, 0, 65535)
        check_one_of("tool_call_parser", self.tool_call_parser, PARSERS)
        for name in ("max_waiting", "max_running", "tp", "pp"):
            check_count(name, getattr(self, name), 1)
        check_count("longest", self.longest, 2)  # a prompt and its answer
        check_count("max_session_bytes", self.max_session_bytes, size_of(1, 1, 0).num_bytes)
        check_at_least("stall_seconds", self.stall_seconds, 0.1)
        read_memory(self.memory, "cpu")
        if self.api_key_file is not None and self.api_key is None and self.key is not None:
            raise ValueError(
                f"{KEY_VARIABLE} is set and --api-key-file is given; put the key into the file and unset the one, or "
                "leave out the other"
            )
        check_at_least("finish_seconds", self.finish_seconds, 0)
        check_address(self.host, has_keys=bool(Keys(self.key, self.api_key_file)))
        Pages(self.allow_host, self.allow_origin)

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


def run(config: Config) -> None:
    """Serves until a signal ends it."""
    join(config.tp, config.pp, "serve")
    import_serving()  # first, because a model may take long to load
    on_rank_zero(lambda: check_free(config.host, config.port))
    check_limits(config)
    engine, tokenizer, adapters = load(config)
    tell(engine.report())
    ending = told_to_end(config.finish_seconds + SECONDS_TO_END)  # before the server is visible
    # Otherwise the interpreter would traverse all objects at exit, for four seconds on a busy machine, and no thread
    # could interrupt that.
    atexit.register(gc.freeze)
    with engine.serving(
        tokenizer,
        longest=config.longest,
        max_running=config.max_running,
        memory=config.memory,
        model_name=config.name,
        adapters=adapters,
        tool_call_parser=config.tool_call_parser,
        host=config.host,
        port=config.port,
        api_key=config.key,
        api_key_file=config.api_key_file,
        allow_hosts=config.allow_host,
        allow_origins=config.allow_origin,
        max_waiting=config.max_waiting,
        max_session_bytes=config.max_session_bytes,
        stall_seconds=config.stall_seconds,
        finish_seconds=config.finish_seconds,
    ) as server:
        reload_on_hangup(server)
        tell(f"serving {', '.join((server.name, *adapters))} at {server.url}; Ctrl-C ends it")
        server.wait(ending)
        tell(f"ending: {server.num_running} answers are finished first; Ctrl-C again drops them")


def check_limits(config: Config) -> None:
    """Raises ValueError if no request fits the limits, judged by the model's config before weights are read."""
    first = load_config(str(config.model))
    most = most_tokens(first)
    if config.longest is not None and config.longest > most:
        raise ValueError(
            f"--longest={config.longest} is more than the {most} tokens that --model={config.model} takes; lower it"
        )
    remembered = size_of(1, config.longest or most, 0).num_bytes
    if config.max_session_bytes < remembered:
        raise ValueError(
            f"--max-session-bytes={config.max_session_bytes} is less than the {remembered} that one conversation of "
            f"--longest={config.longest or most} tokens takes; raise the one or lower the other"
        )
    if config.memory is not None and config.tp * config.pp == 1:
        check_memory(config, first)


def check_memory(config: Config, first: PretrainedConfig) -> None:
    """Raises ValueError if --memory has no room for one request, or exceeds the free memory."""
    with torch.device("meta"), explained("model", str(config.model)):
        model = AutoModelForCausalLM.from_config(first, trust_remote_code=False)
    try:
        shape = InferenceModel(model).kv_shape(1, BLOCK_SIZE)
    except UnsupportedModelError:
        return  # the model's own generate() allocates memory as it runs
    device = default_device()
    free = read_memory(config.memory, device.type).of(free_and_total_bytes(device)[0])
    block_bytes = math.prod(shape) * torch_dtype(config.dtype).itemsize
    held = count_tokens(block_bytes, BLOCK_SIZE, free // (len(config.adapter) + 1), 0)
    longest = config.longest or 2
    if held < longest:
        raise ValueError(
            f"--memory={config.memory} holds keys and values of {held} tokens for each model that is served, and a "
            f"request may have --longest={longest}; raise the one or lower the other"
        )


def load(config: Config) -> tuple[Any, PreTrainedTokenizerBase, dict[str, str]]:
    """The engine, its tokenizer, and peft's names of the adapters by those of clients."""
    adapters = read_adapters(config.adapter, str(config.model), config.name)
    if config.tp * config.pp == 1:
        return load_with_adapters(config, adapters)
    names = peft_names(adapters)
    folders = {names[adapter.name]: adapter.folder for adapter in adapters}
    return *load_shared(config, config.tp, config.pp, folders), names


def tell(line: str) -> None:
    """Prints `line`; ignores a closed pipe or a full disk, so that the server continues."""
    with contextlib.suppress(OSError, SystemExit):  # Rich raises SystemExit for a closed pipe
        say(line)


def reload_on_hangup(server: Any) -> None:
    """Makes SIGHUP reload the key file; followers of a shared model have none."""
    if hasattr(signal, "SIGHUP") and hasattr(server, "reload_keys"):
        signal.signal(signal.SIGHUP, lambda number, frame: server.reload_keys())


def told_to_end(seconds: float | None = None) -> threading.Event:
    """An event that the first Ctrl-C or SIGTERM sets; the next signal ends the process at once.

    With `seconds` the process ends after that time at the latest: a pass of the model over a long prompt cannot be
    interrupted, and a blocked log may delay it.
    """
    ending = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def end(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)
        if seconds is not None:
            by_force = threading.Timer(seconds, os._exit, [0])
            by_force.daemon = True
            by_force.start()
        ending.set()

    for number in numbers:
        signal.signal(number, end)
    return ending
