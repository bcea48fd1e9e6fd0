"""Compiles the kernels of the divergence of two heads for an H100 without one.

    python tests/tools/compile_linear_divergence_kernels.py          # both dtypes, each kind of divergence
    python tests/tools/compile_linear_divergence_kernels.py few      # the most demanding form of each kernel

Fails if a kernel does not compile, spills registers, or needs more shared memory than an SM has.
"""

import sys

import torch

from hybrid_engine.ops.linear_divergence_kernels import (
    FORWARD,
    MIXTURE,
    MIXTURE_VALUES,
    REVERSE,
    HeadArgs,
    PairSums,
    TotalPointers,
    divergence_gradient_kernel,
    mixture_kernel,
    pair_tile,
    totals_kernel,
)
from hybrid_engine.ops.linear_log_prob_kernels import ShapeArgs
from hybrid_engine.ops.linears_kernels import ProductWeights
from tests.tools.compile_kernels import compile_kernel

F32, INT, FLOAT = "*fp32", "i32", "fp32"


def compile_kind(dtype: torch.dtype, num_rows: int, has_softcap: bool, kind: int) -> None:
    """For so many tokens; hidden sizes are multiples of 16. A softcap comes with a bias."""
    x, (tile, warps) = F32 if dtype == torch.float32 else "*bf16", pair_tile(dtype, num_rows)
    w = ProductWeights(x, 1, "i32/16", x if has_softcap else None, "i32/16")
    side, shape = HeadArgs(x, "i32/16"), ShapeArgs(FLOAT, FLOAT, FLOAT)
    sides = {"own": side, "own_w": w, "own_shape": shape, "taught": side, "taught_w": w, "taught_shape": shape}
    given = {**sides, "num_rows": INT}
    fixed = {"HAS_SOFTCAP": has_softcap, "TAUGHT_HAS_SOFTCAP": has_softcap, "TILE": tile}
    rows, kinds = TotalPointers(F32, F32, F32, F32), {**fixed, "KIND": kind}
    compile_kernel(totals_kernel, {**given, "sums": PairSums(*[F32] * 5), "run": INT}, kinds, warps=warps)
    gradient = {**given, "gradient_ptr": x, "rows": rows, "beta": FLOAT}
    compile_kernel(divergence_gradient_kernel, gradient, kinds, warps=warps)
    if kind == MIXTURE:
        mixture = {**given, "rows": rows, "of_teacher_ptr": F32, "of_student_ptr": F32, "beta": FLOAT, "run": INT}
        tile, warps = pair_tile(dtype, num_rows, MIXTURE_VALUES)
        compile_kernel(mixture_kernel, mixture, {**fixed, "TILE": tile}, warps=warps)


if __name__ == "__main__":
    compile_kind(torch.bfloat16, 2048, True, MIXTURE)
    if sys.argv[1:] != ["few"]:
        for dtype in (torch.bfloat16, torch.float32):
            for kind in (FORWARD, REVERSE, MIXTURE):
                compile_kind(dtype, 2048, True, kind)
        compile_kind(torch.bfloat16, 2048, False, REVERSE)
        compile_kind(torch.float32, 5, False, REVERSE)
