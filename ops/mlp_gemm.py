"""The MLP block: residual add, norm, up (or gate and up), activation, down.

    residual_add = input + residual
    normed       = norm(residual_add)
    inner        = act(normed Wup + bup)                         plain
                   act(normed Wgate + bgate) * (normed Wup + bup)   gated
    output       = inner Wdown + bdown (+ residual_add)

Moves the two or three weights once, E I elements each, and does 2 N E I operations for each.
`input` is the attention's output with its bias already added.

Up to 256 rows (in fp32 64) gate, up and activation are one launch, and down is another, which adds the residual. A
fused [in, 2I] weight is passed as two views of its columns.
"""

import torch

from hybrid_engine.ops import cpu_kernels
from hybrid_engine.ops.activation import ACTIVATIONS, activate, activate_and_multiply
from hybrid_engine.ops.cpu_gemm import is_compiled, linear_transposed
from hybrid_engine.ops.cpu_kernels import Linear, activated_product
from hybrid_engine.ops.dispatch import Launch, kernel_or_reference, prepared, tl, triton, use_triton
from hybrid_engine.ops.norm import NORM_OPS
from hybrid_engine.ops.skinny_gemm import (
    NO_WEIGHTS,
    Output,
    add_bias,
    check_linear,
    choose_tiles,
    load_rows,
    load_weights,
    multiply,
    rows_of,
    store_columns,
    takes_rows,
    weights_of,
)
from hybrid_engine.ops.vector_matmul import VectorMatMulOp


@triton.jit
def up_kernel(x, gate, up, y, ACTIVATION: tl.constexpr, TILES: tl.constexpr):
    """One tile of `inner`: both weights are streamed for the same rows. gate.ptr None: no gate."""
    DTYPE: tl.constexpr = y.ptr.dtype.element_ty
    BLOCK_N: tl.constexpr = TILES.block_n
    ROWS: tl.constexpr = TILES.rows
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.zeros([BLOCK_N, ROWS], tl.float32)
    outer = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in range(0, x.width, TILES.block_k):
        k = start + tl.arange(0, TILES.block_k)
        up_tile = load_weights(up, n, k, x.width)
        rows = load_rows(x, k, ROWS)
        inner = multiply(up_tile, rows, inner)
        if gate.ptr is not None:
            gate_tile = load_weights(gate, n, k, x.width)
            outer = multiply(gate_tile, rows, outer)
    inner = add_bias(inner, up, n).to(DTYPE).to(tl.float32)
    if gate.ptr is not None:
        outer = add_bias(outer, gate, n).to(DTYPE).to(tl.float32)
        inner = activate(outer, ACTIVATION).to(DTYPE).to(tl.float32) * inner
    else:
        inner = activate(inner, ACTIVATION)
    store_columns(y, x.num_rows, inner, n, up.width)


def up_product(
    input: torch.Tensor,
    gate: Linear | None,
    up: Linear,
    activation: str,
) -> torch.Tensor:
    """Launches `inner [N, I]` for rows accepted by `takes_rows`."""
    gate_weight, gate_bias = (None, None) if gate is None else gate
    launch, sizes = prepared(_prepare, activation, input, *up, gate_weight, gate_bias)
    output = torch.empty(sizes, dtype=input.dtype, device=input.device)
    launch(rows_of(input), NO_WEIGHTS if gate is None else weights_of(*gate), weights_of(*up), Output(output, sizes[1]))
    return output


def _prepare(
    activation: str,
    input: torch.Tensor,
    up: torch.Tensor,
    up_bias: torch.Tensor | None,
    gate: torch.Tensor | None,
    gate_bias: torch.Tensor | None,
) -> tuple[Launch, tuple[int, int]]:
    """The launch, and the sizes of its output."""
    (num_rows, width_in), width_out = input.shape, up.shape[1]
    check_linear("up", input, up, up_bias)
    if gate is not None:
        check_linear("gate", input, gate, gate_bias, width_out)
    tiles = choose_tiles(num_rows, width_in, (width_out,), input.dtype, num_weights=1 if gate is None else 2)
    grid = (tiles.programs(width_out),)
    return Launch(up_kernel, grid, input.device, ACTIVATION=activation, **tiles.meta()), (num_rows, width_out)


def up_in_torch(input: torch.Tensor, gate: Linear | None, up: Linear, activation: str) -> torch.Tensor:
    """`up_product` with torch's products or, on a CPU, compiled ones."""
    linears = [up] if gate is None else [up, gate]
    if activation in cpu_kernels.ACTIVATIONS and is_compiled(input, linears):
        return activated_product(input, up, gate, activation)
    inner = linear_transposed(input, *up)
    if gate is None:
        return ACTIVATIONS[activation](inner)
    return activate_and_multiply(linear_transposed(input, *gate), inner, activation)


class MLPGemmOp:
    """Callable `(input, residual, gate, up, down, gamma, beta) -> (output, residual_add)`.

    Each of `gate`, `up`, `down` is a pair (weight [in, out], bias [out] or None); `gate` may be None.

    Args:
        norm: a kind of `NORM_OPS`; None: no norm, gamma and beta are not read.
        eps: eps of the norm.
        activation: a name in ACTIVATIONS.
        adds_residual: whether the output includes `residual_add`.
    """

    def __init__(self, norm: str | None, eps: float, activation: str, adds_residual: bool = False):
        self.norm = None if norm is None else NORM_OPS[norm](eps)
        self.activation_name, self.activation = activation, ACTIVATIONS[activation]
        self.adds_residual = adds_residual
        self.down = VectorMatMulOp()

    def __call__(
        self,
        input: torch.Tensor,
        residual: torch.Tensor | None,
        gate: Linear | None,
        up: Linear,
        down: Linear,
        gamma: torch.Tensor | None = None,
        beta: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`input [N, E]`, `residual [N, E]` or None (nothing to add) -> output and the residual stream, `[N, E]`."""
        normed, residual_add = self._add_and_norm(input, residual, gamma, beta)
        inner = self._inner(normed, gate, up)
        return self.down(inner, *down, residual_add if self.adds_residual else None), residual_add

    def reference(
        self,
        input: torch.Tensor,
        residual: torch.Tensor | None,
        gate: Linear | None,
        up: Linear,
        down: Linear,
        gamma: torch.Tensor | None = None,
        beta: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference: the function of the kernel in plain torch."""
        residual_add = input if residual is None else input + residual
        normed = residual_add if self.norm is None else self.norm.reference(residual_add, gamma, beta)
        inner = linear_transposed(normed, *up)
        inner = self.activation(inner) if gate is None else self.activation(linear_transposed(normed, *gate)) * inner
        return self.down.reference(inner, *down, residual_add if self.adds_residual else None), residual_add

    def _add_and_norm(
        self,
        input: torch.Tensor,
        residual: torch.Tensor | None,
        gamma: torch.Tensor | None,
        beta: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.norm is None:
            residual_add = input if residual is None else input + residual
            return residual_add, residual_add
        if residual is None:
            return self.norm(input, gamma, beta), input
        return self.norm.add_and_norm(input, residual, gamma, beta)

    def _inner(self, normed: torch.Tensor, gate: Linear | None, up: Linear) -> torch.Tensor:
        if use_triton(normed) and takes_rows(normed):
            return kernel_or_reference(up_product, up_in_torch, normed, gate, up, self.activation_name)
        return up_in_torch(normed, gate, up, self.activation_name)
