"""Recorders of decode steps: as CUDA graphs on a GPU, as tapes of operator calls on a CPU, or none. One interface.

A `DecodeStep` runs through a `StepRecorder`; `DecodeSteps` chooses which.

A CPU step of a small model makes some 300 Python and PyTorch calls around the 40 that take time. A tape stores the
calls of compiled functions and of torch's operators with their arguments, once for each number of rows. Playing it
repeats the calls on the same memory: like a CUDA graph, a step reads and writes the buffers that `DecodeStep` keeps,
and the tape keeps the intermediate results.

Weights and workspace must stay at their addresses while a graph or tape is used.
"""

import gc
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybrid_engine.containers.device import LAUNCHES, on_device
from hybrid_engine.containers.layer import InferenceLayer
from hybrid_engine.generation.core import CaptureStats
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


class FunctionRecorder(Protocol):
    """Records functions of tensors with fixed addresses; `CudaGraphs` is one."""

    def capture(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Returns a function that repeats the operations of `run`."""

    def another(self) -> "FunctionRecorder":
        """Returns a recorder with memory of its own."""

    def renew(self) -> None:
        """Called once all recordings are gone."""


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
        with LAUNCHES, on_device(self._device), _without_collection():
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as the one that watches collectives, may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        return graph.replay


@contextmanager
def _without_collection() -> Iterator[None]:
    """Inside, Python collects no garbage.

    If it frees a dropped graph or a kernel's module, the driver refuses that call and invalidates the capture.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


class FedRows(NamedTuple):
    """The rows that a step feeds, read from its tables."""

    slots: torch.Tensor
    """`[S]` int64."""
    numbers: torch.Tensor
    """`[6, S]` int64: their columns of the tables."""


Layers = Callable[[], Iterable[InferenceLayer]]
"""Returns one pass over a model's layers."""


class StepTables(Protocol):
    """The tables that hold the rows of a step."""

    num_slots: int

    def cleared(self) -> AbstractContextManager[None]:
        """Inside, no row belongs to a sequence."""


class RecordableStep(Protocol):
    """The parts of a decode step that a recorder composes; `DecodeStep` has them.

    Everything that they read has a fixed address: tables, weights and KV workspace.
    """

    @property
    def tables(self) -> StepTables:
        """The rows' tables."""

    @property
    def capacity(self) -> int:
        """Number of tokens of the longest sequence that the block tables hold."""

    @property
    def can_be_recorded(self) -> bool:
        """See `InferenceModel.can_be_recorded`."""

    @property
    def position_tables(self) -> tuple[int, ...]:
        """Identities of the model's position tables, which may be built again."""

    def feed(self, num_rows: int) -> FedRows:
        """Reads the first `num_rows` rows of the tables."""

    def is_identity(self, context: int) -> bool:
        """Whether each row's only block has the number of the row, for rows of up to `context` tokens."""

    def forward(self, rows: FedRows, context: int, is_identity: bool, layers: Layers) -> torch.Tensor:
        """Returns the logits `[S, V]` after the newest tokens of `rows`, which have up to `context` tokens."""

    def finish(self, rows: FedRows, logits: torch.Tensor, draws: bool) -> None:
        """Draws the rows' next tokens by the step's own options if `draws`, and advances the rows."""


class StepRecorder(Protocol):
    """Runs decode steps: as they are written, from a tape, or as a CUDA graph."""

    stats: CaptureStats

    @property
    def num_recorded(self) -> int:
        """Number of recorded steps."""

    def begin_rollout(self) -> CaptureStats:
        """Returns the statistics of a new rollout, which the recorder fills from now on."""

    def run(self, step: RecordableStep, num_rows: int, context: int, draws: bool, layers: Layers) -> torch.Tensor:
        """Runs one step; returns its logits `[num_rows or more, V]`, valid until the next step.

        Args:
            num_rows: number of rows to feed.
            context: number of tokens of the longest row.
            draws: whether the step's own options draw the tokens; otherwise its caller does, from the logits.
        """

    def prepare(self, step: RecordableStep, rows: Iterable[int], contexts: Iterable[int], layers: Layers) -> None:
        """Records the steps for these numbers of rows and context lengths in advance, if steps are recorded so."""


class PlainSteps:
    """A StepRecorder that records nothing: every operation of a step is launched as usual."""

    num_recorded = 0

    def __init__(self) -> None:
        self.stats = CaptureStats()

    def begin_rollout(self) -> CaptureStats:
        """Returns new statistics. See `StepRecorder`."""
        self.stats = CaptureStats()
        return self.stats

    def run(self, step: RecordableStep, num_rows: int, context: int, draws: bool, layers: Layers) -> torch.Tensor:
        """Runs one step. See `StepRecorder`."""
        rows = step.feed(num_rows)
        logits = step.forward(rows, context, step.is_identity(context), layers)
        step.finish(rows, logits, draws)
        return logits

    def prepare(self, step: RecordableStep, rows: Iterable[int], contexts: Iterable[int], layers: Layers) -> None:
        """Does nothing. See `StepRecorder`."""


class StepGraphs:
    """A StepRecorder of CUDA graphs, by kind (rows, context, whether it draws); each is recorded when first needed.

    Args:
        recorder: records a function.
    """

    def __init__(self, recorder: "FunctionRecorder"):
        self._recorder, self.stats = recorder, CaptureStats()
        self._replays: dict[tuple[int, int, bool], Callable[[], Any]] = {}
        self._logits = torch.empty(0)  # [C, V]; what graphs without a draw write

    @property
    def num_recorded(self) -> int:
        """Number of recorded steps."""
        return len(self._replays)

    def begin_rollout(self) -> CaptureStats:
        """Returns new statistics. See `StepRecorder`."""
        self.stats = CaptureStats()
        return self.stats

    def run(self, step: RecordableStep, num_rows: int, context: int, draws: bool, layers: Layers) -> torch.Tensor:
        """Replays the graph of this kind of step, which is recorded before if there is none. See `StepRecorder`."""
        kind = (batch_bucket(num_rows), context_bucket(context, step.capacity), draws)
        if kind not in self._replays:
            self._record(step, kind, layers)
        self._replays[kind]()
        return self._logits

    def prepare(self, step: RecordableStep, rows: Iterable[int], contexts: Iterable[int], layers: Layers) -> None:
        """Records the steps that draw and have no graph yet. See `StepRecorder`."""
        reaches = {context_bucket(context, step.capacity) for context in contexts}
        for num_rows in sorted({batch_bucket(number) for number in rows}):
            for reach in sorted(reaches):
                if (num_rows, reach, True) not in self._replays:
                    self._record(step, (num_rows, reach, True), layers)

    def _record(self, step: RecordableStep, kind: tuple[int, int, bool], layers: Layers) -> None:
        """Runs the step once on empty tables, to compile and allocate, then records it.

        If it meets a kernel that does not compile, the step cannot be recorded, and its replay runs it.
        """
        start = time.perf_counter()
        run = partial(self._run, step, *kind, layers)
        with step.tables.cleared():
            run()
            if not step.can_be_recorded:
                self._replays[kind] = run
                return
            self._replays[kind] = self._recorder.capture(run)
        self.stats.captures += 1
        self.stats.seconds += time.perf_counter() - start

    def _run(self, step: RecordableStep, num_rows: int, context: int, draws: bool, layers: Layers) -> None:
        """The function that a graph records: nothing here may depend on a number that only the device knows."""
        rows = step.feed(num_rows)
        logits = step.forward(rows, context, False, layers)
        if not draws:
            if len(self._logits) == 0:
                self._logits = logits.new_empty(step.tables.num_slots, logits.shape[1])
            self._logits[:num_rows] = logits
        step.finish(rows, logits, draws)


class StepTapes:
    """A StepRecorder that plays forward passes from tapes; a step that cannot be recorded runs as usual.

    Args:
        num_attentions: number of layers whose attention must be compiled: torch's would read all places of the cache at
            every step.
    """

    def __init__(self, num_attentions: int):
        self.num_attentions, self.stats = num_attentions, CaptureStats()
        self._tapes: dict[Hashable, _Tape] = {}
        self._uses: Counter[Hashable] = Counter()
        self._can_note, self._num_bytes = True, 0

    @property
    def num_recorded(self) -> int:
        """Number of recorded passes."""
        return len(self._tapes)

    def begin_rollout(self) -> CaptureStats:
        """Returns new statistics. See `StepRecorder`."""
        self.stats = CaptureStats()
        return self.stats

    def run(self, step: RecordableStep, num_rows: int, context: int, draws: bool, layers: Layers) -> torch.Tensor:
        """Runs one step, with its forward pass from a tape if there is one. See `StepRecorder`.

        A tape is valid for any rows and lengths: it attends over the whole block tables.
        """
        rows = step.feed(num_rows)
        logits = self.play(
            (num_rows, *step.position_tables),
            lambda: step.forward(rows, context, step.is_identity(context), layers),
            lambda: step.forward(step.feed(num_rows), step.capacity, False, layers),
        )
        step.finish(rows, logits, draws)
        return logits

    def prepare(self, step: RecordableStep, rows: Iterable[int], contexts: Iterable[int], layers: Layers) -> None:
        """Does nothing: a tape is recorded once its step has been used often. See `StepRecorder`."""

    def play(self, kind: Hashable, step: Callable[[], torch.Tensor], noted: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Returns the result of `step`, a forward pass, from a tape if there is one.

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
        is_whole = tape.num_attentions == self.num_attentions and not reads.were_seen
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
