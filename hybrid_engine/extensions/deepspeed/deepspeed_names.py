"""`import deepspeed` means this engine: `enable_compat()` for this process, a command for a script and its processes.

    python -m hybrid_engine.extensions.deepspeed.deepspeed_names train.py --deepspeed_config ds.json
    python -m hybrid_engine.extensions.deepspeed.deepspeed_names -m package.module --steps 3

Python starts once more with a folder on its path in which there is a package `deepspeed`, and its metadata, which
transformers and accelerate look at. `hybrid-engine launch --deepspeed-names` does so on several processes. Both decide
while they are imported, which has happened by the time of `enable_compat()`; what they left out then is made up for
there.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

FOLDER = Path(__file__).parent / "paths/deepspeed_path"
USAGE = "usage: python -m hybrid_engine.extensions.deepspeed.deepspeed_names [-m] SCRIPT [ARGUMENTS]"
IGNORED = "hybrid_engine.extensions.deepspeed.deepspeed_names: python -E and -I ignore PYTHONPATH; leave them out"
VERSION = "0.19.8"
"""The version of DeepSpeed whose surface this is."""
__git_hash__ = __git_branch__ = "unknown"


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
    """Starts Python again in this process: `__main__`, sys.argv and tracebacks are the script's, as without us."""
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


def enable_compat() -> None:
    """Makes `import deepspeed` and its submodules mean this engine, for code that cannot be changed.

    That is also what transformers' ZeRO-3 loading (`HfDeepSpeedConfig`), its Trainer and accelerate need. Python finds
    the package `deepspeed` and its metadata in a folder that is put on its path.

    Raises:
        ValueError: the real DeepSpeed was imported before; what holds its objects would go on with them.
    """
    imported = sys.modules.get("deepspeed")
    if imported is not None and getattr(imported, "__file__", None) != str(FOLDER / "deepspeed/__init__.py"):
        raise ValueError(
            "enable_compat(): the real deepspeed is already imported; call enable_compat() before anything imports it"
        )
    if not is_announced():
        sys.path.insert(0, str(FOLDER))
        importlib.invalidate_caches()
        _complete_imports()
    importlib.import_module("deepspeed")


def is_announced() -> bool:
    """Whether this engine is the package "deepspeed" of this process."""
    return str(FOLDER) in sys.path


def _complete_imports() -> None:
    """Gives modules that found no `deepspeed` what they leave out without one."""
    source = importlib.import_module("accelerate.utils.deepspeed")
    own = {name: value for name, value in vars(source).items() if inspect.getmodule(value) is source}
    for name in ("accelerate.utils", "accelerate.accelerator", "transformers.trainer"):
        if name in sys.modules:
            vars(sys.modules[name]).update(own)
    # Its HfDeepSpeedConfig derives from accelerate's only where there is a deepspeed. Functions imported from it look
    # names up in the module, so they see the new ones.
    integration = sys.modules.get("transformers.integrations.deepspeed")
    if integration is not None:
        importlib.reload(integration)
