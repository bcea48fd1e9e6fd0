"""Wraps a module as its config says: one FSDP group per transformer layer and one for the rest."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from hybrid_engine.config import EngineConfig
from hybrid_engine.config.notices import say_once
from hybrid_engine.distributed.mesh_groups import with_own_group
from hybrid_engine.distributed.processes import default_device, get_rank, get_world_size, join_alone
from hybrid_engine.zero.built_shards import placeholders
from hybrid_engine.zero.external_parameters import take_external_uses
from hybrid_engine.zero.fsdp2_private import keep_whole_in_state_dict, make_root, reduce_without_empty
from hybrid_engine.zero.layer_groups import find_groups, is_forward_method
from hybrid_engine.zero.mesh import build_mesh, find_norm_group
from hybrid_engine.zero.passes import loss_factor
from hybrid_engine.zero.scalars import vectors_for_scalars
from hybrid_engine.zero.sharding import Sharding
from hybrid_engine.zero.split_module import (
    STAGES,
    SplitModule,
    num_stages_of,
    runs_graph,
    tensor_axes,
    unit_size_of,
)
from hybrid_engine.zero.unwrapping import allow_copies, note_evaluated
from hybrid_engine.zero.view_outputs import copy_views_in_outputs, copy_views_in_outputs_of

MAX_IN_LINE = 3
"""Layers that are named in one line of warning."""


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


def shard_module(module: nn.Module, config: EngineConfig, trains: bool = True) -> Sharding:
    """Wraps `module` in place as the config says; its parameters become DTensors unless the process is alone.

    Below stage 3 a module that is only evaluated is not wrapped: it is whole everywhere and has no gradients.
    """
    world_size, rank, stage = get_world_size(), get_rank(), config.zero_optimization.stage
    offloads, unit_size, num_stages = offloads_parameters(config), unit_size_of(module), num_stages_of(module)
    num_units = world_size // unit_size
    is_whole = (num_units == 1 and not offloads) or (stage < 3 and not trains)
    if is_whole and unit_size == 1:
        return Sharding(root=module, stage=stage, world_size=world_size, rank=rank)
    if world_size == 1:
        join_alone()
    split_sizes = module.split_sizes if isinstance(module, SplitModule) else ()
    whole_mesh = build_mesh(config, num_units, num_stages, split_sizes)
    names = whole_mesh.mesh_dim_names or ()
    over_parts = tensor_axes(names)
    of_units = tuple(name for name in names if name not in (STAGES, *over_parts))
    mesh = whole_mesh if of_units == names else whole_mesh[of_units]
    tensor = whole_mesh[over_parts] if over_parts else None
    if tensor is not None and is_whole:  # FSDP2, where it is used, needs axes of one mesh
        tensor = with_own_group(tensor)
    if isinstance(module, SplitModule) and tensor is not None:
        module.adopt(tensor)
    group = find_norm_group(whole_mesh, is_sharded=not is_whole)
    of_unit: dict[str, Any] = {"tensor": tensor, "unit_size": unit_size, "norm_group": group}
    if is_whole:
        return Sharding(root=module, stage=stage, world_size=world_size, rank=rank, **of_unit)
    factor = loss_factor(config, mesh)
    policy = CPUOffloadPolicy(config.zero_optimization.offload_param.pin_memory) if offloads else OffloadPolicy()
    layers = [] if runs_graph(module) else _parts_to_wrap(module)  # a graph reads parameters at any time
    with placeholders(module), vectors_for_scalars(module, mesh):
        if config.accumulation_dtype == torch.float32:
            _expect_fp32_gradients(module)
        for part in [*layers, module]:
            _fully_shard(part, mesh, stage, config.communication_dtype, policy)
            if factor != 1.0:
                part.set_gradient_divide_factor(num_units * factor)
    _register_forward_methods(module)
    make_root(module)
    reduce_without_empty([*layers, module])
    if stage < 3:
        keep_whole_in_state_dict([*layers, module])
    if not trains:
        note_evaluated(module)
    return Sharding(
        root=module,
        layers=layers,
        stage=stage,
        world_size=world_size,
        rank=rank,
        mesh=mesh,
        **of_unit,
    )


def _parts_to_wrap(module: nn.Module) -> list[nn.Module]:
    found = find_groups(module, take_external_uses(module))
    if found.exceptions:
        shown = ", ".join(found.exceptions[:MAX_IN_LINE]) + (", ..." if len(found.exceptions) > MAX_IN_LINE else "")
        say_once(
            f"zero_optimization: {len(found.exceptions)} layers are gathered and reduced in parts or with the rest of "
            f"the model, which takes more memory: {shown}"
        )
    return found.modules


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
    allow_copies(part)


def _register_forward_methods(module: nn.Module) -> None:
    """Gathers the root's parameters also for methods named `forward_...`, like a value model's `forward_value`."""
    for name in dir(type(module)):
        if is_forward_method(name) and callable(getattr(type(module), name)):
            copy_views_in_outputs_of(module, name)
            register_fsdp_forward_method(module, name)
