"""Norm, then the query, key and value projections.

    normed = norm(input);  q, k, v = normed Wq + bq, normed Wk + bk, normed Wv + bv

The three weights are three tensors or one fused tensor (GPT-2), all [in, out]. Moves the weights once:
E (H + 2K) D elements, and does 2 N E (H + 2K) D operations for N rows.

Up to 64 rows the three products are one launch, whose programs take a tile of q, of k or of v; up to 4 rows
the norm runs inside it. More rows go to cuBLAS.
"""

from collections.abc import Sequence

import torch

from hybrid_engine.ops import dispatch
from hybrid_engine.ops.cpu_gemm import linear_transposed
from hybrid_engine.ops.dispatch import tl, triton, use_triton
from hybrid_engine.ops.norm import NORM_OPS, check_norm_weights
from hybrid_engine.ops.skinny_gemm import (
    MAX_ROWS,
    NORM_ROWS,
    add_bias,
    check_linear,
    choose_tiles,
    load_normed_rows,
    row_statistics,
    statistics_meta,
    store_columns,
    tile_product,
)

LAYOUTS = ("blocks", "grouped")


@triton.jit
def _project(
    x_ptr,
    stride_xm,
    stride_xk,
    num_rows,
    w_ptr,
    stride_wk,
    stride_wn,
    bias_ptr,
    y_ptr,
    stride_ym,
    tile,
    width_in,
    width_out,
    gamma_ptr,
    beta_ptr,
    mean,
    rstd,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of one projection."""
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tile_product(
        x_ptr,
        stride_xm,
        stride_xk,
        num_rows,
        w_ptr,
        stride_wk,
        stride_wn,
        n,
        0,
        width_in,
        width_in,
        width_out,
        gamma_ptr,
        beta_ptr,
        mean,
        rstd,
        NORM,
        ROWS,
        BLOCK_N,
        BLOCK_K,
    )
    store_columns(y_ptr, stride_ym, num_rows, add_bias(total, bias_ptr, n, width_out), n, width_out, ROWS)


@triton.jit
def qkv_kernel(
    x_ptr,
    stride_xm,
    stride_xk,
    q_weight_ptr,
    q_stride_k,
    q_stride_n,
    q_bias_ptr,
    k_weight_ptr,
    k_stride_k,
    k_stride_n,
    k_bias_ptr,
    v_weight_ptr,
    v_stride_k,
    v_stride_n,
    v_bias_ptr,
    gamma_ptr,
    beta_ptr,
    y_ptr,
    normed_ptr,
    stride_ym,
    num_rows,
    width_in,
    q_width,
    kv_width,
    eps,
    NUM_WEIGHTS: tl.constexpr,
    NORM: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Programs: tiles of q, of k, of v; with a norm a last one writes the normed rows.

    Each branch has the whole product: weights and strides chosen at run time would hide from the compiler that
    a stride is 1, and with it every wide load. One fused weight is all q (`q_width` its width).
    """
    tile = tl.program_id(0)
    q_tiles = tl.cdiv(q_width, BLOCK_N)
    kv_tiles = tl.cdiv(kv_width, BLOCK_N)
    mean, rstd = row_statistics(x_ptr, stride_xm, stride_xk, num_rows, width_in, eps, NORM, ROWS, NUM_CHUNKS, CHUNK)
    if tile < q_tiles:
        _project(
            x_ptr, stride_xm, stride_xk, num_rows, q_weight_ptr, q_stride_k, q_stride_n, q_bias_ptr, y_ptr, stride_ym,
            tile, width_in, q_width, gamma_ptr, beta_ptr, mean, rstd, NORM, ROWS, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if NUM_WEIGHTS == 3:
        if (tile >= q_tiles) & (tile < q_tiles + kv_tiles):
            _project(
                x_ptr, stride_xm, stride_xk, num_rows, k_weight_ptr, k_stride_k, k_stride_n, k_bias_ptr,
                y_ptr + q_width, stride_ym, tile - q_tiles, width_in, kv_width, gamma_ptr, beta_ptr, mean, rstd,
                NORM, ROWS, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        if (tile >= q_tiles + kv_tiles) & (tile < q_tiles + 2 * kv_tiles):
            _project(
                x_ptr, stride_xm, stride_xk, num_rows, v_weight_ptr, v_stride_k, v_stride_n, v_bias_ptr,
                y_ptr + q_width + kv_width, stride_ym, tile - q_tiles - kv_tiles, width_in, kv_width, gamma_ptr,
                beta_ptr, mean, rstd, NORM, ROWS, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    if NORM != "none":  # noqa: SIM102 - decided when it compiles, apart from the program's own number
        if tile == tl.num_programs(0) - 1:
            m = tl.arange(0, ROWS)
            for start in range(0, width_in, BLOCK_K):
                k = start + tl.arange(0, BLOCK_K)
                x = load_normed_rows(
                    x_ptr, stride_xm, stride_xk, num_rows, k, width_in, gamma_ptr, beta_ptr, mean, rstd, NORM, ROWS
                )
                mask = (k < width_in)[:, None] & (m < num_rows)[None, :]
                tl.store(normed_ptr + m[None, :] * width_in + k[:, None], x, mask=mask)


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
        if not use_triton(input):
            return self.reference(input, weights, biases, gamma, beta)
        if input.shape[0] <= NORM_ROWS or (self.norm is None and input.shape[0] <= MAX_ROWS):
            return self._launch(input, weights, biases, gamma, beta)
        normed = input if self.norm is None else self.norm(input, gamma, beta)
        if input.shape[0] <= MAX_ROWS:
            return self._launch(normed, weights, biases, None, None)[0], normed
        return self._project(normed, weights, biases), normed

    def reference(
        self,
        input: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        gamma: torch.Tensor | None = None,
        beta: torch.Tensor | None = None,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """The same function in torch."""
        normed = input if self.norm is None else self.norm.reference(input, gamma, beta)
        return self._project(normed, weights, biases), normed

    def _project(
        self, normed: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        projected = [linear_transposed(normed, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        return self._split(*projected)

    def _split(self, *projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One fused projection or three as q `[N, K, G, D]`, k, v `[N, K, D]`."""
        if len(projected) == 1 and self.layout == "grouped":
            heads = projected[0].unflatten(1, (self.num_kv_heads, self.group + 2, self.head_dim))
            return heads[:, :, : self.group], heads[:, :, self.group], heads[:, :, self.group + 1]
        if len(projected) == 1:
            projected = projected[0].split((self.q_width, self.kv_width, self.kv_width), dim=1)
        q, k, v = projected
        heads_of_kv = (self.num_kv_heads, self.head_dim)
        q = q.unflatten(1, (self.num_kv_heads, self.group, self.head_dim))
        return q, k.unflatten(1, heads_of_kv), v.unflatten(1, heads_of_kv)

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
        self,
        input: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        gamma: torch.Tensor | None,
        beta: torch.Tensor | None,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """Norms inside the product where gamma is given."""
        self._check(input, weights, biases)
        (num_rows, width_in), total_width = input.shape, self.q_width + 2 * self.kv_width
        kind, eps, normed = "none", 0.0, input
        if self.norm is not None and gamma is not None:
            check_norm_weights(input, gamma, beta)
            kind, eps, normed = (
                self.norm.kind,
                self.norm.eps,
                torch.empty_like(input, memory_format=torch.contiguous_format),
            )
        output = torch.empty(num_rows, total_width, dtype=input.dtype, device=input.device)
        widths = (total_width,) if len(weights) == 1 else (self.q_width, self.kv_width, self.kv_width)
        tiles = choose_tiles(num_rows, width_in, widths, input.dtype)
        programs = sum(-(-width // tiles.block_n) for width in widths) + (kind != "none")
        operands = [
            operand
            for weight, bias in zip(weights, biases, strict=True)
            for operand in (weight, *weight.stride(), bias)
        ] + [None, 0, 0, None] * (3 - len(weights))
        dispatch.launch(
            qkv_kernel,
            (programs,),
            input,
            *input.stride(),
            *operands,
            gamma,
            beta,
            output,
            normed,
            total_width,
            num_rows,
            width_in,
            widths[0],
            self.kv_width,
            eps,
            device=input.device,
            NUM_WEIGHTS=len(weights),
            **statistics_meta(kind, width_in),
            **tiles.meta(),
        )
        return self._split(*output.split(widths, dim=1)), normed
