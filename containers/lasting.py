"""A tensor whose memory comes and goes while its address stays, so that recorded steps that read it stay valid."""

import mmap
import sys

import torch

# Pages of private memory that are given back leave their addresses reserved and are zeros when they are touched again.
_HAS_PAGES = sys.platform == "linux"


class LastingBuffer:
    """Memory for one tensor at a time.

    On a CPU the address stays for as long as `take` is asked for the same bytes. On a GPU the storage is given back to
    PyTorch's allocator and asked for again: it has the same address where both happen in one `torch.cuda.MemPool` that
    serves the same requests in the same order each time.
    """

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None
        self._pages: mmap.mmap | None = None
        self._is_held = False

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return self.tensor.nbytes if self.tensor is not None and self._is_held else 0

    @property
    def held(self) -> torch.Tensor:
        """The tensor, which has memory behind it now."""
        assert self.tensor is not None and self._is_held
        return self.tensor

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The tensor with memory behind it: what it held where none was given back since, else anything."""
        if self.tensor is None or (tuple(self.tensor.shape), self.tensor.dtype, self.tensor.device) != (
            tuple(shape),
            dtype,
            device,
        ):
            self.tensor = self._allocate(tuple(shape), dtype, device)
        elif not self._is_held and self._pages is None:
            self.tensor.untyped_storage().resize_(self.tensor.nbytes)
        self._is_held = True
        return self.tensor

    def release(self) -> None:
        """Gives the memory back; whoever still looks at the tensor must not read it."""
        if not self._is_held:
            return
        self._is_held = False
        if self._pages is not None:
            self._pages.madvise(mmap.MADV_DONTNEED)
        elif self.tensor is not None:
            self.tensor.untyped_storage().resize_(0)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if device.type != "cpu" or not _HAS_PAGES or num_bytes == 0:
            self._pages = None
            return torch.empty(shape, dtype=dtype, device=device)
        self._pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(self._pages, dtype=dtype).view(shape)
