"""The Triton kernel of a decode step of `LatentAttentionOp`, absorbed, and its launch; the maths is in that file.

A program takes one row, some of its heads and `SPLIT` tokens. It rotates the queries' rotary part and the new key,
keeps the new latent in registers (one program of those whose split has its place also writes it), and reads the split's
latents once for its heads, as keys and as values. The merging kernel of `softmax_context_kernels.py` merges the splits.

S decoded rows, H heads, L latent dimension, R rotary dimension.
"""

from typing import Any, NamedTuple

import torch

from hybrid_engine.ops import softmax_context_kernels as kernels
from hybrid_engine.ops.batch import DecodeBatch
from hybrid_engine.ops.dispatch import (
    IS_INTERPRETED,
    Launch,
    check_tensor,
    next_power_of_2,
    prepared,
    say_once,
    tl,
    triton,
)
from hybrid_engine.ops.softmax_context_kernels import _dot, _load_heads

MAX_LATENT_DIM = 512
MAX_ROTARY_DIM = 128
MERGE_WARPS = 4


class NewLatents(NamedTuple):
    """Queries and latents of the tokens of a step, each with its strides."""

    absorbed_ptr: Any  # [S, H, L]
    absorbed_row: int
    absorbed_head: int
    q_ptr: Any  # [S, H, R], not rotated
    q_row: int
    q_head: int
    key_ptr: Any  # [S, R], not rotated
    key_row: int
    latent_ptr: Any  # [S, L]
    latent_row: int


class LatentCache(NamedTuple):
    """The cache of a layer, `[num_blocks, 1, block_size, R + L]`, with its strides."""

    ptr: Any
    block: int
    place: int


class LatentForm(NamedTuple):
    """The form of a layer's latents, constant in the kernel."""

    num_heads: int  # H
    latent_dim: int  # L
    width: int  # L padded


class LatentTiles(NamedTuple):
    """Tile sizes, constant in the kernel."""

    heads: int
    tokens: int
    split: int


class LatentNumbers(NamedTuple):
    """The parameters of a layer's attention; see `LatentAttentionOp`."""

    num_heads: int
    latent_dim: int
    rotary_dim: int
    scale: float
    is_interleaved: bool

    def attention_form(self, head_dim: int, rotary_dim: int) -> kernels.AttentionForm:
        """Constants of the parts that are shared with other attention."""
        return kernels.AttentionForm(
            num_kv_heads=1, groups=self.num_heads, head_dim=head_dim, dim=kernels.padded_dim(head_dim),
            rotary_dim=rotary_dim, norm=0, is_interleaved=self.is_interleaved, has_window=False, has_softcap=False,
            upcasts=IS_INTERPRETED,
        )  # fmt: skip


def has_kernel(numbers: LatentNumbers, tensor: torch.Tensor) -> bool:
    """Whether the kernel's tiles hold latents of that size."""
    if numbers.latent_dim <= MAX_LATENT_DIM and numbers.rotary_dim <= MAX_ROTARY_DIM:
        return True
    say_once(
        f"latent attention: no kernel for latents of {numbers.latent_dim} and rotary keys of {numbers.rotary_dim}, "
        f"more than {MAX_LATENT_DIM} and {MAX_ROTARY_DIM}; in torch"
    )
    return False


def latent_tiles(num_heads: int, element_size: int) -> tuple[LatentTiles, int]:
    """Tile sizes and number of warps: the context of all heads of a program stays in registers."""
    heads = max(16, next_power_of_2(num_heads))
    if element_size == 4:
        return LatentTiles(16, 16, kernels.SPLIT), 8
    return LatentTiles(min(heads, 64), 32, kernels.SPLIT), 8


class LatentDecoding(NamedTuple):
    """Launches of a decode step; without `merge` the context is not split."""

    launch: Launch
    merge: Launch | None
    lse_sizes: tuple[int, int, int]


def decode_by_kernels(
    numbers: LatentNumbers,
    absorbed: torch.Tensor,
    to_rotate: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor],
    rotary: tuple[torch.Tensor, torch.Tensor],
    cache: torch.Tensor,
    batch: DecodeBatch,
) -> torch.Tensor:
    """The context of latents `[S, H, L]`; see `LatentAttentionOp.reference`.

    Args:
        rows: the new rotary keys and latents.

    Raises ValueError for a tensor that the kernel cannot read.
    """
    num_splits = -(-batch.context // kernels.SPLIT)
    tensors = (absorbed, to_rotate, *rows, *rotary, cache)
    decoding = prepared(_prepare, numbers, num_splits, batch.form, *tensors)
    output = absorbed.new_empty(len(absorbed), numbers.num_heads, numbers.latent_dim)
    parts = kernels.SplitContexts(output, None)
    if decoding.merge is not None:
        context = output.new_empty((*decoding.lse_sizes, numbers.latent_dim), dtype=torch.float32)
        parts = kernels.SplitContexts(context, output.new_empty(decoding.lse_sizes, dtype=torch.float32))
    key, latent = rows
    cos, sin = rotary
    (absorbed_row, absorbed_head, _), (q_row, q_head, _) = absorbed.stride(), to_rotate.stride()
    decoding.launch(
        NewLatents(
            absorbed, absorbed_row, absorbed_head, to_rotate, q_row, q_head, key, key.stride(0), latent,
            latent.stride(0),
        ),
        kernels.Changes(cos, sin, cos.stride(0), None, None, 0.0),
        LatentCache(cache, cache.stride(0), cache.stride(2)),
        kernels.Tables(batch.block_tables, batch.block_tables.stride(0), cache.shape[2]),
        numbers.scale, batch.positions, parts,
    )  # fmt: skip
    if decoding.merge is not None:
        scores = kernels.AttentionScores(numbers.scale, 0, 1.0, None, None)
        decoding.merge(parts, scores, batch.positions, output, num_splits)
    return output


def _prepare(
    numbers: LatentNumbers,
    num_splits: int,
    batch_form: tuple[Any, ...],  # compiled for
    absorbed: torch.Tensor,
    to_rotate: torch.Tensor,
    key: torch.Tensor,
    latent: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
) -> LatentDecoding:
    num_rows, num_heads = len(absorbed), numbers.num_heads
    dims = numbers.rotary_dim, numbers.latent_dim
    for name, tensor, shape in (
        ("absorbed queries", absorbed, (num_rows, num_heads, dims[1])),
        ("queries to rotate", to_rotate, (num_rows, num_heads, dims[0])),
        ("rotary keys", key, (num_rows, dims[0])),
        ("latents", latent, (num_rows, dims[1])),
        ("cos", cos, (num_rows, dims[0])),
        ("sin", sin, (num_rows, dims[0])),
        ("the cache of latents", cache, (None, 1, None, sum(dims))),
    ):
        check_tensor(name, tensor, like=absorbed, shape=shape, is_dense_last=True)
    tiles, num_warps = latent_tiles(num_heads, absorbed.element_size())
    form = LatentForm(num_heads, numbers.latent_dim, kernels.padded_dim(numbers.latent_dim))
    launch = Launch(
        latent_decode_kernel, (num_rows, -(-num_heads // tiles.heads), num_splits), absorbed.device, FORM=form,
        ROTARY=numbers.attention_form(dims[0], dims[0]), TILES=tiles, num_warps=num_warps, num_stages=2,
    )  # fmt: skip
    merge = Launch(
        kernels.merge_kernel, (num_rows, num_heads), absorbed.device, FORM=numbers.attention_form(dims[1], 0),
        SPLIT=kernels.SPLIT, SPLITS_AT_ONCE=kernels.SPLITS_AT_ONCE, num_warps=MERGE_WARPS,
    )  # fmt: skip
    return LatentDecoding(launch, merge if num_splits > 1 else None, (num_rows, num_heads, num_splits))


@triton.jit
def latent_decode_kernel(
    new,
    changes,
    cache,
    tables,
    scale,
    positions_ptr,
    parts,
    FORM: tl.constexpr,
    ROTARY: tl.constexpr,
    TILES: tl.constexpr,
):
    """Programs: rows, groups of heads, splits of the context."""
    NUM_HEADS: tl.constexpr = FORM.num_heads
    LATENT_DIM: tl.constexpr = FORM.latent_dim
    WIDTH: tl.constexpr = FORM.width
    ROTARY_DIM: tl.constexpr = ROTARY.head_dim
    UPCASTS: tl.constexpr = ROTARY.upcasts
    HEADS: tl.constexpr = TILES.heads
    TILE: tl.constexpr = TILES.tokens
    SPLIT: tl.constexpr = TILES.split
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    split = tl.program_id(2)
    position = tl.load(positions_ptr + row).to(tl.int32)  # 64-bit division is slow
    begin = split * SPLIT
    if begin > position:
        return
    end = tl.minimum(begin + SPLIT, position)
    holds_new = position // SPLIT == split

    head = group * HEADS + tl.arange(0, HEADS)
    r = tl.arange(0, ROTARY.dim)
    c = tl.arange(0, WIDTH)
    is_head, is_rotary, is_latent = head < NUM_HEADS, r < ROTARY_DIM, c < LATENT_DIM
    one = tl.arange(0, 1)[:, None]
    angles = row * changes.angles_row + one
    q_starts = row * new.q_row + head[:, None] * new.q_head
    q_rotary = _load_heads(new.q_ptr, q_starts, is_head[:, None], changes.q_gamma_ptr, changes, angles, ROTARY)
    new_key = _load_heads(new.key_ptr, row * new.key_row + one, one == 0, changes.k_gamma_ptr, changes, angles, ROTARY)
    absorbed = new.absorbed_ptr + row * new.absorbed_row + head[:, None] * new.absorbed_head + c[None, :]
    q = tl.load(absorbed, mask=is_head[:, None] & is_latent[None, :], other=0.0)
    new_latent = tl.load(new.latent_ptr + row * new.latent_row + c[None, :], mask=is_latent[None, :], other=0.0)
    if holds_new & (group == 0):
        block = tl.load(tables.ptr + row * tables.row + position // tables.block_size)
        place = cache.ptr + block * cache.block + (position % tables.block_size) * cache.place
        tl.store(place + r[None, :], new_key, mask=is_rotary[None, :])
        tl.store(place + ROTARY_DIM + c[None, :], new_latent, mask=is_latent[None, :])

    wide_latent = new_latent.to(tl.float32)
    new_score = tl.sum(q.to(tl.float32) * wide_latent, axis=1)
    new_score = (new_score + tl.sum(q_rotary.to(tl.float32) * new_key.to(tl.float32), axis=1)) * scale
    highest = tl.where(holds_new, new_score, float("-inf"))
    total = tl.where(holds_new, tl.full([HEADS], 1.0, tl.float32), 0.0)
    context = tl.where(holds_new, tl.broadcast_to(wide_latent, [HEADS, WIDTH]), 0.0)

    for start in range(begin, end, TILE):
        tokens = start + tl.arange(0, TILE)
        is_token = tokens < end
        blocks = tl.load(tables.ptr + row * tables.row + tokens // tables.block_size, mask=is_token, other=0)
        places = cache.ptr + blocks * cache.block + (tokens % tables.block_size) * cache.place
        keys = tl.load(places[:, None] + r[None, :], mask=is_token[:, None] & is_rotary[None, :], other=0.0)
        is_loaded = is_token[:, None] & is_latent[None, :]
        latents = tl.load(places[:, None] + ROTARY_DIM + c[None, :], mask=is_loaded, other=0.0)
        score = (_dot(q_rotary, tl.trans(keys), UPCASTS) + _dot(q, tl.trans(latents), UPCASTS)) * scale
        score = tl.where(is_token[None, :], score, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(score, axis=1))
        probs = tl.exp(score - new_highest[:, None])
        rescale = tl.exp(highest - new_highest)
        total = total * rescale + tl.sum(probs, axis=1)
        context = context * rescale[:, None] + _dot(probs.to(latents.dtype), latents, UPCASTS)
        highest = new_highest

    context = context / total[:, None]
    target = (row * NUM_HEADS + head) * tl.num_programs(2) + split
    if parts.lse_ptr is not None:
        tl.store(parts.lse_ptr + target, highest + tl.log(total), mask=is_head)
    tl.store(
        parts.context_ptr + target[:, None] * LATENT_DIM + c[None, :],
        context.to(parts.context_ptr.dtype.element_ty),
        mask=is_head[:, None] & is_latent[None, :],
    )
