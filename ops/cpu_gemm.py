"""Products of fp32 rows with a transposed linear on a CPU: `y = x W (+ b) (+ residual)`, W viewed as [in, out].

Which library and which order of memory is faster depends on the maker of the processor, because MKL does:

    Intel   From 2 to 32 rows the compiled product of `cpu_kernels.py`; else, and where nothing can be compiled, MKL.
            Up to 128 rows its product is `y^T = W^T x^T`, whose result is stored by columns (strides 1, N): MKL then
            has the few rows as its inner dimension. For 32 rows of 384 and 1024 outputs 69 GFLOP/s, where `x W` reaches
            47 and oneDNN 41; for 1024 inputs 60, 44 and 38. A weight stored [in, out] is better off with `x W`: 57, 32
            by columns and 39 (one core of a Xeon with AVX-512 with other programs running, torch 2.13).
    others  Up to 128 rows the compiled product, up to 4 only of weights that fit a cache: 0.7 of oneDNN's time from 16
            to 32 rows, 0.9 at 8 and 64 (two Zen 5 cores, torch 2.13), and it costs a call less, with which a decode
            step of a 16M-parameter Llama takes 4.2 ms instead of 6.5 at one row. Else, and where nothing can be
            compiled, oneDNN by the operator that `torch.compile` emits for linears: for that model's linears at 32
            rows it takes 4.1 ms where `torch.mm` (MKL) takes 8.0. A call costs it some 9 us more, which one or two
            rows and a small weight do not win back. On AMD's processors from Zen 5 on, whose units are 512 bits wide,
            MKL goes by 256: 215 GFLOP/s where oneDNN reaches 485 (1095 rows of 384 inputs, two cores, torch 2.13).

The values are the same to rounding either way, and elementwise operations keep the order of memory they are given.
N rows.
"""

import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from hybrid_engine.ops.cpu_kernels import Linear, by_rows, can_multiply, products

# Numbers of rows with compiled products: beyond them MKL, or oneDNN, is as fast or faster.
INTEL_ROWS, OTHER_ROWS = range(2, 33), range(1, 129)
# Up to this many rows of a larger weight, oneDNN reads the weight faster on processors other than Intel's.
ONEDNN_ROWS, CACHED_ELEMENTS = 4, 2**20
_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
# Up to this many rows and weight elements MKL is as fast as oneDNN or faster: 8 against 16 us for 384 x 384 and one
# row, 21 against 29 for 1024 x 384, 220 against 197 for 2048 x 2048 (one Zen 5 core, torch 2.13).
MKL_ROWS, MKL_ELEMENTS = 2, 2**20
# In this range of rows a result by columns is faster; one row is the same in both orders, and 256 rows are slower.
COLUMNS_ROWS = range(2, 129)
# From this many rows, or half of them with this many inputs, MKL uses one thread for a product that a batch of parts
# spreads over all threads: 32 rows of 1024 inputs and 384 outputs take 195 us instead of 320, 64 rows of 384 and 1152
# 433 instead of 536 (two cores of a Xeon with AVX-512, torch 2.13).
BATCH_ROWS, BATCH_INPUTS = 64, 1024
ZEN_5 = 26  # the CPU family number


class Processor(NamedTuple):
    """Properties of this processor that decide between libraries."""

    is_intel: bool
    mkl_leaves_half: bool

    @classmethod
    def of(cls, cpuinfo: str) -> "Processor":
        """Parses the text of Linux's /proc/cpuinfo, or `platform.processor()` on other systems."""
        family = re.search(r"^cpu family\s*: (\d+)$", cpuinfo, re.MULTILINE)
        is_wide_amd = "AuthenticAMD" in cpuinfo and "avx512f" in cpuinfo
        return cls("GenuineIntel" in cpuinfo, is_wide_amd and family is not None and int(family[1]) >= ZEN_5)


# Read at import, so that torch.compile, which traces functions, finds two constants.
_CPUINFO = Path("/proc/cpuinfo")
_PROCESSOR = Processor.of(_CPUINFO.read_text() if _CPUINFO.exists() else platform.processor())


def is_intel() -> bool:
    """Whether this processor is Intel's, for which MKL has its fast paths."""
    return _PROCESSOR.is_intel


def mkl_leaves_half() -> bool:
    """Whether MKL reaches at most half of this processor's multiplication throughput."""
    return _PROCESSOR.mkl_leaves_half


def _mkl_goes_by_columns() -> bool:
    return is_intel() and torch.backends.mkl.is_available()


def _is_fp32_on_cpu(input: torch.Tensor) -> bool:
    return input.dtype == torch.float32 and input.device.type == "cpu"


def by_columns(input: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the product's result is stored by columns."""
    if not _mkl_goes_by_columns() or not _is_fp32_on_cpu(input):
        return False
    return len(input) in COLUMNS_ROWS and weight.stride(0) == 1


def prefers_onednn(input: torch.Tensor) -> bool:
    """Whether products of `input` that are not tiny run on oneDNN, if torch was built with it."""
    return _HAS_ONEDNN and _is_fp32_on_cpu(input) and not is_intel()


def use_onednn(input: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the product runs on oneDNN."""
    if not prefers_onednn(input):
        return False
    return input.shape[0] > MKL_ROWS or weight.numel() > MKL_ELEMENTS


def is_compiled(input: torch.Tensor, linears: Sequence[Linear], residual: torch.Tensor | None = None) -> bool:
    """Whether `cpu_kernels.py` computes the products."""
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
    if by_columns(input, weight):
        return _product_by_columns(input, weight, bias, residual)
    if use_onednn(input, weight):
        output = torch.ops.mkldnn._linear_pointwise(input, weight.t(), bias, "none", [], "")
    else:
        output = linear_transposed_reference(input, weight, bias)
    return output if residual is None else output + residual


def _product_by_columns(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    if residual is not None:  # a tensor that initializes the sum costs no extra pass
        output = _columns(weight.t(), input.t(), residual.t()).t()
        return output if bias is None else output + bias
    return _columns(weight.t(), input.t(), None if bias is None else bias[:, None]).t()


def _columns(weight: torch.Tensor, input: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
    """`weight [out, in]`, `input [in, N]`, `added [out, N]` or `[out, 1]` -> `[out, N]`."""
    (width_out, width_in), num_rows = weight.shape, input.shape[1]
    num_parts = torch.get_num_threads()
    is_batch = num_rows >= BATCH_ROWS or (num_rows >= BATCH_ROWS // 2 and width_in >= BATCH_INPUTS)
    if num_parts == 1 or width_out % num_parts or not is_batch or not weight.is_contiguous():
        return torch.mm(weight, input) if added is None else torch.addmm(added, weight, input)
    parts = weight.view(num_parts, -1, width_in)
    inputs = input.expand(num_parts, width_in, num_rows)
    if added is None:
        return torch.bmm(parts, inputs).view(width_out, num_rows)
    added = added.expand(width_out, num_rows).unflatten(0, (num_parts, -1))
    return torch.baddbmm(added, parts, inputs).view(width_out, num_rows)


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
        return products(input, [(weight, bias)], by_rows=True)[0]
    return by_rows(linear_transposed(input, weight, bias).float())


def linear_transposed_reference(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The transposed linear in plain torch, without a residual."""
    return torch.mm(input, weight) if bias is None else torch.addmm(bias, input, weight)
