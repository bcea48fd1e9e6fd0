"""The layout of a module over the processes, in shards of FSDP2 or whole, with helpers for shards, masters and scalars.

ZeRO's stages are three settings of the same machinery:

| stage | a process keeps            | parameters between forward and backward | gradients are reduced     |
|-------|----------------------------|-----------------------------------------|---------------------------|
| 0     | everything                 | whole                                   | at the last micro-batch   |
| 1     | its shard of the optimizer | whole                                   | at the last micro-batch   |
| 2     | ... and of the gradients   | whole                                   | at every micro-batch      |
| 3     | ... and of the parameters  | its shard                               | at every micro-batch      |

Below stage 3 the parameters are also whole between two calls of the engine: plain tensors, which scripts can read and
save without gathering. They are shards only while the optimizer steps and checkpoints are read or written.

A single process does not wrap, as even a gather within one process is a copy. The exception are parameters offloaded
from a GPU: they are in CPU memory and are gathered from there.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hybrid_engine.config import EngineConfig
from hybrid_engine.config.blocks import ZERO_STAGES, StageRules
from hybrid_engine.distributed.processes import default_device
from hybrid_engine.distributed.verdict import everyone
from hybrid_engine.zero.fsdp2_private import (
    end_passes,
    fsdp_params,
    gather_some,
    holding_gathered,
    make_scalars,
    return_to_gathered_storage,
    twins,
)
from hybrid_engine.zero.split_module import STAGES, tensor_axes, tensor_names

_meshes: dict[tuple[str, tuple[int, ...], tuple[str, ...]], DeviceMesh] = {}
"""Meshes that were made so far, by their layout."""
_world: list[dist.ProcessGroup | None] = []
"""The group of all processes that `_meshes` belong to."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The layout of a module over the processes."""

    root: nn.Module
    """The whole module; an FSDPModule when sharded."""
    layers: list[nn.Module] = field(default_factory=list)
    """The FSDPModules that are gathered one at a time, in order: layers or parts of layers; empty for one process."""
    stage: int
    world_size: int
    rank: int
    mesh: DeviceMesh | None = None
    """Axis `fsdp`, below an axis `replicate` if several groups hold a copy of the model each (each process at stage 0);
    None if nothing is wrapped.
    """
    tensor: DeviceMesh | None = None
    """The processes over which a plan splits parameters; None if each process has whole ones to shard."""
    unit_size: int = 1
    """Number of processes that compute the module together by a plan."""
    norm_group: dist.ProcessGroup | None = None
    """The processes whose shards together are one model; None if this process has all of it."""

    @cached_property
    def is_sharded(self) -> bool:
        """Whether the parameters are DTensors under FSDP2 (stage 0 too, with shards that are the whole)."""
        return self.mesh is not None

    @property
    def rules(self) -> StageRules:
        """The rules of the stage; they do not apply to a module that is not sharded."""
        return ZERO_STAGES[self.stage]

    @property
    def num_units(self) -> int:
        """Number of units. Each takes its own samples of a micro-batch; the processes of a unit take the same."""
        return self.world_size // self.unit_size

    @property
    def stays_whole(self) -> bool:
        """Whether the parameters are whole, except while the engine works on their shards."""
        return self.is_sharded and not self.rules.shards_parameters

    @property
    def keeps_whole_gradients(self) -> bool:
        """Whether whole gradients wait for their reduction at the last micro-batch."""
        return self.is_sharded and not self.rules.shards_gradients

    @property
    def reduces_every_pass(self) -> bool:
        """Whether every backward pass reduces its gradients, because a process keeps only its shard of them."""
        return self.is_sharded and self.rules.shards_gradients

    @property
    def frees_after_forward(self) -> bool:
        """Whether a forward pass frees the parameters that it gathered."""
        return self.is_sharded and self.rules.shards_parameters

    @property
    def gathers_in_forward(self) -> bool:
        """Whether a forward pass is collective, because it gathers parameters with other processes."""
        return self.frees_after_forward and self.world_size > 1

    def reshard(self) -> None:
        """Frees every gathered parameter, so that only the shards remain.

        Needed before the shards change: below stage 3, and after a forward pass without a backward, the gathered
        copies stay, and the next forward pass would use them instead of gathering the new values.
        """
        for module in self.fsdp_modules():
            end_passes(module)
            module.reshard()

    def settle(self) -> None:
        """Puts the parameters into the state that scripts expect between two calls: whole below stage 3, else shards.

        Collective if they become whole.
        """
        if not self.stays_whole:
            self.reshard()
            return
        for module in self.fsdp_modules():
            module.unshard()

    @contextmanager
    def as_shards(self) -> Iterator[None]:
        """Inside, the parameters are this process's shards, and may be changed; collective.

        Values that a script has written into whole parameters are kept. After an error they stay shards until the next
        forward pass: other processes may not reach a collective.
        """
        self.become_shards()
        yield
        self.settle()

    def become_shards_to_step(self, num_stepped: int) -> bool:
        """`become_shards()`; returns whether whole parameters are still in memory, as if fewer than all are stepped.

        Pass the result to `settle_stepped`.
        """
        if not self._keeps_some(num_stepped):
            self.become_shards()
            return False
        with holding_gathered(self.fsdp_modules()) as is_whole:
            self.become_shards()
        return is_whole

    def settle_stepped(self, is_held: bool, stepped: Collection[int]) -> None:
        """`settle()` after `become_shards_to_step()`, if at most the shards with the ids `stepped` have changed since.

        A step of adapters does not gather the base again. Collective if parameters stay whole.

        Args:
            is_held: the result of `become_shards_to_step()` on this process.
        """
        if self._keeps_some(len(stepped)):
            shards = {id(param.sharded_param) for param in fsdp_params(self.fsdp_modules())}
            (cannot,) = everyone().highest([int(not is_held or not shards.issuperset(stepped))])
            if not cannot:
                gather_some(self.fsdp_modules(), stepped)
                return
        self.settle()

    def _keeps_some(self, num_stepped: int) -> bool:
        if not self.stays_whole or self.unit_size > 1:  # each stage of a plan has its own parameters
            return False
        return num_stepped < sum(1 for _ in fsdp_params(self.fsdp_modules()))

    def become_shards(self) -> None:
        """Makes the parameters this process's shards, with values that a script has written into whole ones; local."""
        self._keep_changes()
        self.reshard()

    @torch.no_grad()
    def _keep_changes(self) -> None:
        """Copies whole parameters, and whether they are frozen, into their shards."""
        if not self.stays_whole:
            return
        shards, parts = [], []
        for param in fsdp_params(self.fsdp_modules(), is_gathered=True):
            shard, whole = param.sharded_param, param.unsharded_param
            shards.append(local_tensor(shard))
            parts.append(self._part_of(whole.detach(), shard, shards[-1]))
            if shard.requires_grad != whole.requires_grad:
                shard.requires_grad_(whole.requires_grad)
            return_to_gathered_storage(param)
        if shards:
            torch._foreach_copy_(shards, parts)

    def _part_of(self, whole: torch.Tensor, shard: DTensor, local: torch.Tensor) -> torch.Tensor:
        """This process's part of `whole`, which may be a plan's part; `local` is the shard's own tensor."""
        assert self.mesh is not None
        if not isinstance(whole, DTensor) and shard.placements[-1] == Shard(0):
            # For 291 parameters this takes 10 ms of one core, and 25 ms with DTensors.
            num_processes, place = self.mesh.size(-1), self.mesh.get_local_rank(-1)
            rows = -(-len(whole) // num_processes)
            return whole.narrow(0, min(place * rows, len(whole)), len(local))
        return local_tensor(self._shard_of(whole, shard))

    def _shard_of(self, whole: torch.Tensor, shard: DTensor) -> DTensor:
        assert self.mesh is not None
        over_data = shard.placements[: self.mesh.ndim]
        placements = [Shard(p.dim) if hasattr(p, "dim") else p for p in over_data]
        return distribute_tensor(local_tensor(whole), self.mesh, placements, src_data_rank=None)

    def gathered_pairs(self) -> Iterator[tuple[Any, Any]]:
        """Pairs of each parameter's shard and the parameter that replaces it while it is gathered; collective."""
        for module in self.fsdp_modules():
            module.unshard()
            for param in fsdp_params([module]):
                yield param.sharded_param, param.unsharded_param
            module.reshard()

    def leaves(self) -> Iterator[nn.Parameter]:
        """The parameters that autograd gives gradients: whole ones; local. Each must have been gathered before."""
        yield from (whole for _, whole in self.twins()) if self.is_sharded else self.root.parameters()

    def twins(self) -> Iterator[tuple[Any, Any]]:
        """Pairs of each parameter's shard and the parameter that replaces it while it is gathered; local.

        Each must have been gathered before.
        """
        return twins(self.fsdp_modules())

    def fsdp_modules(self) -> list[FSDPModule]:
        """The modules that FSDP2 gathers one at a time; empty if nothing is wrapped."""
        return [module for _, module in self.named_fsdp_modules()]

    def named_fsdp_modules(self) -> Iterator[tuple[str, FSDPModule]]:
        """The modules that FSDP2 gathers one at a time, with their names in the whole module."""
        if not self.is_sharded:  # called several times a step: 1 ms each for a small model
            return iter(())
        return ((name, part) for name, part in self.root.named_modules() if isinstance(part, FSDPModule))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of `tensor`, as a detached alias; `tensor` itself, detached, if it is not sharded."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():  # 5 us; detaching the DTensor first takes 20, for every parameter several times a step
        return tensor.to_local().detach()


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of `tensor`, detached; collective when it is sharded."""
    value = tensor.detach()  # inside GatheredParameters this is the whole already
    if not isinstance(value, DTensor):
        return value
    # Offloaded tensors are gathered on the device: nccl does not reach the CPU, and gloo is slow.
    return value.to(value.device_mesh.device_type).full_tensor()


def saved_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that are in a state dict, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, child in module.named_modules()
        for name, buffer in child.named_buffers(recurse=False)
        if name not in child._non_persistent_buffers_set
    }


@dataclass(frozen=True, kw_only=True)
class TrainedParameter:
    """A parameter in the form the module computes with and in the form the optimizer steps."""

    name: str
    """The parameter's name in the module."""
    param: nn.Parameter
    """The parameter in the module's dtype; a DTensor when sharded."""
    master: nn.Parameter
    """`param` itself if it has the masters' dtype and device, otherwise a copy that has, sharded alike."""

    @property
    def has_master(self) -> bool:
        return self.master is not self.param

    @property
    def grad_lies_like_masters(self) -> bool:
        """Whether the parameter's gradient has the dtype and the device of the master, which has no gradient yet."""
        grad, master = self.param.grad, self.master
        return grad is not None and master.grad is None and (grad.dtype, grad.device) == (master.dtype, master.device)


@contextmanager
def vectors_for_scalars(module: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
    """Inside, FSDP2 may wrap `module` and its parts over `mesh`; afterwards their records of scalars are converted."""
    named = [(part, name, param) for part in module.modules() for name, param in part._parameters.items()]
    scalars = {(part, name): param for part, name, param in named if param is not None and not param.dim()}
    vectors = {param: _build_vector(param, mesh.size(-1)) for param in scalars.values()}  # tied ones stay one
    for (part, name), param in scalars.items():
        part._parameters[name] = vectors[param]
    yield
    make_scalars([part for part in module.modules() if isinstance(part, FSDPModule)], scalars)


def _build_vector(scalar: nn.Parameter, length: int) -> nn.Parameter:
    vector = local_tensor(scalar).expand(length).clone()
    if isinstance(scalar, DTensor):  # a plan's, over the processes of a unit
        vector = DTensor.from_local(vector, scalar.device_mesh, scalar.placements, run_check=False)
    return nn.Parameter(vector, requires_grad=scalar.requires_grad)


@torch.no_grad()
def make_gradients_equal(parameters: list[TrainedParameter]) -> None:
    """Before each step: processes that share a model take the first one's gradients of scalars; collective.

    Each has added them up by itself, maybe in another order, and copies stepped by different gradients would diverge.
    """
    scalars = [t.master for t in parameters if isinstance(t.master, DTensor) and not t.master.dim()]
    gradients = [local_tensor(master.grad) for master in scalars if master.grad is not None]
    if not gradients:
        return
    mesh = scalars[0].device_mesh
    group = mesh["fsdp"].get_group() if "fsdp" in (mesh.mesh_dim_names or ()) else None
    if group is None or dist.get_world_size(group) == 1:
        return
    values = torch.stack([gradient.float() for gradient in gradients]).to(mesh.device_type)
    dist.broadcast(values, src=dist.get_global_rank(group, 0), group=group)
    for gradient, value in zip(gradients, values, strict=True):
        gradient.copy_(value)


def build_mesh(
    config: EngineConfig, world_size: int, num_stages: int = 1, split_sizes: tuple[int, ...] = ()
) -> DeviceMesh:
    """A mesh with all processes on the axis `fsdp`, or groups of the config's size on it and the groups on `replicate`.

    If `world_size` counts units of several processes, these are on the last axes: `stages`, and those of
    `tensor_names`, with the sizes `split_sizes`. peft recognizes shards by the name `fsdp`: on another axis it gives a
    linear an adapter of the size of its shard.
    """
    shape = mesh_shape(config, world_size)
    names = ("replicate", "fsdp")[-len(shape) :]
    if num_stages == 1 and not split_sizes:
        return _shared_mesh(default_device().type, shape, names)
    if num_stages > 1:
        shape, names = (*shape, num_stages), (*names, STAGES)
    shape, names = (*shape, *split_sizes), (*names, *tensor_names(len(split_sizes)))
    return init_device_mesh(default_device().type, shape, mesh_dim_names=names)


def _shared_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """One mesh for all engines of a layout: each group permanently costs its processes threads and connections."""
    if _world != [dist.group.WORLD]:
        _world[:] = [dist.group.WORLD]
        _meshes.clear()
    layout = device_type, shape, names
    if layout not in _meshes:
        _meshes[layout] = init_device_mesh(device_type, shape, mesh_dim_names=names)
    return _meshes[layout]


def mesh_shape(config: EngineConfig, world_size: int) -> tuple[int, ...]:
    """The sizes of the axes of the mesh of `build_mesh`."""
    zero = config.zero_optimization
    shard_size = (zero.shard_size or world_size) if zero.rules.shards_optimizer else 1
    return (world_size,) if shard_size == world_size else (world_size // shard_size, shard_size)


def find_norm_group(mesh: DeviceMesh, is_sharded: bool) -> dist.ProcessGroup | None:
    """The processes whose parts together are one model, found by the axes longer than one process.

    With `is_sharded` the units, which are on the axis `fsdp`, shard the model among them.
    """
    names = mesh.mesh_dim_names or ()
    wanted = (*(("fsdp",) if is_sharded else ()), STAGES, *tensor_axes(names))
    axes = tuple(name for name in wanted if name in names and mesh[name].size() > 1)
    if len(axes) > 1:
        return mesh[axes]._flatten("model").get_group()
    return mesh[axes[0]].get_group() if axes else None
