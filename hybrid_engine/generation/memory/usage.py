"""Memory of this process: what training keeps, in bytes and in words, and what is free."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from hybrid_engine.config import EngineConfig
from hybrid_engine.containers.quantised import stored_tensors
from hybrid_engine.metrics.memory_plan import format_bytes
from hybrid_engine.optim.optimizer import ZeroOptimizer
from hybrid_engine.zero.fsdp2_private import fsdp_params, unreduced_gradients
from hybrid_engine.zero.sharding import Sharding, local_tensor

# Share of the free memory that a rollout may take; the rest is for activations and logits.
USABLE_MEMORY = 0.8

WEIGHTS_BY_STAGE = (
    "whole, gradients averaged at the accumulation boundary",
    "whole, and as shards that the optimizer steps; gradients reduced at the accumulation boundary",
    "whole, and as shards that the optimizer steps; gradients reduced at every micro-batch",
    "sharded; gathered layer by layer in forward and backward, gradients reduced at every micro-batch",
)


@dataclass(frozen=True, kw_only=True)
class TrainingBytes:
    """What lies in this process's memory now, in bytes of storage; FSDP2's padding included."""

    parameters: int
    """Bytes of the parameters: whole, or at stage 3 shards."""
    shards: int
    """Bytes of the shards of parameters that are whole beside them."""
    masters: int
    """Bytes of the copies that the optimizer steps in place of the parameters."""
    state: int
    """Bytes of the optimizer's state."""
    gradients: int
    """Bytes of gradients, reduced ones and those that wait for it."""


def count_bytes(sharding: Sharding, optimizer: ZeroOptimizer | None) -> TrainingBytes:
    """The bytes of this process now; local."""
    trained = optimizer.parameters if optimizer is not None else []
    states = optimizer.state.values() if optimizer is not None else []
    pairs = list(sharding.twins()) if sharding.stays_whole else []
    owners = [*(t.param for t in trained), *(t.master for t in trained), *(whole for _, whole in pairs)]
    waiting = unreduced_gradients(sharding.fsdp_modules())
    return TrainingBytes(
        parameters=num_bytes(_kept_parameters(sharding)),
        shards=num_bytes(shard for shard, _ in pairs),
        masters=num_bytes(t.master for t in trained if t.has_master),
        state=num_bytes(v for values in states for v in values.values() if isinstance(v, torch.Tensor)),
        gradients=num_bytes([*(owner.grad for owner in owners if owner.grad is not None), *waiting]),
    )


def _kept_parameters(sharding: Sharding) -> Iterator[torch.Tensor]:
    """Those of the module, at stage 3 as shards also while they are gathered."""
    if not sharding.is_sharded or sharding.stays_whole:
        yield from sharding.root.parameters()
        return
    gathered = fsdp_params(sharding.fsdp_modules(), is_gathered=True)
    shard_of = {id(param.unsharded_param): param.sharded_param for param in gathered}
    for parameter in sharding.root.parameters():
        yield shard_of.get(id(parameter), parameter)


def describe_memory(sharding: Sharding, optimizer: ZeroOptimizer | None, config: EngineConfig) -> str:
    """A few lines on stage, processes, precision, sharding and bytes on this process."""
    held = count_bytes(sharding, optimizer)
    beside = f", and {format_bytes(held.shards)} of shards" if held.shards else ""
    lines = [
        f"ZeRO stage {sharding.stage}, rank {sharding.rank} of {sharding.world_size}; "
        f"parameters in {str(config.dtype).removeprefix('torch.')}",
        f"weights: {_describe_sharding(sharding)}",
        f"parameters: {format_bytes(held.parameters)}{beside} on this process",
    ]
    if optimizer is None:
        return "\n".join([*lines, "no optimizer: this engine only evaluates"])
    masters = [t.master for t in optimizer.parameters]
    gradients = sum(local_tensor(master).numel() * config.accumulation_dtype.itemsize for master in masters)
    return "\n".join(
        [
            *lines,
            f"trained: {len(masters)} parameters; gradients {format_bytes(gradients)} at the step, "
            f"{format_bytes(held.gradients)} now",
            f"masters: {format_bytes(held.masters)}",
            f"optimizer state: {format_bytes(held.state)} ({type(optimizer.inner).__name__})",
        ]
    )


def _describe_sharding(sharding: Sharding) -> str:
    if sharding.unit_size > 1 and not sharding.is_sharded:
        return f"split by a plan over the {sharding.unit_size} processes of a unit"
    if not sharding.is_sharded and sharding.world_size > 1:
        return "whole on every process and unwrapped, nothing is trained"
    if not sharding.is_sharded:
        return "whole and unwrapped, a single process has nobody to share with"
    groups = f"{len(sharding.layers) + 1} FSDP groups, {len(sharding.layers)} for layers and one for the rest"
    return f"{WEIGHTS_BY_STAGE[sharding.stage]}; {groups}"


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages on this process that the tensors lie in, each counted once."""
    plain = (part for tensor in tensors for part in stored_tensors(tensor))
    storages = [local_tensor(tensor).untyped_storage() for tensor in plain]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def usable_memory_bytes(device: torch.device) -> int:
    """What a rollout may allocate on `device` now."""
    free, _ = free_and_total_bytes(device)
    return int(free * USABLE_MEMORY)


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """What `device` can still give, the allocator's own stock included, and what it has in all."""
    if device.type != "cuda":
        return _host_bytes()
    free, total = torch.cuda.mem_get_info(device)
    stock = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + stock - _idle_bytes_of_graphs(device), total


def _idle_bytes_of_graphs(device: torch.device) -> int:
    """What the allocator keeps for recorded graphs alone: no tensor takes it, and no other may have it."""
    index = torch.cuda.current_device() if device.index is None else device.index
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == index]
    private = [segment for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in private)


def _host_bytes() -> tuple[int, int]:
    """What this machine's memory still takes before it swaps, and all of it."""
    if sys.platform == "linux":
        with open("/proc/meminfo", "rb", buffering=0) as file:  # each rollout reads it several times
            total, _, available = (int(line.split()[1]) * 1024 for line in file.read(256).splitlines()[:3])
        return available, total
    # Here, not at the top: Linux does without it.
    import psutil

    memory = psutil.virtual_memory()
    return int(memory.available), int(memory.total)
