"""The linears of a layer: the plain product, the projections to queries, keys and values, the MLP and its activation.

    VectorMatMulOp   y = x W (+ b) (+ residual)
    QKVGemmOp        normed = norm(input);  q, k, v = normed Wq + bq, normed Wk + bk, normed Wv + bv
    MLPGemmOp        residual_add = input + residual;  normed = norm(residual_add)
                     inner  = act(normed Wup + bup)                           plain
                              act(normed Wgate + bgate) * (normed Wup + bup)  gated
                     output = inner Wdown + bdown (+ residual_add)
    GatedActivationOp  up, gate = chunk(activation + bias, 2);  y = up * act(gate)

Weights are [in, out]. A `torch.nn.Linear` weight is [out, in]; its `.t()` is the view that these ops take, so nothing
is copied. A product moves in x out elements of W once for all N rows and does 2 N in out operations: below about 100
rows on a GPU it is limited by memory bandwidth.

The kernels (`linears_kernels.py`) are for few rows, up to 256 or in fp32 64. The three products of queries, keys and
values are one launch, whose programs take a tile of q, of k or of v; the weights are three tensors or one fused tensor
(GPT-2). Gate, up and activation are one launch, and down is another, which adds the residual; a fused [in, 2I] weight
is passed as two views of its columns. With more rows cuBLAS is used, and above 64 rows also for products without a bias
or residual, which take one launch there too. If the tiles do not fill the GPU, K is split: the parts are written in
fp32, and the last program of a tile sums them, always in the same order.

On a CPU `cpu_kernels.py` computes products, whose fp32 results may be stored by columns.

`ACTIVATIONS` are the references, by the names that Hugging Face configs use (`hidden_act`, `activation_function`);
`activate` is the same functions inside a kernel, in fp32. There tanh(u) is 2 sigmoid(2u) - 1, so
0.5 x (1 + tanh(u)) is x sigmoid(2u). The order of the halves of `GatedActivationOp` is DeepSpeed's
(`gated_activation` in csrc/transformer/inference/csrc/gelu.cu). Its activation runs in fp32 and is rounded before it is
multiplied, as transformers' MLPs round. It moves 3 N I elements and does about 10 N I operations.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from hybrid_engine.ops import cpu_kernels
from hybrid_engine.ops.cpu_kernels import (
    Linear,
    activated_product,
    is_compiled,
    linear_by_rows,
    linear_transposed,
    linears_transposed,
)
from hybrid_engine.ops.dispatch import Launch, check_tensor, kernel_or_reference, prepared, use_triton
from hybrid_engine.ops.linears_kernels import (
    FEW_ROWS,
    NO_PARTS,
    NO_WEIGHTS,
    NUM_SMS,
    TRITON_DTYPES,
    Output,
    SplitProducts,
    check_linear,
    choose_tiles,
    gated_activation_kernel,
    linear_kernel,
    qkv_kernel,
    rows_of,
    takes_rows,
    up_kernel,
    weights_of,
)
from hybrid_engine.ops.norm import NORM_OPS

LAYOUTS = ("blocks", "grouped")
# Values of one row per program: 8 per thread of 4 warps, 16 bytes of each operand in 16 bits.
GATED_BLOCK = 1024


def linear_fp32(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`[N, out]` fp32. On a CPU a 16-bit product is rounded first: other products of torch copy the weight."""
    if not input.is_cuda or input.dtype.itemsize > 2:
        return linear_by_rows(input, weight, bias)
    output = torch.mm(input, weight, out_dtype=torch.float32)
    return output if bias is None else output + bias


class VectorMatMulOp:
    """Callable `(input, weight, bias=None, residual=None) -> [N, out]`.

    Args:
        fp32_output: for the LM head: returns the product in fp32 for any dtype of the weights.
    """

    def __init__(self, fp32_output: bool = False):
        self.fp32_output = fp32_output
        # On the device of the first call; a graph may hold its address. Products of one op must not run concurrently.
        self._arrived: torch.Tensor | None = None

    def __call__(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`input [N, in]`, `weight [in, out]`, `bias [out]`, `residual [N, out]` in the output's dtype."""
        is_bare = input.shape[0] > FEW_ROWS and (self.fp32_output or (bias is None and residual is None))
        if not use_triton(input) or not takes_rows(input) or is_bare:
            return self.reference(input, weight, bias, residual)
        return kernel_or_reference(self._launch, self.reference, input, weight, bias, residual)

    def reference(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The op in torch: the product is rounded to its dtype before the residual is added."""
        if not self.fp32_output:
            return linear_transposed(input, weight, bias, residual)
        output = linear_fp32(input, weight, bias)
        return output if residual is None else output + residual

    def _launch(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        product = prepared(_prepare_product, self.fp32_output, input, weight, bias, residual)
        output = torch.empty(product.sizes, dtype=product.dtype, device=input.device)
        parts = NO_PARTS
        if product.parts is not None:
            parts = SplitProducts(
                torch.empty(product.parts, dtype=torch.float32, device=input.device),
                self._counts(input.device),
                product.split_width,
            )
        product.launch(
            rows_of(input), weights_of(weight, bias), Output(residual, product.residual_row),
            Output(output, product.sizes[1]), parts,
        )  # fmt: skip
        return output

    def _counts(self, device: torch.device) -> torch.Tensor:
        if self._arrived is None or self._arrived.device != device:
            self._arrived = torch.zeros(NUM_SMS, dtype=torch.int32, device=device)
        return self._arrived


class Product(NamedTuple):
    """A launch of the kernel, and the sizes of its outputs."""

    launch: Launch
    sizes: tuple[int, int]  # of the output
    dtype: torch.dtype
    residual_row: int  # stride
    parts: tuple[int, ...] | None  # sizes of the parts of a split K; None: it is not split
    split_width: int


def _prepare_product(
    fp32_output: bool,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> Product:
    check_linear("linear", input, weight, bias)
    (num_rows, width_in), width_out = input.shape, weight.shape[1]
    dtype = torch.float32 if fp32_output else input.dtype
    if residual is not None:
        shape = (num_rows, width_out)
        check_tensor("residual", residual, like=input, dtype=dtype, shape=shape, is_dense_last=True)
    tiles = choose_tiles(num_rows, width_in, (width_out,), input.dtype, can_split=True)
    num_tiles = tiles.programs(width_out)
    launch = Launch(linear_kernel, (num_tiles, tiles.splits), input.device, DTYPE=TRITON_DTYPES[dtype], **tiles.meta())
    residual_row = 0 if residual is None else residual.stride(0)
    if tiles.splits == 1:
        return Product(launch, (num_rows, width_out), dtype, residual_row, None, 0)
    assert num_tiles <= NUM_SMS, f"{num_tiles=}"  # products with more tiles are not split
    sizes = (num_tiles, tiles.splits, tiles.block_n, tiles.rows)
    split_width = -(-width_in // (tiles.splits * tiles.block_k)) * tiles.block_k
    return Product(launch, (num_rows, width_out), dtype, residual_row, sizes, split_width)


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
        launch, sizes = prepared(_prepare_qkv, self.heads, len(weights), input, *weights, *biases)
        output = torch.empty(sizes, dtype=input.dtype, device=input.device)
        q, k, v = (*map(weights_of, weights, biases), NO_WEIGHTS, NO_WEIGHTS)[:3]
        launch(rows_of(input), q, k, v, Output(output, sizes[1]))
        return self._split(output) if self.layout == "grouped" else self.heads.views(output)


def _prepare_qkv(
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


def up_product(
    input: torch.Tensor,
    gate: Linear | None,
    up: Linear,
    activation: str,
) -> torch.Tensor:
    """Launches `inner [N, I]` for rows accepted by `takes_rows`."""
    gate_weight, gate_bias = (None, None) if gate is None else gate
    launch, sizes = prepared(_prepare_up, activation, input, *up, gate_weight, gate_bias)
    output = torch.empty(sizes, dtype=input.dtype, device=input.device)
    launch(rows_of(input), NO_WEIGHTS if gate is None else weights_of(*gate), weights_of(*up), Output(output, sizes[1]))
    return output


def _prepare_up(
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


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by the tanh approximation (Hendrycks & Gimpel 2016), the one that GPT-2 was trained with."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU by the sigmoid approximation (Hendrycks & Gimpel 2016), rounded where transformers rounds."""
    return x * torch.sigmoid(1.702 * x)


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """relu(x)^2 (So et al. 2021, arXiv 2109.08668)."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "relu2": relu_squared,
    "gelu": F.gelu,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
}


def gated_activation(
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    """Launches `act(gate + gate_bias) * (up + up_bias)` of two `[N, I]`; with both biases or none."""
    launch = prepared(_prepare_gated, activation, gate, up, gate_bias, up_bias)
    output = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    launch(gate, up, gate_bias, up_bias, output, gate.stride(0), up.stride(0), gate.shape[1])
    return output


def _prepare_gated(
    activation: str,
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
) -> Launch:
    check_tensor("gate", gate, shape=(None, None), is_dense_last=True)
    check_tensor("up", up, like=gate, shape=gate.shape, is_dense_last=True)
    for name, bias in (("gate bias", gate_bias), ("up bias", up_bias)):
        if bias is not None:
            check_tensor(name, bias, like=gate, shape=gate.shape[1:], is_dense_last=True)
    grid = (gate.shape[0], -(-gate.shape[1] // GATED_BLOCK))
    return Launch(gated_activation_kernel, grid, gate.device, ACTIVATION=activation, BLOCK=GATED_BLOCK, num_warps=4)


def gated_in_torch(
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    """`gated_activation` in plain torch."""
    if gate_bias is not None and up_bias is not None:
        gate, up = gate + gate_bias, up + up_bias
    return ACTIVATIONS[activation](gate) * up


def activate_and_multiply(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """`act(gate) * up` of two `[N, I]`, by a form that accepts them."""
    if use_triton(gate):  # on a CPU, where kernels are interpreted, products may be stored by columns
        halves = gate.contiguous(), up.contiguous()
        return kernel_or_reference(gated_activation, gated_in_torch, *halves, None, None, activation)
    # SiLU is one operation in torch too: 3 us with the product for a row of 1024, where the call takes 15, and no
    # longer for 32 rows; torch takes two to three times as long for GELU's forms (one core of a Zen 5, torch 2.13).
    if activation not in ("silu", "swish") and gate.numel() and cpu_kernels.use_compiled(gate, up):
        return cpu_kernels.gated_activation(gate, up, activation)
    return ACTIVATIONS[activation](gate) * up


class GatedActivationOp:
    """Callable `(activation [N, 2I], bias [2I] or None, type) -> [N, I]`, type a name in ACTIVATIONS."""

    def __call__(self, activation: torch.Tensor, bias: torch.Tensor | None, type: str) -> torch.Tensor:
        """The first half of the columns is up, the second is the gate. ValueError for an unknown type."""
        self._check(activation, type)
        if not use_triton(activation):
            return self.reference(activation, bias, type)
        if bias is not None:
            check_tensor("bias", bias, like=activation, shape=activation.shape[1:], is_dense_last=True)
        up, gate = activation.chunk(2, dim=1)
        up_bias, gate_bias = (None, None) if bias is None else bias.chunk(2)
        return kernel_or_reference(gated_activation, gated_in_torch, gate, up, gate_bias, up_bias, type)

    def reference(self, activation: torch.Tensor, bias: torch.Tensor | None, type: str) -> torch.Tensor:
        """The reference: the function of the kernel in plain torch."""
        self._check(activation, type)
        up, gate = (activation if bias is None else activation + bias).chunk(2, dim=1)
        return gated_in_torch(gate, up, None, None, type)

    @staticmethod
    def _check(activation: torch.Tensor, type: str) -> None:
        if type not in ACTIVATIONS:
            raise ValueError(f"type={type!r} must be one of {', '.join(ACTIVATIONS)}")
        if activation.dim() != 2 or activation.shape[1] % 2:
            raise ValueError(f"activation has shape {list(activation.shape)}; expected [any, an even number]")
