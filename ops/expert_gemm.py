"""The experts of a mixture-of-experts MLP as two grouped products over tokens sorted by expert.

    up       = x[token] Wup[expert] + bup[expert]
    inner    = act(up)                                       plain (Megatron)
               act(gate) * up                                gated: Wup holds both, in halves [gate | up] or
               (clip(up) + 1) * clip(gate) sigmoid(1.702 clip(gate))   interleaved; the last is gpt-oss's
    y[pair]  = (inner Wdown[expert] + bdown[expert]) * weight[pair]

M = N top_k pairs (token, slot), X experts, E hidden, I MLP size, U = I plain or 2 I gated. The first kernel writes
`inner [M, I]` in sorted order, the second `y [N, top_k, E]` at the place of each pair, so that ExpertSumOp adds them in
a fixed order. Each does up to 2 M E U operations and moves the weights of each expert hit once per tile of its tokens:
once in all while no expert has more than one tile, as in decode. The grid is the worst case of tiles for M pairs; a
program finds its expert from the offsets on the device, and one without a tile returns.

Weights are [X, in, out] views with any strides. In 16 bits everything is rounded where transformers' expert
modules round: product, bias, each step of the activation, and the weighted output.

Sources: transformers, integrations/moe.py and models/gpt_oss/modeling_gpt_oss.py (GptOssExperts); Gale et al. 2022,
"MegaBlocks", for the grouping.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from hybrid_engine.ops.cpu_kernels import linear_transposed
from hybrid_engine.ops.dispatch import (
    Launch,
    check_tensor,
    is_replaced,
    kernel_or_reference,
    next_power_of_2,
    prepared,
    tl,
    triton,
    use_triton,
)
from hybrid_engine.ops.linears import ACTIVATIONS
from hybrid_engine.ops.linears_kernels import activate, multiply
from hybrid_engine.ops.moe_gating import ExpertRouting

LAYOUTS = ("plain", "halves", "interleaved")
CLAMPED_SWIGLU = "clamped_swiglu"
EXPERT_ACTIVATIONS = (*ACTIVATIONS, CLAMPED_SWIGLU)
# With fewer programs, half of a column tile each keeps more of the device busy (two waves of an H100).
FEW_PROGRAMS = 264
# Up to this many rows torch.mm is the faster product on a CPU for a weight stored [in, out].
FEW_ROWS = 4


class ExpertTiles(NamedTuple):
    """Sizes of the tiles of a grouped product."""

    m: int  # pairs
    n: int  # columns (of gate and of up, if gated)
    k: int  # step along the summed dimension
    warps: int
    stages: int


def choose_tiles(num_pairs: int, num_experts: int, columns: int, dtype: torch.dtype) -> ExpertTiles:
    """Tiles for `num_pairs` spread over `num_experts` and `columns` of output; depends on shapes only."""
    average = -(-num_pairs // num_experts)
    m = min(64, max(16, next_power_of_2(2 * average if average > 1 else 1)))
    is_wide = max_tiles(num_pairs, num_experts, m) * -(-columns // 64) >= FEW_PROGRAMS
    is_small = m <= 32
    if dtype == torch.float32:
        return ExpertTiles(m, 64 if is_wide else 32, 32, 4, 2)
    return ExpertTiles(m, 64 if is_wide else 32, 128 if is_small and not is_wide else 64, 4, 4 if is_small else 3)


def max_tiles(num_pairs: int, num_experts: int, tile: int) -> int:
    """The maximum number of tiles for `num_pairs`, however they are distributed over the experts."""
    hit = min(num_pairs, num_experts)
    return hit + (num_pairs - hit) // tile


def grouped_product(input: torch.Tensor, weight: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    """`input [M, in]`, rows `bounds[x] : bounds[x + 1]` of it times `weight[x] [in, out]`, -> `[M, out]`."""
    hit = [x for x in range(len(weight)) if bounds[x + 1] > bounds[x]]
    if not hit:
        return input.new_empty(0, weight.shape[2])
    products = [expert_product(input[bounds[x] : bounds[x + 1]], weight[x]) for x in hit]
    return torch.cat(products)


def expert_product(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`input [m, in]`, `weight [in, out]` -> `[m, out]` for the few rows of one expert."""
    # oneDNN first transposes a weight stored [in, out]: 512 x 1024 at 1 row takes 278 us against 101 us of torch.mm, at
    # 8 rows 237 against 228, at 32 rows 327 against 451 (one Zen 5 core, torch 2.13).
    if len(input) <= FEW_ROWS and weight.stride(1) == 1:
        return torch.mm(input, weight)
    return linear_transposed(input, weight, None)


class ExpertGemmOp:
    """Callable `(input, routing, up, up_bias, down, down_bias) -> [N, top_k, E]`, weighted and not yet summed.

    Args:
        activation: a name in ACTIVATIONS, or "clamped_swiglu" (gated only).
        layout: the place of the gate in `up`'s columns: "plain" (none), "halves" or "interleaved" (gate first).
        alpha, limit: parameters of the clamped SwiGLU.
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
        self.activation, self.layout = activation, layout
        self.gate = Gate(float(alpha), float(limit))  # integers would compile to constants
        self.num_parts = 1 if layout == "plain" else 2

    def __call__(
        self,
        input: torch.Tensor,
        routing: ExpertRouting,
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
            ValueError: a tensor's dtype, device or shape does not fit the others.
        """
        self._check(input, routing, up, up_bias, down, down_bias)
        if use_triton(input):
            return kernel_or_reference(self._launch, self.reference, input, routing, up, up_bias, down, down_bias)
        return self.reference(input, routing, up, up_bias, down, down_bias)

    @classmethod
    def reads_host(cls, input: torch.Tensor) -> bool:
        """Whether the reference runs for `input`; it reads the experts' token counts on the host."""
        return not use_triton(input) or is_replaced(cls._launch)

    def _check(
        self,
        input: torch.Tensor,
        routing: ExpertRouting,
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
        routing: ExpertRouting,
        up: torch.Tensor,
        up_bias: torch.Tensor | None,
        down: torch.Tensor,
        down_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """The kernels' function in torch, expert by expert; it reads offsets on the host, so graphs cannot capture
        it.
        """
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
        alpha, limit = self.gate
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))

    def _launch(
        self,
        input: torch.Tensor,
        routing: ExpertRouting,
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
        weights, pairs = routing.weights.contiguous(), Pairs(routing.order, routing.offsets, len(up), top_k)
        tensors = (input, weights, *routing[2:], up, up_bias, down, down_bias)
        products = prepared(_prepare, self.layout, self.activation, *tensors)
        products.up(ExpertRows(input, *input.stride()), pairs, _weights(up, up_bias), Inner(inner, size), self.gate)
        products.down(
            ExpertRows(inner, *inner.stride()), pairs, _weights(down, down_bias), Inner(output, hidden), weights
        )
        return output


class ExpertRows(NamedTuple):
    """The rows of x, which experts multiply with their weights."""

    ptr: Any  # [N or M, in]
    stride_m: int
    stride_k: int


class Pairs(NamedTuple):
    """The pairs of token and slot, sorted by expert."""

    order_ptr: Any  # [M] int64: each pair's number, token * top_k + slot
    offsets_ptr: Any  # [X + 1] int32: start of each expert's pairs
    num_experts: int
    top_k: int


class ExpertWeights(NamedTuple):
    """W `[X, in, out]` and the bias `[X, out]` or None."""

    ptr: Any
    stride_x: int
    stride_k: int
    stride_n: int
    depth: int  # in
    bias_ptr: Any
    bias_stride_x: int
    bias_stride_n: int


class Inner(NamedTuple):
    """The output, with dense columns; of gate and up one."""

    ptr: Any
    columns: int


class Gate(NamedTuple):
    """Parameters of the clamped SwiGLU."""

    alpha: float
    limit: float


def _weights(weight: torch.Tensor, bias: torch.Tensor | None) -> ExpertWeights:
    (x, k, n), (bias_x, bias_n) = weight.stride(), (0, 0) if bias is None else bias.stride()
    return ExpertWeights(weight, x, k, n, weight.shape[1], bias, bias_x, bias_n)


class ExpertProducts(NamedTuple):
    """The launches of both products."""

    up: Launch
    down: Launch


def _prepare(
    layout: str,
    activation: str,
    input: torch.Tensor,
    weights: torch.Tensor,
    order: torch.Tensor,
    offsets: torch.Tensor,
    up: torch.Tensor,
    up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
) -> ExpertProducts:
    def launch(kernel: Callable, columns: int, **form: int | str) -> Launch:
        tiles = choose_tiles(num_pairs, num_experts, columns, input.dtype)
        return Launch(
            kernel, (max_tiles(num_pairs, num_experts, tiles.m), -(-columns // tiles.n)), input.device,
            EXPERTS=max(next_power_of_2(num_experts), 2), TILES=tiles,
            num_warps=tiles.warps, num_stages=tiles.stages, **form,
        )  # fmt: skip

    num_pairs, (num_experts, size, hidden) = len(order), down.shape
    form: dict[str, Any] = {"LAYOUT": LAYOUTS.index(layout), "ACTIVATION": activation}
    return ExpertProducts(launch(_up_kernel, size, **form), launch(_down_kernel, hidden))


@triton.jit
def _find_tile(pairs, tile, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Expert, first and end sorted pair of a tile; expert >= num_experts if the tile does not exist."""
    x = tl.arange(0, EXPERTS)
    mask = x < pairs.num_experts
    begin = tl.load(pairs.offsets_ptr + x, mask=mask, other=0)
    end = tl.load(pairs.offsets_ptr + x + 1, mask=mask, other=0)
    tiles = (end - begin + BLOCK_M - 1) // BLOCK_M
    last = tl.cumsum(tiles, axis=0)
    expert = tl.sum((last <= tile).to(tl.int32), axis=0)
    is_mine = x == expert
    first = tl.sum(tl.where(is_mine, begin + (tile - last + tiles) * BLOCK_M, 0), axis=0)
    return expert, first, tl.sum(tl.where(is_mine, end, 0), axis=0)


@triton.jit
def _load_rows(x, rows, row_mask, k, depth):
    """Columns `k` of the rows whose numbers are `rows`."""
    place = x.ptr + rows.to(tl.int64)[:, None] * x.stride_m + k[None, :] * x.stride_k
    return tl.load(place, mask=row_mask[:, None] & (k < depth)[None, :], other=0.0)


@triton.jit
def _load_weights(w, expert, n, n_mask, k):
    """Columns `n` of an expert's weight at `k`."""
    place = w.ptr + expert.to(tl.int64) * w.stride_x + n[None, :] * w.stride_n + k[:, None] * w.stride_k
    return tl.load(place, mask=n_mask[None, :] & (k < w.depth)[:, None], other=0.0)


@triton.jit
def _product(x, rows, row_mask, w, expert, n, n_mask, TILES: tl.constexpr):
    """`[BLOCK_M, columns n]` fp32 of the rows and an expert's weight."""
    BLOCK_M: tl.constexpr = TILES.m
    BLOCK_K: tl.constexpr = TILES.k
    total = tl.zeros((BLOCK_M, n.shape[0]), dtype=tl.float32)
    for start in range(0, w.depth, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        loaded = _load_rows(x, rows, row_mask, k, w.depth)
        total = multiply(loaded, _load_weights(w, expert, n, n_mask, k), total)
    return total


@triton.jit
def _product_pair(x, rows, row_mask, w, expert, n, n_mask, columns, TILES: tl.constexpr):
    """One product for the columns `n` and one for the columns at an offset of `columns`, reading the rows once."""
    BLOCK_M: tl.constexpr = TILES.m
    BLOCK_N: tl.constexpr = TILES.n
    BLOCK_K: tl.constexpr = TILES.k
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, w.depth, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        loaded = _load_rows(x, rows, row_mask, k, w.depth)
        gate = multiply(loaded, _load_weights(w, expert, n, n_mask, k), gate)
        up = multiply(loaded, _load_weights(w, expert, columns + n, n_mask, k), up)
    return gate, up


@triton.jit
def _add_bias(total, w, expert, n, mask):
    """`total` (already in the dtype) plus the bias of columns `n`, rounded to the dtype, as fp32."""
    result = total.to(tl.float32)
    if w.bias_ptr is not None:
        place = w.bias_ptr + expert.to(tl.int64) * w.bias_stride_x + n * w.bias_stride_n
        offset = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        result = (result + offset[None, :]).to(total.dtype).to(tl.float32)
    return result


@triton.jit
def _up_kernel(
    x, pairs, w, inner, gate_numbers,
    LAYOUT: tl.constexpr, ACTIVATION: tl.constexpr, EXPERTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """BLOCK_M pairs of one expert times BLOCK_N columns of `inner`; LAYOUT 0 plain, 1 halves, 2 interleaved."""
    BLOCK_M: tl.constexpr = TILES.m
    BLOCK_N: tl.constexpr = TILES.n
    expert, first, end = _find_tile(pairs, tl.program_id(0), EXPERTS, BLOCK_M)
    if expert >= pairs.num_experts:
        return
    dtype = inner.ptr.dtype.element_ty
    rows = first + tl.arange(0, BLOCK_M)
    row_mask = rows < end
    tokens = tl.load(pairs.order_ptr + rows, mask=row_mask, other=0) // pairs.top_k
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < inner.columns
    if LAYOUT == 2:  # one tile holds gate and up side by side, as stored
        both = tl.program_id(1) * BLOCK_N * 2 + tl.arange(0, 2 * BLOCK_N)
        both_mask = both < 2 * inner.columns
        pair = _product(x, tokens, row_mask, w, expert, both, both_mask, TILES)
        pair = _add_bias(pair.to(dtype), w, expert, both, both_mask)
        gate, up = tl.split(tl.reshape(pair, (BLOCK_M, BLOCK_N, 2)))
    elif LAYOUT == 1:
        gate, up = _product_pair(x, tokens, row_mask, w, expert, n, n_mask, inner.columns, TILES)
        gate = _add_bias(gate.to(dtype), w, expert, n, n_mask)
        up = _add_bias(up.to(dtype), w, expert, inner.columns + n, n_mask)
    else:
        gate = _product(x, tokens, row_mask, w, expert, n, n_mask, TILES)
        gate = _add_bias(gate.to(dtype), w, expert, n, n_mask)
        up = gate
    if ACTIVATION == "clamped_swiglu":
        limit = gate_numbers.limit
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        gate = gate * tl.sigmoid((gate * gate_numbers.alpha).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        gate = gate.to(dtype).to(tl.float32)
        up = (up + 1.0).to(dtype).to(tl.float32)
    else:
        gate = activate(gate, ACTIVATION).to(dtype).to(tl.float32)
    result = gate
    if LAYOUT != 0:
        result = gate * up
    place = inner.ptr + rows.to(tl.int64)[:, None] * inner.columns + n[None, :]
    tl.store(place, result.to(dtype), mask=row_mask[:, None] & n_mask[None, :])


@triton.jit
def _down_kernel(x, pairs, w, output, weights_ptr, EXPERTS: tl.constexpr, TILES: tl.constexpr):
    """BLOCK_M sorted pairs of one expert times BLOCK_N columns, weighted, written to the places of the pairs."""
    BLOCK_M: tl.constexpr = TILES.m
    BLOCK_N: tl.constexpr = TILES.n
    expert, first, end = _find_tile(pairs, tl.program_id(0), EXPERTS, BLOCK_M)
    if expert >= pairs.num_experts:
        return
    rows = first + tl.arange(0, BLOCK_M)
    row_mask = rows < end
    numbers = tl.load(pairs.order_ptr + rows, mask=row_mask, other=0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < output.columns
    total = _product(x, rows, row_mask, w, expert, n, n_mask, TILES)
    total = _add_bias(total.to(x.ptr.dtype.element_ty), w, expert, n, n_mask)
    scale = tl.load(weights_ptr + numbers, mask=row_mask, other=0.0).to(tl.float32)
    total = (total * scale[:, None]).to(output.ptr.dtype.element_ty)
    place = output.ptr + numbers[:, None] * output.columns + n[None, :]
    tl.store(place, total, mask=row_mask[:, None] & n_mask[None, :])
