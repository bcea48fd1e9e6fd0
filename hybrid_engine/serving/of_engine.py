"""Builds the server for an engine's model; finds name, tokenizer and end tokens where the model was loaded from."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hybrid_engine.generation.end_tokens import end_token_ids
from hybrid_engine.generation.live.opening import live_batch
from hybrid_engine.generation.live.shared import LiveLink
from hybrid_engine.generation.memory import read_memory
from hybrid_engine.generation.options import token_ids
from hybrid_engine.generation.rollout.generator import Generator
from hybrid_engine.serving.following import FollowingServer
from hybrid_engine.serving.keys import Keys
from hybrid_engine.serving.server import Server


def build_server(
    module: nn.Module,
    generator: Generator,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    longest: int | None,
    max_running: int | None,
    model_name: str | None,
    adapters: Mapping[str, str] | None = None,
    memory: float | str | None = None,
    **options: Any,
) -> Server | FollowingServer:
    """A Server that `start()` starts; `options` are its own. Collective if processes share the model.

    The first of these processes serves the model, and the others get a FollowingServer.

    Args:
        module: the unmodified transformers model.
        generator: runs the model.
        tokenizer: None loads it from the folder or hub name that the model was loaded from.
        longest, max_running: as `live_batch` takes them.
        model_name: None takes the last part of that folder or hub name, or "policy".
        adapters: maps names for clients to adapters of a `PeftModel`; None: the active adapter is the model.
        memory: for keys and values of the answers, as `read_memory` takes it.

    Raises:
        ValueError: there is no tokenizer, or an option is out of range.
    """
    source = str(getattr(module.config, "name_or_path", "") or "")
    vocab_size = module.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    link = LiveLink(generator.group, vocab_size) if generator.group.size > 1 else None
    name = model_name or Path(source).name or "policy"
    check_adapters(module, adapters or {}, name)
    shape = longest, max_running, link, tuple((adapters or {}).values())
    limit = read_memory(memory, generator.device.type)
    if memory is not None and generator.model is None:
        raise ValueError(
            f"memory={memory}: {generator.fallback_reason}, and the model's own generate() takes memory as it goes; "
            "leave it out"
        )
    opening = partial(live_batch, generator, *shape, memory=limit)

    def build() -> Server:
        defaults: Any = module.generation_config
        served = load_tokenizer(source) if tokenizer is None else tokenizer
        return Server(
            opening,
            name=name,
            tokenizer=served,
            vocab_size=vocab_size,
            end_tokens=end_token_ids(module, served),
            suppressed=token_ids("suppress_tokens", defaults.suppress_tokens, vocab_size),
            link=link,
            adapters=adapters,
            **options,
        )

    if link is None:
        return build()
    keys = Keys(options.get("api_key"), options.get("api_key_file"))
    return link.led(build) or FollowingServer(opening, link, name=name, keys=keys)


def check_adapters(module: nn.Module, adapters: Mapping[str, str], model_name: str) -> None:
    """Raises ValueError if `adapters`, which maps clients' names to peft's, cannot be served with the base model."""
    known = list(getattr(module, "peft_config", {}))
    for name, adapter in adapters.items():
        if adapter not in known:
            raise ValueError(f"adapters: the model has no adapter {adapter!r}; it has {', '.join(known) or 'none'}")
        if name == model_name:
            raise ValueError(f"adapters: {name!r} is the name of the base model; pass another name, or model_name")


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer of `source`, a folder or hub name; raises ValueError if it has none."""
    if not source:
        raise ValueError("serving(): the model was not loaded from a folder or name; pass tokenizer")
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"serving(): {source} has no tokenizer that loads ({error}); pass tokenizer") from error
