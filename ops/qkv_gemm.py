"""Norm, then the query, key and value projections.

    normed = norm(input);  q, k, v = normed Wq + bq, normed Wk + bk, normed Wv + bv

The three weights are three tensors or one fused tensor (GPT-2), all [in, out]. Moves the weights once:
E (H + 2K) D elements, and does 2 N E (H + 2K) D operations for N rows.

Up to 256 rows (in fp32 64) the three products are one launch, whose programs take a tile of q, of k or of v. With more
rows cuBLAS is used.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hybrid_engine.ops.cpu_gemm import linears_transposed
from hybrid_engine.ops.dispatch import Launch, kernel_or_reference, prepared, tl, triton, use_triton
from hybrid_engine.ops.norm import NORM_OPS
from hybrid_engine.ops.skinny_gemm import (
    NO_WEIGHTS,
    Output,
    add_bias,
    check_linear,
    choose_tiles,
    rows_of,
    takes_rows,
    tile_product,
    weights_of,
)

LAYOUTS = ("blocks", "grouped")


@triton.jit
def _project(x, w, tile, y, column, TILES: tl.constexpr):
    """One tile of one projection, whose columns of y start at `column`."""
    n = tile * TILES.block_n + tl.arange(0, TILES.block_n)
    total = add_bias(tile_product(x, w, n, 0, x.width, TILES), w, n)
    m = tl.arange(0, TILES.rows)
    mask = (n < w.width)[:, None] & (m < x.num_rows)[None, :]
    place = y.ptr + m[None, :] * y.stride_m + (column + n)[:, None]
    tl.store(place, total.to(y.ptr.dtype.element_ty), mask=mask)


@triton.jit
def qkv_kernel(x, q, k, v, y, TILES: tl.constexpr):
    """Programs: tiles of q, of k, of v. y is `[M, H D + 2 K D]`.

    Each branch contains the whole product: with weights and strides chosen at run time the compiler would not know that
    a stride is 1, and could not use wide loads. One fused weight is passed as q.
    """
    tile = tl.program_id(0)
    q_tiles = tl.cdiv(q.width, TILES.block_n)
    if tile < q_tiles:
        _project(x, q, tile, y, 0, TILES)
    if k.ptr is not None:
        kv_tiles = tl.cdiv(k.width, TILES.block_n)
        if (tile >= q_tiles) & (tile < q_tiles + kv_tiles):
            _project(x, k, tile - q_tiles, y, q.width, TILES)
        if (tile >= q_tiles + kv_tiles) & (tile < q_tiles + 2 * kv_tiles):
            column = q.width + k.width
            _project(x, v, tile - q_tiles - kv_tiles, y, column, TILES)


class HeadSizes(NamedTuple):
    """K, G = H / K and D."""

    num_kv_heads: int
    group: int
    dim: int

    @property
    def widths(self) -> tuple[int, int, int]:
        """Number of columns of all queries, all keys, all values."""
        kv_width = self.num_kv_heads * self.dim
        return kv_width * self.group, kv_width, kv_width

    def views(self, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`[N, H D + 2 K D]` dense, all of q, all of k, all of v, as q `[N, K, G, D]`, k, v `[N, K, D]`.

        Uses the fewest calls: splitting the tensor and viewing the parts takes four times as long in Python.
        """
        heads, group, dim = self
        num_rows, row = output.shape
        q_width, kv_width, _ = self.widths
        q = output.as_strided((num_rows, heads, group, dim), (row, group * dim, dim, 1))
        k, v = (
            output.as_strided((num_rows, heads, dim), (row, dim, 1), begin) for begin in (q_width, q_width + kv_width)
        )
        return q, k, v


class QKVGemmOp:
    """Callable `(input, weights, biases, gamma, beta) -> ((q, k, v), normed)`.

    Args:
        norm: a kind of `NORM_OPS`; None: the input is not normed.
        eps: eps of the norm.
        num_heads, num_kv_heads, head_dim: H, K, D; G = H / K.
        layout: the order of a fused weight's columns: "blocks", all of q, all of k, all of v; "grouped", for each KV
            head its G query heads, its key and its value (GPT-NeoX and BLOOM with G = 1, Falcon).
    """

    def __init__(
        self, norm: str | None, eps: float, num_heads: int, num_kv_heads: int, head_dim: int, layout: str = "blocks"
    ):
        if layout not in LAYOUTS:
            raise ValueError(f"layout={layout!r} must be one of {', '.join(LAYOUTS)}")
        assert num_heads % num_kv_heads == 0, f"{num_heads=} {num_kv_heads=}"
        self.norm = None if norm is None else NORM_OPS[norm](eps)
        self.heads, self.layout = HeadSizes(num_kv_heads, num_heads // num_kv_heads, head_dim), layout

    def __call__(
        self,
        input: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        gamma: torch.Tensor | None = None,
        beta: torch.Tensor | None = None,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """`input [N, E]`; one fused or three weights `[E, out]` with as many biases.

        Returns q `[N, K, G, D]`, k and v `[N, K, D]`, views that may share a buffer, and the normed input `[N, E]`.
        """
        normed = input if self.norm is None else self.norm(input, gamma, beta)
        if use_triton(input) and takes_rows(input):
            return kernel_or_reference(self._launch, self._project, normed, weights, biases), normed
        return self._project(normed, weights, biases), normed

    def reference(
        self,
        input: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        gamma: torch.Tensor | None = None,
        beta: torch.Tensor | None = None,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """The reference: the function of the kernel in plain torch."""
        normed = input if self.norm is None else self.norm.reference(input, gamma, beta)
        return self._project(normed, weights, biases), normed

    def _project(
        self, normed: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._split(*linears_transposed(normed, list(zip(weights, biases, strict=True))))

    def _split(self, *projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One fused projection or three as q `[N, K, G, D]`, k, v `[N, K, D]`."""
        (heads, group, dim), num_rows = self.heads, projected[0].shape[0]
        if len(projected) == 1 and self.layout == "grouped":
            grouped = projected[0].view(num_rows, heads, group + 2, dim)
            return grouped[:, :, :group], grouped[:, :, group], grouped[:, :, group + 1]
        if len(projected) == 1:
            projected = projected[0].split(self.heads.widths, dim=1)
        q, k, v = projected
        kv_shape = (num_rows, heads, dim)
        return q.view(num_rows, heads, group, dim), k.view(kv_shape), v.view(kv_shape)

    def _launch(
        self, input: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        launch, sizes = prepared(_prepare, self.heads, len(weights), input, *weights, *biases)
        output = torch.empty(sizes, dtype=input.dtype, device=input.device)
        q, k, v = (*map(weights_of, weights, biases), NO_WEIGHTS, NO_WEIGHTS)[:3]
        launch(rows_of(input), q, k, v, Output(output, sizes[1]))
        return self._split(output) if self.layout == "grouped" else self.heads.views(output)


def _prepare(
    heads: HeadSizes, num_weights: int, input: torch.Tensor, *weights_and_biases: torch.Tensor
) -> tuple[Launch, tuple[int, int]]:
    """The launch, and the sizes of its output."""
    weights, biases = weights_and_biases[:num_weights], weights_and_biases[num_weights:]
    total_width = sum(heads.widths)
    expected = {1: [("fused", total_width)], 3: list(zip("qkv", heads.widths, strict=True))}
    if num_weights not in expected or len(biases) != num_weights:
        raise ValueError(f"{num_weights} weights with {len(biases)} biases; expected 1 or 3 of each")
    for (name, width), weight, bias in zip(expected[num_weights], weights, biases, strict=True):
        check_linear(name, input, weight, bias, width)
    widths = tuple(width for _, width in expected[num_weights])
    tiles = choose_tiles(*input.shape, widths, input.dtype)
    launch = Launch(qkv_kernel, (tiles.programs(*widths),), input.device, **tiles.meta())
    return launch, (input.shape[0], total_width)
