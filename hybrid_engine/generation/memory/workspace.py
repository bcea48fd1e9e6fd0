"""The KV workspace: one tensor of fixed-size blocks, whose memory comes and goes while its address stays."""

import torch

from hybrid_engine.containers.lasting import LastingBuffer


class KVWorkspace:
    """`tensor [L, 2, num_blocks, K, block_size, D]`: keys at 0 and values at 1 of the second dimension."""

    def __init__(self) -> None:
        self._buffer = LastingBuffer()

    @property
    def tensor(self) -> torch.Tensor | None:
        """The workspace, with or without memory behind it; None before the first rollout."""
        return self._buffer.tensor

    @property
    def allocated_bytes(self) -> int:
        """Bytes held now."""
        return self._buffer.num_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes held now that something was written to; on a CPU often fewer than are allocated."""
        return self._buffer.resident_bytes

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The tensor with memory behind it; one that is there is used again if it holds `shape` or more blocks.

        New memory is zeros: attention multiplies hidden places by zero, which only finite numbers survive.
        """
        if self.tensor is not None and self.allocated_bytes > 0 and self._serves(self.tensor, shape, dtype, device):
            return self.tensor
        return self._buffer.take_zeros(shape, dtype, device)

    @staticmethod
    def _serves(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
        held = tuple(tensor.shape)
        is_alike = (tensor.dtype, tensor.device) == (dtype, device) and held[:2] + held[3:] == shape[:2] + shape[3:]
        return is_alike and held[2] >= shape[2]

    def release(self) -> None:
        """Frees the memory and keeps the tensor."""
        self._buffer.release()

    def retake(self) -> None:
        """Gives a released tensor its memory back, zeroed; does nothing when there is none to give."""
        if self.tensor is not None:
            self.take(tuple(self.tensor.shape), self.tensor.dtype, self.tensor.device)
