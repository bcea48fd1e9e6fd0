"""The weights that a model generates with: who holds which part, how they are gathered, containers bound to them.

`Generator` uses it around every rollout. `ModelGroup` is the consecutive ranks that share one model, and their
collectives; `groups.py` builds it. `WeightGatherer` makes the weights whole: once per rollout, or streamed layer by
layer with the next one on its way. FSDP2 keeps the storage object of an unsharded parameter across unshard and reshard,
so a view of a gathered parameter becomes valid again whenever it is gathered again. Its methods are collective when the
model is sharded and free when it is not. `bound` binds containers to gathered weights: once, to copies at fixed
addresses, or layer by layer if layers are streamed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from hybrid_engine.containers import InferenceModel
from hybrid_engine.containers.device import LastingBuffer
from hybrid_engine.containers.layer import InferenceLayer
from hybrid_engine.containers.views import ALONE, Cut, TensorParallel
from hybrid_engine.distributed.groups import host_group
from hybrid_engine.distributed.processes import get_rank, get_world_size
from hybrid_engine.distributed.verdict import LostError, Partners
from hybrid_engine.zero.fsdp2_private import keep_gathered_storage
from hybrid_engine.zero.sharding import Sharding
from hybrid_engine.zero.slicing import PartReader, SliceReader
from hybrid_engine.zero.split_module import (
    num_gathered,
)

if TYPE_CHECKING:
    from hybrid_engine.generation.model.groups import LayerSums, Stage

Value = TypeVar("Value")
PIPELINE_OPTION = "pipeline_parallel_size"
"""Option for the number of stages of a model that only generates."""
Read = Callable[[torch.Tensor, Cut | None, int, str], torch.Tensor]
"""Signature of `TensorParallel.read`: returns a rank's part of a parameter."""


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


@dataclass(frozen=True, kw_only=True)
class ModelGroup:
    """The group of this process; alone, it holds the whole model."""

    parallel: TensorParallel = ALONE
    """Tensor parallelism of the processes that share each layer, for the containers."""
    stage: "Stage | None" = None
    """This process's pipeline stage; None: it has a part of all layers."""
    stage_option: str = PIPELINE_OPTION
    """Option that sets the number of stages, for errors."""
    process_group: dist.ProcessGroup | None = None
    """Process group of the processes that share the model; None for one process."""
    layer_group: dist.ProcessGroup | None = None
    """Process group of those that share each layer; None for one process."""
    sums: "LayerSums | None" = None
    """Sums the parts of layers so that an error of one process ends the waiting of the others; or None."""
    slices: SliceReader | None = None
    """Reads this rank's part of parameters sharded over the processes; None if nothing is shared."""
    parts: PartReader | None = None
    """Reads this rank's part of the weights that its unit trains by a plan; None if no plan splits parameters."""
    places: tuple[int, ...] | None = None
    """Index in the layer's group of the process of each tensor-parallel rank; None: the rank itself."""
    has_same_prompts: bool = False
    """Whether every rank gets the same prompts and returns all rows, instead of its own prompts and rows."""
    has_whole_module: bool = True
    """Whether the module itself can run on every process, gathered if it is sharded."""

    @property
    def size(self) -> int:
        """Number of processes that share the model."""
        return self.parallel.size * self.num_stages

    @property
    def num_stages(self) -> int:
        """Number of stages of the model's layers."""
        return 1 if self.stage is None else self.stage.size

    @property
    def rank(self) -> int:
        """Index of this process among those that share the model."""
        return self._layer_place + (0 if self.stage is None else self.stage.index * self.parallel.size)

    @property
    def _layer_place(self) -> int:
        """Index of this process among those that share each layer."""
        return self.parallel.rank if self.places is None else self.places[self.parallel.rank]

    @property
    def remedy(self) -> str:
        """The options with which nothing would be shared, for errors."""
        alone = [f"{self.parallel.option}=1"] if self.parallel.size > 1 else []
        return " and ".join(dict.fromkeys(alone + ([] if self.stage is None else [f"{self.stage_option}=1"])))

    @property
    def partners(self) -> Partners:
        """The processes that share the model."""
        return Partners(size=self.size, rank=self.rank, group=self.process_group)

    @property
    def layer_partners(self) -> Partners:
        """The processes that share each layer; those of the last stage draw tokens together."""
        return Partners(size=self.parallel.size, rank=self._layer_place, group=self.layer_group)

    @property
    def ranks(self) -> range:
        """The ranks, among all processes, of those that share the model."""
        first = get_rank() // self.size * self.size
        return range(first, first + self.size)

    def in_order(self, places: Sequence[int]) -> "ModelGroup":
        """Returns this group with its tensor-parallel ranks permuted: rank r is the process at `places[r]`."""
        gather, size = self.parallel.all_gather, self.parallel.size

        def all_gather(tensor: torch.Tensor) -> torch.Tensor:
            parts = gather(tensor).chunk(size, -1)
            return torch.cat([parts[place] for place in places], -1)

        rank = list(places).index(self.parallel.rank)
        return replace(self, places=tuple(places), parallel=replace(self.parallel, rank=rank, all_gather=all_gather))

    def without_module(self) -> "ModelGroup":
        """Returns this group for processes that keep only their parts of the model."""
        return replace(self, has_whole_module=False)

    def gather_objects(self, value: Value) -> list[Value]:
        """Returns `value` of every process of the group, in the order of ranks; collective."""
        if self.size == 1:
            return [value]
        values: list[Value | None] = [None] * self.size
        dist.all_gather_object(values, value, group=host_group(self.process_group))
        return values  # type: ignore[return-value]

    def agree(self, action: Callable[[], Value]) -> Value:
        """Runs `action`, in which the processes meet in layers; raises an error of one on all; collective."""
        try:
            return self.partners.agree(lambda: self._ending_others(action))
        except LostError:
            raise
        except BaseException:
            self.renew_sums(self.partners)
            raise

    def _ending_others(self, action: Callable[[], Value]) -> Value:
        with nullcontext() if self.sums is None else self.sums.ending_others():
            return action()

    def renew_sums(self, partners: Partners) -> None:
        """Recreates the groups after an error raised by `partners`, if these are all processes of the run.

        Collective.
        """
        if self.sums is not None and partners.size == get_world_size():
            self.sums.renew()

    def from_last_stage(self, value: Value) -> Value:
        """Returns the last stage's `value` on all stages, or `value` itself without stages; collective."""
        return value if self.stage is None else self.gather_objects(value)[-1]


class LastingWeights:
    """Copies of gathered parameters at fixed addresses; FSDP2 gathers to another address every time.

    Recorded steps read them, so the next rollout does not have to record again. A layer's gathered weights are freed
    once they are copied: a rollout holds the whole weights once, and two layers of them twice.
    """

    def __init__(self, read: Read, wait: Callable[[], None]):
        """`read` and `wait` are those of the `TensorParallel` that generates."""
        self._read, self._wait = read, wait
        self._copies: dict[tuple[int, Cut | None], tuple[torch.Tensor, LastingBuffer]] = {}
        self._filled: set[tuple[int, Cut | None]] = set()
        self.is_used = False

    def read(self, parameter: torch.Tensor, cut: Cut | None, rank: int, name: str) -> torch.Tensor:
        """Returns the part of `rank`; inside `taken`, its copy, which is made once."""
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
        """Inside, `read` returns copies; their memory is released at the end."""
        self.is_used = True
        try:
            yield
        finally:
            self.is_used = False
            self._copies = {key: self._copies[key] for key in self._filled}  # the other parameters are gone
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
    """Inside, containers read the weights that `gatherer` has gathered, adapters fused.

    If layers are streamed, only the weights outside them are bound here.

    `layers_at_once`: number of layers whose parts are in flight together, if other processes send them.
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
    """Returns the layers in order for one forward pass; streamed ones are gathered, bound and fused while in use."""
    return _streamed(model, gatherer) if gatherer.is_streamed else model.layers


def _streamed(model: InferenceModel, gatherer: WeightGatherer) -> Iterator[InferenceLayer]:
    for layer in gatherer.stream(model.layers):
        layer.bind()
        model.parallel.wait()
        layer.fuse_lora(lender=model.layers[0])
        yield layer
        layer.unfuse_lora(keeps_lent=True)
