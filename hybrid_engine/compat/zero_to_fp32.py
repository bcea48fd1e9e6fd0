"""`deepspeed.utils.zero_to_fp32`: the fp32 weights of a checkpoint of ours, read by one process without an engine."""

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hybrid_engine import checkpoint_folder

WEIGHTS = "weights."
"""What the keys of weights begin with; the others are the optimizer's."""
logger = logging.getLogger("hybrid_engine")


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """The weights by the module's names, in the CPU's memory, floating-point ones in fp32.

    Tied parameters are there once. `exclude_frozen_parameters` and `lazy_mode` are not supported.

    Args:
        checkpoint_dir: what `save_checkpoint` was given.
        tag: which checkpoint; None is the latest.

    Raises:
        ValueError: no such checkpoint, or an incomplete one.
    """
    for name, value in (("exclude_frozen_parameters", exclude_frozen_parameters), ("lazy_mode", lazy_mode)):
        if value:
            raise ValueError(f"{name}=True is not supported; leave it out, all weights are read at once")
    folder = checkpoint_folder.find(Path(checkpoint_dir), tag)
    checkpoint_folder.read_manifest(folder)
    reader = dcp.FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if key.startswith(WEIGHTS) and isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return {key.removeprefix(WEIGHTS): _widened(tensor) for key, tensor in tensors.items()}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Puts those weights into `model`, which no engine has, and returns it.

    Weights that the checkpoint has not keep their values, and the log names them.

    Raises:
        ValueError: as above; for weights that the model has not.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    own = model.state_dict(keep_vars=True)
    if unknown := sorted(state.keys() - own.keys()):
        raise ValueError(f"checkpoint {str(checkpoint_dir)!r} is of another model, which has {unknown[0]}; build that")
    loaded = {id(own[name]) for name in state}
    if kept := [name for name, tensor in own.items() if id(tensor) not in loaded]:
        logger.warning("checkpoint %s has no %s: they keep their values", checkpoint_dir, ", ".join(kept))
    model.load_state_dict(state, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes those weights to `pytorch_model.bin`, or `model.safetensors`, in the folder `output_dir`.

    It is always one file: `max_shard_size` has no meaning.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if safe_serialization:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(state, folder / "pytorch_model.bin")


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
