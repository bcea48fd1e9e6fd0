"""Compiles the attention kernels for an H100 without one, and prints a line for each.

Run in a process without TRITON_INTERPRET: `python tests/compile_attention_kernels.py [--spills] [name ...]`.
Heads are those of Qwen2-0.5B, OPT-1.3B, Llama-3-8B, Phi-2 (80 wide), Gemma-2 (256 wide), gpt-oss and others.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hybrid_engine.ops import softmax_context_kernels as kernels

NAMES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
MAX_SHARED_BYTES = 227 * 1024
OFF = {"UPCASTS": False, "HAS_WINDOW": False, "HAS_SOFTCAP": False, "HAS_SINKS": False, "HAS_ALIBI": False}
FORMS = {  # groups, head_dim, rotary_dim, norm, is_interleaved, features
    "qwen2-0.5b": (7, 64, 64, 0, False, {}),
    "opt": (1, 64, 0, 0, False, {}),
    "llama": (4, 128, 128, 0, False, {}),
    "qwen3": (2, 128, 128, 1, False, {}),
    "phi": (1, 80, 32, 0, False, {}),
    "gemma2": (2, 256, 256, 0, False, {"HAS_WINDOW": True, "HAS_SOFTCAP": True}),
    "gpt-oss": (8, 64, 64, 0, False, {"HAS_WINDOW": True, "HAS_SINKS": True}),
    "falcon-7b": (71, 64, 64, 0, False, {}),
    "bloom": (1, 128, 0, 0, False, {"HAS_ALIBI": True}),
    "all": (4, 96, 64, 3, True, {name: name != "UPCASTS" for name in OFF}),
}
WIDE = ("positions_ptr", "tables_ptr", "blocks_ptr", "offsets_ptr")
FLOATS = ("scale", "softcap", "eps")


def compile_kernel(label: str, kernel, dtype: str, types: dict[str, str], constants: dict, warps: int, stages: int):
    """Pointers and strides are taken to be multiples of 16, as they are with the usual sizes."""
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}

    def type_of(name):
        if name in constants:
            return "constexpr"
        if name.endswith("_ptr"):
            return types.get(name, "*i64" if name in WIDE else dtype)
        return "fp32" if name in FLOATS else "i32"

    signature = {name: type_of(name) for name in names}
    aligned = [
        i for i, name in enumerate(names) if signature[name][0] == "*" or name.startswith(("q_", "k_", "v_", "c"))
    ]
    attrs = {(i,): [["tt.divisibility", 16]] for i in aligned if signature[names[i]] != "constexpr"}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attrs)
    target = GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})
    assert compiled.asm["cubin"] and compiled.metadata.shared <= MAX_SHARED_BYTES, compiled.metadata
    print(f"compiled {label} {compiled.metadata.name} {dtype} {compiled.metadata.shared} bytes shared", usage(compiled))


def usage(compiled) -> str:
    """Registers and spills as ptxas tells them, where `--spills` asks for it."""
    if "--spills" not in sys.argv:
        return ""
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [str(ptxas), "-v", "-arch=sm_90a", file.name, "-o", "/dev/null"]
        told = subprocess.run(command, capture_output=True, text=True).stderr
    loads = {width: compiled.asm["ptx"].count(f".v{width}.") for width in (2, 4)}
    return " ".join(line.strip() for line in told.splitlines() if "Used" in line or "spill" in line) + f" {loads}"


def compile_form(label: str, dtype: torch.dtype) -> None:
    """All four kernels of one family, decode with one split and with several."""
    groups, head_dim, rotary_dim, norm, is_interleaved, features = FORMS[label]
    name, size = NAMES[dtype], dtype.itemsize
    shared = {**OFF, **features, "GROUPS": groups, "HEAD_DIM": head_dim, "ROTARY_DIM": rotary_dim, "NORM": norm}
    shared |= {"IS_INTERLEAVED": is_interleaved, "DIM": kernels.padded_dim(head_dim), "SPLIT": kernels.SPLIT}
    floats = {"alibi_ptr": "*fp32", "lse_ptr": "*fp32", "partial_ptr": "*fp32", "starts_ptr": "*i32"}
    floats["key_starts_ptr"] = "*i32"
    decode = shared | {"HEADS": kernels.padded_groups(groups), "TILE": kernels.decode_tile(head_dim, groups, size)}
    for is_single in (True, False):
        types = floats | ({} if is_single else {"output_ptr": "*fp32"})
        compile_kernel(
            label, kernels.decode_kernel, name, types, decode | {"IS_SINGLE": is_single}, 4, kernels.DECODE_STAGES
        )
    merge = shared | {"SPLITS_AT_ONCE": kernels.SPLITS_AT_ONCE}
    compile_kernel(label, kernels.merge_kernel, name, floats, merge, 2, 3)
    store = shared | {"NUM_KV_HEADS": 8, "TOKENS": kernels.STORE_TOKENS}
    compile_kernel(label, kernels.store_kernel, name, floats, store, 4, 3)
    queries, keys, warps = kernels.prefill_tiles(head_dim, size)
    prefill = shared | {"QUERIES": queries, "KEYS": keys}
    for is_causal in (True, False) if label == "opt" else (True,):  # encoders have no other feature
        compile_kernel(label, kernels.prefill_kernel, name, floats, prefill | {"IS_CAUSAL": is_causal}, warps, 2)


if __name__ == "__main__":
    labels = [name for name in sys.argv[1:] if name in FORMS]
    for label in labels or FORMS:
        compile_form(label, torch.bfloat16)
    for label in () if labels else ("gemma2", "all"):
        compile_form(label, torch.float32)
