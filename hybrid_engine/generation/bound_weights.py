"""Containers on gathered weights: bound and fused once, or layer by layer where the layers are streamed."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from hybrid_engine.containers import InferenceModel
from hybrid_engine.containers.lasting import LastingBuffer
from hybrid_engine.containers.layer import InferenceLayer
from hybrid_engine.containers.tensor_parallel import Cut
from hybrid_engine.zero.gathering import WeightGatherer

Read = Callable[[torch.Tensor, Cut | None, int, str], torch.Tensor]
"""`TensorParallel.read`: a rank's part of a parameter."""


class LastingWeights:
    """Copies of gathered parameters, each at an address that lasts; FSDP2 gathers to another one every time.

    Recorded steps read them, so that the next rollout need not record anew. A layer's gathered weights are freed once
    they are copied: a rollout holds the whole weights once, and two layers of them twice.
    """

    def __init__(self, read: Read, wait: Callable[[], None]):
        """`read` and `wait` are those of the `TensorParallel` that generates."""
        self._read, self._wait = read, wait
        self._copies: dict[tuple[int, Cut | None], tuple[torch.Tensor, LastingBuffer]] = {}
        self._filled: set[tuple[int, Cut | None]] = set()
        self.is_used = False

    def read(self, parameter: torch.Tensor, cut: Cut | None, rank: int, name: str) -> torch.Tensor:
        """The part of `rank`, or the copy of it, made once between `taken` and its end."""
        key = (id(parameter), cut)
        if key in self._filled:
            return self._copies[key][1].held
        part = self._read(parameter, cut, rank, name)
        if not self.is_used:
            return part
        self._wait()
        _, buffer = self._copies.setdefault(key, (parameter, LastingBuffer()))
        self._filled.add(key)
        return buffer.take(tuple(part.shape), part.dtype, part.device).copy_(part)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """What is read inside are copies; their memory is given back at the end."""
        self.is_used = True
        try:
            yield
        finally:
            self.is_used = False
            self._copies = {key: self._copies[key] for key in self._filled}  # others' parameters are gone
            for _, buffer in self._copies.values():
                buffer.release()
            self._filled.clear()


@contextmanager
def bound_to_copies(model: InferenceModel, gatherer: WeightGatherer, weights: LastingWeights) -> Iterator[None]:
    """Inside, containers read copies of the sharded weights, adapters fused; nothing stays gathered. Collective."""
    with weights.taken():
        try:
            with gatherer.gathered_outside_layers():
                model.bind_rest()
                model.fuse_rest()
                for layer in gatherer.stream(model.layers):
                    layer.bind()
                    layer.fuse_lora()
            yield
        finally:
            model.unfuse_lora()


@contextmanager
def bound(model: InferenceModel, gatherer: WeightGatherer, layers_at_once: int = 1) -> Iterator[None]:
    """Inside, containers read what `gatherer` has gathered, adapters fused; of streamed layers, what is outside them.

    `layers_at_once`: layers whose parts are on their way together, where they are taken from other processes.
    """
    if gatherer.is_streamed:
        model.bind_rest()
    else:
        model.bind(layers_at_once)
    try:
        if gatherer.is_streamed:
            model.fuse_rest()
        else:
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
        model.parallel.wait()
        layer.fuse_lora(lender=model.layers[0])
        yield layer
        layer.unfuse_lora(keeps_lent=True)
