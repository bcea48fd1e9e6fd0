"""Compiles the mixture-of-experts kernels for an H100 without one, and prints a line for each.

Run in a process without TRITON_INTERPRET: `python -m tests.tools.compile_moe_kernels [few]`. The sizes are those of
Mixtral 8x7B at one and at many tokens, of gpt-oss-20b and of a Megatron layer.
"""

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hybrid_engine.ops import expert_gemm, expert_sum, moe_gating, moe_res_matmul
from hybrid_engine.ops.dispatch import next_power_of_2
from tests.tools.compile_kernels import compile_kernel as compile_with_tuples

NAMES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
MAX_SHARED_BYTES = 227 * 1024
FORMS = [  # tokens, experts, top_k, columns, layout, activation, has_bias
    (1, 8, 2, 14336, 1, "silu", False),
    (4096, 8, 2, 14336, 1, "silu", False),
    (1, 32, 4, 2880, 2, "clamped_swiglu", True),
    (4, 16, 1, 4096, 0, "gelu", True),
]


def compile_kernel(kernel, types: dict[str, str], constants: dict, warps: int = 4, stages: int = 3) -> None:
    """`types` of what is not int32; pointers are taken to be aligned to 16 bytes, as torch's are."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attrs)
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.asm["cubin"] and compiled.metadata.shared <= MAX_SHARED_BYTES, compiled.metadata
    print(f"compiled {compiled.metadata.name} {compiled.metadata.shared} bytes shared", constants)


def compile_products(dtype: torch.dtype, form: tuple) -> None:
    """Both grouped products of one form, weights stored [X, out, in] and, for gpt-oss, [X, in, out]."""
    tokens, num_experts, top_k, columns, layout, activation, has_bias = form
    tiles = expert_gemm.choose_tiles(tokens * top_k, num_experts, columns, dtype)
    pointer, width = NAMES[dtype], "i32/16"
    bias = (pointer, width, 1) if has_bias else (None, 0, 0)
    strides = (width, 1) if layout == 2 else (1, width)  # of k and n
    pairs = expert_gemm.Pairs("*i64", "*i32", "i32", "i32" if top_k > 1 else 1)
    given = {"x": expert_gemm.ExpertRows(pointer, width, 1), "pairs": pairs}
    given["w"] = expert_gemm.ExpertWeights(pointer, width, *strides, width, *bias)
    fixed = {"EXPERTS": next_power_of_2(num_experts), "TILES": tiles}
    sizes = tiles.warps, tiles.stages
    up = {**given, "inner": expert_gemm.Inner(pointer, width), "gate_numbers": expert_gemm.Gate("fp32", "fp32")}
    compile_with_tuples(expert_gemm._up_kernel, up, {**fixed, "LAYOUT": layout, "ACTIVATION": activation}, *sizes)
    down = {**given, "output": expert_gemm.Inner("*fp32", width), "weights_ptr": "*fp32"}
    compile_with_tuples(expert_gemm._down_kernel, down, fixed, *sizes)


def compile_rest(dtype: torch.dtype) -> None:
    """Gating, sorting, summing and mixing."""
    name = NAMES[dtype]
    for num_experts, rule, bias in [
        (8, moe_gating.GatingRule(2, 0, True, 1, 1, 1), None),
        (256, moe_gating.GatingRule(8, 1, True, 8, 4, 2), "*fp32"),
        (32, moe_gating.GatingRule(4, 2, True, 1, 1, 1), None),
    ]:
        choosing = moe_gating.Choosing(bias, 1 if bias else 0, "fp32")
        given = {"logits": name, "choosing": choosing, "weights": name, "experts": "*i64"}
        given.update(dict.fromkeys(("num_tokens", "num_experts", "stride_n"), "i32"), stride_x=1)
        tiles = moe_gating.gating_tiles(rule, num_experts)
        compile_with_tuples(moe_gating._gating_kernel, given, {"RULE": rule, "TILES": tiles})
    sums = dict.fromkeys(("expert_outputs", "shared", "shared_logit", "residual", "output"), name)
    for has in (True, False):
        flags = {"HAS_SHARED": has, "HAS_LOGIT": has, "HAS_RESIDUAL": has}
        compile_kernel(expert_sum._sum_kernel, sums, {**flags, "TOP_K": 4, "BLOCK": 1024})
    mixed = dict.fromkeys(("residual", "coef", "output", "mixed"), name)
    compile_kernel(moe_res_matmul._mix_kernel, mixed, {"BLOCK": 1024})


if __name__ == "__main__":
    compile_kernel(moe_gating._sort_kernel, {"experts": "*i64", "order": "*i64", "offsets": "*i32"}, {"BLOCK": 1024})
    is_short = sys.argv[1:] == ["few"]
    for form in FORMS[1:2] if is_short else FORMS:
        compile_products(torch.bfloat16, form)
    if not is_short:
        compile_products(torch.float32, FORMS[0])
    compile_rest(torch.bfloat16)
