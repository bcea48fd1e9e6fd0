"""The memory of a run on one device: parts in bytes, each with its formula in words, and the peaks that they add up to.

`plan_memory` builds each model of the run on the meta device and counts it, for training and for generation; nothing is
measured or loaded. `comparison.py` calls it, and sets the peaks next to the available memory and to what a run takes.
"""

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig

from hybrid_engine.config import HybridEngineConfig
from hybrid_engine.config.blocks import ZERO_STAGES, StageRules
from hybrid_engine.config.checks import check_divides
from hybrid_engine.containers import InferenceModel, UnsupportedModelError
from hybrid_engine.containers.cache import CacheShape, LayerCacheSpec
from hybrid_engine.containers.moe import routing_dtype
from hybrid_engine.containers.routing import find_routers
from hybrid_engine.generation.memory import count_blocks
from hybrid_engine.generation.scheduler import MAX_PREFILL_TOKENS
from hybrid_engine.metrics.memory import format_bytes
from hybrid_engine.ops.support_log_prob import record_bytes
from hybrid_engine.rlhf.batches.sequences import ValueModel, recompute_activations
from hybrid_engine.rlhf.experience.policy import AVERAGE, copy_adapter
from hybrid_engine.rlhf.options.reinforcement import AgentConfig
from hybrid_engine.rlhf.options.shared import AdapterOptions, AnswerOptions, RolloutRunOptions, TrainingOptions
from hybrid_engine.rlhf.planning.reading import Read
from hybrid_engine.rlhf.planning.training_passes import Pass, base_of, count_pass, widest_passes
from hybrid_engine.rlhf.runs.engine_config import torch_dtype
from hybrid_engine.rlhf.runs.run_checks import add_adapter
from hybrid_engine.rlhf.runs.stages import without_dropout
from hybrid_engine.zero.wrapping import find_groups

BLOCK, OUTER_BLOCK = 64, 256
"""Values that share a scale, and scales that share a scale of their own (bitsandbytes 0.50,
`functional.quantize_4bit`).
"""
CODE_4_BITS, CODE_8_BITS = 16 * 4, 256 * 4
"""Bytes of the table of values that codes stand for."""
STATE_BYTES, STEP_BYTES, MASTER_BYTES = 8, 4, 4
"""Bytes of Adam's two fp32 moments per trained value, of its fp32 step count per parameter, and of an fp32 master."""
KV_WORKSPACE, OPTIMIZER_STATE = "KV workspace", "optimizer state"
"""Names of these parts."""
OF_PASSES = ("prefill", "logits", "the model's own cache")
"""Names of the temporary parts of a rollout's passes."""


PREFILL, LOGITS, OWN_CACHE = OF_PASSES


class MemoryPart(NamedTuple):
    """A part of a device's memory."""

    name: str
    num_bytes: int
    formula: str
    """Formula of the bytes, in words."""


NO_WORKSPACES = MemoryPart("matrix products", 0, "")
NO_RECORDS = MemoryPart("supports", 0, "")
NO_ROUTING = MemoryPart("routing", 0, "")


class Shape(NamedTuple):
    """Properties of a parameter that determine its memory."""

    dims: tuple[int, ...]
    is_trained: bool
    packed_bytes: int | None = None
    """Bytes of a quantized weight, scales included; None: it has the model's dtype."""


class Sharded(NamedTuple):
    """Sharding of a model over processes."""

    stage: int
    num_processes: int
    dtype_bytes: int
    """Bytes of a value of a weight."""

    @property
    def rules(self) -> StageRules:
        """The rules of the stage; a single process shards nothing at any stage."""
        return ZERO_STAGES[self.stage if self.num_processes > 1 else 0]

    @property
    def in_words(self) -> str:
        """The share of each process, to be added to a formula."""
        return f" (ZeRO-{self.stage}: a share of {self.num_processes})" if self.rules.shards_optimizer else ""

    def num_values(self, shapes: Iterable[Shape]) -> int:
        """Number of values of a process's shards: equally many rows of each parameter, the last shards padded."""
        if not self.rules.shards_optimizer:
            return _count(shapes)
        return sum(-(-dims[0] // self.num_processes) * math.prod(dims[1:]) for dims, *_ in shapes if dims)


@dataclass(frozen=True, kw_only=True)
class RolePlan:
    """Memory of one model of a run."""

    name: str
    kept: list[MemoryPart]
    """Parts that exist during the whole run: weights, masters, the optimizer's state."""
    gradients: MemoryPart
    """Gradients, which exist from a step's first backward pass to its end."""
    passing: list[MemoryPart] = field(default_factory=list)
    """Parts that a forward pass stores for its backward pass."""
    pass_peak_bytes: int = 0
    """Peak bytes of a forward and backward pass beyond those that exist when it begins."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Memory of a run on one of its devices."""

    roles: list[RolePlan]
    """Models in the order in which a step trains them."""
    accumulates: bool
    """Whether a step has several passes, the later of which find gradients."""
    generation: list[MemoryPart]
    """Parts that generation needs in addition to the kept ones; empty if nothing is generated."""
    workspaces: MemoryPart = NO_WORKSPACES
    """Workspaces of the GPU's library of matrix products, which it keeps from its first call on."""
    records: MemoryPart = NO_RECORDS
    """Recorded supports of a step's tokens, on a device that is the host."""
    routing: MemoryPart = NO_ROUTING
    """Recorded experts of a step's tokens, on a device that is the host."""
    has_state: bool = True
    """Whether the optimizer has its state in the largest pass; it does not in the first step."""
    fuses_at_once: bool = True
    """Whether a rollout prepares all its weights before it begins, rather than those of a layer at a time."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of the parts that exist during the whole run."""
        kept = sum(part.num_bytes for role in self.roles for part in role.kept)
        return self.workspaces.num_bytes + sum(part.num_bytes for part in self.recorded) + kept

    @property
    def recorded(self) -> list[MemoryPart]:
        """The parts that a rollout records with its tokens; empty if it records none."""
        return [part for part in (self.records, self.routing) if part.num_bytes]

    @property
    def training_peak_bytes(self) -> int:
        """Peak bytes of training: in a pass with the gradients that exist then, or at the step."""
        gradients = [role.gradients.num_bytes for role in self.roles]
        if self.accumulates:
            highest = sum(gradients) + max(role.pass_peak_bytes for role in self.roles)
        else:
            before = [sum(gradients[:index]) for index in range(len(gradients))]
            highest = max(b + role.pass_peak_bytes for b, role in zip(before, self.roles, strict=True))
        if not self.has_state:
            kept = (part for role in self.roles for part in role.kept)
            highest -= sum(part.num_bytes for part in kept if part.name == OPTIMIZER_STATE)
        return self.kept_bytes + max(highest, sum(gradients))

    @property
    def idle_cache_bytes(self) -> int:
        """Bytes of the KV workspace, which is kept during training if memory suffices, and released otherwise."""
        return sum(part.num_bytes for part in self.generation if part.name == KV_WORKSPACE)

    @property
    def generation_peak_bytes(self) -> int:
        """Peak bytes of generation; 0 if nothing is generated."""
        return self.kept_bytes + sum(part.num_bytes for part in self.generation) if self.generation else 0

    def rollout_bytes(self, cache_bytes: int, *, has_passes: bool) -> int:
        """Peak bytes of a rollout with a KV workspace of `cache_bytes`, with or without the parts of its passes."""
        left_out = (KV_WORKSPACE,) if has_passes else (KV_WORKSPACE, *OF_PASSES)
        return self.kept_bytes + cache_bytes + sum(p.num_bytes for p in self.generation if p.name not in left_out)

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the run, in training or generation."""
        return max(self.training_peak_bytes, self.generation_peak_bytes)

    def lines(self) -> Iterator[str]:
        """Yields the plan in words."""
        for role in self.roles:
            yield role.name
            yield from _lines([*role.kept, role.gradients, *role.passing])
        if self.workspaces.num_bytes:
            yield "cuBLAS, during the whole run"
            yield from _lines([self.workspaces])
        if self.recorded:
            yield "sampling, from a rollout to the end of its step"
            yield from _lines(self.recorded)
        if self.generation:
            yield "generating, in addition to what is kept"
            yield from _lines(self.generation)
        how = "gradients are there in every pass but a step's first" if self.accumulates else "one pass a step"
        how += "" if self.has_state else "; the largest is the first step's, before there is an optimizer state"
        yield f"peak of training:   {format_bytes(self.training_peak_bytes):>10}  ({how})"
        if idle := self.idle_cache_bytes:
            total = format_bytes(self.training_peak_bytes + idle)
            yield f"  with KV workspace {total:>10}  (which stays between rollouts where there is room)"
        if self.generation:
            yield f"peak of generation: {format_bytes(self.generation_peak_bytes):>10}"

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as plain values."""
        roles = {
            role.name: [part._asdict() for part in (*role.kept, role.gradients, *role.passing) if part.num_bytes]
            for role in self.roles
        }
        return {
            "roles": roles,
            "workspaces": [self.workspaces._asdict()] if self.workspaces.num_bytes else [],
            "records": [part._asdict() for part in self.recorded],
            "generation": [part._asdict() for part in self.generation],
            "training_peak_bytes": self.training_peak_bytes,
            "generation_peak_bytes": self.generation_peak_bytes,
            "idle_cache_bytes": self.idle_cache_bytes,
        }


def kept_parts(shapes: Sequence[Shape], sharded: Sharded) -> list[MemoryPart]:
    """Returns the weights, and the masters and Adam state of trained ones, on one process."""
    trained = [shape for shape in shapes if shape.is_trained]
    packed = [shape for shape in shapes if shape.packed_bytes is not None]
    packed_bytes, num_plain = sum(shape.packed_bytes or 0 for shape in packed), _count(shapes) - _count(packed)
    size, share, note = sharded.dtype_bytes, sharded.in_words, ""
    if trained and sharded.num_processes > 1:
        shards = sharded.num_values(shapes)
        is_whole = not sharded.rules.shards_parameters
        note = f", whole, and {shards:,} as shards that the optimizer steps" if is_whole else share
        num_plain = shards + (num_plain if is_whole else 0)
    formula = f"{size} bytes x {num_plain:,} parameters{note}"
    formula += f", and {_count(packed):,} quantised ones in {packed_bytes:,} bytes" if packed else ""
    parts = [MemoryPart("weights", num_plain * size + packed_bytes, formula)]
    if not trained:
        return parts
    values = sharded.num_values(trained)
    if size < MASTER_BYTES:
        formula = f"{MASTER_BYTES} bytes x {values:,} trained parameters{share}"
        parts.append(MemoryPart("masters", values * MASTER_BYTES, formula))
    formula = f"2 moments x 4 bytes x {values:,} trained parameters{share}, and a count for each of {len(trained)}"
    return [*parts, MemoryPart(OPTIMIZER_STATE, values * STATE_BYTES + STEP_BYTES * len(trained), formula)]


def gradient_part(shapes: Sequence[Shape], sharded: Sharded) -> MemoryPart:
    """Returns the fp32 gradients that the optimizer steps with, and whole ones that wait for their reduction."""
    trained = [shape for shape in shapes if shape.is_trained]
    values = sharded.num_values(trained)
    num_bytes, text = values * MASTER_BYTES, f"4 bytes x {values:,} trained parameters{sharded.in_words}"
    if sharded.rules.shards_optimizer and not sharded.rules.shards_gradients:
        waiting = _count(trained) * sharded.dtype_bytes
        num_bytes += waiting
        text += f", and {waiting:,} bytes of whole ones that wait for their reduction"
    return MemoryPart("gradients", num_bytes, text)


def kv_part(shape: CacheShape, dtype: torch.dtype, running: int) -> MemoryPart:
    """Returns the KV workspace of `shape` in a model of `dtype`, for `running` sequences at once."""
    per_token, per_slot = shape.bytes_per_block(dtype) // shape.block_size, shape.bytes_per_slot(dtype)
    formula = (
        f"{per_token:,} bytes of {len(shape.specs)} layers x {shape.num_blocks:,} blocks of {shape.block_size} tokens"
    )
    if shape.num_slots:
        formula += f", {per_slot:,} bytes x {shape.num_slots} slots of states"
    formula += f", {running} sequences at once"
    return MemoryPart(KV_WORKSPACE, shape.num_bytes(dtype), formula)


def _lines(parts: Iterable[MemoryPart]) -> Iterator[str]:
    for part in parts:
        if part.num_bytes:
            yield f"  {part.name:<18} {format_bytes(part.num_bytes):>10}  {part.formula}"


def _count(shapes: Iterable[Shape]) -> int:
    return sum(math.prod(shape.dims) for shape in shapes)


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
            records=_records(setting, base_of(actor).config.get_text_config().vocab_size),
            routing=_routing(setting, actor),
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

    PyTorch keeps one "for each combination of cuBLAS handle and CUDA stream" (its notes on CUDA semantics, "cuBLAS
    workspaces"), of 32 MiB from Hopper on and of 8 MiB on older GPUs unless CUBLAS_WORKSPACE_CONFIG says otherwise
    (`CublasHandlePool.cpp`). From 2.15 on it keeps none unless TORCH_CUBLAS_WORKSPACE_CACHE is 1.
    """
    is_kept = torch.__version__ < "2.15" or os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"
    if device != "cuda" or not is_kept:
        return NO_WORKSPACES
    major, _ = torch.cuda.get_device_capability()
    buffers = os.environ.get("CUBLAS_WORKSPACE_CONFIG") or (":4096:8" if major >= 9 else ":4096:2:16:8")
    size = 1024 * sum(int(kib) * int(count) for kib, count in re.findall(r":(\d+):(\d+)", buffers))
    number = 3 if generates else 2
    formula = f"{number} workspaces: of forward passes, of backward passes" + (
        ", of recorded steps" if generates else ""
    )
    return NO_WORKSPACES._replace(num_bytes=number * size, formula=formula)


def has_supports(config: TrainingOptions) -> bool:
    """Whether a run records what its tokens are drawn from."""
    return isinstance(config, RolloutRunOptions) and config.has_filters


def _records(setting: Setting, vocab_size: int) -> MemoryPart:
    """The records of all tokens of a rollout, if all answers are long and all supports as large as they can be."""
    config = setting.config
    if not has_supports(config) or setting.device != "cpu":
        return NO_RECORDS
    assert isinstance(config, RolloutRunOptions)
    most = record_bytes(config.top_k or vocab_size, vocab_size)
    turns = config.num_turns if isinstance(config, AgentConfig) else 1
    tokens = config.rollout_size // setting.num_processes * config.group_size * turns * config.max_new_tokens
    formula = f"at most {most:,} bytes x {tokens:,} tokens"
    return NO_RECORDS._replace(num_bytes=most * tokens, formula=formula)


def _routing(setting: Setting, actor: nn.Module) -> MemoryPart:
    """The experts of all tokens of a rollout, if all prompts and answers are long."""
    config = setting.config
    if not isinstance(config, RolloutRunOptions) or not config.router_replay or setting.device != "cpu":
        return NO_ROUTING
    try:
        routers = find_routers(actor)
    except UnsupportedModelError:  # which the run refuses
        return NO_ROUTING
    width = routing_dtype(max(router.num_experts for router in routers)).itemsize
    length = config.max_prompt_tokens + config.max_new_tokens - 1  # the last token is never fed
    tokens = config.rollout_size // setting.num_processes * config.group_size * length
    each = len(routers) * routers[0].top_k * width
    formula = f"{len(routers)} layers x {routers[0].top_k} experts x {width} bytes x at most {tokens:,} tokens"
    return NO_ROUTING._replace(num_bytes=each * tokens, formula=formula)


def _roles(read: Read, setting: Setting, largest: Pass) -> tuple[list[RolePlan], nn.Module]:
    """The models of the run, those that are trained first; and its actor."""
    config, trained = setting.config, partial(_trained, setting=setting, largest=largest)
    if setting.recipe == "reward":
        model = _build(AutoModelForSequenceClassification, read.first, setting.weight, num_labels=1)
        model = add_adapter(recompute_activations(model, config), config, "SEQ_CLS")
        return [trained("reward model", model)], model
    actor = _build(AutoModelForCausalLM, read.first, setting.weight)
    frozen = [_frozen("reference", _shapes(actor), setting)] if config.keeps_reference else []
    for teacher in read.teachers:
        frozen.append(_frozen("teacher", _shapes(_build(AutoModelForCausalLM, teacher, setting.weight)), setting))
    for judge in read.judges:
        frozen.append(_frozen("judge", _shapes(_build(AutoModelForCausalLM, judge, setting.weight)), setting))
    actor = add_adapter(recompute_activations(actor, config), config)
    if config.keeps_average:
        frozen += _average(actor, setting)
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


def _average(actor: Any, setting: Setting) -> list[RolePlan]:
    """The plan of a moving average of the weights that `actor` trains; an actor with an adapter gets a second one.

    In fp32 on one process the average is the teacher's own weights.
    """
    trained, sharded = _trained_shapes(actor), Sharded(3, setting.num_processes, MASTER_BYTES)
    if setting.config.lora_rank:
        copy_adapter(actor, AVERAGE)
    if setting.num_processes == 1 and setting.weight == torch.float32:
        return []
    values = sharded.num_values(trained)
    formula = f"{MASTER_BYTES} bytes x {values:,} trained parameters{sharded.in_words}"
    kept = [MemoryPart("average", MASTER_BYTES * values, formula)]
    return [RolePlan(name="moving average", kept=kept, gradients=gradient_part([], sharded))]


def _trained(name: str, model: Any, *, setting: Setting, largest: Pass) -> RolePlan:
    """The plan of a model with an engine of its own."""
    shapes, sharded, shape = _shapes(model), setting.sharded, largest.shape
    kept, gradients, gathered = kept_parts(shapes, sharded), gradient_part(shapes, sharded), _gathered(model, setting)
    packed = (math.prod(one.dims) for one in shapes if one.packed_bytes is not None)
    dequantised = sharded.dtype_bytes * max(packed, default=0)
    keeps_shards = sharded.rules.shards_gradients  # they are reduced as they are computed
    accumulates = largest.has_gradients or keeps_shards
    found = count_pass(
        model, shape, accumulates=accumulates, device=setting.device, has_supports=has_supports(setting.config)
    )
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
        return [_own_cache(text, demand.max_running, longest, setting.weight)]
    shape = model.cache_shape(demand.wanted, demand.block_size, demand.wanted_slots)
    parts = [kv_part(shape, setting.weight, demand.max_running)]
    if fused := model.buffer_bytes(is_streamed):
        how = "of one layer at a time" if is_streamed else "once more, dequantised where they are quantised"
        parts.append(MemoryPart("fused adapters", fused, f"the linears with an adapter, {how}"))
    if setting.sharded.rules.shards_parameters:
        layers = [layer.module for layer in model.layers] if is_streamed else []
        parts.append(_whole_weights(actor, layers, setting))
    fed = min(MAX_PREFILL_TOKENS, demand.max_running * prompt_tokens)
    inner = getattr(text, "intermediate_size", 4 * text.hidden_size)
    width = 3 * text.hidden_size + 3 * (max(inner) if isinstance(inner, list) else inner)
    counted = "3 times hidden and MLP size"
    if model.stream is not None:
        width += model.stream.width
        counted += f", and the {model.stream.width} that its layers pass on"
    formula = f"{size} bytes x {fed:,} tokens of prompts in a pass x {width} ({counted})"
    parts.append(MemoryPart(PREFILL, size * fed * width, formula))
    logits = f"2 x 4 bytes x {demand.max_running} rows x {text.vocab_size:,} tokens"
    return [*parts, MemoryPart(LOGITS, 2 * 4 * demand.max_running * text.vocab_size, logits)]


def _own_cache(text: Any, rows: int, columns: int, dtype: torch.dtype) -> MemoryPart:
    """Keys and values of the model's own `generate()`; none for a model without attention."""
    if getattr(text, "num_attention_heads", None) is None:
        return MemoryPart(OWN_CACHE, 0, "no attention, no keys and values; its states are not counted")
    specs = []
    for layer in getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers:
        heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
        width = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        specs.append(LayerCacheSpec(kv=((heads, width), (heads, width))))
    shape = CacheShape(tuple(specs), rows, columns)
    return kv_part(shape, dtype, rows)._replace(name=OWN_CACHE)
