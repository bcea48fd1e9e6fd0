"""The passes of a run in which its memory is measured."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hybrid_engine.observing.memory_use import MemoryUse


def measured_pass(engine: Any, num_cells: int, *, has_gradients: bool) -> AbstractContextManager[None]:
    """Around the forward and backward passes over `num_cells` tokens, of which `engine` trains the first.

    Measures nothing where the engine's memory is not followed.
    """
    use: MemoryUse | None = getattr(engine, "memory_use", None)
    if use is None:
        return nullcontext()
    generator = getattr(engine, "generator", None)
    cache_bytes = generator.workspace.allocated_bytes if generator is not None else 0
    has_state = engine.global_steps > 0
    return use.training_pass(num_cells, has_gradients=has_gradients, has_state=has_state, cache_bytes=cache_bytes)
