"""On which axes the processes lie that share out one model."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hybrid_engine.config import EngineConfig
from hybrid_engine.distributed.processes import default_device
from hybrid_engine.zero.split_module import STAGES, tensor_axes, tensor_names

_meshes: dict[tuple[str, tuple[int, ...], tuple[str, ...]], DeviceMesh] = {}
"""Meshes that were made so far, by their layout."""
_world: list[dist.ProcessGroup | None] = []
"""The group of all processes that these belong to."""


def build_mesh(
    config: EngineConfig, world_size: int, num_stages: int = 1, split_sizes: tuple[int, ...] = ()
) -> DeviceMesh:
    """All processes on the axis `fsdp`, or groups of the config's size on it and the groups along `replicate`.

    Where `world_size` are units of several processes, these are on the last axes: `stages`, and those of
    `tensor_names`, of `split_sizes`. peft knows shards by the name `fsdp`: on another axis it gives a linear an adapter
    of the size of its shard.
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
    """One mesh for all engines of a layout: each group costs its processes threads and connections for good."""
    if _world != [dist.group.WORLD]:
        _world[:] = [dist.group.WORLD]
        _meshes.clear()
    layout = device_type, shape, names
    if layout not in _meshes:
        _meshes[layout] = init_device_mesh(device_type, shape, mesh_dim_names=names)
    return _meshes[layout]


def mesh_shape(config: EngineConfig, world_size: int) -> tuple[int, ...]:
    """The sizes of the axes of `build_mesh`'s mesh."""
    shard_size = 1 if config.zero_optimization.stage == 0 else config.zero_optimization.shard_size or world_size
    return (world_size,) if shard_size == world_size else (world_size // shard_size, shard_size)


def find_norm_group(mesh: DeviceMesh, is_sharded: bool) -> dist.ProcessGroup | None:
    """The processes whose parts together are one model, by the axes that are longer than one process.

    `is_sharded`: units, which are on the axis `fsdp`, share it out among them.
    """
    names = mesh.mesh_dim_names or ()
    wanted = (*(("fsdp",) if is_sharded else ()), STAGES, *tensor_axes(names))
    axes = tuple(name for name in wanted if name in names and mesh[name].size() > 1)
    if len(axes) > 1:
        return mesh[axes]._flatten("model").get_group()
    return mesh[axes[0]].get_group() if axes else None
