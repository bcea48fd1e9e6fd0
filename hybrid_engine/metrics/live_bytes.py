"""The bytes of the tensors that ops make: what is alive of them, and the most at once.

What an op takes and frees inside itself is not in it, nor what the allocator wastes.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """Inside, counts the storages that ops of this thread make, of shards those of this process.

    What is computed inside is what is computed outside, to the bit.
    """

    lets_compiled_run = True
    """For `ops/cpu_kernels.py`, whose functions would else give way to torch's, which round otherwise."""

    def __init__(self, resized: Iterable[torch.UntypedStorage] = ()) -> None:
        """`resized`: storages that were there before and grow and shrink, as those that shards are gathered into."""
        super().__init__()
        self.num_bytes = self.peak_bytes = 0
        self._seen = WeakIdKeyDictionary()
        self._resized = list(resized)
        for storage in self._resized:
            self._seen[storage] = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What came in was made before: a view of it, or it itself in an op in place, is nothing new.
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._seen.setdefault(_storage(tensor), True)
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._enter(_storage(tensor))
        taken = self.num_bytes + sum(storage.nbytes() for storage in self._resized)
        self.peak_bytes = max(self.peak_bytes, taken)
        return result

    def _enter(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen[storage] = True
        self.num_bytes += storage.nbytes()
        weakref.finalize(storage, self._leave, storage.nbytes())

    def _leave(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()
