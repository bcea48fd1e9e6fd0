"""Attention over the paged KV workspace: q/k norm, rotary, write of the new keys and values, softmax, context.

    score[i, j] = q_i . k_j * scale                       for i - j < window, and j <= i or both of one image (spans)
    score       = c tanh(score / c)                       under soft-capping (Gemma 2)
    score      += slope_h (j - i)                         under ALiBi (Press et al. 2022, arXiv 2108.12409)
    context_i   = sum_j exp(score_ij) v_j / (sum_j exp(score_ij) + exp(sink_h))

Keys and values are stored in blocks, `[num_blocks, K, block_size, D]`; a row's block table lists its blocks in order.
Prefill takes the rows packed, `[N, ...]` tokens of all sequences one after the other, and attends inside each sequence
only; if the start of a sequence was fed before, keys and values of the whole sequence are copied from the workspace
first. An encoder's sequences are packed too, attend in both directions (any i - j) and are not written to the
workspace. Decode takes one token per row and reads the workspace: 2 S C K D elements for S rows of C tokens, the
traffic of a decode step in addition to the weights, and does 4 S C H D operations. If block tables are the identity
(row i owns block i: the contiguous cache) the reference reads a view; else it gathers the blocks first, which copies
them. Its products are two batched matmuls rather than `scaled_dot_product_attention`, which is slower at one query
token on a CPU.

N packed tokens, S decoded rows, H query heads, K key/value heads, G = H / K, D head dimension.

`attend_grouped` is attention in which several query heads share a key and value head, by a fused kernel of torch.
On CUDA flash attention shares heads in 16 bits and without a mask; memory-efficient attention takes fp32 and masks, but
does not share heads (`check_batch_size_and_num_heads_dense` in PyTorch's
aten/src/ATen/native/transformers/sdp_utils_cpp.h). cuDNN's takes masks in 16 bits, on the cards and shapes that it
supports. Other cases run as plain products, which write the scores of all heads. Keys and values are repeated there
instead: G times their bytes, and no scores.

Rotary position embedding (Su et al. 2021, arXiv 2104.09864) is of the first R of D dimensions:

    halves (Llama):      pairs are (x_i, x_{i + R/2});   y = x [cos, cos] + [x2, x1] [-sin, sin]
    interleaved (GPT-J): pairs are (x_2i, x_{2i+1});     y = x [c0, c0, c1, c1, ...] + swapped [-s0, s0, -s1, s1, ...]

Angles are position * inv_freq in fp32; cos and sin include the attention scaling of yarn and longrope and are rounded
to the compute dtype, as in the trainer. The tables hold the right-hand form, which takes three kernels (multiply, and a
multiply-add for each half) where the plain form takes seven.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from hybrid_engine.ops import cpu_kernels
from hybrid_engine.ops import softmax_context_kernels as kernels
from hybrid_engine.ops.batch import (
    QKV,
    Batch,
    DecodeBatch,
    EncoderBatch,
    HeadWeights,
    KVBlocks,
    MixedBatch,
    PrefillBatch,
    read_context,
    write_rows,
)
from hybrid_engine.ops.dispatch import kernel_or_reference, say_once, use_triton
from hybrid_engine.ops.norm import NORM_OPS
from hybrid_engine.ops.softmax_context_launch import Numbers, attend_by_kernels, attend_packed_by_kernel

NO_WEIGHTS = HeadWeights()


def like_lengths(lengths: tuple[int, ...]) -> list[list[int]]:
    """Indices of sequences that are padded together: within a group none is shorter than half the longest.

    Padding then at most doubles the tokens, for any mixture of lengths.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and 2 * lengths[index] >= lengths[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


class SoftmaxContextOp:
    """Callable `(qkv, cache, batch, weights) -> context [N, H*D]`.

    Args:
        num_heads, num_kv_heads, head_dim: H, K, D; H is a multiple of K.
        scale: multiplies q.k, usually D^-0.5.
        window: sliding window in tokens, the query's own included; None: all.
        chunk: a query attends to the keys of its own chunk of so many positions; None: all. Sequences that are longer
            than a chunk are computed in torch.
        qk_norm: kind of the norm over D applied to q and k before rotary (see `ops.norm`); None: no norm.
        qk_norm_eps: eps of the norm.
        is_interleaved: rotary pairs are adjacent (GPT-J) instead of halves (Llama).
        softcap: c of the soft-capping; None: none.
        alibi_rounds: ALiBi's biases are bf16(bf16(slope_h) bf16(j)) * scale, as transformers' Falcon was trained;
            only in torch, for every dtype.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        *,
        window: int | None = None,
        chunk: int | None = None,
        qk_norm: str | None = None,
        qk_norm_eps: float = 0.0,
        is_interleaved: bool = False,
        softcap: float | None = None,
        alibi_rounds: bool = False,
    ):
        assert num_heads % num_kv_heads == 0, f"{num_heads=} {num_kv_heads=}"
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale, self.softcap, self.alibi_rounds = scale, softcap, alibi_rounds
        self.norm_kind, self.qk_norm_eps = qk_norm, qk_norm_eps
        self.qk_norm = None if qk_norm is None else NORM_OPS[qk_norm](qk_norm_eps)
        self.is_interleaved, self.chunk = is_interleaved, chunk
        self.set_window(window)

    def set_window(self, window: int | None) -> None:
        """Changes the window from now on; recorded steps keep theirs."""
        self.window = window
        heads = self.num_kv_heads, self.num_heads // self.num_kv_heads, self.head_dim
        self._cpu_numbers = cpu_kernels.AttentionNumbers(
            *heads, window or 0, self.is_interleaved, self.scale, self.softcap or 0.0
        )
        self._numbers = Numbers(
            self.num_heads, self.num_kv_heads, self.head_dim, self.scale, window, self.softcap,
            self.norm_kind, self.qk_norm_eps, self.is_interleaved,
        )  # fmt: skip

    def __call__(
        self, qkv: QKV, cache: KVBlocks, batch: Batch | EncoderBatch, weights: HeadWeights = NO_WEIGHTS
    ) -> torch.Tensor:
        """Writes the batch's keys and values into `cache`, except for an encoder, and attends.

        Rows of `qkv` after those of the batch's tokens, of a prefill, are padding: their context is 0.
        """
        if isinstance(batch, MixedBatch):
            decoded, packed = qkv.split(len(batch.decode.tokens))
            contexts = self(decoded, cache, batch.decode, weights), self(packed, cache, batch.prefill, weights)
            return torch.cat(contexts)
        if isinstance(batch, PrefillBatch) and len(qkv.q) > len(batch.tokens):
            context = self(qkv.without_padding(len(batch.tokens)), cache, batch, weights)
            return F.pad(context, (0, 0, 0, len(qkv.q) - len(batch.tokens)))
        if self.chunk is not None and longest(batch) > self.chunk:
            if use_triton(qkv.q):
                say_once(f"attention: no kernel for sequences longer than a chunk of {self.chunk} tokens; in torch")
            return self.reference(qkv, cache, batch, weights)
        if isinstance(batch, PrefillBatch) and self._bounds(batch) is not None:
            return self.reference(qkv, cache, batch, weights)  # kernels have no such mask
        if self._has_kernel(qkv.q):
            return kernel_or_reference(self._launch, self.reference, qkv, cache, batch, weights)
        rounds = self.alibi_rounds and weights.alibi is not None
        if not isinstance(batch, EncoderBatch) and not rounds and cpu_kernels.can_attend(qkv, cache, batch, weights):
            arguments = self._cpu_numbers, self._norm(qkv, weights), cache
            if isinstance(batch, DecodeBatch):
                return cpu_kernels.decode_attention(*arguments, batch, weights)
            return cpu_kernels.prefill_attention(*arguments, batch, weights)
        return self.reference(qkv, cache, batch, weights)

    def attend_packed(self, qkv: QKV, batch: PrefillBatch, weights: HeadWeights = NO_WEIGHTS) -> torch.Tensor:
        """Attention of a prefill's queries `[N, K, G, D]` to keys and values that are passed; no workspace is used.

        Queries and keys are as they enter the scores. `k` and `v` are those of `batch.context`, if it has one:
        `[C, K, D]`; else of the batch's tokens. The result is `[N, H * D]`.
        """
        if self._has_kernel(qkv.q):
            return kernel_or_reference(self._launch_packed, self._attend_packed, qkv, batch, weights)
        return self._attend_packed(qkv, batch, weights)

    def _attend_packed(self, qkv: QKV, batch: PrefillBatch, weights: HeadWeights) -> torch.Tensor:
        heads = qkv._replace(q=qkv.q.reshape(-1, self.num_heads, self.head_dim))
        if batch.context is not None:
            return self._continued(heads, batch.lengths, batch.context.lengths, weights)
        return self._packed(heads, batch.lengths, lambda q, k, v, _: self._causal(q, k, v, weights))

    def _launch_packed(self, qkv: QKV, batch: PrefillBatch, weights: HeadWeights) -> torch.Tensor:
        return attend_packed_by_kernel(self._numbers, qkv, batch, weights)

    def _norm(self, qkv: QKV, weights: HeadWeights) -> QKV:
        """Norms queries and keys, if the layer has norms."""
        if self.qk_norm is None:
            return qkv
        assert weights.q_gamma is not None and weights.k_gamma is not None
        return qkv._replace(q=self.qk_norm(qkv.q, weights.q_gamma), k=self.qk_norm(qkv.k, weights.k_gamma))

    def _has_kernel(self, q: torch.Tensor) -> bool:
        if not use_triton(q):
            return False
        if self.head_dim > kernels.MAX_HEAD_DIM:
            say_once(f"attention: no kernel for heads of {self.head_dim}, more than {kernels.MAX_HEAD_DIM}; in torch")
            return False
        if self.alibi_rounds:
            say_once("attention: no kernel for ALiBi biases rounded to bf16; in torch")
            return False
        if self.norm_kind not in kernels.NORM_KINDS:
            say_once(f"attention: no kernel for q/k norm {self.norm_kind!r}; in torch")
            return False
        return True

    def reference(
        self,
        qkv: QKV,
        cache: KVBlocks,
        batch: PrefillBatch | DecodeBatch | EncoderBatch,
        weights: HeadWeights = NO_WEIGHTS,
    ) -> torch.Tensor:
        """The reference: the function of the kernel in plain torch."""
        heads = qkv._replace(q=qkv.q.reshape(-1, self.num_heads, self.head_dim))
        if isinstance(batch, EncoderBatch):
            self._check_encoder(qkv, weights)
            return self._packed(heads, batch.lengths, self._both_ways)
        q, k, v, rotary = self._norm(heads, weights)
        if rotary is not None:  # both at once: half the operations
            both = apply_rotary(torch.cat((q, k), 1), *rotary, is_interleaved=self.is_interleaved)
            q, k = both.split((self.num_heads, self.num_kv_heads), 1)
        rows = write_rows(batch, self.num_kv_heads, cache.keys.shape[2])
        # A product may be stored by columns, for which `index_put_` takes 143 us for 32 rows of 384, and with a copy
        # first 31.
        for blocks, new in ((cache.keys, k), (cache.values, v.contiguous())):
            blocks.view(-1, self.head_dim).index_put_((rows,), new)
        if isinstance(batch, PrefillBatch) and batch.context is not None:
            heads = QKV(q, *read_context(cache, batch.context))
            return self._continued(heads, batch.lengths, batch.context.lengths, weights, self._bounds(batch))
        if isinstance(batch, PrefillBatch) and (bounds := self._bounds(batch)) is not None:
            return self._continued(QKV(q, k, v), batch.lengths, batch.lengths, weights, bounds)
        if isinstance(batch, PrefillBatch):
            return self._packed(QKV(q, k, v), batch.lengths, lambda q, k, v, _: self._causal(q, k, v, weights))
        return self._decode(q, cache, batch, weights)

    def _bounds(self, batch: PrefillBatch) -> torch.Tensor | None:
        """`[2, N]` of tokens that see later ones in this layer; None if none does."""
        return None if batch.spans is None or (batch.spans.is_local and self.window is None) else batch.spans.bounds

    def _check_encoder(self, qkv: QKV, weights: HeadWeights) -> None:
        """Raises ValueError for features that attention in both directions does not support; encoders lack them."""
        features = (self.window, self.softcap, self.qk_norm, qkv.rotary, weights.sinks, weights.alibi)
        if any(feature is not None for feature in features):
            raise ValueError("attention both ways takes no window, soft-capping, norms, rotary, sinks or ALiBi")

    def _packed(
        self,
        qkv: QKV,
        lengths: tuple[int, ...],
        attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, list[int] | None], torch.Tensor],
    ) -> torch.Tensor:
        """Attention inside each packed sequence; sequences of similar length are padded to one batch.

        `attend` takes `[R, n, ...]` of R sequences, and their lengths unless all are n.
        """
        q, k, v, _ = qkv
        if len(set(lengths)) == 1:
            q, k, v = (x.unflatten(0, (len(lengths), lengths[0])) for x in (q, k, v))
            return attend(q, k, v, None).flatten(0, 1)
        rows = torch.arange(q.shape[0], device=q.device).split(lengths)
        contexts: list[torch.Tensor] = [q] * len(lengths)
        for group in like_lengths(lengths):
            index = torch.nn.utils.rnn.pad_sequence([rows[i] for i in group], batch_first=True)
            padded = attend(q[index], k[index], v[index], [lengths[i] for i in group])
            for i, context in zip(group, padded, strict=True):
                contexts[i] = context[: lengths[i]]
        return torch.cat(contexts)

    def _continued(
        self,
        heads: QKV,
        lengths: tuple[int, ...],
        key_lengths: tuple[int, ...],
        weights: HeadWeights,
        bounds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the last tokens of sequences, `q [N, H, D]`, one sequence at a time; see `_bounds`."""
        of_sequences = [None] * len(lengths) if bounds is None else bounds.split(lengths, 1)
        parts = zip(heads.q.split(lengths), heads.k.split(key_lengths), heads.v.split(key_lengths), strict=True)
        return torch.cat(
            [
                self._causal(q[None], k[None], v[None], weights, own)[0]
                for (q, k, v), own in zip(parts, of_sequences, strict=True)
            ]
        )

    def _both_ways(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int] | None) -> torch.Tensor:
        """`q [R, n, H, D]`, `k`, `v` `[R, n, K, D]` -> `[R, n, H*D]`; keys after `lengths` are padding."""
        mask = None
        if lengths is not None:
            places = torch.arange(q.shape[1], device=q.device)
            mask = (places < torch.tensor(lengths, device=q.device)[:, None])[:, None, None]  # [R, 1, 1, n]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        context = attend_grouped(q, k, v, mask, scale=self.scale)
        return context.transpose(1, 2).flatten(2)

    def _causal(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        weights: HeadWeights,
        bounds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`q [R, n, H, D]`, the last tokens of the sequences of `k`, `v` `[R, C, K, D]` -> `[R, n, H*D]`.

        `bounds [2, n]`: a query that is within its bounds sees the keys up to the last of them.
        """
        sinks, alibi = weights.sinks, weights.alibi
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        places = torch.arange(k.shape[2], device=q.device)
        distance = places[-q.shape[2] :, None] - places
        hidden = self._is_hidden(distance, places[-q.shape[2] :])
        if bounds is not None:
            hidden = hidden & ((distance >= 0) | (places > bounds[1, :, None]))
        limit = min(self.window or k.shape[2], self.chunk or k.shape[2])
        is_plain = bounds is None and q.shape[2] == k.shape[2] <= limit
        if self.softcap is None and sinks is None and alibi is None:
            context = attend_grouped(q, k, v, None if is_plain else ~hidden, is_causal=is_plain, scale=self.scale)
            return context.transpose(1, 2).flatten(2)
        k, v = (x.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for x in (k, v))
        scores = self._cap(q @ k.transpose(2, 3) * self.scale).float()
        if alibi is not None:
            bias = self._linear_bias(alibi, distance, places)  # [n, H, n], or [H, n]
            scores = scores + (bias.transpose(0, 1) if bias.dim() == 3 else bias[:, None])
        scores = scores.masked_fill(hidden, float("-inf"))
        return (self._softmax(scores, sinks).to(v.dtype) @ v).transpose(1, 2).flatten(2)

    def _decode(self, q: torch.Tensor, cache: KVBlocks, batch: DecodeBatch, weights: HeadWeights) -> torch.Tensor:
        """One query token `q [S, H, D]` per row against its blocks."""
        sinks, alibi = weights.sinks, weights.alibi
        num_rows, groups = q.shape[0], q.shape[0] * self.num_kv_heads
        k, v = self._rows(cache.keys, batch).transpose(1, 2), self._rows(cache.values, batch)
        q = q.reshape(groups, -1, self.head_dim)  # the H/K query heads of one KV head share its read
        bias = self._bias(batch, q.dtype if alibi is None else torch.float32, alibi)
        if self.softcap is None and alibi is None:
            scores = torch.baddbmm(bias, q, k, alpha=self.scale)
        else:
            scores = self._cap(torch.bmm(q, k) * self.scale) + bias
        if sinks is None:
            probs = torch.softmax(scores, dim=-1, dtype=torch.float32)
        else:
            by_head = scores.view(num_rows, self.num_heads, 1, -1).float()
            probs = self._softmax(by_head, sinks).view(scores.shape)
        return torch.bmm(probs.to(v.dtype), v).reshape(num_rows, -1)

    def _linear_bias(self, alibi: torch.Tensor, distance: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """`[..., H, n]` fp32 for keys at `places [n]`, `distance [..., n]` before their query."""
        if self.alibi_rounds:  # of the key's place only: softmax cancels the term of the query's place
            return (alibi.bfloat16()[:, None] * places.bfloat16()).float() * self.scale
        return -alibi[:, None] * distance[..., None, :]

    def _bias(self, batch: DecodeBatch, dtype: torch.dtype, alibi: torch.Tensor | None) -> torch.Tensor:
        """The addend of the scores, -inf for hidden keys: `[S*K, 1 or G, context]`."""
        distance = batch.positions[:, None] - torch.arange(batch.context, device=batch.positions.device)
        hidden = self._is_hidden(distance, batch.positions)
        if alibi is None:
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill(hidden, float("-inf"))
            return bias.repeat_interleave(self.num_kv_heads, 0).unsqueeze(1)
        places = torch.arange(batch.context, device=hidden.device)
        by_head = self._linear_bias(alibi, distance.clamp(min=0), places).expand(len(hidden), -1, -1)  # [S, H, context]
        by_head = by_head.to(dtype).masked_fill(hidden[:, None], float("-inf"))
        return by_head.unflatten(1, (self.num_kv_heads, -1)).flatten(0, 1)

    def _is_hidden(self, distance: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Whether a key `distance [n, C]` before its query, of `positions [n]`, is not attended to."""
        hidden = distance < 0
        if self.window is not None:
            hidden = hidden | (distance >= self.window)
        if self.chunk is not None:
            hidden = hidden | (distance > (positions % self.chunk)[:, None])
        return hidden

    def _cap(self, scores: torch.Tensor) -> torch.Tensor:
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap

    @staticmethod
    def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """Softmax of `scores [R, H, n, C]` fp32 with one more logit per head, which the result leaves out."""
        if sinks is None:
            return scores.softmax(-1)
        sink = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]

    def _rows(self, cache: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """The rows' blocks concatenated, `[S*K, context, D]`."""
        if batch.is_identity:
            return cache[: batch.tokens.shape[0], :, : batch.context].flatten(0, 1)
        rows = cache[batch.block_tables].transpose(1, 2).flatten(2, 3)
        return rows[:, :, : batch.context].flatten(0, 1)

    def _launch(
        self, qkv: QKV, cache: KVBlocks, batch: PrefillBatch | DecodeBatch | EncoderBatch, weights: HeadWeights
    ) -> torch.Tensor:
        """The op by its kernels. Raises ValueError for a tensor that they cannot read."""
        if isinstance(batch, EncoderBatch):
            self._check_encoder(qkv, weights)
        return attend_by_kernels(self._numbers, qkv, cache, batch, weights)


def longest(batch: PrefillBatch | DecodeBatch | EncoderBatch) -> int:
    """Upper bound of the lengths of the batch's sequences, earlier tokens included."""
    if isinstance(batch, DecodeBatch):
        return batch.context
    context = batch.context if isinstance(batch, PrefillBatch) else None
    return max((batch.lengths if context is None else context.lengths), default=0)


def attend_grouped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """torch's `scaled_dot_product_attention` with `enable_gqa`; the result is `[R, H, n, D]`.

    Args:
        query: `[R, H, n, D]`.
        key, value: `[R, K, C, D]`; H is a multiple of K.
        mask: True, or 0, where a query attends to a key; broadcast to `[R, H, n, C]`.
        is_causal, scale, dropout: as torch's `is_causal`, `scale` and `dropout_p`.
    """
    key, value = repeat_where_not_shared(query, key, value, mask)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip


def repeat_where_not_shared(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value, repeated to the heads of `query` on CUDA in fp32 or under a mask; see `attend_grouped`."""
    group = query.shape[1] // key.shape[1]
    is_shared = mask is None and query.dtype in (torch.bfloat16, torch.float16)
    if is_shared or group == 1 or not query.is_cuda:
        return key, value
    return key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)


def rotary_rows(
    angles: torch.Tensor, scaling: float, dtype: torch.dtype, is_interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin for `apply_rotary`, `[N, R]` each, from `angles [N, R/2]` fp32, times `scaling`."""
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    if is_interleaved:
        pair = torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)
    else:
        pair = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return pair[0].to(dtype), pair[1].to(dtype)


def rotary_table(
    inv_freq: torch.Tensor, scaling: float, num_positions: int, dtype: torch.dtype, is_interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows for the positions 0 to `num_positions` - 1, from `inv_freq [R/2]`."""
    positions = torch.arange(num_positions, device=inv_freq.device, dtype=torch.float32)
    return rotary_rows(torch.outer(positions, inv_freq.float()), scaling, dtype, is_interleaved)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool = False) -> torch.Tensor:
    """`x [N, heads, D]` with its first R dimensions rotated by rows `[N, R]`."""
    rest = x.shape[-1] - cos.shape[-1]
    x, *others = x.split((cos.shape[-1], rest), -1) if rest else (x,)
    rotate = _rotate_neighbours if is_interleaved else _rotate_halves
    rotated = rotate(x, cos.unsqueeze(1), sin.unsqueeze(1))
    return torch.cat((rotated, *others), -1) if others else rotated


def _rotate_neighbours(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(x * cos, partner, sin)


def _rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The halves are not moved: swapping them in a copy, as `roll` does, takes 71 us where this takes 41."""
    rotated = x * cos
    (first, second), (low, high), (sin_low, sin_high) = (part.chunk(2, -1) for part in (rotated, x, sin))
    first.addcmul_(high, sin_low)
    second.addcmul_(low, sin_high)
    return rotated
