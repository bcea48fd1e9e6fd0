"""Runs a command in a folder as a child with limits, and ends every process that it has started.

Between this process and the command stands a supervisor, which is this file run as a program: a subreaper (Linux), so
that processes whose parents end become its own children. It ends all of them when the command ends, when the time is
over, and when this process dies. Elsewhere only the command's process group is ended.

Source: prctl(2), PR_SET_CHILD_SUBREAPER and PR_SET_PDEATHSIG; unshare(2); setrlimit(2).
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

MAX_OUTPUT = 2**16
"""Bytes of a command's output that are kept: its beginning and its end, half of it each."""
SECONDS_TO_END = 10.0
"""Time for the supervisor to end the processes after the time of the command."""
POLL_SECONDS = 0.2
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000


class ChildLimits(NamedTuple):
    """Limits of a command and of every process that it starts."""

    seconds: float
    memory_bytes: int = 0
    """Address space of each process; 0: no limit."""
    file_bytes: int = 0
    """Size of each file that is written; 0: no limit."""
    has_network: bool = True
    """False: no network, not even this machine's own, where the system can (`can_cut_network`)."""


class Ended(NamedTuple):
    """A command that has ended."""

    status: int | None
    """Its exit status, 128 + the number of a signal that ended it; None: its time was over."""
    output: str
    """The beginning and the end of its output and its errors."""
    num_left: int
    """Processes that were still there when it ended, and were ended."""
    seconds: float


def run_child(
    argv: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    limits: ChildLimits,
    stopping: threading.Event | None = None,
) -> Ended:
    """Runs a command in `folder`, without input, with nothing in its environment but `environment`.

    It ends early when `stopping` is set.

    Raises:
        OSError: the command cannot be started.
    """
    began = time.monotonic()
    asked = {"argv": list(argv), "folder": str(folder), "environment": dict(environment), "limits": list(limits)}
    with tempfile.TemporaryFile() as report:
        os.set_inheritable(report.fileno(), True)
        supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(report.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[report.fileno()],
            env={"PATH": os.environ.get("PATH", os.defpath)},
            start_new_session=True,
        )
        assert supervisor.stdin is not None and supervisor.stdout is not None
        try:
            supervisor.stdin.write(json.dumps(asked).encode())
            supervisor.stdin.close()
            deadline = began + limits.seconds + SECONDS_TO_END
            kept = _bounded_output(supervisor, deadline, stopping or threading.Event())
            supervisor.wait(SECONDS_TO_END)
        except BaseException:
            supervisor.terminate()
            raise
        finally:
            supervisor.stdout.close()
            if supervisor.poll() is None:  # stopped by the command, which may send it signals
                supervisor.kill()
                supervisor.wait()
        report.seek(0)
        told = json.loads(report.read() or b"{}")
    if "error" in told:
        raise OSError(told["error"])
    return Ended(told.get("status"), kept, told.get("num_left", 0), time.monotonic() - began)


def _bounded_output(supervisor: "subprocess.Popen[bytes]", deadline: float, stopping: threading.Event) -> str:
    """The output up to its end or the deadline; the middle of a long one is left out."""
    begin, end, total, stream = b"", b"", 0, supervisor.stdout
    assert stream is not None
    while time.monotonic() < deadline:
        if stopping.is_set():
            supervisor.terminate()
        if not select.select([stream], [], [], POLL_SECONDS)[0]:
            continue
        piece = os.read(stream.fileno(), 2**16)
        if not piece:
            break
        total += len(piece)
        room = MAX_OUTPUT // 2 - len(begin)
        begin, piece = begin + piece[:room], piece[room:]
        end = (end + piece)[-MAX_OUTPUT // 2 :]
    left_out = total - len(begin) - len(end)
    middle = f"\n[{left_out} bytes left out]\n".encode() if left_out else b""
    return (begin + middle + end).decode(errors="replace")


def can_cut_network() -> bool:
    """Whether this system lets a child have no network."""
    if not sys.platform.startswith("linux"):
        return False
    probe = f"import sys; sys.argv = ['']; exec(open({__file__!r}).read()); cut_network()"
    return subprocess.run([sys.executable, "-I", "-S", "-c", probe], capture_output=True).returncode == 0


def cut_network() -> None:
    """Moves this process into a network of its own, without an interface; OSError if the system does not allow it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0 and libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def supervise(asked: dict[str, Any], report: int) -> None:
    """Runs the command of `run_child`, ends all processes, and writes how it ended to the file `report`."""
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGTERM, _end_at_once)
    limits = ChildLimits(*asked["limits"])
    try:
        child = subprocess.Popen(
            asked["argv"],
            cwd=asked["folder"],
            env=asked["environment"],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: _limit(limits),
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        os.write(report, json.dumps({"error": f"{asked['argv'][0]!r} cannot be started: {error}"}).encode())
        return
    status: int | None = None
    try:
        status = child.wait(limits.seconds)
        status = 128 - status if status < 0 else status
    except subprocess.TimeoutExpired:
        pass
    num_left = _end_all(child.pid)
    os.write(report, json.dumps({"status": status, "num_left": num_left}).encode())


def _end_at_once(*_: Any) -> None:
    _end_all(0)
    os._exit(128 + signal.SIGTERM)


def _limit(limits: ChildLimits) -> None:
    for kind, most in ((resource.RLIMIT_AS, limits.memory_bytes), (resource.RLIMIT_FSIZE, limits.file_bytes)):
        if most:
            resource.setrlimit(kind, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not limits.has_network:
        with contextlib.suppress(OSError):  # the run has said so at its start
            cut_network()


def _end_all(group: int) -> int:
    """Ends all descendants, however often they fork meanwhile; returns how many there were at first."""
    if group:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    first = None
    while True:
        there = _descendants(os.getpid())
        first = len(there) if first is None else first
        for process in there:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return first
        if not there:
            return first
        time.sleep(0.005)


def _descendants(process: int) -> list[int]:
    """The running descendants of a process, those of the highest generation first; none where there is no /proc."""
    found: list[int] = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += map(int, task.read_text().split())
    running = [child for child in found if not _is_zombie(child)]
    return running + [other for child in found for other in _descendants(child)]


def _is_zombie(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


if __name__ == "__main__" and len(sys.argv) == 2:
    supervise(json.load(sys.stdin), int(sys.argv[1]))
