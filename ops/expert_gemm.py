"""The experts of a mixture-of-experts MLP as two grouped products over tokens sorted by expert.

    up       = x[token] Wup[expert] + bup[expert]
    inner    = act(up)                                       plain (Megatron)
               act(gate) * up                                gated: Wup holds both, in halves [gate | up] or
               (clip(up) + 1) * clip(gate) sigmoid(1.702 clip(gate))   interleaved; the last is gpt-oss's
    y[pair]  = (inner Wdown[expert] + bdown[expert]) * weight[pair]

M = N top_k pairs (token, slot), X experts, E hidden, I MLP size, U = I plain or 2 I gated. The first kernel writes
`inner [M, I]` in sorted order, the second `y [N, top_k, E]` where each pair belongs, so that ExpertSumOp adds them
in a fixed order. Each does up to 2 M E U operations and moves the weights of each expert hit once per tile of its
tokens: once in all while no expert has more than one tile, as in decode. The grid is the worst case of tiles for
M pairs; a program finds its expert from the offsets on the device, and one without a tile returns.

Weights are [X, in, out] views with any strides. In 16 bits everything is rounded where transformers' expert
modules round: product, bias, each step of the activation, and the weighted output.

Sources: transformers, integrations/moe.py and models/gpt_oss/modeling_gpt_oss.py (GptOssExperts); Gale et al. 2022,
"MegaBlocks", for the grouping.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from hybrid_engine.ops.activation import ACTIVATIONS, activate
from hybrid_engine.ops.cpu_gemm import linear_transposed
from hybrid_engine.ops.dispatch import IS_INTERPRETED, check_tensor, launch, next_power_of_2, tl, triton, use_triton
from hybrid_engine.ops.moe_gating import Routing

LAYOUTS = ("plain", "halves", "interleaved")
CLAMPED_SWIGLU = "clamped_swiglu"
EXPERT_ACTIVATIONS = (*ACTIVATIONS, CLAMPED_SWIGLU)
# Below this many programs half of a column tile each keeps more of the device busy (two waves of an H100).
FEW_PROGRAMS = 264
# Up to this many rows torch.mm is the faster product on a CPU, where the weight is stored [in, out].
FEW_ROWS = 4


class Tiles(NamedTuple):
    """Sizes of the tiles of a grouped product."""

    m: int  # pairs
    n: int  # columns (of gate and of up, where gated)
    k: int  # step along the summed dimension
    warps: int
    stages: int


def choose_tiles(num_pairs: int, num_experts: int, columns: int, dtype: torch.dtype) -> Tiles:
    """Tiles for `num_pairs` spread over `num_experts`, `columns` of output; depends on shapes only."""
    average = -(-num_pairs // num_experts)
    m = min(64, max(16, next_power_of_2(2 * average if average > 1 else 1)))
    is_wide = max_tiles(num_pairs, num_experts, m) * -(-columns // 64) >= FEW_PROGRAMS
    is_small = m <= 32
    if dtype == torch.float32:
        return Tiles(m, 64 if is_wide else 32, 32, 4, 2)
    return Tiles(m, 64 if is_wide else 32, 128 if is_small and not is_wide else 64, 4, 4 if is_small else 3)


def max_tiles(num_pairs: int, num_experts: int, tile: int) -> int:
    """The most tiles that `num_pairs` can need, however they fall on the experts."""
    hit = min(num_pairs, num_experts)
    return hit + (num_pairs - hit) // tile


def grouped_product(input: torch.Tensor, weight: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    """`input [M, in]`, of which rows `bounds[x] : bounds[x + 1]` meet `weight[x] [in, out]`, -> `[M, out]`."""
    hit = [x for x in range(len(weight)) if bounds[x + 1] > bounds[x]]
    if not hit:
        return input.new_empty(0, weight.shape[2])
    products = [expert_product(input[bounds[x] : bounds[x + 1]], weight[x]) for x in hit]
    return torch.cat(products)


def expert_product(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`input [m, in]`, `weight [in, out]` -> `[m, out]` for the few rows of one expert."""
    # oneDNN turns a weight stored [in, out] around first: 512 x 1024 at 1 row takes 278 us against 101 us of
    # torch.mm, at 8 rows 237 against 228, at 32 rows 327 against 451 (one Zen 5 core, torch 2.13).
    if len(input) <= FEW_ROWS and weight.stride(1) == 1:
        return torch.mm(input, weight)
    return linear_transposed(input, weight, None)


class ExpertGemmOp:
    """Callable `(input, routing, up, up_bias, down, down_bias) -> [N, top_k, E]`, weighted and not yet summed.

    Args:
        activation: a name in ACTIVATIONS, or "clamped_swiglu" (gated only).
        layout: how `up`'s columns hold the gate: "plain" (none), "halves" or "interleaved" (gate first).
        alpha, limit: of the clamped SwiGLU.
    """

    def __init__(
        self,
        activation: str,
        layout: Literal["plain", "halves", "interleaved"] = "halves",
        alpha: float = 1.702,
        limit: float = 7.0,
    ):
        if layout not in LAYOUTS:
            raise ValueError(f"layout={layout!r} must be one of {', '.join(LAYOUTS)}")
        if activation not in EXPERT_ACTIVATIONS:
            raise ValueError(f"activation={activation!r} must be one of {', '.join(EXPERT_ACTIVATIONS)}")
        if activation == CLAMPED_SWIGLU and layout == "plain":
            raise ValueError(f"activation={activation!r} needs a gate; layout must be halves or interleaved")
        self.activation, self.layout, self.alpha, self.limit = activation, layout, alpha, limit
        self.num_parts = 1 if layout == "plain" else 2

    def __call__(
        self,
        input: torch.Tensor,
        routing: Routing,
        up: torch.Tensor,
        up_bias: torch.Tensor | None,
        down: torch.Tensor,
        down_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Outputs `[N, top_k, E]` in the dtype of `input` times that of the routing weights.

        Args:
            input: `[N, E]`.
            up: `[X, E, U]`; up_bias: `[X, U]` or None.
            down: `[X, I, E]`; down_bias: `[X, E]` or None.

        Raises:
            ValueError: a tensor whose dtype, device or shape does not fit the others.
        """
        self._check(input, routing, up, up_bias, down, down_bias)
        run = self._launch if use_triton(input) else self.reference
        return run(input, routing, up, up_bias, down, down_bias)

    def _check(
        self,
        input: torch.Tensor,
        routing: Routing,
        up: torch.Tensor,
        up_bias: torch.Tensor | None,
        down: torch.Tensor,
        down_bias: torch.Tensor | None,
    ) -> None:
        num_experts = len(routing.offsets) - 1
        check_tensor("input", input, shape=(None, None))
        num_tokens, hidden = input.shape
        check_tensor("down", down, like=input, shape=(num_experts, None, hidden))
        columns = self.num_parts * down.shape[1]
        check_tensor("up", up, like=input, shape=(num_experts, hidden, columns))
        for name, bias, width in (("up_bias", up_bias, columns), ("down_bias", down_bias, hidden)):
            if bias is not None:
                check_tensor(name, bias, like=input, shape=(num_experts, width))
        weights = routing.weights
        check_tensor("routing weights", weights, like=input, dtype=weights.dtype, shape=(num_tokens, None))
        if weights.dtype not in (input.dtype, torch.float32):
            raise ValueError(f"routing weights are {weights.dtype}; expected {input.dtype} or torch.float32")
        check_tensor("routing order", routing.order, like=input, dtype=torch.int64, shape=(weights.numel(),))

    def reference(
        self,
        input: torch.Tensor,
        routing: Routing,
        up: torch.Tensor,
        up_bias: torch.Tensor | None,
        down: torch.Tensor,
        down_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """The same in plain torch, expert after expert; the host reads the offsets, so no graph can hold it."""
        weights, order = routing.weights, routing.order
        num_tokens, top_k = weights.shape
        bounds = routing.offsets.tolist()
        experts = routing.experts.reshape(-1)[order]
        inner = grouped_product(input[order // top_k], up, bounds)
        inner = self._activate(inner if up_bias is None else inner + up_bias[experts])
        result = grouped_product(inner, down, bounds)
        output = torch.empty_like(result)
        output[order] = result if down_bias is None else result + down_bias[experts]
        return output.view(num_tokens, top_k, -1) * weights[:, :, None]

    def _activate(self, inner: torch.Tensor) -> torch.Tensor:
        if self.layout == "plain":
            return ACTIVATIONS[self.activation](inner)
        gate, up = (inner[:, ::2], inner[:, 1::2]) if self.layout == "interleaved" else inner.chunk(2, dim=-1)
        if self.activation != CLAMPED_SWIGLU:
            return ACTIVATIONS[self.activation](gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))

    def _launch(
        self,
        input: torch.Tensor,
        routing: Routing,
        up: torch.Tensor,
        up_bias: torch.Tensor | None,
        down: torch.Tensor,
        down_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        num_tokens, top_k = routing.weights.shape
        size, hidden, num_pairs = down.shape[1], down.shape[2], num_tokens * top_k
        inner = torch.empty(num_pairs, size, dtype=input.dtype, device=input.device)
        dtype = torch.promote_types(input.dtype, routing.weights.dtype)
        output = torch.empty(num_tokens, top_k, hidden, dtype=dtype, device=input.device)
        if num_pairs == 0:
            return output
        self._launch_product(
            _up_kernel, input, routing, up, up_bias, inner, size, (self.alpha, self.limit),
            LAYOUT=LAYOUTS.index(self.layout), ACTIVATION=self.activation,
        )  # fmt: skip
        weights = routing.weights.contiguous()
        self._launch_product(_down_kernel, inner, routing, down, down_bias, output, hidden, (weights,))
        return output

    def _launch_product(
        self,
        kernel: Callable,
        input: torch.Tensor,
        routing: Routing,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        output: torch.Tensor,
        columns: int,
        rest: tuple,
        **constants: int | str,
    ) -> None:
        num_pairs, num_experts, depth = len(routing.order), weight.shape[0], weight.shape[1]
        tiles = choose_tiles(num_pairs, num_experts, columns, input.dtype)
        some_bias = weight[:, 0, :] if bias is None else bias  # where there is none, a pointer that is not read
        launch(
            kernel,
            (max_tiles(num_pairs, num_experts, tiles.m), -(-columns // tiles.n)),
            input, routing.order, routing.offsets, weight, some_bias, output, *rest,
            num_experts, routing.weights.shape[1], depth, columns,
            *input.stride(), *weight.stride(), *some_bias.stride(),
            device=input.device,
            HAS_BIAS=bias is not None, UPCASTS=IS_INTERPRETED, BLOCK_X=max(next_power_of_2(num_experts), 2),
            BLOCK_M=tiles.m, BLOCK_N=tiles.n, BLOCK_K=tiles.k,
            num_warps=tiles.warps, num_stages=tiles.stages, **constants,
        )  # fmt: skip


@triton.jit
def _find_tile(offsets, tile, num_experts, BLOCK_X: tl.constexpr, BLOCK_M: tl.constexpr):
    """Expert, first and end sorted pair of a tile; expert >= num_experts where there is no such tile."""
    x = tl.arange(0, BLOCK_X)
    mask = x < num_experts
    begin = tl.load(offsets + x, mask=mask, other=0)
    end = tl.load(offsets + x + 1, mask=mask, other=0)
    tiles = (end - begin + BLOCK_M - 1) // BLOCK_M
    last = tl.cumsum(tiles, axis=0)
    expert = tl.sum((last <= tile).to(tl.int32), axis=0)
    is_mine = x == expert
    first = tl.sum(tl.where(is_mine, begin + (tile - last + tiles) * BLOCK_M, 0), axis=0)
    return expert, first, tl.sum(tl.where(is_mine, end, 0), axis=0)


@triton.jit
def _product(
    a, a_mask, b, depth, stride_ak, stride_wk, b_mask,
    UPCASTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`[BLOCK_M, BLOCK_N]` fp32 from pointers to rows `a [BLOCK_M]` and columns `b [BLOCK_N]`."""
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, depth, BLOCK_K):
        left = depth - start
        x = tl.load(
            a[:, None] + (start + k)[None, :] * stride_ak, mask=a_mask[:, None] & (k < left)[None, :], other=0.0
        )
        w = tl.load(
            b[None, :] + (start + k)[:, None] * stride_wk, mask=b_mask[None, :] & (k < left)[:, None], other=0.0
        )
        if UPCASTS:  # the interpreter multiplies the bits of bfloat16
            x, w = x.to(tl.float32), w.to(tl.float32)
        total = tl.dot(x, w, total, input_precision="ieee")
    return total


@triton.jit
def _product_pair(
    a, a_mask, b, up_distance, depth, stride_ak, stride_wk, b_mask,
    UPCASTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The same for the columns `b` and those `up_distance` elements on, reading the rows once."""
    k = tl.arange(0, BLOCK_K)
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, depth, BLOCK_K):
        left = depth - start
        mask = b_mask[None, :] & (k < left)[:, None]
        place = b[None, :] + (start + k)[:, None] * stride_wk
        x = tl.load(
            a[:, None] + (start + k)[None, :] * stride_ak, mask=a_mask[:, None] & (k < left)[None, :], other=0.0
        )
        w = tl.load(place, mask=mask, other=0.0)
        v = tl.load(place + up_distance, mask=mask, other=0.0)
        if UPCASTS:
            x, w, v = x.to(tl.float32), w.to(tl.float32), v.to(tl.float32)
        gate = tl.dot(x, w, gate, input_precision="ieee")
        up = tl.dot(x, v, up, input_precision="ieee")
    return gate, up


@triton.jit
def _add_bias(total, bias, n, stride_bn, mask, HAS_BIAS: tl.constexpr):
    """`total` (already in the dtype) plus the bias of columns `n`, rounded to the dtype, as fp32."""
    result = total.to(tl.float32)
    if HAS_BIAS:
        offset = tl.load(bias + n * stride_bn, mask=mask, other=0.0).to(tl.float32)
        result = (result + offset[None, :]).to(total.dtype).to(tl.float32)
    return result


@triton.jit
def _up_kernel(
    input, order, offsets, weight, bias, inner, alpha, limit, num_experts, top_k, depth, columns,
    stride_an, stride_ak, stride_wx, stride_wk, stride_wn, stride_bx, stride_bn,
    LAYOUT: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, UPCASTS: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_M pairs of one expert times BLOCK_N columns of `inner`; LAYOUT 0 plain, 1 halves, 2 interleaved."""
    expert, first, end = _find_tile(offsets, tl.program_id(0), num_experts, BLOCK_X, BLOCK_M)
    if expert >= num_experts:
        return
    dtype = inner.dtype.element_ty
    rows = first + tl.arange(0, BLOCK_M)
    row_mask = rows < end
    tokens = tl.load(order + rows, mask=row_mask, other=0) // top_k
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < columns
    a = input + tokens * stride_an
    w = weight + expert.to(tl.int64) * stride_wx
    bias += expert.to(tl.int64) * stride_bx
    if LAYOUT == 2:  # one tile holds gate and up side by side, as they lie
        both = tl.program_id(1) * BLOCK_N * 2 + tl.arange(0, 2 * BLOCK_N)
        both_mask = both < 2 * columns
        pair = _product(a, row_mask, w + both * stride_wn, depth, stride_ak, stride_wk, both_mask,
                        UPCASTS, BLOCK_M, 2 * BLOCK_N, BLOCK_K)  # fmt: skip
        pair = _add_bias(pair.to(dtype), bias, both, stride_bn, both_mask, HAS_BIAS)
        gate, up = tl.split(tl.reshape(pair, (BLOCK_M, BLOCK_N, 2)))
    elif LAYOUT == 1:
        gate, up = _product_pair(a, row_mask, w + n * stride_wn, columns * stride_wn, depth, stride_ak, stride_wk,
                                 n_mask, UPCASTS, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip
        gate = _add_bias(gate.to(dtype), bias, n, stride_bn, n_mask, HAS_BIAS)
        up = _add_bias(up.to(dtype), bias, columns + n, stride_bn, n_mask, HAS_BIAS)
    else:
        gate = _product(a, row_mask, w + n * stride_wn, depth, stride_ak, stride_wk, n_mask,
                        UPCASTS, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip
        gate = _add_bias(gate.to(dtype), bias, n, stride_bn, n_mask, HAS_BIAS)
        up = gate
    if ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        gate = gate * tl.sigmoid((gate * alpha).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        gate = gate.to(dtype).to(tl.float32)
        up = (up + 1.0).to(dtype).to(tl.float32)
    else:
        gate = activate(gate, ACTIVATION).to(dtype).to(tl.float32)
    result = gate
    if LAYOUT != 0:
        result = gate * up
    place = inner + rows.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(place, result.to(dtype), mask=row_mask[:, None] & n_mask[None, :])


@triton.jit
def _down_kernel(
    inner, order, offsets, weight, bias, output, weights, num_experts, top_k, depth, columns,
    stride_an, stride_ak, stride_wx, stride_wk, stride_wn, stride_bx, stride_bn,
    HAS_BIAS: tl.constexpr, UPCASTS: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_M sorted pairs of one expert times BLOCK_N columns, weighted, written to the pairs' own places."""
    expert, first, end = _find_tile(offsets, tl.program_id(0), num_experts, BLOCK_X, BLOCK_M)
    if expert >= num_experts:
        return
    dtype = inner.dtype.element_ty
    rows = first + tl.arange(0, BLOCK_M)
    row_mask = rows < end
    pairs = tl.load(order + rows, mask=row_mask, other=0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < columns
    w = weight + expert.to(tl.int64) * stride_wx + n * stride_wn
    total = _product(inner + rows.to(tl.int64) * stride_an, row_mask, w, depth, stride_ak, stride_wk, n_mask,
                     UPCASTS, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip
    total = _add_bias(total.to(dtype), bias + expert.to(tl.int64) * stride_bx, n, stride_bn, n_mask, HAS_BIAS)
    scale = tl.load(weights + pairs, mask=row_mask, other=0.0).to(tl.float32)
    total = (total * scale[:, None]).to(output.dtype.element_ty)
    tl.store(output + pairs[:, None] * columns + n[None, :], total, mask=row_mask[:, None] & n_mask[None, :])
