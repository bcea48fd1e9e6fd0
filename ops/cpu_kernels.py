"""Ops on a CPU: compiled functions for a decode step's small operations, and the fastest product for each shape.

It calls `cpu_kernels.c` and `cpu_products.c` with torch tensors; `cpu_states.py` has the recurrences.

A third implementation in addition to an op's torch reference and its Triton kernel, for fp32 and bf16. Eager torch
takes ten to thirty operations of 5 to 20 us each where one of these functions takes one call.

`decode_attention` and `prefill_attention` share their arithmetic, so a token's context has the same bits whether it was
decoded or prefilled, whole or in chunks. Keys and values are read where they lie: no sequence is padded and none is
gathered. With its rotations and writes a prefill takes 0.38 to 0.95 of the processor time of torch's flash attention
(1,000 to 4,096 tokens, 8 to 32 heads of 64 to 256, fp32 and bf16, one core of a busy Zen 5, torch 2.13).

`products` multiplies up to 128 rows. Weights are views `[in, out]` of tensors stored `[out, in]`; fp32 results are
stored by columns (strides 1, N), the best order for the input of the next product, bf16 results by rows. A linear's
activation, gate and residual, and several linears of the same rows, are part of one call.

In bf16 it replaces oneDNN. On Intel's processors without AMX, whose product of bf16 pairs is slower than fp32's, a
block's weights are widened to fp32 in the first cache and multiplied as fp32; others multiply pairs (AVX-512 BF16) if
they can. Up to 8 rows are dot products at the speed of reading the weights. With AMX, bf16 stays with oneDNN.

`linear_transposed` is `y = x W (+ b) (+ residual)` in fp32, W viewed as [in, out]. Which library and which order of
memory is faster depends on the maker of the processor, because MKL does:

    Intel   From 3 to 128 rows `products`, which asks for weights ahead: a decode step of SmolLM2-135M in fp32 takes
            0.82 of the time with MKL at 64 rows, 0.93 at 128 (CPU seconds, one core of an Emerald Rapids Xeon, torch
            2.13). Else, and where nothing can be compiled, MKL.
    others  Up to 128 rows the compiled product, up to 4 only of weights that fit a cache: 0.7 of oneDNN's time from 16
            to 32 rows, 0.9 at 8 and 64 (two Zen 5 cores, torch 2.13), and it costs a call less, with which a decode
            step of a 16M-parameter Llama takes 4.2 ms instead of 6.5 at one row. Else, and where nothing can be
            compiled, oneDNN by the operator that `torch.compile` emits for linears: for that model's linears at 32
            rows it takes 4.1 ms where `torch.mm` (MKL) takes 8.0. A call costs it some 9 us more, which one or two
            rows and a small weight do not win back. On AMD's processors from Zen 5 on, whose units are 512 bits wide,
            MKL goes by 256: 215 GFLOP/s where oneDNN reaches 485 (1095 rows of 384 inputs, two cores, torch 2.13).

The values are the same to rounding either way, and elementwise operations keep the order of memory they are given.

N rows, E width, H query heads, K key/value heads, G = H / K, D head dimension.
"""

import platform
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hybrid_engine.ops.batch import QKV, DecodeBatch, HeadWeights, KVBlocks, PrefillBatch
from hybrid_engine.ops.cpu_library import (
    ARGUMENTS,
    AttentionNumbers,
    CExtras,
    CHeads,
    CLinear,
    CMatrix,
    CProduct,
    CWorkspace,
    has_pairs,
    load_library,
)
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
THREAD_ELEMENTS = 2**15
"""Minimum number of weight elements per thread."""
Linear = tuple[torch.Tensor, torch.Tensor | None]
# How the compiled product reads weights; UNITS are the values that it multiplies as one.
FP32, WIDENED, PAIRS, FEW, FEW_WIDENED = range(5)
UNITS = (1, 1, 2, 1, 1)
# GFLOP/s of one core of an Emerald Rapids Xeon without AMX, 576 inputs, 1536 outputs, torch 2.13:
#     rows                                   1    2    4    8   16   32   64  128
#     bf16   oneDNN                         14   24   36   54   66   80   88   90
#            FEW_WIDENED up to 8, WIDENED   18   31   52   63  100  127  140  144
#     fp32   MKL                            15   30   30   60  118  152  163  160
#            FEW up to 8                    12   19   41   58
FEW_ROWS = range(1, 9)
# Numbers of rows with compiled products: beyond them MKL, or oneDNN, is as fast or faster.
INTEL_ROWS, OTHER_ROWS = range(3, 129), range(1, 129)
BF16_ROWS = range(1, 129)  # on others than Intel's
# Up to this many rows of a larger weight, oneDNN reads the weight faster on processors other than Intel's.
ONEDNN_ROWS, CACHED_ELEMENTS = 4, 2**20
ROWS_OF_ONEDNN = 32  # passes have a multiple of it: 3% more rows at 1000 at most
_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
# Up to this many rows and weight elements MKL is as fast as oneDNN or faster: 8 against 16 us for 384 x 384 and one
# row, 21 against 29 for 1024 x 384, 220 against 197 for 2048 x 2048 (one Zen 5 core, torch 2.13).
MKL_ROWS, MKL_ELEMENTS = 2, 2**20
ZEN_5 = 26  # the CPU family number
# Read at import, so that torch.compile, which traces functions, finds two constants.
_CPUINFO = Path("/proc/cpuinfo")


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
        if tensor is not None and not is_plain(tensor, dtype):
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


def is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether it is an ordinary tensor of `dtype` on a CPU that needs no gradient here."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.dtype != dtype or not tensor.is_cpu:
        return False
    return not (tensor.requires_grad and torch.is_grad_enabled())


def call(name: str, *arguments: Any) -> None:
    """Calls a compiled function; raises MemoryError or ValueError for a nonzero status."""
    library = load_library()
    assert library is not None
    function: Callable[..., int] = getattr(library, name)
    if function.argtypes is None:  # type: ignore[attr-defined]
        function.argtypes = ARGUMENTS[name]  # type: ignore[attr-defined]
    _run(name, function, arguments)
    if _noting.note is not None:
        _noting.note(name, partial(_run, name, function, arguments))


def _run(name: str, function: Callable[..., int], arguments: tuple[Any, ...]) -> None:
    status = function(*arguments)
    if status == NO_MEMORY:
        raise MemoryError(f"{name}: no memory for its scratch")
    if status == BAD_PLACE:
        raise ValueError(f"{name}: a row's position lies beyond its context or blocks, or its slot does not exist")


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
    return byref(CMatrix(tensor.data_ptr(), tensor.stride(0), tensor.stride(1)))


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Address of the data; None, which is C's NULL, without a tensor."""
    return None if tensor is None else tensor.data_ptr()


def threads_for(num_values: int) -> int:
    """Threads for an operation over `num_values`."""
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
        NORMS[kind], eps, input.dtype == torch.bfloat16, threads_for(rows.numel()),
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
        ACTIVATIONS[activation], gate.dtype == torch.bfloat16, threads_for(gate.numel()),
    )  # fmt: skip
    return output


def can_attend(qkv: QKV, cache: KVBlocks, batch: DecodeBatch | PrefillBatch, weights: HeadWeights) -> bool:
    """Whether `decode_attention` or `prefill_attention` takes these tensors: both read one memory layout."""
    (q, k, v, rotary), (keys, values), (_, _, sinks, alibi) = qkv, cache, weights
    if not len(q) or not use_compiled(q, k, v, keys, values, *(rotary or ()), sinks):
        return False
    dense: list[torch.Tensor] = [x for x in (keys, values, sinks, alibi) if x is not None]
    dense += rotary or ()
    places = _places(batch)
    types = [torch.int64] * 2 + ([] if isinstance(batch, DecodeBatch) else [torch.int32] * 2)
    return (
        all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in (*dense, *places))
        and keys.stride() == values.stride()
        and (rotary is None or (rotary[0].stride() == rotary[1].stride() and rotary[0].shape[1] <= keys.shape[3]))
        and all(x.is_cpu for x in places)
        and [x.dtype for x in places] == types
        and (alibi is None or (alibi.dtype == torch.float32 and alibi.is_cpu))
    )


def _places(batch: DecodeBatch | PrefillBatch) -> tuple[torch.Tensor, ...]:
    """The tensors that say where tokens and their keys are: positions and tables; or blocks, offsets and starts."""
    if isinstance(batch, DecodeBatch):
        return batch.positions, batch.block_tables
    if batch.context is None:
        return batch.write_blocks, batch.write_offsets, batch.starts, batch.starts
    return batch.context.blocks, batch.context.offsets, batch.starts, batch.context.starts


def decode_attention(
    numbers: AttentionNumbers, qkv: QKV, cache: KVBlocks, batch: DecodeBatch, weights: HeadWeights
) -> torch.Tensor:
    """Rotates, writes the new keys and values and attends, as `SoftmaxContextOp` does after its norms: `[N, H*D]`.

    Raises:
        ValueError: a row is longer than `batch.context` or its table names a block that does not exist.
    """
    positions, tables = _places(batch)
    reach = min(batch.context, tables.shape[1] * cache.keys.shape[2])
    places = positions.data_ptr(), tables.data_ptr(), tables.stride(0)
    return _attend("decode_attention", numbers, qkv, cache, weights, reach, places, len(qkv.q))


def prefill_attention(
    numbers: AttentionNumbers, qkv: QKV, cache: KVBlocks, batch: PrefillBatch, weights: HeadWeights
) -> torch.Tensor:
    """The same for packed sequences, whose earlier tokens are read from the workspace.

    Raises:
        ValueError: a block does not exist.
    """
    reach = max(batch.lengths if batch.context is None else batch.context.lengths)
    places = [x.data_ptr() for x in _places(batch)]
    return _attend("prefill_attention", numbers, qkv, cache, weights, reach, places, len(batch.lengths))


def _attend(
    name: str,
    numbers: AttentionNumbers,
    qkv: QKV,
    cache: KVBlocks,
    weights: HeadWeights,
    reach: int,
    places: Sequence[int],
    num_sequences: int,
) -> torch.Tensor:
    """Calls one of the two; no sequence has more tokens than `reach`."""
    (q, k, v, rotary), (keys, values) = qkv, cache
    num_heads = numbers.num_kv_heads * numbers.num_queries
    output = q.new_empty(len(q), num_heads * numbers.head_dim)
    rotated: tuple[Any, ...] = (None, None, 0, 0)
    if rotary is not None:
        cos, sin = rotary
        rotated = (cos.data_ptr(), sin.data_ptr(), cos.stride(0), cos.shape[1])
    workspace = CWorkspace(
        keys.data_ptr(), values.data_ptr(), *keys.stride()[:3], keys.shape[2], len(keys), reach
    )  # fmt: skip
    extras = CExtras(*rotated, pointer(weights.sinks), pointer(weights.alibi))
    heads = [CHeads(q.data_ptr(), *q.stride())]
    heads += [CHeads(x.data_ptr(), x.stride(0), x.stride(1), 0, x.stride(2)) for x in (k, v)]
    call(
        name, *map(byref, heads), byref(extras), byref(workspace), byref(numbers), *places, output.data_ptr(),
        num_sequences, q.dtype == torch.bfloat16, threads_for(output.numel() * reach),
    )  # fmt: skip
    return output


def can_norm_gated(input: torch.Tensor, gate: torch.Tensor, gamma: torch.Tensor) -> bool:
    """Whether `gated_norm` takes these tensors."""
    return input.dim() == 2 and bool(input.numel()) and use_compiled(input, gate, gamma)


def gated_norm(
    input: torch.Tensor, gate: torch.Tensor, gamma: torch.Tensor, group: int, eps: float, gates_first: bool
) -> torch.Tensor:
    """`GatedNormOp` of `[N, E]`."""
    num_rows, width = input.shape
    output = input.new_empty(num_rows, width)
    call(
        "gated_norm", matrix(input), matrix(gate), gamma.data_ptr(), output.data_ptr(), num_rows, width, group,
        len(gamma), eps, gates_first, input.dtype == torch.bfloat16, threads_for(input.numel()),
    )  # fmt: skip
    return output


def can_search(values: torch.Tensor) -> bool:
    """Whether `log_sum_exp`, `exp_rows`, `draw_rows` and `first_largest` take `values [S, V]`."""
    is_dense = values.dim() == 2 and values.numel() > 0 and values.stride(1) == 1
    return is_dense and values.dtype == torch.float32 and use_compiled(values)


def log_sum_exp(values: torch.Tensor, temperature: float) -> torch.Tensor:
    """`logsumexp(values / temperature)` of each row of `[S, V]`: `[S]` fp32."""
    (num_rows, width), output = values.shape, values.new_empty(len(values))
    call(
        "log_sum_exp", values.data_ptr(), values.stride(0), output.data_ptr(), num_rows, width, 1.0 / temperature,
        threads_for(values.numel()),
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
        num_rows, width, threads_for(values.numel()),
    )  # fmt: skip
    return sums


def draw_rows(values: torch.Tensor, shares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws an index of each row of `values [S, V]` with the weights exp(values).

    It is the first whose running sum exceeds the row's share `shares [S]` fp32, from 0 to 1, of the whole sum.

    Returns the indices `[S]` int64 and `logsumexp(values)`, `[S]` fp32.
    """
    (num_rows, width), sums = values.shape, values.new_empty(len(values))
    indices = values.new_empty(num_rows, dtype=torch.int64)
    call(
        "draw_rows", values.data_ptr(), values.stride(0), pointer(shares), indices.data_ptr(), sums.data_ptr(),
        num_rows, width, threads_for(values.numel()),
    )  # fmt: skip
    return indices, sums


def first_largest(values: torch.Tensor) -> torch.Tensor:
    """The index of the largest value of each row of `[S, V]`, the first of equal ones: `[S]` int64."""
    (num_rows, width), output = values.shape, values.new_empty(len(values), dtype=torch.int64)
    call(
        "first_largest", values.data_ptr(), values.stride(0), output.data_ptr(), num_rows, width,
        threads_for(values.numel()),
    )  # fmt: skip
    return output


def can_multiply(input: torch.Tensor, linears: Sequence[Linear], residual: torch.Tensor | None = None) -> bool:
    """Whether `products` and `activated_product` take these tensors."""
    if input.dtype not in DTYPES:
        return False
    for weight, bias in linears:
        if weight.stride(0) != 1 or not (bias is None or bias.is_contiguous()):
            return False
        if weight.shape[0] != input.shape[1]:  # torch raises the error
            return False
    if not use_compiled(input, residual, *(tensor for linear in linears for tensor in linear)):
        return False
    return input.dtype == torch.float32 or _PROCESSOR.widens


def products(
    input: torch.Tensor, linears: Sequence[Linear], residual: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """`input W + b (+ residual)` for each linear: `[N, out]`, fp32 by columns and bf16 by rows."""
    kind = _kind(input, linears)
    outputs = [_empty(input, weight.shape[1]) for weight, _ in linears]
    pairs = zip(linears, outputs, strict=True)
    _multiply(input, kind, [_product(kind, linear, output, residual) for linear, output in pairs])
    return outputs


def widened_product(input: torch.Tensor, linear: Linear) -> torch.Tensor:
    """`input W + b`, rounded to the dtype of the input, as fp32 in dense rows: `[N, out]`."""
    kind = _kind(input, [linear])
    output = input.new_empty(len(input), linear[0].shape[1], dtype=torch.float32)
    product = _product(kind, linear, output, None)
    product.is_widened = 1
    _multiply(input, kind, [product])
    return output


def activated_product(input: torch.Tensor, linear: Linear, gate: Linear | None, activation: str) -> torch.Tensor:
    """`act(gate) * linear`, or `act(linear)` without a gate: `[N, out]`."""
    kind = _kind(input, [linear] if gate is None else [linear, gate])
    output = _empty(input, linear[0].shape[1])
    product = _product(kind, linear, output, None)
    product.activation = ACTIVATIONS[activation]
    if gate is not None:
        product.gate = _linear(kind, gate)
    _multiply(input, kind, [product])
    return output


def _kind(input: torch.Tensor, linears: Sequence[Linear]) -> int:
    """How the compiled product reads the weights."""
    is_few = len(input) in FEW_ROWS
    if input.dtype == torch.float32:
        return FEW if is_few and is_intel() else FP32
    if is_few:
        return FEW_WIDENED
    can_pair = _PROCESSOR.multiplies_pairs and has_pairs() and all(_lies_in_pairs(weight) for weight, _ in linears)
    return PAIRS if can_pair else WIDENED


def _lies_in_pairs(weight: torch.Tensor) -> bool:
    """Whether the bf16 `weight [in, out]`, stored `[out, in]`, consists of aligned pairs of inputs."""
    return weight.shape[0] % 2 == 0 and weight.stride(1) % 2 == 0 and weight.data_ptr() % 4 == 0


def _empty(input: torch.Tensor, width: int) -> torch.Tensor:
    """`[N, width]` like the input, independent of the default dtype and device."""
    if input.dtype == torch.bfloat16:
        return input.new_empty(len(input), width)
    return input.new_empty(width, len(input)).t()


def _linear(kind: int, linear: Linear) -> CLinear:
    weight, bias = linear
    return CLinear(weight.data_ptr(), pointer(bias), weight.stride(1) // UNITS[kind])


def _product(kind: int, linear: Linear, output: torch.Tensor, residual: torch.Tensor | None) -> CProduct:
    added = (pointer(residual), *((0, 0) if residual is None else residual.stride()))
    places = (output.data_ptr(), *output.stride(), output.shape[1])
    return CProduct(_linear(kind, linear), CLinear(), -1, *added, *places, 0)


def _multiply(input: torch.Tensor, kind: int, all: list[CProduct]) -> None:
    num_rows, depth = input.shape
    num_elements = depth * sum(product.width * (2 if product.gate.weight else 1) for product in all)
    threads = max(1, min(torch.get_num_threads(), num_elements // THREAD_ELEMENTS))
    if kind == PAIRS and not (input.stride(1) == 1 and input.stride(0) % 2 == 0 and input.data_ptr() % 4 == 0):
        input = input.clone(memory_format=torch.contiguous_format)
    unit = UNITS[kind]
    rows = CMatrix(input.data_ptr(), input.stride(0) // unit, 1 if kind == PAIRS else input.stride(1))
    call("products", byref(rows), (CProduct * len(all))(*all), len(all), num_rows, depth // unit, kind, threads)


class Processor(NamedTuple):
    """Properties of this processor that decide between libraries."""

    is_intel: bool
    mkl_leaves_half: bool
    widens: bool
    """Whether compiled products take bf16: AVX2 is needed, and nothing was compared with AMX."""
    multiplies_pairs: bool
    """Whether its product of bf16 pairs is faster than fp32's of widened values: Intel's is slower."""

    @classmethod
    def of(cls, cpuinfo: str) -> "Processor":
        """Parses the text of Linux's /proc/cpuinfo, or `platform.processor()` on other systems."""
        family = re.search(r"^cpu family\s*: (\d+)$", cpuinfo, re.MULTILINE)
        is_wide_amd = "AuthenticAMD" in cpuinfo and "avx512f" in cpuinfo
        is_intel = "GenuineIntel" in cpuinfo
        return cls(
            is_intel,
            is_wide_amd and family is not None and int(family[1]) >= ZEN_5,
            "avx2" in cpuinfo and "amx_bf16" not in cpuinfo,
            "avx512_bf16" in cpuinfo and not is_intel,
        )


_PROCESSOR = Processor.of(_CPUINFO.read_text() if _CPUINFO.exists() else platform.processor())


def is_intel() -> bool:
    """Whether this processor is Intel's, for which MKL has its fast paths."""
    return _PROCESSOR.is_intel


def mkl_leaves_half() -> bool:
    """Whether MKL reaches at most half of this processor's multiplication throughput."""
    return _PROCESSOR.mkl_leaves_half


def _is_fp32_on_cpu(input: torch.Tensor) -> bool:
    return input.dtype == torch.float32 and input.device.type == "cpu"


def prefers_onednn(input: torch.Tensor) -> bool:
    """Whether products of `input` that are not tiny run on oneDNN, if torch was built with it."""
    return _HAS_ONEDNN and _is_fp32_on_cpu(input) and not is_intel()


def rows_of_pass(hidden: torch.Tensor) -> int:
    """How many rows a pass over `hidden [N, E]` should have: N, or more where oneDNN multiplies many rows.

    oneDNN compiles functions for each number of rows and keeps 0.2 to 0.6 MB for each product with it, so a server,
    whose passes have any number of rows, would grow by a gigabyte (torch 2.13, Zen 5).
    """
    num_rows = len(hidden)
    if not _HAS_ONEDNN or hidden.device.type != "cpu" or num_rows <= OTHER_ROWS[-1]:
        return num_rows
    is_onednn = not is_intel() if hidden.dtype == torch.float32 else not (is_intel() and _PROCESSOR.widens)
    return -(-num_rows // ROWS_OF_ONEDNN) * ROWS_OF_ONEDNN if is_onednn else num_rows


def use_onednn(input: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the product runs on oneDNN, which takes no mixed dtypes and does not follow autocast."""
    if not prefers_onednn(input) or weight.dtype != input.dtype or torch.is_autocast_enabled("cpu"):
        return False
    return input.shape[0] > MKL_ROWS or weight.numel() > MKL_ELEMENTS


def is_compiled(input: torch.Tensor, linears: Sequence[Linear], residual: torch.Tensor | None = None) -> bool:
    """Whether compiled functions compute the products."""
    if input.dtype == torch.bfloat16:
        return (is_intel() or len(input) in BF16_ROWS) and can_multiply(input, linears, residual)
    if len(input) not in (INTEL_ROWS if is_intel() else OTHER_ROWS):
        return False
    is_large = any(weight.numel() > CACHED_ELEMENTS for weight, _ in linears)
    if is_large and len(input) <= ONEDNN_ROWS and prefers_onednn(input):
        return False
    return can_multiply(input, linears, residual)


def linears_transposed(input: torch.Tensor, linears: Sequence[Linear]) -> list[torch.Tensor]:
    """Several linears of the same rows."""
    if is_compiled(input, linears):
        return products(input, linears)
    return [linear_transposed(input, *linear) for linear in linears]


def linear_transposed(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """The fastest product: `input [N, in]`, `weight [in, out]`, `bias [out]`, `residual [N, out]` -> `[N, out]`."""
    if is_compiled(input, [(weight, bias)], residual):
        return products(input, [(weight, bias)], residual)[0]
    if use_onednn(input, weight):
        output = torch.ops.mkldnn._linear_pointwise(input, weight.t(), bias, "none", [], "")
    else:
        output = linear_transposed_reference(input, weight, bias)
    return output if residual is None else output + residual


def product(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`left [N, in]` times `right [in, out]`, dense rows `[N, out]`, on any device; not differentiable.

    oneDNN takes 0.83 to 0.86 of MKL's time on one core of an AMD EPYC (torch 2.13) for 2048 and 4096 rows of 384 or
    1024 inputs.
    """
    if use_onednn(left, right):
        return torch.ops.mkldnn._linear_pointwise(left, right.t(), bias, "none", [], "")
    return linear_transposed_reference(left, right, bias)


def product_over_rows(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`left [N, out]` and `right [N, in]`: the sum of their products over the rows, `[out, in]`; not differentiable.

    It is the gradient of a weight. oneDNN takes 0.95 to 1.16 of MKL's time for it (2048 and 4096 rows of 384 or 1024
    inputs, one core of an AMD EPYC, torch 2.13), and 0.51 to 0.65 where MKL leaves half (two Zen 5 cores).
    """
    if mkl_leaves_half() and use_onednn(left.t(), right):
        return torch.ops.mkldnn._linear_pointwise(left.t(), right.t(), None, "none", [], "")
    return left.t() @ right


def linear_by_rows(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The linear's product in fp32 as dense rows, the order that samplers read."""
    if is_compiled(input, [(weight, bias)]):
        return widened_product(input, (weight, bias))
    return linear_transposed(input, weight, bias).float()


def linear_transposed_reference(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The transposed linear in plain torch, without a residual."""
    return torch.mm(input, weight) if bias is None else torch.addmm(bias, input, weight)
