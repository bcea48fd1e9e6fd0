"""The selective scan of Mamba-1: a linear recurrence of each channel, with decay, input and output of the token.

    dt    = softplus(dt + dt_bias)
    S_t   = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T                   A = -exp(a_log), a number per channel and state
    y_t   = S_t C_t + D x_t

Gu and Dao 2023, Mamba, arXiv 2312.00752, algorithm 2, as Jamba computes it in transformers 5.23
(`mamba_selective_scan`). The state `[I, S]` of a sequence is fp32 for any dtype, and so is all arithmetic after
softplus, which is rounded to the dtype of the input, as is the output.

Every token takes the recurrence: it reads and writes I S numbers of its sequence and does 6 I S operations. In prefill
the sequences go on together, token by token.

N packed tokens, R sequences, I channels, S state size.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from hybrid_engine.ops.batch import Batch, DecodeBatch, MixedBatch, PrefillBatch, over_parts, recur
from hybrid_engine.ops.dispatch import check_tensor, say_once, use_triton
from hybrid_engine.ops.short_conv import slots_of


class ScanInputs(NamedTuple):
    """The projections of N tokens, of one dtype."""

    x: torch.Tensor  # [N, I], after the convolution
    dt: torch.Tensor  # [N, I], before the bias
    b: torch.Tensor  # [N, S]
    c: torch.Tensor  # [N, S]

    def part(self, tokens: slice) -> "ScanInputs":
        """The inputs of some tokens."""
        return ScanInputs(*(tensor[tokens] for tensor in self))


class ScanWeights(NamedTuple):
    """Parameters of the channels."""

    a_log: torch.Tensor  # [I, S]
    dt_bias: torch.Tensor  # [I]
    skip: torch.Tensor  # D, [I]


@dataclass(frozen=True)
class SelectiveScanOp:
    """Callable `(inputs, weights, states, batch) -> [N, I]`."""

    num_channels: int
    state_size: int

    @property
    def state_shape(self) -> tuple[int, int]:
        """Shape of one sequence's state, fp32."""
        return self.num_channels, self.state_size

    def __call__(self, inputs: ScanInputs, weights: ScanWeights, states: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The outputs of the batch's tokens; replaces the states of their sequences.

        Rows after those of the batch's tokens, of a prefill, are padding: their output is 0.

        Args:
            inputs: see `ScanInputs`; any strides.
            weights: see `ScanWeights`.
            states: `[num_slots, I, S]` fp32, dense slots.
            batch: its `state_slots` name a slot for each sequence; no two sequences share one.

        Raises:
            ValueError: a tensor that does not fit, or a batch without slots.
        """
        parts = over_parts(lambda rows, part: self(inputs.part(rows), weights, states, part), len(inputs.x), batch)
        if parts is not None:
            return parts
        assert not isinstance(batch, MixedBatch)
        self._check(inputs, weights, states, slots_of(batch))
        if use_triton(inputs.x):
            say_once("selective scan: there is no kernel; in torch")
        return self.reference(inputs, weights, states, batch)

    def _check(self, inputs: ScanInputs, weights: ScanWeights, states: torch.Tensor, slots: torch.Tensor) -> None:
        """Raises ValueError for tensors that do not fit each other."""
        x, (channels, size) = inputs.x, self.state_shape
        check_tensor("x", x, shape=(None, channels))
        for name, tensor, width in (("dt", inputs.dt, channels), ("b", inputs.b, size), ("c", inputs.c, size)):
            check_tensor(name, tensor, like=x, shape=(len(x), width))
        shapes = {"a_log": (channels, size), "dt_bias": (channels,), "skip": (channels,)}
        for name, weight in weights._asdict().items():
            check_tensor(name, weight, like=x, dtype=weight.dtype, shape=shapes[name])
        dtype = torch.promote_types(x.dtype, torch.float32)
        check_tensor("states", states, like=x, dtype=dtype, shape=(None, channels, size))
        check_tensor("slots", slots, like=x, dtype=torch.int64, shape=(None,), is_dense_last=True)

    def reference(
        self, inputs: ScanInputs, weights: ScanWeights, states: torch.Tensor, batch: PrefillBatch | DecodeBatch
    ) -> torch.Tensor:
        """The op in plain torch."""
        dtype, slots = torch.promote_types(inputs.x.dtype, torch.float32), slots_of(batch)
        x, b, c = (tensor.to(dtype) for tensor in (inputs.x, inputs.b, inputs.c))
        dt = F.softplus(inputs.dt + weights.dt_bias.to(inputs.dt.dtype)).to(dtype)
        rate = -weights.a_log.to(dtype).exp()
        tokens = (dt, dt * x, b, c)
        if isinstance(batch, DecodeBatch):
            output, states[slots] = _step(rate, *tokens, states[slots])
        else:
            state = states[slots].masked_fill(batch.starts_anew[:, None, None], 0)
            output, states[slots] = recur(partial(_step, rate), tokens, batch.lengths, state)
        return (output + weights.skip.to(dtype) * x).to(inputs.x.dtype)


def _step(
    rate: torch.Tensor, dt: torch.Tensor, taken: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of R sequences, from their states `[R, I, S]`: outputs `[R, I]` and the next states."""
    state = state * (dt[..., None] * rate).exp() + taken[..., None] * b[:, None]
    return (state @ c[..., None]).squeeze(-1), state
