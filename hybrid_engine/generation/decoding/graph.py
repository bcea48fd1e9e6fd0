"""Decode steps recorded once per batch bucket and replayed: on a GPU, one launch instead of hundreds.

A graph reads and writes fixed addresses. Whoever builds the steps keeps their buffers in place, and uses a step only
where every address that it reads (a weight, the KV workspace) is what it was.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_engine.containers.model import InferenceModel
from hybrid_engine.containers.streams import LAUNCHES, on_device

# Longest contexts are padded up to this times a power of two, which bounds the idle part of attention's grid.
CONTEXT_GRAIN = 512


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
