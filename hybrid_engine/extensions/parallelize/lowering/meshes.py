"""The processes of a run as meshes: those of a unit, their counterparts in other units, those of a pipeline.

Each process group has connections and threads of its own. Those of a module that is gone serve the next one over the
same processes: which are free all processes agree on, as they forget a module at different times.
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
    """The meshes in which this process stands; None where it stands alone."""

    unit: DeviceMesh | None = None
    """The processes that hold one stage of a unit, by the axes of the plan."""
    data: DeviceMesh | None = None
    """The processes that hold the same part in all units."""
    zero: DeviceMesh | None = None
    """The processes of `data` as ZeRO sees them: with groups, the axes are the groups and the units of one."""
    stages: DeviceMesh | None = None
    """The processes that hold the same part of all stages of this unit."""
    groups: dict[Hashable, dist.ProcessGroup] = field(default_factory=dict)
    """Other groups of these processes, by what they are for."""
    lease: "Lease | None" = None
    """While it is there, the groups of these meshes serve no other module."""


class Lease:
    """Meshes that are in use by whoever holds this; they are free again when it is gone."""

    def __init__(self, key: Hashable, number: int, meshes: Meshes):
        self._end = weakref.finalize(self, _free.setdefault(key, {}).__setitem__, number, meshes)
        self._end.atexit = False

    def drop(self) -> None:
        """Takes note that the groups are closed, and serve nothing any more."""
        self._end.detach()


_free: dict[Hashable, dict[int, Meshes]] = {}
"""Meshes that no module uses: by their layout, then by their numbers, which all processes give alike."""
_numbers: dict[Hashable, int] = {}
"""How many were made."""
_world: list[dist.ProcessGroup] = []
"""The group of all processes that these belong to."""


def build_meshes(plan: Plan, config: ComputeConfig) -> Meshes:
    """The meshes of this process: those of a module that is gone, or new ones; collective."""
    if config.runtime_ngpus == 1:
        return Meshes()
    if _world != [dist.group.WORLD]:
        _world[:] = [dist.group.WORLD]
        _free.clear()
        _numbers.clear()
    # DTensor takes equal meshes for one: of those that were made before one was closed none is used again.
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
