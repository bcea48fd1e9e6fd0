"""Whole weights for a rollout: gathered once, or streamed layer by layer with the next one on its way.

FSDP2 keeps the storage object of an unsharded parameter across unshard and reshard, so a view of a gathered parameter
becomes valid again whenever it is gathered again. Every method is collective when the model is sharded and free when it
is not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from torch import nn

from hybrid_engine.zero.fsdp2_private import keep_gathered_storage
from hybrid_engine.zero.sharding import Sharding
from hybrid_engine.zero.slicing import PartReader, SliceReader
from hybrid_engine.zero.split_module import num_gathered


class ReadsLayer(Protocol):
    """Something that reads the parameters of one layer."""

    module: nn.Module


Layer = TypeVar("Layer", bound=ReadsLayer)


def _num_bytes(module: nn.Module) -> int:
    """Bytes of the gathered parameters, not of this process's shards."""
    return sum(num_gathered(p) * p.element_size() for p in module.parameters())


class WeightGatherer:
    """Gathers the weights of a sharded model for reading.

    Args:
        is_pinned: True gathers all layers once per rollout, if they fit; False streams them on every pass.
        slices: if processes share the model, reads this process's part; then nothing is gathered.
        parts: if a plan splits the model, reads this process's part from the parameters of its unit.
    """

    def __init__(
        self,
        sharding: Sharding,
        is_pinned: bool,
        slices: SliceReader | None = None,
        parts: PartReader | None = None,
    ):
        self.sharding, self.is_pinned, self.slices, self.parts = sharding, is_pinned, slices, parts
        self.can_stream = sharding.is_sharded and not sharding.stays_whole and bool(sharding.layers) and slices is None
        self.has_buffers = False
        """Whether readers make their own weights: with fused adapters, or dequantized. These may be streamed too."""
        self._is_crowded = False
        self._bytes_gathered = 0
        self._pending: list[Any] = []
        self._num_streamed = 0  # layers gathered or being gathered in this pass
        self._groups: dict[nn.Module, list[nn.Module]] = {}  # by streamed layer; read at every token
        layers = {layer: _num_bytes(layer) for layer in sharding.layers}
        self._num_bytes = {**layers, sharding.root: _num_bytes(sharding.root) - sum(layers.values())}

    @property
    def is_streamed(self) -> bool:
        """Whether layers are read one at a time in every pass."""
        can_stream = self.can_stream or (self.has_buffers and self.slices is None)
        return can_stream and (self._is_crowded or not self.is_pinned)

    @property
    def resident_bytes(self) -> int:
        """Maximum bytes gathered at once: 0 if weights stay whole; everything; or the rest and two layers.

        Includes copies of parameters that a unit trains in other parts than it generates with, known after binding.
        """
        copies = 0 if self.parts is None else self.parts.num_bytes
        return self._resident_bytes(self.is_streamed) + copies

    def _resident_bytes(self, is_streamed: bool) -> int:
        if not self.sharding.is_sharded or (self.sharding.stays_whole and self.slices is None):
            return 0
        if self.slices is not None:
            return sum(self._num_bytes.values()) // self.slices.size
        layers = sorted((self._num_bytes[layer] for layer in self.sharding.layers), reverse=True)
        return self._num_bytes[self.sharding.root] + sum(layers[:2] if is_streamed else layers)

    def count_bytes(self) -> int:
        """Bytes gathered since the last call."""
        count, self._bytes_gathered = self._bytes_gathered, 0
        return count + sum(reader.count_bytes() for reader in (self.slices, self.parts) if reader is not None)

    @property
    def asks_for_memory(self) -> bool:
        """Whether free memory decides how weights are gathered: true for pinned weights that could be streamed."""
        return self.is_pinned and (self.can_stream or self.has_buffers)

    def is_crowded(self, usable_bytes: int) -> bool:
        """Whether all pinned weights together do not fit into this process's `usable_bytes`."""
        return self.asks_for_memory and self._resident_bytes(is_streamed=False) > usable_bytes

    def choose(self, is_crowded: bool) -> None:
        """Before a rollout: streams pinned weights if `is_crowded` is true on any process; the same value on all."""
        self._is_crowded = is_crowded

    @contextmanager
    def gathered(self, whole: bool = False) -> Iterator[None]:
        """Inside, everything is gathered, or everything but the layers if they are streamed and `whole` is False.

        If processes share the model, parts that are read inside are kept until the end instead.
        """
        if self.slices is not None:
            with self._read_in_parts(self.slices):
                yield
            return
        with self._unsharded(is_whole=whole or not self.is_streamed):
            yield

    @contextmanager
    def gathered_outside_layers(self) -> Iterator[None]:
        """Inside, all but the layers is gathered; `stream` may gather those one by one. Requires `can_stream`."""
        with self._unsharded(is_whole=False):
            yield

    @contextmanager
    def _read_in_parts(self, slices: SliceReader) -> Iterator[None]:
        self.sharding.settle()  # else parameters left gathered by a forward pass would be taken for whole weights
        try:
            yield
        finally:
            slices.release()

    @contextmanager
    def _unsharded(self, is_whole: bool) -> Iterator[None]:
        with self._gathered_over_units(is_whole):
            try:
                yield
            finally:
                if self.parts is not None:
                    self.parts.release()

    @contextmanager
    def _gathered_over_units(self, is_whole: bool) -> Iterator[None]:
        if not self.sharding.is_sharded:
            yield
            return
        if self.sharding.stays_whole:
            self.sharding.settle()  # an error may have left shards
            yield
            return
        modules = [self.sharding.root, *self.sharding.layers] if is_whole else [self.sharding.root]
        try:
            for module in modules:
                self._unshard(module)
            yield
        finally:
            self._wait()  # a layer of an abandoned stream would be taken for the next rollout's
            self.sharding.reshard()

    @contextmanager
    def gathered_for_forward(self) -> Iterator[None]:
        """Gathers the weights for forward passes of the module: everything, or everything but streamed layers.

        Each pass gathers streamed layers one by one, so all processes must run the same number of passes.
        """
        modules = self.sharding.fsdp_modules()
        if self.is_streamed:
            modules = [module for module in modules if module not in self.sharding.layers]
        for module in modules:
            module.set_reshard_after_forward(False, recurse=False)
        try:
            with self._unsharded(is_whole=not self.is_streamed):
                yield
        finally:
            for module in modules:
                module.set_reshard_after_forward(self.sharding.frees_after_forward, recurse=False)

    def keep_addresses(self) -> None:
        """Keeps parts of weights, and weights that stay whole, at the same addresses in every later rollout.

        Layers that are gathered for a rollout are copied instead: see `LastingWeights`.
        """
        if self.slices is not None:
            self.slices.has_lasting_addresses = True
        if self.sharding.stays_whole:
            keep_gathered_storage(self.sharding.fsdp_modules())

    def begin_pass(self) -> None:
        """Before each pass over streamed layers."""
        self._num_streamed = 0

    def stream(self, layers: list[Layer]) -> Iterator[Layer]:
        """Yields `layers` in order, each gathered while it is in use, with the next one being gathered."""
        self._send(layers[0])
        for index, layer in enumerate(layers):
            self._wait()
            if index + 1 < len(layers):
                self._send(layers[index + 1])
            yield layer
            for group in self._groups_in(layer.module):
                group.reshard()  # type: ignore[operator]

    def finish_pass(self, layers: list[Layer]) -> None:
        """After an error in a pass: gathers the remaining `layers` with the processes that use them; collective."""
        self._wait()
        for layer in layers[self._num_streamed :]:
            self._send(layer)
            self._wait()
            for group in self._groups_in(layer.module):
                group.reshard()  # type: ignore[operator]

    def _send(self, layer: ReadsLayer) -> None:
        self._pending = [self._unshard(group, is_async=True) for group in self._groups_in(layer.module)]
        self._num_streamed += 1

    def _groups_in(self, layer: nn.Module) -> list[nn.Module]:
        if layer not in self._groups:
            parts = set(layer.modules()) if self.can_stream else set()
            self._groups[layer] = [group for group in self.sharding.layers if group in parts]
        return self._groups[layer]

    def _wait(self) -> None:
        for handle in self._pending:
            handle.wait()
        self._pending = []

    def _unshard(self, module: nn.Module, is_async: bool = False) -> Any:
        self._bytes_gathered += self._num_bytes[module]
        return module.unshard(async_op=is_async)
