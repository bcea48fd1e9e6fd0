"""Wraps a module as its config says: one FSDP group per transformer layer and one for the rest.

`ZeroEngine` calls `place_module` and `shard_module` when it is built; what follows chooses the layers, at any depth.

A part can be gathered alone if its parameters are used only in its own forward pass. So the part itself must be called,
which a container never is, and it must not share a parameter with modules outside of it. If a layer cannot be gathered
alone, those of its parts that can are. All other parameters belong to the rest, which is whole during the entire pass.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import wraps
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
from torch.utils._pytree import tree_flatten, tree_map

from hybrid_engine.config import EngineConfig
from hybrid_engine.config.blocks import StageRules
from hybrid_engine.config.notices import say_once
from hybrid_engine.distributed.groups import with_own_group
from hybrid_engine.distributed.processes import default_device, get_rank, get_world_size, join_alone
from hybrid_engine.zero.fsdp2_private import keep_whole_in_state_dict, make_root, reduce_without_empty
from hybrid_engine.zero.gathered_parameters import take_external_uses
from hybrid_engine.zero.passes import loss_factor
from hybrid_engine.zero.sharding import Sharding, build_mesh, find_norm_group, local_tensor, vectors_for_scalars
from hybrid_engine.zero.split_module import (
    STAGES,
    adopt,
    num_stages_of,
    original_of,
    split_axes_of,
    tensor_axes,
    unit_size_of,
)
from hybrid_engine.zero.unwrapping import EngineHook, allow_copies, is_forward_method, note_evaluated, placeholders

MAX_IN_LINE = 3
"""Maximum number of layers named in one line of warning."""
LEAST_SHARE_OF_LIST = 0.1
"""Share of a model's parameters that a list must hold; smaller ones, such as heads of which one is used, may stay
gathered.
"""
LEAST_SHARE_OF_PART = 1 / 16
"""Share of the largest sibling's parameters that a part must hold; a norm does not justify a collective of its own."""
Use = tuple[nn.Module, nn.Parameter]
"""A module, and a parameter that its own code uses."""


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
    whole_mesh = build_mesh(config, num_units, num_stages, split_axes_of(module)[0])
    names = whole_mesh.mesh_dim_names or ()
    over_parts = tensor_axes(names)
    of_units = tuple(name for name in names if name not in (STAGES, *over_parts))
    mesh = whole_mesh if of_units == names else whole_mesh[of_units]
    tensor = whole_mesh[over_parts] if over_parts else None
    if tensor is not None and is_whole:  # where FSDP2 is used, it needs axes of one mesh
        tensor = with_own_group(tensor)
    adopt(module, tensor)
    group = find_norm_group(whole_mesh, is_sharded=not is_whole)
    of_unit: dict[str, Any] = {"tensor": tensor, "unit_size": unit_size, "norm_group": group}
    if is_whole:
        return Sharding(root=module, stage=stage, world_size=world_size, rank=rank, **of_unit)
    factor = loss_factor(config, mesh)
    policy = CPUOffloadPolicy(config.zero_optimization.offload_param.pin_memory) if offloads else OffloadPolicy()
    runs_graph = original_of(module) is not module  # and may read parameters at any time
    layers = [] if runs_graph else _parts_to_wrap(module)
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


@dataclass(frozen=True)
class LayerGroups:
    """The parts of a module that are gathered separately."""

    modules: list[nn.Module]
    """The parts in the order in which they are registered; none is inside another."""
    exceptions: list[str]
    """Layers that are gathered in parts, or with the rest, because another module uses one of their parameters too."""


def find_layers(root: nn.Module) -> list[nn.Module]:
    """The layers of `root`, once each: the items of all lists with at least `LEAST_SHARE_OF_LIST` of its parameters.

    Their classes may differ, and a model may have several such lists. Lists inside layers are not searched.
    """
    least = LEAST_SHARE_OF_LIST * _count([root])
    lists = [items for items in _find_lists(root) if _count(items) >= least]
    return list(dict.fromkeys(item for items in lists for item in items))


def _find_lists(module: nn.Module) -> Iterator[list[nn.Module]]:
    for child in module.children():
        items = [item for item in child.children() if _count([item]) > 0]
        if _holds_layers(child, items):
            yield items
        else:
            yield from _find_lists(child)


def _holds_layers(module: nn.Module, items: list[nn.Module]) -> bool:
    """Whether `module` is a list of layers: a ModuleList, or another container of modules of one class."""
    if isinstance(module, nn.ModuleList):
        return bool(items)
    if has_forward(module) and not isinstance(module, nn.Sequential):
        return False
    kinds = [type(item) for item in items if any(True for _ in item.children())]
    return len(kinds) == len(items) > len(set(kinds))


def has_forward(module: nn.Module) -> bool:
    """Whether `module` can be called; containers cannot."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def check_uncompiled(function: str, model: nn.Module) -> None:
    """Raises ValueError for what `torch.compile(model)` returns, a module around the model; local."""
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise ValueError(
            f"{function}(): model is what torch.compile() returned, which has no generate() of its own; pass the model "
            "itself, after model.compile() if its forward should be compiled"
        )


def find_groups(root: nn.Module, uses: Iterable[Use] = ()) -> LayerGroups:
    """The parts of `root` that are gathered separately.

    Args:
        root: the module, before it is wrapped.
        uses: uses of parameters in addition to those by the modules that they are registered in.
    """
    users = _Users(root, uses)
    groups, exceptions = [], []
    for layer in find_layers(root):
        if shared := users.find_shared(layer):
            exceptions.append(f"{users.paths[layer][0]} ({type(layer).__name__}), whose {shared} is used elsewhere too")
        groups += _split(layer, users)
    return LayerGroups(list(dict.fromkeys(groups)), exceptions)


class _Users:
    """Finds the modules that use each parameter."""

    def __init__(self, root: nn.Module, uses: Iterable[Use]) -> None:
        self.paths: dict[nn.Module, list[str]] = {}
        for path, module in root.named_modules(remove_duplicate=False):
            self.paths.setdefault(module, []).append(path)
        registered = [(module, param) for module in self.paths for param in module.parameters(recurse=False)]
        self._users: dict[int, set[str]] = {}
        for module, param in [*registered, *uses]:
            self._users.setdefault(id(param), set()).update(self.paths[module])

    def find_shared(self, module: nn.Module) -> str | None:
        """The name of a parameter of `module` that is used outside of it, or None."""
        inside = tuple(f"{path}." for path in self.paths[module])
        for name, param in module.named_parameters():
            if not all(f"{user}.".startswith(inside) for user in self._users[id(param)]):
                return name
        return None


def _split(module: nn.Module, users: _Users) -> list[nn.Module]:
    """`module` if it can be gathered alone, otherwise those of its parts that can."""
    if has_forward(module) and users.find_shared(module) is None:
        return [module]
    children = list(module.children())
    least = LEAST_SHARE_OF_PART * max((_count([child]) for child in children), default=0)
    return [group for child in children if _count([child]) >= max(least, 1) for group in _split(child, users)]


def _count(modules: Iterable[nn.Module]) -> int:
    return sum({id(p): p.numel() for module in modules for p in module.parameters()}.values())
