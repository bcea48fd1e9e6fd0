"""Shards a module over the processes with FSDP2: one group per transformer layer and one for the rest.

ZeRO's stages are three switches of the same machinery:

| stage | a process keeps            | parameters between forward and backward | gradients are reduced     |
|-------|----------------------------|-----------------------------------------|---------------------------|
| 0     | everything                 | whole                                   | at the last micro-batch   |
| 1     | its shard of the optimizer | whole                                   | at the last micro-batch   |
| 2     | ... and of the gradients   | whole                                   | at every micro-batch      |
| 3     | ... and of the parameters  | its shard                               | at every micro-batch      |

Below stage 3 the parameters are whole also between two calls of the engine: plain tensors, which scripts read and save
without gathering anything. They are shards only while the optimizer steps and checkpoints are read or written.

One process wraps nothing: gathering from oneself is still a copy. Only parameters that are offloaded from a GPU are
wrapped there too, because they lie in the CPU's memory and are gathered from there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hybrid_engine.config import EngineConfig
from hybrid_engine.config.notices import say_once
from hybrid_engine.distributed.processes import default_device, get_rank, get_world_size, join_alone
from hybrid_engine.distributed.verdict import Problem, attempt, everyone
from hybrid_engine.zero.built_shards import placeholders
from hybrid_engine.zero.external_parameters import take_external_uses
from hybrid_engine.zero.fsdp2_private import (
    drop_unreduced_gradients,
    end_passes,
    fsdp_params,
    has_unreduced_gradients,
    keep_reduced_gradients,
    keep_whole_in_state_dict,
    make_root,
    reduce_unreduced_gradients,
    return_to_gathered_storage,
    twins,
)
from hybrid_engine.zero.joint_forward import JointForward
from hybrid_engine.zero.layer_groups import find_groups, is_forward_method
from hybrid_engine.zero.split_module import TENSOR, SplitModule, unit_size_of
from hybrid_engine.zero.trained_parameter import TrainedParameter
from hybrid_engine.zero.uneven_gradients import UnevenGradients
from hybrid_engine.zero.view_outputs import copy_views_in_outputs, copy_views_in_outputs_of

Result = TypeVar("Result")

MAX_IN_LINE = 3
"""Layers that are named in one line of warning."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a module lies on the processes."""

    root: nn.Module
    """The whole module; an FSDPModule when sharded."""
    layers: list[nn.Module] = field(default_factory=list)
    """The FSDPModules that are gathered one at a time, in order: layers or parts of layers; empty when alone."""
    stage: int
    world_size: int
    rank: int
    mesh: DeviceMesh | None = None
    """Axis `fsdp`, below an axis `replicate` where several groups hold a copy of the model each (each process at
    stage 0); None when nothing is wrapped."""
    tensor: DeviceMesh | None = None
    """The processes over which a plan splits parameters, a unit; None where each has whole ones to share out."""
    norm_group: dist.ProcessGroup | None = None
    """The processes whose shards together are one model; None when this process has all of it."""
    loss_factor: float = 1.0
    """What the loss is multiplied by, so that gradients are divided before they are added up; FSDP2 divides by the
    rest."""
    keeps_fp32_gradients: bool = True
    """Whether reduced gradients are added up in fp32; otherwise in the parameters' dtype."""
    uneven: UnevenGradients | None = None
    """Of parameters that processes use differently; None when alone."""
    joint_forward: JointForward | None = None
    """At stage 3, where a forward pass gathers with other processes; else None."""

    @property
    def is_sharded(self) -> bool:
        """Whether the parameters are DTensors under FSDP2 (stage 0 too, with shards that are the whole)."""
        return self.mesh is not None

    @property
    def has_partners(self) -> bool:
        """Whether other processes train the module with this one."""
        return self.uneven is not None

    @property
    def num_units(self) -> int:
        """How many samples of a micro-batch are seen at once, in units of one process's: units take the same."""
        return self.world_size if self.tensor is None else self.world_size // self.tensor.size()

    @property
    def reduces_always(self) -> bool:
        """Whether every backward pass reduces its gradients, because a process keeps only its shard of them."""
        return self.is_sharded and self.stage >= 2

    def expect_gradients(self, reduces: bool) -> None:
        """Before each backward pass: says whether it reduces the gradients or keeps adding them up locally."""
        if isinstance(self.root, FSDPModule):
            self.root.set_requires_gradient_sync(reduces)
            if self.keeps_fp32_gradients:
                keep_reduced_gradients(self.fsdp_modules(), torch.float32)

    def expect_backward(self, is_expected: bool) -> None:
        """Says whether a backward pass follows the next forward pass.

        At stage 3 it begins with the parameters outside the layers, so they then stay gathered in between: without
        this a step of 5M parameters on two processes took 1.10 times the CPU time of plain FSDP2, with it 1.03.
        """
        if self.stage == 3 and isinstance(self.root, FSDPModule):
            self.root.set_reshard_after_forward(not is_expected, recurse=False)

    @property
    def stays_whole(self) -> bool:
        """Whether the parameters are whole whenever the engine is not at work on their shards."""
        return self.is_sharded and self.stage < 3

    def reshard(self) -> None:
        """Frees every gathered parameter, so that only the shards remain.

        Needed before the shards change: below stage 3, and after a forward pass without a backward, the gathered
        copies stay, and the next forward pass would use them instead of gathering the new values.
        """
        for module in self.fsdp_modules():
            end_passes(module)
            module.reshard()

    def settle(self) -> None:
        """Leaves the parameters as scripts expect them between two calls: whole below stage 3, else shards.

        Collective where they are whole and were not.
        """
        if not self.stays_whole:
            self.reshard()
            return
        for module in self.fsdp_modules():
            module.unshard()

    @contextmanager
    def as_shards(self) -> Iterator[None]:
        """Inside, the parameters are this process's shards, and may be changed; collective.

        What a script has written into whole parameters is kept. After an error they stay shards until the next
        forward pass: other processes may never come to a collective.
        """
        self.become_shards()
        yield
        self.settle()

    def become_shards(self) -> None:
        """Makes the parameters this process's shards, with what a script has written into whole ones; local."""
        self._keep_changes()
        self.reshard()

    def forward_together(self, forward: Callable[[], Result]) -> Result:
        """Runs a forward pass; collective at stage 3, where an error of another process ends this one's pass too."""
        if self.joint_forward is None:
            return forward()
        with self.ending_passes_on_error():
            return self.joint_forward.run(forward)

    @contextmanager
    def ending_passes_on_error(self) -> Iterator[None]:
        """An error in a forward or backward pass inside ends that pass, and is raised whatever the ending meets."""
        try:
            yield
        except BaseException:
            attempt(self.end_passes)  # a model that was changed has no shards to go back to
            raise

    def end_passes(self) -> None:
        """Ends a pass in which there was an error; else FSDP2 takes the next one for its rest."""
        if self.uneven is not None:
            self.uneven.forget_path()
        self.become_shards()

    @torch.no_grad()
    def _keep_changes(self) -> None:
        """Copies whole parameters into their shards, and whether they are frozen."""
        if not self.stays_whole:
            return
        for param in fsdp_params(self.fsdp_modules(), is_gathered=True):
            shard, whole = param.sharded_param, param.unsharded_param
            own = self._shard_of(whole.detach(), shard)
            local_tensor(shard).copy_(local_tensor(own))
            shard.requires_grad_(whole.requires_grad)
            return_to_gathered_storage(param)

    def _shard_of(self, whole: torch.Tensor, shard: DTensor) -> DTensor:
        """This process's shard of what it has whole, which may be a plan's part."""
        assert self.mesh is not None
        over_data = shard.placements[: self.mesh.ndim]
        placements = [Shard(p.dim) if hasattr(p, "dim") else p for p in over_data]
        return distribute_tensor(local_tensor(whole), self.mesh, placements, src_data_rank=None)

    def gathered_pairs(self) -> Iterator[tuple[Any, Any]]:
        """Each parameter's shard, and the parameter that stands in its place while it is gathered; collective."""
        for module in self.fsdp_modules():
            module.unshard()
            for param in fsdp_params([module]):
                yield param.sharded_param, param.unsharded_param
            module.reshard()

    def leaves(self) -> Iterator[nn.Parameter]:
        """The parameters that autograd gives gradients: whole ones; local. Each must have been gathered before."""
        yield from (whole for _, whole in self.twins()) if self.is_sharded else self.root.parameters()

    def reduce_gradients(self) -> None:
        """Reduces the gradients that backward passes kept adding up locally; collective."""
        if isinstance(self.root, FSDPModule):
            self.expect_gradients(True)
            reduce_unreduced_gradients(self.root)

    def has_late_gradients(self) -> bool:
        """Whether gradients came after those of their layer were reduced, in a backward pass that reduces."""
        return has_unreduced_gradients(self.fsdp_modules())

    def drop_pending_gradients(self) -> None:
        """Forgets the gradients that stages 0 and 1 hold unreduced between two boundaries."""
        drop_unreduced_gradients(self.fsdp_modules())
        if self.uneven is not None:
            self.uneven.forget()

    def came_alike(self, error: BaseException | None = None) -> bool:
        """Whether a backward pass now reduces the groups in the same order on every process; collective.

        Raises:
            BaseException: `error`, for which this process cannot begin the pass, or that of another one.
        """
        if self.uneven is not None:
            return self.uneven.came_alike(error)
        if error is not None:
            raise error
        return True

    def pass_together(self, backward: Callable[[], None], reduces: bool) -> None:
        """Runs a backward pass at whose end all processes hear of an error of one; collective.

        Where it `reduces` gradients, a process with an error first goes through the rest of that with the others.

        Raises:
            BaseException: the error of this process, or that of another one.
        """
        if self.uneven is None:
            backward()
            return
        _, error = attempt(backward)
        if reduces and error is None:
            self.uneven.end_pass()
        elif reduces:
            self._finish_pass()
        everyone().raise_together(error)

    def leave_pass(self, problem: Problem, reduces: bool) -> None:
        """After a backward pass that ended in an error here: the others hear of it at its end; collective."""
        if self.uneven is not None:
            if reduces:
                self._finish_pass()
            everyone().tell(problem)

    def _finish_pass(self) -> None:
        if self.uneven is not None and isinstance(self.root, FSDPModule):
            attempt(partial(self.uneven.finish_pass, self.root))

    def check_layers(self, alike: bool) -> None:
        """Raises ValueError at stage 3 where the processes did not come through the layers `alike`."""
        if not alike and self.stage == 3:
            raise ValueError(
                "backward(): the processes came through different layers. At stage 3 each must use every layer, which "
                "it gathers with the others; use stage 0, 1 or 2"
            )

    def drop_unused_gradients(
        self, parameters: list[TrainedParameter], error: BaseException | None
    ) -> BaseException | None:
        """Takes gradients away that no process has; collective. See `UnevenGradients.drop_unused`.

        Returns:
            Why no process can step, or None: `error`, which is this process's, or that of another one.
        """
        return error if self.uneven is None else self.uneven.drop_unused(parameters, error)

    def twins(self) -> Iterator[tuple[Any, Any]]:
        """Each parameter's shard, and the parameter that stands in its place while it is gathered; local.

        Each must have been gathered before.
        """
        return twins(self.fsdp_modules())

    def fsdp_modules(self) -> list[FSDPModule]:
        """What FSDP2 gathers one at a time; empty when nothing is wrapped."""
        return [module for module in self.root.modules() if isinstance(module, FSDPModule)]


def shard_module(module: nn.Module, config: EngineConfig, trains: bool = True) -> Sharding:
    """Wraps `module` in place as the config says; its parameters become DTensors unless the process is alone.

    Below stage 3 a module that is only evaluated is not wrapped: it is whole everywhere and has no gradients.
    """
    world_size, rank, stage = get_world_size(), get_rank(), config.zero_optimization.stage
    offloads, unit_size = offloads_parameters(config), unit_size_of(module)
    num_units = world_size // unit_size
    is_whole = (num_units == 1 and not offloads) or (stage < 3 and not trains)
    if is_whole and unit_size == 1:
        return Sharding(root=module, stage=stage, world_size=world_size, rank=rank)
    if world_size == 1:
        join_alone()
    mesh = build_mesh(config, num_units, unit_size)
    group, tensor = _norm_group(mesh), None
    if isinstance(module, SplitModule) and unit_size > 1:
        tensor = mesh[TENSOR]
        mesh = mesh[tuple(mesh.mesh_dim_names or ())[:-1]]
        module.adopt(tensor)
    if is_whole:
        group = None if tensor is None else tensor.get_group()
        return Sharding(root=module, stage=stage, world_size=world_size, rank=rank, tensor=tensor, norm_group=group)
    factor = _loss_factor(config, mesh)
    policy = CPUOffloadPolicy(config.zero_optimization.offload_param.pin_memory) if offloads else OffloadPolicy()
    layers = _parts_to_wrap(module)
    keeps_fp32_gradients = config.accumulation_dtype == torch.float32
    with placeholders(module):
        if keeps_fp32_gradients:
            _expect_fp32_gradients(module)
        for part in [*layers, module]:
            _fully_shard(part, mesh, stage, config.communication_dtype, policy)
            if factor != 1.0:
                part.set_gradient_divide_factor(num_units * factor)
    _register_forward_methods(module)
    make_root(module)
    gathers_jointly = stage == 3 and world_size > 1
    if stage < 3:
        keep_whole_in_state_dict([*layers, module])
    return Sharding(
        root=module,
        layers=layers,
        stage=stage,
        world_size=world_size,
        rank=rank,
        mesh=mesh,
        tensor=tensor,
        norm_group=group,
        loss_factor=factor,
        keeps_fp32_gradients=keeps_fp32_gradients,
        uneven=UnevenGradients(_named_fsdp_modules(module)) if world_size > 1 and trains else None,
        joint_forward=JointForward(part for _, part in _named_fsdp_modules(module)) if gathers_jointly else None,
    )


def _named_fsdp_modules(module: nn.Module) -> Iterator[tuple[str, FSDPModule]]:
    return ((name, part) for name, part in module.named_modules() if isinstance(part, FSDPModule))


def _parts_to_wrap(module: nn.Module) -> list[nn.Module]:
    found = find_groups(module, take_external_uses(module))
    if found.exceptions:
        shown = ", ".join(found.exceptions[:MAX_IN_LINE]) + (", ..." if len(found.exceptions) > MAX_IN_LINE else "")
        say_once(
            f"zero_optimization: {len(found.exceptions)} layers are gathered and reduced in parts or with the rest of "
            f"the model, which takes more memory: {shown}"
        )
    return found.modules


def place_module(module: nn.Module, config: EngineConfig, device: torch.device) -> None:
    """Moves `module` to where `shard_module` wants it: to `device`, unless that happens layer by layer.

    What is offloaded, and at stage 3 what lies elsewhere, reaches the device while it is sharded: the whole might not
    fit there. What zero.Init sharded lies in place already, or is moved as shards.
    """
    if offloads_parameters(config):
        module.to("cpu")
        return
    is_sharded_next = config.zero_optimization.stage == 3 and get_world_size() > 1
    if not is_sharded_next or any(isinstance(param, DTensor) for param in module.parameters()):
        module.to(device)


def offloads_parameters(config: EngineConfig) -> bool:
    """Whether parameters lie in the CPU's memory while a GPU computes; without a GPU they lie there anyway."""
    return config.zero_optimization.offloads_parameters and default_device().type != "cpu"


def _norm_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The processes whose shards together are one model, by the axes that are longer than one process."""
    axes = tuple(name for name in ("fsdp", TENSOR) if name in (mesh.mesh_dim_names or ()) and mesh[name].size() > 1)
    if len(axes) > 1:
        return mesh[axes]._flatten("model").get_group()
    return mesh[axes[0]].get_group() if axes else None


def build_mesh(config: EngineConfig, world_size: int, unit_size: int = 1) -> DeviceMesh:
    """All processes on the axis `fsdp`, or groups of the config's size on it and the groups along `replicate`.

    Where `world_size` are units of several processes, these are on the last axis, `tensor`. peft knows shards by the
    name `fsdp`: on another axis it gives a linear an adapter of the size of its shard.
    """
    shape = mesh_shape(config, world_size)
    names = ("replicate", "fsdp")[-len(shape) :]
    if unit_size > 1:
        shape, names = (*shape, unit_size), (*names, TENSOR)
    return init_device_mesh(default_device().type, shape, mesh_dim_names=names)


def mesh_shape(config: EngineConfig, world_size: int) -> tuple[int, ...]:
    """The sizes of the axes of `build_mesh`'s mesh."""
    shard_size = 1 if config.zero_optimization.stage == 0 else config.zero_optimization.shard_size or world_size
    return (world_size,) if shard_size == world_size else (world_size // shard_size, shard_size)


def _loss_factor(config: EngineConfig, mesh: DeviceMesh) -> float:
    """The part of the division by the number of processes that comes before the sum."""
    if not config.prescale_gradients and config.gradient_predivide_factor == 1.0:
        return 1.0
    # With nothing to scatter FSDP2 divides by a factor of ours twice, so none but 1 is left to it there.
    if config.prescale_gradients or mesh["fsdp"].size() == 1:
        return 1.0 / mesh.size()
    return 1.0 / config.gradient_predivide_factor


def _expect_fp32_gradients(module: nn.Module) -> None:
    """Says that the reduced gradients of parameters in 16 bits may be fp32, which they are reduced in."""
    for param in module.parameters():
        param.grad_dtype = torch.float32


def _fully_shard(
    part: nn.Module, mesh: DeviceMesh, stage: int, reduce_dtype: torch.dtype, offload: OffloadPolicy
) -> None:
    # fp32 unless asked otherwise: adding up many ranks' gradients in 16 bits would round each sum.
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    copy_views_in_outputs(part)
    fully_shard(part, mesh=mesh, reshard_after_forward=stage == 3, mp_policy=policy, offload_policy=offload)
    part.set_reshard_after_backward(stage == 3)
    # Averages are then a sum and a division; gloo has no reduction with a factor.
    part.set_force_sum_reduction_for_comms(True)


def _register_forward_methods(module: nn.Module) -> None:
    """Gathers the root's parameters also for methods named `forward_...`, like a value model's `forward_value`."""
    for name in dir(type(module)):
        if is_forward_method(name) and callable(getattr(type(module), name)):
            copy_views_in_outputs_of(module, name)
            register_fsdp_forward_method(module, name)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of `tensor` that lies on this process, as a detached alias; `tensor` itself when it is not sharded."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():  # 5 us; detaching the DTensor first takes 20, for every parameter several times a step
        return tensor.to_local().detach()


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of `tensor`, detached; collective when it is sharded."""
    value = tensor.detach()  # inside GatheredParameters the whole of it already
    if not isinstance(value, DTensor):
        return value
    # What is offloaded to the CPU meets on the device: nccl reaches no further, and gloo is slow.
    return value.to(value.device_mesh.device_type).full_tensor()
