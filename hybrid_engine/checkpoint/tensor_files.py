"""Writes tensors to a folder and reads them back with torch.distributed.checkpoint, sharded or not.

They are read back on another number of processes and at another ZeRO stage. What leaves these functions is a
ValueError, an OSError or what SIGINT raises: torch's own `CheckpointException` is no Exception, and no script catches
it.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from hybrid_engine.checkpoint.causes import find_cause
from hybrid_engine.distributed.interrupts import HeldInterrupts


def write_tensors(tensors: Mapping[str, torch.Tensor], folder: Path, held: HeldInterrupts, is_alone: bool) -> None:
    """Writes `tensors` to `folder`; collective, and an error on one process is raised on all, unless `is_alone`.

    Raises:
        OSError: the disk is full, or the like.
        ValueError: torch cannot write them for another reason.
    """
    with _raising_the_cause(), _without_process_group_warning():
        dcp.save(dict(tensors), storage_writer=_Writer(folder, held), no_dist=is_alone)


def read_tensors(tensors: Mapping[str, torch.Tensor], folder: Path, index: Metadata) -> None:
    """Reads into `tensors`, of each no more than its shard; local.

    Raises:
        OSError: a file cannot be read.
        ValueError: a tensor is missing, of another shape, or damaged.
    """
    with _raising_the_cause(), _without_process_group_warning():
        dcp.load(dict(tensors), storage_reader=_Reader(folder, index), no_dist=True)


class _Writer(dcp.FileSystemWriter):
    """SIGINT is let through while it writes: torch exchanges the errors of this part, and of no other."""

    def __init__(self, folder: Path, held: HeldInterrupts) -> None:
        super().__init__(folder)
        self._held = held

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            with self._held.allowed():
                return super().write_data(plan, planner)
        except BaseException as error:
            # Here, before the error travels to other processes without its context.
            raise find_cause(error) from None


class _Reader(dcp.FileSystemReader):
    """Knows the index already, which torch would unpickle."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index


@contextmanager
def _raising_the_cause() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        cause = find_cause(error)
        if cause is error:
            raise
        raise cause from None


@contextmanager
def _without_process_group_warning() -> Iterator[None]:
    """Being a single process is no accident that the user should be warned of at every save."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
