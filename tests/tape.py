"""A CUDA graph's rules on a CPU: what was launched once is launched again, on the same addresses and numbers.

`TapeRecorder.capture` notes every operator with its arguments and results; a replay runs the operators again
on those very tensors and writes into those very results. Python does not run again, so whatever the host
computed is frozen, and reading a tensor on the host while recording is an error, as it is on a GPU.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST_READS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal")


class _Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in HOST_READS:
            raise RuntimeError(f"{name} reads the device inside a graph")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


def is_view(func):
    """Whether an operator only makes a view, which no device launches anything for."""
    return any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)


class TapeRecorder:
    """Stands for CudaGraphs."""

    def __init__(self):
        self.tapes = []

    def capture(self, run):
        with _Tape() as tape:
            run()
        self.tapes.append(tape.calls)

        def replay():
            for func, args, kwargs, result in tape.calls:
                if is_view(func):
                    continue  # the recorded view still points where it pointed
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay
