"""Groups of a mesh that one process can leave by itself, gloo groups for CPU tensors, and the default store."""

from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store

_num_closed = 0
_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
"""Gloo groups by the group of all processes, which a script may replace, and by ranks."""
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""(output `[W * n]`, input `[n]`, group): concatenates the parts of all W processes."""
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""(output `[n]`, input `[W * n]`, op, group): computes this process's part of the sum."""


def default_store() -> dist.Store:
    """The store at which all processes met."""
    return _get_default_store()


def axis_name(name: str) -> str:
    """The name of an axis of a mesh that may be closed: `name`, followed by the number of closed meshes if above 0.

    DTensor remembers the meshes of its results by their processes and the names of their axes. Without the number it
    would take a new mesh for an equal one that is closed.
    """
    return f"{name}_after_{_num_closed}" if _num_closed else name


def with_own_group(mesh: DeviceMesh) -> DeviceMesh:
    """`mesh` over groups that no other mesh uses; collective.

    PyTorch gives an axis that spans all processes the default group, which a process cannot leave.
    """
    groups = mesh.get_all_groups()
    if dist.group.WORLD not in groups:
        return mesh
    own = [dist.new_group() if group is dist.group.WORLD else group for group in groups]
    if len(own) == 1:
        return DeviceMesh.from_group(own[0], mesh.device_type, mesh_dim_names=mesh.mesh_dim_names)
    return DeviceMesh.from_group(own, mesh.device_type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)


def close_groups(mesh: DeviceMesh) -> None:
    """Closes this process's connections in the groups of `mesh`, which must not be used afterwards; local.

    The last references to the groups must be released with it; the outermost mesh holds them.
    """
    global _num_closed
    _num_closed += 1
    registry = getattr(mesh._get_root_mesh(), "_pg_registry", {})
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        assert group is not dist.group.WORLD, f"{mesh=}"
        registry.pop(group.group_name, None)
        dist.destroy_process_group(group)
        del group


def host_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """`group`, or a gloo group of the same processes if `group` does not accept CPU tensors.

    Valid until the group of all processes is destroyed. The first call may be collective over the processes of `group`,
    later ones are local.

    Args:
        group: a group that this process belongs to; None is the group of all processes.
    """
    world = dist.group.WORLD
    assert world is not None, "there is no process group"
    group = world if group is None else group
    if "cpu:" in dist.get_backend_config(group):
        return group
    ranks, made = tuple(dist.get_process_group_ranks(group)), _made.setdefault(world, {})
    assert list(ranks) == sorted(ranks), f"{ranks=}"  # new_group sorts them
    if ranks not in made:
        # Processes outside of the group need not make this call: they may be in another part of the program.
        made[ranks] = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
    return made[ranks]
