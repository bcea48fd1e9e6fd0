"""Products of a few fp32 rows on a CPU as compiled functions: calls `cpu_products.c` with torch tensors.

Weights are views `[in, out]` of tensors stored `[out, in]`; results are stored by columns (strides 1, N), the best
order for the input of the next product, unless `by_rows` is set. N rows.
"""

from collections.abc import Sequence
from ctypes import Structure, c_int64, c_void_p

import torch

from hybrid_engine.ops.cpu_kernels import ACTIVATIONS, call, matrix, pointer, use_compiled

THREAD_ELEMENTS = 2**15
"""Minimum number of weight elements per thread."""

Linear = tuple[torch.Tensor, torch.Tensor | None]


class _Linear(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("row", c_int64)]


class _Product(Structure):
    _fields_ = [
        *((name, _Linear) for name in ("linear", "gate")),
        ("activation", c_int64),
        ("residual", c_void_p),
        *((name, c_int64) for name in ("residual_row", "residual_column")),
        ("output", c_void_p),
        *((name, c_int64) for name in ("row", "column", "width")),
    ]


def can_multiply(input: torch.Tensor, linears: Sequence[Linear], residual: torch.Tensor | None = None) -> bool:
    """Whether `products` and `activated_product` take these tensors."""
    if input.dtype != torch.float32:
        return False
    for weight, bias in linears:
        if weight.stride(0) != 1 or not (bias is None or bias.is_contiguous()):
            return False
    return use_compiled(input, residual, *(tensor for linear in linears for tensor in linear))


def products(
    input: torch.Tensor, linears: Sequence[Linear], residual: torch.Tensor | None = None, by_rows: bool = False
) -> list[torch.Tensor]:
    """`input W + b (+ residual)` for each linear: `[N, out]`."""
    outputs = [_empty(input, weight.shape[1], by_rows) for weight, _ in linears]
    _multiply(input, [_product(linear, output, residual) for linear, output in zip(linears, outputs, strict=True)])
    return outputs


def activated_product(input: torch.Tensor, linear: Linear, gate: Linear | None, activation: str) -> torch.Tensor:
    """`act(gate) * linear`, or `act(linear)` without a gate: `[N, out]`."""
    output = _empty(input, linear[0].shape[1], False)
    product = _product(linear, output, None)
    product.activation = ACTIVATIONS[activation]
    if gate is not None:
        product.gate = _linear(gate)
    _multiply(input, [product])
    return output


def _empty(input: torch.Tensor, width: int, by_rows: bool) -> torch.Tensor:
    """`[N, width]` like the input, independent of the default dtype and device."""
    return input.new_empty(len(input), width) if by_rows else input.new_empty(width, len(input)).t()


def _linear(linear: Linear) -> _Linear:
    weight, bias = linear
    return _Linear(weight.data_ptr(), pointer(bias), weight.stride(1))


def _product(linear: Linear, output: torch.Tensor, residual: torch.Tensor | None) -> _Product:
    strides = (0, 0) if residual is None else residual.stride()
    added = (pointer(residual), *strides)
    return _Product(_linear(linear), _Linear(), -1, *added, output.data_ptr(), *output.stride(), output.shape[1])


def _multiply(input: torch.Tensor, all: list[_Product]) -> None:
    num_rows, depth = input.shape
    num_elements = depth * sum(product.width * (2 if product.gate.weight else 1) for product in all)
    threads = max(1, min(torch.get_num_threads(), num_elements // THREAD_ELEMENTS))
    call("products", matrix(input), (_Product * len(all))(*all), len(all), num_rows, depth, threads)
