"""Records decode steps: as CUDA graphs on a GPU, as tapes of operator calls on a CPU.

A CPU step of a small model makes some 300 Python and PyTorch calls around the 40 that take time. A tape stores the
calls of compiled functions and of torch's operators with their arguments, once for each number of rows. Playing it
repeats the calls on the same memory: like a CUDA graph, a step reads and writes the buffers that `DecodeStep` keeps,
and the tape keeps the intermediate results.

Weights and workspace must stay at their addresses while a graph or tape is used.
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

from hybrid_engine.containers.device import LAUNCHES, on_device
from hybrid_engine.containers.model import InferenceModel
from hybrid_engine.ops import cpu_kernels

# Longest contexts are padded up to this times a power of two, which bounds the idle part of attention's grid.
CONTEXT_GRAIN = 512
NOTED_AT = 5
"""Use of a step at which it is recorded on a tape: recording costs as much as one step, which four plays recover."""
MAX_BYTES = 2**28
"""Limit on the bytes that all tapes keep for intermediate results; a step that needs more gains little."""
# Functions that hand values to the host, whose decisions a tape cannot contain. Dispatch modes do not see the first
# two.
_READS = {
    *(torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.item, torch.Tensor.__bool__, torch.Tensor.__int__),
    *(torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.__array__, torch.Tensor.__contains__),
    *(torch.Tensor.nonzero, torch.nonzero, torch.Tensor.equal, torch.equal, torch.Tensor.cpu),
}


def batch_bucket(num_rows: int) -> int:
    """Number of rows of the graph that serves `num_rows`: a power of two or, above 16, halfway between two.

    These are thirteen sizes up to 256 rows; beyond 16 at most a third of the rows is idle.
    """
    power = 1 << (num_rows - 1).bit_length()
    halfway = power // 4 * 3
    return halfway if power > 16 and num_rows <= halfway else power


def context_bucket(context: int, capacity: int) -> int:
    """Returns the context length of the graph that serves rows of up to `context` tokens; at most `capacity`."""
    grains = -(-context // CONTEXT_GRAIN)
    return min(CONTEXT_GRAIN << (grains - 1).bit_length(), capacity)


@dataclass
class CaptureStats:
    """Time and results of recording."""

    captures: int = 0
    seconds: float = 0.0
    played: int = 0
    """Number of steps played from a tape; graphs are not counted."""


class CudaGraphs:
    """Records functions as CUDA graphs of `device` that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self.renew()

    def another(self) -> "CudaGraphs":
        """Returns a recorder for the same device with a memory pool of its own."""
        return CudaGraphs(self._device)

    def renew(self) -> None:
        """Uses a new pool for the next graphs: PyTorch may not reuse a pool once all its graphs are gone."""
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Records the launches of `run` and returns the replay. `run` was called before, so everything is compiled."""
        with LAUNCHES, on_device(self._device):
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as the one that watches collectives, may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        return graph.replay


class StepGraphs:
    """The graphs of one step function by kind (rows, context, whether it draws); each is recorded when first needed.

    Args:
        recorder: `CudaGraphs`, or an object with its interface.
        model: model of the steps.
    """

    def __init__(self, recorder: Any, model: InferenceModel):
        self._recorder, self._model, self.stats = recorder, model, CaptureStats()
        self._replays: dict[tuple[int, int, bool], Callable[[], Any]] = {}

    @property
    def num_recorded(self) -> int:
        """Number of recorded steps."""
        return len(self._replays)

    def has(self, kind: tuple[int, int, bool]) -> bool:
        """Whether a graph of this kind exists."""
        return kind in self._replays

    def record(self, kind: tuple[int, int, bool], run: Callable[[], Any]) -> None:
        """Runs `run` once, to compile and allocate, then records it. It must leave no lasting effect.

        If `run` meets a kernel that does not compile, the step cannot be recorded, and a replay calls `run` itself.
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
        """Starts the step recorded for `kind`; raises KeyError if there is none."""
        self._replays[kind]()


class StepTapes:
    """The tapes of one forward pass, by kind; a step that cannot be recorded runs as usual.

    Args:
        num_layers: number of layers whose attention must be compiled: torch's would read all places of the cache at
            every step.
        stats: counts the steps that are played.
    """

    def __init__(self, num_layers: int, stats: CaptureStats):
        self.num_layers, self.stats = num_layers, stats
        self._tapes: dict[Hashable, _Tape] = {}
        self._uses: Counter[Hashable] = Counter()
        self._can_note, self._num_bytes = True, 0

    def run(self, kind: Hashable, step: Callable[[], torch.Tensor], noted: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Returns the result of `step`, from a tape if there is one.

        Args:
            kind: everything that the operations of the step depend on.
            step: runs the step as usual.
            noted: runs it in the form that is valid for every later step of its kind.
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
    """Records whether the host read values."""

    def __init__(self) -> None:
        super().__init__()
        self.were_seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.were_seen |= func in _READS
        return func(*args, **(kwargs or {}))


class _Tape(TorchDispatchMode):
    """The operations of one step, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.result = torch.empty(0)
        self._plays: list[Callable[[], Any]] = []
        self._kept: list[Any] = []  # all arguments and results, whose memory the operations read and write
        self.num_bytes, self.num_attentions = 0, 0

    def note(self, name: str, play: Callable[[], None]) -> None:
        """Adds the call of a compiled function."""
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
        """Repeats all operations; returns the result tensor with its new values."""
        for play in self._plays:
            play()
        return self.result


@cache
def _is_view(func: Any) -> bool:
    return any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)


def _player(func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> Callable[[], None]:
    """Returns a function that calls an operator again and writes its results to the memory of `outputs`."""

    def play() -> None:
        for kept, new in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
            if kept.data_ptr() != new.data_ptr():
                kept.copy_(new)

    return play


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
