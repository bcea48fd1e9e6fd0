"""How scripts compile kernels for an H100 without one: types of arguments, tuples of them too, and what they take."""

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

MAX_SHARED_BYTES = 227 * 1024


def describe(value, path: tuple, constants: dict, attrs: dict):
    """The type of one argument for Triton; notes what is a constant, and what divides by 16.

    `value` is a type ("*bf16", "i32"; "i32/16" where it divides by 16, as pointers do), a constant, or a tuple of them.
    """
    if isinstance(value, tuple):
        parts = (describe(part, (*path, i), constants, attrs) for i, part in enumerate(value))
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if not isinstance(value, str):
        constants[path] = value
        return "constexpr"
    if value.startswith("*") or value.endswith("/16"):
        attrs[path] = [["tt.divisibility", 16]]
    return value.removesuffix("/16")


def compile_kernel(kernel, given: dict, fixed: dict, warps: int = 4, stages: int = 3, may_spill: bool = False):
    """Asserts that nothing spills, unless it may, and that all fits on an SM; prints a line.

    Args:
        given: `describe`'s values of the arguments by name.
        fixed: the arguments that the kernel declares constant.
    """
    names = kernel.arg_names
    assert {*given, *fixed} == {*names}, f"{kernel.__name__}: { ({*given, *fixed} ^ {*names}) }"
    constants, attrs = {(names.index(name),): value for name, value in fixed.items()}, {}
    signature = {
        name: "constexpr" if name in fixed else describe(given[name], (i,), constants, attrs)
        for i, name in enumerate(names)
    }
    source = ASTSource(kernel, signature, constants, attrs)
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    registers, stack = resources(compiled.asm["cubin"])
    assert compiled.metadata.shared <= MAX_SHARED_BYTES, compiled.metadata
    assert may_spill or stack == 0, f"{kernel.__name__} spills {stack} bytes with {fixed}"
    taken = f"{registers} registers, {stack} bytes spilled, {compiled.metadata.shared} bytes shared"
    print(f"compiled {kernel.__name__} {taken} {fixed}")
    return compiled


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and the bytes of its stack: what has spilled."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", told).groups()
    return int(registers), int(stack)
