"""The KV workspace: one tensor of fixed-size blocks, whose storage comes and goes while the tensor stays."""

import torch


class KVWorkspace:
    """`tensor [L, 2, num_blocks, K, block_size, D]`: keys at 0 and values at 1 of the second dimension."""

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None

    @property
    def allocated_bytes(self) -> int:
        """Bytes held now."""
        return 0 if self.tensor is None else self.tensor.untyped_storage().nbytes()

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The tensor with storage behind it; one that is there is used again if it holds `shape` or more blocks.

        New storage is zeroed: attention multiplies hidden places by zero, which only finite numbers survive.
        """
        if not self._serves(shape, dtype, device):
            self.release()
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        assert self.tensor is not None
        if self.allocated_bytes == 0:
            self.tensor.untyped_storage().resize_(self.tensor.numel() * self.tensor.element_size())
            self.tensor.zero_()
        return self.tensor

    def _serves(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
        if self.tensor is None or (self.tensor.dtype, self.tensor.device) != (dtype, device):
            return False
        held = tuple(self.tensor.shape)
        has_room = held[2] == shape[2] or (self.allocated_bytes > 0 and held[2] > shape[2])
        return has_room and held[:2] + held[3:] == shape[:2] + shape[3:]

    def release(self) -> None:
        """Frees the storage and keeps the tensor."""
        if self.tensor is not None:
            self.tensor.untyped_storage().resize_(0)

    def retake(self) -> None:
        """Gives a released tensor its storage back, zeroed; does nothing when there is none to give."""
        if self.tensor is not None:
            self.take(tuple(self.tensor.shape), self.tensor.dtype, self.tensor.device)
