"""Runs programs as `python ...` would, in forks of one process that has imported torch and transformers but nothing
of ours: importing those takes five seconds and more each time.

A program that starts others is told to take `executable()` as their interpreter: what it starts are forks too. They
have the environment, folder, arguments and standard files of the small process in whose place they run; it waits for
them, passes signals on and ends as they end. Forks do not read PYTHONPATH.
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from functools import cache
from pathlib import Path

IMPORTED = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor",
    "transformers.modeling_utils",
    "transformers.generation",
    "transformers.masking_utils",
    "transformers.models.auto",
)


class Started:
    """A program under way."""

    def __init__(self, arguments: tuple[object, ...], env: dict[str, str] | None, cwd: str | Path | None):
        self._arguments, self._folder = arguments, tempfile.TemporaryDirectory()
        with open(os.devnull) as nothing, self._file("output", "w") as output, self._file("errors", "w") as errors:
            files = [nothing.fileno(), output.fileno(), errors.fileno()]
            environment = dict(os.environ if env is None else env)
            self._connection = _ask(_address(), arguments, environment, cwd or os.getcwd(), files)

    def wait(self, timeout: float = 300) -> subprocess.CompletedProcess:
        """Its status, output and errors, once it has ended; TimeoutError, which ends it, if it has not."""
        self._connection.settimeout(timeout)
        with self._connection, self._connection.makefile() as lines:
            _, code = lines.readline(), int(lines.readline())
        with self._file("output") as output, self._file("errors") as errors:
            return subprocess.CompletedProcess(self._arguments, code, output.read(), errors.read())

    def _file(self, name: str, mode: str = "r"):
        return open(Path(self._folder.name) / name, mode)


def start_python(*arguments: object, env: dict[str, str] | None = None, cwd: str | Path | None = None) -> Started:
    """Starts what `python *arguments` is: a script, `-c source` or `-m module`, and their arguments."""
    return Started(arguments, env, cwd)


def run_python(*arguments: object, env: dict[str, str] | None = None, cwd: str | Path | None = None):
    """The CompletedProcess of `python *arguments`."""
    return start_python(*arguments, env=env, cwd=cwd).wait()


@cache
def executable() -> str:
    """A program to be started as `python` is: with a script, or `-m module`, and their arguments."""
    path = Path(_address()).with_name("python")
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {__file__} {_address()} "$@"\n')
    path.chmod(0o755)
    return str(path)


@cache
def _address() -> str:
    """Where the process listens that all others are forks of."""
    folder = tempfile.TemporaryDirectory()
    address = f"{folder.name}/socket"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    with listener:
        command = [sys.executable, __file__, str(listener.fileno())]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
    atexit.register(folder.cleanup)
    atexit.register(process.kill)
    return address


def _ask(address: str, arguments, environment: dict[str, str], folder: str | Path, files: list[int]) -> socket.socket:
    """A connection that brings a fork's process id and, once it has ended, its status, each in a line."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    request = {"arguments": [str(argument) for argument in arguments], "env": environment, "cwd": str(folder)}
    socket.send_fds(connection, [b"\n"], files)
    connection.sendall(json.dumps(request).encode() + b"\n")
    return connection


def _stand_in(address: str, arguments: list[str]) -> None:
    """Ends as the fork does that runs the program."""
    connection = _ask(address, arguments, dict(os.environ), os.getcwd(), [0, 1, 2])
    lines = connection.makefile()
    process = int(lines.readline())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(process, number))
    code = int(lines.readline())
    if code >= 0:
        sys.exit(code)
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


def _serve(listener: socket.socket) -> tuple[dict, list[int]]:
    """Forks for each request, and returns it with its standard files in the fork, which then becomes the program.

    Ends when the process that started it does, which holds the other end of its standard input.
    """
    for module in IMPORTED:
        __import__(module)
    gc.freeze()  # no collection of a fork searches what it has imported already
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the watchers
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            _, files, *_ = socket.recv_fds(connection, 1, 3)
            request = json.loads(connection.makefile().readline())
            program = os.fork()
            if program == 0:
                connection.close()
                return request, files
            _watch(program, connection)
        connection.close()
    sys.exit()


def _watch(program: int, connection: socket.socket) -> None:
    """Says how the program ends; ends it when nobody listens any more."""

    def end_when_left():
        connection.recv(1)
        os.kill(program, signal.SIGKILL)

    connection.sendall(f"{program}\n".encode())
    threading.Thread(target=end_when_left, daemon=True).start()
    _, status = os.waitpid(program, 0)
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _become(request: dict, files: list[int]) -> None:
    """Takes the environment, the folder and the standard files of the request, and runs its program."""
    import torch

    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    if "OMP_NUM_THREADS" in os.environ:  # torch has read another one
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    kind, *rest = [argument for i, argument in enumerate(request["arguments"]) if i or argument != "-u"]
    if kind == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    elif kind == "-m":
        sys.argv, sys.path[0] = rest, request["cwd"]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [kind, *rest], str(Path(kind).parent.absolute())
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    place, *words = sys.argv[1:]
    if not place.isdigit():
        _stand_in(place, words)
    else:
        asked = _serve(socket.socket(fileno=int(place)))
        _become(*asked)
