"""Examines this machine and installation: versions, devices, kernels (run once), memory, limits, write access.

Each check is a `Finding`. The text of a "missing" one says what needs it; the engine does not work with a "broken" one.
"""

import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from hybrid_engine.containers.device import host_memory_bytes
from hybrid_engine.ops.cpu_library import cache_folder, load_library
from hybrid_engine.ops.dispatch import HAS_TRITON, IS_INTERPRETED, fallback_forced
from hybrid_engine.ops.gpu import foreign_memory_line, kernel_problem, why_no_gpu
from hybrid_engine.ops.norm import NormOp

PACKAGES = ("hybrid-engine", "torch", "transformers", "peft", "accelerate", "tokenizers", "safetensors", "triton")
FEATURES = {
    "serving (hybrid-engine serve, agent)": ("starlette", "uvicorn", "pydantic", "prometheus-client"),
    "agents (hybrid-engine agent)": ("openai",),
    "texts guided by patterns or schemas": ("llguidance",),
    "rewards from mathematics (--reward math)": ("math-verify",),
    "TRL's trainers (attach)": ("trl",),
    "bases in 4 or 8 bits": ("bitsandbytes",),
    "bases in 8 bits as torchao loads them": ("torchao",),
    "curves in TensorBoard (--tracker tensorboard)": ("tensorboard",),
}
FEWEST_FILES = 4096
"""File descriptors below which many processes, data loader workers and clients of a server run out of them."""
SMALL_DISK = 1 << 30
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the result."""

    kind: str
    """"versions", "devices", "links", "kernels", "memory", "limits", "write access" or "features"."""
    name: str
    state: str
    """"ok", "missing" or "broken"."""
    text: str


def examine() -> list[Finding]:
    """Runs all checks, in the order of `Finding.kind`; compiles the kernels for this CPU if necessary."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _versions, _devices, _links, _kernels, _memory, _limits, _write_access, _features,
    )  # fmt: skip
    return [finding for check in checks for finding in check()]


def devices_to_try() -> list[torch.device]:
    """Returns the CPU and each GPU that kernels can run on."""
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [device for device in (torch.device("cpu"), *gpus) if kernel_problem(device) is None]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _versions() -> Iterator[Finding]:
    text = f"{platform.python_version()} on {platform.platform()}"
    yield Finding(kind="versions", name="python", state="ok", text=text)
    for package in PACKAGES:
        found = _version(package)
        is_needed = package != "triton" or sys.platform == "linux"
        state = "ok" if found else "broken" if is_needed else "missing"
        yield Finding(kind="versions", name=package, state=state, text=found or "is not installed")


def _devices() -> Iterator[Finding]:
    capability = torch.backends.cpu.get_cpu_capability()
    text = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {platform.machine()} with {capability}"
    yield Finding(kind="devices", name="cpu", state="ok", text=text)
    if not torch.cuda.is_available():
        text = why_no_gpu() or f"no GPU is seen (torch has {torch.version.cuda or 'no CUDA'})"
        yield Finding(kind="devices", name="cuda", state="missing", text=text)
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        text = f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        problem = kernel_problem(torch.device("cuda", index))
        state = "broken" if problem else "ok"
        yield Finding(kind="devices", name=f"cuda:{index}", state=state, text=f"{text}: {problem}" if problem else text)
        if line := foreign_memory_line(torch.device("cuda", index)):
            yield Finding(kind="devices", name=f"cuda:{index}", state="missing", text=line)


def _links() -> Iterator[Finding]:
    for name, is_there in (
        ("gloo", torch.distributed.is_gloo_available()),
        ("nccl", torch.distributed.is_nccl_available()),
    ):
        needed = name == "gloo" or torch.cuda.is_available()
        state = "ok" if is_there else "broken" if needed else "missing"
        text = "processes on CPUs meet through it" if name == "gloo" else "processes on GPUs meet through it"
        yield Finding(kind="links", name=name, state=state, text=text if is_there else f"is not there: {text}")
    count = torch.cuda.device_count()
    for first in range(count):
        for second in range(first + 1, count):
            is_direct = torch.cuda.can_device_access_peer(first, second)
            text = "direct" if is_direct else "through the host's memory, which is slow"
            state = "ok" if is_direct else "missing"
            yield Finding(kind="links", name=f"cuda:{first} to cuda:{second}", state=state, text=text)


def _kernels() -> Iterator[Finding]:
    if fallback_forced():
        text = "HYBRID_ENGINE_FALLBACK=1: torch operations are used instead"
        yield Finding(kind="kernels", name="all", state="missing", text=text)
        return
    if load_library() is None:
        text = "not compiled; torch operations are used instead, which is slower"
        yield Finding(kind="kernels", name="C, for the CPU", state="missing", text=text)
    else:
        yield _try_kernel("Triton, interpreted" if IS_INTERPRETED else "C, for the CPU", torch.device("cpu"))
    if not torch.cuda.is_available():
        return
    if not HAS_TRITON:
        text = "triton is not installed; torch operations are used instead"
        yield Finding(kind="kernels", name="Triton", state="missing", text=text)
        return
    for device in devices_to_try()[1:]:
        yield _try_kernel(f"Triton, on {device}", device)


def _try_kernel(name: str, device: torch.device) -> Finding:
    op = NormOp("rms", 1e-6)
    rows, weight = torch.randn(3, 64, device=device), torch.randn(64, device=device)
    try:
        apart = (op(rows, weight) - op.reference(rows, weight)).abs().max().item()
    except Exception as error:  # any error, of a compiler or a driver, is the finding
        return Finding(kind="kernels", name=name, state="broken", text=f"{type(error).__name__}: {error}")
    state = "ok" if apart <= 1e-4 else "broken"
    return Finding(kind="kernels", name=name, state=state, text=f"compiled and run once, {apart:.1e} from torch")


def _memory() -> Iterator[Finding]:
    free, total = host_memory_bytes()
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    yield Finding(kind="memory", name="host", state="ok", text=text)
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        state = "ok" if free >= SMALL_DISK else "missing"
        text = f"{free / GIB:.1f} GiB free" + ("" if state == "ok" else ", little for data loader workers")
        yield Finding(kind="memory", name=str(shared), state=state, text=text)


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = soft >= FEWEST_FILES or soft == resource.RLIM_INFINITY
    text = f"{soft}, at most {hard}" + ("" if is_enough else f"; raise it by `ulimit -n {FEWEST_FILES}`")
    yield Finding(kind="limits", name="file descriptors", state="ok" if is_enough else "missing", text=text)


def _write_access() -> Iterator[Finding]:
    hub = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    places = {
        "this folder": Path.cwd(),
        "temporary files": Path(tempfile.gettempdir()),
        "compiled kernels and verdicts": cache_folder("compiled"),
        "models of the hub": hub,
    }
    for name, folder in places.items():
        nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
        can_write = os.access(nearest, os.W_OK)
        free = shutil.disk_usage(nearest).free
        text = f"{folder}: {free / GIB:.1f} GiB free" if can_write else f"{folder} cannot be written to"
        state = "ok" if can_write and free >= SMALL_DISK else "missing" if can_write else "broken"
        yield Finding(kind="write access", name=name, state=state, text=text)


def _features() -> Iterator[Finding]:
    for feature, packages in FEATURES.items():
        absent = [package for package in packages if _version(package) is None]
        text = f"needs {', '.join(absent)}" if absent else ", ".join(f"{p} {_version(p)}" for p in packages)
        yield Finding(kind="features", name=feature, state="missing" if absent else "ok", text=text)
