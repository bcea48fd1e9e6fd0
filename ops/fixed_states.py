"""Layers that keep a state, in exact mode: a rollout and the trainer's forward give a token the same bits, on a CPU.

The compiled recurrences of `cpu_states.py` take token after token, in a prefill, in a decode step, and here over whole
sequences: the bits of a token do not depend on how its sequence is cut, nor on other sequences. The functions take what
functions of transformers' models take (`causal_conv1d_fn`, `torch_chunk_gated_delta_rule`, `mamba2_chunk_scan` of
5.23). Gradients are those of these functions, which a backward pass computes again.

B sequences of T tokens, N = B T packed tokens, C channels, K key heads, V value heads, H heads, G groups.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hybrid_engine.ops import cpu_states
from hybrid_engine.ops.batch import Batch, MixedBatch, PrefillBatch
from hybrid_engine.ops.cpu_library import DeltaNumbers, load_library
from hybrid_engine.ops.dispatch import fallback_forced, use_triton
from hybrid_engine.ops.short_conv import ShortConvOp, conv_state_shape
from hybrid_engine.ops.state_space import SpaceWeights, StateSpaceOp

Run = Callable[..., torch.Tensor]


def has_fixed_states(tensor: torch.Tensor) -> bool:
    """Whether states of tensors like this one can be exact: by compiled functions on a CPU, not by kernels."""
    if tensor.device.type != "cpu" or use_triton(tensor) or fallback_forced():
        return False
    return load_library() is not None


def whole_sequences(num_sequences: int, length: int) -> PrefillBatch:
    """Packed sequences of one length, each from its first token on, with slots 0 to B - 1."""
    positions = torch.arange(length).repeat(num_sequences)
    starts = torch.arange(num_sequences + 1, dtype=torch.int32) * length
    return PrefillBatch(
        tokens=positions, positions=positions, write_blocks=positions, write_offsets=positions,
        lengths=(length,) * num_sequences, starts=starts, wanted=starts[1:].long() - 1,
        row_lengths=torch.full_like(positions, length), state_slots=torch.arange(num_sequences),
    )  # fmt: skip


class _ByReference(torch.autograd.Function):
    """`run(*tensors)`, whose gradients are those of `reference(*tensors)`."""

    @staticmethod
    def forward(ctx: Any, run: Run, reference: Run, *tensors: torch.Tensor | None) -> torch.Tensor:
        ctx.reference = reference
        ctx.save_for_backward(*tensors)
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        pairs = zip(ctx.saved_tensors, needed, strict=True)
        inputs = [None if x is None else x.detach().requires_grad_(is_needed) for x, is_needed in pairs]
        with torch.enable_grad():
            output = ctx.reference(*inputs)
        found = iter(torch.autograd.grad(output, [x for x in inputs if x is not None and x.requires_grad], gradient))
        return None, None, *(next(found) if is_needed else None for is_needed in needed)


def by_reference(run: Run, reference: Run, *tensors: torch.Tensor | None) -> torch.Tensor:
    """`run(*tensors)` outside of dispatch modes; a backward pass computes `reference(*tensors)` and its gradients."""

    def apart(*inputs: torch.Tensor | None) -> torch.Tensor:
        with torch.no_grad(), _disable_current_modes():
            return run(*inputs)

    return _ByReference.apply(apart, reference, *tensors)


def convolve(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    states: torch.Tensor | None,
    batch: Batch,
) -> torch.Tensor:
    """A short convolution, `input [N, C]` -> `[N, C]`; `states` None: they begin at zero and are not kept."""
    if states is None:
        shape = conv_state_shape(*weight.shape)
        states = input.new_empty(_num_sequences(batch), *shape)
    return ShortConvOp(activation)(input, weight, bias, states, batch)


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor | None,
    batch: Batch,
) -> torch.Tensor:
    """The gated delta rule of given decays, with norms of q and k; states as for `convolve`.

    Args:
        q, k: `[N, K, Dk]`.
        v: `[N, V, Dv]`.
        g: `[N, V]` fp32, the logarithm of the decay.
        beta: `[N, V]`, in the dtype of v.

    Returns:
        `[N, V, Dv]`.
    """
    (num_keys, key_dim), (num_heads, value_dim) = q.shape[1:], v.shape[1:]
    numbers = DeltaNumbers(num_keys, num_heads // num_keys, key_dim, value_dim, 1.0)
    inputs = torch.cat([x.flatten(1) for x in (q, k, v)], 1), g.float(), beta.to(v.dtype)
    if states is None:
        states = g.new_empty(_num_sequences(batch), num_heads, key_dim, value_dim, dtype=torch.float32)
    if not isinstance(batch, MixedBatch):
        output = cpu_states.delta_rule(numbers, inputs, None, states, batch)
        return output.unflatten(1, (num_heads, value_dim))
    num_rows = len(batch.decode.tokens)
    decoded = cpu_states.delta_rule(numbers, [x[:num_rows] for x in inputs], None, states, batch.decode)
    packed = cpu_states.delta_rule(numbers, [x[num_rows:] for x in inputs], None, states, batch.prefill)
    return torch.cat((decoded, packed)).unflatten(1, (num_heads, value_dim))


def state_space(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    skip: torch.Tensor,
    dt_bias: torch.Tensor,
    limits: tuple[float, float],
    states: torch.Tensor | None,
    batch: Batch,
) -> torch.Tensor:
    """The state space of Mamba-2; states as for `convolve`.

    Args:
        x: `[N, H, P]`.
        dt: `[N, H]`, before the bias.
        a: `[H]`, negative.
        b, c: `[N, G, S]`.
        skip, dt_bias: `[H]`.

    Returns:
        `[N, H, P]`.
    """
    (num_heads, head_dim), (num_groups, state_size) = x.shape[1:], b.shape[1:]
    op = StateSpaceOp(num_heads, head_dim, num_groups, state_size, limits)
    if states is None:
        states = a.new_empty(_num_sequences(batch), *op.state_shape, dtype=torch.float32)
    mixed = torch.cat([part.flatten(1) for part in (x, b, c)], 1)
    return op(mixed, dt, SpaceWeights((-a).log(), dt_bias, skip), states, batch).unflatten(1, x.shape[1:])


def _num_sequences(batch: Batch) -> int:
    assert isinstance(batch, PrefillBatch)
    return len(batch.lengths)
