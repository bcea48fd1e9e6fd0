"""`deepspeed.utils.zero_to_fp32`: the fp32 weights of a checkpoint of ours, read by one process without an engine.

The script `zero_to_fp32.py` that `save_checkpoint` leaves next to checkpoints calls `main`.
"""

import argparse
import logging
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from hybrid_engine.checkpoint.folder import check_not_deepspeeds, find, save_state_dict, writing_files
from hybrid_engine.checkpoint.manifest import check_files, check_folder, read_manifest
from hybrid_engine.checkpoint.saving import WEIGHTS
from hybrid_engine.checkpoint.tensor_files import read_index, read_tensors

logger = logging.getLogger("hybrid_engine")


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """The weights by the module's names, in the CPU's memory, floating-point ones in fp32.

    Tied parameters are there under each of their names, as one tensor; those of a checkpoint of format 1 under one
    name. `lazy_mode` is not supported.

    Args:
        checkpoint_dir: what `save_checkpoint` was given.
        tag: which checkpoint; None is the latest.
        exclude_frozen_parameters: without those that required no gradient; buffers are there.

    Raises:
        ValueError: no such checkpoint, or an incomplete or damaged one; one of an earlier version does not say which
            parameters were frozen.
        OSError: it cannot be read.
    """
    if lazy_mode:
        raise ValueError("lazy_mode=True is not supported; leave it out, all weights are read at once")
    folder = find(check_folder("checkpoint_dir", checkpoint_dir), tag)
    check_not_deepspeeds(folder)
    manifest = read_manifest(folder)
    check_files(folder, manifest.get("checksums", {}))
    frozen = _frozen_names(folder, manifest) if exclude_frozen_parameters else ()
    state = _read_weights(folder, read_index(folder, manifest["files"]), frozen)
    return {**state, **{name: state[first] for name, first in manifest.get("tied", {}).items() if first in state}}


def _frozen_names(folder: Path, manifest: dict[str, Any]) -> list[str]:
    if "frozen" not in manifest:
        raise ValueError(
            f"exclude_frozen_parameters=True: checkpoint {str(folder)!r} was saved by an earlier version and does not "
            f"say which parameters were frozen; leave it out, or save the checkpoint again"
        )
    return list(manifest["frozen"])


def _read_weights(folder: Path, index: Metadata, left_out: Collection[str]) -> dict[str, torch.Tensor]:
    unread = {f"{WEIGHTS}{name}" for name in left_out}
    entries = index.state_dict_metadata.items()
    stored = {key: entry for key, entry in entries if key.startswith(WEIGHTS) and key not in unread}
    try:
        tensors = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in stored.items()}
        read_tensors(tensors, folder, index)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"checkpoint {str(folder)!r} is damaged ({error}); load another tag") from error
    return {key.removeprefix(WEIGHTS): _widened(tensor) for key, tensor in tensors.items()}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Puts those weights into `model`, which no engine has, and returns it.

    Weights that the checkpoint does not have keep their values, and the log names them.

    Raises:
        ValueError: as above; for weights that the model does not have.
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

    It is always one file: `max_shard_size` has no meaning. One of that name is replaced when the new one is complete.
    """
    folder = check_folder("output_dir", output_dir)
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    with writing_files(folder) as writing:
        if safe_serialization:
            # safetensors stores no tensor twice; whoever loads the file ties its weights again.
            first_names = {id(tensor): name for name, tensor in reversed(state.items())}
            once = {name: state[name] for name in first_names.values()}
            save_file(once, writing / "model.safetensors", metadata={"format": "pt"})
        else:
            save_state_dict(state, writing / "pytorch_model.bin")


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def main(arguments: Sequence[str] | None = None) -> None:
    """The command of `zero_to_fp32.py`, with the options of DeepSpeed's."""
    parser = argparse.ArgumentParser(
        prog="zero_to_fp32.py", description="Writes the fp32 weights of a checkpoint to one file."
    )
    parser.add_argument("checkpoint_dir", help="the folder that save_checkpoint() was given, such as .")
    parser.add_argument("output_dir", help="where pytorch_model.bin or model.safetensors is written")
    parser.add_argument("--max_shard_size", default="5GB", help="no meaning here: it is always one file")
    parser.add_argument("--safe_serialization", action="store_true", help="write model.safetensors")
    parser.add_argument("-t", "--tag", help="which checkpoint, such as global_step1; the latest if left out")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen parameters out")
    parser.add_argument("-d", "--debug", action="store_true", help="no meaning here")
    args = vars(parser.parse_args(arguments))
    del args["debug"]
    try:
        convert_zero_checkpoint_to_fp32_state_dict(**args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
