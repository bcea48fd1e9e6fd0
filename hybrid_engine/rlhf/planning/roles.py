"""Plans a run: each of its models is built on the meta device and counted, for training and for generation.

`fitting.py` and `comparison.py` call `plan_memory`.
"""

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig

from hybrid_engine.config import HybridEngineConfig
from hybrid_engine.config.checks import check_divides
from hybrid_engine.containers import InferenceModel, UnsupportedModelError
from hybrid_engine.generation.memory import count_blocks
from hybrid_engine.generation.scheduler import MAX_PREFILL_TOKENS
from hybrid_engine.rlhf.batches.sequences import ValueModel, recompute_activations
from hybrid_engine.rlhf.options.shared import AdapterOptions, AnswerOptions, RolloutRunOptions, TrainingOptions
from hybrid_engine.rlhf.planning.memory_plan import (
    NO_WORKSPACES,
    OF_PASSES,
    MemoryPart,
    MemoryPlan,
    RolePlan,
    Shape,
    Sharded,
    gradient_part,
    kept_parts,
    kv_part,
)
from hybrid_engine.rlhf.planning.reading import Read
from hybrid_engine.rlhf.planning.training_passes import Pass, base_of, count_pass, widest_passes
from hybrid_engine.rlhf.runs.engine_config import torch_dtype
from hybrid_engine.rlhf.runs.run_checks import add_adapter
from hybrid_engine.rlhf.runs.stages import without_dropout
from hybrid_engine.zero.wrapping import find_groups

PREFILL, LOGITS, OWN_CACHE = OF_PASSES
BLOCK, OUTER_BLOCK = 64, 256
"""Values that share a scale, and scales that share a scale of their own (bitsandbytes 0.50,
`functional.quantize_4bit`).
"""
CODE_4_BITS, CODE_8_BITS = 16 * 4, 256 * 4
"""Bytes of the table of values that codes stand for."""


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

    @property
    def sharded(self) -> Sharded:
        """How the models that are trained are sharded."""
        return Sharded(self.config.zero_stage, self.num_processes, self.weight.itemsize)


def plan_memory(read: Read, setting: Setting) -> MemoryPlan:
    """The parts and peaks of a run on one of its devices."""
    config = setting.config
    check_divides(config.UPDATE, config.update_size, setting.num_processes)
    per_process = config.update_size // setting.num_processes
    ran = setting.ran
    passes = [ran] if ran is not None else widest_passes(read, config, per_process, setting.num_processes)
    plans = (_plan_of(read, setting, one) for one in passes)
    return max(plans, key=lambda plan: (plan.training_peak_bytes, plan.peak_bytes))


def _plan_of(read: Read, setting: Setting, largest: Pass) -> MemoryPlan:
    """The plan of a run whose largest training pass is `largest`."""
    with torch.device("meta"):
        roles, actor = _roles(read, setting, largest)
        plan = MemoryPlan(
            roles=roles,
            accumulates=largest.has_gradients,
            generation=[],
            workspaces=_workspaces(setting.device, read.answered is not None),
            has_state=largest.has_state,
        )
        if read.answered is None:
            return plan
        at_once = _generation(actor, read.answered.longest, setting, is_streamed=False)
        # On a shared base a rollout may not exceed training, which uses no memory meanwhile.
        room = plan.training_peak_bytes - plan.kept_bytes
        if setting.config.shared_base and sum(part.num_bytes for part in at_once) > room:
            generation = _generation(actor, read.answered.longest, setting, is_streamed=True)
            return replace(plan, generation=generation, fuses_at_once=False)
    return replace(plan, generation=at_once)


def _workspaces(device: str, generates: bool) -> MemoryPart:
    """One workspace for each thread and stream with matrix products: forward and backward passes, recorded steps.

    PyTorch keeps one "for each combination of cuBLAS handle and CUDA stream", of 32 MiB on Hopper and of 8 MiB on
    other GPUs unless CUBLAS_WORKSPACE_CONFIG says otherwise (its notes on CUDA semantics, "cuBLAS workspaces").
    """
    if device != "cuda":
        return NO_WORKSPACES
    major, _ = torch.cuda.get_device_capability()
    buffers = os.environ.get("CUBLAS_WORKSPACE_CONFIG") or (":4096:8" if major == 9 else ":4096:2:16:8")
    size = 1024 * sum(int(kib) * int(count) for kib, count in re.findall(r":(\d+):(\d+)", buffers))
    number = 3 if generates else 2
    formula = f"{number} workspaces: of forward passes, of backward passes" + (
        ", of recorded steps" if generates else ""
    )
    return NO_WORKSPACES._replace(num_bytes=number * size, formula=formula)


def _roles(read: Read, setting: Setting, largest: Pass) -> tuple[list[RolePlan], nn.Module]:
    """The models of the run, those that are trained first; and its actor."""
    config, trained = setting.config, partial(_trained, setting=setting, largest=largest)
    if setting.recipe == "reward":
        model = _build(AutoModelForSequenceClassification, read.first, setting.weight, num_labels=1)
        model = add_adapter(recompute_activations(model, config), config, "SEQ_CLS")
        return [trained("reward model", model)], model
    actor = _build(AutoModelForCausalLM, read.first, setting.weight)
    frozen = [_frozen("reference", _shapes(actor), setting)] if config.keeps_reference else []
    actor = add_adapter(recompute_activations(actor, config), config)
    roles = [trained("model" if setting.recipe == "sft" else "actor", actor)]
    if config.shared_base:  # the base counts as the actor's, and the others add their adapters and heads
        critic = _value_adapter(read.first, read.adapters[0] if read.adapters else config, setting)
        role, own = trained("critic", critic), _trained_shapes(critic)
        roles.append(replace(role, kept=kept_parts(own, setting.sharded)))
        judges = [_trained_shapes(_value_adapter(read.first, adapter, setting)) for adapter in read.adapters]
    else:
        if read.critic is not None:
            roles.append(trained("critic", recompute_activations(_value_model(read.critic, setting.weight), config)))
        judges = [_shapes(_value_model(model, setting.weight)) for model in read.rewards]
    return [*roles, *frozen, *(_frozen("reward model", shapes, setting) for shapes in judges)], actor


def _value_adapter(config: PretrainedConfig, adapter: AdapterOptions, setting: Setting) -> ValueModel:
    """A role with a head of values, as if the base were its own."""
    model = recompute_activations(_value_model(config, setting.weight), setting.config)
    prefix = f"{model.backbone.base_model_prefix}."  # of the body's names in a causal model
    adapter = replace(adapter, lora_targets=tuple(name.removeprefix(prefix) for name in adapter.lora_targets))
    return ValueModel(add_adapter(model.backbone, adapter, "FEATURE_EXTRACTION"), model.head).train()


def _value_model(config: PretrainedConfig, dtype: torch.dtype) -> ValueModel:
    backbone = _build(AutoModel, config, dtype)
    return ValueModel(backbone, nn.Linear(backbone.config.get_text_config().hidden_size, 1, dtype=dtype)).train()


def _build(auto_class: Any, config: PretrainedConfig, dtype: torch.dtype, **options: Any) -> Any:
    """Builds a model without dropout; a weight that is quantized has its `packed_bytes` as an attribute."""
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
        for linear in model.modules():
            if isinstance(linear, nn.Linear) and linear is not head:
                linear.weight.packed_bytes = packed_bytes(quantisation, linear)
    return model


def packed_bytes(quantisation: dict[str, Any], linear: nn.Linear) -> int:
    """The bytes of the packed weight of `linear` with its scales.

    Args:
        quantisation: the `quantization_config` of the model's config.
        linear: before quantization.

    Raises:
        ValueError: the sizes of this kind of quantization are not known.
    """
    values, rows = linear.in_features * linear.out_features, linear.out_features
    kind = quantisation.get("quant_method")
    if kind == "bitsandbytes" and quantisation.get("load_in_4bit"):
        blocks = -(-values // BLOCK)
        if not quantisation.get("bnb_4bit_use_double_quant"):
            return -(-values // 2) + 4 * blocks + CODE_4_BITS
        return -(-values // 2) + blocks + 4 * -(-blocks // OUTER_BLOCK) + CODE_4_BITS + CODE_8_BITS
    if kind == "bitsandbytes":
        return values + 4 * rows
    if "Int8WeightOnly" in str(quantisation.get("quant_type")):
        return values + (4 + 1) * rows  # a scale and a zero point
    raise ValueError(
        f"--model is quantized by {kind!r} ({quantisation.get('quant_type')}), for which plan knows no sizes; it knows "
        "bitsandbytes and torchao's Int8WeightOnlyConfig"
    )


def _shapes(model: nn.Module) -> list[Shape]:
    return [Shape(tuple(p.shape), p.requires_grad, getattr(p, "packed_bytes", None)) for p in model.parameters()]


def _trained_shapes(model: nn.Module) -> list[Shape]:
    return [shape for shape in _shapes(model) if shape.is_trained]


def _frozen(name: str, shapes: Iterable[Shape], setting: Setting) -> RolePlan:
    """The plan of a model that is not trained; whole on every process."""
    frozen, whole = [shape._replace(is_trained=False) for shape in shapes], Sharded(0, 1, setting.weight.itemsize)
    return RolePlan(name=name, kept=kept_parts(frozen, whole), gradients=gradient_part(frozen, whole))


def _trained(name: str, model: Any, *, setting: Setting, largest: Pass) -> RolePlan:
    """The plan of a model with an engine of its own."""
    shapes, sharded, shape = _shapes(model), setting.sharded, largest.shape
    kept, gradients, gathered = kept_parts(shapes, sharded), gradient_part(shapes, sharded), _gathered(model, setting)
    packed = (math.prod(one.dims) for one in shapes if one.packed_bytes is not None)
    dequantised = sharded.dtype_bytes * max(packed, default=0)
    keeps_shards = sharded.rules.shards_gradients  # they are reduced as they are computed
    found = count_pass(model, shape, accumulates=largest.has_gradients or keeps_shards, device=setting.device)
    note = ", layers computed again" if setting.config.activation_checkpointing else ""
    cells = f"{shape.rows} rows x {shape.prompt + shape.response} tokens"
    per_cell = f"{cells} x {found.activations / shape.num_cells:,.0f} bytes, as counted on shapes{note}"
    pieces = f"the head's of {shape.num_asked:,} tokens: kept tiles of logits, one more, hidden states"
    passing = [
        MemoryPart("activations", found.activations, per_cell),
        MemoryPart("head pieces", found.pieces, pieces),
        MemoryPart("dequantised", dequantised, "the largest quantised linear as weights of --dtype, one at a time"),
        gathered,
    ]
    new = 0 if largest.has_gradients else gradients.num_bytes
    peak = found.peak + dequantised + gathered.num_bytes + (new if keeps_shards else 0)
    others = max(0, peak - sum(part.num_bytes for part in passing) - new)
    passing.append(MemoryPart("backward pass", others, "what comes and goes at the fullest moment"))
    return RolePlan(name=name, kept=kept, gradients=gradients, passing=passing, pass_peak_bytes=peak)


def _gathered(model: nn.Module, setting: Setting) -> MemoryPart:
    """Weights that are gathered when a backward pass begins, in addition to this process's shards."""
    if not setting.sharded.rules.shards_parameters:
        return MemoryPart("gathered weights", 0, "none")
    return _whole_weights(model, find_groups(model).modules, setting)


def _whole_weights(model: nn.Module, layers: Iterable[nn.Module], setting: Setting) -> MemoryPart:
    """Weights that are gathered: all, or of the `layers` one that is in use and the next one, which is fetched."""
    sizes = sorted(sum(p.numel() for p in layer.parameters()) for layer in layers)
    values, size = sum(p.numel() for p in model.parameters()) - sum(sizes[:-2]), setting.weight.itemsize
    which = ", of what is outside the layers and of two of them" if sizes else ", all while it generates"
    return MemoryPart("gathered weights", size * values, f"{size} bytes x {values:,} parameters{which}")


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
    text = base_of(actor).config.get_text_config()
    try:
        model = InferenceModel(actor)
    except UnsupportedModelError:
        return [_own_cache(text, demand.max_running, longest, size)]
    parts = [kv_part(model.kv_shape(demand.wanted, demand.block_size), size, demand.max_running)]
    if fused := model.buffer_bytes(is_streamed):
        how = "of one layer at a time" if is_streamed else "once more, dequantised where they are quantised"
        parts.append(MemoryPart("fused adapters", fused, f"the linears with an adapter, {how}"))
    if setting.sharded.rules.shards_parameters:
        layers = [layer.module for layer in model.layers] if is_streamed else []
        parts.append(_whole_weights(actor, layers, setting))
    fed = min(MAX_PREFILL_TOKENS, demand.max_running * prompt_tokens)
    width = 3 * text.hidden_size + 3 * getattr(text, "intermediate_size", 4 * text.hidden_size)
    formula = f"{size} bytes x {fed:,} tokens of prompts in a pass x {width} (3 times hidden and MLP size)"
    parts.append(MemoryPart(PREFILL, size * fed * width, formula))
    logits = f"2 x 4 bytes x {demand.max_running} rows x {text.vocab_size:,} tokens"
    return [*parts, MemoryPart(LOGITS, 2 * 4 * demand.max_running * text.vocab_size, logits)]


def _own_cache(text: Any, rows: int, columns: int, size: int) -> MemoryPart:
    """Keys and values of the model's own `generate()`; none for a model without attention."""
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    if heads is None:
        return MemoryPart(OWN_CACHE, 0, "no attention, no keys and values; its states are not counted")
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    shape = (text.num_hidden_layers, 2, rows, heads, columns, width)
    return kv_part(shape, size, rows)._replace(name=OWN_CACHE)
