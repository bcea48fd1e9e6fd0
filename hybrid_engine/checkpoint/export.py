"""Writes the trained model for `from_pretrained`, adapters merged, or a state dict, or the adapter alone.

Live weights are not changed: the weights are gathered to rank 0's memory and loaded into an empty model of the same
class, which saves itself. The new files are loaded and compared with the trained model before they replace an earlier
save.
"""

import copy
import os
import re
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from hybrid_engine.checkpoint.folder import save_state_dict, writing_files
from hybrid_engine.checkpoint.manifest import check_file_name, check_folder
from hybrid_engine.checkpoint.saved_logits import Probe, check_saved_logits, without_renamed_attribute_warning
from hybrid_engine.containers.quantised import dequantise_weight_of, is_quantised
from hybrid_engine.containers.views import active_adapters, carries_lora, stores_transposed
from hybrid_engine.distributed.processes import get_rank, on_rank_zero
from hybrid_engine.zero.sharding import full_tensor
from hybrid_engine.zero.split_module import is_split_class

STATE_DICT = "pytorch_model.bin"
WEIGHTS = "adapter_model.safetensors"


def save_16bit_model(
    module: nn.Module,
    save_dir: str | os.PathLike[str],
    filename: str | None = None,
    without_frozen: bool = False,
    probe: Probe | None = None,
) -> Path:
    """Saves `module`, in the precision it computes in; collective.

    A model of transformers becomes a Hugging Face folder: the active adapters of a `PeftModel`, or those that linears
    carry themselves, are merged into a copy of the base weights, and the base model is saved. An embedding and a head
    that were tied and are no longer equal are saved separately. Files of an earlier save are replaced one by one when
    all new ones are complete.

    Args:
        module: the engine's module, sharded or not, with nothing gathered.
        save_dir: the folder; made if it does not exist.
        filename: writes the module's state dict, with adapters as separate entries, to this file in `save_dir` instead;
            None does so only for a module that is not of transformers, under the name "pytorch_model.bin".
        without_frozen: always writes a state dict, without the parameters that require no gradient.
        probe: tokens with the logits of `module` for them; a folder with other logits is not saved. None compares
            nothing.

    Raises:
        ValueError: `filename` is not a plain file name; `save_dir` is not a path; an adapter cannot be merged.
        RuntimeError: the saved model's logits are not those of `probe`.
        OSError: the folder cannot be written to; its contents stay.
    """
    base = module.get_base_model() if isinstance(module, PeftModel) else module
    folder = check_folder("save_dir", save_dir)
    if filename is not None:
        check_file_name("save_filename", filename)
    becomes_folder = filename is None and not without_frozen and isinstance(base, PreTrainedModel)
    if becomes_folder and _has_peft_adapters(module):
        _check_can_merge(module)
    left_out = {name for name, p in _named_parameters(module) if without_frozen and not p.requires_grad}
    weights = gather_weights(module, left_out)
    if becomes_folder:
        on_rank_zero(lambda: _write(_rebuild(module, base, weights), folder, probe))
    else:
        state = {name: weights.get(name) for name in module.state_dict() if name not in left_out}
        on_rank_zero(lambda: _write_state(state, folder, filename or STATE_DICT))
    return folder


def _named_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(remove_duplicate=False))


def gather_weights(module: nn.Module, left_out: Collection[str]) -> dict[str, torch.Tensor]:
    """Copies of all other parameters and buffers by name, on the CPU of rank 0; empty on other processes.

    Tied parameters share one copy; quantized ones are dequantized.
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


def _has_peft_adapters(module: nn.Module) -> bool:
    """Whether `module` is a `PeftModel`, or a model of transformers after `add_adapter()`."""
    return isinstance(module, PeftModel) or bool(getattr(module, "_hf_peft_config_loaded", False))


def _check_can_merge(model: Any) -> None:
    """Raises ValueError if the adapters of `model` are of a kind, or in a state, that peft does not merge."""
    if isinstance(model, PeftModel) and not hasattr(model.base_model, "merge_and_unload"):
        raise _cannot_merge(model, "no weights of the base model can express it")
    layers = [part for part in model.modules() if isinstance(part, BaseTunerLayer)]
    for is_so, state, remedy in (
        (any(layer.merged for layer in layers), "merged into the weights already", "unmerge_adapter()"),
        (any(layer.disable_adapters for layer in layers), "disabled", "enable_adapter_layers()"),
    ):
        if is_so:
            raise ValueError(f"save_16bit_model(): the adapters of the model are {state}; call {remedy} on it first")


def _cannot_merge(model: Any, reason: str) -> ValueError:
    name = _active_adapters(model)[0]
    kind = model.peft_config[name].peft_type.value
    return ValueError(
        f"save_16bit_model(): adapter {name!r} is {kind}, which is not merged into weights ({reason}); save "
        "the adapter by itself, with engine.module.save_pretrained() (inside GatheredParameters at stage 3)"
    )


def _rebuild(module: nn.Module, base: PreTrainedModel, weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    """A plain model on the CPU with these weights, outside of FSDP and without adapters; `weights` may be modified."""
    _merge_own_adapters(module, weights)
    config = copy.deepcopy(base.config)
    if hasattr(config, "quantization_config"):  # the weights are written in full precision
        del config.quantization_config
    with torch.device("meta"):
        skeleton = unsharded_class(base)(config)
    # Buffers that are not saved are not part of a state dict and stay on the meta device.
    if _has_peft_adapters(module):
        skeleton = _merge_adapters(skeleton, module, weights)
    else:
        skeleton.load_state_dict({name: weights[name] for name in skeleton.state_dict()}, assign=True)
    _tie_what_is_equal(skeleton)
    if hasattr(base, "generation_config"):  # a classifier does not have one
        skeleton.generation_config = copy.deepcopy(base.generation_config)
    return skeleton


def _merge_adapters(skeleton: Any, module: Any, weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    """`skeleton` with its weights, the active adapters of `module` merged by peft.

    Tied weights are separate tensors here: an adapter of one must not change the other, and peft merges into the shared
    memory.
    """
    weights.update(unshared(weights))
    plain = {_name_in_base(name): tensor for name, tensor in weights.items()}
    state = skeleton.state_dict()
    if not state.keys() <= plain.keys():
        raise _cannot_merge(module, f"{type(module.base_model).__name__} wraps the base model in another way")
    skeleton.load_state_dict({name: plain[name] for name in state}, assign=True)
    with torch.random.fork_rng(devices=[]):
        rebuilt = _add_adapters(skeleton, module)
    alike = rebuilt if isinstance(module, PeftModel) else skeleton  # has the names of `module`
    alike.load_state_dict({name: weights[name] for name in alike.state_dict()}, assign=True)
    _copy_adapter_tensors(module, alike)
    is_tied = getattr(skeleton.config, "tie_word_embeddings", False)
    try:
        with warnings.catch_warnings():
            # peft compares memory, not values, and then writes into the config that the embeddings are not tied.
            warnings.filterwarnings("ignore", message="Input and output embeddings are no longer tied")
            merged = rebuilt.merge_and_unload(adapter_names=_active_adapters(module))
    except (NotImplementedError, ValueError) as error:
        raise _cannot_merge(module, str(error)) from error
    merged.config.tie_word_embeddings = is_tied
    return merged


def _name_in_base(name: str) -> str:
    wrappers = r"\.(token_adapter\.base_layer|base_layer|original_module)(?=\.)"
    return re.sub(wrappers, "", name.removeprefix("base_model.model."))


def unshared(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`weights` with a separate tensor for each name."""
    first_names = {id(tensor): name for name, tensor in reversed(weights.items())}
    return {name: tensor if first_names[id(tensor)] == name else tensor.clone() for name, tensor in weights.items()}


@torch.no_grad()
def _copy_adapter_tensors(source: nn.Module, target: nn.Module) -> None:
    """Copies tensors that adapter layers keep outside of state dicts: buffers, and tensors in plain dictionaries.

    Some kinds draw them at random when they are built, such as positions in the weight.
    """
    buffers = dict(source.named_buffers())
    for name, buffer in target.named_buffers():
        if name in buffers and buffers[name].shape == buffer.shape and not buffer.is_meta:
            buffer.copy_(buffers[name])
    layers = dict(source.named_modules())
    for name, layer in target.named_modules():
        for attribute in vars(layer).keys() - vars(nn.Module()).keys():
            value, live = getattr(layer, attribute), getattr(layers.get(name), attribute, None)
            if isinstance(value, dict) and isinstance(live, dict):
                tensors = {key: tensor for key, tensor in live.items() if isinstance(tensor, torch.Tensor)}
                value.update({key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()})


def _tie_what_is_equal(model: Any) -> None:
    """Ties the weights that the model's config ties, if they are equal; otherwise sets the config to not tied."""
    state = model.state_dict()
    pairs = model.get_expanded_tied_weights_keys(all_submodels=True).items()
    if all(torch.equal(state[target], state[source]) for target, source in pairs):
        model.tie_weights()
        return
    for config in {id(config): config for config in (model.config, model.config.get_text_config())}.values():
        config.tie_word_embeddings = False
    for part in model.modules():
        if hasattr(part, "all_tied_weights_keys"):
            part.all_tied_weights_keys = {}


def _merge_own_adapters(module: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    for name, linear in module.named_modules():
        for adapter in active_adapters(linear, name) if carries_lora(linear) else []:
            weight = weights[f"{name}.weight"]
            right, left = (weights[f"{name}.lora_{side}_weight"].float() for side in ("right", "left"))
            factors = (right, left) if stores_transposed(linear) else (left.t(), right.t())
            weights[f"{name}.weight"] = torch.addmm(weight.float(), *factors, alpha=adapter.scale).to(weight.dtype)


def unsharded_class(model: PreTrainedModel) -> Any:
    """The transformers class that `model` had before it was sharded or split."""
    own = (base for base in type(model).__mro__ if issubclass(base, PreTrainedModel))
    return next(base for base in own if not issubclass(base, FSDPModule) and not is_split_class(base))


def _add_adapters(skeleton: PreTrainedModel, source: Any) -> Any:
    configs = {name: copy.deepcopy(config) for name, config in source.peft_config.items()}
    for config in configs.values():
        # Weights are loaded later; some initializations would use the base weights, which are not loaded yet.
        config.init_lora_weights = False
    (name, config), *others = configs.items()
    with without_renamed_attribute_warning():
        model = PeftModel(skeleton, config, adapter_name=name)
    for name, config in others:
        model.add_adapter(name, config)
    model.base_model.set_adapter(_active_adapters(source))
    return model


def _active_adapters(model: Any) -> list[str]:
    """Names of the adapters that `model` computes with; on transformers' own models the attribute is a method."""
    active = model.active_adapters
    return list(active() if callable(active) else active)


def _write(model: PreTrainedModel, folder: Path, probe: Probe | None) -> None:
    with writing_files(folder) as writing:
        model.save_pretrained(writing)
        if probe is not None:
            check_saved_logits(type(model), writing, probe)


def _write_state(state: dict[str, Any], folder: Path, filename: str) -> None:
    with writing_files(folder) as writing:
        save_state_dict(state, writing / filename)


def save_adapter(module: nn.Module, folder: Path) -> bool:
    """Saves the active adapter of a `PeftModel`, in the precision it computes in; collective.

    The files are those of peft's own `save_pretrained`; `module` may be sharded, with nothing gathered.

    Returns:
        True if there was an adapter to save; without one nothing is written.
    """
    if not isinstance(module, PeftModel):
        return False
    adapter = module.active_adapter
    left_out = {name for name, _ in module.named_parameters(remove_duplicate=False) if adapter not in name.split(".")}
    weights = gather_weights(module, left_out)
    on_rank_zero(lambda: _write_adapter(module, adapter, weights, folder))
    return True


def _write_adapter(module: PeftModel, adapter: str, weights: dict, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(module, weights, adapter, save_embedding_layers=False)
    state = unshared({name: tensor.contiguous() for name, tensor in state.items()})
    save_file(state, folder / WEIGHTS, {"format": "pt"})
    config = copy.deepcopy(module.peft_config[adapter])
    config.inference_mode = True
    config.save_pretrained(str(folder))
