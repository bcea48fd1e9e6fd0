"""`deepspeed.checkpointing`: recomputation of activations, by torch.utils.checkpoint.

What DeepSpeed's `configure` sets is set for the process, as there; engines do not read it, their config has the block
`activation_checkpointing`.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from hybrid_engine.config.reading import read_json

_settings: dict[str, bool] = {}


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Says whether `checkpoint` keeps its inputs in the CPU's memory; the other arguments have no meaning here.

    Args:
        deepspeed_config: a config whose block `activation_checkpointing` has `cpu_checkpointing`.
        checkpoint_in_cpu: comes before the config.
    """
    config = deepspeed_config if isinstance(deepspeed_config, (Mapping, type(None))) else read_json(deepspeed_config)
    block = (config or {}).get("activation_checkpointing") or {}
    _settings["cpu"] = bool(block.get("cpu_checkpointing", False) if checkpoint_in_cpu is None else checkpoint_in_cpu)


def is_configured() -> bool:
    """Whether `configure` was called."""
    return bool(_settings)


def reset() -> None:
    """Does nothing: there are no buffers between two steps."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, whose inner activations are computed again in the backward pass."""
    keeps_on_cpu = _settings.get("cpu", False) and torch.cuda.is_available()
    with save_on_cpu(pin_memory=True) if keeps_on_cpu else nullcontext():
        return torch_checkpoint(function, *args, use_reentrant=False)


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds this process; there are no model-parallel regions with a state of their own."""
    torch.manual_seed(seed)
