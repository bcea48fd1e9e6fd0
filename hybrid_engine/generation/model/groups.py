"""Builds the groups of processes that share one model while it generates.

Engines use it once, when they are built. Each process has its part of every layer (tensor parallelism), some of the
layers (pipeline stages), or both. This file also checks that containers can generate with the weights of a model that a
plan splits, and builds that model's group.
"""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hybrid_engine.containers import InferenceModel, UnsupportedModelError
from hybrid_engine.containers.views import TensorParallel
from hybrid_engine.distributed.groups import all_gather_single
from hybrid_engine.distributed.processes import get_world_size
from hybrid_engine.distributed.verdict import LOST, FollowedError, agree, everyone
from hybrid_engine.generation.model.weights import PIPELINE_OPTION, ModelGroup
from hybrid_engine.zero.sharding import Sharding
from hybrid_engine.zero.slicing import PartReader, SliceReader, places_of_ranks
from hybrid_engine.zero.split_module import num_stages_of, original_of, split_axes_of, stages_of, unit_size_of

TRAINING_OPTION = "hybrid_engine.inference_tp_size"
"""Option for the number of processes that share the model of a training engine."""


PLAN_OPTION = "plan_ngpus"


class Recordings(Protocol):
    """Recorded steps, whose graphs may hold collectives of a group."""

    def drop(self) -> None:
        """Drops every graph."""


class LayerSums:
    """The collectives of this process's group.

    Args:
        ranks: ranks of every group; all processes of the run create the groups together.
    """

    def __init__(self, ranks: list[list[int]]):
        self._ranks = ranks
        self._group: dist.ProcessGroup | None = None
        self._recordings: WeakSet[Recordings] = WeakSet()
        self.renew()

    def drop_before_leaving(self, recordings: "Recordings") -> None:
        """Registers `recordings` to drop before the group is destroyed: NCCL's must not outlive their communicator."""
        self._recordings.add(recordings)

    def renew(self) -> None:
        """Creates the groups, or creates them again; collective over all processes of the run.

        When it returns, all have theirs: a process that left its group early would break it for those still connecting.
        """
        self._leave()
        self._group = everyone().agree(lambda: dist.new_subgroups_by_enumeration(self._ranks)[0])

    def _leave(self) -> None:
        """Destroys this process's group; the last reference to the group must be dropped with it."""
        if self._group is not None:
            for recordings in list(self._recordings):
                recordings.drop()
            dist.destroy_process_group(self._group)
            self._group = None

    @contextmanager
    def ending_others(self) -> Iterator[None]:
        """Inside, an error of this process ends the sums that the others wait in; then all must call `renew`.

        The locals of the frames that raised the error are cleared, because one might reference the group.
        """
        try:
            yield
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            self._leave()
            raise

    @contextmanager
    def _noting_who_left(self) -> Iterator[dist.ProcessGroup]:
        if self._group is None:
            raise FollowedError("after an error the processes that share this model are out of step; start them again")
        try:
            yield self._group
        except RuntimeError as error:
            if any(words in str(error) for words in LOST):
                raise FollowedError(str(error)) from error
            raise

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the sum over the group; may overwrite `tensor`. Raises FollowedError if another process left."""
        tensor = tensor.contiguous()
        with self._noting_who_left() as group:
            dist.all_reduce(tensor, group=group)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenates the tensors of the group's processes along the last dimension; raises as `all_reduce`."""
        with self._noting_who_left() as group:
            size = dist.get_world_size(group)
            gathered = tensor.new_empty(size * tensor.shape[0], *tensor.shape[1:])
            all_gather_single(gathered, tensor.contiguous(), group=group)
        return torch.cat(gathered.chunk(size), -1)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The pipeline stage of this process."""

    index: int
    """Index from 0, the stage of the embedding; the last one has the final norm and the LM head."""
    ranks: tuple[int, ...]
    """Rank of the process of each stage, this one included, that exchanges hidden states with this process."""
    group: dist.ProcessGroup
    """Process group of these ranks."""
    host_group: dist.ProcessGroup
    """Gloo group of the same processes: messages that the host reads do not wait for the device."""
    bounds: tuple[range, ...] | None = None
    """The layers of each stage; None: split as equally as possible."""

    @property
    def size(self) -> int:
        """Number of stages."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage computes logits."""
        return self.index == self.size - 1

    def layers(self, num_layers: int) -> range:
        """Returns the layers of this stage."""
        return self.all_layers(num_layers)[self.index]

    def all_layers(self, num_layers: int) -> Sequence[range]:
        """Returns the layers of each stage."""
        return self.bounds or split_layers(num_layers, self.size)


def split_layers(num_layers: int, num_stages: int) -> list[range]:
    """Splits layers into stages; if they cannot be equal, the first ones have one more, as the last has the LM head."""
    fewest, num_longer = divmod(num_layers, num_stages)
    starts = [stage * fewest + min(stage, num_longer) for stage in range(num_stages + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def check_group_size(size: int, option: str) -> None:
    """Raises ValueError, which names `option`, if groups of `size` processes do not cover all processes."""
    world_size = get_world_size()
    if world_size % size:
        choices = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ValueError(f"{option}={size} must divide the number of processes {world_size}; use one of {choices}")


def join_model_group(size: int, device: torch.device, option: str) -> ModelGroup:
    """Returns the group of `size` consecutive processes with this one; collective over all processes.

    Raises ValueError as `check_group_size` does.
    """
    check_group_size(size, option)
    if size == 1:
        return ModelGroup()
    mesh = init_device_mesh(device.type, (get_world_size() // size, size), mesh_dim_names=("replicate", "tensor"))
    return _with_sums(describe_group(mesh["tensor"].get_group(), option), size)


def _with_sums(group: ModelGroup, size: int) -> ModelGroup:
    """Returns `group` with separate groups of `size` consecutive processes for the sums in layers; collective."""
    sums = LayerSums(torch.arange(get_world_size()).view(-1, size).tolist())
    parallel = replace(group.parallel, all_reduce=sums.all_reduce, all_gather=sums.all_gather)
    return replace(group, parallel=parallel, sums=sums)


def describe_group(group: dist.ProcessGroup, option: str) -> ModelGroup:
    """Returns a ModelGroup of the processes in `group`."""
    size = dist.get_world_size(group)

    def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, group=group)
        return tensor

    def all_gather(tensor: torch.Tensor) -> torch.Tensor:
        gathered = tensor.new_empty(size * tensor.shape[0], *tensor.shape[1:])
        all_gather_single(gathered, tensor.contiguous(), group=group)
        return torch.cat(gathered.chunk(size), -1)

    parallel = TensorParallel(
        rank=dist.get_rank(group), size=size, all_reduce=all_reduce, all_gather=all_gather, option=option
    )
    return ModelGroup(parallel=parallel, process_group=group, layer_group=group)


def check_layout(tp_size: int, num_stages: int, option: str) -> None:
    """Raises ValueError, which names both options, if groups of this size do not cover all processes."""
    world_size, size = get_world_size(), tp_size * num_stages
    if world_size % size:
        pairs = [(tp, n // tp) for n in range(1, world_size + 1) if world_size % n == 0 for tp in range(1, n + 1)]
        fitting = ", ".join(f"{tp} x {pp}" for tp, pp in pairs if world_size % (tp * pp) == 0 and pp > 1) or "1 x 1"
        raise ValueError(
            f"{option}={tp_size} times {PIPELINE_OPTION}={num_stages} makes {size} processes for one model, which must "
            f"divide the number of processes {world_size}; start {size} processes, or use one of {fitting}"
        )


def join_stages(
    tp_size: int, num_stages: int, device: torch.device, option: str, bounds: tuple[range, ...] | None = None
) -> ModelGroup:
    """Returns this process's group of `num_stages` stages of `tp_size` processes; collective over all processes.

    `bounds` are the layers of each stage; None: as equal as possible. Raises ValueError as `check_layout` does.
    """
    check_layout(tp_size, num_stages, option)
    shape = (get_world_size() // (tp_size * num_stages), num_stages, tp_size)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "pipeline", "tensor"))
    stages = host = mesh["pipeline"].get_group()
    if device.type != "cpu":
        by_stage = torch.arange(get_world_size()).view(shape).transpose(1, 2).flatten(0, 1)
        host, _ = dist.new_subgroups_by_enumeration(by_stage.tolist(), backend="gloo")
    ranks = tuple(dist.get_process_group_ranks(stages))
    stage = Stage(index=dist.get_rank(stages), ranks=ranks, group=stages, host_group=host, bounds=bounds)
    whole = mesh["pipeline", "tensor"]._flatten("model").get_group()
    layer = ModelGroup()
    if tp_size > 1:
        layer = _with_sums(describe_group(mesh["tensor"].get_group(), option), tp_size)
    return replace(layer, stage=stage, process_group=whole)


def share_sharded_model(size: int, sharding: Sharding, device: torch.device) -> ModelGroup:
    """Returns the group in which `generate()` of a training engine shares the model; collective."""
    group = join_model_group(size, device, TRAINING_OPTION)
    if size == 1:
        return group
    slices = SliceReader(sharding, size)
    return replace(group, slices=slices, parallel=replace(group.parallel, read=slices.read, wait=slices.wait))


def check_parts(model: nn.Module, is_exact: bool, tp_size: int) -> None:
    """Raises ValueError if containers of `model`, which a plan has split, cannot generate in its parts; collective.

    A model without containers generates by its own `generate()`, whose hooks work on parts; in stages it cannot.
    """
    size = unit_size_of(model)
    if size == 1:
        return
    if tp_size > 1:
        raise ValueError(
            f"hybrid_engine.inference_tp_size={tp_size}: a parallel module generates on the {size} processes of a "
            "unit, by its plan; leave it out"
        )
    if is_exact:
        raise ValueError(
            "hybrid_engine.exact: a model split by a plan adds up sums in parts; leave hybrid_engine.exact out"
        )
    agree(lambda: _check_containers(model, size // num_stages_of(model)))


def _check_containers(model: nn.Module, num_parts: int) -> None:
    root = original_of(model)
    try:
        containers = InferenceModel(root, TensorParallel(size=num_parts, option=PLAN_OPTION))
    except UnsupportedModelError as error:
        if root is not model:
            raise ValueError(
                f"hybrid_engine.enabled: a plan with stages, or of a graph, generates on containers, and {error}; pass "
                "lowering='eager' to ComputeConfig, or leave hybrid_engine out of the config"
            ) from error
        return
    if num_stages_of(model) > 1:
        layers_of_stages(model, root, containers)


def layers_of_stages(model: nn.Module, root: nn.Module, containers: InferenceModel) -> tuple[range, ...]:
    """Returns the layers of each stage of the plan; `containers` were built from `root`.

    Raises ValueError if rollouts cannot pass through them in the plan's stages.
    """
    num_stages = num_stages_of(model)
    paths = {id(module): path for path, module in root.named_modules()}
    ends: list[tuple[Any, int]] = [
        (containers.embedding, 0),
        (containers.position_embedding, 0),
        (containers.embedding_norm, 0),
    ]
    ends += [(containers.project_in, 0), (containers.project_out, num_stages - 1)]
    ends += [(containers.final_norm, num_stages - 1), (containers.lm_head, num_stages - 1)]
    for view, stage in ends:
        path = None if view is None else paths[id(view.module)]
        if path is not None and stage not in stages_of(model, path):
            raise ValueError(
                f"plan.stages: {path!r} belongs to stage {min(stages_of(model, path))}, but rollouts run it in stage "
                f"{stage}; move it there"
            )
    layers = [paths[id(layer.module)] for layer in containers.layers]
    stages = [sorted(stages_of(model, path)) for path in layers]
    for path, found in zip(layers, stages, strict=True):
        if len(found) != 1:
            raise ValueError(f"plan.stages: {path!r} is spread over the stages {found}; rollouts need it in one")
    order = [found[0] for found in stages]
    counts = [order.count(stage) for stage in range(num_stages)]
    if order != sorted(order) or not all(counts):
        raise ValueError(
            f"plan.stages: the {len(layers)} layers belong to the stages {order}; rollouts need at least one in each "
            f"of the {num_stages}, in order; name the modules of each stage"
        )
    return tuple(range(sum(counts[:stage]), sum(counts[: stage + 1])) for stage in range(num_stages))


def share_unit(model: nn.Module, device: torch.device) -> ModelGroup:
    """Returns the group in which the processes of a unit generate from the same prompts; collective.

    Of several axes, the one that splits most is the outermost for tensor parallelism, so that the weights a process
    generates with are among those that it trains.
    """
    root, size, num_stages = original_of(model), unit_size_of(model), num_stages_of(model)
    if num_stages > 1:
        bounds = layers_of_stages(model, root, InferenceModel(root))
        group = join_stages(size // num_stages, num_stages, device, PLAN_OPTION, bounds)
        group = replace(group, stage_option=PLAN_OPTION)
    else:
        group = join_model_group(size, device, PLAN_OPTION)
    sizes, order = split_axes_of(model)
    places = places_of_ranks(sizes, order)
    if len(sizes) > 1:
        group = group.in_order(places)
    parts = PartReader(places)
    parallel = replace(group.parallel, read=parts.read, wait=parts.wait)
    return replace(group, has_same_prompts=True, has_whole_module=root is model, parts=parts, parallel=parallel)
