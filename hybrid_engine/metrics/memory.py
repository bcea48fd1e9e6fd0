"""Memory in bytes: as people read and write it, of the storages that ops create, and the peak of this process.

Reports of engines format bytes. The memory plan (`rlhf/planning/`) counts with `LiveBytes` the passes of a run, and
those on shapes alone.
"""

import math
import re
import resource
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def process_peak_bytes() -> int:
    """Returns the peak of the host memory of this process in bytes, libraries included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def read_bytes(text: str, option: str) -> int:
    """Reads a number of bytes such as 24GB, 24GiB, 512 MB or 1e9.

    Raises:
        ValueError: `text` is not a size, or not above 0; names `option`.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    unit = found and UNITS.get(found[2].upper())
    if not found or unit is None or float(found[1]) <= 0 or not math.isfinite(float(found[1])):
        raise ValueError(f"--{option}={text!r} must be a size above 0 such as 24GB, 24GiB or 512MB; give one")
    return round(float(found[1]) * unit)


def format_bytes(count: int) -> str:
    """Formats `count` in the largest binary unit that keeps it above one."""
    if count < 1024:
        return f"{count} B"
    power = min(3, (count.bit_length() - 1) // 10)
    return f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"


class LiveBytes(TorchDispatchMode):
    """Inside, counts the storages that ops of this thread create; of shards, those of this process.

    Results inside are bitwise equal to those outside.
    """

    lets_compiled_run = True
    """For `ops/cpu_kernels.py`, whose functions would otherwise be replaced by torch's, which round differently."""

    def __init__(self, resized: Iterable[torch.UntypedStorage] = ()) -> None:
        """`resized`: existing storages that grow and shrink, such as those that shards are gathered into."""
        super().__init__()
        self.num_bytes = self.peak_bytes = 0
        self._seen = WeakIdKeyDictionary()
        self._resized = list(resized)
        for storage in self._resized:
            self._seen[storage] = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Inputs were created before: a view of one, or one that an op changes in place, is not new.
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
