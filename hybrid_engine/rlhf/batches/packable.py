"""Tests whether a model computes the same for packed sequences as for padded ones: on a few tokens, once per model.

It is measured, never read from a signature: many models take the arguments that tell where a sequence begins, and
ignore them, or some backends of their layers do.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
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
STATES = ("linear_num_value_heads", "conv_L_cache", "mamba_d_state", "ssm_state_size", "state_size")
"""Keys of configs with recurrences or convolutions, which go on across sequences in transformers' torch code."""
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
    has_state = any(getattr(model.get_text_config(), name, None) for name in STATES)
    if config.exact or has_state or not supports_attention_backend(model):
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
    module: Any = getattr(model, "module", model)
    base: Any = _innermost(model)
    device = next(module.parameters()).device
    trial = partial(_trial, base.config.get_text_config().vocab_size, device)
    batch = trial(0, 0)
    is_token = batch.attention_mask.bool()
    cells, owners = is_token.flatten().nonzero().squeeze(1), is_token.nonzero()[:, 0]
    places = packed_rows(batch, layout).places[is_token]
    # A backward pass through shards would need them gathered, and reduce gradients.
    is_sharded = isinstance(module, FSDPModule)
    runs = model if is_sharded else module  # an engine would wait for a backward pass
    try:
        with evaluating(module), torch.set_grad_enabled(not is_sharded):
            padded, packed = _trace(runs, batch, Layout.PADDED, cells), _trace(runs, batch, layout, places)
            if is_sharded:
                others = (_trace(runs, trial(*variants), layout, places) for variants in ((1, 0), (0, 1)))
                leaks = _leaks_into_others(packed, others, owners, _has_experts(module))
            else:
                leaks = _has_gradient_across(packed, owners)
            if leaks:
                return "its layers do not begin again where a sequence does, so that it would depend on its neighbors"
            return _difference(padded, packed, has_gradients=not is_sharded)
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"its forward pass refuses them ({type(error).__name__}: {error})"


def _trial(vocab_size: int, device: torch.device, even: int, odd: int) -> Sequences:
    """The test sequences, with other tokens of those with even and odd numbers where `even` and `odd` are 1."""
    tokens = [
        [(7919 * row + 31 * column + 3 + 17 * (even, odd)[row % 2]) % vocab_size for column in range(length)]
        for row, length in enumerate(LENGTHS)
    ]
    tokens[-1][: PROMPT_LENGTHS[-1]] = tokens[2][: PROMPT_LENGTHS[2]]
    prompts = [row[:num_first] for row, num_first in zip(tokens, PROMPT_LENGTHS, strict=True)]
    responses = [row[num_first:] for row, num_first in zip(tokens, PROMPT_LENGTHS, strict=True)]
    return build_sequences(prompts, responses, 0, device)


class _Trace(NamedTuple):
    """A forward pass over the N tokens of all sequences, which may share cells."""

    hidden: torch.Tensor  # [N, E]: the input of the head
    embedded: torch.Tensor  # [cells, E]: the input of the first layer, of which `hidden` is a function
    places: torch.Tensor  # [N]: the cell of each token

    @property
    def allowed(self) -> float:
        """Largest rounding difference, relative to the largest value."""
        return ALLOWED.get(self.hidden.dtype, ALLOWED_IN_16_BITS)

    @property
    def weights(self) -> torch.Tensor:
        """`[N, E]` fp32, random and the same for each pass: of a sum whose gradient is compared."""
        chance = torch.Generator().manual_seed(0)
        return torch.randn(self.hidden.shape, generator=chance).to(self.hidden.device)

    def gradient(self, weights: torch.Tensor) -> torch.Tensor:
        """`[cells, E]`: the gradient of the weighted sum of `hidden` at each cell."""
        total = (self.hidden.float() * weights).sum()
        (found,) = torch.autograd.grad(total, self.embedded, retain_graph=True)
        return found.flatten(0, -2)


def _has_gradient_across(packed: _Trace, owners: torch.Tensor) -> bool:
    """Whether a sequence depends on its neighbors in a row, which have one odd and one even number.

    A recurrence or a convolution that goes on across a boundary may be smaller than the rounding of 16 bits. But the
    gradient of one sequence at another's tokens must be 0, which no rounding changes.

    Args:
        owners: `[N]`, the sequence of each token.
    """
    for parity in (0, 1):
        is_chosen = owners % 2 == parity
        gradient = packed.gradient(packed.weights * is_chosen[:, None])
        others = packed.places[~torch.isin(packed.places, packed.places[is_chosen])]
        if bool((gradient[others] != 0).any()):
            return True
    return False


def _leaks_into_others(packed: _Trace, others: Iterable[_Trace], owners: torch.Tensor, has_experts: bool) -> bool:
    """Whether the sequences with even, then with odd numbers change those of the other kind; without gradients.

    Equal rows of equal passes have equal bits, except where the number of an expert's tokens changes.
    """
    for parity, other in enumerate(others):
        is_same = owners % 2 != parity
        apart = _apart(other.hidden[is_same], packed.hidden[is_same])
        if not apart <= (packed.allowed if has_experts else 0):
            return True
    return False


def _has_experts(module: nn.Module) -> bool:
    return any("expert" in name for name, _ in module.named_modules())


def _difference(padded: _Trace, packed: _Trace, has_gradients: bool) -> str | None:
    """How packed sequences differ from padded ones; None if they do not. Gradients are compared in fp32."""
    apart = _apart(packed.hidden, padded.hidden)
    if not apart <= padded.allowed:
        return f"its hidden states would be {apart:.2g} apart, relative to the largest"
    if has_gradients and padded.hidden.dtype in ALLOWED:
        expected = packed.gradient(packed.weights)
        # A cell that sequences share has the sum of their gradients.
        of_tokens = padded.gradient(padded.weights)[padded.places]
        found = torch.zeros_like(expected).index_add_(0, packed.places, of_tokens)
        apart = _apart(found[packed.places], expected[packed.places])
        if not apart <= padded.allowed:
            return f"its gradients would be {apart:.2g} apart, relative to the largest"
    return None


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def _run(model: nn.Module, batch: Sequences, layout: Layout) -> None:
    set_layout(model, layout)
    if isinstance(getattr(model, "module", model), ValueModel):
        model(batch)
    else:
        packed = None if layout is Layout.PADDED else packed_rows(batch, layout)
        model(**model_inputs(batch, packed), use_cache=False)


def _trace(model: nn.Module, batch: Sequences, layout: Layout, places: torch.Tensor) -> _Trace:
    """A forward pass in `layout`, in which the tokens lie at `places` of the flattened cells."""
    module: Any = getattr(model, "module", model)
    base: Any = _innermost(model)
    head = module.head if isinstance(module, ValueModel) else base.get_output_embeddings() or base.score
    hidden, embedded = list[torch.Tensor](), list[torch.Tensor]()

    def after_embedding(_: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_(torch.is_grad_enabled()))
        return embedded[-1]

    hooks = [
        head.register_forward_pre_hook(lambda _, given: hidden.append(given[0])),
        base.get_input_embeddings().register_forward_hook(after_embedding),
    ]
    try:
        _run(model, batch, layout)
    finally:
        for hook in hooks:
            hook.remove()
    return _Trace(hidden[-1].flatten(0, 1)[places], embedded[0], places)
