"""Norm, then the query, key and value projections.

    normed = norm(input);  q, k, v = normed Wq + bq, normed Wk + bk, normed Wv + bv

The three weights are three tensors or one fused tensor (GPT-2), all [in, out]. Moves the weights once:
E (H + 2K) D elements, and does 2 N E (H + 2K) D operations for N rows.

Up to 256 rows (in fp32 64) the three products are one launch, whose programs take a tile of q, of k or of v. More rows
go to cuBLAS.
"""

from collections.abc import Sequence

import torch

from hybrid_engine.ops import dispatch
from hybrid_engine.ops.cpu_gemm import linears_transposed
from hybrid_engine.ops.dispatch import tl, triton, use_triton
from hybrid_engine.ops.kernel_errors import kernel_or_reference
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

    Each branch has the whole product: weights and strides chosen at run time would hide from the compiler that
    a stride is 1, and with it every wide load. One fused weight is all q.
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


class QKVGemmOp:
    """Callable `(input, weights, biases, gamma, beta) -> ((q, k, v), normed)`.

    Args:
        norm: a kind of `NORM_OPS`; None: the input goes in as it is.
        eps: of the norm.
        num_heads, num_kv_heads, head_dim: H, K, D; G = H / K.
        layout: of one fused weight's columns: "blocks", all of q, all of k, all of v; "grouped", for each KV head
            its G query heads, its key and its value (GPT-NeoX and BLOOM with G = 1, Falcon).
    """

    def __init__(
        self, norm: str | None, eps: float, num_heads: int, num_kv_heads: int, head_dim: int, layout: str = "blocks"
    ):
        if layout not in LAYOUTS:
            raise ValueError(f"layout={layout!r} must be one of {', '.join(LAYOUTS)}")
        assert num_heads % num_kv_heads == 0, f"{num_heads=} {num_kv_heads=}"
        self.norm = None if norm is None else NORM_OPS[norm](eps)
        self.num_kv_heads, self.head_dim, self.layout = num_kv_heads, head_dim, layout
        self.group = num_heads // num_kv_heads
        self.q_width, self.kv_width = num_heads * head_dim, num_kv_heads * head_dim

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
        heads, num_rows = self.num_kv_heads, projected[0].shape[0]
        if len(projected) == 1 and self.layout == "grouped":
            grouped = projected[0].view(num_rows, heads, self.group + 2, self.head_dim)
            return grouped[:, :, : self.group], grouped[:, :, self.group], grouped[:, :, self.group + 1]
        if len(projected) == 1:
            projected = projected[0].split((self.q_width, self.kv_width, self.kv_width), dim=1)
        q, k, v = projected
        kv_shape = (num_rows, heads, self.head_dim)
        return q.view(num_rows, heads, self.group, self.head_dim), k.view(kv_shape), v.view(kv_shape)

    def _check(
        self, input: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
    ) -> None:
        fused_width = self.q_width + 2 * self.kv_width
        expected = {1: [("fused", fused_width)], 3: [("q", self.q_width), ("k", self.kv_width), ("v", self.kv_width)]}
        if len(weights) not in expected or len(biases) != len(weights):
            raise ValueError(f"{len(weights)} weights with {len(biases)} biases; expected 1 or 3 of each")
        for (name, width), weight, bias in zip(expected[len(weights)], weights, biases, strict=True):
            check_linear(name, input, weight, bias, width)

    def _launch(
        self, input: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._check(input, weights, biases)
        (num_rows, width_in), total_width = input.shape, self.q_width + 2 * self.kv_width
        output = torch.empty(num_rows, total_width, dtype=input.dtype, device=input.device)
        widths = (total_width,) if len(weights) == 1 else (self.q_width, self.kv_width, self.kv_width)
        tiles = choose_tiles(num_rows, width_in, widths, input.dtype)
        q, k, v = (*map(weights_of, weights, biases), NO_WEIGHTS, NO_WEIGHTS)[:3]
        dispatch.launch(
            qkv_kernel, (tiles.programs(*widths),), rows_of(input), q, k, v, Output(output, total_width),
            device=input.device, **tiles.meta(),
        )  # fmt: skip
        return self._split(*output.split(widths, dim=1))
