"""Compiles the kernels of layers that keep a state for an H100 without one, and prints a line for each.

Run in a process without TRITON_INTERPRET: `python -m tests.tools.compile_state_kernels [few]`. The sizes are those of
Qwen3-Next and OLMo-Hybrid, of Granite 4 and Falcon-H1, and of small models.
"""

import sys

import torch

from hybrid_engine.ops import gated_delta_kernels as delta
from hybrid_engine.ops import gated_norm, short_conv
from hybrid_engine.ops import state_space_kernels as space
from hybrid_engine.ops.dispatch import next_power_of_2
from tests.tools.compile_kernels import compile_kernel

NAMES = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}
FORMS = [(16, 2, 128, 128), (30, 1, 96, 192), (2, 2, 16, 24)]
"""Key heads, value heads of each, dimensions of a key and of a value."""
SPACES = [(128, 1, 64, 128), (24, 1, 64, 256), (4, 2, 24, 16)]
"""Heads, groups, dimension of a head and state size."""


def compile_conv(dtype: torch.dtype, width: int, activation: str | None) -> None:
    """The step, and both kernels of a prefill."""
    name, fixed = NAMES[dtype], {"ACTIVATION": activation, "WIDTH": width, "CHANNELS": short_conv.MAX_CHANNELS}
    given = {"rows": short_conv.ConvRows(name, "i32/16", 1, name, "i32/16"), "weight_ptr": name, "bias_ptr": None}
    step = short_conv.ConvSequences(name, "i32/16", "*i64", None, None)
    prefill = step._replace(starts_ptr="*i32", anew_ptr="*i1")
    for sequences in (step, prefill):
        compile_kernel(short_conv.conv_step_kernel, {**given, "sequences": sequences}, fixed, warps=2)
    given["sequences"] = prefill
    compile_kernel(short_conv.conv_prefill_kernel, given, {**fixed, "TOKENS": short_conv.TOKENS})


def compile_delta(dtype: torch.dtype, heads: int, group: int, key_dim: int, value_dim: int) -> None:
    """The step and the chunks."""
    name, width = NAMES[dtype], "i32/16"
    columns = min(delta.COLUMNS, max(next_power_of_2(value_dim), 16))
    block = max(next_power_of_2(key_dim), 16)
    form = delta.DeltaForm(heads, group, key_dim, value_dim, block, columns, delta.CHUNK_TOKENS)
    given = {
        "rows": delta.DeltaRows(name, width, 1, name, "i32", 1, name, "i32", 1, name),
        "decay": delta.DeltaDecay(name, name, "fp32"),
        "sequences": delta.DeltaSequences("*fp32", width, "*i64", None, None),
    }
    compile_kernel(delta.delta_step_kernel, given, {"FORM": form})
    given["sequences"] = given["sequences"]._replace(starts_ptr="*i32", anew_ptr="*i1")
    is_fp32 = dtype == torch.float32  # whose products take no tensor cores, so that their operands fill registers
    fixed, warps = {"FORM": form, "PRECISION": "ieee" if is_fp32 else "tf32"}, 8 if is_fp32 else 4
    compile_kernel(delta.delta_chunks_kernel, given, fixed, warps=warps, stages=1, may_spill=is_fp32)


def compile_space(dtype: torch.dtype, num_heads: int, num_groups: int, head_dim: int, state_size: int) -> None:
    """The step and the chunks."""
    name, width = NAMES[dtype], "i32/16"
    form = space.build_form(num_heads, num_groups, head_dim, state_size)
    given = {
        "rows": space.SpaceRows(name, width, 1, name, "i32", 1, name),
        "steps": space.SpaceSteps(name, name, name, "fp32", "fp32"),
        "sequences": space.SpaceSequences("*fp32", width, "*i64", None, None),
    }
    compile_kernel(space.space_step_kernel, given, {"FORM": form})
    given["sequences"] = given["sequences"]._replace(starts_ptr="*i32", anew_ptr="*i1")
    is_fp32 = dtype == torch.float32  # whose products take no tensor cores, so that their operands fill registers
    fixed, warps = {"FORM": form, "PRECISION": "ieee" if is_fp32 else "tf32"}, space.chunk_warps(form, is_fp32)
    compile_kernel(space.space_chunks_kernel, given, fixed, warps=warps, stages=1, may_spill=is_fp32)


def compile_norm(dtype: torch.dtype, group: int, gates_first: bool) -> None:
    """The gated norm of heads, and of whole rows."""
    name, width = NAMES[dtype], "i32/16"
    rows = gated_norm.GatedRows(name, width, 1, name, width, 1, name, width)
    fixed = {"GROUP": group, "GATES_FIRST": gates_first, "IS_SHARED": not gates_first}
    given = {"rows": rows, "gamma_ptr": name, "eps": "fp32"}
    warps = 4 if group > 512 else 1
    compile_kernel(gated_norm.gated_norm_kernel, given, {**fixed, "BLOCK": next_power_of_2(group)}, warps=warps)


if __name__ == "__main__":
    is_short = sys.argv[1:] == ["few"]
    for dtype in (torch.bfloat16,) if is_short else NAMES:
        compile_conv(dtype, 4, "silu")
        for form in FORMS[:1] if is_short else FORMS:
            compile_delta(dtype, *form)
        for form in SPACES[:1] if is_short else SPACES:
            compile_space(dtype, *form)
        compile_norm(dtype, 128, False)
        if not is_short:
            compile_conv(dtype, 3, None)
            compile_norm(dtype, 4096, True)
