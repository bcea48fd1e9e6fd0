"""Triton's own compiler, argument binder and launcher on CPU tensors: kernels are compiled for sm_90 and never run.

`tests/tools/launches.py` runs ops and engines through it. A stub of the CUDA driver (`fake_cuda.c`) takes every launch
and runs nothing, so that outputs mean nothing: it shows that each kernel compiles and launches, in how many variants,
and what a launch costs in Python. `install()` comes before any import of a kernel, in a process of its own.
"""

import ctypes
import importlib
import os
import pkgutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.tools.compile_kernels import resources


def install(folder: Path) -> None:
    """Builds the stub into `folder`, with the C compiler, and makes it Triton's driver; compiles into `folder` too."""
    import triton
    from triton.runtime import driver

    library = folder / "libcuda.so.1"
    headers = Path(triton.__file__).parent / "backends/nvidia/include"
    source = Path(__file__).with_suffix(".c")
    flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{headers}", "-o", str(library), str(source)]
    subprocess.run([os.environ.get("CC", "cc"), *flags], check=True)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "cache"))
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    driver.set_active(FakeDriver())


class FakeDriver:
    """Triton's driver of an H100 that is not there; its own library in C calls the stub."""

    def __init__(self) -> None:
        from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

        self.launcher_cls, self.utils = CudaLauncher, CudaUtils()

    def get_current_device(self) -> int:
        """Always the first."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0

    def get_current_target(self) -> Any:
        """What is compiled for: compute capability 9.0."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        """Where the tensors lie."""
        return torch.device("cpu")


@dataclass
class Launches:
    """One kernel's."""

    num_variants: int = 0
    compile_seconds: float = 0.0
    num_launches: int = 0
    seconds: list[float] = field(default_factory=list)
    """Of Python, of each launch that found its variant compiled, with what prepared it."""
    shared_bytes: int = 0
    registers: int = 0
    spilled_bytes: int = 0
    """The most that any variant takes, of all three."""

    @property
    def microseconds(self) -> float:
        """Of Python, of one launch; 0 where each has compiled a variant."""
        return p20(self.seconds) * 1e6 if self.seconds else 0.0


def p20(seconds: list[float]) -> float:
    """The value that a fifth of them do not exceed: other programs only make what Python does longer."""
    return sorted(seconds)[len(seconds) // 5]


def kernel_names() -> set[str]:
    """Names of all kernels that ops launch; functions that kernels call have other names."""
    from hybrid_engine import ops

    modules = [
        importlib.import_module(f"{ops.__name__}.{module.name}") for module in pkgutil.iter_modules(ops.__path__)
    ]
    functions = [value for module in modules for value in vars(module).values() if hasattr(value, "arg_names")]
    return {function.__name__ for function in functions if function.__name__.endswith("_kernel")}


class Meter:
    """What is compiled and launched while it is `installed()`, by the names of kernels."""

    def __init__(self) -> None:
        self.kernels: dict[str, Launches] = defaultdict(Launches)
        self.errors: dict[str, str] = {}
        self._loaded: list[tuple[Any, ...]] = []  # name, cubin, bytes of shared memory, device
        self._seconds_before = 0.0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Every launch goes through this meter.

        A launch, and what prepares it, are timed when they are repeated at once: what a CPU computes between two
        launches in a GPU's place leaves nothing of them in its caches.
        """
        from triton import knobs
        from triton.runtime import driver

        from hybrid_engine.ops.dispatch import Launch, prepared

        utils, load = driver.active.utils, driver.active.utils.load_binary
        start = Launch.__call__

        def noted_load(*args: Any) -> Any:
            self._loaded.append(args)
            return load(*args)

        def metered(launch: Any, *args: Any) -> None:
            self._launch(start, launch, args)

        with ExitStack() as stack:
            stack.enter_context(patch.object(Launch, "__call__", metered))
            stack.enter_context(replaced(prepared, self._timed(prepared)))  # part of what the next launch costs
            stack.enter_context(patch.object(utils, "load_binary", noted_load))
            stack.enter_context(patch.object(knobs.compilation, "listener", self._note_compilation))
            yield

    def _note_compilation(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        self.kernels[src.name].compile_seconds += times.total / 1e6

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            function(*args)
            begin = time.perf_counter()
            found = function(*args)
            self._seconds_before += time.perf_counter() - begin
            return found

        return timed

    def _launch(self, start: Callable[..., None], launch: Any, args: tuple[Any, ...]) -> None:
        name, num_loaded, launches = launch.kernel.__name__, len(self._loaded), self.kernels[launch.kernel.__name__]
        try:
            start(launch, *args)
        except Exception as error:  # of the compiler or of the launcher: whatever it is, this kernel does not run
            self.errors.setdefault(name, f"{type(error).__name__}: {error}")
            raise
        if len(self._loaded) == num_loaded:
            begin = time.perf_counter()
            start(launch, *args)
            launches.seconds.append(self._seconds_before + time.perf_counter() - begin)
        self._seconds_before = 0.0
        launches.num_launches += 1

    def read_resources(self) -> tuple[int, int]:
        """Reads what the variants loaded since the last call take: how many they are, and the most bytes one spills."""
        most_spilled, loaded = 0, self._loaded
        self._loaded = []
        for name, cubin, shared_bytes, _ in loaded:
            launches = self.kernels[name]
            registers, spilled_bytes = resources(cubin)
            launches.num_variants += 1
            launches.shared_bytes = max(launches.shared_bytes, shared_bytes)
            launches.registers = max(launches.registers, registers)
            launches.spilled_bytes = max(launches.spilled_bytes, spilled_bytes)
            most_spilled = max(most_spilled, spilled_bytes)
        return len(loaded), most_spilled


@contextmanager
def kernels_on_cpu() -> Iterator[None]:
    """Inside, kernels take CPU tensors."""
    from hybrid_engine.ops.dispatch import KERNEL_DTYPES, fallback_forced, use_triton

    with replaced(use_triton, lambda tensor: tensor.dtype in KERNEL_DTYPES and not fallback_forced()):
        yield


@contextmanager
def replaced(function: Callable[..., Any], replacement: Callable[..., Any]) -> Iterator[None]:
    """Inside, every module that has imported `function` by its name has `replacement`."""
    name = function.__name__
    modules = [m for m in list(sys.modules.values()) if getattr(m, "__dict__", {}).get(name) is function]
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch.object(module, name, replacement))
        yield


@contextmanager
def zeroed_memory() -> Iterator[None]:
    """Inside, memory that is taken holds zeros: a token that no kernel has drawn must be one that exists."""
    with _allocators_replaced(_zeroed):
        yield


@contextmanager
def memory_as_it_is() -> Iterator[None]:
    """Inside of `zeroed_memory()`, what is to be timed: nothing is zeroed."""
    with _allocators_replaced(lambda allocate: allocate.__wrapped__):
        yield


@contextmanager
def _allocators_replaced(replacement: Callable[..., Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            stack.enter_context(patch.object(owner, name, replacement(getattr(owner, name))))
        yield


def _zeroed(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(allocate)
    def taken(*args: Any, **kwargs: Any) -> torch.Tensor:
        return allocate(*args, **kwargs).zero_()

    return taken
