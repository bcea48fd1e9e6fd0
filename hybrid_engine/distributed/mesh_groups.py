"""The groups of a mesh as something that one process can leave, and the store at which all processes met."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store


def default_store() -> dist.Store:
    """The store at which all processes met."""
    return _get_default_store()


_num_closed = 0
# Of the meshes that this process has closed.


def axis_name(name: str) -> str:
    """What to call an axis of a mesh that may be closed: `name` until one was, then `name` and how many.

    DTensor remembers the meshes of its results by their processes and the names of their axes: a mesh that equals a
    closed one would be taken for it.
    """
    return f"{name}_after_{_num_closed}" if _num_closed else name


def with_own_group(mesh: DeviceMesh) -> DeviceMesh:
    """`mesh` over groups that serve nothing else; collective.

    Of an axis that has all processes PyTorch makes their own group, which nobody can leave.
    """
    groups = mesh.get_all_groups()
    if dist.group.WORLD not in groups:
        return mesh
    own = [dist.new_group() if group is dist.group.WORLD else group for group in groups]
    if len(own) == 1:
        return DeviceMesh.from_group(own[0], mesh.device_type, mesh_dim_names=mesh.mesh_dim_names)
    return DeviceMesh.from_group(own, mesh.device_type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)


def close_groups(mesh: DeviceMesh) -> None:
    """Closes this process's connections in the groups of `mesh`, which serves nothing any more; local.

    The last references to the groups must go with it, which the outermost mesh has.
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
