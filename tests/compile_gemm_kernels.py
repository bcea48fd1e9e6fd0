"""Compiles the kernels of norms, linears and the MLP for an H100 without one, and prints a line for each.

Run in a process without TRITON_INTERPRET: `python tests/compile_gemm_kernels.py`. The sizes are those of Llama 8B
(rows 1 and 64), GPT-2, OPT-1.3B and Qwen2-0.5B.
"""

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hybrid_engine.ops import gated_activation, mlp_gemm, norm, qkv_gemm, residual_add, skinny_gemm, vector_matmul

POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
MAX_SHARED_BYTES = 227 * 1024


def compile_kernel(kernel, dtype: torch.dtype, constants: dict, types: dict | None = None) -> None:
    """`constants` also holds strides that are 1 and pointers that are None; the rest is taken to divide by 16."""
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
    names = kernel.arg_names
    defaults = {name: POINTERS[dtype] for name in names if name.endswith("_ptr")} | {"eps": "fp32"}
    known = defaults | (types or {}) | dict.fromkeys(constants, "constexpr")
    signature = {name: known.get(name, "i32") for name in names}
    odd = ("constexpr", "fp32")
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name] not in odd and name != "num_rows"
    }
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.asm["cubin"] and compiled.metadata.shared <= MAX_SHARED_BYTES, compiled.metadata
    # Weights that are not copied 16 bytes at a time stream at a fraction of the memory's speed.
    assert "ROWS" not in constants or kernel is norm.norm_kernel or "cp.async.cg.shared.global" in compiled.asm["ptx"]
    print(f"compiled {compiled.metadata.name} {compiled.metadata.shared} bytes shared", constants)


def strides(prefix: str, stored: str) -> dict[str, int]:
    """The stride that is 1: along K for [out, in], along N for [in, out]."""
    return {f"{prefix}stride_{'k' if stored == '[out, in]' else 'n'}": 1}


def compile_linear(rows: int, n_in: int, n_out: int, dtype: torch.dtype, stored: str) -> None:
    """Projection with a residual."""
    tiles = skinny_gemm.choose_tiles(rows, n_in, (n_out,), dtype, can_split=True)
    unit = {"stride_xk": 1, ("stride_wk" if stored == "[out, in]" else "stride_wn"): 1, "bias_ptr": None}
    types = {"y_ptr": "*fp32"} if tiles.splits > 1 else {}
    out = vector_matmul.TRITON_DTYPES[dtype]
    compile_kernel(
        vector_matmul.linear_kernel, dtype, {**unit, "DTYPE": out, "SPLITS": tiles.splits, **tiles.meta()}, types
    )


def compile_layer(rows: int, n_in: int, widths: tuple, n_mlp: int, dtype: torch.dtype, stored: str, kind: str) -> None:
    """Query-key-value (three weights or one fused) and the MLP's up, gated where there are three."""
    is_normed = rows <= skinny_gemm.NORM_ROWS
    norms = {"gamma_ptr": None, "beta_ptr": None} if not is_normed else {} if kind == "layer" else {"beta_ptr": None}
    common = {"stride_xk": 1, **norms, **skinny_gemm.statistics_meta(kind if is_normed else "none", n_in)}
    tiles = skinny_gemm.choose_tiles(rows, n_in, widths, dtype)
    unit = strides("q_", stored) | strides("k_", stored) | strides("v_", stored)
    compile_kernel(qkv_gemm.qkv_kernel, dtype, {**common, **unit, "NUM_WEIGHTS": len(widths), **tiles.meta()})
    is_gated = len(widths) == 3
    tiles = skinny_gemm.choose_tiles(rows, n_in, (n_mlp,), dtype, num_weights=2 if is_gated else 1)
    gate = strides("gate_", stored) if is_gated else {"gate_ptr": None}
    activation = {"ACTIVATION": "silu" if is_gated else "gelu"}
    compile_kernel(
        mlp_gemm.up_kernel, dtype, {**common, **gate, **strides("up_", stored), **activation, **tiles.meta()}
    )


def compile_rest(dtype: torch.dtype) -> None:
    """Norms, elementwise kernels and the sum of split products."""
    for kind in norm.NORM_OPS:
        beta = {} if kind == "layer" else {"beta_ptr": None}
        compile_kernel(norm.norm_kernel, dtype, {**beta, "NORM": kind, "ROWS": 1, "BLOCK": 4096})
    for activation in ("silu", "relu", "relu2", "gelu", "gelu_new", "quick_gelu"):
        compile_kernel(
            gated_activation.gated_activation_kernel, dtype, {"ACTIVATION": activation, "BLOCK": gated_activation.BLOCK}
        )
    compile_kernel(residual_add.residual_add_kernel, dtype, {"IS_PARALLEL": True, "BLOCK": residual_add.BLOCK})
    merge = {"DTYPE": tl.bfloat16, "SPLITS": 4, "BLOCK": vector_matmul.MERGE_BLOCK}
    compile_kernel(vector_matmul.merge_kernel, dtype, merge, {"parts_ptr": "*fp32"})


if __name__ == "__main__":
    for num_rows in (1, 64):
        compile_layer(num_rows, 4096, (4096, 1024, 1024), 14336, torch.bfloat16, "[out, in]", "rms")
        compile_linear(num_rows, 14336, 4096, torch.bfloat16, "[out, in]")
    compile_layer(4, 768, (2304,), 3072, torch.float16, "[in, out]", "layer")
    compile_linear(4, 3072, 768, torch.float16, "[in, out]")
    compile_linear(1, 32768, 512, torch.bfloat16, "[out, in]")  # split
    compile_layer(1, 896, (896, 128, 128), 4864, torch.float32, "[out, in]", "rms")
    compile_linear(1, 2048, 2048, torch.float32, "[out, in]")
    compile_rest(torch.bfloat16)
