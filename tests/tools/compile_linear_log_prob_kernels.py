"""Compiles the kernels of log-probabilities without logits for an H100 without one, and prints a line for each.

Run in a process without TRITON_INTERPRET: `python -m tests.tools.compile_linear_log_prob_kernels [few]`.
"""

import sys

import torch

from hybrid_engine.ops.linear_log_prob_kernels import (
    RowPointers,
    ShapeArgs,
    SumPointers,
    gradient_kernel,
    num_warps,
    sums_kernel,
    tile_of,
)
from hybrid_engine.ops.linears_kernels import ProductWeights
from tests.tools.compile_kernels import compile_kernel

F32, INT, FLOAT = "*fp32", "i32", "fp32"


def compile_both(dtype: torch.dtype, num_rows: int, has_softcap: bool, with_entropy: bool) -> None:
    """For so many tokens; hidden sizes are multiples of 16."""
    x = F32 if dtype == torch.float32 else "*bf16"
    tile = tile_of(dtype, num_rows)
    w = ProductWeights(x, 1, "i32/16", x if has_softcap else None, "i32/16")
    given = {"x_ptr": x, "w": w, "shape": ShapeArgs(FLOAT, FLOAT, FLOAT), "num_rows": INT, "width_in": "i32/16"}
    fixed = {"HAS_SOFTCAP": has_softcap, "WITH_ENTROPY": with_entropy, "TILE": tile}
    sums = {**given, "places_ptr": "*i64", "sums": SumPointers(F32, F32, F32, F32), "run": INT}
    compile_kernel(sums_kernel, sums, fixed, warps=num_warps(tile), stages=3)
    rows = RowPointers("*i64", F32, F32, *((F32, F32) if with_entropy else (None, None)))
    compile_kernel(gradient_kernel, {**given, "gradient_ptr": x, "rows": rows}, fixed, warps=num_warps(tile), stages=3)


if __name__ == "__main__":
    compile_both(torch.bfloat16, 2048, True, True)
    if sys.argv[1:] != ["few"]:
        compile_both(torch.bfloat16, 2048, False, False)
        compile_both(torch.float32, 2048, True, True)
        compile_both(torch.float32, 5, False, True)
