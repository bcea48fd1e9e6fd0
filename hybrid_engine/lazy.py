"""Packages whose names are imported when they are first read (PEP 562), because torch takes seconds to import.

The `__init__.py` of such a package calls `lazy_attributes`.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

NO_NAMES: Mapping[str, str] = MappingProxyType({})


def lazy_attributes(package: str, module_of: Mapping[str, str] = NO_NAMES) -> Callable[[str], Any]:
    """The `__getattr__` of `package`: imports a name of `module_of`, or a module below the package, when it is read.

    Args:
        package: the whole name of the package.
        module_of: the module of each lazy name, by its whole name.

    Returns:
        A function that raises AttributeError for every other name.
    """

    def read(name: str) -> Any:
        if name in module_of:
            value = getattr(importlib.import_module(module_of[name]), name)
            setattr(sys.modules[package], name, value)
            return value
        return import_below(package, name)

    return read


def import_below(package: str, name: str) -> Any:
    """The module `name` below `package`; raises AttributeError where there is none."""
    whole_name = f"{package}.{name}"
    try:
        if not name.startswith("__"):
            return importlib.import_module(whole_name)
    except ModuleNotFoundError as error:
        if error.name != whole_name:
            raise
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
