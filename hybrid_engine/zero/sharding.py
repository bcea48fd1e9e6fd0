"""Shards a module over the processes with FSDP2: one group per transformer layer and one for the rest.

ZeRO's stages are three switches of the same machinery:

| stage | a process keeps            | parameters between forward and backward | gradients are reduced     |
|-------|----------------------------|-----------------------------------------|---------------------------|
| 0     | everything                 | whole                                   | at the last micro-batch   |
| 1     | its shard of the optimizer | whole                                   | at the last micro-batch   |
| 2     | ... and of the gradients   | whole                                   | at every micro-batch      |
| 3     | ... and of the parameters  | its shard                               | at every micro-batch      |

One process wraps nothing: gathering from oneself is still a copy.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hybrid_engine.zero.processes import get_rank, get_world_size


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a module lies on the processes."""

    root: nn.Module
    """The whole module; an FSDPModule when sharded."""
    layers: list[nn.Module] = field(default_factory=list)
    """The FSDPModules of the transformer layers, in order; empty when nothing is wrapped."""
    stage: int
    world_size: int
    rank: int
    mesh: DeviceMesh | None = None
    """Axis `shard`, below an axis `replicate` at stage 0; None when nothing is wrapped."""

    @property
    def is_sharded(self) -> bool:
        """Whether the parameters are DTensors under FSDP2 (stage 0 too, with shards that are the whole)."""
        return self.mesh is not None

    @property
    def norm_group(self) -> dist.ProcessGroup | None:
        """The processes whose shards together are one model; None when this process has all of it."""
        if self.mesh is None or self.mesh["shard"].size() == 1:
            return None
        return self.mesh["shard"].get_group()

    def set_gradient_sync(self, is_boundary: bool) -> None:
        """Says whether the next backward pass reduces the gradients or keeps adding them up locally."""
        if isinstance(self.root, FSDPModule):
            self.root.set_requires_gradient_sync(is_boundary or self.stage >= 2)

    def reshard(self) -> None:
        """Frees every gathered parameter, so that only the shards remain.

        Needed before the shards change: below stage 3, and after a forward pass without a backward, the gathered
        copies stay, and the next forward pass would use them instead of gathering the new values.
        """
        for module in self._fsdp_modules():
            module.reshard()

    def drop_pending_gradients(self) -> None:
        """Forgets the gradients that stages 0 and 1 hold unreduced between two boundaries."""
        for module in self._fsdp_modules():
            # Private, for lack of a public way; these names hold from torch 2.11 to 2.13. A module without parameters
            # of its own has no group.
            group = module._get_fsdp_state()._fsdp_param_group
            for param in group.fsdp_params if group is not None else ():
                param.unsharded_accumulated_grad = None
                if hasattr(param, "_unsharded_param"):
                    param._unsharded_param.grad = None

    def _fsdp_modules(self) -> list[FSDPModule]:
        return [module for module in self.root.modules() if isinstance(module, FSDPModule)]


def shard_module(module: nn.Module, *, stage: int) -> Sharding:
    """Wraps `module` in place for ZeRO stage `stage`; its parameters become DTensors unless the process is alone."""
    world_size, rank = get_world_size(), get_rank()
    if world_size == 1:
        return Sharding(root=module, stage=stage, world_size=1, rank=0)
    device = next(module.parameters()).device
    if stage == 0:
        mesh = init_device_mesh(device.type, (world_size, 1), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    layers = find_layers(module)
    for part in [*layers, module]:
        _fully_shard(part, mesh, stage)
    return Sharding(root=module, layers=layers, stage=stage, world_size=world_size, rank=rank, mesh=mesh)


def _fully_shard(part: nn.Module, mesh: DeviceMesh, stage: int) -> None:
    low_precision = any(p.dtype in (torch.bfloat16, torch.float16) for p in part.parameters())
    # Adding up many ranks' gradients in 16 bits would round each sum.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if low_precision else None)
    fully_shard(part, mesh=mesh, reshard_after_forward=stage == 3, mp_policy=policy)
    # Averages are then a sum and a division; gloo has no reduction with a factor.
    part.set_force_sum_reduction_for_comms(True)


def find_layers(module: nn.Module) -> list[nn.Module]:
    """The transformer layers: the items of the ModuleList of one repeated class that holds the most parameters."""
    candidates = [
        list(dict.fromkeys(child))
        for child in module.modules()
        if isinstance(child, nn.ModuleList) and len({type(item) for item in child}) == 1
    ]
    return max(candidates, key=_num_parameters, default=[])


def _num_parameters(layers: list[nn.Module]) -> int:
    return sum(p.numel() for layer in layers for p in layer.parameters())


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of `tensor` that lies on this process, as a detached alias; `tensor` itself when it is not sharded."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of `tensor`, detached; collective when it is sharded."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
