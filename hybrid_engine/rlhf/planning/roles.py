"""The models of a run, each built on the meta device and counted: memory that is kept, and that of a training pass."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig

from hybrid_engine.config import HybridEngineConfig
from hybrid_engine.config.checks import check_divides
from hybrid_engine.containers import InferenceModel, UnsupportedModelError
from hybrid_engine.generation.memory import count_blocks
from hybrid_engine.generation.scheduler import MAX_PREFILL_TOKENS
from hybrid_engine.metrics.memory_plan import (
    LOGITS,
    OWN_CACHE,
    PREFILL,
    MemoryPart,
    MemoryPlan,
    RolePlan,
    Shape,
    Sharded,
    gradient_part,
    kept_parts,
    kv_part,
)
from hybrid_engine.metrics.memory_use import Pass
from hybrid_engine.rlhf.batches.packable import expected_layout
from hybrid_engine.rlhf.batches.packing import ATTENTION, Layout, Span, Spans
from hybrid_engine.rlhf.batches.pass_memory import PassShape, count_pass
from hybrid_engine.rlhf.batches.sequences import ValueModel, recompute_activations
from hybrid_engine.rlhf.options.shared import AdapterOptions, AnswerOptions, RolloutRunOptions, TrainingOptions
from hybrid_engine.rlhf.planning.reading import Read, packed_bytes
from hybrid_engine.rlhf.planning.widest import widest_passes
from hybrid_engine.rlhf.runs.adapters import add_adapter
from hybrid_engine.rlhf.runs.engine_config import torch_dtype
from hybrid_engine.rlhf.runs.stages import without_dropout
from hybrid_engine.zero.wrapping import find_groups


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The processes and devices of a run, with its options."""

    recipe: str
    config: TrainingOptions
    num_processes: int
    device: str
    """Type of the devices."""
    ran: Pass | None = None
    """The largest training pass, if it has run; None: it is derived from lengths that are known before the run."""

    @property
    def weight(self) -> torch.dtype:
        """The dtype in which models compute."""
        return torch_dtype(self.config.dtype, self.device)


def plan_memory(read: Read, setting: Setting) -> MemoryPlan:
    """The parts and peaks of a run on one of its devices."""
    config = setting.config
    check_divides(config.UPDATE, config.update_size, setting.num_processes)
    per_process = config.update_size // setting.num_processes
    ran, where = setting.ran, (setting.num_processes, setting.device)
    passes = [ran] if ran is not None else widest_passes(read, config, per_process, *where)
    plans = (_plan_of(read, setting, one) for one in passes)
    return max(plans, key=lambda plan: (plan.training_peak_bytes, plan.peak_bytes))


def _plan_of(read: Read, setting: Setting, largest: Pass) -> MemoryPlan:
    """The plan of a run whose largest training pass is `largest`."""
    config = setting.config
    with torch.device("meta"):
        roles, actor = _roles(read, setting, largest.shape, largest.has_gradients)
        plan = MemoryPlan(roles=roles, accumulates=largest.has_gradients, generation=[], has_state=largest.has_state)
        if read.answered is None:
            return plan
        at_once = _generation(actor, read.answered.longest, setting, is_streamed=False)
        # On a shared base a rollout may not exceed training, which uses no memory meanwhile.
        room = plan.training_peak_bytes - plan.kept_bytes
        if config.shared_base and sum(part.num_bytes for part in at_once) > room:
            generation = _generation(actor, read.answered.longest, setting, is_streamed=True)
            return replace(plan, generation=generation, fuses_at_once=False)
    return replace(plan, generation=at_once)


def _roles(read: Read, setting: Setting, shape: PassShape, accumulates: bool) -> tuple[list[RolePlan], nn.Module]:
    """The models of the run, and its actor."""
    recipe, config = setting.recipe, setting.config
    counted: dict[str, Any] = {"shape": shape, "accumulates": accumulates, "setting": setting}
    if recipe == "reward":
        model = _build(AutoModelForSequenceClassification, read.first, setting.weight, num_labels=1)
        model = add_adapter(recompute_activations(model, config), config, "SEQ_CLS")
        return [_trained("reward model", model, _base(model).score, **counted)], model
    actor = _build(AutoModelForCausalLM, read.first, setting.weight)
    if config.shared_base:
        return _on_shared_base(actor, read, **counted)
    frozen = []
    if config.keeps_reference:
        frozen.append(_frozen("reference", _shapes(actor), setting))
    actor = add_adapter(recompute_activations(actor, config), config)
    trained = [
        _trained("model" if recipe == "sft" else "actor", actor, _base(actor).get_output_embeddings(), **counted)
    ]
    if read.critic is not None:
        critic = recompute_activations(_value_model(read.critic, setting.weight), config)
        trained.append(_trained("critic", critic, critic.head, **counted))
    frozen += [_frozen("reward model", _shapes(_value_model(model, setting.weight)), setting) for model in read.rewards]
    return [*trained, *frozen], actor


def _on_shared_base(
    base: Any, read: Read, *, shape: PassShape, accumulates: bool, setting: Setting
) -> tuple[list[RolePlan], nn.Module]:
    """Adapters with their heads on `base`, which counts as the actor's; and the actor."""
    config, head = setting.config, base.get_output_embeddings()
    counted: dict[str, Any] = {"shape": shape, "accumulates": accumulates, "setting": setting}
    actor = add_adapter(recompute_activations(base, config), config)
    critic = _value_adapter(read.first, read.adapters[0] if read.adapters else config, setting)
    sharded = Sharded(config.zero_stage, setting.num_processes, setting.weight.itemsize)
    own = kept_parts([found for found in _shapes(critic) if found.is_trained], sharded)
    trained = [
        _trained("actor", actor, head, **counted),
        replace(_trained("critic", critic, critic.head, **counted), kept=own),
    ]
    scorers = [_value_adapter(read.first, adapter, setting) for adapter in read.adapters]
    frozen = [_frozen("reward model", [s for s in _shapes(scorer) if s.is_trained], setting) for scorer in scorers]
    return [*trained, *frozen], actor


def _value_adapter(config: PretrainedConfig, adapter: AdapterOptions, setting: Setting) -> ValueModel:
    """A role with a head of values, as if the base were its own."""
    model = recompute_activations(_value_model(config, setting.weight), setting.config)
    prefix = f"{model.backbone.base_model_prefix}."  # of the body's names in a causal model
    adapter = replace(adapter, lora_targets=tuple(name.removeprefix(prefix) for name in adapter.lora_targets))
    return ValueModel(add_adapter(model.backbone, adapter, "FEATURE_EXTRACTION"), model.head).train()


def _build(auto_class: Any, config: PretrainedConfig, dtype: torch.dtype, **options: Any) -> Any:
    """Builds a model without dropout, and records for `_shapes` which of its weights are quantized."""
    made = type(config).from_dict(config.to_dict() | options)
    quantisation = made.__dict__.pop("quantization_config", None)
    try:
        model = auto_class.from_config(without_dropout(made), dtype=dtype).train()
    except ValueError as error:  # from transformers, which lists all model types
        raise ValueError(
            f"--model is a {made.model_type}, of which {auto_class.__name__} makes no model; name a causal language "
            "model"
        ) from error
    if quantisation is not None:
        head = model.get_output_embeddings()
        linears = (module for module in model.modules() if isinstance(module, nn.Linear) and module is not head)
        for linear in linears:
            _packed[linear.weight] = packed_bytes(quantisation, linear)
    return model


_packed: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Bytes of the quantized weights of the models that were built here."""


def _value_model(config: PretrainedConfig, dtype: torch.dtype) -> ValueModel:
    backbone = _build(AutoModel, config, dtype)
    return ValueModel(backbone, nn.Linear(backbone.config.get_text_config().hidden_size, 1, dtype=dtype)).train()


def _base(model: nn.Module) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _shapes(model: nn.Module) -> list[Shape]:
    return [Shape(tuple(p.shape), p.requires_grad, _packed.get(p)) for p in model.parameters()]


def _trained(
    name: str, model: Any, head: nn.Linear, *, shape: PassShape, accumulates: bool, setting: Setting
) -> RolePlan:
    """The plan of a model with an engine of its own."""
    config = setting.config
    shapes = _shapes(model)
    sharded = Sharded(config.zero_stage, setting.num_processes, setting.weight.itemsize)
    body: Callable[..., Any] = model.backbone if isinstance(model, ValueModel) else _base(model).base_model
    is_language = head.out_features > 1
    keeps_shards = sharded.rules.shards_gradients  # they are reduced as they are computed
    found = count_pass(
        model,
        body,
        head,
        shape,
        is_language=is_language,
        accumulates=accumulates or keeps_shards,
        device=setting.device,
        more_inputs=_along_spans(model, shape, config),
    )
    note = ", layers computed again" if config.activation_checkpointing else ""
    cells = f"{shape.rows} rows x {shape.prompt + shape.response} tokens"
    passing = [
        MemoryPart(
            "activations",
            found.activations,
            f"{cells} x {found.activations / shape.num_cells:,.0f} bytes, as counted on shapes{note}",
        )
    ]
    if is_language:
        what = f"the head's of {shape.num_asked:,} tokens: kept tiles of logits, one more, hidden states"
        passing.append(MemoryPart("head pieces", found.pieces, what))
    largest = (
        max((math.prod(s.dims) for s in shapes if s.packed_bytes is not None), default=0) * setting.weight.itemsize
    )
    if largest:
        passing.append(
            MemoryPart("dequantised", largest, "the largest quantised linear as weights of --dtype, one at a time")
        )
    gathered = _gathered_part(model, sharded)
    passing.append(gathered)
    gradients = gradient_part(shapes, sharded)
    new = 0 if accumulates else gradients.num_bytes
    peak = found.peak + largest + gathered.num_bytes + (new if keeps_shards else 0)
    between = max(0, peak - sum(part.num_bytes for part in passing) - new)
    passing.append(MemoryPart("backward pass", between, "what comes and goes beside them at the fullest moment"))
    return RolePlan(
        name=name,
        kept=kept_parts(shapes, sharded),
        gradients=gradients,
        passing=passing,
        pass_peak_bytes=peak,
    )


def _along_spans(model: Any, shape: PassShape, config: TrainingOptions) -> dict[str, Spans]:
    """Attention inputs of `model`, which uses spans from now on; empty if attention does not go along spans."""
    module = _base(model.backbone if isinstance(model, ValueModel) else model)
    kinds = [parameter.kind for parameter in inspect.signature(module.base_model.forward).parameters.values()]
    is_along = expected_layout(config, module.config) is Layout.SPANS  # a critic's layout may differ from the actor's
    if not shape.spans or not is_along or inspect.Parameter.VAR_KEYWORD not in kinds:
        return {}
    module.set_attn_implementation(ATTENTION)
    with torch.device("cpu"):
        return {"spans": Spans.of([Span(*span) for span in shape.spans])}


def _gathered_part(model: nn.Module, sharded: Sharded) -> MemoryPart:
    """Weights that are gathered when a backward pass begins under ZeRO-3, in addition to this process's shards."""
    if not sharded.rules.shards_parameters:
        return MemoryPart("gathered weights", 0, "none")
    layers = [sum(p.numel() for p in layer.parameters()) for layer in find_groups(model).modules]
    outside = sum(p.numel() for p in model.parameters()) - sum(layers)
    values = outside + 2 * max(layers, default=0)
    what = "of what is outside the layers and of two of them, one in use and one in the buffer that it comes through"
    return MemoryPart(
        "gathered weights", sharded.dtype_bytes * values, f"{sharded.dtype_bytes} bytes x {values:,} {what}"
    )


def _frozen(name: str, shapes: list[Shape], setting: Setting) -> RolePlan:
    """The plan of a model that is not trained; whole on every process."""
    shapes = [shape._replace(is_trained=False) for shape in shapes]
    sharded = Sharded(0, 1, setting.weight.itemsize)
    return RolePlan(name=name, kept=kept_parts(shapes, sharded), gradients=gradient_part(shapes, sharded))


def _generation(actor: nn.Module, prompt_tokens: int, setting: Setting, *, is_streamed: bool) -> list[MemoryPart]:
    """Memory of a rollout in addition to what is kept: the larger of training and evaluation.

    Prompts have `prompt_tokens` tokens. The rollout's weights are prepared before it begins, or layer by layer with
    `is_streamed`.
    """
    config, size = setting.config, setting.weight.itemsize
    assert isinstance(config, AnswerOptions), setting.recipe
    longest = prompt_tokens + config.max_new_tokens - 1  # the last token drawn is never fed
    options = HybridEngineConfig(enabled=True, max_running=config.max_running)
    rollouts = [(config.eval_prompts, config.eval_samples)]
    if isinstance(config, RolloutRunOptions):
        rollouts.append((config.rollout_size, config.group_size))
    demands = []
    for num_prompts, group in rollouts:
        prompts = -(-num_prompts // setting.num_processes)
        lengths = [prompt_tokens] * (prompts * group)
        demands.append(count_blocks(lengths, longest, prompts, setting.device, options))
    demand = max(demands, key=lambda found: found.wanted * found.block_size)
    try:
        model = InferenceModel(actor)
    except UnsupportedModelError:
        return [_own_cache(_base(actor).config.get_text_config(), demand.max_running, longest, size)]
    text = model.base.config.get_text_config()
    parts = [kv_part(model.kv_shape(demand.wanted, demand.block_size), size, demand.max_running)]
    if fused := model.buffer_bytes(is_streamed):
        what = "of one layer at a time" if is_streamed else "once more, dequantised where they are quantised"
        parts.append(MemoryPart("fused adapters", fused, f"the linears with an adapter, {what}"))
    if config.zero_stage == 3 and setting.num_processes > 1:
        values = sum(parameter.numel() for parameter in actor.parameters())
        layers = sorted((sum(p.numel() for p in layer.module.parameters()) for layer in model.layers), reverse=True)
        values -= sum(layers[2:]) if is_streamed else 0
        how = "of what is outside the layers and of two of them" if is_streamed else "whole while it generates"
        formula = f"{size} bytes x {values:,} parameters, {how}"
        parts.append(MemoryPart("gathered weights", values * size, formula))
    fed = min(MAX_PREFILL_TOKENS, demand.max_running * prompt_tokens)
    width = 3 * text.hidden_size + 3 * getattr(text, "intermediate_size", 4 * text.hidden_size)
    what = f"{size} bytes x {fed:,} tokens of prompts in a pass x {width} (3 times hidden and MLP size)"
    parts.append(MemoryPart(PREFILL, size * fed * width, what))
    logits = 4 * demand.max_running * text.vocab_size
    parts.append(
        MemoryPart(LOGITS, 2 * logits, f"2 x 4 bytes x {demand.max_running} rows x {text.vocab_size:,} tokens")
    )
    return parts


def _own_cache(text: Any, rows: int, columns: int, size: int) -> MemoryPart:
    """Keys and values of the model's own `generate()`; none for a model without attention."""
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    if heads is None:
        return MemoryPart(OWN_CACHE, 0, "no attention, no keys and values; its states are not counted")
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    shape = (text.num_hidden_layers, 2, rows, heads, columns, width)
    return kv_part(shape, size, rows)._replace(name=OWN_CACHE)
