"""GPU memory at an address that stays reserved while the memory is freed and allocated again.

PyTorch's allocator gives a tensor that is created again another address. CUDA's driver can map memory to a reserved
range of addresses and unmap it ("Virtual Memory Management" in the CUDA Driver API), so recorded CUDA graphs stay
valid, and the memory can be used for other purposes meanwhile.
"""

import ctypes
import functools
from collections.abc import Callable

import torch

from hybrid_engine.ops.gpu import load_driver

_PINNED, _ON_DEVICE, _READ_AND_WRITE, _RECOMMENDED, _IS_SUPPORTED = 1, 1, 3, 1, 102
_OUT_OF_MEMORY = 2


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
