"""Devices of a process with several threads and several GPUs: events, captures, free memory, lasting addresses.

A thread starts on device 0, an event is recorded on the current device unless its stream is named, and PyTorch's
capture stream is on the device where it was first used. Functions here take the device explicitly.

`LastingBuffer` is a tensor whose memory is freed and allocated again at the same address, so recorded steps that read
it stay valid. PyTorch's allocator gives a tensor that is created again another address. CUDA's driver can map memory
to a reserved range of addresses and unmap it ("Virtual Memory Management" in the CUDA Driver API), so recorded CUDA
graphs stay valid, and the memory can be used for other purposes meanwhile.

`host_memory_bytes` is the host memory that this process may use: what the machine has, within the limits of its
container and its shell. Servers and rollouts size their KV workspace by it, plans of `parallelize` their devices, and
`hybrid-engine doctor` shows it. A container's limit is that of its control group or of a group above it (Linux,
Documentation/admin-guide: cgroup-v2.rst, cgroup-v1/memory.rst); the shell's is `ulimit -v`.
"""

import ctypes
import functools
import mmap
import resource
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hybrid_engine.containers.quantised import stored_tensors
from hybrid_engine.ops.gpu import load_driver

# Freed pages of private memory keep their addresses reserved, and are zero when they are touched again.
_HAS_PAGES = sys.platform == "linux"
# A GPU's memory comes in pieces of 2 MiB: smaller buffers are kept, because a piece would take more than it frees.
_KEPT_BYTES = 64 * 1024
_PINNED, _ON_DEVICE, _READ_AND_WRITE, _RECOMMENDED, _IS_SUPPORTED = 1, 1, 3, 1, 102
_OUT_OF_MEMORY = 2
_OMP_PAUSE_SOFT = 1
"""Resources may be used again and are then created again."""
ROOT = Path("/")
V2_FILES = ("memory.max", "memory.current", "")
V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
"""Names of the files with limit and use, and the prefix of a group's sums in memory.stat."""


class FairLock:
    """A reentrant lock; a thread that releases it gets it again only after the threads that waited for it."""

    def __init__(self) -> None:
        self._turnstile, self._lock = threading.Lock(), threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def acquire(self) -> None:
        """Waits until no other thread holds the lock."""
        thread = threading.get_ident()
        if self._owner != thread:  # no other thread can set it to this one
            with self._turnstile:
                self._lock.acquire()
            self._owner = thread
        self._depth += 1

    def release(self) -> None:
        """Releases the lock if this is the outermost `release`."""
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            self._lock.release()

    def let_others_in(self) -> None:
        """Lets waiting threads take the lock first; does nothing if this thread holds it more than once."""
        if self._depth == 1:
            self.release()
            self.acquire()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


LAUNCHES = FairLock()
"""Held while a CUDA graph is recorded, and while code draws from PyTorch's generator, which a capture needs for itself.

No thread waits for another inside a capture, so one lock for all devices cannot cause a deadlock.
"""


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, `device` is this thread's current device; does nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def launching(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, no thread records a graph; does nothing for a CPU. See `LAUNCHES`."""
    return LAUNCHES if device.type == "cuda" else nullcontext()


def record_event(device: torch.device, enable_timing: bool = False) -> torch.cuda.Event:
    """Records a new event after all work that this thread has started on `device`."""
    event = torch.cuda.Event(enable_timing=enable_timing)
    event.record(torch.cuda.current_stream(device))
    return event


def send_to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies host `values` to `device`; the host does not wait for earlier work of the device."""
    if device.type != "cuda":
        return values.to(device)
    # Each copy has a pinned tensor of its own, which the allocator keeps until the copy is done.
    return values.pin_memory().to(device, non_blocking=True)


class LastingBuffer:
    """Memory for one tensor at a time, whose address stays as long as `take` requests the same shape, dtype and device.

    If neither the system nor the GPU's driver can reserve addresses, the storage returns to PyTorch's allocator and may
    get another address.
    """

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None
        self._memory: mmap.mmap | DeviceMemory | None = None
        self._is_held = False

    @property
    def num_bytes(self) -> int:
        """Number of bytes allocated now."""
        return self.tensor.nbytes if self.tensor is not None and self._is_held else 0

    @property
    def resident_bytes(self) -> int:
        """Number of allocated bytes that have been written: the system allocates a CPU's memory page by page."""
        if isinstance(self._memory, mmap.mmap) and self._is_held:
            return _count_resident_bytes(self._memory)
        return self.num_bytes

    @property
    def held(self) -> torch.Tensor:
        """The tensor, whose memory must be allocated."""
        assert self.tensor is not None and self._is_held
        return self.tensor

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns the tensor with its memory allocated; it keeps its contents unless `release` was called since."""
        if self.tensor is None or (tuple(self.tensor.shape), self.tensor.dtype, self.tensor.device) != (
            tuple(shape),
            dtype,
            device,
        ):
            self.tensor = self._allocate(tuple(shape), dtype, device)
        elif not self._is_held and isinstance(self._memory, DeviceMemory):
            self._memory.take()
        elif not self._is_held and self._memory is None and not _is_kept(self.tensor):
            self.tensor.untyped_storage().resize_(self.tensor.nbytes)
        self._is_held = True
        return self.tensor

    def take_zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns the tensor filled with zeros. The system's pages are zero already, and are not touched here."""
        self.release()
        tensor = self.take(shape, dtype, device)
        return tensor if isinstance(self._memory, mmap.mmap) else tensor.zero_()

    def release(self) -> None:
        """Frees the memory; the tensor must not be read after it."""
        if not self._is_held:
            return
        self._is_held = False
        if isinstance(self._memory, DeviceMemory):
            self._memory.release()
        elif self._memory is not None:
            self._memory.madvise(mmap.MADV_DONTNEED)
        elif self.tensor is not None and not _is_kept(self.tensor):
            self.tensor.untyped_storage().resize_(0)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if device.type == "cpu" and _HAS_PAGES and num_bytes > 0:
            self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            return torch.frombuffer(self._memory, dtype=dtype).view(shape)
        if num_bytes > _KEPT_BYTES and is_supported(device):
            self._memory = DeviceMemory(num_bytes, device)
            self._memory.take()
            return self._memory.tensor(shape, dtype)
        self._memory = None
        return torch.empty(shape, dtype=dtype, device=device)


def _is_kept(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and tensor.nbytes <= _KEPT_BYTES


def _count_resident_bytes(memory: mmap.mmap) -> int:
    """Number of bytes of the pages that are in memory."""
    pages = (ctypes.c_ubyte * -(-len(memory) // mmap.PAGESIZE))()
    start = ctypes.c_ubyte.from_buffer(memory)
    status = ctypes.CDLL(None, use_errno=True).mincore(
        ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(memory)), pages
    )
    if status != 0:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return mmap.PAGESIZE * bytes(pages).count(1)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", _Location),
        ("windows_data", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8),
    )  # fmt: skip


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@functools.cache
def is_supported(device: torch.device) -> bool:
    """Whether the driver can map memory to reserved addresses of `device`."""
    driver, answer = load_driver(), ctypes.c_int(0)
    if driver is None or device.type != "cuda":
        return False
    torch.cuda.init()
    status = driver.cuDeviceGetAttribute(ctypes.byref(answer), _IS_SUPPORTED, ctypes.c_int(_index(device)))
    return status == 0 and answer.value == 1


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


class DeviceMemory:
    """A reserved range of `num_bytes`, with memory mapped to it between `take` and `release`.

    A tensor on it keeps the range reserved as long as the tensor exists, whether or not memory is mapped.
    """

    def __init__(self, num_bytes: int, device: torch.device):
        """Raises RuntimeError if no range can be reserved; see `is_supported`."""
        self.num_bytes, self.device = num_bytes, device
        driver = load_driver()
        assert driver is not None
        self._driver = driver
        self._properties = _Properties(type=_PINNED, location=_Location(_ON_DEVICE, _index(device)))
        grain = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(grain), ctypes.byref(self._properties), _RECOMMENDED)
        self._size = ctypes.c_size_t(-(-num_bytes // grain.value) * grain.value)
        self._address, self._handle = ctypes.c_uint64(), ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(self._address), self._size, ctypes.c_size_t(), ctypes.c_uint64(),
                   ctypes.c_uint64())  # fmt: skip
        self.is_taken = False

    @property
    def __cuda_array_interface__(self) -> dict:
        """The range as bytes, for `torch.as_tensor`."""
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self._address.value, False), "version": 3}

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns the range as a tensor, which references this object; valid only while memory is mapped."""
        return torch.as_tensor(self, device=self.device).view(dtype).view(shape)

    def take(self) -> None:
        """Maps memory of any content to the addresses. Raises torch.OutOfMemoryError if there is none."""
        if self.is_taken:
            return
        _free_abandoned()
        create = functools.partial(
            self._status, "cuMemCreate", ctypes.byref(self._handle), self._size, ctypes.byref(self._properties),
            ctypes.c_uint64(),
        )  # fmt: skip
        status = create()
        if status == _OUT_OF_MEMORY:
            torch.cuda.empty_cache()  # frees the memory that PyTorch caches
            status = create()
        if status == _OUT_OF_MEMORY:
            free, total = torch.cuda.mem_get_info(self.device)
            raise torch.OutOfMemoryError(
                f"CUDA out of memory: {self._size.value} bytes for weights or keys and values of rollouts on "
                f"{self.device}, of whose {total} bytes {free} are free"
            )
        self._check("cuMemCreate", status)
        self._call("cuMemMap", self._address, self._size, ctypes.c_size_t(), self._handle, ctypes.c_uint64())
        access = _Access(self._properties.location, _READ_AND_WRITE)
        self._call("cuMemSetAccess", self._address, self._size, ctypes.byref(access), ctypes.c_size_t(1))
        self.is_taken = True

    def release(self) -> None:
        """Frees the memory once the device has finished using it; the addresses stay reserved."""
        _free_abandoned()
        if self.is_taken:
            torch.cuda.synchronize(self.device)
            self._unmap()

    def _unmap(self) -> None:
        self._call("cuMemUnmap", self._address, self._size)
        self._call("cuMemRelease", self._handle)
        self.is_taken = False

    def __del__(self) -> None:
        """Defers the release of the addresses: a graph may be recorded at this moment, which forbids waiting."""
        if "is_taken" in vars(self):
            _ABANDONED.append(self)

    def _free(self) -> None:
        if self.is_taken:
            self._unmap()
        self._call("cuMemAddressFree", self._address, self._size)

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, self._status(name, *arguments))

    def _status(self, name: str, *arguments: object) -> int:
        function: Callable[..., int] = getattr(self._driver, name)
        with torch.cuda.device(self.device):  # some calls need a context, which a new thread does not have
            return function(*arguments)

    def _check(self, name: str, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"{name} for {self.num_bytes} bytes on {self.device} failed with CUDA error {status}")


_ABANDONED: list[DeviceMemory] = []


def _free_abandoned() -> None:
    """Frees the ranges that lost their last reference since the last call."""
    while _ABANDONED:
        memory = _ABANDONED.pop()
        torch.cuda.synchronize(memory.device)
        memory._free()


def give_back_openmp_pool() -> bool:
    """Ends the threads that the caller's CPU operations are distributed to; its next operation starts them again.

    Every thread that computes has such a pool of its own. GNU's OpenMP counts the threads of all pools, and once they
    outnumber the CPUs, none waits actively for work any more: each operation of any thread wakes its pool through the
    kernel (`GOMP_SPINCOUNT` in its manual), with which decoding 64 rows on two CPUs took a quarter more time. So a
    thread that hands the model to another one ends its pool first.

    Returns:
        Whether there is no pool now; False if OpenMP is not used or older than 5.0, or the caller is in a parallel
        region.
    """
    try:
        pause = ctypes.CDLL(torch._C.__file__).omp_pause_resource_all
    except (AttributeError, OSError):
        return False
    return pause(_OMP_PAUSE_SOFT) == 0


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of this process's storages that hold the tensors, each storage counted once."""
    plain = (part for tensor in tensors for part in stored_tensors(tensor))
    with torch.no_grad():
        local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in plain]
    storages = [tensor.untyped_storage() for tensor in local]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """Returns the free bytes of `device`, including the allocator's cached ones, and its total bytes."""
    if device.type != "cuda":
        return host_memory_bytes()
    free, total = torch.cuda.mem_get_info(device)
    stock = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + stock - _idle_bytes_of_graphs(device), total


def _idle_bytes_of_graphs(device: torch.device) -> int:
    """Bytes that the allocator reserves for recorded graphs and that no tensor uses; nothing else can use them."""
    index = torch.cuda.current_device() if device.index is None else device.index
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == index]
    private = [segment for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in private)


def host_memory_bytes() -> tuple[int, int]:
    """Returns the bytes available without swapping, and the total: the least that machine, container and shell allow.

    File pages that the kernel can drop count as available, in a container as on the machine.
    """
    free, total = _machine_bytes()
    bounds = [(free, total), *_control_group_bytes(ROOT, total), *_address_space_bytes(ROOT)]
    return max(0, min(free for free, _ in bounds)), min(total for _, total in bounds)


def _machine_bytes() -> tuple[int, int]:
    if sys.platform == "linux":
        with open(ROOT / "proc/meminfo", "rb", buffering=0) as file:  # each rollout reads it several times
            total, _, available = (int(line.split()[1]) * 1024 for line in file.read(256).splitlines()[:3])
        return available, total
    import psutil  # here, not at the top: Linux does not need it

    memory = psutil.virtual_memory()
    return int(memory.available), int(memory.total)


def _control_group_bytes(root: Path, total: int) -> Iterator[tuple[int, int]]:
    """Yields free and total bytes of each control group with a limit below the machine's `total`."""
    for folder, (limit_file, use_file, prefix) in _control_groups(root):
        try:
            limit = (folder / limit_file).read_text().strip()
            if limit != "max" and int(limit) < total:
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
                used = int((folder / use_file).read_text())
                yield int(limit) - max(0, used - cached), int(limit)
        except (OSError, ValueError):  # the group is gone, or its files are not for this process
            continue


@functools.cache
def _control_groups(root: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    """The folders of this process's control groups that can limit memory, the groups above them included.

    In a container the path may be one of the host, and its group is then what is mounted as the root.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return []
    found = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        is_v1 = "memory" in controllers.split(",")
        if not is_v1 and controllers:
            continue
        mount, files = root / "sys/fs/cgroup", V1_FILES if is_v1 else V2_FILES
        mount = mount / "memory" if is_v1 else mount
        inside = PurePosixPath(path.lstrip("/"))
        groups = [] if ".." in inside.parts else [mount / inside, *(mount / above for above in inside.parents)]
        found += [(folder, files) for folder in dict.fromkeys([*groups, mount]) if (folder / files[0]).exists()]
    return found


def _address_space_bytes(root: Path) -> Iterator[tuple[int, int]]:
    """Yields free and total bytes of `ulimit -v`, if it is set."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or sys.platform != "linux":
        return
    num_pages = int((root / "proc/self/statm").read_text().split()[0])
    yield limit - num_pages * resource.getpagesize(), limit
