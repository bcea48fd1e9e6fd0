"""Counts the bytes that training keeps on this process, and describes them in an engine's report.

`ZeroEngine.report()` prints the description; the memory plan of a run is compared with the counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hybrid_engine.config import EngineConfig
from hybrid_engine.containers.device import num_bytes
from hybrid_engine.metrics.memory import format_bytes
from hybrid_engine.optim.optimizer import ZeroOptimizer
from hybrid_engine.zero.fsdp2_private import fsdp_params, unreduced_gradients
from hybrid_engine.zero.sharding import Sharding, local_tensor

WEIGHTS_BY_STAGE = (
    "whole, gradients averaged at the accumulation boundary",
    "whole, and as shards that the optimizer steps; gradients reduced at the accumulation boundary",
    "whole, and as shards that the optimizer steps; gradients reduced at every micro-batch",
    "sharded; gathered layer by layer in forward and backward, gradients reduced at every micro-batch",
)


@dataclass(frozen=True, kw_only=True)
class TrainingBytes:
    """Bytes of storage in this process's memory, including FSDP2's padding."""

    parameters: int
    """Bytes of the parameters: whole, or shards at stage 3."""
    shards: int
    """Bytes of the shards of parameters that are also kept whole."""
    masters: int
    """Bytes of the copies that the optimizer steps in place of the parameters."""
    state: int
    """Bytes of the optimizer's state."""
    gradients: int
    """Bytes of the gradients, both reduced and waiting for reduction."""


def count_bytes(sharding: Sharding, optimizer: ZeroOptimizer | None) -> TrainingBytes:
    """Counts the bytes of this process now; local."""
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
    """Yields the module's parameters; at stage 3 their shards, even while they are gathered."""
    if not sharding.is_sharded or sharding.stays_whole:
        yield from sharding.root.parameters()
        return
    gathered = fsdp_params(sharding.fsdp_modules(), is_gathered=True)
    shard_of = {id(param.unsharded_param): param.sharded_param for param in gathered}
    for parameter in sharding.root.parameters():
        yield shard_of.get(id(parameter), parameter)


def describe_memory(sharding: Sharding, optimizer: ZeroOptimizer | None, config: EngineConfig) -> str:
    """Describes stage, processes, precision, sharding and bytes of this process in a few lines."""
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
