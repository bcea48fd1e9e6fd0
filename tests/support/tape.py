"""A CUDA graph's rules on a CPU: what was launched once is launched again, on the same addresses and numbers.

`TapeRecorder.capture` notes every operator with its arguments and results; a replay runs the operators again
on those very tensors and writes into those very results. Python does not run again, so whatever the host
computed is frozen, and reading a tensor on the host while recording is an error, as it is on a GPU. So is making one of
the host's numbers (`torch.tensor(...)`, `tensor[index] = True`): a GPU would wait for the copy. Once all recordings
that share a pool are gone, the pool cannot be used again (CUDACachingAllocator.cpp: `use_count > 0`).
"""

import weakref
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from hybrid_engine.ops.dispatch import Launch

HOST_WRITES = ("lift_fresh",)
HOST_READS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal")


class _Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in HOST_READS:
            raise RuntimeError(f"{name} reads the device inside a graph")
        if name in HOST_WRITES:
            raise RuntimeError(f"{name} copies from the host inside a graph")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


def is_allocation(func):
    """Whether an operator only takes memory."""
    return func.overloadpacket.__name__.startswith(("empty", "new_empty"))


def is_view(func):
    """Whether an operator only makes a view, which no device launches anything for."""
    return any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)


@contextmanager
def kernels_noted_by(note, are_run=True):
    """Calls `note(run)` for every kernel that is started inside; what the interpreter does in it goes unseen."""
    start = Launch.__call__

    def noted(launch, *args):
        def run():
            with _disable_current_modes():
                start(launch, *args)

        if are_run:
            run()
        note(run)

    with patch.object(Launch, "__call__", noted):
        yield


class _Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not (is_view(func) or is_allocation(func) or name in ("_unsafe_view", "detach", "alias")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def count_launches(run, are_run=True):
    """Names of what `run` starts on a device: operators that are no views or allocations, and "kernel"s.

    `are_run` False leaves the kernels out, and what they would have written as it was.
    """
    with _Count() as count, kernels_noted_by(lambda _: count.names.append("kernel"), are_run):
        run()
    return count.names


class TapeRecorder:
    """Stands for CudaGraphs."""

    def __init__(self, device=None):
        self.tapes = []
        self.renew()

    def another(self):
        return type(self)()

    def renew(self):
        self._pool, self._was_used = weakref.WeakSet(), False

    def capture(self, run):
        assert self._pool or not self._was_used, "the pool of graphs that are gone is used again"
        with _Tape() as tape, kernels_noted_by(lambda kernel: tape.calls.append((kernel, (), {}, None))):
            run()
        self.tapes.append(tape.calls)

        def replay():
            for func, args, kwargs, result in tape.calls:
                if hasattr(func, "_schema") and (is_view(func) or is_allocation(func)):
                    continue  # what was made then is still where it was
                again = func(*args, **kwargs)
                if getattr(func, "namespace", None) == "c10d":
                    again[-1].wait()  # a collective; on a GPU the stream waits
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        self._pool.add(replay)
        self._was_used = True
        return replay
