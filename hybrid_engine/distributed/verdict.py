"""One verdict of all processes on a phase: where one of them cannot go on, none goes on to wait for it.

Before and after a phase with collectives each process says whether an error stopped it. One that was stopped raises its
own error, all others the same kind of error, which names that process: a script that catches the one catches the other,
and its processes are in step again. Of that travels one number, and the words only where something is wrong.
"""

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hybrid_engine.distributed.groups import host_group

Result = TypeVar("Result")
_MARKS = (0x4879627269, -0x4879627269)
"""Beside the numbers of a verdict, which must not be taken for those of another collective."""
OUT_OF_MEMORY = (
    "CUDA error: out of memory",  # cudaErrorMemoryAllocation, as of a graph that is instantiated
    "CUDA_ERROR_OUT_OF_MEMORY",
    "Triton Error [CUDA]: out of memory",
    "Cuda failure 2 'out of memory'",  # NCCL, in the last error of ncclUnhandledCudaError
    "Cuda failure 'out of memory'",  # older ones
    "_STATUS_ALLOC_FAILED",  # cuBLAS, cuDNN, cuSOLVER, cuSPARSE
    "DEVICE_ALLOCATION_FAILED",  # cuDNN 9
    "DefaultCPUAllocator: can't allocate memory",
)
"""What errors say that are no torch.OutOfMemoryError and mean the same."""
CAPTURE_FAILED = ("previous error during capture", "cudaErrorStreamCapture", "stream is capturing", "capture_end")
"""What torch says where the capture of a CUDA graph ends after an error inside of it."""


class LostError(RuntimeError):
    """No verdict can be exchanged any more: a process is gone, or this one stopped where another waits for it.

    Each process raises this by itself, and the others learn of it when its process ends.
    """


class FollowedError(RuntimeError):
    """Another process stopped in the middle, which ended a collective of this one; a verdict says why it did."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """An error, as it travels to other processes."""

    kind: type[BaseException]
    """The class that the others raise: the error's own, or a base of it that text makes."""
    text: str
    errno: int | None = None
    """The number of an OSError; None of other errors."""

    def raised_on(self, rank: int) -> BaseException:
        """The error of another process, `rank`, to raise here."""
        text = f"rank {rank}: {self.text}"
        return self.kind(self.errno, text) if self.errno is not None else self.kind(text)


def describe_error(error: BaseException) -> Problem:
    """What another process is told of `error`."""
    if isinstance(error, OSError) and error.errno is not None:
        where = "" if error.filename is None else f": {error.filename!r}"
        return Problem(kind=OSError, text=f"{error.strerror}{where}", errno=error.errno)
    is_memory = is_out_of_memory(error)
    kind = torch.OutOfMemoryError if is_memory else next(k for k in type(error).__mro__ if _is_made_of_text(k))
    text = str(error)
    if kind is not type(error) or not text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return Problem(kind=kind, text=text)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's memory, or the CPU's for tensors, was not enough.

    PyTorch raises an OutOfMemoryError where its own allocator ends. Libraries that allocate for themselves, the driver
    and a CUDA graph's capture come as other RuntimeErrors, known by their words alone; the end of a failed capture
    raises an error of its own, in whose context the cause is.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    if any(words in text for words in OUT_OF_MEMORY):
        return True
    context = error.__cause__ or error.__context__
    return context is not None and any(words in text for words in CAPTURE_FAILED) and is_out_of_memory(context)


def forget_frames(error: BaseException | None) -> None:
    """Clears the frames of `error` and of those in whose context it was raised: they hold what filled the memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _is_made_of_text(kind: type) -> bool:
    """Whether other processes can build this class of errors, and it says what it is built from."""
    try:
        return pickle.loads(pickle.dumps(kind)) is kind and str(kind("text")) == "text"
    except Exception:
        return False


def attempt(action: Callable[[], Result]) -> tuple[Result | None, BaseException | None]:
    """The result of `action` and None, or None and its error; Ctrl-C is an error like any other.

    A process that Ctrl-C takes away alone would leave the others waiting.
    """
    try:
        return action(), None
    except BaseException as error:
        return None, error


@dataclass(frozen=True, kw_only=True)
class Partners:
    """The processes that go through the same phases; alone, every method answers at once."""

    size: int = 1
    rank: int = 0
    """This process's place among them."""
    group: dist.ProcessGroup | None = None
    """None is that of all processes."""

    def agree(self, action: Callable[[], Result]) -> Result:
        """Runs `action` on each process and gives each its result; an error of one is raised on all; collective.

        `action` either meets the other processes nowhere, or fails on all of them alike.
        """
        if self.size == 1:
            return action()
        result, error = attempt(action)
        self.raise_together(error)
        return result  # type: ignore[return-value]

    def raise_together(self, error: BaseException | None) -> None:
        """Raises `error`, this process's, or another one's; does nothing where there is none; collective.

        A LostError is raised at once.
        """
        if isinstance(error, LostError):
            raise error
        if self.highest([int(error is not None)]) == [1] or error is not None:
            raise self.exchange_errors(error)

    def tell(self, problem: Problem) -> None:
        """Says in a verdict of the others what stopped this process, which has raised it already; collective."""
        self.highest([1])
        self.exchange(problem)

    def exchange_errors(self, error: BaseException | None) -> BaseException:
        """`error`, this process's, or the first of the others', where it is known that one has one; collective."""
        problem = None if error is None or isinstance(error, FollowedError) else describe_error(error)
        found = self.first_error(error, self.exchange(problem))
        return found or FollowedError("another process stopped")

    def raise_first(self, error: BaseException | None, problems: list[Problem | None]) -> None:
        """Raises `error`, this process's, or the first of all processes' `problems`; local."""
        found = self.first_error(error, problems)
        if found is not None:
            raise found

    def first_error(self, error: BaseException | None, problems: list[Problem | None]) -> BaseException | None:
        """`error`, this process's, or the first of all processes' `problems` as an error to raise here; local.

        A FollowedError gives way to the problem that it follows from. An end of memory, after which processes may
        begin again with less, gives way to any other error: all have one, or none.
        """
        found = [(rank, problem) for rank, problem in enumerate(problems) if problem is not None]
        others = [(rank, problem) for rank, problem in found if not issubclass(problem.kind, torch.OutOfMemoryError)]
        gives_way = isinstance(error, FollowedError) or (error is not None and is_out_of_memory(error) and bool(others))
        if not found or (error is not None and not gives_way):
            return error
        rank, problem = (others or found)[0]
        return problem.raised_on(rank if self.group is None else dist.get_global_rank(self.group, rank))

    def highest(self, numbers: list[int]) -> list[int]:
        """The highest of each of `numbers` over all processes; collective.

        Over gloo: a GPU that is still at work delays nobody.

        Raises:
            RuntimeError: another process is somewhere else.
        """
        if self.size == 1:
            return numbers
        tensor = torch.tensor([*numbers, *_MARKS], dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=host_group(self.group))
        *found, mark, other = tensor.tolist()
        if (mark, other) != _MARKS:
            raise RuntimeError(f"rank {dist.get_rank()}: the processes are in different collectives; start them again")
        return found

    def exchange(self, value: Result) -> list[Result]:
        """`value` of every process, in their order; collective."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=host_group(self.group))
        return values


def everyone() -> Partners:
    """All processes of the run; this one where there is no process group."""
    return Partners(size=dist.get_world_size(), rank=dist.get_rank()) if dist.is_initialized() else Partners()


def agree(action: Callable[[], Result]) -> Result:
    """Runs `action` on all processes, and raises an error of one on all; collective. See `Partners.agree`."""
    return everyone().agree(action)
