"""The passes of a run in which its memory is measured."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hybrid_engine.metrics.memory_use import MemoryUse, Pass
from hybrid_engine.rlhf.data.pass_shapes import extent_of
from hybrid_engine.rlhf.passes.pass_memory import PassShape


def measured_pass(engine: Any, shape: PassShape, *, has_gradients: bool) -> AbstractContextManager[None]:
    """Around the forward and backward passes of this shape, of which `engine` trains the first.

    Measures nothing where the engine's memory is not followed.
    """
    use: MemoryUse | None = getattr(engine, "memory_use", None)
    if use is None:
        return nullcontext()
    generator = getattr(engine, "generator", None)
    cache_bytes = generator.workspace.allocated_bytes if generator is not None else 0
    of = Pass(shape, has_gradients=has_gradients, has_state=engine.global_steps > 0)
    return use.training_pass(of, extent_of(shape), cache_bytes)
