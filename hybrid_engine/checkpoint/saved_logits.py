"""Whether a saved model computes what the trained one does: logits of a few tokens, before the save counts.

`ZeroEngine.save_16bit_model` asks the trained model, `export.py` the folder that was written. An adapter that is merged
wrong, a head that is tied again when it is loaded or a weight under a wrong name all change logits.

T tokens, V vocabulary (or labels of a classifier).
"""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

logger = logging.getLogger("hybrid_engine")

SPREAD, LAST = 24, 8
"""How many tokens of the whole vocabulary are asked for, and of its end, where new tokens stand."""
FP32_BOUND, HALF_BOUND = 2e-3, 0.1
"""The largest relative difference of a position's logits, in the median: rounding stays far below it in fp32. In 16
bits merging rounds each weight, which moves logits by some percent."""
OUTLIERS = 8
"""A single position may differ by this many bounds: in a mixture of experts rounding may choose another expert."""


class Probe(NamedTuple):
    """Tokens and what the trained model answers to them."""

    inputs: dict[str, torch.Tensor]
    logits: torch.Tensor  # [T, V] fp32 on the CPU
    dtype: torch.dtype  # that the trained model computes in


def ask_model(module: nn.Module, device: torch.device) -> Probe | None:
    """The probe of a model of transformers, adapters around it or not; runs its forward, which may be collective.

    Returns:
        None where it is no such model, or takes no token ids.
    """
    base = module.get_base_model() if isinstance(module, PeftModel) else module
    if not isinstance(base, PreTrainedModel) or base.main_input_name != "input_ids":
        return None
    inputs = {"input_ids": _tokens(module, base).to(device)}
    if base.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    logits = _logits(module, inputs)
    if not torch.isfinite(logits).all():
        return None  # there is no answer to compare with
    return Probe({name: ids.cpu() for name, ids in inputs.items()}, logits, base.dtype)


def check_saved_logits(model_class: Any, folder: Path, probe: Probe) -> None:
    """Loads `folder` on the CPU and compares its logits.

    Raises:
        RuntimeError: they differ by more than rounding.
    """
    shows_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        saved = model_class.from_pretrained(folder, dtype=probe.dtype)
    finally:
        if shows_bars:
            transformers_logging.enable_progress_bar()
    difference = relative_difference(_logits(saved, probe.inputs), probe.logits)
    bound = FP32_BOUND if probe.dtype == torch.float32 else HALF_BOUND
    if difference.median() > bound or difference.max() > OUTLIERS * bound:
        raise RuntimeError(
            f"save_16bit_model(): the saved {model_class.__name__} is not the trained model: its logits differ by "
            f"{difference.median():.2g} of their size in the median of {len(difference)} tokens and by "
            f"{difference.max():.2g} at most, where rounding stays below {bound:g}. Nothing was saved; "
            "save_checkpoint() keeps the training's state as it is"
        )


def relative_difference(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """RMS of the difference over the spread of `expected`, for each position: `[T]`."""
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1) if expected.shape[-1] > 1 else expected.norm()
    return (logits - expected).norm(dim=-1) / spread.clamp(min=1e-6)


def _tokens(module: nn.Module, base: PreTrainedModel) -> torch.Tensor:
    """Token ids `[1, T]` from everywhere in the vocabulary, its end and those that adapters train one by one."""
    config = base.config.get_text_config()
    size, limit = config.vocab_size, getattr(config, "max_position_embeddings", None)
    spread = torch.linspace(0, size - 1, min(SPREAD, size)).long()
    trained = _trained_tokens(module)[:LAST]
    ids = torch.cat([torch.tensor(trained, dtype=torch.long), spread, torch.arange(max(size - LAST, 0), size)])
    return ids[: limit if isinstance(limit, int) and limit > 0 else None][None]


def _trained_tokens(module: nn.Module) -> list[int]:
    configs = module.peft_config.values() if isinstance(module, PeftModel) else ()
    indices = [getattr(config, "trainable_token_indices", None) or [] for config in configs]
    lists = [list(index.values()) if isinstance(index, dict) else [index] for index in indices]
    return [token for group in lists for tokens in group for token in tokens]


@torch.no_grad()
def _logits(module: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits `[T, V]`, or the first output, without dropout; modes of the parts are put back."""
    modes = [(part, part.training) for part in module.modules()]
    for part, _ in modes:
        part.training = False
    try:
        output = module(**inputs)
    finally:
        for part, training in modes:
            part.training = training
    logits = output.logits if getattr(output, "logits", None) is not None else output[0]
    return logits.float().cpu().flatten(0, -2)
