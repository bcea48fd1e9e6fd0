"""The processes of a run as meshes: those of a unit, their counterparts in other units, those of a pipeline."""

from dataclasses import dataclass
from math import prod

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hybrid_engine.distributed.mesh_groups import axis_name, with_own_group
from hybrid_engine.distributed.processes import default_device
from hybrid_engine.parallel.compute_config import ComputeConfig
from hybrid_engine.parallel.planning.plan import Plan


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


def build_meshes(plan: Plan, config: ComputeConfig) -> Meshes:
    """The meshes of this process; collective."""
    if config.runtime_ngpus == 1:
        return Meshes()
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
