"""The model that `generate` and `serve` answer with: a folder or hub name, an adapter fused, no training."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import PeftModel, load_peft_weights
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

import hybrid_engine
from hybrid_engine.checkpoint.peft_models import without_renamed_attribute_warning
from hybrid_engine.rlhf.runs.precision import DtypeOptions, apply_tf32, choose_dtype
from hybrid_engine.rlhf.runs.stages import explained, load_model, load_tokenizer

MOST_TOKENS_WITHOUT_LIMIT = 32768
"""Of a prompt and its answer, for a model whose config names no most."""


@dataclass(frozen=True, kw_only=True)
class BaseModelOptions(DtypeOptions):
    """Which model answers, adapters aside."""

    model: str | None = None
    """Hugging Face name or folder of the model"""
    chat_template: str | None = None
    """a .jinja file that takes the place of the tokenizer's chat template"""

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("--model is missing; say which model to answer with")
        DtypeOptions.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(BaseModelOptions):
    """Which model answers."""

    adapter: str | None = None
    """folder of a peft adapter, which is fused into the weights"""


def load_answering(config: ModelOptions) -> tuple[Any, PreTrainedTokenizerBase]:
    """An InferenceEngine and the tokenizer; ValueError, naming the option, for what does not load."""
    tokenizer = load_answering_tokenizer(config)
    model = load_model(AutoModelForCausalLM, str(config.model))
    if config.adapter is not None:
        model = with_adapter(model, config.adapter)
    return build_answering(model, config), tokenizer


def build_answering(model: nn.Module, config: DtypeOptions, **options: Any) -> Any:
    """An InferenceEngine for prompts and answers as long as `model` takes them; `options` of `init_inference`."""
    apply_tf32(config)
    dtype = choose_dtype(config.dtype)
    return hybrid_engine.init_inference(model.eval(), dtype=dtype, max_out_tokens=most_tokens(model.config), **options)


def most_tokens(config: PretrainedConfig) -> int:
    """The tokens of a prompt and its answer together that a model of this config takes."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or MOST_TOKENS_WITHOUT_LIMIT


def load_answering_tokenizer(config: BaseModelOptions) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with the chat template that was asked for."""
    tokenizer = load_tokenizer(str(config.model))
    if config.chat_template is not None:
        try:
            tokenizer.chat_template = Path(config.chat_template).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--chat-template={config.chat_template!r} cannot be read: {error}") from error
    return tokenizer


def with_adapter(model: nn.Module, folder: str, name: str = "default") -> PeftModel:
    """`model`, which may be on the meta device, with a further adapter; ValueError for what does not load."""
    if not (Path(folder) / "adapter_config.json").exists():
        raise ValueError(f"--adapter={folder!r} has no adapter_config.json; name a folder that peft wrote")
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    with without_renamed_attribute_warning(), explained("adapter", folder):
        if isinstance(model, PeftModel):
            model.load_adapter(folder, name, low_cpu_mem_usage=is_empty)
        else:
            model = PeftModel.from_pretrained(model, folder, name, low_cpu_mem_usage=is_empty)
        if is_empty:
            _fill(model, folder, name)
    return model


def _fill(model: PeftModel, folder: str, name: str) -> None:
    """Gives an adapter its weights that peft left on the meta device, where the model's are."""
    for key, tensor in load_peft_weights(folder, device="cpu").items():
        path, _, kind = key.rpartition(".")
        setattr(model.get_submodule(f"{path}.{name}"), kind, nn.Parameter(tensor, requires_grad=False))
