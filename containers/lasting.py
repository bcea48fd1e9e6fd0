"""A tensor whose memory is freed and allocated again at the same address, so recorded steps that read it stay valid."""

import ctypes
import mmap
import sys

import torch

from hybrid_engine.containers.device_memory import DeviceMemory, is_supported

# Freed pages of private memory keep their addresses reserved, and are zero when they are touched again.
_HAS_PAGES = sys.platform == "linux"
# A GPU's memory comes in pieces of 2 MiB: smaller buffers are kept, because a piece would take more than it frees.
_KEPT_BYTES = 64 * 1024


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
