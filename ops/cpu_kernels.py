"""The compiled form of a decode step's small operations on a CPU: calls `cpu_kernels.c` with torch tensors.

A third implementation in addition to an op's torch reference and its Triton kernel, for fp32 and bf16. Eager torch
takes ten to thirty operations of 5 to 20 us each where one of these functions takes one call.

N rows, E width, H query heads, K key/value heads, G = H / K, D head dimension.

`products` calls `cpu_products.c` for products of a few fp32 rows. Weights are views `[in, out]` of tensors stored
`[out, in]`; results are stored by columns (strides 1, N), the best order for the input of the next product, unless
`by_rows` is set.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import Structure, byref, c_double, c_int64, c_void_p
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hybrid_engine.ops.batch import QKV, DecodeBatch, HeadWeights, KVBlocks
from hybrid_engine.ops.cpu_library import load_library
from hybrid_engine.ops.dispatch import fallback_forced, use_triton

DTYPES = (torch.float32, torch.bfloat16)
NORMS = {"layer": 0, "rms": 1, "rms_fp32": 2, "rms_offset": 3}
ACTIVATIONS = {"silu": 0, "swish": 0, "relu": 1, "relu2": 2, "gelu": 3, "gelu_new": 4, "gelu_fast": 4,
               "gelu_pytorch_tanh": 4, "quick_gelu": 5}  # fmt: skip
# Nonzero return values of the C functions.
NO_MEMORY, BAD_PLACE = 1, 2
# Minimum number of values per thread: by estimate, waking another thread for fewer costs more than it saves.
VALUES_OF_A_THREAD = 16384
Note = Callable[[str, Callable[[], None]], None]
_ARGUMENTS: dict[str, list[Any]] = {
    "norm": [c_void_p] * 6 + [c_int64] * 3 + [c_double] + [c_int64] * 2,
    "gated_activation": [c_void_p] * 3 + [c_int64] * 5,
    "by_rows": [c_void_p] * 2 + [c_int64] * 3,
    "decode_attention": [c_void_p] * 7 + [c_int64] * 3,
    "log_sum_exp": [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_double, c_int64],
    "exp_rows": [c_void_p, c_int64, *[c_void_p] * 3, *[c_int64] * 3],
    "first_largest": [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64],
    "products": [c_void_p] * 2 + [c_int64] * 4,
}
THREAD_ELEMENTS = 2**15
"""Minimum number of weight elements per thread."""
Linear = tuple[torch.Tensor, torch.Tensor | None]


class _Matrix(Structure):
    _fields_ = [("data", c_void_p), ("row", c_int64), ("column", c_int64)]


class _Heads(Structure):
    _fields_ = [("data", c_void_p), *((name, c_int64) for name in ("row", "head", "query", "dim"))]


class AttentionNumbers(Structure):
    """The parameters of an attention that are the same in every step; window and softcap are 0 if unused."""

    _fields_ = [
        *((name, c_int64) for name in ("num_kv_heads", "num_queries", "head_dim", "window", "is_interleaved")),
        *((name, c_double) for name in ("scale", "softcap")),
    ]


class _Workspace(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_int64) for name in ("block", "head", "place", "block_size", "num_blocks")),
        *((name, c_void_p) for name in ("positions", "tables")),
        *((name, c_int64) for name in ("table_row", "reach")),
    ]


class _Extras(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("cos", "sin")),
        *((name, c_int64) for name in ("row", "width")),
        *((name, c_void_p) for name in ("sinks", "alibi")),
    ]


class _Noting(threading.local):
    note: Note | None = None


_noting = _Noting()


def use_compiled(*tensors: torch.Tensor | None) -> bool:
    """Whether compiled functions can take the tensors: plain ones of one dtype on a CPU, without observers.

    If a dispatch mode watches operators, without `calls_noted_by`, or gradients are needed, torch's own operators run.
    A dispatch mode that only counts sets the attribute `lets_compiled_run`: results must not depend on whether they are
    measured.
    """
    first = tensors[0]
    assert first is not None
    dtype = first.dtype
    if dtype not in DTYPES or use_triton(first) or is_watched() or torch.compiler.is_compiling():
        return False
    for tensor in tensors:
        if tensor is not None and not _is_plain(tensor, dtype):
            return False
    if torch.is_autocast_enabled("cpu") or fallback_forced():
        return False
    return load_library() is not None


def is_watched() -> bool:
    """Whether a dispatch mode is active that must see torch's own operators."""
    allowed = int(_noting.note is not None)
    if torch._C._len_torch_dispatch_stack() <= allowed:
        return False
    modes = _get_current_dispatch_mode_stack()
    return sum(not getattr(mode, "lets_compiled_run", False) for mode in modes) > allowed


def _is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.dtype != dtype or not tensor.is_cpu:
        return False
    return not (tensor.requires_grad and torch.is_grad_enabled())


def call(name: str, *arguments: Any) -> None:
    """Calls a compiled function; raises MemoryError or ValueError for a nonzero status."""
    library = load_library()
    assert library is not None
    function: Callable[..., int] = getattr(library, name)
    if function.argtypes is None:  # type: ignore[attr-defined]
        function.argtypes = _ARGUMENTS[name]  # type: ignore[attr-defined]
    _run(name, function, arguments)
    if _noting.note is not None:
        _noting.note(name, partial(_run, name, function, arguments))


def _run(name: str, function: Callable[..., int], arguments: tuple[Any, ...]) -> None:
    status = function(*arguments)
    if status == NO_MEMORY:
        raise MemoryError(f"{name}: no memory for its scratch")
    if status == BAD_PLACE:
        raise ValueError(f"{name}: a row's position lies beyond its context or blocks")


@contextmanager
def calls_noted_by(note: Note) -> Iterator[None]:
    """Calls `note` with the name of each function that this thread calls inside, and a function that repeats the call.

    Used together with a torch dispatch mode, which sees the other operators.
    """
    _noting.note = note
    try:
        yield
    finally:
        _noting.note = None


def matrix(tensor: torch.Tensor) -> Any:
    """A reference to a `Matrix` of the C source."""
    return byref(_Matrix(tensor.data_ptr(), tensor.stride(0), tensor.stride(1)))


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Address of the data; None, which is C's NULL, without a tensor."""
    return None if tensor is None else tensor.data_ptr()


def _threads(num_values: int) -> int:
    wanted = num_values // VALUES_OF_A_THREAD
    return min(torch.get_num_threads(), wanted) if wanted > 1 else 1


def can_norm(
    input: torch.Tensor, residual: torch.Tensor | None, gamma: torch.Tensor, beta: torch.Tensor | None
) -> bool:
    """Whether `norm` takes these tensors."""
    if not use_compiled(input, residual, gamma, beta) or not input.numel():
        return False
    for weight in (gamma, beta):
        if weight is not None and not (weight.shape == input.shape[-1:] and weight.is_contiguous()):
            return False
    return residual is None or residual.shape == input.shape


def norm(
    input: torch.Tensor,
    residual: torch.Tensor | None,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    kind: str,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(norm(input + residual), input + residual)` of `[..., E]`; without residual the second is `input`."""
    width = input.shape[-1]
    rows = input if input.dim() == 2 else input.reshape(-1, width)
    output = _empty_as(rows)
    added, residual_add = None, None
    if residual is not None:
        added, residual_add = residual.reshape(-1, width), _empty_as(rows)
    call(
        "norm", matrix(rows), added if added is None else matrix(added), gamma.data_ptr(), pointer(beta),
        matrix(output), residual_add if residual_add is None else matrix(residual_add), len(rows), width,
        NORMS[kind], eps, input.dtype == torch.bfloat16, _threads(rows.numel()),
    )  # fmt: skip
    if rows is not input:
        output = output.view(input.shape)
        residual_add = None if residual_add is None else residual_add.view(input.shape)
    return output, input if residual_add is None else residual_add


def _empty_as(rows: torch.Tensor) -> torch.Tensor:
    """`[N, E]`, dense, in the memory order of `rows`."""
    num_rows, width = rows.shape
    if rows.stride(0) == 1 and num_rows > 1:
        return rows.new_empty(width, num_rows).t()
    return rows.new_empty(num_rows, width)


def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """`act(gate) * up` of two `[N, I]`, in the memory order of `gate`."""
    output = torch.empty_like(gate)
    order = (0, 1) if output.stride(1) == 1 else (1, 0)
    lines = [x.permute(order) for x in (gate, up, output)]
    lines = [x if x.stride(1) == 1 else x.contiguous() for x in lines]
    num_lines, width = lines[2].shape
    if all(x.is_contiguous() for x in lines):
        num_lines, width = 1, num_lines * width
    call(
        "gated_activation", *map(matrix, lines), num_lines, width,
        ACTIVATIONS[activation], gate.dtype == torch.bfloat16, _threads(gate.numel()),
    )  # fmt: skip
    return output


def by_rows(input: torch.Tensor) -> torch.Tensor:
    """fp32 `[N, E]` in dense rows; copies an input stored by columns in half of torch's time."""
    if input.is_contiguous() or not input.is_cpu or input.dtype != torch.float32 or not use_compiled(input):
        return input.contiguous()
    output = input.new_empty(input.shape)
    call("by_rows", matrix(input), output.data_ptr(), *input.shape, _threads(input.numel()))
    return output


def can_attend(qkv: QKV, cache: KVBlocks, batch: DecodeBatch, weights: HeadWeights) -> bool:
    """Whether `decode_attention` takes these tensors, which must have the memory layout that it reads."""
    (q, k, v, rotary), (keys, values), (_, _, sinks, alibi) = qkv, cache, weights
    if not len(q) or not use_compiled(q, k, v, keys, values, *(rotary or ()), sinks):
        return False
    dense: list[torch.Tensor] = [x for x in (keys, values, sinks, alibi, batch.positions) if x is not None]
    dense += rotary or ()
    integers = (batch.positions, batch.block_tables)
    return (
        all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in dense)
        and keys.stride() == values.stride()
        and (rotary is None or (rotary[0].stride() == rotary[1].stride() and rotary[0].shape[1] <= keys.shape[3]))
        and (batch.block_tables.stride(1) == 1 or batch.block_tables.shape[1] == 1)
        and all(x.dtype == torch.int64 and x.is_cpu for x in integers)
        and (alibi is None or (alibi.dtype == torch.float32 and alibi.is_cpu))
    )


def decode_attention(
    numbers: AttentionNumbers, qkv: QKV, cache: KVBlocks, batch: DecodeBatch, weights: HeadWeights
) -> torch.Tensor:
    """Rotates, writes the new keys and values and attends, as `SoftmaxContextOp` does after its norms: `[N, H*D]`.

    Raises:
        ValueError: a row is longer than `batch.context` or its table names a block that does not exist.
    """
    (q, k, v, rotary), (keys, values) = qkv, cache
    num_rows, num_heads = len(q), numbers.num_kv_heads * numbers.num_queries
    output = q.new_empty(num_rows, num_heads * numbers.head_dim)
    rotated: tuple[Any, ...] = (None, None, 0, 0)
    if rotary is not None:
        cos, sin = rotary
        rotated = (cos.data_ptr(), sin.data_ptr(), cos.stride(0), cos.shape[1])
    reach = min(batch.context, batch.block_tables.shape[1] * keys.shape[2])
    workspace = _Workspace(
        keys.data_ptr(), values.data_ptr(), *keys.stride()[:3], keys.shape[2], len(keys),
        batch.positions.data_ptr(), batch.block_tables.data_ptr(), batch.block_tables.stride(0), reach,
    )  # fmt: skip
    extras = _Extras(*rotated, pointer(weights.sinks), pointer(weights.alibi))
    heads = [_Heads(q.data_ptr(), *q.stride())]
    heads += [_Heads(x.data_ptr(), x.stride(0), x.stride(1), 0, x.stride(2)) for x in (k, v)]
    call(
        "decode_attention", *map(byref, heads), byref(extras), byref(workspace), byref(numbers),
        output.data_ptr(), num_rows, q.dtype == torch.bfloat16,
        _threads(num_rows * num_heads * numbers.head_dim * batch.context),
    )  # fmt: skip
    return output


def can_search(values: torch.Tensor) -> bool:
    """Whether `log_sum_exp`, `exp_rows` and `first_largest` take `values [S, V]`."""
    is_dense = values.dim() == 2 and values.numel() > 0 and values.stride(1) == 1
    return is_dense and values.dtype == torch.float32 and use_compiled(values)


def log_sum_exp(values: torch.Tensor, temperature: float) -> torch.Tensor:
    """`logsumexp(values / temperature)` of each row of `[S, V]`: `[S]` fp32."""
    (num_rows, width), output = values.shape, values.new_empty(len(values))
    call(
        "log_sum_exp", values.data_ptr(), values.stride(0), output.data_ptr(), num_rows, width, 1.0 / temperature,
        _threads(values.numel()),
    )  # fmt: skip
    return output


def exp_rows(values: torch.Tensor, shift: torch.Tensor, factor: torch.Tensor | None = None) -> torch.Tensor:
    """Replaces each row of `values [S, V]` with `factor * exp(row - shift)` in place; returns the sums: `[S]` fp32.

    Args:
        shift: `[S]` fp32, dense.
        factor: `[S]` fp32, dense; None: 1.
    """
    (num_rows, width), sums = values.shape, torch.empty_like(shift)
    call(
        "exp_rows", values.data_ptr(), values.stride(0), shift.data_ptr(), pointer(factor), sums.data_ptr(),
        num_rows, width, _threads(values.numel()),
    )  # fmt: skip
    return sums


def first_largest(values: torch.Tensor) -> torch.Tensor:
    """The index of the largest value of each row of `[S, V]`, the first of equal ones: `[S]` int64."""
    (num_rows, width), output = values.shape, values.new_empty(len(values), dtype=torch.int64)
    call(
        "first_largest", values.data_ptr(), values.stride(0), output.data_ptr(), num_rows, width,
        _threads(values.numel()),
    )  # fmt: skip
    return output


class _LinearStruct(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("row", c_int64)]


class _Product(Structure):
    _fields_ = [
        *((name, _LinearStruct) for name in ("linear", "gate")),
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


def _linear(linear: Linear) -> _LinearStruct:
    weight, bias = linear
    return _LinearStruct(weight.data_ptr(), pointer(bias), weight.stride(1))


def _product(linear: Linear, output: torch.Tensor, residual: torch.Tensor | None) -> _Product:
    strides = (0, 0) if residual is None else residual.stride()
    added = (pointer(residual), *strides)
    return _Product(_linear(linear), _LinearStruct(), -1, *added, output.data_ptr(), *output.stride(), output.shape[1])


def _multiply(input: torch.Tensor, all: list[_Product]) -> None:
    num_rows, depth = input.shape
    num_elements = depth * sum(product.width * (2 if product.gate.weight else 1) for product in all)
    threads = max(1, min(torch.get_num_threads(), num_elements // THREAD_ELEMENTS))
    call("products", matrix(input), (_Product * len(all))(*all), len(all), num_rows, depth, threads)
