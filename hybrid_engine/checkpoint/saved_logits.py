"""Checks the logits of a saved model on a few tokens against the trained one's, before the save replaces another.

`ZeroEngine.save_16bit_model` runs the trained model, `export.py` the folder that was written. An adapter that is merged
wrongly, a head that is tied again when it is loaded or a weight under a wrong name all change logits. So does rounding
where two experts are close: the saved model is therefore run with the experts that the trained one chose, and how often
it would have chosen others is compared separately.

T tokens, V vocabulary (or labels of a classifier), K experts of a token.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

logger = logging.getLogger("hybrid_engine")
SPREAD, LAST = 24, 8
"""Number of tokens taken from the whole vocabulary, and from its end, where new tokens are."""
FP32_BOUND, HALF_BOUND = 2e-3, 0.1
"""The largest relative difference of a position's logits, in the median. In fp32 rounding stays far below it. In 16
bits merging rounds each weight, which moves logits by some percent.
"""
OUTLIERS = 8
"""A single position may differ by this many times the bound."""
MOST_OTHER_EXPERTS = 0.25
"""The largest share of experts that the saved model would not choose. With another router about half of them differ."""


class RecordedRouting(NamedTuple):
    """The experts of one layer for each token, and the factors of their outputs."""

    experts: torch.Tensor  # [T, K] int64
    weights: torch.Tensor  # [T, K], or [T, number of experts]


class Probe(NamedTuple):
    """Tokens and the trained model's logits for them."""

    inputs: dict[str, torch.Tensor]
    logits: torch.Tensor  # [T, V] fp32 on the CPU
    dtype: torch.dtype  # that the trained model computes in
    routings: list[RecordedRouting]  # on the CPU, in the order of the layers; empty without experts


def ask_model(module: nn.Module, device: torch.device) -> Probe | None:
    """The probe of a model of transformers, adapters around it or not; runs its forward, which may be collective.

    Returns:
        None if it is not a transformers model, or does not take token ids.
    """
    base = module.get_base_model() if isinstance(module, PeftModel) else module
    if not isinstance(base, PreTrainedModel) or base.main_input_name != "input_ids":
        return None
    inputs = {"input_ids": _tokens(module, base).to(device)}
    if base.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    routings: list[RecordedRouting] = []
    with _experts_hooked(module, lambda routing: routings.append(_on_cpu(routing))):
        logits = _logits(module, inputs)
    if not torch.isfinite(logits).all():
        return None  # no valid logits to compare with
    return Probe({name: ids.cpu() for name, ids in inputs.items()}, logits, base.dtype, routings)


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
    following = _FollowedRoutings(probe.routings)
    with _experts_hooked(saved, following.follow):
        difference = relative_difference(_logits(saved, probe.inputs), probe.logits)
    bound = FP32_BOUND if probe.dtype == torch.float32 else HALF_BOUND
    if difference.median() > bound or difference.max() > OUTLIERS * bound:
        raise _not_the_trained_model(
            model_class,
            f"its logits differ by {difference.median():.2g} of their size in the median of {len(difference)} tokens "
            f"and by {difference.max():.2g} at most, where rounding stays below {bound:g}",
        )
    if following.share_of_others > MOST_OTHER_EXPERTS:
        raise _not_the_trained_model(
            model_class,
            f"it chooses other experts in {following.share_of_others:.0%} of all choices, where rounding stays below "
            f"{MOST_OTHER_EXPERTS:.0%}",
        )


def _not_the_trained_model(model_class: Any, reason: str) -> RuntimeError:
    return RuntimeError(
        f"save_16bit_model(): the saved {model_class.__name__} is not the trained model: {reason}. Nothing was saved; "
        "save_checkpoint() keeps the training's state as it is"
    )


def relative_difference(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """RMS of the difference over the spread of `expected`, for each position: `[T]`."""
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1) if expected.shape[-1] > 1 else expected.norm()
    return (logits - expected).norm(dim=-1) / spread.clamp(min=1e-6)


class _FollowedRoutings:
    """Routings of another model; they replace the saved model's for tokens where its router chose other experts."""

    def __init__(self, routings: list[RecordedRouting]) -> None:
        self._coming = iter(routings)
        self._choices = self._others = 0

    def follow(self, chosen: RecordedRouting) -> RecordedRouting:
        given = next(self._coming, None)
        if given is None or given.experts.shape != chosen.experts.shape or given.weights.shape != chosen.weights.shape:
            return chosen
        is_other = ~(chosen.experts[:, :, None] == given.experts[:, None, :]).any(-1)  # [T, K]
        self._choices += is_other.numel()
        self._others += int(is_other.sum())
        follows = is_other.any(-1, keepdim=True)  # [T, 1]
        weights = torch.where(follows, given.weights.to(chosen.weights.dtype), chosen.weights)
        return RecordedRouting(torch.where(follows, given.experts, chosen.experts), weights)

    @property
    def share_of_others(self) -> float:
        """Share of the chosen experts, in [0, 1], that the other model did not choose."""
        return self._others / max(self._choices, 1)


@contextmanager
def _experts_hooked(module: nn.Module, see: Callable[[RecordedRouting], RecordedRouting | None]) -> Iterator[None]:
    """Inside, `see` is called with the routing of each layer before its experts compute, and may return another.

    Experts of transformers are modules called with hidden states, indices and weights.
    """

    def before(part: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if len(args) != 3 or not all(isinstance(arg, torch.Tensor) for arg in args) or args[1].dtype != torch.int64:
            return None
        seen = see(RecordedRouting(args[1], args[2]))
        return None if seen is None else (args[0], *seen)

    # An adapter around experts is called with the same arguments and calls them.
    parts = [part for part in module.modules() if not isinstance(part, BaseTunerLayer)]
    handles = [part.register_forward_pre_hook(before) for part in parts if "Experts" in type(part).__name__]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _on_cpu(routing: RecordedRouting) -> RecordedRouting:
    return RecordedRouting(routing.experts.cpu(), routing.weights.cpu())


def _tokens(module: nn.Module, base: PreTrainedModel) -> torch.Tensor:
    """Token ids `[1, T]` spread over the vocabulary, its end, and tokens that adapters train individually."""
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
    """Logits `[T, V]`, or the first output, without dropout; the modes of the modules are restored."""
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


@contextmanager
def without_renamed_attribute_warning() -> Iterator[None]:
    """For the construction of a `PeftModel`, which reads an attribute that transformers has renamed.

    peft 0.21.2 asks a model for `is_gradient_checkpointing` and transformers 5.23 answers with a FutureWarning. Neither
    can be configured: the attribute is a property, and peft always reads it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        yield
