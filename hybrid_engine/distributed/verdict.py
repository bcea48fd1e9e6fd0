"""How a call of the engine ends on all processes: by a verdict, by the loss of a process, or by Ctrl-C.

**Verdict.** Before and after a phase with collectives each process says whether an error stopped it. A process that was
stopped raises its own error. All others raise the same kind of error, which names that process, so a script that
catches one catches the other and its processes stay in step. Only one number is exchanged; the text only after an
error.

**Presence.** A collective that waits for a dead process ends with an error about sockets, or at its timeout. So each
process has a connection to rank 0. Rank 0 tells the others which connection has ended, and which error stopped a
process that is still alive. Nothing is sent during normal operation.

**Ctrl-C.** Python raises KeyboardInterrupt between any two lines, including between the halves of a step and in the
`finally` that would clean up. `holding_interrupts` delays it until a section that must not stop halfway is finished.
Signal handlers run in the main thread only; in other threads there is nothing to delay.
"""

import json
import os
import pickle
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
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
SECONDS_TO_HEAR = 2.0
"""Seconds that a process whose collective has failed waits to hear why."""
LINE_AFTER = 5.0
"""Seconds in one call of the engine, with another process known to be gone, before a line is printed."""
SECONDS_TO_CONNECT = 10.0
LOST = ("Connection closed", "Connection reset", "Broken pipe", "Timed out", "timeout", "Timeout", "NCCL", "aborted")
"""Words in errors of collectives that other processes did not join."""
INSISTS_AFTER = 1.0
"""Seconds after which another Ctrl-C is not delayed; torchrun passes the first one on at once, a second time."""


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


class Presence:
    """The state of the other processes as known here; all processes are connected to rank 0."""

    def __init__(self, rank: int, world_size: int) -> None:
        """Connects; collective."""
        self.rank = rank
        self.phase: tuple[str, float] | None = None
        """The current call of the engine in this process, and its start time."""
        self.group_id = id(dist.group.WORLD)
        self._gone: set[int] = set()
        self._errors: dict[int, str] = {}
        self._heard = threading.Event()
        self._has_told = False
        self._lines: set[str] = set()
        self._selector = selectors.DefaultSelector()
        self._received: dict[socket.socket, bytes] = {}
        self._ranks: dict[socket.socket, int] = {}
        self._connect(world_size)
        threading.Thread(target=self._listen, daemon=True).start()

    def _connect(self, world_size: int) -> None:
        server = socket.create_server(("", 0), backlog=world_size) if self.rank == 0 else None
        host = os.environ.get("MASTER_ADDR") or socket.gethostname()
        place: list[Any] = [None]
        if server is not None:
            place = [(host, server.getsockname()[1], secrets.token_hex(8))]
        dist.broadcast_object_list(place, src=0, group=host_group())
        host, port, self._token = place[0]
        if server is not None:
            self._selector.register(server, selectors.EVENT_READ)
            self._server = server
            return
        try:
            hub = socket.create_connection((host, port), SECONDS_TO_CONNECT)
        except OSError:  # a firewall: errors of collectives stay as they are
            return
        hub.settimeout(None)
        self._add(hub, 0)
        _send(hub, f"{self.rank} {self._token}")

    def _add(self, connection: socket.socket, rank: int) -> None:
        self._received[connection], self._ranks[connection] = b"", rank
        self._selector.register(connection, selectors.EVENT_READ)

    def _listen(self) -> None:
        while True:
            for key, _ in self._selector.select(1.0):
                connection: Any = key.fileobj
                if connection not in self._ranks:
                    self._add(connection.accept()[0], -1)
                else:
                    self._receive(connection)
            self._say_who_is_missing()

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(connection)
            connection.close()
            del self._received[connection]
            rank = self._ranks.pop(connection)
            if rank >= 0:
                self._note({"rank": rank, "gone": True})
            return
        *lines, self._received[connection] = (self._received[connection] + data).split(b"\n")
        for line in lines:
            self._read(connection, line)

    def _read(self, connection: socket.socket, line: bytes) -> None:
        if self._ranks[connection] >= 0:
            self._note(json.loads(line))
            return
        rank, _, token = line.partition(b" ")  # from a new connection, whose rank is not known yet
        if secrets.compare_digest(token, self._token.encode()):
            self._ranks[connection] = int(rank)
        else:
            connection.shutdown(socket.SHUT_RDWR)

    def _note(self, message: dict[str, Any]) -> None:
        """Stores a message about a process; rank 0 forwards it."""
        rank = message["rank"]
        if message.get("gone"):
            self._gone.add(rank)
        elif message["error"] is None:
            self._errors.pop(rank, None)
        else:
            self._errors[rank] = message["error"]
        if self.rank == 0:
            for connection, other in list(self._ranks.items()):
                if other not in (rank, -1):
                    _send(connection, json.dumps(message))
        self._heard.set()

    def tell(self, error: str | None) -> None:
        """Tells all others which error stopped this process; None: it continues."""
        if error is None and not self._has_told:
            return
        self._has_told = error is not None
        message = json.dumps({"rank": self.rank, "error": error})
        for connection, rank in list(self._ranks.items()):
            if rank >= 0:
                _send(connection, message)

    def describe(self) -> str:
        """The missing processes and their errors; empty if none is known."""
        gone = [f"rank {rank} is gone{self._last_words(rank)}" for rank in sorted(self._gone)]
        stopped = [f"rank {rank} stopped at {text}" for rank, text in self._errors.items() if rank not in self._gone]
        return "; ".join(gone + stopped)

    def _last_words(self, rank: int) -> str:
        return f", it stopped at {self._errors[rank]}" if rank in self._errors else ""

    def wait_to_hear(self) -> str:
        """The result of `describe` as soon as it is not empty; empty after `SECONDS_TO_HEAR`."""
        end = time.monotonic() + SECONDS_TO_HEAR
        while not self.describe() and time.monotonic() < end:
            self._heard.clear()
            self._heard.wait(0.1)
        return self.describe()

    def _say_who_is_missing(self) -> None:
        """Prints a line: a collective on a GPU waits until its timeout and does not mention other processes."""
        phase, known = self.phase, self.describe()
        if phase is None or not known or known in self._lines:
            return
        seconds = time.monotonic() - phase[1]
        if seconds >= LINE_AFTER:
            self._lines.add(known)
            line = f"hybrid_engine: rank {self.rank} has been in {phase[0]} for {seconds:.0f} s; {known}"
            print(line, file=sys.stderr, flush=True)


def _send(connection: socket.socket, message: str) -> None:
    with suppress(OSError), _sending:  # the end of a connection is noticed by its reader
        connection.sendall(message.encode() + b"\n")


_sending = threading.Lock()
# One for the process group of this process, of which there is also one.
_presence: Presence | None = None


def watch_processes() -> None:
    """Connects the processes of a process group, once; collective."""
    global _presence
    if _presence is None or _presence.group_id != id(dist.group.WORLD):
        _presence = Presence(dist.get_rank(), dist.get_world_size())


@contextmanager
def naming_who_left(phase: str) -> Iterator[None]:
    """Wraps a call of the engine, named `phase`, and tells the other processes about an error in it.

    Raises:
        RuntimeError: a collective failed because a process is gone or was stopped; the message names it.
    """
    presence = _presence
    if presence is None or presence.phase is not None:
        yield
        return
    presence.tell(None)
    presence.phase = phase, time.monotonic()
    try:
        yield
    except BaseException as error:
        if isinstance(error, RuntimeError) and any(words in str(error) for words in LOST):
            known = presence.wait_to_hear()
            if known:
                raise RuntimeError(f"{phase}: {known}; start the processes again ({error})") from error
        presence.tell(f"{phase}: {type(error).__name__}: {error}"[:500])
        raise
    finally:
        presence.phase = None


class HeldInterrupts:
    """A Ctrl-C that came inside `holding_interrupts()` and is delayed until its end."""

    def __init__(self) -> None:
        self._previous: Any = None
        self._since: float | None = None

    def begin(self) -> None:
        """Delays Ctrl-C from here on, if the handler is one of Python's."""
        if threading.current_thread() is not threading.main_thread():
            return
        previous = signal.getsignal(signal.SIGINT)
        if callable(previous):
            self._previous = previous
            signal.signal(signal.SIGINT, self._hold)

    def end(self) -> None:
        """Stops delaying Ctrl-C and raises one that was delayed."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self.pass_on()

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Inside, Ctrl-C is raised at once."""
        self.pass_on()
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
        try:
            yield
        finally:
            if self._previous is not None:
                signal.signal(signal.SIGINT, self._hold)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since is not None and now - self._since >= INSISTS_AFTER:
            self.pass_on()
        elif self._since is None:
            self._since = now

    def pass_on(self) -> None:
        """Raises the delayed Ctrl-C, if there is one."""
        if self._since is not None:
            self._since = None
            self._previous(signal.SIGINT, None)


@contextmanager
def holding_interrupts() -> Iterator[HeldInterrupts]:
    """Delays Ctrl-C inside to the end of the block; one repeated `INSISTS_AFTER` seconds later is raised at once."""
    held = HeldInterrupts()
    held.begin()
    try:
        yield held
    finally:
        held.end()


@contextmanager
def restoring_modes() -> Iterator[None]:
    """After an error inside, restores whether gradients are enabled, and the nesting of autocast.

    PyTorch's context managers restore their mode in Python, where Ctrl-C may come first.
    """
    is_grad_enabled, level = torch.is_grad_enabled(), _autocast_level()
    try:
        yield
    except BaseException:
        torch.set_grad_enabled(is_grad_enabled)
        while _autocast_level() > level:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        raise


def _autocast_level() -> int:
    """Number of open autocast blocks; the weights that they cast are kept until it is 0."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())
