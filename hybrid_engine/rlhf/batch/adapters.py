"""Several adapters of one model, which clients tell apart by name: read, checked before anything loads, and loaded."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from hybrid_engine.rlhf.batch.model import (
    BaseModelOptions,
    build_answering,
    load_answering_tokenizer,
    with_adapter,
)
from hybrid_engine.rlhf.runs.stages import load_model


class NamedAdapter(NamedTuple):
    """A folder that peft wrote."""

    name: str
    """What clients call it."""
    folder: str


def read_adapters(given: tuple[str, ...], model: str, model_name: str) -> list[NamedAdapter]:
    """Each of `given`, `name=folder` or a folder whose name it is, as peft wrote it for `model`.

    Raises:
        ValueError: a folder holds no adapter or one of another model, or a name is used twice.
    """
    adapters = [_read(value) for value in given]
    names = [model_name, *(adapter.name for adapter in adapters)]
    for adapter in adapters:
        if names.count(adapter.name) > 1:
            raise ValueError(
                f"--adapter={adapter.folder!r} is called {adapter.name!r}, as another one or the model itself is; pass "
                "another name before it, NAME=FOLDER, or --model-name"
            )
        _check_config(adapter, model)
    return adapters


def _read(value: str) -> NamedAdapter:
    name, sign, folder = value.partition("=")
    adapter = NamedAdapter(name, folder) if sign else NamedAdapter(Path(value).resolve().name, value)
    if not adapter.name or not (Path(adapter.folder) / "adapter_config.json").is_file():
        raise ValueError(
            f"--adapter={value!r} has no adapter_config.json; name a folder that peft wrote, or NAME=FOLDER"
        )
    return adapter


def _check_config(adapter: NamedAdapter, model: str) -> None:
    try:
        config = json.loads((Path(adapter.folder) / "adapter_config.json").read_text())
        kind, base = config.get("peft_type"), config.get("base_model_name_or_path") or model
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"--adapter={adapter.folder!r}: its adapter_config.json cannot be read: {error}") from error
    if kind != "LORA":
        raise ValueError(f"--adapter={adapter.folder!r} is of peft_type {kind}, and only LORA is fused; leave it out")
    if Path(base).name != Path(model).resolve().name and Path(base).name != Path(model).name:
        raise ValueError(
            f"--adapter={adapter.folder!r} was trained on {base!r}, and --model={model!r} is another model; where they "
            "are the same, change base_model_name_or_path in its adapter_config.json"
        )


def peft_names(adapters: list[NamedAdapter]) -> dict[str, str]:
    """peft's names by those of clients: they are those of modules, which may have no dots."""
    return {adapter.name: f"adapter_{number}" for number, adapter in enumerate(adapters)}


def load_with_adapters(
    config: BaseModelOptions, adapters: list[NamedAdapter]
) -> tuple[Any, PreTrainedTokenizerBase, dict[str, str]]:
    """An InferenceEngine with `adapters`, its tokenizer, and peft's names of the adapters by those of clients."""
    tokenizer = load_answering_tokenizer(config)
    model = load_model(AutoModelForCausalLM, str(config.model))
    names = peft_names(adapters)
    for adapter in adapters:
        model = with_adapter(model, adapter.folder, names[adapter.name])
    return build_answering(model, config), tokenizer, names
