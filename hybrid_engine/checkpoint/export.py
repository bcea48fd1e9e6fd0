"""Writes the trained model for `from_pretrained`, adapters merged, or as a state dict; live weights stay as they are.

The weights are gathered to rank 0's memory and given to an empty model of the same class, which saves itself.
"""

import copy
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from hybrid_engine.checkpoint.names import check_file_name, check_folder
from hybrid_engine.checkpoint.peft_models import without_renamed_attribute_warning
from hybrid_engine.checkpoint.work_folder import save_state_dict, writing_files
from hybrid_engine.containers.linear import active_adapters, carries_lora, stores_transposed
from hybrid_engine.containers.quantised import dequantise_weight_of, is_quantised
from hybrid_engine.distributed.processes import get_rank, on_rank_zero
from hybrid_engine.zero.sharding import full_tensor
from hybrid_engine.zero.split_module import is_split_class

STATE_DICT = "pytorch_model.bin"


def save_16bit_model(
    module: nn.Module,
    save_dir: str | os.PathLike[str],
    filename: str | None = None,
    without_frozen: bool = False,
) -> Path:
    """Saves `module`, in the precision it computes in; collective.

    A model of transformers becomes a Hugging Face folder: the active adapters of a `PeftModel`, or those that linears
    carry themselves, are merged into a copy of the base weights, and the base model is saved. Files of an earlier save
    are replaced one by one when all new ones are complete.

    Args:
        module: the engine's module, sharded or not, with nothing gathered.
        save_dir: the folder; made if it does not exist.
        filename: writes the module's state dict, adapters apart, to this file of it instead; None does that only for
            a module that is not of transformers, under the name "pytorch_model.bin".
        without_frozen: writes such a state dict in any case, and leaves parameters out that require no gradient.

    Raises:
        ValueError: `filename` is no plain name of a file; `save_dir` no path.
        OSError: the folder cannot be written to; what is in it stays.
    """
    base = module.get_base_model() if isinstance(module, PeftModel) else module
    folder = check_folder("save_dir", save_dir)
    if filename is not None:
        check_file_name("save_filename", filename)
    left_out = {name for name, p in _named_parameters(module) if without_frozen and not p.requires_grad}
    weights = gather_weights(module, left_out)
    if filename is None and not without_frozen and isinstance(base, PreTrainedModel):
        on_rank_zero(lambda: _write(_rebuild(module, base, weights), folder))
    else:
        state = {name: weights.get(name) for name in module.state_dict() if name not in left_out}
        on_rank_zero(lambda: _write_state(state, folder, filename or STATE_DICT))
    return folder


def _named_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Tied ones under each of their names."""
    return list(module.named_parameters(remove_duplicate=False))


def gather_weights(module: nn.Module, left_out: Collection[str]) -> dict[str, torch.Tensor]:
    """Copies of all other parameters and buffers by name, on the CPU of rank 0; empty on other processes.

    Tied parameters share one copy; quantised ones are dequantised.
    """
    copies: dict[int, torch.Tensor] = {}
    weights = {}
    quantised = {id(part.weight): part for part in module.modules() if is_quantised(getattr(part, "weight", None))}
    for name, tensor in [*_named_parameters(module), *module.named_buffers(remove_duplicate=False)]:
        if name in left_out:
            continue
        if id(tensor) not in copies:
            holder = quantised.get(id(tensor))
            whole = full_tensor(tensor) if holder is None else dequantise_weight_of(holder)
            copies[id(tensor)] = whole.to("cpu", copy=True) if get_rank() == 0 else whole.new_empty(0)
        if get_rank() == 0:
            weights[name] = copies[id(tensor)]
    return weights


def _rebuild(module: nn.Module, base: PreTrainedModel, weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    """A plain model with these weights, outside of FSDP and without adapters."""
    _merge_own_adapters(module, weights)
    config, head = copy.deepcopy(base.config), base.get_output_embeddings()
    if hasattr(config, "quantization_config"):  # what is written is in full precision
        del config.quantization_config
    if head is not None and carries_lora(head):
        config.tie_word_embeddings = False  # the head's adapter is no part of the embedding
    with torch.device("meta"):
        skeleton = _unsharded_class(base)(config)
        rebuilt = _add_adapters(skeleton, module) if isinstance(module, PeftModel) else skeleton
    # Buffers that are not saved are no part of a state dict, and stay on the meta device.
    rebuilt.load_state_dict({name: weights[name] for name in rebuilt.state_dict()}, assign=True)
    skeleton.tie_weights()
    if hasattr(base, "generation_config"):  # a classifier has none
        skeleton.generation_config = copy.deepcopy(base.generation_config)
    if isinstance(module, PeftModel):
        return rebuilt.merge_and_unload(adapter_names=_active_adapters(module))
    return skeleton


def _merge_own_adapters(module: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Adds the adapters that linears carry themselves to those linears' weights."""
    for name, linear in module.named_modules():
        for adapter in active_adapters(linear, name) if carries_lora(linear) else []:
            weight = weights[f"{name}.weight"]
            right, left = (weights[f"{name}.lora_{side}_weight"].float() for side in ("right", "left"))
            factors = (right, left) if stores_transposed(linear) else (left.t(), right.t())
            weights[f"{name}.weight"] = torch.addmm(weight.float(), *factors, alpha=adapter.scale).to(weight.dtype)


def _unsharded_class(model: PreTrainedModel) -> Any:
    own = (base for base in type(model).__mro__ if issubclass(base, PreTrainedModel))
    return next(base for base in own if not issubclass(base, FSDPModule) and not is_split_class(base))


def _add_adapters(skeleton: PreTrainedModel, source: PeftModel) -> Any:
    configs = {name: copy.deepcopy(config) for name, config in source.peft_config.items()}
    for config in configs.values():
        # The weights follow; some initialisations would compute with the base weights, which are not there yet.
        config.init_lora_weights = False
    (name, config), *others = configs.items()
    with without_renamed_attribute_warning():
        model = PeftModel(skeleton, config, adapter_name=name)
    for name, config in others:
        model.add_adapter(name, config)
    return model


def _active_adapters(model: PeftModel) -> list[str]:
    active = model.active_adapter
    return [active] if isinstance(active, str) else list(active)


def _write(model: PreTrainedModel, folder: Path) -> None:
    with writing_files(folder) as writing:
        model.save_pretrained(writing)


def _write_state(state: dict[str, Any], folder: Path, filename: str) -> None:
    with writing_files(folder) as writing:
        save_state_dict(state, writing / filename)
