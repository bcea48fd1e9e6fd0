"""Kimi's delta rule: the gated delta rule (`gated_delta.py`) with a decay of its own for each channel of the keys.

    q, k   = l2norm(q) / sqrt(D), l2norm(k)                      l2norm(x) = x / sqrt(sum x^2 + 1e-6)
    beta   = sigmoid(b)
    g      = -exp(a_log) softplus(f + dt_bias)                   the log of the decay, D numbers per head
    S_t    = diag(exp(g_t)) S_{t-1} + k_t beta_t (v_t - (diag(exp(g_t)) S_{t-1})^T k_t)^T
    o_t    = S_t^T q_t

Kimi Team 2025, Kimi Linear, arXiv 2510.26692, section 3, as transformers 5.23 computes it
(`recurrent_kimi_delta_attention`). The state `[H, D, D]` of a sequence is fp32 for any dtype, and so is all arithmetic;
beta and the output are rounded to the dtype of the input.

Every token takes the recurrence: it reads and writes H D^2 numbers of its sequence and does 9 H D^2 operations. In
prefill the sequences go on together, token by token.

N packed tokens, R sequences, H heads of D numbers.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from hybrid_engine.ops.batch import Batch, DecodeBatch, MixedBatch, PrefillBatch, over_parts, recur
from hybrid_engine.ops.dispatch import check_tensor, say_once, use_triton
from hybrid_engine.ops.short_conv import slots_of

EPS = 1e-6


class KimiInputs(NamedTuple):
    """The projections of N tokens, of one dtype."""

    mixed: torch.Tensor  # [N, 3 H D], after the convolution: the queries of all heads, then keys, then values
    f: torch.Tensor  # [N, H D], of the decay
    b: torch.Tensor  # [N, H], of beta

    def part(self, tokens: slice) -> "KimiInputs":
        """The inputs of some tokens."""
        return KimiInputs(*(tensor[tokens] for tensor in self))


class KimiDecay(NamedTuple):
    """Parameters of the decay."""

    a_log: torch.Tensor  # [H]
    dt_bias: torch.Tensor  # [H D]


@dataclass(frozen=True)
class KimiDeltaOp:
    """Callable `(inputs, weights, states, batch) -> [N, H D]`."""

    num_heads: int
    head_dim: int

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of one sequence's state, fp32: keys by values of each head."""
        return self.num_heads, self.head_dim, self.head_dim

    def __call__(self, inputs: KimiInputs, weights: KimiDecay, states: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The outputs of the batch's tokens; replaces the states of their sequences.

        Rows after those of the batch's tokens, of a prefill, are padding: their output is 0.

        Args:
            inputs: see `KimiInputs`; any strides.
            weights: see `KimiDecay`.
            states: `[num_slots, H, D, D]` fp32, dense slots.
            batch: its `state_slots` name a slot for each sequence; no two sequences share one.

        Raises:
            ValueError: a tensor that does not fit, or a batch without slots.
        """
        parts = over_parts(lambda rows, part: self(inputs.part(rows), weights, states, part), len(inputs.mixed), batch)
        if parts is not None:
            return parts
        assert not isinstance(batch, MixedBatch)
        self._check(inputs, weights, states, slots_of(batch))
        if use_triton(inputs.mixed):
            say_once("Kimi's delta rule: there is no kernel; in torch")
        return self.reference(inputs, weights, states, batch)

    def _check(self, inputs: KimiInputs, weights: KimiDecay, states: torch.Tensor, slots: torch.Tensor) -> None:
        """Raises ValueError for tensors that do not fit each other."""
        mixed, width = inputs.mixed, self.num_heads * self.head_dim
        check_tensor("mixed", mixed, shape=(None, 3 * width))
        for name, tensor, size in (("f", inputs.f, width), ("b", inputs.b, self.num_heads)):
            check_tensor(name, tensor, like=mixed, shape=(len(mixed), size))
        for name, weight, size in (("a_log", weights.a_log, self.num_heads), ("dt_bias", weights.dt_bias, width)):
            check_tensor(name, weight, like=mixed, dtype=weight.dtype, shape=(size,))
        dtype = torch.promote_types(mixed.dtype, torch.float32)
        check_tensor("states", states, like=mixed, dtype=dtype, shape=(None, *self.state_shape))
        check_tensor("slots", slots, like=mixed, dtype=torch.int64, shape=(None,), is_dense_last=True)

    def reference(
        self, inputs: KimiInputs, weights: KimiDecay, states: torch.Tensor, batch: PrefillBatch | DecodeBatch
    ) -> torch.Tensor:
        """The op in plain torch."""
        dtype, slots = torch.promote_types(inputs.mixed.dtype, torch.float32), slots_of(batch)
        q, k, v, f = (self._by_head(part.to(dtype)) for part in (*inputs.mixed.chunk(3, 1), inputs.f))
        q, k = (x / (x.square().sum(-1, keepdim=True) + EPS).sqrt() for x in (q, k))
        g = -weights.a_log.to(dtype).exp()[:, None] * F.softplus(f + self._by_head(weights.dt_bias.to(dtype)[None]))
        tokens = (q * self.head_dim**-0.5, k, v, g, torch.sigmoid(inputs.b).to(dtype))
        if isinstance(batch, DecodeBatch):
            output, states[slots] = _step(*tokens, states[slots])
        else:
            before = states[slots].masked_fill(batch.starts_anew[:, None, None, None], 0)
            output, states[slots] = recur(_step, tokens, batch.lengths, before)
        return output.flatten(1).to(inputs.mixed.dtype)

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, H D]` -> `[N, H, D]`."""
        return x.unflatten(1, (self.num_heads, self.head_dim))


def _step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of R sequences, from their states `[R, H, D, D]`: outputs `[R, H, D]` and the next states."""
    state = state * g.exp()[..., None]
    delta = (v - (state * k[..., None]).sum(-2)) * beta[..., None]
    state = state + k[..., None] * delta[..., None, :]
    return (state * q[..., None]).sum(-2), state
