"""Compiles the kernels of norms, linears and the MLP for an H100 without one, and prints a line for each.

Run in a process without TRITON_INTERPRET: `python -m tests.tools.compile_gemm_kernels [few]`. The sizes are those of
Llama 8B (rows 1, 128 and 256), Llama 1B, GPT-2 and Qwen2-0.5B.
"""

import sys

import torch

from hybrid_engine.ops import deepspeed_bindings, linears, linears_kernels, norm, xielu
from hybrid_engine.ops.linears_kernels import NO_WEIGHTS, Output, ProductWeights, Rows
from hybrid_engine.ops.norm import NormWeights
from tests.tools.compile_kernels import compile_kernel

POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
WIDTH = "i32/16"  # and strides: those of usual sizes divide by 16


def rows_of(dtype: torch.dtype) -> Rows:
    """Contiguous rows, of any number."""
    return Rows(POINTERS[dtype], WIDTH, 1, "i32", WIDTH)


def weights_of(dtype: torch.dtype, stored: str, bias: str | None = None) -> ProductWeights:
    """A weight stored [out, in] or [in, out]; the stride along what lies together is 1."""
    strides = (1, WIDTH) if stored == "[out, in]" else (WIDTH, 1)
    return ProductWeights(POINTERS[dtype], *strides, bias, WIDTH)


def compile_product(kernel, given: dict, fixed: dict, tiles: linears_kernels.ProductTiles) -> None:
    """Weights that are not copied 16 bytes at a time stream at a fraction of the memory's speed; wide tiles need
    the tensor cores' widest instruction."""
    compiled = compile_kernel(kernel, given, {**fixed, "TILES": tiles}, tiles.num_warps, tiles.num_stages)
    assert "cp.async.cg.shared.global" in compiled.asm["ptx"]
    assert tiles.rows <= linears_kernels.FEW_ROWS or "wgmma" in compiled.asm["ptx"]


def compile_linear(rows: int, n_in: int, n_out: int, dtype: torch.dtype, stored: str) -> None:
    """Projection with a residual."""
    tiles = linears_kernels.choose_tiles(rows, n_in, (n_out,), dtype, can_split=True)
    pointer, is_split = POINTERS[dtype], tiles.splits > 1
    parts = linears_kernels.SplitProducts("*fp32", "*i32", WIDTH) if is_split else linears_kernels.NO_PARTS
    given = {"x": rows_of(dtype), "w": weights_of(dtype, stored), "parts": parts}
    given |= {"residual": Output(pointer, WIDTH), "y": Output(pointer, WIDTH)}
    compile_product(linears_kernels.linear_kernel, given, {"DTYPE": linears_kernels.TRITON_DTYPES[dtype]}, tiles)


def compile_layer(rows: int, n_in: int, widths: tuple, n_mlp: int, dtype: torch.dtype, stored: str) -> None:
    """Query-key-value (three weights or one fused) and the MLP's up, gated where there are three."""
    is_gated, pointer = len(widths) == 3, POINTERS[dtype]
    weights = weights_of(dtype, stored, pointer)
    other = weights if is_gated else NO_WEIGHTS
    common = {"x": rows_of(dtype), "y": Output(pointer, WIDTH)}
    tiles = linears_kernels.choose_tiles(rows, n_in, widths, dtype)
    compile_product(linears_kernels.qkv_kernel, {**common, "q": weights, "k": other, "v": other}, {}, tiles)
    tiles = linears_kernels.choose_tiles(rows, n_in, (n_mlp,), dtype, num_weights=2 if is_gated else 1)
    form = {"ACTIVATION": "silu" if is_gated else "gelu"}
    compile_product(linears_kernels.up_kernel, {**common, "gate": other, "up": weights}, form, tiles)


def compile_flat(kernel, pointer: str, fixed: dict) -> None:
    """A kernel whose arguments are pointers and numbers; `fixed` also holds pointers that are None."""
    types = {"eps": "fp32", "num_rows": "i32", "tp_size": "i32"}
    given = {
        name: pointer if name.endswith("_ptr") else types.get(name, WIDTH)
        for name in kernel.arg_names
        if name not in fixed
    }
    compile_kernel(kernel, given, fixed)


def compile_rest(pointer: str) -> None:
    """Norms and elementwise kernels."""
    for kind in norm.NORM_OPS:
        x = norm.AddedRows(pointer, WIDTH, pointer, WIDTH, pointer, "i32", WIDTH)
        weights = NormWeights(pointer, pointer if kind == "layer" else None, "fp32")
        given = {"x": x, "weights": weights, "output_ptr": pointer}
        compile_kernel(norm.norm_kernel, given, {"NORM": kind, "ROWS": 1, "BLOCK": 4096})
    for name in ("silu", "relu", "relu2", "gelu", "gelu_new", "quick_gelu"):
        fixed = {"ACTIVATION": name, "BLOCK": linears.GATED_BLOCK}
        compile_flat(linears_kernels.gated_activation_kernel, pointer, fixed)
    numbers = {"beta": "fp32", "eps": "fp32", "stride": WIDTH, "width": WIDTH}
    pointers = {name: pointer for name in xielu.xielu_kernel.arg_names if name.endswith("_ptr")}
    compile_kernel(xielu.xielu_kernel, {**pointers, **numbers}, {"BLOCK": xielu.BLOCK})
    compile_flat(
        deepspeed_bindings.residual_add_kernel, pointer, {"IS_PARALLEL": True, "BLOCK": deepspeed_bindings.BLOCK}
    )


if __name__ == "__main__":
    is_short = sys.argv[1:] == ["few"]
    for num_rows in (128,) if is_short else (1, 128, 256):
        compile_layer(num_rows, 4096, (4096, 1024, 1024), 14336, torch.bfloat16, "[out, in]")
        compile_linear(num_rows, 14336, 4096, torch.bfloat16, "[out, in]")
    compile_linear(64, 8192, 2048, torch.bfloat16, "[out, in]")  # split
    for num_rows in () if is_short else (4, 100):
        compile_layer(num_rows, 768, (2304,), 3072, torch.float16, "[in, out]")
        compile_linear(num_rows, 3072, 768, torch.float16, "[in, out]")
    if not is_short:
        compile_layer(1, 896, (896, 128, 128), 4864, torch.float32, "[out, in]")
        compile_linear(1, 2048, 2048, torch.float32, "[out, in]")
    compile_rest("*bf16")
