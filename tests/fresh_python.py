"""Runs programs as `python ...` would, in forks of one process that has imported torch and transformers but nothing
of ours: importing those takes five seconds and more each time."""

import atexit
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import types
from functools import cache
from pathlib import Path

IMPORTED = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
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
        folder = Path(self._folder.name)
        os.mkfifo(folder / "status")
        # Opened for both, so that neither side waits for the other to open it.
        self._status = os.open(folder / "status", os.O_RDWR)
        request = {
            "arguments": [str(argument) for argument in arguments],
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or os.getcwd()),
            "folder": str(folder),
        }
        _first().stdin.write(json.dumps(request) + "\n")
        _first().stdin.flush()

    def wait(self, timeout: float = 300) -> subprocess.CompletedProcess:
        """Its status, output and errors, once it has ended; TimeoutError if it has not."""
        try:
            if not select.select([self._status], [], [], timeout)[0]:
                raise TimeoutError(f"{self._arguments} runs for more than {timeout} s")
            code = int(os.read(self._status, 100))
        finally:
            os.close(self._status)
        output, errors = ((Path(self._folder.name) / name).read_text() for name in ("output", "errors"))
        return subprocess.CompletedProcess(self._arguments, code, output, errors)


def start_python(*arguments: object, env: dict[str, str] | None = None, cwd: str | Path | None = None) -> Started:
    """Starts what `python *arguments` is: a script, `-c source` or `-m module`, and their arguments."""
    return Started(arguments, env, cwd)


def run_python(*arguments: object, env: dict[str, str] | None = None, cwd: str | Path | None = None):
    """The CompletedProcess of `python *arguments`."""
    return start_python(*arguments, env=env, cwd=cwd).wait()


@cache
def _first() -> subprocess.Popen:
    """The process that all others are forks of."""
    process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, text=True)
    atexit.register(process.kill)
    return process


def _serve() -> dict | None:
    """Forks for each request; returns it in the fork, whose process then becomes the program."""
    for module in IMPORTED:
        __import__(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the watchers
    for line in sys.stdin:
        request = json.loads(line)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            program = os.fork()
            if program == 0:
                return request
            _, status = os.waitpid(program, 0)
            with open(Path(request["folder"]) / "status", "w") as file:
                file.write(str(os.waitstatus_to_exitcode(status)))
            os._exit(0)
    return None


def _become(request: dict) -> None:
    """Takes the environment, the folder and the output of the request, and runs its program."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    for name, number in (("output", 1), ("errors", 2)):
        os.dup2(os.open(Path(request["folder"]) / name, os.O_WRONLY | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    kind, *rest = request["arguments"]
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
    asked = _serve()
    if asked is not None:
        _become(asked)
