"""Compiles the attention kernels for an H100 without one, and prints a line for each.

Run in a process without TRITON_INTERPRET: `python -m tests.tools.compile_attention_kernels [name ...]`.
Heads are those of Qwen2-0.5B, OPT-1.3B, Llama-3-8B, Phi-2 (80 wide), Gemma-2 (256 wide), gpt-oss and others; latents
those of DeepSeek-V3, GLM-4.7-Flash and Mistral 4.
"""

import sys
from typing import NamedTuple

import torch

from hybrid_engine.ops import latent_attention_kernels as latent
from hybrid_engine.ops import softmax_context_kernels as kernels
from hybrid_engine.ops.softmax_context_kernels import (
    AttentionForm,
    AttentionScores,
    Cache,
    Changed,
    Changes,
    NewHeads,
    SplitContexts,
    Tables,
)
from tests.tools.compile_kernels import compile_kernel

NAMES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
STRIDE = "i32/16"  # those of usual sizes divide by 16


class Family(NamedTuple):
    """What attention of a family has."""

    groups: int
    head_dim: int
    rotary_dim: int = 0
    norm: int = 0
    is_interleaved: bool = False
    has_window: bool = False
    has_softcap: bool = False
    has_sinks: bool = False
    has_alibi: bool = False


FAMILIES = {
    "qwen2-0.5b": Family(7, 64, 64),
    "opt": Family(1, 64),
    "llama": Family(4, 128, 128),
    "qwen3": Family(2, 128, 128, norm=1),
    "phi": Family(1, 80, 32),
    "gemma2": Family(2, 256, 256, has_window=True, has_softcap=True),
    "gemma4": Family(4, 512, 512, norm=2),
    "gemma4-shared": Family(8, 512),
    "gpt-oss": Family(8, 64, 64, has_window=True, has_sinks=True),
    "falcon-7b": Family(71, 64, 64),
    "bloom": Family(1, 128, has_alibi=True),
    "all": Family(4, 96, 64, 3, True, True, True, True, True),
}


def compile_family(label: str, dtype: torch.dtype) -> None:
    """All four kernels, decode with one split and with several."""
    family, x, size = FAMILIES[label], NAMES[dtype], dtype.itemsize
    form = AttentionForm(8, *family[:2], kernels.padded_dim(family.head_dim), *family[2:7], upcasts=False)
    new = NewHeads(x, STRIDE, STRIDE, STRIDE, x, STRIDE, STRIDE, x, STRIDE, STRIDE)
    angles = (x, x, STRIDE) if family.rotary_dim else (None, None, "i32")
    changes = Changes(*angles, *[x if family.norm else None] * 2, "fp32")
    cache = Cache(x, x, STRIDE, STRIDE, STRIDE)
    sinks, alibi = x if family.has_sinks else None, "*fp32" if family.has_alibi else None
    scores = AttentionScores("fp32", "i32", "fp32", sinks, alibi)

    def compile_one(kernel, given: dict, warps: int, stages: int, **fixed) -> None:
        fixed["FORM"] = form
        compile_kernel(kernel, given, fixed, warps, stages, may_spill=True)

    decode = {"new": new, "changes": changes, "cache": cache, "tables": Tables("*i64", "i32", "i32"), "scores": scores}
    decode["positions_ptr"] = "*i64"
    tiles = kernels.decode_tiles(form, size)
    for parts in (SplitContexts(x, None), SplitContexts("*fp32", "*fp32")):
        warps = kernels.decode_warps(size)
        compile_one(kernels.decode_kernel, {**decode, "parts": parts}, warps, kernels.DECODE_STAGES, TILES=tiles)
    merge = {"parts": SplitContexts("*fp32", "*fp32"), "scores": scores, "positions_ptr": "*i64", "output_ptr": x}
    merge["num_splits"] = "i32"
    compile_one(kernels.merge_kernel, merge, 2, 3, SPLIT=kernels.SPLIT, SPLITS_AT_ONCE=kernels.SPLITS_AT_ONCE)
    store = {"new": new, "changes": changes, "cache": cache, "blocks_ptr": "*i64", "offsets_ptr": "*i64"}
    store |= {"changed": Changed(x, x), "num_tokens": "i32"}
    compile_one(kernels.store_kernel, store, 4, 3, TOKENS=kernels.STORE_TOKENS)
    prefill = {"new": new, "starts_ptr": "*i32", "key_starts_ptr": "*i32", "scores": scores, "output_ptr": x}
    tiles, warps = kernels.prefill_tiles(family.head_dim, size)
    for is_causal in (True, False) if label == "opt" else (True,):  # encoders have no other feature
        compile_one(kernels.prefill_kernel, prefill, warps, 2, IS_CAUSAL=is_causal, TILES=tiles)


LATENTS = {"deepseek-v3": (128, 512, 64), "glm-4.7-flash": (20, 512, 64), "mistral4": (32, 256, 64)}  # heads, L, R


def compile_latents(label: str, dtype: torch.dtype) -> None:
    """Decode of latent attention with one split and with several, and the merging of latents."""
    x, (num_heads, latent_dim, rotary_dim) = NAMES[dtype], LATENTS[label]
    numbers = latent.LatentNumbers(num_heads, latent_dim, rotary_dim, 1.0, True)
    tiles, warps = latent.latent_tiles(num_heads, dtype.itemsize)
    given = {
        "new": latent.NewLatents(x, STRIDE, STRIDE, x, STRIDE, STRIDE, x, STRIDE, x, STRIDE),
        "changes": Changes(x, x, STRIDE, None, None, "fp32"), "cache": latent.LatentCache(x, STRIDE, STRIDE),
        "tables": Tables("*i64", "i32", "i32"), "scale": "fp32", "positions_ptr": "*i64",
    }  # fmt: skip
    fixed = {
        "FORM": latent.LatentForm(num_heads, latent_dim, kernels.padded_dim(latent_dim)),
        "ROTARY": numbers.attention_form(rotary_dim, rotary_dim), "TILES": tiles,
    }  # fmt: skip
    for parts in (SplitContexts(x, None), SplitContexts("*fp32", "*fp32")):
        compile_kernel(latent.latent_decode_kernel, {**given, "parts": parts}, fixed, warps, 2, may_spill=True)
    merge = {"parts": SplitContexts("*fp32", "*fp32"), "scores": AttentionScores("fp32", "i32", "fp32", None, None)}
    merge |= {"positions_ptr": "*i64", "output_ptr": x, "num_splits": "i32"}
    fixed = {"FORM": numbers.attention_form(latent_dim, 0), "SPLIT": kernels.SPLIT}
    fixed["SPLITS_AT_ONCE"] = kernels.SPLITS_AT_ONCE
    compile_kernel(kernels.merge_kernel, merge, fixed, latent.MERGE_WARPS, 3)


if __name__ == "__main__":
    labels = sys.argv[1:]
    for label in labels or FAMILIES:
        compile_family(label, torch.bfloat16)
    for label in () if labels else ("gemma2", "all"):
        compile_family(label, torch.float32)
    for label in tuple(LATENTS)[2:] if labels else LATENTS:
        compile_latents(label, torch.bfloat16)
    if not labels:
        compile_latents("deepseek-v3", torch.float32)
