"""`zero.unwrap_model_for_generation`: an engine whose parameters are whole for a rollout."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hybrid_engine.zero.gathered_parameters import GatheredParameters


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """`model`, an engine, with the parameters of stage 3 whole inside, so that its module generates; collective.

    A hybrid engine's `generate()` gathers by itself, and nothing is done for it.
    """
    with GatheredParameters(model.parameters(), enabled=not model.config.hybrid_engine.enabled):
        yield model
