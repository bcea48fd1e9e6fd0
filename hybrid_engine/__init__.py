"""A hybrid RLHF engine: one process and one set of weights that trains under ZeRO-3 and generates.

    import hybrid_engine as deepspeed

runs code written for DeepSpeed: its module paths exist below this package (`compat/`).

What the package offers (`surface.py`) is imported at the first use of any of it, because torch and transformers take
seconds, which `hybrid-engine --help` shall not wait for.
"""

from typing import TYPE_CHECKING, Any

from hybrid_engine.extensions.deepspeed.first_use import import_surface, watch_imports

if TYPE_CHECKING:
    from hybrid_engine.extensions.deepspeed.surface import *  # noqa: F403

watch_imports()


def __getattr__(name: str) -> Any:
    """A name of the surface or a module below this one, which is not imported yet."""
    import_surface()
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]
