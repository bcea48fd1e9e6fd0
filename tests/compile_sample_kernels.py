"""Compiles the kernels of sampling and block copies for an H100 without one, and prints a line for each.

Run in a process without TRITON_INTERPRET: `python tests/compile_sample_kernels.py`.
"""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hybrid_engine.ops import block_copy, sample_kernels
from hybrid_engine.ops.sample_kernels import CHUNK, TILE, WAYS

FLOATS = ("penalty", "temperature", "drawn_temperature", "last_amount", "log_min_p")
POINTERS = {
    "seen_ptr": "*u8", "workspace_ptr": "*bf16",
    **dict.fromkeys(("best_ptr", "floors_ptr", "bases_ptr", "bases_in_ptr", "floors_in_ptr"), "*i32"),
    **dict.fromkeys(("draws_ptr", "slots_ptr", "ends_ptr", "keys_ptr", "tokens_ptr"), "*i64"),
    **dict.fromkeys(("sources_ptr", "targets_ptr", "num_tokens_ptr"), "*i64"),
}  # fmt: skip
NO_ADJUSTMENT = {"seen_ptr": None, "slots_ptr": None, "ends_ptr": None}
DRAWS_FROM_LOGITS = {"own_ptr": None, "adjusted_ptr": None}
# Integers of 1 are constants to Triton, another kind of value inside a kernel.
ONES = {"vocab": 1, "num_rows": 1, "num_chunks": 1}


def compile_kernel(kernel, constants: dict, warps: int = 8) -> None:
    """Pointers that POINTERS does not name are of fp32, numbers that FLOATS does not name int32."""
    names = kernel.arg_names
    signature = {
        name: POINTERS.get(name, "*fp32") if name.endswith("_ptr") else "fp32" if name in FLOATS else "i32"
        for name in names
    }
    signature |= dict.fromkeys(constants, "constexpr")
    attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert compiled.asm["cubin"]
    print(f"compiled {compiled.metadata.name} {compiled.metadata.shared} bytes shared", constants)


def compile_sampling(sizes: dict) -> None:
    """Every combination that changes the code."""
    chunk, chunks = {**sizes, "CHUNK": CHUNK}, {**sizes, "CHUNKS": 1 if sizes else 64}
    both = {**chunk, **chunks}
    for best in ({}, {"best_ptr": None}):
        compile_kernel(sample_kernels.scan_kernel, {**chunk, **DRAWS_FROM_LOGITS, **NO_ADJUSTMENT, **best})
    compile_kernel(sample_kernels.scan_kernel, {**chunk, **DRAWS_FROM_LOGITS, "num_ends": 1, "min_new_tokens": 1})
    compile_kernel(sample_kernels.scan_kernel, {**chunk, "best_ptr": None})
    compile_kernel(sample_kernels.greedy_kernel, chunks)
    compile_kernel(sample_kernels.draw_kernel, {**both, "floors_ptr": None})
    compile_kernel(sample_kernels.draw_kernel, both)
    narrow = {**both, "TILE": TILE, "WAYS": WAYS}
    for last, now, starts in ((None, True, True), (True, True, False), (True, False, True), (False, False, False)):
        passes = {"LAST_COUNTS": bool(last), "COUNTS": now, "STARTS": starts}
        first = {"parts_in_ptr": None} if last is None else {}
        compile_kernel(sample_kernels.narrow_kernel, {**narrow, **passes, **first})
    for parts, last, min_p in (({"parts_ptr": None}, False, True), ({}, True, False), ({}, False, True)):
        compile_kernel(
            sample_kernels.keep_kernel, {**both, "WAYS": WAYS, "LAST_COUNTS": last, "HAS_MIN_P": min_p, **parts}
        )


if __name__ == "__main__":
    compile_kernel(block_copy.block_copy_kernel, {"TILE": block_copy.TILE}, warps=4)
    for sizes in ({}, ONES):
        compile_sampling(sizes)
