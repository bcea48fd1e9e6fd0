"""Compiles the kernels of sampling and block copies for an H100 without one, and prints a line for each.

Run in a process without TRITON_INTERPRET: `python -m tests.tools.compile_sample_kernels [few]`.
"""

import sys

from hybrid_engine.ops import block_copy, sample
from hybrid_engine.ops.sample_kernels import (
    Adjustment,
    DrawBuffers,
    Filters,
    Logits,
    Scanned,
    Sizes,
    draw_kernel,
    greedy_kernel,
    scan_kernel,
)
from tests.tools.compile_kernels import compile_kernel

F32, I32, I64, INT, FLOAT = "*fp32", "*i32", "*i64", "i32", "fp32"
LOGITS, DRAW = Logits(F32, INT, FLOAT), DrawBuffers(I64, I64, I64, F32)
SIZES, ONES = Sizes(INT, INT), Sizes(1, 1)  # integers of 1 are constants to Triton, another kind of value
UNCHANGED, CHANGED = Adjustment(FLOAT, None, 0, None, None, 0, 0), Adjustment(FLOAT, "*u8", INT, I64, I64, INT, INT)
RAW = Scanned(F32, F32, None, None, None, None)
GREEDY = RAW._replace(best_ptr=I32)
KEPT = RAW._replace(candidates_ptr=F32, numbers_ptr=I32)
OFF, ALL = Filters(None, None, None), Filters(FLOAT, FLOAT, FLOAT)
SCANS = [
    (UNCHANGED, RAW),
    (UNCHANGED, GREEDY),
    (CHANGED, KEPT._replace(adjusted_ptr=F32)),
    (CHANGED._replace(num_ends=1, min_new_tokens=1), GREEDY),
]


def compile_sampling(vocab: int, top_k: int, sizes: Sizes) -> None:
    """Every combination that changes the code."""
    cut = {"CUT": sample.choose_cut(vocab, top_k)}
    scan = {"logits": LOGITS, "draws_ptr": I64, "sizes": sizes}
    for adjustment, scanned in SCANS:
        compile_kernel(scan_kernel, {**scan, "adjustment": adjustment, "scanned": scanned}, cut, warps=8)
    compile_kernel(greedy_kernel, {"logits": LOGITS, "scanned": GREEDY, "draw": DRAW, "sizes": sizes}, cut)
    draw = {"logits": LOGITS, "drawn": LOGITS, "draw": DRAW, "sizes": sizes}
    for scanned, filters in ((RAW, OFF), (KEPT, ALL)):
        compile_kernel(draw_kernel, {**draw, "scanned": scanned, "filters": filters}, cut, warps=8)


if __name__ == "__main__":
    copy = {"workspace_ptr": "*bf16", "sources_ptr": I64, "targets_ptr": I64, "num_tokens_ptr": I64}
    strides = dict.fromkeys(("part_stride", "block_stride", "head_stride", "head_dim"), "i32/16")
    compile_kernel(block_copy.block_copy_kernel, {**copy, **strides}, {"TILE": block_copy.TILE})
    compile_sampling(128_256, 0, SIZES)
    if sys.argv[1:] != ["few"]:
        compile_sampling(50_257, 50, SIZES)
        compile_sampling(1, 0, ONES)
