"""Causal attention in which a query's result depends only on its own sequence, bit for bit.

    score_ij  = cap(q_i . k_j * scale)                    for 0 <= i - j < window
    context_i = sum_j exp(score_ij - m_i) v_j / (sum_j exp(score_ij - m_i) + exp(sink_h - m_i)),  m_i the largest

Queries are in tiles of `tile_rows` rows and keys in chunks of CHUNK_KEYS, counted from the start of the sequence; both
are padded. Each product is of one tile and one chunk, each sum is over one chunk, and chunks are added in order. A key
that is padding or hidden has weight exactly 0, so the padding of a context does not change the result. All in fp32. A
prefill, a decoded token and the trainer's forward are the same function of tiles. On devices with kernels one kernel
computes it (`fixed_attention_kernel.py`), with its own tiles and chunks.

R sequences, n tokens, S decoded rows, H query heads, K key/value heads, G = H / K, D head dimension.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from hybrid_engine.ops.batch import Context, DecodeBatch, KVBlocks, PrefillBatch, read_context, write_rows
from hybrid_engine.ops.dispatch import use_triton
from hybrid_engine.ops.fixed_attention_kernel import Queries, attend_by_kernel, of_cache, of_packed, of_padded
from hybrid_engine.ops.fixed_shapes import place_free_rows
from hybrid_engine.ops.softmax_context import attend_grouped, like_lengths

# Padded number of rows in a product of a decode row, or of its G heads: 8 cost less for a batch of decode rows than 32.
TILES_OF_ROWS = (8, 12)
CHUNK_KEYS = 64
TRIED_DIMS = (8, 64, 80, 256)


class AttentionParameters(NamedTuple):
    """Parameters of the attention of one layer, other than tensors."""

    scale: float  # multiplies q.k
    window: int | None = None  # tokens that a query attends to, itself included; None: all
    softcap: float | None = None  # c in c tanh(score / c)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    attention: AttentionParameters,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Queries against the keys of their sequence, from position 0.

    Args:
        query: `[R, n, H, D]`.
        key, value: `[R, C, K, D]`, finite everywhere.
        positions: `[R, n]` int64: positions of the queries, ascending in each row. Keys after a query are hidden.
        sinks: `[H]`, an additional logit of each head.

    Returns:
        `[R, n, H, D]` in the dtype of `query`. Differentiable if the queries are all tokens of their sequence.
    """
    return _attend(query, key, value, positions, *attention, sinks)


# A single operation, so that dispatch modes do not see its inner operations: its shapes are fixed already.
@torch.library.custom_op("hybrid_engine::attend", mutates_args=())
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    attention = AttentionParameters(scale, window, softcap)
    if use_triton(query):
        return _attend_padded(query, key, value, positions, attention, sinks)
    (num_rows, length, num_heads, dim), num_kv_heads = query.shape, key.shape[2]
    group, rows = num_heads // num_kv_heads, tile_rows(torch.get_num_threads())
    missing = -length * group % rows
    num_tiles = (length * group + missing) // rows
    # [tiles, R * K, rows, ...]: queries of one sequence and key head, by position and then by head of the group.
    tiles = query.float().unflatten(2, (num_kv_heads, group)).transpose(1, 2).flatten(2, 3)
    tiles = _tiled(F.pad(tiles, (0, 0, 0, missing)), num_tiles)
    places = positions.repeat_interleave(group, 1)
    places = F.pad(places[:, None], (0, missing), value=0).expand(-1, num_kv_heads, -1)
    places = _tiled(places, num_tiles)
    reach = places.flatten(1).amax(1).tolist()  # of each tile
    start = places.flatten(1).amin(1).tolist() if attention.window is not None else [0] * num_tiles
    keys, values = _chunked(key), _chunked(value)
    sink = None
    if sinks is not None:  # [R * K, rows] of every tile: a tile starts at any head of the group
        heads = torch.arange(num_tiles * rows, device=query.device) % group
        by_head = sinks.float().view(num_kv_heads, group)[:, heads].view(num_kv_heads, num_tiles, rows)
        sink = by_head.transpose(0, 1).repeat(1, num_rows, 1)
    contexts = []
    for index in range(num_tiles):
        first = 0 if attention.window is None else max(0, start[index] - attention.window + 1) // CHUNK_KEYS
        chunks = slice(first, reach[index] // CHUNK_KEYS + 1)
        own_sink = None if sink is None else sink[index]
        contexts.append(_tile(tiles[index], keys[chunks], values[chunks], first, places[index], attention, own_sink))
    context = torch.stack(contexts, 1).view(num_rows, num_kv_heads, -1, dim)[:, :, : length * group]
    context = context.unflatten(2, (length, group)).transpose(1, 2).reshape(num_rows, length, num_heads, dim)
    return context.to(query.dtype)


def _attend_padded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    attention: AttentionParameters,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`attend` by the kernel."""
    num_rows, length = query.shape[:2]
    starts = torch.arange(num_rows + 1, device=query.device) * length
    queries = Queries(query.flatten(0, 1), starts, positions.flatten(), length)
    return attend_by_kernel(queries, of_padded(key, value), attention, sinks).view(query.shape)


@cache
def tile_rows(num_threads: int) -> int:
    """Number of rows in a tile."""

    def products(num_rows: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
        for dim in TRIED_DIMS:
            keys = torch.randn(2, CHUNK_KEYS, dim, generator=generator, device="cpu")
            query, weights = (torch.rand(2, 1, width, generator=generator, device="cpu") for width in (dim, CHUNK_KEYS))
            yield torch.bmm(query.expand(-1, num_rows, -1).contiguous(), keys.transpose(1, 2))
            yield torch.bmm(weights.expand(-1, num_rows, -1).contiguous(), keys)

    return place_free_rows(TILES_OF_ROWS, products)


def _tiled(rows: torch.Tensor, num_tiles: int) -> torch.Tensor:
    """`[R, K, tiles * rows of one, ...]` -> `[tiles, R * K, rows of one, ...]`, each tile contiguous."""
    return rows.flatten(0, 1).unflatten(1, (num_tiles, -1)).transpose(0, 1).contiguous()


def _chunked(keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`[R, C, K, D]` -> chunks `[R * K, CHUNK_KEYS, D]` fp32, the last one padded with zeros."""
    rows = keys.transpose(1, 2).flatten(0, 1)
    missing = -rows.shape[1] % CHUNK_KEYS
    return (F.pad(rows, (0, 0, 0, missing)) if missing else rows).float().contiguous().split(CHUNK_KEYS, 1)


def _tile(
    query: torch.Tensor,
    keys: tuple[torch.Tensor, ...],
    values: tuple[torch.Tensor, ...],
    first: int,
    places: torch.Tensor,
    attention: AttentionParameters,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """`query [X, rows, D]` against chunks `[X, CHUNK_KEYS, D]`, numbered from `first`."""
    inside = torch.arange(CHUNK_KEYS, device=query.device)
    scores = []
    for chunk, key in enumerate(keys, first):
        score = torch.bmm(query, key.transpose(1, 2)) * attention.scale
        if attention.softcap is not None:
            score = torch.tanh(score / attention.softcap) * attention.softcap
        distance = places[..., None] - (inside + chunk * CHUNK_KEYS)
        hidden = distance < 0
        if attention.window is not None:
            hidden = hidden | (distance >= attention.window)
        scores.append(score.masked_fill(hidden, float("-inf")))
    largest = torch.stack([score.amax(-1) for score in scores]).amax(0)
    largest = largest if sink is None else torch.maximum(largest, sink)
    # A query that is padding may be before the first chunk of its tile.
    largest = largest.masked_fill(largest == float("-inf"), 0.0)
    total = torch.zeros_like(largest) if sink is None else torch.exp(sink - largest)
    context = torch.zeros_like(query)
    for score, value in zip(scores, values, strict=True):
        weights = torch.exp(score - largest[..., None])
        total = total + weights.sum(-1)
        context = context + torch.bmm(weights, value)
    return context / total[..., None].clamp(min=torch.finfo(torch.float32).tiny)


def attend_prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    batch: PrefillBatch,
    attention: AttentionParameters,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Packed sequences, `query [N, H, D]`, `key`, `value` `[N, K, D]` -> `[N, H, D]`; writes into `caches`.

    `caches`: keys and values, `[num_blocks, K, block_size, D]`.
    """
    _write(key, value, caches, batch)
    if batch.context is not None:
        return _attend_continued(query, KVBlocks(*caches), batch, batch.context, attention, sinks)
    if use_triton(query):
        longest = max(batch.lengths)
        queries = Queries(query, batch.starts, batch.positions, longest)
        return attend_by_kernel(queries, of_packed(key, value, batch.starts, longest), attention, sinks)
    rows = torch.arange(len(query), device=query.device).split(batch.lengths)
    contexts: list[torch.Tensor] = [query] * len(rows)
    for group in like_lengths(batch.lengths):
        index = pad_sequence([rows[i] for i in group], batch_first=True)
        positions = torch.arange(index.shape[1], device=query.device).expand_as(index)
        padded = attend(query[index], key[index], value[index], positions, attention, sinks)
        for i, context in zip(group, padded, strict=True):
            contexts[i] = context[: batch.lengths[i]]
    return torch.cat(contexts)


def _attend_continued(
    query: torch.Tensor,
    cache: KVBlocks,
    batch: PrefillBatch,
    context: Context,
    attention: AttentionParameters,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of the last tokens of packed sequences, whose keys are written: `query [N, H, D]` -> the same shape."""
    keys, values = read_context(cache, context)
    if use_triton(query):
        queries = Queries(query, batch.starts, batch.positions, max(batch.lengths))
        packed = of_packed(keys, values, context.starts, max(context.lengths))
        return attend_by_kernel(queries, packed, attention, sinks)
    parts = [x.split(batch.lengths) for x in (query, batch.positions)]
    parts += [x.split(context.lengths) for x in (keys, values)]
    contexts = [
        attend(q[None], k[None], v[None], positions[None], attention, sinks)[0]
        for q, positions, k, v in zip(*parts, strict=True)
    ]
    return torch.cat(contexts)


def attend_decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    batch: DecodeBatch,
    attention: AttentionParameters,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token per row, `query [S, H, D]`, `key`, `value` `[S, K, D]` -> `[S, H, D]`; see `attend_prefill`."""
    _write(key, value, caches, batch)
    if use_triton(query):
        queries = Queries(query, torch.arange(len(query) + 1, device=query.device), batch.positions, 1)
        return attend_by_kernel(queries, of_cache(caches, batch.block_tables), attention, sinks)
    heads = torch.arange(key.shape[1], device=key.device)[:, None]
    # [S, C, K, D]; places of a block after the context are hidden.
    keys, values = (cache[batch.block_tables[:, None], heads].flatten(2, 3).transpose(1, 2) for cache in caches)
    return attend(query[:, None], keys, values, batch.positions[:, None], attention, sinks)[:, 0]


def _write(
    key: torch.Tensor,
    value: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    batch: PrefillBatch | DecodeBatch,
) -> None:
    num_kv_heads, block_size, dim = caches[0].shape[1:]
    rows = write_rows(batch, num_kv_heads, block_size)
    for kept, new in zip(caches, (key, value), strict=True):
        kept.view(-1, dim).index_put_((rows,), new)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    query, key, value, _, scale, window, softcap, sinks = inputs
    ctx.save_for_backward(query, key, value, sinks)
    ctx.attention = AttentionParameters(scale, window, softcap)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The gradient of the usual attention of whole sequences, whose values are equal up to rounding.

    A backward pass through tiles would need as many small products again, and keep all their weights.
    """
    inputs = [None if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors]
    query, key, value, sinks = inputs
    with torch.enable_grad():
        context = attend_as_usual(query, key, value, ctx.attention, sinks)
    found = iter(torch.autograd.grad(context, [x for x in inputs if x is not None], gradient))
    query, key, value, sinks = (None if x is None else next(found) for x in inputs)
    return query, key, value, None, None, None, None, sinks


_attend.register_autograd(_backward, setup_context=_keep_inputs)


def attend_as_usual(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention: AttentionParameters,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The function of `attend` without tiles, for whole sequences `[R, n, ...]`."""
    group = query.shape[2] // key.shape[2]
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    places = torch.arange(q.shape[2], device=q.device)
    distance = places[:, None] - places
    hidden = distance < 0
    if attention.window is not None:
        hidden = hidden | (distance >= attention.window)
    if attention.softcap is None and sinks is None:
        return attend_grouped(q, k, v, ~hidden, scale=attention.scale).transpose(1, 2)
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * attention.scale
    if attention.softcap is not None:
        scores = torch.tanh(scores / attention.softcap) * attention.softcap
    scores = scores.float().masked_fill(hidden, float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        sink = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    return (weights.to(v.dtype) @ v).transpose(1, 2)
