"""Attention over the paged KV workspace: q/k norm, rotary, write of the new keys and values, softmax, context.

    score[i, j] = q_i . k_j * scale                       for 0 <= i - j < window
    score       = c tanh(score / c)                       under soft-capping (Gemma 2)
    score      += slope_h (j - i)                         under ALiBi (Press et al. 2022, arXiv 2108.12409)
    context_i   = sum_j exp(score_ij) v_j / (sum_j exp(score_ij) + exp(sink_h))

Keys and values live in blocks, `[num_blocks, K, block_size, D]`; a row's block table lists its blocks in
order. Prefill takes the rows packed, `[N, ...]` tokens of all sequences one after the other, and attends
inside the sequence only. Decode takes one token per row and reads the workspace: 2 S C K D elements for
S rows of C tokens, which is what a decode step moves besides the weights, and does 4 S C H D operations.

Where block tables are the identity (row i owns block i: the contiguous cache) the reference reads a view;
else it gathers the blocks first, which copies them. Its products are two batched matmuls rather than
`scaled_dot_product_attention`, which is slower at one query token on a CPU.

N packed tokens, S decoded rows, H query heads, K key/value heads, G = H / K, D head dimension.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from hybrid_engine.ops.norm import NORM_OPS
from hybrid_engine.ops.rotary import apply_rotary


@dataclass(frozen=True, kw_only=True)
class PrefillBatch:
    """Whole sequences, packed one after the other."""

    tokens: torch.Tensor  # [N] int64
    positions: torch.Tensor  # [N] int64: index of each token in its sequence
    write_blocks: torch.Tensor  # [N] int64: the block each token's key and value go to
    write_offsets: torch.Tensor  # [N] int64: and the place in it
    lengths: tuple[int, ...]  # of the R sequences; they add to N
    starts: torch.Tensor  # [R+1] int32: where each sequence starts, and N
    wanted: torch.Tensor  # [R] int64: the tokens whose next-token logits are wanted, each sequence's last
    made: dict[tuple, torch.Tensor] = field(default_factory=dict)  # made by the first layer, used by all

    def places(self, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Block and place in it, `[N]` each, that every token's key and value go to."""
        return self.write_blocks, self.write_offsets


@dataclass(frozen=True, kw_only=True)
class DecodeBatch:
    """One new token for each of S running rows."""

    tokens: torch.Tensor  # [S] int64
    positions: torch.Tensor  # [S] int64: index of each token in its sequence
    block_tables: torch.Tensor  # [S, n] int64, rows padded with any valid block
    context: int  # no sequence is longer, new tokens included
    is_identity: bool  # row i owns block i and nothing else
    made: dict[tuple, torch.Tensor] = field(default_factory=dict)  # made by the first layer, used by all

    def places(self, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Block and place in it, `[S]` each, that every token's key and value go to."""
        column = self.positions // block_size
        return self.block_tables.gather(1, column[:, None]).squeeze(1), self.positions % block_size


Batch = PrefillBatch | DecodeBatch


def write_rows(batch: Batch, num_kv_heads: int, block_size: int) -> torch.Tensor:
    """Rows `[N*K]` of the workspace seen as `[num_blocks * K * block_size, D]` that the tokens write."""
    key = ("rows", num_kv_heads, block_size)
    if key not in batch.made:
        blocks, offsets = batch.places(block_size)
        heads = torch.arange(num_kv_heads, device=blocks.device)
        rows = (blocks[:, None] * num_kv_heads + heads) * block_size + offsets[:, None]
        batch.made[key] = rows.flatten()
    return batch.made[key]


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
    """Callable `(q, k, v, rotary, keys, values, batch, q_gamma, k_gamma, sinks, alibi) -> context [N, H*D]`.

    Args:
        num_heads, num_kv_heads, head_dim: H, K, D; H is a multiple of K.
        scale: multiplies q.k, usually D^-0.5.
        window: sliding window in tokens, the query's own included; None: all.
        qk_norm: kind of the norm over D applied to q and k before rotary (see `ops.norm`); None: no norm.
        qk_norm_eps: its eps.
        is_interleaved: rotary pairs are neighbours (GPT-J) instead of halves (Llama).
        softcap: c of the soft-capping; None: none.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        *,
        window: int | None = None,
        qk_norm: str | None = None,
        qk_norm_eps: float = 0.0,
        is_interleaved: bool = False,
        softcap: float | None = None,
    ):
        assert num_heads % num_kv_heads == 0, f"{num_heads=} {num_kv_heads=}"
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale, self.window, self.softcap = scale, window, softcap
        self.qk_norm = None if qk_norm is None else NORM_OPS[qk_norm](qk_norm_eps)
        self.is_interleaved = is_interleaved

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
        sinks: torch.Tensor | None = None,
        alibi: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes the batch's keys and values into `keys` and `values`, and attends.

        Args:
            q: `[N, K, G, D]`; k, v: `[N, K, D]`; any strides.
            rotary: cos and sin rows `[N, R]` as `rotary_table` makes them; None: no rotary.
            keys, values: `[num_blocks, K, block_size, D]`.
            q_gamma, k_gamma: `[D]` of the q/k norm.
            sinks: `[H]`, a further logit of each head that draws attention to nothing.
            alibi: `[H]` fp32 slopes.
        """
        return self.reference(q, k, v, rotary, keys, values, batch, q_gamma, k_gamma, sinks, alibi)

    def reference(
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
        sinks: torch.Tensor | None = None,
        alibi: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The same in plain torch."""
        q = q.reshape(-1, self.num_heads, self.head_dim)
        if self.qk_norm is not None:
            assert q_gamma is not None and k_gamma is not None
            q, k = self.qk_norm(q, q_gamma), self.qk_norm(k, k_gamma)
        if rotary is not None:
            q, k = (apply_rotary(x, *rotary, is_interleaved=self.is_interleaved) for x in (q, k))
        rows = write_rows(batch, self.num_kv_heads, keys.shape[2])
        for cache, new in ((keys, k), (values, v)):
            cache.view(-1, self.head_dim).index_copy_(0, rows, new.reshape(-1, self.head_dim))
        if isinstance(batch, PrefillBatch):
            return self._prefill(q, k, v, batch.lengths, sinks, alibi)
        return self._decode(q, keys, values, batch, sinks, alibi)

    def _prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lengths: tuple[int, ...],
        sinks: torch.Tensor | None,
        alibi: torch.Tensor | None,
    ) -> torch.Tensor:
        """Causal attention inside each packed sequence; sequences of like length are padded to one batch."""
        if len(set(lengths)) == 1:
            padded = (x.unflatten(0, (len(lengths), lengths[0])) for x in (q, k, v))
            return self._causal(*padded, sinks, alibi).flatten(0, 1)
        rows = torch.arange(q.shape[0], device=q.device).split(lengths)
        contexts: list[torch.Tensor] = [q] * len(lengths)
        for group in like_lengths(lengths):
            index = torch.nn.utils.rnn.pad_sequence([rows[i] for i in group], batch_first=True)
            for i, context in zip(group, self._causal(q[index], k[index], v[index], sinks, alibi), strict=True):
                contexts[i] = context[: lengths[i]]
        return torch.cat(contexts)

    def _causal(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        alibi: torch.Tensor | None,
    ) -> torch.Tensor:
        """`q [R, n, H, D]`, `k`, `v` `[R, n, K, D]` -> `[R, n, H*D]`."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        places = torch.arange(q.shape[2], device=q.device)
        distance = places[:, None] - places
        hidden = distance < 0
        is_plain = self.window is None or self.window >= q.shape[2]
        if not is_plain:
            hidden = hidden | (distance >= self.window)
        if self.softcap is None and sinks is None and alibi is None:
            context = F.scaled_dot_product_attention(
                q, k, v, attn_mask=None if is_plain else ~hidden, is_causal=is_plain, scale=self.scale, enable_gqa=True
            )
            return context.transpose(1, 2).flatten(2)
        k, v = (x.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for x in (k, v))
        scores = self._cap(q @ k.transpose(2, 3) * self.scale).float()
        if alibi is not None:
            scores = scores - alibi[:, None, None] * distance
        scores = scores.masked_fill(hidden, float("-inf"))
        return (self._softmax(scores, sinks).to(v.dtype) @ v).transpose(1, 2).flatten(2)

    def _decode(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: DecodeBatch,
        sinks: torch.Tensor | None,
        alibi: torch.Tensor | None,
    ) -> torch.Tensor:
        """One query token per row against its blocks."""
        num_rows, groups = q.shape[0], q.shape[0] * self.num_kv_heads
        k, v = (self._rows(cache, batch).reshape(groups, -1, self.head_dim) for cache in (keys, values))
        q = q.reshape(groups, -1, self.head_dim)  # the H/K query heads of one KV head share its read
        bias = self._bias(batch, q.dtype if alibi is None else torch.float32, alibi)
        k = k[:, : batch.context].transpose(1, 2)
        if self.softcap is None and alibi is None:
            scores = torch.baddbmm(bias, q, k, alpha=self.scale)
        else:
            scores = self._cap(torch.bmm(q, k) * self.scale) + bias
        if sinks is None:
            probs = torch.softmax(scores, dim=-1, dtype=torch.float32)
        else:
            by_head = scores.view(num_rows, self.num_heads, 1, -1).float()
            probs = self._softmax(by_head, sinks).view(scores.shape)
        return torch.bmm(probs.to(v.dtype), v[:, : batch.context]).reshape(num_rows, -1)

    def _bias(self, batch: DecodeBatch, dtype: torch.dtype, alibi: torch.Tensor | None) -> torch.Tensor:
        """What is added to the scores, -inf where a row may not look: `[S*K, 1 or G, context]`."""
        key = ("bias", self.window, self.num_kv_heads, dtype)
        if key not in batch.made:
            distance = batch.positions[:, None] - torch.arange(batch.context, device=batch.positions.device)
            hidden = distance < 0 if self.window is None else (distance < 0) | (distance >= self.window)
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            if alibi is not None:
                bias = -alibi[:, None] * distance[:, None].clamp(min=0)  # [S, H, context]
                hidden = hidden[:, None]
            bias = bias.masked_fill_(hidden, float("-inf"))
            if alibi is None:
                bias = bias.repeat_interleave(self.num_kv_heads, 0).unsqueeze(1)
            batch.made[key] = bias if alibi is None else bias.unflatten(1, (self.num_kv_heads, -1)).flatten(0, 1)
        return batch.made[key]

    def _cap(self, scores: torch.Tensor) -> torch.Tensor:
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap

    @staticmethod
    def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """Softmax of `scores [R, H, n, C]` fp32 with one further logit per head, which is then left out."""
        if sinks is None:
            return scores.softmax(-1)
        sink = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]

    def _rows(self, cache: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """The rows' blocks side by side, `[S, K, n * block_size, D]`."""
        if batch.is_identity:
            return cache[: batch.tokens.shape[0]]
        return cache[batch.block_tables].transpose(1, 2).flatten(2, 3)
