"""Attention over the paged KV workspace: q/k norm, rotary, write of the new keys and values, softmax, context.

    scores[i, j] = q_i . k_j * scale      for j <= i and i - j < window
    context_i    = sum_j softmax(scores_i)_j v_j

Keys and values live in blocks, `[num_blocks, K, block_size, D]`; a row's block table lists its blocks in
order. Prefill takes the rows packed, `[N, ...]` tokens of all sequences one after the other, and attends
inside the sequence only. Decode takes one token per row and reads the workspace: 2 S C K D elements for
S rows of C tokens, which is what a decode step moves besides the weights.

Where block tables are the identity (row i owns block i: the contiguous cache) decode reads a view; else
the blocks are gathered first, which copies them. The products are two batched matmuls rather than
`scaled_dot_product_attention`, which is slower at one query token on a CPU.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from hybrid_engine.ops.norm import RMSNormOp
from hybrid_engine.ops.rotary import apply_rotary


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """N tokens on their way through the model, and where their keys and values go."""

    tokens: torch.Tensor  # [N] int64
    positions: torch.Tensor  # [N] int64: index of each token in its sequence
    write_blocks: torch.Tensor  # [N] int64: the block each token's key and value go to
    write_offsets: torch.Tensor  # [N] int64: and the place in it
    made: dict[tuple, torch.Tensor] = field(default_factory=dict)  # made by the first layer, used by all

    def write_rows(self, num_kv_heads: int, block_size: int) -> torch.Tensor:
        """Rows `[N*K]` of the workspace seen as `[num_blocks * K * block_size, D]` that the tokens write."""
        key = (num_kv_heads, block_size)
        if key not in self.made:
            heads = torch.arange(num_kv_heads, device=self.positions.device)
            rows = (self.write_blocks[:, None] * num_kv_heads + heads) * block_size + self.write_offsets[:, None]
            self.made[key] = rows.flatten()
        return self.made[key]


@dataclass(frozen=True, kw_only=True)
class PrefillBatch(TokenBatch):
    """Whole sequences, packed one after the other."""

    lengths: tuple[int, ...]  # of the R sequences; they add to N
    wanted: torch.Tensor  # [R] int64: the tokens whose next-token logits are wanted, each sequence's last


@dataclass(frozen=True, kw_only=True)
class DecodeBatch(TokenBatch):
    """One new token for each of S running rows."""

    block_tables: torch.Tensor  # [S, n] int64, rows padded with any valid block
    context: int  # longest sequence in the batch, new token included
    is_identity: bool  # row i owns block i and nothing else

    def bias(self, window: int | None, num_kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
        """0 where a row may look, -inf elsewhere: `[S*K, 1, context]`."""
        key = ("bias", window, num_kv_heads)
        if key not in self.made:
            distance = self.positions[:, None] - torch.arange(self.context, device=self.positions.device)
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self.made[key] = bias.repeat_interleave(num_kv_heads, 0).unsqueeze(1)
        return self.made[key]


Batch = PrefillBatch | DecodeBatch


def like_lengths(lengths: tuple[int, ...]) -> list[list[int]]:
    """Indices of sequences that may be padded together: within a group none is under half the longest.

    Padding then at most doubles the tokens, whatever the mixture of lengths.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and 2 * lengths[index] >= lengths[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


class SoftmaxContextOp:
    """Callable `(q, k, v, rotary, keys, values, batch, q_gamma, k_gamma) -> context [N, H*D]`.

    Args:
        num_heads, num_kv_heads, head_dim: H, K, D; H is a multiple of K.
        scale: multiplies q.k, usually D^-0.5.
        window: sliding window in tokens, the query's own included; None: all.
        qk_norm_eps: eps of the RMS norm over D applied to q and k before rotary; None: the family has none.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None = None,
        qk_norm_eps: float | None = None,
    ):
        assert num_heads % num_kv_heads == 0, f"{num_heads=} {num_kv_heads=}"
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale, self.window = scale, window
        self.qk_norm = None if qk_norm_eps is None else RMSNormOp(qk_norm_eps)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: Batch,
        q_gamma: torch.Tensor | None = None,
        k_gamma: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`q [N, H*D]`, `k`, `v` `[N, K*D]`, rotary = two `[N, 1, D]`; writes into `keys` and `values`."""
        q = q.reshape(-1, self.num_heads, self.head_dim)
        k = k.reshape(-1, self.num_kv_heads, self.head_dim)
        v = v.reshape(-1, self.num_kv_heads, self.head_dim)
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, q_gamma), self.qk_norm(k, k_gamma)
        if rotary is not None:
            q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        rows = batch.write_rows(self.num_kv_heads, keys.shape[2])
        for cache, new in ((keys, k), (values, v)):
            cache.view(-1, self.head_dim).index_copy_(0, rows, new.reshape(-1, self.head_dim))
        if isinstance(batch, PrefillBatch):
            return self._prefill(q, k, v, batch.lengths)
        return self._decode(q, keys, values, batch)

    def _prefill(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        """Causal attention inside each packed sequence; sequences of like length are padded to one batch."""
        if len(set(lengths)) == 1:
            return self._causal(*(x.unflatten(0, (len(lengths), lengths[0])) for x in (q, k, v))).flatten(0, 1)
        rows = torch.arange(q.shape[0], device=q.device).split(lengths)
        contexts: list[torch.Tensor] = [q] * len(lengths)
        for group in like_lengths(lengths):
            padded = torch.nn.utils.rnn.pad_sequence([rows[i] for i in group], batch_first=True)
            for i, context in zip(group, self._causal(q[padded], k[padded], v[padded]), strict=True):
                contexts[i] = context[: lengths[i]]
        return torch.cat(contexts)

    def _causal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """`q [R, n, H, D]`, `k`, `v` `[R, n, K, D]` -> `[R, n, H*D]`."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = None
        if self.window is not None and self.window < q.shape[2]:
            distance = torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(q.shape[2], device=q.device)
            mask = (distance >= 0) & (distance < self.window)
        context = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )
        return context.transpose(1, 2).flatten(2)

    def _decode(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """One query token per row against its blocks."""
        num_rows, groups = q.shape[0], q.shape[0] * self.num_kv_heads
        k, v = (self._rows(cache, batch).reshape(groups, -1, self.head_dim) for cache in (keys, values))
        q = q.reshape(groups, -1, self.head_dim)  # the H/K query heads of one KV head share its read
        bias = batch.bias(self.window, self.num_kv_heads, q.dtype)
        scores = torch.baddbmm(bias, q, k[:, : batch.context].transpose(1, 2), alpha=self.scale)
        probs = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.bmm(probs, v[:, : batch.context]).reshape(num_rows, -1)

    def _rows(self, cache: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """The rows' blocks side by side, `[S, K, n * block_size, D]`."""
        num_rows = batch.tokens.shape[0]
        if batch.is_identity:
            return cache[:num_rows]
        return cache[batch.block_tables].transpose(1, 2).flatten(2, 3)
