"""Raises an error inside a pass of a unit on all its processes within seconds.

If a plan changes layouts, the processes of a unit communicate in the middle of forward and backward passes. A process
with an error would not reach the next collective, and the others would wait until the time limit. Therefore it writes
its error into the store of the process group. If the others do not stop too, as they do for bad input, which all of
them have, it closes its connections in the unit. The collectives that the others wait in then fail, and they raise its
error. The unit's processes are then at different points and must be restarted.

Closing connections interrupts waiting on gloo. NCCL collectives run on the device and do not notice it: there the wait
ends at the time limit.
"""

import time
import traceback
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from hybrid_engine.distributed.groups import close_groups, default_store
from hybrid_engine.distributed.presence import LOST
from hybrid_engine.distributed.verdict import Partners
from hybrid_engine.extensions.parallelize.graph.kept_state import PLAIN
from hybrid_engine.extensions.parallelize.lowering.meshes import Meshes

SECONDS_FOR_OTHERS = 3.0
"""Seconds that a stopped process waits for the others to stop too."""
LONGEST_WORDS = 500
# All processes of a unit make their modules in the same order.
_numbers = count()


class JointPasses:
    """The passes of one module over the processes of a unit."""

    def __init__(self, meshes: Meshes):
        assert meshes.unit is not None, f"{meshes=}"
        self._meshes, self._lease = [meshes.unit], meshes.lease
        self._ranks: list[int] = meshes.unit.mesh.flatten().tolist()
        self._key = f"hybrid_engine/passes/{next(_numbers)}"
        self._num_errors = 0
        self._is_inside = False
        self._is_parted = False

    def adopt(self, mesh: DeviceMesh) -> None:
        """Adds another mesh of the same processes. DTensor may still use the groups of earlier, equal meshes."""
        self._meshes.append(mesh)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context around a pass or a part of one: an error inside is raised on all processes of the unit.

        Raises:
            RuntimeError: another process stopped, which is named; or one of them did in an earlier pass.
        """
        if self._is_inside:
            yield
            return
        if self._is_parted:
            raise RuntimeError("an error of one process has parted those that compute this module; start them again")
        self._is_inside = True
        try:
            yield
        except BaseException as error:
            self._stop(error)
            raise
        finally:
            self._is_inside = False

    def _stop(self, error: BaseException) -> None:
        """Tells the other processes about the error, and closes the connections if they do not stop too."""
        lost = isinstance(error, RuntimeError) and any(words in str(error) for words in LOST)
        number, self._num_errors = self._num_errors, self._num_errors + 1
        store = dist.PrefixStore(f"{self._key}/{number}", default_store())
        me = dist.get_rank()
        store.set(f"lost {me}" if lost else str(me), f"{type(error).__name__}: {error}"[:LONGEST_WORDS])
        others = [str(rank) for rank in self._ranks if rank != me]
        end = time.monotonic() + SECONDS_FOR_OTHERS
        while not (came := [rank for rank in others if store.check([rank])]) or (len(came) < len(others) and not lost):
            if time.monotonic() > end:
                break
            time.sleep(0.02)
        if len(came) == len(others) and not lost:
            return
        self._is_parted = True
        words = [f"rank {rank}: {store.get(rank).decode()}" for rank in came]
        silent = [rank for rank in others if rank not in came and not store.check([f"lost {rank}"])]
        words += [f"rank {rank} is gone, or never came" for rank in silent]
        if self._lease is not None:
            self._lease.drop()
        traceback.clear_frames(error.__traceback__)
        for mesh in self._meshes:
            close_groups(mesh)
        if lost and words:
            raise RuntimeError(
                f"{'; '.join(words)}; the {len(self._ranks)} processes of a unit are in different places now: "
                "start them again"
            ) from error


def check_same_input(arguments: Any, module: nn.Module, groups: Sequence[dist.ProcessGroup]) -> None:
    """Raises ValueError on all processes that compute one pass of `module` unless they begin it alike; collective.

    `groups` are those along each axis of these processes. Different shapes, numbers among `arguments` or modes would
    make the processes' collectives or ops differ in the middle of the pass. The values of tensors are not compared.
    """
    partners = [Partners(size=dist.get_world_size(g), rank=dist.get_rank(g), group=g) for g in groups]
    own = _beginning(arguments, module)
    number = zlib.crc32(repr(own).encode())
    highest = [number, -number]
    for along_axis in partners:
        highest = along_axis.highest(highest)
    if highest[0] == -highest[1]:
        return
    given = [own]
    for along_axis in partners:
        given = [entry for entries in along_axis.exchange(given) for entry in entries]
    what, values = next((what, said) for what in own if len(said := dict.fromkeys(entry[what] for entry in given)) > 1)
    raise ValueError(
        f"the processes of a unit are given {what} {' and '.join(values)}; give all of a unit the same input"
    )


def _beginning(arguments: Any, module: nn.Module) -> dict[str, str]:
    """A description of the state that a pass begins with."""
    leaves = pytree.tree_leaves(arguments)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    num_training, is_recorded = sum(part.training for part in module.modules()), torch.is_grad_enabled()
    return {
        "tensors of shapes": str([list(tensor.shape) for tensor in tensors]),
        "tensors of dtypes": str([str(tensor.dtype) for tensor in tensors]),
        "other arguments": str([leaf for leaf in leaves if leaf is None or type(leaf) in PLAIN]),
        "modes": f"({num_training} parts in training, gradients {'on' if is_recorded else 'off'})",
    }
