"""`deepspeed.accelerator`: the device this process computes on, its GPU or the CPU, behind one interface.

Without a GPU its memory is that of the process: `ResidentMemory`.
"""

import os
import resource
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hybrid_engine.containers.device import host_memory_bytes
from hybrid_engine.distributed.processes import default_device

CLEAR_REFS = Path("/proc/self/clear_refs")
"""Writing 5 to it makes Linux forget the peak; see proc(5)."""
STATUS = Path("/proc/self/status")
"""Where Linux says the peak, as VmHWM."""

TENSOR_TYPES = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}
"""A function that makes a tensor of values on the device, e.g. `get_accelerator().LongTensor([1, 2])`."""


class Accelerator:
    """PyTorch's functions for the device there is; on a machine without GPU those of memory say what the process
    takes, and those of streams do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name in TENSOR_TYPES:
            return partial(torch.tensor, dtype=TENSOR_TYPES[name], device=self.current_device_name())
        raise AttributeError(f"the accelerator has no {name!r}")

    @property
    def _torch(self) -> Any:
        return torch.cuda if self._is_cuda else torch.cpu

    @property
    def _is_cuda(self) -> bool:
        return torch.cuda.is_available()

    @property
    def _name(self) -> str:
        return "cuda" if self._is_cuda else "cpu"

    def is_available(self) -> bool:
        """There is always a device."""
        return True

    def is_synchronized_device(self) -> bool:
        """Whether work is done when the call returns."""
        return not self._is_cuda

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def device_name(self, device_index: int | None = None) -> str:
        """ "cuda", "cuda:1" with an index, or "cpu"."""
        return self._name if device_index is None or not self._is_cuda else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """A device for torch functions, also a context that makes a GPU the current one."""
        return torch.cuda.device(device_index) if self._is_cuda else torch.device("cpu")

    def set_device(self, device_index: int) -> None:
        """Makes a GPU the current one."""
        if self._is_cuda:
            torch.cuda.set_device(device_index)

    def current_device(self) -> int:
        """The index of the current GPU; 0 on a CPU."""
        return torch.cuda.current_device() if self._is_cuda else 0

    def current_device_name(self) -> str:
        """The name of the current device, with its index."""
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        """GPUs of this machine; on a CPU the processes on it."""
        return torch.cuda.device_count() if self._is_cuda else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def synchronize(self, device_index: int | None = None) -> None:
        """Waits for the device."""
        if self._is_cuda:
            torch.cuda.synchronize(device_index)

    @property
    def Stream(self) -> Any:
        """The class of streams."""
        return self._torch.Stream

    @property
    def Event(self) -> Any:
        """The class of events."""
        return self._torch.Event

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Where work inside is queued on `stream`."""
        return self._torch.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        """The stream that work is queued on."""
        return self._torch.current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        """The stream that work is queued on at first."""
        return torch.cuda.default_stream(device_index) if self._is_cuda else torch.cpu.current_stream()

    def create_graph(self) -> Any:
        """A graph to record into; None on a CPU."""
        return torch.cuda.CUDAGraph() if self._is_cuda else None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        """Where work inside is recorded; on a CPU it runs."""
        return torch.cuda.graph(graph, pool, stream) if self._is_cuda else nullcontext()

    def replay_graph(self, graph: Any) -> None:
        """Runs what was recorded."""
        if self._is_cuda:
            graph.replay()

    def random(self) -> Any:
        """PyTorch's module of random states."""
        return torch.random

    def default_generator(self, device_index: int | None = None) -> torch.Generator:
        """The generator of a device."""
        return torch.cuda.default_generators[self._index(device_index)] if self._is_cuda else torch.default_generator

    def manual_seed(self, seed: int) -> None:
        """Seeds the current device."""
        torch.cuda.manual_seed(seed) if self._is_cuda else torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seeds all devices."""
        torch.cuda.manual_seed_all(seed) if self._is_cuda else torch.manual_seed(seed)

    def initial_seed(self) -> int:
        """The seed of the current device."""
        return torch.cuda.initial_seed() if self._is_cuda else torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """The random state of a device."""
        return torch.cuda.get_rng_state(self._index(device_index)) if self._is_cuda else torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Sets what `get_rng_state` gave."""
        if self._is_cuda:
            torch.cuda.set_rng_state(new_state, self._index(device_index))
        else:
            torch.set_rng_state(new_state)

    def empty_cache(self) -> None:
        """Gives free memory of the allocator back."""
        if self._is_cuda:
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of tensors; on a CPU those of the process."""
        return torch.cuda.memory_allocated(device_index) if self._is_cuda else _resident.current_bytes()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most bytes there were since the last reset; on a CPU those of the process."""
        return torch.cuda.max_memory_allocated(device_index) if self._is_cuda else _resident.peak_bytes()

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes the allocator holds; on a CPU those of the process."""
        return torch.cuda.memory_reserved(device_index) if self._is_cuda else self.memory_allocated()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """The most bytes the allocator held; on a CPU the most of the process."""
        return torch.cuda.max_memory_reserved(device_index) if self._is_cuda else _resident.peak_bytes()

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Forgets the peaks of memory."""
        torch.cuda.reset_peak_memory_stats(device_index) if self._is_cuda else _resident.reset()

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats
    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """The allocator's numbers by name."""
        if self._is_cuda:
            return torch.cuda.memory_stats(device_index)
        current, peak = _resident.current_bytes(), _resident.peak_bytes()
        return {"allocated_bytes.all.current": current, "allocated_bytes.all.peak": peak}

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device."""
        if self._is_cuda:
            return torch.cuda.get_device_properties(self._index(device_index)).total_memory
        return host_memory_bytes()[1]

    def available_memory(self, device_index: int | None = None) -> int:
        """Free bytes of the device."""
        return torch.cuda.mem_get_info(device_index)[0] if self._is_cuda else host_memory_bytes()[0]

    def is_bf16_supported(self) -> bool:
        """Whether bfloat16 can be computed with."""
        return torch.cuda.is_bf16_supported() if self._is_cuda else True

    def is_fp16_supported(self) -> bool:
        """Whether fp16 can be computed with."""
        return True

    def is_triton_supported(self) -> bool:
        """Whether Triton's kernels run here."""
        return self._is_cuda and torch.cuda.get_device_capability()[0] >= 7

    def amp(self) -> Any:
        """PyTorch's module of automatic mixed precision."""
        return self._torch.amp

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Calls `callback` once the device is in use; a CPU always is."""
        return torch.cuda._lazy_call(callback) if self._is_cuda else callback()

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> Any:
        """Begins a range that NVIDIA's profilers show; nothing on a CPU."""
        return torch.cuda.nvtx.range_push(msg) if self._is_cuda else None

    def range_pop(self, domain: Any = None) -> Any:
        """Ends the range."""
        return torch.cuda.nvtx.range_pop() if self._is_cuda else None

    def visible_devices_envs(self) -> list[str]:
        """The environment variables that say which devices a process sees."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        """Says in `current_env` which devices a process that is started with it sees."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def get_compile_backend(self) -> str:
        """The backend for `torch.compile`."""
        return "inductor"

    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes in which models can be trained."""
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def communication_backend_name(self) -> str:
        """ "nccl" or "gloo"."""
        return "nccl" if self._is_cuda else "gloo"

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies on this kind of device."""
        return tensor.device.type == self._name

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """`tensor` in page-locked memory, where there is a GPU."""
        return tensor.pin_memory() if self._is_cuda else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is in page-locked memory."""
        return tensor.is_pinned()

    def _index(self, device_index: int | None) -> int:
        index = default_device().index
        return device_index if device_index is not None else index if index is not None else 0


def get_accelerator() -> Accelerator:
    """The device of this process; all objects are alike, they have no state."""
    return Accelerator()


class ResidentMemory:
    """Readings of one process; the peak is never below any of them.

    The system's peak alone is: its counters lag behind the reading. Where the system does not forget its peak (not
    Linux), what it says counts again when it has grown since the reset, until then the largest reading does.
    """

    def __init__(self) -> None:
        self._largest = 0
        self._system_peak_at_reset = 0

    def current_bytes(self) -> int:
        """Bytes that are resident now."""
        import psutil  # here, not at the top: on a GPU nobody asks for this

        current: int = psutil.Process().memory_info().rss
        self._largest = max(self._largest, current)
        return current

    def peak_bytes(self) -> int:
        """The most since the last `reset()`, or since the process began."""
        self.current_bytes()
        system_peak = _system_peak_bytes()
        if system_peak > self._system_peak_at_reset:
            self._largest = max(self._largest, system_peak)
        return self._largest

    def reset(self) -> None:
        """Forgets the peak of memory."""
        with suppress(OSError):
            CLEAR_REFS.write_text("5")
        self._system_peak_at_reset = _system_peak_bytes()
        self._largest = 0


def _system_peak_bytes() -> int:
    """The peak of this process alone: on Linux getrusage also counts the process that started it, for good."""
    with suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024  # in kilobytes
    # In kilobytes on Linux, in bytes on a Mac.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


_resident = ResidentMemory()
