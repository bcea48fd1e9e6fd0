"""Compiles the kernels of sampling and block copies for an H100 without one, and prints a line for each.

Run in a process without TRITON_INTERPRET: `python tests/compile_sample_kernels.py`.
"""

import itertools

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hybrid_engine.ops import block_copy, sample_kernels

TYPES = {
    "logits_ptr": "*fp32", "floats_ptr": "*fp32", "logprobs_ptr": "*fp32", "seen_ptr": "*u8", "penalty": "fp32",
    "temperature": "fp32", "top_k": "fp32", "top_p": "fp32", "log_min_p": "fp32", "workspace_ptr": "*bf16",
}  # fmt: skip


def compile_kernel(kernel, constants: dict) -> None:
    """Pointers that TYPES does not name are of int64, numbers of int32."""
    names = kernel.arg_names
    signature = {name: TYPES.get(name, "*i64" if name.endswith("_ptr") else "i32") for name in names}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert compiled.asm["cubin"]
    print(f"compiled {compiled.metadata.name} {compiled.metadata.shared} bytes shared", constants)


def main() -> None:
    """Every combination that changes the code."""
    compile_kernel(block_copy.block_copy_kernel, {"TILE": block_copy.TILE})
    for adjusts in (False, True):
        adjusting = {"HAS_PENALTY": adjusts, "HAS_ENDS": adjusts, "CHUNK": sample_kernels.CHUNK}
        compile_kernel(sample_kernels.scan_kernel, adjusting)
        filters = [(False,) * 4, (True, False, False, False), (True,) * 4]
        if not adjusts:
            filters += [(True, *flags) for flags in itertools.product((False, True), repeat=3) if sum(flags) == 1]
        for flags in filters:
            names = ("DO_SAMPLE", "HAS_TOP_K", "HAS_TOP_P", "HAS_MIN_P")
            compile_kernel(
                sample_kernels.draw_kernel,
                {
                    **dict(zip(names, flags, strict=True)), **adjusting, "NUM_CHUNKS": 64,
                    "SEARCH_CHUNK": sample_kernels.SEARCH_CHUNK, "CANDIDATES": sample_kernels.CANDIDATES,
                },
            )  # fmt: skip


if __name__ == "__main__":
    main()
