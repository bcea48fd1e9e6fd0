"""Compiles the C sources of this folder with the user's own C compiler at their first use, and loads the library.

The library is kept in the user's cache folder under a name derived from source, compiler, options and processor. A file
there ends with the SHA-256 of the bytes before it, which the loader of the operating system does not read; a file that
does not match is compiled again. It is moved into place whole, by a rename. Since it is code, it is loaded only from a
folder that belongs to this user and that no other user can write to, else compiled for this process alone.

It is linked to the OpenMP runtime that torch has loaded, so that both have one pool of threads.

`cpu_kernels.py` and `cpu_states.py` call its functions, whose argument types stand here.
"""

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from contextlib import suppress
from ctypes import Structure, c_double, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from hybrid_engine.ops.dispatch import say_once

SOURCES = [Path(__file__).with_name(name) for name in ("cpu_kernels.c", "cpu_products.c", "cpu_states.c")]
HEADERS = [Path(__file__).with_name("cpu_values.h")]
# Sums may be reordered and vectorized; NaN and infinity are preserved, unlike under -ffast-math.
OPTIONS = ["-O3", "-std=gnu11", "-shared", "-fPIC", "-fopenmp"]
X86_OPTIONS = ["-march=native", "-mprefer-vector-width=512"]
OTHER_OPTIONS = ["-mcpu=native"]
DIGEST_BYTES = 32
COMPILE_SECONDS = 120
# A compilation older than this was killed, and its file may be removed.
STALE_SECONDS = 3600
VARIABLE = "HYBRID_ENGINE_CACHE"
"""Environment variable: the folder, by default `hybrid-engine` in $XDG_CACHE_HOME or ~/.cache."""


OPTIONS += ["-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"]
# Otherwise the sums of a product, which fill the registers, are regrouped into more than there are registers.
OPTIONS += ["-fno-tree-reassoc"]

# Of each function of the library.
ARGUMENTS: dict[str, list[Any]] = {
    "norm": [c_void_p] * 6 + [c_int64] * 3 + [c_double] + [c_int64] * 2,
    "gated_activation": [c_void_p] * 3 + [c_int64] * 5,
    "decode_attention": [c_void_p] * 8 + [c_int64, c_void_p] + [c_int64] * 3,
    "prefill_attention": [c_void_p] * 11 + [c_int64] * 3,
    "short_conv": [c_void_p] * 5 + [c_int64] * 5,
    "delta_rule": [c_void_p] * 8 + [c_int64] * 2,
    "state_space": [c_void_p] * 8 + [c_int64] * 2,
    "gated_norm": [c_void_p] * 4 + [c_int64] * 4 + [c_double] + [c_int64] * 3,
    "log_sum_exp": [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_double, c_int64],
    "exp_rows": [c_void_p, c_int64, *[c_void_p] * 3, *[c_int64] * 3],
    "first_largest": [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64],
    "products": [c_void_p] * 2 + [c_int64] * 5,
    "draw_rows": [c_void_p, c_int64, *[c_void_p] * 3, *[c_int64] * 3],
}


class CMatrix(Structure):
    _fields_ = [("data", c_void_p), ("row", c_int64), ("column", c_int64)]


class CHeads(Structure):
    _fields_ = [("data", c_void_p), *((name, c_int64) for name in ("row", "head", "query", "dim"))]


class AttentionNumbers(Structure):
    """The parameters of an attention that are the same in every step; window and softcap are 0 if unused."""

    _fields_ = [
        *((name, c_int64) for name in ("num_kv_heads", "num_queries", "head_dim", "window", "is_interleaved")),
        *((name, c_double) for name in ("scale", "softcap")),
    ]


class CWorkspace(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_int64) for name in ("block", "head", "place", "block_size", "num_blocks", "reach")),
    ]


class CExtras(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("cos", "sin")),
        *((name, c_int64) for name in ("row", "width")),
        *((name, c_void_p) for name in ("sinks", "alibi")),
    ]


class DeltaNumbers(Structure):
    """The parameters of a gated delta rule that are the same in every step."""

    _fields_ = [
        *((name, c_int64) for name in ("num_key_heads", "num_values", "key_dim", "value_dim")),
        ("beta_scale", c_double),
    ]


class SpaceNumbers(Structure):
    """The parameters of a state space that are the same in every step."""

    _fields_ = [
        *((name, c_int64) for name in ("num_heads", "num_groups", "head_dim", "state_size")),
        *((name, c_double) for name in ("least_step", "most_step")),
    ]


class CStates(Structure):
    _fields_ = [
        *(("data", c_void_p), ("slot", c_int64), ("slots", c_void_p), ("num_slots", c_int64)),
        *(("starts", c_void_p), ("anew", c_void_p), ("num_sequences", c_int64)),
    ]


class CLinear(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("row", c_int64)]


class CProduct(Structure):
    _fields_ = [
        *((name, CLinear) for name in ("linear", "gate")),
        ("activation", c_int64),
        ("residual", c_void_p),
        *((name, c_int64) for name in ("residual_row", "residual_column")),
        ("output", c_void_p),
        *((name, c_int64) for name in ("row", "column", "width", "is_widened")),
    ]


class NotBuilt(Exception):
    """The reason why the library cannot be built."""


@cache
def has_pairs() -> bool:
    """Whether the library multiplies pairs of bf16, for which the compiler must know the processor's AVX-512 BF16."""
    library = load_library()
    return library is not None and bool(library.has_pairs())


@cache
def load_library() -> ctypes.CDLL | None:
    """The library; None, with one warning, if it cannot be built."""
    try:
        return _find_or_build()
    except (NotBuilt, OSError) as error:
        say_once(f"operations on the CPU run one by one in torch, more slowly: {error}")
        return None


def _find_or_build() -> ctypes.CDLL:
    command = compile_command()
    folder = cache_folder("compiled")
    if not make_private(folder):
        with tempfile.TemporaryDirectory() as temporary:
            return ctypes.CDLL(str(build(command, Path(temporary) / "kernels.so")))
    path = folder / f"{library_name(command)}.so"
    if not is_whole(path):
        build(command, path)
        remove_stale(folder)
    return ctypes.CDLL(str(path))


def compile_command() -> list[str]:
    """Compiler, options, source and libraries, without the output. Raises NotBuilt if there is no compiler."""
    if os.name != "posix":
        raise NotBuilt(f"they are compiled on POSIX systems, and this is {platform.system()}")
    wanted = shlex.split(os.environ.get("CC", "")) or ["cc"]
    compiler = shutil.which(wanted[0])
    if compiler is None:
        raise NotBuilt(f"there is no C compiler {wanted[0]!r}; install one, such as gcc, or name it by CC")
    native = X86_OPTIONS if platform.machine().lower() in ("x86_64", "amd64") else OTHER_OPTIONS
    runtime = openmp_runtime()
    # Listed before -fopenmp's own, which is then not needed.
    libraries = ["-Wl,--as-needed", str(runtime)] if runtime else []
    return [compiler, *wanted[1:], *OPTIONS, *native, *map(str, SOURCES), *libraries, "-lm"]


def openmp_runtime() -> Path | None:
    """The OpenMP runtime in this process, preferably torch's own; None if none is found."""
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    found = set(re.findall(r"(/\S*/lib(?:gomp|iomp5|omp)[-.]\S*)$", mapped, re.MULTILINE))
    return Path(min(found, key=lambda path: ("/torch" not in path, path))) if found else None


def library_name(command: list[str]) -> str:
    """The hash of everything that the library depends on."""
    compiler = Path(command[0]).resolve()
    status = compiler.stat()
    made_of = [
        *(path.read_bytes() for path in (*SOURCES, *HEADERS)),
        *command,
        str(compiler),
        status.st_size,
        status.st_mtime_ns,
        _processor(),
    ]
    return hashlib.sha256(repr(made_of).encode()).hexdigest()


def _processor() -> list[str]:
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        return [line for line in lines if line.startswith(("vendor_id", "cpu family", "model", "flags", "Features"))]
    return [platform.machine(), platform.processor()]


def make_private(folder: Path) -> bool:
    """Makes the folder; returns whether it is this user's and no other user can write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return False
    is_closed = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and is_closed and os.access(folder, os.W_OK)


def is_whole(path: Path) -> bool:
    """Whether `path` is a library of this user whose bytes match its checksum."""
    try:
        status, content = path.lstat(), path.read_bytes()
    except OSError:
        return False
    library, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    is_file = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
    return is_file and hashlib.sha256(library).digest() == digest


def build(command: list[str], path: Path) -> Path:
    """Compiles to `path`, which is replaced atomically; several processes may do so at once.

    Raises:
        NotBuilt: the compiler failed; the message has the first line of its errors.
    """
    handle, name = tempfile.mkstemp(suffix=".part", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        _compile([*command, "-o", name])
        with temporary.open("ab") as file:
            file.write(hashlib.sha256(temporary.read_bytes()).digest())
        temporary.chmod(0o700)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _compile(command: list[str]) -> None:
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMPILE_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise NotBuilt(f"{command[0]} took more than {COMPILE_SECONDS} seconds") from None
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()
        raise NotBuilt(f"{command[0]} failed: {errors[0] if errors else f'exit status {result.returncode}'}")


def remove_stale(folder: Path) -> None:
    """Removes the files of killed compilations."""
    for path in folder.glob("*.part"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()


def cache_folder(kind: str) -> Path:
    """The folder for files of one kind; it need not exist yet."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hybrid-engine"
    return Path(os.environ.get(VARIABLE) or base) / kind
