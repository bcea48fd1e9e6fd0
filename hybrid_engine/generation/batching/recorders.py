"""Decode steps on a CPU that are noted once for each number of rows and played from then on.

A step of a small model is some 300 operations of Python and PyTorch around the 40 that take time. What is compiled
and torch's operators are noted with their arguments. Playing calls them again on the memory they had: a step reads and
writes what `DecodeStep` keeps in place, as a CUDA graph does (graph.py), and the tape keeps what lies between.

Weights and workspace must stay where they are while a tape is used.
"""

import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybrid_engine.containers.model import InferenceModel
from hybrid_engine.containers.streams import LAUNCHES, on_device
from hybrid_engine.ops import cpu_kernels

# Longest contexts are padded up to this times a power of two, which bounds the idle part of attention's grid.
CONTEXT_GRAIN = 512
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


def batch_bucket(num_rows: int) -> int:
    """The number of rows that a graph for `num_rows` has: powers of two and, from 16 on, what is halfway between.

    Thirteen up to 256 rows, of which at most a third is idle beyond 16.
    """
    power = 1 << (num_rows - 1).bit_length()
    halfway = power // 4 * 3
    return halfway if power > 16 and num_rows <= halfway else power


def context_bucket(context: int, capacity: int) -> int:
    """The context that a graph for rows of at most `context` tokens reaches; at most `capacity`."""
    grains = -(-context // CONTEXT_GRAIN)
    return min(CONTEXT_GRAIN << (grains - 1).bit_length(), capacity)


@dataclass
class CaptureStats:
    """What recording took, and what came of it."""

    captures: int = 0
    seconds: float = 0.0
    played: int = 0
    """Steps that came from a tape (tape.py); graphs are not counted."""


class CudaGraphs:
    """Records functions as CUDA graphs of `device` that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self.renew()

    def another(self) -> "CudaGraphs":
        """One for the same device, with memory of its own."""
        return CudaGraphs(self._device)

    def renew(self) -> None:
        """The next graphs get a pool of their own: once all graphs of a pool are gone, PyTorch may not use it again."""
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Records what `run` launches and returns its replay. `run` has been called once, so all is compiled."""
        with LAUNCHES, on_device(self._device):
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as the one that watches collectives, may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        return graph.replay


class StepGraphs:
    """The graphs of one step function, by kind: rows, context, with the draw; each recorded when first needed.

    Args:
        recorder: `CudaGraphs`, or what captures functions as it does.
        model: whose steps these are.
    """

    def __init__(self, recorder: Any, model: InferenceModel):
        self._recorder, self._model, self.stats = recorder, model, CaptureStats()
        self._replays: dict[tuple[int, int, bool], Callable[[], Any]] = {}

    @property
    def num_recorded(self) -> int:
        """How many recorded steps are kept."""
        return len(self._replays)

    def has(self, kind: tuple[int, int, bool]) -> bool:
        """Whether the graph of a kind is there."""
        return kind in self._replays

    def record(self, kind: tuple[int, int, bool], run: Callable[[], Any]) -> None:
        """Runs `run` once, to compile and allocate, then records it. It must leave no trace that matters.

        Where `run` has found a kernel that does not compile, so that the step cannot be recorded, a replay runs it.
        """
        start = time.perf_counter()
        run()
        if not self._model.can_be_recorded:
            self._replays[kind] = run
            return
        self._replays[kind] = self._recorder.capture(run)
        self.stats.captures += 1
        self.stats.seconds += time.perf_counter() - start

    def replay(self, kind: tuple[int, int, bool]) -> None:
        """Starts the step recorded for `kind`; KeyError where there is none."""
        self._replays[kind]()


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
