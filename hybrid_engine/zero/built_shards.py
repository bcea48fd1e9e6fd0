"""Hands a model that `zero.Init` built over to FSDP2, without anybody holding it whole.

FSDP2 wraps plain parameters. So placeholders without storage stand in while it wraps the module, and give way to the
shards after it, as when a checkpoint is assigned to a model that was wrapped without storage. The parameters stay the
objects they are, also for an optimizer that was built on them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hybrid_engine.zero.unwrapping import can_take_over, take_over


def check_built_shards(module: nn.Module, stage: int, mesh_shape: tuple[int, ...]) -> None:
    """Raises ValueError unless what is sharded of `module` already lies as an engine of this stage and mesh has it.

    No engine takes over what another one has sharded and trains.
    """
    if can_take_over(module):
        return
    if any(isinstance(part, FSDPModule) for part in module.modules()):
        raise ValueError(
            "model: another engine has sharded it already to train it, and it stays with that engine also when the "
            "engine is deleted; build the model again for this one, or copy.deepcopy it"
        )
    shards: list[Any] = [param for param in module.parameters() if _is_shard(param)]
    if shards and stage != 3:
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
    """Whether ZeRO has shared it out; a plan's parts lie over other axes."""
    return isinstance(param, DTensor) and "fsdp" in (param.device_mesh.mesh_dim_names or ())


def take_over_evaluated(module: nn.Module, stage: int, mesh_shape: tuple[int, ...]) -> None:
    """Unwraps a model that only engines without an optimizer have sharded; collective.

    It keeps its shards where they lie as an engine of this stage and mesh has them.
    """
    shapes = {param.device_mesh.shape for param in module.parameters() if isinstance(param, DTensor)}
    take_over(module, keeps_shards=stage == 3 and shapes == {mesh_shape})


@contextmanager
def placeholders(module: nn.Module) -> Iterator[None]:
    """Inside, parameters that are sharded already are plain ones without storage; after it, they are back."""
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
            if isinstance(part, FSDPModule):  # FSDP2 takes the shards over when it first gathers
                part.unshard()
                part.reshard()


def _without_storage(param: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device="meta"), param.requires_grad)
