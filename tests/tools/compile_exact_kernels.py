"""Compiles exact mode's kernels for an H100 without one, and prints a line for each.

Run in a process without TRITON_INTERPRET: `python -m tests.tools.compile_exact_kernels [few]`.
"""

import sys

import torch
import triton

from hybrid_engine.ops.fixed_attention_kernel import (
    NOT_SPECIALIZED,
    AttentionTensors,
    FixedScores,
    fixed_attention_kernel,
    form_of,
)
from hybrid_engine.ops.fixed_attention_kernel import num_warps as attention_warps
from hybrid_engine.ops.fixed_product import (
    NUM_STAGES,
    fixed_product_kernel,
    norm_rows_kernel,
    reduce_rows_kernel,
    softmax_rows_kernel,
    tile_of,
)
from hybrid_engine.ops.linears_kernels import ProductWeights
from hybrid_engine.ops.sample_kernels import logprob_kernel
from tests.tools.compile_kernels import compile_kernel

NAMES = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}
F32, INT, FLOAT = "*fp32", "i32", "fp32"
# Head size, group, window, soft-capping and sinks of Llama 8B, Gemma 2 9B and gpt-oss.
ATTENTIONS = ((128, 4, False, False, False), (256, 2, True, True, False), (64, 8, True, False, True))


def compile_products(dtype: torch.dtype) -> None:
    """A linear's transposed weight, with and without a bias."""
    x, fixed = NAMES[dtype], {"TILE": tile_of(dtype)}
    for bias in (None, x):
        w = ProductWeights(x, 1, "i32/16", bias, "i32/16")
        given = {"x_ptr": x, "w": w, "y_ptr": x, "num_rows": INT, "width_in": "i32/16"}
        compile_kernel(fixed_product_kernel, given, fixed, stages=NUM_STAGES)


def compile_attention(dtype: torch.dtype) -> None:
    """With what is told at run time only as it comes."""
    x = NAMES[dtype]
    for head_dim, groups, has_window, has_softcap, has_sinks in ATTENTIONS:
        form = form_of(head_dim, groups, dtype, has_window, has_softcap)._replace(upcasts=False)
        given = {
            "heads": AttentionTensors(x, x, x, x if has_sinks else None, x),
            "scores": FixedScores(FLOAT, INT, FLOAT),
        }
        given |= dict.fromkeys(("starts_ptr", "positions_ptr", "tables_ptr"), "*i64")
        given |= dict.fromkeys(NOT_SPECIALIZED, INT)
        compile_kernel(fixed_attention_kernel, given, {"FORM": form}, warps=attention_warps(form), stages=2)


# Two registers, where exponentials are summed.
SPILLS = triton.__version__.startswith("3.6.")


def compile_rows(dtype: torch.dtype) -> None:
    """Rows of 4096, and of 128256 logits."""
    x, chunk = NAMES[dtype], {"CHUNK": 4096}
    rows = {"x_ptr": x, "y_ptr": x, "width": INT}
    for kind in ("mean", "logsumexp"):
        compile_kernel(reduce_rows_kernel, rows, {"KIND": kind, **chunk}, may_spill=SPILLS and kind == "logsumexp")
    compile_kernel(softmax_rows_kernel, rows, {"KIND": "_softmax", **chunk}, may_spill=SPILLS)
    norm = {**rows, "gamma_ptr": x, "mean_ptr": F32, "rstd_ptr": F32, "eps": FLOAT}
    compile_kernel(norm_rows_kernel, {**norm, "beta_ptr": x}, {"KIND": "layer", **chunk})
    compile_kernel(norm_rows_kernel, {**norm, "beta_ptr": None}, {"KIND": "rms", **chunk})


if __name__ == "__main__":
    for dtype in [torch.bfloat16] if sys.argv[1:] == ["few"] else NAMES:
        compile_products(dtype)
        compile_attention(dtype)
        compile_rows(dtype)
    logprob = {"logits_ptr": F32, "tokens_ptr": "*i64", "logprobs_ptr": F32, "lse_ptr": F32}
    compile_kernel(logprob_kernel, {**logprob, "vocab": INT, "temperature": FLOAT}, {"CHUNK": 4096})
