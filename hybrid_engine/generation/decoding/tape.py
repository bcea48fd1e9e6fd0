"""Decode steps on a CPU that are noted once for each number of rows and played from then on.

A step of a small model is some 300 operations of Python and PyTorch around the 40 that take time. What is compiled
and torch's operators are noted with their arguments. Playing calls them again on the memory they had: a step reads and
writes what `DecodeStep` keeps in place, as a CUDA graph does (graph.py), and the tape keeps what lies between.

Weights and workspace must stay where they are while a tape is used.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybrid_engine.generation.decoding.graph import CaptureStats
from hybrid_engine.ops import cpu_kernels

NOTED_AT = 5
"""The use of a step at which it is noted: that takes as long again as the step, which four plays win back."""
MAX_BYTES = 2**28
"""Of memory that all tapes keep between their operations; a step that needs much of it is long enough."""
# What hands values to the host: what it then decides is no part of a tape. Dispatch modes do not see the first two.
_READS = {
    *(torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.item, torch.Tensor.__bool__, torch.Tensor.__int__),
    *(torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.__array__, torch.Tensor.__contains__),
    *(torch.Tensor.nonzero, torch.nonzero, torch.Tensor.equal, torch.equal, torch.Tensor.cpu),
}


class StepTapes:
    """The tapes of one forward pass, by kind; what cannot be noted runs as it comes.

    Args:
        num_layers: whose attention must be compiled: torch's would go through all of the cache's places every time.
        stats: counts the steps that are played.
    """

    def __init__(self, num_layers: int, stats: CaptureStats):
        self.num_layers, self.stats = num_layers, stats
        self._tapes: dict[Hashable, _Tape] = {}
        self._uses: Counter[Hashable] = Counter()
        self._can_note, self._num_bytes = True, 0

    def run(self, kind: Hashable, step: Callable[[], torch.Tensor], noted: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `step` returns, from a tape where there is one.

        Args:
            kind: what the operations of the step depend on.
            step: runs the step as it comes.
            noted: runs it in the form that holds for every later step of its kind.
        """
        tape = self._tapes.get(kind)
        if tape is not None:
            self.stats.played += 1
            return tape.play()
        self._uses[kind] += 1
        is_watched = torch._C._len_torch_dispatch_stack() > 0
        if not self._can_note or self._uses[kind] < NOTED_AT or is_watched:
            return step()
        tape, reads = _Tape(), _Reads()
        with reads, tape, cpu_kernels.calls_noted_by(tape.note):
            result = noted()
        self._num_bytes += tape.num_bytes
        is_whole = tape.num_attentions == self.num_layers and not reads.were_seen
        self._can_note = is_whole and self._num_bytes <= MAX_BYTES
        if self._can_note:
            tape.result = result
            self._tapes[kind] = tape
        return result


class _Reads(TorchFunctionMode):
    """Whether the host read values."""

    def __init__(self) -> None:
        super().__init__()
        self.were_seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.were_seen |= func in _READS
        return func(*args, **(kwargs or {}))


class _Tape(TorchDispatchMode):
    """What one step did, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.result = torch.empty(0)
        self._plays: list[Callable[[], Any]] = []
        self._kept: list[Any] = []  # all results: their memory is where the operations read and write
        self.num_bytes, self.num_attentions = 0, 0

    def note(self, name: str, play: Callable[[], None]) -> None:
        """Takes a compiled function that was called."""
        self._plays.append(play)
        self.num_attentions += name == "decode_attention"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._kept.append((args, result))
        if _is_view(func):
            return result
        outputs = _tensors(result)
        self.num_bytes += sum(x.nbytes for x in outputs)
        if not func.overloadpacket.__name__.startswith(("empty", "new_empty")):
            self._plays.append(_player(func, args, kwargs or {}, outputs))
        return result

    def play(self) -> torch.Tensor:
        """Does it all again; returns the result, which has new values."""
        for play in self._plays:
            play()
        return self.result


@cache
def _is_view(func: Any) -> bool:
    return any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)


def _player(func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> Callable[[], None]:
    """Calls an operator and leaves its results where they were."""

    def play() -> None:
        for kept, new in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
            if kept.data_ptr() != new.data_ptr():
                kept.copy_(new)

    return play


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
