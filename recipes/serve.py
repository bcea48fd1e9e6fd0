"""Serves a model over an OpenAI-compatible API, until Ctrl-C.

hybrid-engine serve --model runs/sums/actor

curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
  -d '{"model": "actor", "prompt": "384+697=", "max_tokens": 40}'

torchrun --nproc-per-node 2 -m hybrid_engine.cli.cli serve --model Qwen/Qwen3-8B --tp 2
"""

import atexit
import contextlib
import gc
import os
import signal
import threading
from types import FrameType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

from hybrid_engine.containers import InferenceModel, UnsupportedModelError
from hybrid_engine.containers.device import free_and_total_bytes
from hybrid_engine.distributed.processes import default_device, on_rank_zero
from hybrid_engine.generation.live.opening import count_tokens
from hybrid_engine.generation.memory import BLOCK_SIZE, NEEDED_SLOTS, read_memory
from hybrid_engine.rlhf.experience.answering import (
    join,
    load_shared,
    load_with_adapters,
    most_tokens,
    peft_names,
    read_adapters,
)
from hybrid_engine.rlhf.options.answering import ServeConfig as Config
from hybrid_engine.rlhf.runs.engine_config import torch_dtype
from hybrid_engine.rlhf.runs.run_log import say
from hybrid_engine.rlhf.runs.stages import explained, load_config
from hybrid_engine.serving import import_serving
from hybrid_engine.serving.sessions import size_of
from hybrid_engine.serving.web.access import check_free

SECONDS_TO_END = 4.5
"""Seconds after `--finish-seconds` at which the process ends, however long a pass of the model takes."""


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
        tell(f"serving {', '.join((server.name, *adapters))} at {server.url}; Ctrl-C stops it")
        server.wait(ending)
        tell(f"stopping: finishing {server.num_running} answers first; Ctrl-C again drops them")


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
    if config.tp * config.pp == 1:
        check_memory(config, first)


def check_memory(config: Config, first: PretrainedConfig) -> None:
    """Raises ValueError if --memory has no room for one request, or exceeds the free memory.

    A share is of the memory that is free before the weights are read, so it is at least what it will be.
    """
    with torch.device("meta"), explained("model", str(config.model)):
        model = AutoModelForCausalLM.from_config(first, trust_remote_code=False)
    try:
        containers, dtype = InferenceModel(model), torch_dtype(config.dtype)
    except UnsupportedModelError:
        return  # the model's own generate() allocates memory as it runs
    device = default_device()
    free = read_memory(config.memory, device.type).of(free_and_total_bytes(device)[0])
    for_blocks = free // (len(config.adapter) + 1) - NEEDED_SLOTS * containers.bytes_per_slot(dtype)
    held = count_tokens(containers.bytes_per_block(BLOCK_SIZE, dtype), BLOCK_SIZE, for_blocks, 0)
    longest = config.longest or 2
    if held < longest:
        memory = f"--memory={config.memory}" if config.memory is not None else f"the free memory, {free:,} bytes of it,"
        raise ValueError(
            f"{memory} holds keys and values of {held} tokens for each model that is served, and a "
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
