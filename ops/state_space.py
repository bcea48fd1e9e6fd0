"""The state space of Mamba-2: a linear recurrence whose decay, input and output depend on the token.

    dt    = clamp(softplus(dt + dt_bias))                          within the limits of the time step
    S_t   = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T                   A = -exp(a_log), one number per head
    y_t   = S_t C_t + D x_t

Dao and Gu 2024, Transformers are SSMs, arXiv 2405.21060, section 6, as `mamba2_chunk_scan` of transformers 5.23
computes it. transformers does not clamp dt in its decode steps; here, as in its forward pass, it is clamped everywhere.
The state `[H, P, S]` of a sequence is fp32 for any dtype, and so is all arithmetic after softplus, which is rounded to
the dtype of the input, as is the output. Each group of B and C serves H / G heads that follow each other.

Decode takes the recurrence: it reads and writes H P S numbers for each row, whatever the context, and does 5 H P S
operations. So does prefill on a CPU (`cpu_states.c`): a prompt has the same bits however it is cut. Otherwise prefill
takes chunks of L tokens. With G_i the sum of dt A up to token i of the chunk, and S the state
before it,

    y_i   = exp(G_i) S C_i + sum_{j <= i} exp(G_i - G_j) (C_i . B_j) dt_j x_j + D x_i
    S     = exp(G_L) S + sum_j exp(G_L - G_j) dt_j x_j B_j^T

All but the terms with S is done for all chunks of all sequences at once.

N packed tokens, R sequences, H heads of P numbers, G groups of B and C, S state size, M chunks.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from hybrid_engine.ops import cpu_states
from hybrid_engine.ops import state_space_kernels as kernels
from hybrid_engine.ops.batch import Batch, DecodeBatch, MixedBatch, PrefillBatch, over_parts
from hybrid_engine.ops.cpu_library import SpaceNumbers
from hybrid_engine.ops.dispatch import (
    Launch,
    check_tensor,
    kernel_or_reference,
    prepared,
    use_triton,
)
from hybrid_engine.ops.gated_delta import chunk_places, pad_to_chunks
from hybrid_engine.ops.short_conv import slots_of

CHUNK = 64
NO_LIMITS = (0.0, float("inf"))


class SpaceWeights(NamedTuple):
    """Parameters of the heads."""

    a_log: torch.Tensor  # [H]
    dt_bias: torch.Tensor  # [H]
    skip: torch.Tensor  # D, [H]


class SpaceHeads(NamedTuple):
    """Operands of the recurrence for N tokens, in fp32 or wider."""

    x: torch.Tensor  # dt x, [N, H, P]
    b: torch.Tensor  # [N, G, S]
    c: torch.Tensor  # [N, G, S]
    decay: torch.Tensor  # dt A, [N, H]


@dataclass(frozen=True)
class StateSpaceOp:
    """Callable `(mixed, dt, weights, states, batch) -> [N, H P]`."""

    num_heads: int
    head_dim: int
    num_groups: int  # divides `num_heads`
    state_size: int
    dt_limits: tuple[float, float] = NO_LIMITS

    def __post_init__(self):
        if self.num_heads % self.num_groups:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_groups={self.num_groups}")

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of one sequence's state, fp32."""
        return self.num_heads, self.head_dim, self.state_size

    @property
    def widths(self) -> list[int]:
        """Widths of x, B and C."""
        return [self.num_heads * self.head_dim, self.num_groups * self.state_size, self.num_groups * self.state_size]

    def __call__(
        self, mixed: torch.Tensor, dt: torch.Tensor, weights: SpaceWeights, states: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """The outputs of the batch's tokens; replaces the states of their sequences.

        Rows after those of the batch's tokens, of a prefill, are padding: their output is 0.

        Args:
            mixed: `[N, H P + 2 G S]`: x of all heads, then B and C of all groups; any strides.
            dt: `[N, H]`, before the bias.
            weights: see `SpaceWeights`.
            states: `[num_slots, H, P, S]` fp32, dense slots.
            batch: its `state_slots` name a slot for each sequence; no two sequences share one.

        Raises:
            ValueError: a tensor that does not fit, or a batch without slots.
        """
        parts = over_parts(lambda rows, part: self(mixed[rows], dt[rows], weights, states, part), len(mixed), batch)
        if parts is not None:
            return parts
        assert not isinstance(batch, MixedBatch)
        if use_triton(mixed):
            return kernel_or_reference(self._launch, self.reference, mixed, dt, weights, states, batch)
        slots = slots_of(batch)
        self._check(mixed, dt, weights, states, slots)
        if cpu_states.can_recur((mixed, dt), self.state_size, cpu_states.MOST_STATE_SIZE, states, slots):
            numbers = SpaceNumbers(
                self.num_heads, self.num_groups, self.head_dim, self.state_size, *self.dt_limits
            )  # fmt: skip
            return cpu_states.state_space(numbers, (mixed, dt), weights, states, batch)
        return self.reference(mixed, dt, weights, states, batch)

    def _check(
        self, mixed: torch.Tensor, dt: torch.Tensor, weights: SpaceWeights, states: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Raises ValueError for tensors that do not fit each other."""
        check_tensor("mixed", mixed, shape=(None, sum(self.widths)))
        check_tensor("dt", dt, like=mixed, shape=(len(mixed), self.num_heads))
        for name, weight in weights._asdict().items():
            check_tensor(name, weight, like=mixed, dtype=weight.dtype, shape=(self.num_heads,))
        dtype = torch.promote_types(mixed.dtype, torch.float32)
        check_tensor("states", states, like=mixed, dtype=dtype, shape=(None, *self.state_shape))
        if len(states) and not states[0].is_contiguous():
            raise ValueError(f"states have strides {states.stride()}; expected dense slots")
        check_tensor("slots", slots, like=mixed, dtype=torch.int64, shape=(None,), is_dense_last=True)

    def _launch(
        self,
        mixed: torch.Tensor,
        dt: torch.Tensor,
        weights: SpaceWeights,
        states: torch.Tensor,
        batch: PrefillBatch | DecodeBatch,
    ) -> torch.Tensor:
        """The op by its kernels. Raises ValueError for a tensor that they cannot read."""
        slots, starts, anew = slots_of(batch), None, None
        if isinstance(batch, PrefillBatch):
            starts, anew = batch.starts, batch.starts_anew
        launch = prepared(self._prepare, mixed, dt, *weights, states, slots, starts, anew)
        output = mixed.new_empty(len(mixed), self.num_heads * self.head_dim)
        (mixed_row, mixed_column), (dt_row, dt_column) = mixed.stride(), dt.stride()
        launch(
            kernels.SpaceRows(mixed, mixed_row, mixed_column, dt, dt_row, dt_column, output),
            kernels.SpaceSteps(*weights, *self.dt_limits),
            kernels.SpaceSequences(states, states.stride(0), slots, starts, anew),
        )  # fmt: skip
        return output

    def _prepare(
        self,
        mixed: torch.Tensor,
        dt: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        skip: torch.Tensor,
        states: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor | None,
        anew: torch.Tensor | None,
    ) -> Launch:
        self._check(mixed, dt, SpaceWeights(a_log, dt_bias, skip), states, slots)
        form = kernels.build_form(self.num_heads, self.num_groups, self.head_dim, self.state_size)
        grid = (len(slots), self.num_heads, -(-self.head_dim // form.rows))
        if starts is None:
            return Launch(kernels.space_step_kernel, grid, mixed.device, FORM=form, num_warps=4)
        is_fp32 = mixed.dtype == torch.float32
        return Launch(
            kernels.space_chunks_kernel, grid, mixed.device, FORM=form, PRECISION="ieee" if is_fp32 else "tf32",
            num_warps=kernels.chunk_warps(form, is_fp32), num_stages=1,
        )  # fmt: skip

    def reference(
        self,
        mixed: torch.Tensor,
        dt: torch.Tensor,
        weights: SpaceWeights,
        states: torch.Tensor,
        batch: PrefillBatch | DecodeBatch,
    ) -> torch.Tensor:
        """The reference: the function of the kernels in plain torch."""
        x, heads, slots = *self._read_heads(mixed, dt, weights), slots_of(batch)
        if isinstance(batch, DecodeBatch):
            output, states[slots] = self._recur(heads, states[slots])
        else:
            before = states[slots].masked_fill(batch.starts_anew[:, None, None, None], 0)
            output, states[slots] = self._in_chunks(heads, before, batch.lengths)
        output = output + weights.skip.to(x.dtype)[:, None] * x
        return output.flatten(1).to(mixed.dtype)

    def _read_heads(
        self, mixed: torch.Tensor, dt: torch.Tensor, weights: SpaceWeights
    ) -> tuple[torch.Tensor, SpaceHeads]:
        """x `[N, H, P]`, and the operands of the recurrence."""
        dtype = torch.promote_types(mixed.dtype, torch.float32)
        x, b, c = mixed.to(dtype).split(self.widths, 1)
        x = x.unflatten(1, (self.num_heads, self.head_dim))
        b, c = (part.unflatten(1, (self.num_groups, self.state_size)) for part in (b, c))
        dt = F.softplus(dt + weights.dt_bias.to(dt.dtype)).clamp(*self.dt_limits).to(dtype)
        return x, SpaceHeads(x * dt[..., None], b, c, -weights.a_log.to(dtype).exp() * dt)

    def _recur(self, heads: SpaceHeads, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One token for each of N rows: outputs `[N, H, P]` and the next states."""
        group = self.num_heads // self.num_groups
        b, c = (part.repeat_interleave(group, 1)[:, :, None] for part in (heads.b, heads.c))  # [N, H, 1, S]
        state = state * heads.decay.exp()[..., None, None] + heads.x[..., None] * b
        return (state * c).sum(-1), state

    def _in_chunks(
        self, heads: SpaceHeads, state: torch.Tensor, lengths: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed sequences, from their states `[R, H, P, S]`: outputs `[N, H, P]` and the next states."""
        size = min(CHUNK, max(lengths))
        places, firsts = chunk_places(lengths, size, state.device)
        parts = self._within_chunks(SpaceHeads(*(pad_to_chunks(part, places) for part in heads)))
        outputs, state = parts.outputs, state.clone()
        num_chunks = [-(-length // size) for length in lengths]
        for step in range(max(num_chunks)):
            rows = [row for row, count in enumerate(num_chunks) if count > step]
            index = torch.tensor([firsts[row] + step for row in rows], device=state.device)
            before = state[rows]
            outputs[index] += parts.readers[index] @ before.transpose(2, 3)
            state[rows] = parts.decay[index][..., None, None] * before + parts.learned[index]
        packed = outputs.transpose(1, 2).flatten(0, 1)  # [M L, H, P]
        return packed[(places >= 0).flatten()], state

    def _within_chunks(self, heads: SpaceHeads) -> "SpaceChunks":
        """All that does not depend on the states, of chunks `[M, heads, L, ...]`."""
        x, b, c, decay = heads
        group, size = self.num_heads // self.num_groups, x.shape[2]
        total = decay.cumsum(-1)  # [M, H, L]
        later = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
        between = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()  # [M, H, L, L]
        # The products of a group are computed once for the heads that it serves.
        scores = (c @ b.transpose(2, 3)).repeat_interleave(group, 1) * between
        b, c = (part.repeat_interleave(group, 1) for part in (b, c))
        last = total[..., -1:]
        learned = (x * (last - total).exp()[..., None]).transpose(2, 3) @ b
        return SpaceChunks(scores @ x, c * total.exp()[..., None], learned, last[..., 0].exp())


class SpaceChunks(NamedTuple):
    """Operands of the scan over chunks, for M chunks of L tokens."""

    outputs: torch.Tensor  # of the chunk's own tokens, [M, H, L, P]
    readers: torch.Tensor  # exp(G) C, [M, H, L, S]
    learned: torch.Tensor  # what the chunk adds to the state, [M, H, P, S]
    decay: torch.Tensor  # exp(G_L), [M, H]
