"""Writes the trained model for `from_pretrained`, adapters merged, or a state dict, or the adapter alone.

Live weights are not changed: the weights are gathered to rank 0's memory and loaded into an empty model of the same
class, which saves itself. The new files are loaded and compared with the trained model before they replace an earlier
save: `ZeroEngine.save_16bit_model` runs the trained model on a few tokens (`ask_model`), `check_saved_logits` the
folder that was written. An adapter that is merged wrongly, a head that is tied again when it is loaded or a weight
under a wrong name all change logits. So does rounding where two experts are close: the saved model is therefore run
with the experts that the trained one chose, and how often it would have chosen others is compared separately.

T tokens, V vocabulary (or labels of a classifier), K experts of a token.
"""

import copy
import logging
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from hybrid_engine.checkpoint.folder import save_state_dict, writing_files
from hybrid_engine.checkpoint.manifest import check_file_name, check_folder
from hybrid_engine.containers.quantised import dequantise_weight_of, is_quantised
from hybrid_engine.containers.views import active_adapters, carries_lora, stores_transposed
from hybrid_engine.distributed.processes import get_rank, on_rank_zero
from hybrid_engine.zero.sharding import full_tensor
from hybrid_engine.zero.split_module import is_split_class

logger = logging.getLogger("hybrid_engine")
SPREAD, LAST = 24, 8
"""Number of tokens taken from the whole vocabulary, and from its end, where new tokens are."""
FP32_BOUND, HALF_BOUND = 2e-3, 0.1
"""The largest relative difference of a position's logits, in the median. In fp32 rounding stays far below it. In 16
bits merging rounds each weight, which moves logits by some percent.
"""
OUTLIERS = 8
"""A single position may differ by this many times the bound."""
MOST_OTHER_EXPERTS = 0.25
"""The largest share of experts that the saved model would not choose. With another router about half of them differ."""
STATE_DICT = "pytorch_model.bin"
WEIGHTS = "adapter_model.safetensors"


class RecordedRouting(NamedTuple):
    """The experts of one layer for each token, and the factors of their outputs."""

    experts: torch.Tensor  # [T, K] int64
    weights: torch.Tensor  # [T, K], or [T, number of experts]


class Probe(NamedTuple):
    """Tokens and the trained model's logits for them."""

    inputs: dict[str, torch.Tensor]
    logits: torch.Tensor  # [T, V] fp32 on the CPU
    dtype: torch.dtype  # that the trained model computes in
    routings: list[RecordedRouting]  # on the CPU, in the order of the layers; empty without experts


def ask_model(module: nn.Module, device: torch.device) -> Probe | None:
    """The probe of a model of transformers, adapters around it or not; runs its forward, which may be collective.

    Returns:
        None if it is not a transformers model, or does not take token ids.
    """
    base = module.get_base_model() if isinstance(module, PeftModel) else module
    if not isinstance(base, PreTrainedModel) or base.main_input_name != "input_ids":
        return None
    inputs = {"input_ids": _tokens(module, base).to(device)}
    if base.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    routings: list[RecordedRouting] = []
    with _experts_hooked(module, lambda routing: routings.append(_on_cpu(routing))):
        logits = _logits(module, inputs)
    if not torch.isfinite(logits).all():
        return None  # no valid logits to compare with
    return Probe({name: ids.cpu() for name, ids in inputs.items()}, logits, base.dtype, routings)


def check_saved_logits(model_class: Any, folder: Path, probe: Probe) -> None:
    """Loads `folder` on the CPU and compares its logits.

    Raises:
        RuntimeError: they differ by more than rounding.
    """
    shows_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        saved = model_class.from_pretrained(folder, dtype=probe.dtype)
    finally:
        if shows_bars:
            transformers_logging.enable_progress_bar()
    following = _FollowedRoutings(probe.routings)
    with _experts_hooked(saved, following.follow):
        difference = relative_difference(_logits(saved, probe.inputs), probe.logits)
    bound = FP32_BOUND if probe.dtype == torch.float32 else HALF_BOUND
    if difference.median() > bound or difference.max() > OUTLIERS * bound:
        raise _not_the_trained_model(
            model_class,
            f"its logits differ by {difference.median():.2g} of their size in the median of {len(difference)} tokens "
            f"and by {difference.max():.2g} at most, where rounding stays below {bound:g}",
        )
    if following.share_of_others > MOST_OTHER_EXPERTS:
        raise _not_the_trained_model(
            model_class,
            f"it chooses other experts in {following.share_of_others:.0%} of all choices, where rounding stays below "
            f"{MOST_OTHER_EXPERTS:.0%}",
        )


def _not_the_trained_model(model_class: Any, reason: str) -> RuntimeError:
    return RuntimeError(
        f"save_16bit_model(): the saved {model_class.__name__} is not the trained model: {reason}. Nothing was saved; "
        "save_checkpoint() keeps the training's state as it is"
    )


def relative_difference(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """RMS of the difference over the spread of `expected`, for each position: `[T]`."""
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1) if expected.shape[-1] > 1 else expected.norm()
    return (logits - expected).norm(dim=-1) / spread.clamp(min=1e-6)


class _FollowedRoutings:
    """Routings of another model; they replace the saved model's for tokens where its router chose other experts."""

    def __init__(self, routings: list[RecordedRouting]) -> None:
        self._coming = iter(routings)
        self._choices = self._others = 0

    def follow(self, chosen: RecordedRouting) -> RecordedRouting:
        given = next(self._coming, None)
        if given is None or given.experts.shape != chosen.experts.shape or given.weights.shape != chosen.weights.shape:
            return chosen
        is_other = ~(chosen.experts[:, :, None] == given.experts[:, None, :]).any(-1)  # [T, K]
        self._choices += is_other.numel()
        self._others += int(is_other.sum())
        follows = is_other.any(-1, keepdim=True)  # [T, 1]
        weights = torch.where(follows, given.weights.to(chosen.weights.dtype), chosen.weights)
        return RecordedRouting(torch.where(follows, given.experts, chosen.experts), weights)

    @property
    def share_of_others(self) -> float:
        """Share of the chosen experts, in [0, 1], that the other model did not choose."""
        return self._others / max(self._choices, 1)


@contextmanager
def _experts_hooked(module: nn.Module, see: Callable[[RecordedRouting], RecordedRouting | None]) -> Iterator[None]:
    """Inside, `see` is called with the routing of each layer before its experts compute, and may return another.

    Experts of transformers are modules called with hidden states, indices and weights.
    """

    def before(part: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if len(args) != 3 or not all(isinstance(arg, torch.Tensor) for arg in args) or args[1].dtype != torch.int64:
            return None
        seen = see(RecordedRouting(args[1], args[2]))
        return None if seen is None else (args[0], *seen)

    # An adapter around experts is called with the same arguments and calls them.
    parts = [part for part in module.modules() if not isinstance(part, BaseTunerLayer)]
    handles = [part.register_forward_pre_hook(before) for part in parts if "Experts" in type(part).__name__]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _on_cpu(routing: RecordedRouting) -> RecordedRouting:
    return RecordedRouting(routing.experts.cpu(), routing.weights.cpu())


def _tokens(module: nn.Module, base: PreTrainedModel) -> torch.Tensor:
    """Token ids `[1, T]` spread over the vocabulary, its end, and tokens that adapters train individually."""
    config = base.config.get_text_config()
    size, limit = config.vocab_size, getattr(config, "max_position_embeddings", None)
    spread = torch.linspace(0, size - 1, min(SPREAD, size)).long()
    trained = _trained_tokens(module)[:LAST]
    ids = torch.cat([torch.tensor(trained, dtype=torch.long), spread, torch.arange(max(size - LAST, 0), size)])
    return ids[: limit if isinstance(limit, int) and limit > 0 else None][None]


def _trained_tokens(module: nn.Module) -> list[int]:
    configs = module.peft_config.values() if isinstance(module, PeftModel) else ()
    indices = [getattr(config, "trainable_token_indices", None) or [] for config in configs]
    lists = [list(index.values()) if isinstance(index, dict) else [index] for index in indices]
    return [token for group in lists for tokens in group for token in tokens]


@torch.no_grad()
def _logits(module: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits `[T, V]`, or the first output, without dropout; the modes of the modules are restored."""
    modes = [(part, part.training) for part in module.modules()]
    for part, _ in modes:
        part.training = False
    try:
        output = module(**inputs)
    finally:
        for part, training in modes:
            part.training = training
    logits = output.logits if getattr(output, "logits", None) is not None else output[0]
    return logits.float().cpu().flatten(0, -2)


@contextmanager
def without_renamed_attribute_warning() -> Iterator[None]:
    """For the construction of a `PeftModel`, which reads an attribute that transformers has renamed.

    peft 0.21.2 asks a model for `is_gradient_checkpointing` and transformers 5.23 answers with a FutureWarning. Neither
    can be configured: the attribute is a property, and peft always reads it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        yield


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
