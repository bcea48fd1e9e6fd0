"""Containers on gathered weights: bound and fused once, or layer by layer where the layers are streamed."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from hybrid_engine.containers import InferenceModel
from hybrid_engine.containers.layer import InferenceLayer
from hybrid_engine.zero.gathering import WeightGatherer


@contextmanager
def bound(model: InferenceModel, gatherer: WeightGatherer, layers_at_once: int = 1) -> Iterator[None]:
    """Inside, containers read what `gatherer` has gathered, adapters fused; of streamed layers, what is outside them.

    `layers_at_once`: layers whose parts are on their way together, where they are taken from other processes.
    """
    try:
        if gatherer.is_streamed:
            model.bind_rest()
            model.fuse_rest()
        else:
            model.bind(layers_at_once)
            model.fuse_lora()
        yield
    finally:
        model.unfuse_lora()


def pass_over_layers(model: InferenceModel, gatherer: WeightGatherer) -> Iterable[InferenceLayer]:
    """The layers in order, for one forward pass; streamed ones are each gathered, bound and fused while in use."""
    return _streamed(model, gatherer) if gatherer.is_streamed else model.layers


def _streamed(model: InferenceModel, gatherer: WeightGatherer) -> Iterator[InferenceLayer]:
    for layer in gatherer.stream(model.layers):
        layer.bind()
        layer.fuse_lora()
        yield layer
        layer.unfuse_lora()
