"""The device meshes of a run: processes of a unit, their counterparts in other units, and those of a pipeline.

Each process group has its own connections and threads. The groups of a deleted module are reused by the next module
over the same processes. All processes agree on which are free, because they delete a module at different times.
"""

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hybrid_engine.distributed.groups import axis_name, with_own_group
from hybrid_engine.distributed.processes import default_device, gather_objects
from hybrid_engine.extensions.parallelize.options.compute_config import ComputeConfig
from hybrid_engine.extensions.parallelize.planning.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Meshes:
    """The meshes that contain this process; None for a mesh of one process."""

    unit: DeviceMesh | None = None
    """The processes that hold one stage of a unit, by the axes of the plan."""
    data: DeviceMesh | None = None
    """The processes that hold the same part in all units."""
    zero: DeviceMesh | None = None
    """The processes of `data` for ZeRO. With `zero_ngroups`, the axes are the groups and the units of one group."""
    stages: DeviceMesh | None = None
    """The processes that hold the same part in all stages of this unit."""
    groups: dict[Hashable, dist.ProcessGroup] = field(default_factory=dict)
    """Other groups of these processes, keyed by their purpose."""
    lease: "Lease | None" = None
    """As long as it exists, no other module uses the groups of these meshes."""


class Lease:
    """Meshes that the owner of this object uses; they become free when the object is deleted."""

    def __init__(self, key: Hashable, number: int, meshes: Meshes):
        self._end = weakref.finalize(self, _free.setdefault(key, {}).__setitem__, number, meshes)
        self._end.atexit = False

    def drop(self) -> None:
        """Records that the groups are closed and cannot be reused."""
        self._end.detach()


_free: dict[Hashable, dict[int, Meshes]] = {}
"""Meshes that no module uses, keyed by layout and by number; all processes number them alike."""
_numbers: dict[Hashable, int] = {}
"""Number of meshes made, by layout."""
_world: list[dist.ProcessGroup] = []
"""The world group to which `_free` and `_numbers` belong."""


def build_meshes(plan: Plan, config: ComputeConfig) -> Meshes:
    """The meshes of this process: those of a deleted module, or new ones; collective."""
    if config.runtime_ngpus == 1:
        return Meshes()
    if _world != [dist.group.WORLD]:
        _world[:] = [dist.group.WORLD]
        _free.clear()
        _numbers.clear()
    # DTensor treats equal meshes as one, so that none made before a mesh was closed is used again.
    layout = (*plan.mesh, config.plan_ngpus, config.zero_ngroups)
    key = (default_device().type, axis_name(""), layout)
    free = set.intersection(*map(set, gather_objects(list(_free.get(key, {})))))
    if free:
        number = min(free)
        meshes = _free[key].pop(number)
    else:
        number = _numbers[layout] = _numbers.get(layout, 0) + 1
        meshes = _made(plan, config)
    return replace(meshes, lease=Lease(key, number, meshes))


def _made(plan: Plan, config: ComputeConfig) -> Meshes:
    num_processes = prod(plan.mesh)
    groups = {"groups": config.zero_ngroups, "members": config.num_units // config.zero_ngroups}
    units = groups if config.zero_ngroups > 1 else {"units": config.num_units}
    parts = {axis_name(f"part{axis}"): size for axis, size in enumerate(plan.mesh)}
    sizes = {**units, "stages": config.plan_ngpus // num_processes, **parts}
    mesh = init_device_mesh(default_device().type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    zero = mesh[tuple(units)] if config.num_units > 1 else None
    return Meshes(
        unit=with_own_group(mesh[tuple(parts)]) if num_processes > 1 else None,
        data=zero if zero is None or zero.ndim == 1 else zero._flatten("units"),
        zero=zero,
        stages=mesh["stages"] if sizes["stages"] > 1 else None,
    )
