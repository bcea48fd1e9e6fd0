"""Parameters without a dimension under FSDP2, which shares out rows: every process keeps all of such a scalar.

FSDP2 refuses scalars. So while it wraps a module a vector stands in for each, with one element for each process that
shares the model out; then its record is made one of a scalar, and FSDP2 gathers and reduces that with the rest. Whoever
looks at the shard finds a DTensor of the scalar's own shape that all processes have.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hybrid_engine.zero.fsdp2_private import make_scalars
from hybrid_engine.zero.sharding import local_tensor
from hybrid_engine.zero.trained_parameter import TrainedParameter


@contextmanager
def vectors_for_scalars(module: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
    """Inside, FSDP2 may wrap `module` and its parts over `mesh`; after it, their records of scalars are such."""
    named = [(part, name, param) for part in module.modules() for name, param in part._parameters.items()]
    scalars = {(part, name): param for part, name, param in named if param is not None and not param.dim()}
    vectors = {param: _build_vector(param, mesh.size(-1)) for param in scalars.values()}  # tied ones stay one
    for (part, name), param in scalars.items():
        part._parameters[name] = vectors[param]
    yield
    make_scalars([part for part in module.modules() if isinstance(part, FSDPModule)], scalars)


def _build_vector(scalar: nn.Parameter, length: int) -> nn.Parameter:
    vector = local_tensor(scalar).expand(length).clone()
    if isinstance(scalar, DTensor):  # a plan's, over the processes of a unit
        vector = DTensor.from_local(vector, scalar.device_mesh, scalar.placements, run_check=False)
    return nn.Parameter(vector, requires_grad=scalar.requires_grad)


@torch.no_grad()
def make_gradients_equal(parameters: list[TrainedParameter]) -> None:
    """Before each step: processes that share out the model take the first one's gradients of scalars; collective.

    Each has added them up for itself, maybe in another order, and copies that are stepped by other gradients part.
    """
    scalars = [t.master for t in parameters if isinstance(t.master, DTensor) and not t.master.dim()]
    gradients = [local_tensor(master.grad) for master in scalars if master.grad is not None]
    if not gradients:
        return
    mesh = scalars[0].device_mesh
    group = mesh["fsdp"].get_group() if "fsdp" in (mesh.mesh_dim_names or ()) else None
    if group is None or dist.get_world_size(group) == 1:
        return
    values = torch.stack([gradient.float() for gradient in gradients]).to(mesh.device_type)
    dist.broadcast(values, src=dist.get_global_rank(group, 0), group=group)
    for gradient, value in zip(gradients, values, strict=True):
        gradient.copy_(value)
