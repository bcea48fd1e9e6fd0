"""Tests whether a model computes the same for packed sequences as for padded ones: on a few tokens, once per model."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from hybrid_engine.distributed.processes import gather_objects
from hybrid_engine.generation.model.probe import evaluating
from hybrid_engine.rlhf.batches.packing import ATTENTION, Layout, set_layout
from hybrid_engine.rlhf.batches.sequences import Sequences, ValueModel, build_sequences, model_inputs, packed_rows
from hybrid_engine.rlhf.options.shared import TrainingOptions
from hybrid_engine.rlhf.runs.run_log import say

LENGTHS = (5, 2, 7, 3, 6)
"""Lengths of the test sequences; the last has the third's prompt."""
PROMPT_LENGTHS = (1, 1, 4, 1, 4)
WINDOWS = ("layer_types", "sliding_window", "attention_layers", "attention_chunk_size")
"""Keys of configs that let some layers see only part of the sequence, which so few tokens might not show."""
ALLOWED = {torch.float32: 1e-4}
"""Largest rounding difference of hidden states, relative to the largest value."""
ALLOWED_IN_16_BITS = 3e-2


@torch.no_grad()
def pack_where_exact(model: nn.Module, config: TrainingOptions) -> Layout:
    """Packs the passes of `model` from now on, under `--tokens-per-micro-batch`; logs why where it does not.

    Collective: rows are packed if every process finds that packing is exact.

    Args:
        model: a causal model, a classifier or a `ValueModel`, or an engine around one.
        config: with `tokens_per_micro_batch`, where 0 packs nothing.
    """
    if not config.tokens_per_micro_batch:
        return Layout.PADDED
    reason, layout = None, Layout.PADDED
    if config.exact:
        reason = "exact mode computes rows in fixed shapes"
    elif _use_spans(model):
        layout = Layout.SPANS
    else:
        layout = _layout_for(model)
        reason = _reason_not_to(model, layout)
    if reason is not None:
        module = _innermost(model)
        say(f"--tokens-per-micro-batch: rows of {type(module).__name__} are padded, not packed: {reason}")
        layout = Layout.PADDED
    set_layout(model, layout)
    return layout


def expected_layout(config: TrainingOptions, model: PretrainedConfig) -> Layout:
    """The layout of passes under `--tokens-per-micro-batch`, predicted from the model's config alone."""
    if config.exact or not supports_attention_backend(model):
        return Layout.PADDED
    return Layout.SPANS if takes_spans(model) else Layout.ROWS


def takes_spans(model: PretrainedConfig) -> bool:
    """Whether attention of such a model goes along spans, predicted from its config alone."""
    return supports_attention_backend(model) and not _has_windows(model)


def supports_attention_backend(model: PretrainedConfig) -> bool:
    """Whether transformers' attention functions compute the attention of such a model; else it has its own (ALiBi)."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model), None)
    return bool(getattr(kind, "_supports_attention_backend", True))


def _innermost(model: nn.Module) -> nn.Module:
    """The transformer itself, below engines, adapters and value models."""
    module = getattr(model, "module", model)
    module = module.backbone if isinstance(module, ValueModel) else module
    return module.get_base_model() if hasattr(module, "get_base_model") else module


def _use_spans(model: nn.Module) -> bool:
    """Makes `model` use attention along spans if that is exact; returns whether it is."""
    module: Any = _innermost(model)
    if _attention_of(model) not in ("sdpa", ATTENTION) or _has_windows(module.config):
        return False
    module.set_attn_implementation(ATTENTION)
    if _attention_of(model) == ATTENTION and _reason_not_to(model, Layout.SPANS) is None:
        return True
    module.set_attn_implementation("sdpa")
    return False


def _has_windows(model: PretrainedConfig) -> bool:
    values = {name: getattr(model.get_text_config(), name, None) for name in WINDOWS}
    kinds = set(values.pop("layer_types") or ())
    return any(values.values()) or not kinds <= {"full_attention"}


def _attention_of(model: nn.Module) -> str:
    return str(getattr(_innermost(model).config, "_attn_implementation", ""))


def _layout_for(model: nn.Module) -> Layout:
    is_flash = _attention_of(model).startswith(("flash", "kernels-community/flash"))
    return Layout.ONE_ROW if is_flash else Layout.ROWS


def _reason_not_to(model: nn.Module, layout: Layout) -> str | None:
    """The reason that packed sequences differ from padded ones, on this or another process; None if they do not."""
    found = gather_objects(_own_reason_not_to(model, layout))
    return next(filter(None, found), None)


def _own_reason_not_to(model: nn.Module, layout: Layout) -> str | None:
    module = getattr(model, "module", model)
    base: Any = _innermost(model)
    vocab_size, device = base.config.get_text_config().vocab_size, next(module.parameters()).device
    tokens = [[(7919 * row + 31 * column + 3) % vocab_size for column in range(n)] for row, n in enumerate(LENGTHS)]
    tokens[-1][: PROMPT_LENGTHS[-1]] = tokens[2][: PROMPT_LENGTHS[2]]
    prompts = [row[:num_first] for row, num_first in zip(tokens, PROMPT_LENGTHS, strict=True)]
    responses = [row[num_first:] for row, num_first in zip(tokens, PROMPT_LENGTHS, strict=True)]
    batch = build_sequences(prompts, responses, 0, device)
    packed = packed_rows(batch, layout)
    is_token = batch.attention_mask.bool()
    try:
        with evaluating(module):
            padded = _hidden_states(model, lambda: _run(model, batch, Layout.PADDED))[is_token]
            found = _hidden_states(model, lambda: _run(model, batch, layout)).flatten(0, 1)[packed.places[is_token]]
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"its forward pass refuses them ({type(error).__name__}: {error})"
    apart = ((found - padded).abs().max() / padded.abs().max().clamp(min=1e-30)).item()
    allowed = ALLOWED.get(padded.dtype, ALLOWED_IN_16_BITS)
    return None if apart <= allowed else f"its hidden states would be {apart:.2g} apart, relative to the largest"


def _run(model: nn.Module, batch: Sequences, layout: Layout) -> None:
    set_layout(model, layout)
    if isinstance(getattr(model, "module", model), ValueModel):
        model(batch)
    else:
        packed = None if layout is Layout.PADDED else packed_rows(batch, layout)
        model(**model_inputs(batch, packed), use_cache=False)


def _hidden_states(model: nn.Module, run: Callable[[], None]) -> torch.Tensor:
    """`[rows, columns, E]`: the input of the head of `model` during `run`."""
    module: Any = getattr(model, "module", model)
    base: Any = _innermost(model)
    head = module.head if isinstance(module, ValueModel) else base.get_output_embeddings() or base.score
    found: list[torch.Tensor] = []
    hook = head.register_forward_pre_hook(lambda module, given: found.append(given[0].detach()))
    try:
        run()
    finally:
        hook.remove()
    return found[-1]
