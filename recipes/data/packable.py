"""Whether a model computes the same of packed sequences as of padded ones: tried on a few tokens, once per model."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hybrid_engine.generation.probing.agreement import evaluating
from hybrid_engine.recipes.data.packing import Layout, pack, set_layout
from hybrid_engine.recipes.data.sequences import Sequences, ValueModel, build_sequences, model_inputs
from hybrid_engine.recipes.runs.run_log import say

LENGTHS = (5, 2, 7, 3)
"""Of the sequences that are tried."""
ALLOWED = {torch.float32: 1e-4}
"""How far hidden states may lie apart for rounding, relative to the largest."""
ALLOWED_IN_16_BITS = 3e-2


@torch.no_grad()
def pack_where_exact(model: nn.Module, config: Any) -> Layout:
    """Packs the passes of `model` from now on, under `--tokens-per-micro-batch`; a line says why where it does not.

    Collective where the forward pass is.

    Args:
        model: a causal model, a classifier or a `ValueModel`, or an engine around one.
        config: with `tokens_per_micro_batch`; 0 packs nothing.
    """
    if not config.tokens_per_micro_batch:
        return Layout.PADDED
    reason = "exact mode computes rows in fixed shapes" if getattr(config, "exact", False) else None
    layout = _layout_for(model)
    if reason is None:
        reason = _reason_not_to(model, layout)
    if reason is not None:
        module = _innermost(model)
        say(f"--tokens-per-micro-batch: rows of {type(module).__name__} are padded, not packed: {reason}")
        layout = Layout.PADDED
    set_layout(model, layout)
    return layout


def _innermost(model: nn.Module) -> nn.Module:
    """The transformer itself, below engines, adapters and value models."""
    module = getattr(model, "module", model)
    module = module.backbone if isinstance(module, ValueModel) else module
    return module.get_base_model() if hasattr(module, "get_base_model") else module


def _layout_for(model: nn.Module) -> Layout:
    attention = str(getattr(_innermost(model).config, "_attn_implementation", ""))
    return Layout.ONE_ROW if attention.startswith(("flash", "kernels-community/flash")) else Layout.ROWS


def _reason_not_to(model: nn.Module, layout: Layout) -> str | None:
    """Why packed sequences are not what padded ones are; None where they are."""
    module = getattr(model, "module", model)
    base: Any = _innermost(model)
    vocab_size, device = base.config.get_text_config().vocab_size, next(module.parameters()).device
    tokens = [[(7919 * row + 31 * column + 3) % vocab_size for column in range(n)] for row, n in enumerate(LENGTHS)]
    batch = build_sequences([row[:1] for row in tokens], [row[1:] for row in tokens], 0, device)
    packed = pack(batch.input_ids, batch.attention_mask, layout)
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
        model(
            **model_inputs(
                batch, pack(batch.input_ids, batch.attention_mask, layout) if layout is not Layout.PADDED else None
            ),
            use_cache=False,
        )


def _hidden_states(model: nn.Module, run: Callable[[], None]) -> torch.Tensor:
    """`[rows, columns, E]`: what the head of `model` is given in `run`."""
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
