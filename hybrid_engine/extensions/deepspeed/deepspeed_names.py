"""Runs a script that imports `deepspeed`, which it and all processes that it starts find here; no line is changed.

    python -m hybrid_engine.extensions.deepspeed.deepspeed_names train.py --deepspeed_config ds.json
    python -m hybrid_engine.extensions.deepspeed.deepspeed_names -m package.module --steps 3

Python starts once more with a folder on its path in which there is a package `deepspeed`, and its metadata, which
transformers and accelerate look at. `hybrid-engine launch --deepspeed-names` does so on several processes.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

FOLDER = Path(__file__).parent / "deepspeed_path"
USAGE = "usage: python -m hybrid_engine.extensions.deepspeed.deepspeed_names [-m] SCRIPT [ARGUMENTS]"

IGNORED = "hybrid_engine.extensions.deepspeed.deepspeed_names: python -E and -I ignore PYTHONPATH; leave them out"


def environment_with_names(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables to set so that a Python finds `deepspeed` here, before one that is installed."""
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    return {"PYTHONPATH": os.pathsep.join([str(FOLDER), *(path for path in paths if path not in ("", str(FOLDER)))])}


def main(arguments: Sequence[str] | None = None) -> int:
    """Becomes the Python that runs the script, and does not return; the status 2 where there is none to run."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    refusal = USAGE if not arguments or arguments == ["-m"] else IGNORED if sys.flags.ignore_environment else None
    if refusal is None:
        become_script(arguments)
    print(refusal, file=sys.stderr)
    return 2


def become_script(arguments: Sequence[str]) -> NoReturn:
    """Starts Python anew in this process: `__main__`, sys.argv and tracebacks are the script's, as without us."""
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, *_flags_of_python(len(arguments)), *arguments]
    os.execve(sys.executable, command, {**os.environ, **environment_with_names(os.environ)})


def _flags_of_python(num_arguments: int) -> list[str]:
    """The options of this Python before `-m` and this module."""
    *flags, _ = sys.orig_argv[1 : len(sys.orig_argv) - num_arguments]
    return flags[:-1] if flags[-1:] == ["-m"] else flags


if __name__ == "__main__":
    sys.exit(main())
