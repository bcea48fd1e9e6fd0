"""`deepspeed` where the folder above is on Python's path: the names of `hybrid_engine`, and DeepSpeed's version.

Its modules are those of `paths/`, which `hybrid_engine` has too, and those of this folder where `hybrid_engine` has a
module of its own at that path.
"""

import importlib

import hybrid_engine
from hybrid_engine.lazy import import_below

_version = importlib.import_module("hybrid_engine.git_version_info")
__all__ = hybrid_engine.__all__
__path__.append(hybrid_engine.__path__[-1])
__version__ = _version.version


def __getattr__(name):
    """A name of DeepSpeed's version or of `hybrid_engine`, or a module below this package."""
    if name in vars(_version):
        return getattr(_version, name)
    if name in (*hybrid_engine.__all__, *hybrid_engine._ABSENT):
        return getattr(hybrid_engine, name)
    return import_below(__name__, name)
