"""The gated delta rule: a linear attention whose state forgets, and corrects what it recalls before it learns.

    q, k   = l2norm(q) / sqrt(Dk), l2norm(k)                     l2norm(x) = x / sqrt(sum x^2 + 1e-6)
    beta   = s sigmoid(b)                                        s = 1, or 2 where eigenvalues may be negative
    g      = -exp(a_log) softplus(a + dt_bias)                   the log of the decay
    S_t    = exp(g_t) S_{t-1} + k_t beta_t (v_t - exp(g_t) S_{t-1}^T k_t)^T
    o_t    = S_t^T q_t

Yang et al. 2024, Gated Delta Networks, arXiv 2412.06464, equation 10, as Qwen3-Next, Qwen3.5 and OLMo-Hybrid compute it
in transformers 5.23 (`torch_recurrent_gated_delta_rule`). The state `[V, Dk, Dv]` of a sequence is fp32 for any dtype,
and so is all arithmetic; beta and the output are rounded to the dtype of the input. Each key head serves V / K value
heads that follow each other.

Decode takes that recurrence: it reads and writes V Dk Dv numbers for each row, whatever the context, and does 8 V Dk Dv
operations. It needs one pass over the state for both products, because S_t^T q = exp(g) S^T q + (k . q) delta.

So does prefill on a CPU (`cpu_states.c`): a prompt has the same bits however it is cut. Otherwise prefill takes chunks
of C tokens (section 3.3 of the paper). With G_i the sum of g up to token i of the chunk and S the state before it,

    A_ij   = beta_i (k_i . k_j) exp(G_i - G_j)  for j < i, else 0
    U, W   = (I + A)^-1 [beta v], (I + A)^-1 [beta exp(G) k]     by forward substitution
    v'     = U - W S
    o_i    = exp(G_i) S^T q_i + sum_{j <= i} exp(G_i - G_j) (q_i . k_j) v'_j
    S      = exp(G_C) S + sum_j exp(G_C - G_j) k_j v'_j^T

All but the last three lines is done for all chunks of all sequences at once.

N packed tokens, R sequences, S decoded rows, K key heads, V value heads, Dk and Dv their dimensions.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from hybrid_engine.ops import cpu_states
from hybrid_engine.ops import gated_delta_kernels as kernels
from hybrid_engine.ops.batch import Batch, DecodeBatch, MixedBatch, PrefillBatch, over_parts
from hybrid_engine.ops.cpu_library import DeltaNumbers
from hybrid_engine.ops.dispatch import (
    Launch,
    check_tensor,
    kernel_or_reference,
    next_power_of_2,
    prepared,
    use_triton,
)
from hybrid_engine.ops.short_conv import slots_of

CHUNK = 64
EPS = 1e-6


class DeltaInputs(NamedTuple):
    """The projections of N tokens, after the convolution."""

    mixed: torch.Tensor  # [N, 2 K Dk + V Dv]: the queries of all heads, then keys, then values
    a: torch.Tensor  # [N, V], of the decay
    b: torch.Tensor  # [N, V], of beta

    def part(self, tokens: slice) -> "DeltaInputs":
        """The inputs of some tokens."""
        return DeltaInputs(self.mixed[tokens], self.a[tokens], self.b[tokens])


class DecayWeights(NamedTuple):
    """Parameters of the decay per value head."""

    a_log: torch.Tensor  # [V]
    dt_bias: torch.Tensor  # [V]


class DeltaHeads(NamedTuple):
    """Operands of the recurrence for N tokens, in fp32 or wider."""

    q: torch.Tensor  # [N, K, Dk], normed and scaled
    k: torch.Tensor  # [N, K, Dk], normed
    v: torch.Tensor  # [N, V, Dv]
    g: torch.Tensor  # [N, V]
    beta: torch.Tensor  # [N, V]


@dataclass(frozen=True)
class GatedDeltaOp:
    """Callable `(inputs, weights, states, batch) -> [N, V Dv]`."""

    num_key_heads: int
    num_value_heads: int  # a multiple of `num_key_heads`
    key_dim: int
    value_dim: int
    beta_scale: float = 1.0  # s; 2.0 allows negative eigenvalues

    def __post_init__(self):
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_value_heads={self.num_value_heads} must be a multiple of num_key_heads={self.num_key_heads}"
            )

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of one sequence's state, fp32."""
        return self.num_value_heads, self.key_dim, self.value_dim

    def __call__(self, inputs: DeltaInputs, weights: DecayWeights, states: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The outputs of the batch's tokens; replaces the states of their sequences.

        Rows after those of the batch's tokens, of a prefill, are padding: their output is 0.

        Args:
            inputs: see `DeltaInputs`; any strides.
            weights: see `DecayWeights`.
            states: `[num_slots, V, Dk, Dv]` fp32, dense slots.
            batch: its `state_slots` name a slot for each sequence; no two sequences share one.

        Raises:
            ValueError: a tensor that does not fit, or a batch without slots.
        """
        parts = over_parts(lambda rows, part: self(inputs.part(rows), weights, states, part), len(inputs.mixed), batch)
        if parts is not None:
            return parts
        assert not isinstance(batch, MixedBatch)
        if use_triton(inputs.mixed):
            return kernel_or_reference(self._launch, self.reference, inputs, weights, states, batch)
        slots = slots_of(batch)
        self._check(inputs, weights, states, slots)
        if cpu_states.can_recur(inputs, self.key_dim, cpu_states.MOST_KEY_DIM, states, slots):
            group = self.num_value_heads // self.num_key_heads
            numbers = DeltaNumbers(self.num_key_heads, group, self.key_dim, self.value_dim, self.beta_scale)
            return cpu_states.delta_rule(numbers, inputs, weights, states, batch)
        return self.reference(inputs, weights, states, batch)

    def _check(self, inputs: DeltaInputs, weights: DecayWeights, states: torch.Tensor, slots: torch.Tensor) -> None:
        """Raises ValueError for tensors that do not fit each other."""
        mixed, num_heads = inputs.mixed, self.num_value_heads
        width = 2 * self.num_key_heads * self.key_dim + num_heads * self.value_dim
        check_tensor("mixed", mixed, shape=(None, width))
        for name, numbers in (("a", inputs.a), ("b", inputs.b)):
            check_tensor(name, numbers, like=mixed, shape=(len(mixed), num_heads))
        for name, weight in weights._asdict().items():
            check_tensor(name, weight, like=mixed, dtype=weight.dtype, shape=(num_heads,))
        dtype = torch.promote_types(mixed.dtype, torch.float32)
        check_tensor("states", states, like=mixed, dtype=dtype, shape=(None, *self.state_shape))
        if len(states) and not states[0].is_contiguous():
            raise ValueError(f"states have strides {states.stride()}; expected dense slots")
        check_tensor("slots", slots, like=mixed, dtype=torch.int64, shape=(None,), is_dense_last=True)

    def _launch(
        self,
        inputs: DeltaInputs,
        weights: DecayWeights,
        states: torch.Tensor,
        batch: PrefillBatch | DecodeBatch,
    ) -> torch.Tensor:
        """The op by its kernels. Raises ValueError for a tensor that they cannot read."""
        slots, starts, anew = slots_of(batch), None, None
        if isinstance(batch, PrefillBatch):
            starts, anew = batch.starts, batch.starts_anew
        launch = prepared(self._prepare, *inputs, *weights, states, slots, starts, anew)
        output = inputs.mixed.new_empty(len(inputs.mixed), self.num_value_heads * self.value_dim)
        (mixed, a, b), strides = inputs, [x.stride() for x in inputs]
        (mixed_row, mixed_column), (a_row, a_column), (b_row, b_column) = strides
        rows = kernels.DeltaRows(mixed, mixed_row, mixed_column, a, a_row, a_column, b, b_row, b_column, output)
        launch(
            rows, kernels.DeltaDecay(*weights, self.beta_scale),
            kernels.DeltaSequences(states, states.stride(0), slots, starts, anew),
        )  # fmt: skip
        return output

    def _prepare(
        self,
        mixed: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        states: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor | None,
        anew: torch.Tensor | None,
    ) -> Launch:
        self._check(DeltaInputs(mixed, a, b), DecayWeights(a_log, dt_bias), states, slots)
        columns = min(kernels.COLUMNS, max(next_power_of_2(self.value_dim), 16))
        form = kernels.DeltaForm(
            self.num_key_heads, self.num_value_heads // self.num_key_heads, self.key_dim, self.value_dim,
            max(next_power_of_2(self.key_dim), 16), columns, kernels.CHUNK_TOKENS,
        )  # fmt: skip
        grid = (len(slots), self.num_value_heads, -(-self.value_dim // columns))
        if starts is None:
            return Launch(kernels.delta_step_kernel, grid, mixed.device, FORM=form, num_warps=4)
        precision, num_warps = ("ieee", 8) if mixed.dtype == torch.float32 else ("tf32", 4)
        return Launch(
            kernels.delta_chunks_kernel, grid, mixed.device,
            FORM=form, PRECISION=precision, num_warps=num_warps, num_stages=1,
        )  # fmt: skip

    def reference(
        self,
        inputs: DeltaInputs,
        weights: DecayWeights,
        states: torch.Tensor,
        batch: PrefillBatch | DecodeBatch,
    ) -> torch.Tensor:
        """The reference: the function of the kernels in plain torch."""
        heads, slots = self.read_heads(inputs, weights), slots_of(batch)
        if isinstance(batch, DecodeBatch):
            output, states[slots] = self._recur(heads, states[slots])
        else:
            before = states[slots].masked_fill(batch.starts_anew[:, None, None, None], 0)
            output, states[slots] = self._in_chunks(heads, before, batch.lengths)
        return output.flatten(1).to(inputs.mixed.dtype)

    def read_heads(self, inputs: DeltaInputs, weights: DecayWeights) -> DeltaHeads:
        """Normed queries and keys, values, decays and betas."""
        dtype = torch.promote_types(inputs.mixed.dtype, torch.float32)
        sizes = [self.num_key_heads * self.key_dim] * 2 + [self.num_value_heads * self.value_dim]
        q, k, v = inputs.mixed.to(dtype).split(sizes, 1)
        q, k = (x.unflatten(1, (self.num_key_heads, self.key_dim)) for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS) for x in (q, k))
        beta = torch.sigmoid(inputs.b).to(dtype) * self.beta_scale
        g = -weights.a_log.to(dtype).exp() * F.softplus(inputs.a.to(dtype) + weights.dt_bias.to(dtype))
        v = v.unflatten(1, (self.num_value_heads, self.value_dim))
        return DeltaHeads(q * self.key_dim**-0.5, k, v, g, beta)

    def _recur(self, heads: DeltaHeads, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One token for each of S rows: outputs `[S, V, Dv]` and the next states."""
        group = self.num_value_heads // self.num_key_heads
        q, k = (x.repeat_interleave(group, 1)[..., None] for x in heads[:2])  # [S, V, Dk, 1]
        state = state * heads.g.exp()[..., None, None]
        delta = (heads.v - (state * k).sum(-2)) * heads.beta[..., None]
        state = state + k * delta[..., None, :]
        return (state * q).sum(-2), state

    def _in_chunks(
        self, heads: DeltaHeads, state: torch.Tensor, lengths: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed sequences, from their states `[R, V, Dk, Dv]`: outputs `[N, V, Dv]` and the next states."""
        size = min(CHUNK, max(lengths))
        places, firsts = chunk_places(lengths, size, heads.q.device)
        chunks = [pad_to_chunks(x, places) for x in heads]
        intra = _within_chunks(DeltaHeads(*chunks))
        outputs, state = torch.empty_like(intra.values), state.clone()
        num_chunks = [-(-length // size) for length in lengths]
        for step in range(max(num_chunks)):
            rows = [row for row, count in enumerate(num_chunks) if count > step]
            index = torch.tensor([firsts[row] + step for row in rows], device=state.device)
            outputs[index], state[rows] = _scan(intra, index, state[rows])
        packed = outputs.transpose(1, 2).flatten(0, 1)  # [M C, V, Dv]
        return packed[(places >= 0).flatten()], state


class ChunkParts(NamedTuple):
    """Operands of the scan over chunks, for M chunks of C tokens."""

    values: torch.Tensor  # U, [M, V, C, Dv]
    readers: torch.Tensor  # W, [M, V, C, Dk]
    queries: torch.Tensor  # exp(G) q, [M, V, C, Dk]
    keys: torch.Tensor  # exp(G_C - G) k, [M, V, C, Dk]
    scores: torch.Tensor  # exp(G_i - G_j) (q_i . k_j), [M, V, C, C]
    decay: torch.Tensor  # exp(G_C), [M, V]


def chunk_places(lengths: tuple[int, ...], size: int, device: torch.device) -> tuple[torch.Tensor, list[int]]:
    """The packed token of each place of each chunk, `[M, size]`, -1 for padding, and each sequence's first chunk."""
    rows: list[list[int]] = []
    firsts, start = [], 0
    for length in lengths:
        firsts.append(len(rows))
        for first in range(start, start + length, size):
            count = min(size, start + length - first)
            rows.append([*range(first, first + count), *[-1] * (size - count)])
        start += length
    return torch.tensor(rows, device=device), firsts


def pad_to_chunks(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """`x [N, heads, ...]` -> `[M, heads, C, ...]`, 0 for padding, which changes no state."""
    padded = torch.cat((x, x.new_zeros(1, *x.shape[1:])))
    return padded[places].transpose(1, 2)


def _within_chunks(heads: DeltaHeads) -> ChunkParts:
    """All that does not depend on the states, of chunks `[M, heads, C, ...]`."""
    q, k, v, g, beta = heads
    group, size = v.shape[1] // k.shape[1], v.shape[2]
    total = g.cumsum(-1)  # G, [M, V, C]
    later = torch.ones(size, size, dtype=torch.bool, device=g.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()  # [M, V, C, C]
    # The products of a key head are computed once for the value heads that it serves.
    known, scores = ((x @ k.transpose(-1, -2)).repeat_interleave(group, 1) for x in (k, q))
    system = known * between * beta[..., None]  # its diagonal is not read: it counts as 1
    q, k = (x.repeat_interleave(group, 1) for x in (q, k))
    grown = total.exp()[..., None]
    targets = torch.cat((v, k * grown), -1) * beta[..., None]
    solved = torch.linalg.solve_triangular(system, targets, upper=False, unitriangular=True)
    values, readers = solved.split((v.shape[-1], k.shape[-1]), -1)
    last = total[..., -1:]
    return ChunkParts(
        values, readers, q * grown, k * (last - total).exp()[..., None], scores * between, last[..., 0].exp()
    )


def _scan(parts: ChunkParts, index: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk of some sequences: outputs `[.., V, C, Dv]` and the next states."""
    values, readers, queries, keys, scores, decay = (part[index] for part in parts)
    new = values - readers @ state
    output = queries @ state + scores @ new
    return output, state * decay[..., None, None] + keys.transpose(-1, -2) @ new
