"""One verdict of all processes on a phase: if one of them cannot continue, no other continues and waits for it.

Before and after a phase with collectives each process says whether an error stopped it. A process that was stopped
raises its own error. All others raise the same kind of error, which names that process, so a script that catches one
catches the other and its processes stay in step. Only one number is exchanged; the text only after an error.
"""

import pickle
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hybrid_engine.distributed.groups import host_group

Result = TypeVar("Result")
_MARKS = (0x4879627269, -0x4879627269)
"""Sent with the numbers of a verdict, to detect that another process is in a different collective."""
OUT_OF_MEMORY = (
    "CUDA error: out of memory",  # cudaErrorMemoryAllocation, such as from instantiating a graph
    "CUDA_ERROR_OUT_OF_MEMORY",
    "Triton Error [CUDA]: out of memory",
    "Cuda failure 2 'out of memory'",  # NCCL, in the last error of ncclUnhandledCudaError
    "Cuda failure 'out of memory'",  # older versions of NCCL
    "_STATUS_ALLOC_FAILED",  # cuBLAS, cuDNN, cuSOLVER, cuSPARSE
    "DEVICE_ALLOCATION_FAILED",  # cuDNN 9
    "DefaultCPUAllocator: can't allocate memory",
)
"""Text of errors that are not a torch.OutOfMemoryError and mean the same."""
CAPTURE_FAILED = ("previous error during capture", "cudaErrorStreamCapture", "stream is capturing", "capture_end")
"""Text of torch's errors where the capture of a CUDA graph ends after an error inside of it."""


class LostError(RuntimeError):
    """No verdict can be exchanged any more: a process is gone, or this one stopped where another waits for it.

    Each process raises it without a collective, and the others find out when its process ends.
    """


class FollowedError(RuntimeError):
    """Another process stopped in the middle, which ended a collective of this one; a verdict gives the cause."""


@dataclass(frozen=True, kw_only=True)
class ErrorNotice:
    """An error in the form that is sent to other processes."""

    kind: type[BaseException]
    """The class that the others raise: the error's own, or a base class that can be built from text."""
    text: str
    errno: int | None = None
    """The number of an OSError; None of other errors."""

    def raised_on(self, rank: int) -> BaseException:
        """The error of another process, `rank`, to raise here."""
        text = f"rank {rank}: {self.text}"
        return self.kind(self.errno, text) if self.errno is not None else self.kind(text)


def describe_error(error: BaseException) -> ErrorNotice:
    """The form of `error` that is sent to other processes."""
    if isinstance(error, OSError) and error.errno is not None:
        where = "" if error.filename is None else f": {error.filename!r}"
        return ErrorNotice(kind=OSError, text=f"{error.strerror}{where}", errno=error.errno)
    is_memory = is_out_of_memory(error)
    kind = torch.OutOfMemoryError if is_memory else next(k for k in type(error).__mro__ if _is_made_of_text(k))
    text = str(error)
    if kind is not type(error) or not text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return ErrorNotice(kind=kind, text=text)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's memory, or the CPU's for tensors, was not enough.

    PyTorch raises an OutOfMemoryError if its own allocator fails. Libraries that allocate memory themselves, the driver
    and a CUDA graph's capture raise other RuntimeErrors, which only their text identifies. The end of a failed capture
    raises another error, with the cause in its context.
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
    """Clears the frames of `error` and of the errors in its context: they hold the tensors that filled the memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _is_made_of_text(kind: type) -> bool:
    """Whether other processes can build this error class from text, and its text is what it was built from."""
    try:
        return pickle.loads(pickle.dumps(kind)) is kind and str(kind("text")) == "text"
    except Exception:
        return False


def attempt(action: Callable[[], Result]) -> tuple[Result | None, BaseException | None]:
    """The result of `action` and None, or None and its error. Ctrl-C counts as an error.

    A process that Ctrl-C ends alone would leave the others waiting.
    """
    try:
        return action(), None
    except BaseException as error:
        return None, error


@dataclass(frozen=True, kw_only=True)
class Partners:
    """The processes that go through the same phases; with one process every method returns at once."""

    size: int = 1
    rank: int = 0
    """The index of this process among them."""
    group: dist.ProcessGroup | None = None
    """None is the group of all processes."""

    def agree(self, action: Callable[[], Result]) -> Result:
        """Runs `action` on each process and returns its result there; an error on one is raised on all; collective.

        `action` either contains no collective, or fails on all processes alike.
        """
        if self.size == 1:
            return action()
        result, error = attempt(action)
        self.raise_together(error)
        return result  # type: ignore[return-value]

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """`agree` as a context: an error inside on one process is raised on all; collective at the end."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as failure:
            if self.size == 1:
                raise
            error = failure
        self.raise_together(error)

    def raise_together(self, error: BaseException | None) -> None:
        """Raises this process's `error`, or another process's; does nothing if there is none; collective.

        A LostError is raised at once.
        """
        if isinstance(error, LostError):
            raise error
        if self.highest([int(error is not None)]) == [1] or error is not None:
            raise self.exchange_errors(error)

    def tell(self, problem: ErrorNotice) -> None:
        """Reports in a verdict of the others what stopped this process, which has raised it already; collective."""
        self.highest([1])
        self.exchange(problem)

    def exchange_errors(self, error: BaseException | None) -> BaseException:
        """This process's `error`, or the first one of another process; call it only if one has an error; collective."""
        problem = None if error is None or isinstance(error, FollowedError) else describe_error(error)
        found = self.first_error(error, self.exchange(problem))
        return found or FollowedError("another process stopped")

    def raise_first(self, error: BaseException | None, problems: list[ErrorNotice | None]) -> None:
        """Raises this process's `error`, or the first of all processes' `problems`; local."""
        found = self.first_error(error, problems)
        if found is not None:
            raise found

    def first_error(self, error: BaseException | None, problems: list[ErrorNotice | None]) -> BaseException | None:
        """This process's `error`, or the first of all processes' `problems` as an error to raise here; local.

        A FollowedError gives way to the problem that caused it. An out-of-memory error, after which processes may start
        again with less, gives way to any other error: either all processes have one, or none.
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

        Over gloo, so that a busy GPU does not delay any process.

        Raises:
            RuntimeError: another process is in a different collective.
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
        """The `value` of every process, in the order of ranks; collective."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=host_group(self.group))
        return values


def everyone() -> Partners:
    """All processes of the run; this process alone if there is no process group."""
    return Partners(size=dist.get_world_size(), rank=dist.get_rank()) if dist.is_initialized() else Partners()


def agree(action: Callable[[], Result]) -> Result:
    """Runs `action` on all processes; an error on one is raised on all; collective. See `Partners.agree`."""
    return everyone().agree(action)
