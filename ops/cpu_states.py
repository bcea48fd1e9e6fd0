"""The recurrences of layers that keep a state per sequence, on a CPU: compiled functions that take fp32 and bf16.

It calls `cpu_states.c` with torch tensors. A decode step and a prefill are one function: a token's output and the state
after it have the same bits however its sequence is cut into passes and whatever other sequences are in them.

N packed tokens, R sequences, C channels.
"""

from collections.abc import Sequence
from ctypes import byref
from typing import Any

import torch

from hybrid_engine.ops import cpu_kernels
from hybrid_engine.ops.batch import DecodeBatch, PrefillBatch
from hybrid_engine.ops.cpu_kernels import ACTIVATIONS, is_plain, matrix, pointer, threads_for, use_compiled
from hybrid_engine.ops.cpu_library import CStates, DeltaNumbers, SpaceNumbers

# Of a convolution's kernel, of the keys of a delta rule, of the states of a state space.
MOST_WIDTH, MOST_KEY_DIM, MOST_STATE_SIZE = 16, 512, 512


def _has_dense_slots(states: torch.Tensor, slots: torch.Tensor) -> bool:
    """Whether a compiled function takes `states [num_slots, ...]` and the `slots` of the sequences."""
    is_dense = len(states) > 0 and states[0].is_contiguous()
    return is_dense and slots.is_cpu and slots.dtype == torch.int64 and slots.is_contiguous()


def _states_of(states: torch.Tensor, batch: PrefillBatch | DecodeBatch) -> Any:
    """A reference to `States` of the C source, which is valid as long as the batch's tensors."""
    slots, starts, anew = batch.state_slots, None, None
    assert slots is not None
    if isinstance(batch, PrefillBatch):
        starts, anew = pointer(batch.starts), pointer(batch.starts_anew)
    return byref(
        CStates(states.data_ptr(), states.stride(0), slots.data_ptr(), len(states), starts, anew, len(slots))
    )  # fmt: skip


def can_convolve(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, states: torch.Tensor, slots: torch.Tensor
) -> bool:
    """Whether `short_conv` takes these tensors."""
    if not input.numel() or not use_compiled(input, weight, bias, states):
        return False
    return weight.is_contiguous() and weight.shape[1] <= MOST_WIDTH and _has_dense_slots(states, slots)


def short_conv(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    batch: PrefillBatch | DecodeBatch,
    activation: str | None,
) -> torch.Tensor:
    """`ShortConvOp`: `[N, C]`. Raises ValueError for a slot that does not exist."""
    (num_tokens, num_channels), width = input.shape, weight.shape[1]
    output = input.new_empty(num_tokens, num_channels)
    cpu_kernels.call(
        "short_conv", matrix(input), weight.data_ptr(), pointer(bias), _states_of(states, batch), output.data_ptr(),
        num_channels, width, -1 if activation is None else ACTIVATIONS[activation], input.dtype == torch.bfloat16,
        threads_for(width * input.numel()),
    )  # fmt: skip
    return output


def can_recur(
    inputs: Sequence[torch.Tensor], key_size: int, most: int, states: torch.Tensor, slots: torch.Tensor
) -> bool:
    """Whether `delta_rule` or `state_space` takes these tensors; `key_size` of a state may be at most `most`."""
    if not inputs[0].numel() or not use_compiled(*inputs) or not is_plain(states, torch.float32):
        return False
    return key_size <= most and _has_dense_slots(states, slots)


def delta_rule(
    numbers: DeltaNumbers,
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor] | None,
    states: torch.Tensor,
    batch: PrefillBatch | DecodeBatch,
) -> torch.Tensor:
    """`GatedDeltaOp`: `[N, V Dv]`. Raises ValueError for a slot that does not exist.

    Args:
        inputs, weights: those of `DeltaInputs` and `DecayWeights`. Without weights `a` is the logarithm of the decay,
            in fp32, and `b` is beta.
    """
    width = inputs[1].shape[1] * numbers.value_dim
    return _recur("delta_rule", numbers, inputs, weights or (None, None), states, batch, width)


def state_space(
    numbers: SpaceNumbers,
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    states: torch.Tensor,
    batch: PrefillBatch | DecodeBatch,
) -> torch.Tensor:
    """`StateSpaceOp`: `[N, H P]`. Raises ValueError for a slot that does not exist.

    Args:
        inputs, weights: `mixed` and `dt` of `StateSpaceOp`, and those of `SpaceWeights`.
    """
    return _recur("state_space", numbers, inputs, weights, states, batch, numbers.num_heads * numbers.head_dim)


def _recur(
    name: str,
    numbers: DeltaNumbers | SpaceNumbers,
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor | None],
    states: torch.Tensor,
    batch: PrefillBatch | DecodeBatch,
    width: int,
) -> torch.Tensor:
    """Calls one of the two."""
    num_tokens = len(inputs[0])
    wide = [None if weight is None else weight.float().contiguous() for weight in weights]
    output = inputs[0].new_empty(num_tokens, width)
    cpu_kernels.call(
        name, *map(matrix, inputs), *map(pointer, wide), _states_of(states, batch), byref(numbers),
        output.data_ptr(), output.dtype == torch.bfloat16, threads_for(num_tokens * states[0].numel()),
    )  # fmt: skip
    return output
