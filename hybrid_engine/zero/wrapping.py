"""Wraps a module as its config says: one FSDP group per transformer layer and one for the rest.

Called when an engine is built, with the checks of a model that is sharded already.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

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
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map

from hybrid_engine.config import EngineConfig
from hybrid_engine.config.blocks import ZERO_STAGES, StageRules
from hybrid_engine.config.notices import say_once
from hybrid_engine.distributed.groups import with_own_group
from hybrid_engine.distributed.processes import default_device, get_rank, get_world_size, join_alone
from hybrid_engine.zero.fsdp2_private import keep_whole_in_state_dict, make_root, reduce_without_empty
from hybrid_engine.zero.gathered_parameters import take_external_uses
from hybrid_engine.zero.layer_groups import find_groups, is_forward_method
from hybrid_engine.zero.passes import loss_factor
from hybrid_engine.zero.sharding import Sharding, local_tensor, vectors_for_scalars
from hybrid_engine.zero.split_module import (
    STAGES,
    SplitModule,
    num_stages_of,
    runs_graph,
    tensor_axes,
    tensor_names,
    unit_size_of,
)
from hybrid_engine.zero.unwrapping import EngineHook, allow_copies, can_take_over, note_evaluated, take_over

MAX_IN_LINE = 3
"""Maximum number of layers named in one line of warning."""
_meshes: dict[tuple[str, tuple[int, ...], tuple[str, ...]], DeviceMesh] = {}
"""Meshes that were made so far, by their layout."""
_world: list[dist.ProcessGroup | None] = []
"""The group of all processes that `_meshes` belong to."""


def place_module(module: nn.Module, config: EngineConfig, device: torch.device) -> None:
    """Moves `module` to the device where `shard_module` expects it: to `device`, unless that happens layer by layer.

    Offloaded parameters, and at stage 3 parameters on another device, are moved while they are sharded: the whole might
    not fit. Parameters that zero.Init sharded are in place already, or are moved as shards.
    """
    if offloads_parameters(config):
        module.to("cpu")
        return
    is_sharded_next = config.zero_optimization.rules.shards_parameters and get_world_size() > 1
    if not is_sharded_next or any(isinstance(param, DTensor) for param in module.parameters()):
        module.to(device)


def offloads_parameters(config: EngineConfig) -> bool:
    """Whether parameters are in CPU memory while a GPU computes; False without a GPU, where they always are."""
    return config.zero_optimization.offloads_parameters and default_device().type != "cpu"


def shard_module(module: nn.Module, config: EngineConfig, trains: bool = True) -> Sharding:
    """Wraps `module` in place as the config says; its parameters become DTensors unless there is only one process.

    Below stage 3 a module that is only evaluated is not wrapped: it is whole everywhere and has no gradients.
    """
    world_size, rank, stage = get_world_size(), get_rank(), config.zero_optimization.stage
    rules = config.zero_optimization.rules
    offloads, unit_size, num_stages = offloads_parameters(config), unit_size_of(module), num_stages_of(module)
    num_units = world_size // unit_size
    is_whole = (num_units == 1 and not offloads) or (not rules.shards_parameters and not trains)
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
    if tensor is not None and is_whole:  # where FSDP2 is used, it needs axes of one mesh
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
            _fully_shard(part, mesh, rules, config.communication_dtype, policy)
            if factor != 1.0:
                part.set_gradient_divide_factor(num_units * factor)
    _register_forward_methods(module)
    make_root(module)
    reduce_without_empty([*layers, module])
    if not rules.shards_parameters:
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
    """Allows the reduced gradients of 16-bit parameters to be fp32, the dtype in which they are reduced."""
    for param in module.parameters():
        param.grad_dtype = torch.float32


def _fully_shard(
    part: nn.Module, mesh: DeviceMesh, rules: StageRules, reduce_dtype: torch.dtype, offload: OffloadPolicy
) -> None:
    # fp32 unless configured otherwise: adding up many ranks' gradients in 16 bits would round each sum.
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    copy_views_in_outputs(part)
    frees = rules.shards_parameters
    fully_shard(part, mesh=mesh, reshard_after_forward=frees, mp_policy=policy, offload_policy=offload)
    part.set_reshard_after_backward(frees)
    # Averages are then a sum and a division; gloo does not have a reduction with a factor.
    part.set_force_sum_reduction_for_comms(True)
    allow_copies(part)


def _register_forward_methods(module: nn.Module) -> None:
    """Gathers the root's parameters also for methods named `forward_...`, such as a value model's `forward_value`."""
    for name in dir(type(module)):
        if is_forward_method(name) and callable(getattr(type(module), name)):
            copy_views_in_outputs_of(module, name)
            register_fsdp_forward_method(module, name)


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


def check_built_shards(module: nn.Module, stage: int, mesh_shape: tuple[int, ...]) -> None:
    """Raises ValueError unless shards in `module` already have the layout of an engine of this stage and mesh.

    An engine does not take over a model that another one has sharded and trains.
    """
    if can_take_over(module):
        return
    if any(isinstance(part, FSDPModule) for part in module.modules()):
        raise ValueError(
            "model: another engine has sharded it already to train it, and it stays with that engine also when the "
            "engine is deleted; build the model again for this one, or copy.deepcopy it"
        )
    shards: list[Any] = [param for param in module.parameters() if _is_shard(param)]
    if shards and not ZERO_STAGES[stage].shards_parameters:
        raise ValueError(
            f"zero_optimization.stage={stage} and a model built under zero.Init, which shards parameters, contradict "
            f"each other; set the stage to 3, or build the model without zero.Init"
        )
    shapes = {shard.device_mesh.shape for shard in shards}
    if shapes - {mesh_shape}:
        raise ValueError(
            f"model: zero.Init sharded it over processes in the shape {shapes}, the config over {mesh_shape}; give "
            f"both the same config"
        )


def _is_shard(param: Any) -> bool:
    """Whether ZeRO has sharded the parameter; a plan's parts are on other axes."""
    return isinstance(param, DTensor) and "fsdp" in (param.device_mesh.mesh_dim_names or ())


def take_over_evaluated(module: nn.Module, rules: StageRules, mesh_shape: tuple[int, ...]) -> None:
    """Unwraps a model that only engines without an optimizer have sharded; collective.

    It keeps its shards if they have the layout of an engine with these `rules` and this mesh.
    """
    shapes = {param.device_mesh.shape for param in module.parameters() if isinstance(param, DTensor)}
    take_over(module, keeps_shards=rules.shards_parameters and shapes == {mesh_shape})


@contextmanager
def placeholders(module: nn.Module) -> Iterator[None]:
    """Inside, sharded parameters are replaced by plain ones without storage; afterwards they are restored."""
    places = [
        (part, name, param) for part in module.modules() for name, param in part._parameters.items() if _is_shard(param)
    ]
    stand_ins = {id(param): _without_storage(param) for _, _, param in places}
    for part, name, param in places:
        part._parameters[name] = stand_ins[id(param)]
    yield
    for part, name, param in places:
        part._parameters[name] = param
    if places:
        for part in module.modules():
            if isinstance(part, FSDPModule):  # FSDP2 takes over the shards at the first gather
                part.unshard()
                part.reshard()


def _without_storage(param: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device="meta"), param.requires_grad)


def copy_views_in_outputs(module: nn.Module) -> None:
    """Makes `module(...)` return copies of views and parameters; to be called before FSDP2 sets its hooks."""
    module.register_forward_hook(EngineHook(_copy_after_forward))


def copy_views_in_outputs_of(module: nn.Module, method_name: str) -> None:
    """Copies views and parameters in the output of one method of a module."""
    method = getattr(module, method_name)

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _copy_views(module, method(*args, **kwargs))

    setattr(module, method_name, call)


def _copy_after_forward(module: nn.Module, args: Any, output: Any) -> Any:
    return _copy_views(module, output)


def _copy_views(module: nn.Module, output: Any) -> Any:
    leaves, _ = tree_flatten(output)
    held = {_memory(parameter) for parameter in module.parameters()} - {None, 0}

    def must_be_copied(leaf: Any) -> bool:
        return _is_view(leaf) or _memory(leaf) in held

    if not any(must_be_copied(leaf) for leaf in leaves):
        return output
    return tree_map(lambda leaf: leaf.clone() if must_be_copied(leaf) else leaf, output)


def _is_view(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value._base is not None


def _memory(value: Any) -> int | None:
    """The address of a tensor's storage, 0 if it is freed; None for other values."""
    if isinstance(value, DTensor):
        value = local_tensor(value)
    is_dense = type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided
    return value.untyped_storage().data_ptr() if is_dense else None
