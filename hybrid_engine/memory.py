"""Memory of this process: what training keeps, in bytes and in words, and what is free."""

from collections.abc import Iterable

import psutil
import torch

from hybrid_engine.config import EngineConfig
from hybrid_engine.zero.optimizer import ZeroOptimizer
from hybrid_engine.zero.sharding import Sharding, local_tensor

# Share of the free memory that a rollout may take; the rest is for activations and logits.
USABLE_MEMORY = 0.8

WEIGHTS_BY_STAGE = (
    "replicated, gradients averaged at the accumulation boundary",
    "sharded; whole between forward and backward, gradients reduced at the accumulation boundary",
    "sharded; whole between forward and backward, gradients reduced at every micro-batch",
    "sharded; gathered layer by layer in forward and backward, gradients reduced at every micro-batch",
)


def describe_memory(sharding: Sharding, optimizer: ZeroOptimizer | None, config: EngineConfig) -> str:
    """A few lines on stage, processes, precision, sharding and bytes on this process."""
    lines = [
        f"ZeRO stage {sharding.stage}, rank {sharding.rank} of {sharding.world_size}; "
        f"parameters in {str(config.dtype).removeprefix('torch.')}",
        f"weights: {_describe_sharding(sharding)}",
        f"parameters: {format_bytes(num_bytes(sharding.root.parameters()))} on this process",
    ]
    if optimizer is None:
        return "\n".join([*lines, "no optimizer: this engine only evaluates"])
    masters = [t.master for t in optimizer.parameters]
    copies = [t.master for t in optimizer.parameters if t.has_master]
    state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, torch.Tensor)]
    return "\n".join(
        [
            *lines,
            f"trained: {len(masters)} parameters; fp32 gradients {format_bytes(4 * num_elements(masters))} at the step",
            f"fp32 masters: {format_bytes(num_bytes(copies))}",
            f"optimizer state: {format_bytes(num_bytes(state))} ({type(optimizer.inner).__name__})",
        ]
    )


def _describe_sharding(sharding: Sharding) -> str:
    if not sharding.is_sharded and sharding.world_size > 1:
        return "whole on every process and unwrapped, nothing is trained"
    if not sharding.is_sharded:
        return "whole and unwrapped, a single process has nobody to share with"
    groups = f"{len(sharding.layers) + 1} FSDP groups, {len(sharding.layers)} for layers and one for the rest"
    return f"{WEIGHTS_BY_STAGE[sharding.stage]}; {groups}"


def num_elements(tensors: Iterable[torch.Tensor]) -> int:
    """Elements on this process."""
    return sum(local_tensor(tensor).numel() for tensor in tensors)


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes on this process."""
    return sum(local_tensor(tensor).numel() * tensor.element_size() for tensor in tensors)


def format_bytes(count: int) -> str:
    """`count` in the largest binary unit that keeps it above one."""
    if count < 1024:
        return f"{count} B"
    power = min(3, (count.bit_length() - 1) // 10)
    return f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"


def usable_memory_bytes(device: torch.device) -> int:
    """What a rollout may allocate on `device` now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        free = psutil.virtual_memory().available
    return int(free * USABLE_MEMORY)
