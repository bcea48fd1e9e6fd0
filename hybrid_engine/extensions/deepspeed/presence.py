"""Lets this engine answer to `import deepspeed`, also for transformers and accelerate, which look for its metadata.

Both decide while they are imported, which has happened by the time of `enable_compat()`; what they left out then is
made up for here.
"""

import importlib
import inspect
import sys

from hybrid_engine.extensions.deepspeed.deepspeed_names import FOLDER

VERSION = "0.19.8"
"""The version of DeepSpeed whose surface this is."""


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
