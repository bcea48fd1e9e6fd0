"""`deepspeed.compression.helper`: attributes by their dotted path."""

from functools import reduce
from typing import Any


def recursive_getattr(model: Any, module_name: str) -> Any:
    """The attribute at `module_name`, e.g. "module.layers.0.weight"; items of lists by their number."""
    return reduce(_get, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Sets the attribute at `module_name`."""
    *parents, name = module_name.split(".")
    setattr(reduce(_get, parents, model), name, module)


def _get(parent: Any, name: str) -> Any:
    return getattr(parent, name)
