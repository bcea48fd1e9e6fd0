"""Launches of the attention kernels: inputs are checked and tile sizes chosen once for each form of the tensors.

N packed tokens, S decoded rows, R sequences, H query heads, K key/value heads, G = H / K, D head dimension.
"""

from typing import Any, NamedTuple

import torch

from hybrid_engine.ops import softmax_context_kernels as kernels
from hybrid_engine.ops.batch import QKV, DecodeBatch, EncoderBatch, HeadWeights, KVBlocks, PrefillBatch, read_context
from hybrid_engine.ops.dispatch import IS_INTERPRETED, Launch, check_tensor, prepared

Tensors = tuple[torch.Tensor | None, ...]
"""q, k, v, cos, sin, keys, values, q_gamma, k_gamma, sinks, alibi."""


class Numbers(NamedTuple):
    """The parameters of a layer's attention; see `SoftmaxContextOp`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    norm_kind: str | None
    norm_eps: float
    is_interleaved: bool

    def form(self, rotary_dim: int) -> kernels.AttentionForm:
        """Constants of the kernels."""
        return kernels.AttentionForm(
            num_kv_heads=self.num_kv_heads,
            groups=self.num_heads // self.num_kv_heads,
            head_dim=self.head_dim,
            dim=kernels.padded_dim(self.head_dim),
            rotary_dim=rotary_dim,
            norm=kernels.NORM_KINDS[self.norm_kind],
            is_interleaved=self.is_interleaved,
            has_window=self.window is not None,
            has_softcap=self.softcap is not None,
            upcasts=IS_INTERPRETED,
        )

    def scores(self, weights: HeadWeights) -> kernels.AttentionScores:
        """Parameters of the scores."""
        return kernels.AttentionScores(self.scale, self.window or 0, self.softcap or 1.0, weights.sinks, weights.alibi)

    def changes(self, qkv: QKV, weights: HeadWeights) -> kernels.Changes:
        """The norms and angles of queries and keys."""
        cos, sin = qkv.rotary or (None, None)
        stride = 0 if cos is None else cos.stride(0)
        return kernels.Changes(cos, sin, stride, weights.q_gamma, weights.k_gamma, self.norm_eps)


def attend_by_kernels(
    numbers: Numbers,
    qkv: QKV,
    cache: KVBlocks,
    batch: PrefillBatch | DecodeBatch | EncoderBatch,
    weights: HeadWeights,
) -> torch.Tensor:
    """Context `[N, H*D]`. Raises ValueError for a tensor that the kernels cannot read."""
    tensors = (*qkv[:3], *(qkv.rotary or (None, None)), *cache, *weights)
    if isinstance(batch, DecodeBatch):
        return _decode(numbers, qkv, cache, batch, weights, tensors)
    return _attend_packed(numbers, qkv, cache, batch, weights, tensors)


class Decoding(NamedTuple):
    """Launches of a decode step; without `merge` the context is not split."""

    launch: Launch
    merge: Launch | None
    output_sizes: tuple[int, int]
    lse_sizes: tuple[int, int, int]  # of the parts; their context has an additional dimension D


def _decode(
    numbers: Numbers, qkv: QKV, cache: KVBlocks, batch: DecodeBatch, weights: HeadWeights, tensors: Tensors
) -> torch.Tensor:
    """One token per row, against its blocks."""
    num_splits = -(-batch.context // kernels.SPLIT)
    decoding = prepared(_prepare_decoding, numbers, num_splits, batch.form, *tensors)
    output = qkv.q.new_empty(decoding.output_sizes)
    scores, parts = numbers.scores(weights), kernels.SplitContexts(output, None)
    if decoding.merge is not None:
        context = qkv.q.new_empty((*decoding.lse_sizes, numbers.head_dim), dtype=torch.float32)
        parts = kernels.SplitContexts(context, qkv.q.new_empty(decoding.lse_sizes, dtype=torch.float32))
    decoding.launch(
        _new_heads(qkv), numbers.changes(qkv, weights), _cache(cache),
        kernels.Tables(batch.block_tables, batch.block_tables.stride(0), cache.keys.shape[2]),
        scores, batch.positions, parts,
    )  # fmt: skip
    if decoding.merge is not None:
        decoding.merge(parts, scores, batch.positions, output, num_splits)
    return output


def _prepare_decoding(
    numbers: Numbers, num_splits: int, batch_form: tuple[Any, ...], *tensors: torch.Tensor
) -> Decoding:
    q, form = tensors[0], _check(numbers, *tensors)
    num_rows, num_heads = q.shape[0], numbers.num_heads
    launch = Launch(
        kernels.decode_kernel, (num_rows, numbers.num_kv_heads, num_splits), q.device, FORM=form,
        TILES=kernels.decode_tiles(form, q.element_size()), num_warps=kernels.decode_warps(q.element_size()),
        num_stages=kernels.DECODE_STAGES,
    )  # fmt: skip
    merge = Launch(
        kernels.merge_kernel, (num_rows, num_heads), q.device,
        FORM=form, SPLIT=kernels.SPLIT, SPLITS_AT_ONCE=kernels.SPLITS_AT_ONCE, num_warps=2,
    )  # fmt: skip
    sizes = (num_rows, num_heads * numbers.head_dim), (num_rows, num_heads, num_splits)
    return Decoding(launch, merge if num_splits > 1 else None, *sizes)


class PackedLaunches(NamedTuple):
    """Launches for packed sequences; without `store` their keys and values are not written."""

    store: Launch | None
    attend: Launch


def _attend_packed(
    numbers: Numbers,
    qkv: QKV,
    cache: KVBlocks,
    batch: PrefillBatch | EncoderBatch,
    weights: HeadWeights,
    tensors: Tensors,
) -> torch.Tensor:
    """Attention inside each sequence, whose queries come last; a prefill first writes its keys and values."""
    lengths, starts = batch.lengths, batch.starts
    is_prefill, key_starts = isinstance(batch, PrefillBatch), starts
    packed = prepared(_prepare_packed, numbers, is_prefill, max(lengths), len(lengths), batch.form, *tensors)
    if packed.store is not None and isinstance(batch, PrefillBatch):
        qkv = _store(packed.store, numbers, qkv, cache, batch, weights)
        if batch.context is not None:
            k, v = read_context(cache, batch.context)
            qkv, key_starts = qkv._replace(k=k, v=v), batch.context.starts
    output = qkv.q.new_empty((qkv.q.shape[0], numbers.num_heads * numbers.head_dim))
    packed.attend(_new_heads(qkv), starts, key_starts, numbers.scores(weights), output)
    return output


def attend_packed_by_kernel(numbers: Numbers, qkv: QKV, batch: PrefillBatch, weights: HeadWeights) -> torch.Tensor:
    """Context `[N, H*D]` of queries as they enter the scores and of keys and values that no workspace holds."""
    starts = batch.starts if batch.context is None else batch.context.starts
    attend = prepared(_prepare_attend, numbers, max(batch.lengths), len(batch.lengths), batch.form, *qkv[:3], *weights)
    output = qkv.q.new_empty((qkv.q.shape[0], numbers.num_heads * numbers.head_dim))
    attend(_new_heads(qkv), batch.starts, starts, numbers.scores(weights), output)
    return output


def _prepare_attend(
    numbers: Numbers,
    max_length: int,
    num_sequences: int,
    batch_form: tuple[Any, ...],  # compiled for
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *weights: torch.Tensor | None,  # compiled for
) -> Launch:
    heads, dim = numbers.num_kv_heads, numbers.head_dim
    check_tensor("q", q, shape=(None, heads, numbers.num_heads // heads, dim), is_dense_last=True)
    for name, tensor in (("k", k), ("v", v)):
        check_tensor(name, tensor, like=q, shape=(None, heads, dim), is_dense_last=True)
    return _attend_launch(numbers, numbers.form(0), True, max_length, num_sequences, q)


def _store(
    launch: Launch, numbers: Numbers, qkv: QKV, cache: KVBlocks, batch: PrefillBatch, weights: HeadWeights
) -> QKV:
    """Writes the workspace; returns queries and keys, normed and rotated, and values for attention."""
    q, k, v, rotary = qkv
    is_changed = rotary is not None or numbers.norm_kind is not None
    changed = kernels.Changed(*(x.new_empty(x.shape) if is_changed else x for x in (q, k)))
    launch(
        _new_heads(qkv), numbers.changes(qkv, weights), _cache(cache),
        batch.write_blocks, batch.write_offsets, changed, q.shape[0],
    )  # fmt: skip
    return QKV(changed.q_ptr, changed.k_ptr, v)


def _prepare_packed(
    numbers: Numbers,
    is_causal: bool,
    max_length: int,
    num_sequences: int,
    batch_form: tuple[Any, ...],  # compiled for
    *tensors: torch.Tensor,
) -> PackedLaunches:
    q, cos, store = tensors[0], tensors[3], None
    form = _check(numbers, *tensors)
    if is_causal:
        is_changed = cos is not None or numbers.norm_kind is not None
        num_heads = numbers.num_kv_heads + (numbers.num_heads if is_changed else 0)
        grid = (-(-q.shape[0] // kernels.STORE_TOKENS), num_heads)
        store = Launch(kernels.store_kernel, grid, q.device, FORM=form, TOKENS=kernels.STORE_TOKENS, num_warps=4)
    return PackedLaunches(store, _attend_launch(numbers, form, is_causal, max_length, num_sequences, q))


def _attend_launch(
    numbers: Numbers,
    form: kernels.AttentionForm,
    is_causal: bool,
    max_length: int,
    num_sequences: int,
    q: torch.Tensor,
) -> Launch:
    tiles, num_warps = kernels.prefill_tiles(numbers.head_dim, q.element_size())
    return Launch(
        kernels.prefill_kernel, (-(-max_length // tiles.queries), num_sequences, numbers.num_heads), q.device,
        IS_CAUSAL=is_causal, FORM=form, TILES=tiles, num_warps=num_warps, num_stages=2,
    )  # fmt: skip


def _check(
    numbers: Numbers,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    q_gamma: torch.Tensor | None,
    k_gamma: torch.Tensor | None,
    sinks: torch.Tensor | None,
    alibi: torch.Tensor | None,
) -> kernels.AttentionForm:
    """The constants of the kernels. Raises ValueError for tensors that they cannot read."""
    heads, dim = numbers.num_kv_heads, numbers.head_dim
    check_tensor("q", q, shape=(None, heads, numbers.num_heads // heads, dim), is_dense_last=True)
    for name, new, blocks in (("k", k, keys), ("v", v, values)):
        check_tensor(name, new, like=q, shape=(q.shape[0], heads, dim), is_dense_last=True)
        check_tensor(f"the workspace of {name}", blocks, like=q, shape=(None, heads, None, dim), is_dense_last=True)
    if keys.stride() != values.stride():
        raise ValueError(f"keys and values have strides {keys.stride()} and {values.stride()}; expected the same")
    for name, rows in (("cos", cos), ("sin", sin)):
        if rows is not None:
            check_tensor(name, rows, like=q, shape=(q.shape[0], None), is_dense_last=True)
    if cos is not None and cos.shape[-1] > dim:
        raise ValueError(f"cos has {cos.shape[-1]} dimensions; expected at most head_dim={dim}")
    assert cos is None or sin is None or cos.stride() == sin.stride(), f"{cos.stride()=} {sin.stride()=}"
    for name, gamma in (("q_gamma", q_gamma), ("k_gamma", k_gamma)):
        if (gamma is None) != (numbers.norm_kind is None):
            raise ValueError(f"{name} is {gamma if gamma is None else 'given'}; qk_norm={numbers.norm_kind!r}")
        if gamma is not None:
            check_tensor(name, gamma, like=q, shape=(dim,), is_dense_last=True)
    for name, per_head, dtype in (("sinks", sinks, None), ("alibi", alibi, torch.float32)):
        if per_head is not None:
            check_tensor(name, per_head, like=q, dtype=dtype, shape=(numbers.num_heads,), is_dense_last=True)
    return numbers.form(0 if cos is None else cos.shape[-1])


def _new_heads(qkv: QKV) -> kernels.NewHeads:
    q, k, v, _ = qkv
    (q_row, q_kv_head, q_group, _), (k_row, k_head, _), (v_row, v_head, _) = q.stride(), k.stride(), v.stride()
    return kernels.NewHeads(q, q_row, q_kv_head, q_group, k, k_row, k_head, v, v_row, v_head)


def _cache(cache: KVBlocks) -> kernels.Cache:
    return kernels.Cache(*cache, *cache.keys.stride()[:3])
