"""`init_inference`: builds an engine that generates from a model, step by step.

    engine = init_inference(model, dtype="bf16", tensor_parallel={"tp_size": 2}, max_out_tokens=2048)
    tokens = engine.generate(input_ids, attention_mask=mask, max_new_tokens=64)

Each step is one function below, in the order in which `build_engine` calls them. The model determines whether
containers are used. The model's own modules run the parts that containers do not cover.

Tensor parallelism for models without a policy cuts their own modules with linears, found by name. A column-parallel
linear holds rows of its [out, in] weight. A row-parallel one holds columns, and its outputs are added up over the
processes. Other modules are unchanged. Attention modules keep their code; their attributes with numbers of heads are
set to those of this process. `HeldSlices` holds the parts of models with a policy.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from hybrid_engine.config import HybridEngineConfig
from hybrid_engine.config.notices import say_once
from hybrid_engine.containers import InferenceEncoder, InferenceModel, UnsupportedModelError
from hybrid_engine.containers.layer import Heads, check_divides, read_heads
from hybrid_engine.containers.model import find_decoder
from hybrid_engine.containers.policy import Policy
from hybrid_engine.containers.views import Cut, TensorParallel, cut, is_adapted, read_whole
from hybrid_engine.distributed.processes import check_gpu, default_device, get_rank, init_distributed
from hybrid_engine.generation.live.opening import FusedAdapter
from hybrid_engine.generation.memory import usable_memory_bytes
from hybrid_engine.generation.model.groups import PIPELINE_OPTION, describe_group, join_model_group, join_stages
from hybrid_engine.generation.model.probe import probe_containers
from hybrid_engine.generation.model.weights import ModelGroup, bound
from hybrid_engine.generation.rollout.generator import Generator
from hybrid_engine.generation.rollout.stages import StageModel
from hybrid_engine.inference.checkpoint import CheckpointReader, compute_buffers, open_checkpoint_of
from hybrid_engine.inference.config import InferenceConfig, read_config
from hybrid_engine.inference.engine import InferenceEngine
from hybrid_engine.metrics.memory import format_bytes
from hybrid_engine.optim.build import cast_module
from hybrid_engine.zero.sharding import Sharding
from hybrid_engine.zero.wrapping import find_layers

ROW_NAMES = (
    "o_proj", "out_proj", "down_proj", "dense_4h_to_h", "fc2", "wo", "w2", "c_proj", "out_lin", "lin2", "proj_out",
    "attention.dense", "self_attention.dense", "output.dense",
)  # fmt: skip
COLUMN_NAMES = (
    "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1", "fc_in", "dense_h_to_4h", "c_fc", "wi", "wi_0", "wi_1",
    "w1", "w3", "wq", "wk", "wv", "q", "k", "v", "query", "key", "value", "q_lin", "k_lin", "v_lin", "lin1",
    "intermediate.dense",
)  # fmt: skip
# The order of their rows cannot be derived from the name.
FUSED_NAMES = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv", "gate_up_proj", "in_proj", "W_pack")
HEAD_NUMBERS = (
    "num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "num_kv_heads", "n_kv_heads",
    "all_head_size", "inner_dim",
)  # fmt: skip
DEFAULT_MAX_OUT_TOKENS = 1024


class RowParallelLinear(nn.Module):
    """A linear of which each process holds columns of the weight [out, in]; the bias is added once, after the sum."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, parallel: TensorParallel):
        super().__init__()
        self.weight, self.bias, self.parallel = weight, bias, parallel

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`[..., in / size]` -> `[..., out]`, the same on every process."""
        output = self.parallel.all_reduce(nn.functional.linear(input, self.weight))
        return output if self.bias is None else output + self.bias


@dataclass(frozen=True)
class LinearPlan:
    """Paths in one layer of the linears that are cut, by how they are cut."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]


def share_linears(model: nn.Module, config: InferenceConfig, parallel: TensorParallel) -> int:
    """Cuts the linears of a model without a policy; returns their number. ValueError if there are none, or with
    LoRA.
    """
    for name, module in model.named_modules():
        if is_adapted(module):
            raise ValueError(
                f"tensor_parallel.tp_size={parallel.size}: {name} carries an adapter, and {type(model).__name__} has "
                "no policy that says how to share one; merge the adapters first (merge_and_unload()) or use "
                "tensor_parallel.tp_size=1"
            )
    plans = [(layer, plan) for layer, plan in plan_layers(model, config) if plan is not None]
    if not plans:
        raise ValueError(
            f"tensor_parallel.tp_size={parallel.size}: no linears of {type(model).__name__} are known by their names; "
            "pass injection_policy={LayerClass: names of the linears whose outputs are added up}, or "
            "tensor_parallel.tp_size=1"
        )
    for layer, plan in plans:
        check_layer(layer, plan, getattr(model, "config", None), parallel)
    for layer, plan in plans:
        cut_layer(layer, plan, parallel)
    return sum(len(plan.rows) + len(plan.columns) for _, plan in plans)


def plan_layers(model: nn.Module, config: InferenceConfig) -> list[tuple[nn.Module, LinearPlan | None]]:
    """The layers that are shared: those in `injection_policy`, or else the repeated layers."""
    if config.injection_policy is None:
        layers = find_layers(model)
        if config.injection_policy_tuple is not None:
            return [(layer, plan_by_policy(layer, config.injection_policy_tuple)) for layer in layers]
        return [(layer, plan_by_names(layer)) for layer in layers]
    named = {_class_name(kind): _names(names) for kind, names in config.injection_policy.items()}
    found = [layer for layer in model.modules() if type(layer).__name__ in named]
    if not found:
        raise ValueError(f"injection_policy: {type(model).__name__} has no layer of class {', '.join(named)}")
    return [(layer, plan_by_policy(layer, named[type(layer).__name__])) for layer in found]


def _class_name(kind: Any) -> str:
    return kind if isinstance(kind, str) else kind.__name__


def _names(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def plan_by_names(layer: nn.Module) -> LinearPlan | None:
    """The linears found by names; None if one is fused, or if outputs would stay cut."""
    paths = [path for path, module in layer.named_modules() if isinstance(module, nn.Linear)]
    if any(path.rpartition(".")[2] in FUSED_NAMES for path in paths):
        return None
    rows = tuple(path for path in paths if _ends(path, ROW_NAMES))
    columns = tuple(path for path in paths if path not in rows and _ends(path, COLUMN_NAMES))
    return LinearPlan(rows, columns) if rows and columns else None


def plan_by_policy(layer: nn.Module, rows: Iterable[str]) -> LinearPlan:
    """A plan in which the linears named by the user are row-parallel and all others of the layer column-parallel.

    Raises ValueError for a name that the layer does not have.
    """
    linears = {path for path, module in layer.named_modules() if isinstance(module, nn.Linear)}
    rows = tuple(rows)
    for path in rows:
        if path not in linears:
            raise ValueError(
                f"injection_policy: {type(layer).__name__} has no linear {path!r}; it has {', '.join(sorted(linears))}"
            )
    return LinearPlan(rows, tuple(sorted(linears - set(rows))))


def _ends(path: str, names: tuple[str, ...]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names)


def check_layer(layer: nn.Module, plan: LinearPlan, config: PretrainedConfig, parallel: TensorParallel) -> None:
    """Raises ValueError, with the sizes that work, if heads or outputs of the layer cannot be shared equally."""
    num_heads = getattr(config, "num_attention_heads", None) or 1
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    widths = [layer.get_submodule(path).out_features for path in plan.columns]
    if num_kv_heads < parallel.size:
        num_heads = num_kv_heads  # the modules' own code cannot hold one head in several processes
    check_divides(Heads(num_heads, num_kv_heads, 1, parallel), widths, parallel)


def cut_layer(layer: nn.Module, plan: LinearPlan, parallel: TensorParallel) -> None:
    """Replaces the weights of one layer with this process's parts, in place."""
    for path in plan.columns:
        linear = layer.get_submodule(path)
        linear.weight = _part(linear.weight, 0, parallel)
        if linear.bias is not None:
            linear.bias = _part(linear.bias, 0, parallel)
        linear.out_features //= parallel.size
    for path in plan.rows:
        linear = layer.get_submodule(path)
        layer.set_submodule(path, RowParallelLinear(_part(linear.weight, 1, parallel), linear.bias, parallel))
    owners = {path.rpartition(".")[0] for path in plan.columns}
    for owner in map(layer.get_submodule, owners):
        for name in HEAD_NUMBERS:
            number = owner.__dict__.get(name)
            if isinstance(number, int) and number % parallel.size == 0:
                setattr(owner, name, number // parallel.size)


def _part(parameter: nn.Parameter, dim: int, parallel: TensorParallel) -> nn.Parameter:
    part = parallel.take(parameter, cut(dim, parallel.even(parameter.shape[dim])), "a linear")
    return nn.Parameter(part.clone(), requires_grad=parameter.requires_grad)


class HeldSlices:
    """Reads parts for containers, each once.

    Args:
        device: device of the parts.
        source: reads a part of a parameter from its storage.
    """

    def __init__(
        self,
        device: torch.device,
        source: Callable[[torch.Tensor, Cut | None, int, str], torch.Tensor] = read_whole,
    ):
        self.device, self.source = device, source
        self._held: dict[tuple[int, Cut | None], torch.Tensor] = {}

    def read(self, parameter: torch.Tensor, cut: Cut | None, rank: int, name: str) -> torch.Tensor:
        """The part of `rank`, in memory that this object owns."""
        key = (id(parameter), cut)
        if key not in self._held:
            part = self.source(parameter, cut, rank, name).to(self.device)
            # A view would keep the whole tensor alive.
            self._held[key] = part.contiguous() if part.nbytes == part.untyped_storage().nbytes() else part.clone()
        return self._held[key]

    @property
    def num_bytes(self) -> int:
        """Bytes of the slices held now."""
        return sum(part.nbytes for part in self._held.values())

    def let_go(self, module: nn.Module) -> None:
        """Replaces the module's parameters with meta tensors, which are the keys of the parts from then on."""
        replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in replaced:
                    empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
                    replaced[id(parameter)] = parameter, empty
                part._parameters[name] = replaced[id(parameter)][1]
        # Buffers, such as a bias that chooses experts, stay.
        self._held = {
            (id(replaced[key][1]) if key in replaced else key, cut): part for (key, cut), part in self._held.items()
        }


def init_inference(
    model: nn.Module, config: dict[str, Any] | str | os.PathLike[str] | None = None, **kwargs: Any
) -> InferenceEngine:
    """An engine that runs `model` for inference; the arguments are those of `deepspeed.init_inference`.

    Collective over all processes if `tensor_parallel.tp_size` is above 1; each then holds its part of the model.

    Args:
        model: a Hugging Face model or any module; changed in place (device, dtype, and what is shared).
        config: options as a dict or the path of a JSON file, see `InferenceConfig`.
        **kwargs: the same options by name.

    Raises:
        ValueError: an option is unknown, given twice with different values, or not supported by the model or the
            device.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    return build_engine(model, read_config(config, kwargs))


@torch.no_grad()
def build_engine(model: nn.Module, config: InferenceConfig) -> InferenceEngine:
    """Builds an engine from a model and a config by all steps in order."""
    check_gpu()
    device = default_device()
    policy, reason = check_policy(model)
    heads = read_model_heads(model, policy)
    check_stages(model, config, policy, reason)
    group = check_tensor_parallel(config, heads, device)
    checkpoint = open_checkpoint(model, config)
    weights, reason = take_weights(model, policy, reason, group, checkpoint)
    answer_old_flags(config, policy, reason)
    convert_dtype(model, config, device)
    layer_config = build_layer_config(model, config, weights)
    check_memory(model, weights, group, device)
    fill_module(weights, group, device)
    engine = build_module(model, config, layer_config, weights, group, reason, device)
    transpose_for_inference(engine, weights)
    apply_tensor_parallelism(engine, weights, config)
    return engine


@dataclass
class WeightSources:
    """The sources of the model's weights for the containers; nothing is read yet."""

    decoder: InferenceModel | None = None
    encoder: InferenceEncoder | None = None
    held: HeldSlices | None = None
    """This rank's parts, if processes share the model."""
    checkpoint: CheckpointReader | None = None
    """The reader of a checkpoint; None: the weights are in the model."""


def check_policy(model: nn.Module) -> tuple[Policy | None, str | None]:
    """The policy of the model's layers, or the reason why there is none."""
    base = _base(model)
    if not hasattr(base, "config"):
        return None, f"{type(base).__name__} has no config"
    try:
        return find_decoder(base, _text_config(base))[2], None
    except UnsupportedModelError as error:
        return None, str(error)


def read_model_heads(model: nn.Module, policy: Policy | None) -> Heads | None:
    """Numbers of heads of every layer; None where they are not known, or each layer has its own and checks them."""
    base = _base(model)
    return None if policy is None or None in policy.mixers else read_heads(policy, _text_config(base))


def check_stages(model: nn.Module, config: InferenceConfig, policy: Policy | None, reason: str | None) -> None:
    """Raises ValueError if the model's layers cannot be distributed over the config's number of stages."""
    size = config.pipeline_parallel_size
    if size == 1:
        return
    if policy is None or policy.is_encoder:
        why = reason or f"{policy.layer_class} is an encoder's layer"  # type: ignore[union-attr]
        raise ValueError(f"{PIPELINE_OPTION}={size}: stages run on containers, and {why}; leave it at 1")
    num_layers = len(find_decoder(_base(model), _text_config(_base(model)))[1])
    if num_layers < size:
        raise ValueError(
            f"{PIPELINE_OPTION}={size} must not exceed the model's {num_layers} layers: each stage has at least one; "
            f"use 1 to {num_layers}"
        )


def _base(model: nn.Module) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def check_tensor_parallel(config: InferenceConfig, heads: Heads | None, device: torch.device) -> ModelGroup:
    """The processes that share the model. Raises ValueError if they cannot share its heads or layers."""
    option, size, num_stages = "tensor_parallel.tp_size", config.tensor_parallel.size, config.pipeline_parallel_size
    if size * num_stages == 1:
        return ModelGroup(has_same_prompts=True)
    init_distributed()
    chosen = config.tensor_parallel.group
    if num_stages > 1:
        group = join_stages(size, num_stages, device, option)
    else:
        group = join_model_group(size, device, option) if chosen is None else describe_group(chosen, option)
    if group.parallel.size != size:
        raise ValueError(f"{option}={size} is not the size {group.size} of tp_group; leave tp_size or tp_group out")
    if heads is not None:
        check_divides(heads, [], group.parallel)
    return replace(group, has_same_prompts=True)


def open_checkpoint(model: nn.Module, config: InferenceConfig) -> CheckpointReader | None:
    """A reader of the checkpoint after a comparison with the model's tensors; ValueError if they differ."""
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    checkpoint = config.checkpoint or config.checkpoint_config.get("checkpoint_dir")
    if is_empty and checkpoint is None:
        raise ValueError(
            "model is on the meta device and has no weights; pass checkpoint=, the folder of its safetensors"
        )
    if checkpoint is None:
        return None
    if not is_empty:
        raise ValueError(
            "checkpoint fills a model that is on the meta device, and this one has weights; build it under "
            'torch.device("meta"), or leave checkpoint out'
        )
    base_dir = config.base_dir or config.checkpoint_config.get("base_dir") or ""
    reader = open_checkpoint_of(_base(model), checkpoint, base_dir)
    compute_buffers(_base(model), default_device())
    return reader


def take_weights(
    model: nn.Module,
    policy: Policy | None,
    reason: str | None,
    group: ModelGroup,
    checkpoint: CheckpointReader | None,
) -> tuple[WeightSources, str | None]:
    """Finds attention, MLP and norm weights through the policy; without one, returns no containers and the reason."""
    if policy is None:
        return WeightSources(checkpoint=checkpoint), reason
    held = None
    parallel = group.parallel
    if group.size > 1:
        held = HeldSlices(default_device(), read_whole if checkpoint is None else checkpoint.read)
        parallel = replace(parallel, read=held.read, device=held.device)
    try:
        if policy.is_encoder:
            return WeightSources(encoder=InferenceEncoder(model, parallel), held=held, checkpoint=checkpoint), None
        if group.stage is not None:
            stage = StageModel(model, parallel, group, default_device())
            return WeightSources(decoder=stage, held=held, checkpoint=checkpoint), None
        return WeightSources(decoder=InferenceModel(model, parallel), held=held, checkpoint=checkpoint), None
    except UnsupportedModelError as error:
        return WeightSources(checkpoint=checkpoint), str(error)


def answer_old_flags(config: InferenceConfig, policy: Policy | None, reason: str | None) -> None:
    """Prints a line for each flag that contradicts the model."""
    lines = []
    if config.replace_with_kernel_inject is True and reason is not None:
        lines.append(f"replace_with_kernel_inject=True, but the model's own layers run: {reason}")
    if config.replace_with_kernel_inject is False and reason is None and policy is not None:
        lines.append(f"replace_with_kernel_inject=False, but {policy.layer_class} runs on containers")
    if (config.injection_policy or config.injection_policy_tuple) and reason is None and policy is not None:
        lines.append(f"injection_policy is not needed: {policy.layer_class} has a policy")
    if not config.triangular_masking and policy is not None and not policy.is_encoder:
        lines.append(f"triangular_masking=False, but {policy.layer_class} is causal")
    for line in lines:
        say_once(line)


def convert_dtype(model: nn.Module, config: InferenceConfig, device: torch.device) -> None:
    """Casts the parameters if the config sets a dtype; ValueError if the device does not support it."""
    if config.dtype is None:
        return
    if not _has_dtype(device, config.dtype):
        raise ValueError(f"dtype={config.dtype}: {device} does not compute in it; use fp32, or fp16 on an older GPU")
    cast_module(model, config.dtype)


class _OwnOptions(HybridEngineConfig):
    """The options that `init_inference` takes under the same names, outside of any block."""

    prefix = ""


def build_layer_config(model: nn.Module, config: InferenceConfig, weights: WeightSources) -> HybridEngineConfig:
    """The options of generation. Raises ValueError for more tokens than the model has positions."""
    model_config = _text_config(model) if hasattr(model, "config") else None
    positions = getattr(model_config, "max_position_embeddings", None)
    if weights.decoder is not None:
        positions = weights.decoder.max_positions
    if config.max_out_tokens is not None and positions is not None and config.max_out_tokens > positions:
        raise ValueError(
            f"max_out_tokens={config.max_out_tokens} must not exceed the model's max_position_embeddings={positions}; "
            "lower it"
        )
    default = min(DEFAULT_MAX_OUT_TOKENS, positions or DEFAULT_MAX_OUT_TOKENS)
    return _OwnOptions(
        enabled=True,
        max_running=config.max_running,
        max_out_tokens=config.max_out_tokens or default,
        inference_tp_size=config.tensor_parallel.size,
        enable_cuda_graph=config.enable_cuda_graph,
    )


def check_memory(model: nn.Module, weights: WeightSources, group: ModelGroup, device: torch.device) -> None:
    """Raises ValueError if weights that are not yet on `device` do not fit there; nothing has moved."""
    is_whole = group.size == 1 or (weights.encoder is not None and weights.checkpoint is None)
    missing = sum(p.numel() * p.element_size() for p in model.parameters() if p.device != device)
    wanted, free = missing // (1 if is_whole else group.size), usable_memory_bytes(device)
    if wanted > free:
        raise ValueError(
            f"init_inference(): this process's weights take {format_bytes(wanted)} on {device}, where "
            f"{format_bytes(free)} may be taken; pass a dtype of fewer bits, or share the model among "
            f"{-(-missing // max(1, free))} processes or more (tensor_parallel.tp_size, now {group.size})"
        )


def fill_module(weights: WeightSources, group: ModelGroup, device: torch.device) -> None:
    """Reads the checkpoint into the model if one process holds all of it."""
    if weights.checkpoint is not None and group.size == 1:
        weights.checkpoint.fill(device)


def build_module(
    model: nn.Module,
    config: InferenceConfig,
    layer_config: HybridEngineConfig,
    weights: WeightSources,
    group: ModelGroup,
    reason: str | None,
    device: torch.device,
) -> InferenceEngine:
    """The engine around the model, which is moved to the device unless only a part of it will be."""
    model.eval()
    if group.size == 1 or (weights.encoder is not None and weights.checkpoint is None):
        model.to(device)
    generator = None
    if hasattr(type(model), "generate") and weights.encoder is None:
        sharding = Sharding(root=model, stage=0, world_size=1, rank=get_rank())
        generator = Generator(model, sharding, layer_config, group, device)
        generator.fallback_reason = reason
    return InferenceEngine(model, config, generator, weights.encoder, group, reason)


def transpose_for_inference(engine: InferenceEngine, weights: WeightSources) -> None:
    """Binds the containers to [in, out] views of the weights, or to this rank's parts, and measures them once."""
    if weights.encoder is not None:
        weights.encoder.bind()
        weights.encoder.fuse_lora()  # reads this rank's part of the adapters while they are whole
        weights.encoder.unfuse_lora()
    if engine.generator is None:
        return
    if weights.decoder is None:
        if engine.generator.group.size == 1:
            engine.generator.measure_own()
        return
    model, difference = weights.decoder, None
    with bound(model, engine.generator.gatherer):
        is_in_one_place = all(parameter.device == model.device for parameter in engine.module.parameters())
        try:
            if is_in_one_place:
                difference = probe_containers(engine.module, model, lambda: model.layers)
        except UnsupportedModelError as error:
            if weights.held is not None:
                raise
            engine.generator.drop_containers(str(error))
            engine.generator.measure_own()
            return
        if weights.held is not None and hasattr(engine.module, "get_base_model"):
            read_adapters(engine.module, model)
    engine.generator.use_containers(model, difference)
    if is_in_one_place and weights.held is None and model.device.type == "cuda":
        try:
            engine.generator.probe_widely()
        except UnsupportedModelError as error:
            engine.generator.drop_containers(str(error))
            engine.generator.measure_own()


def read_adapters(module: nn.Module, model: InferenceModel) -> None:
    """Reads this rank's part of every adapter of a `PeftModel` while all are whole: any may become active later."""
    fused = FusedAdapter(module, model)
    for name in module.peft_config:  # type: ignore[union-attr]
        fused.fuse(name)
    fused.give_back()


def apply_tensor_parallelism(engine: InferenceEngine, weights: WeightSources, config: InferenceConfig) -> None:
    """Frees the weights that other processes hold; cuts the linears of a model without a policy.

    Experts need no separate step: each process has its part of every one.
    """
    if engine.group.size == 1:
        return
    if weights.held is None:
        group = engine.group
        if weights.checkpoint is not None:
            group = replace(group, parallel=replace(group.parallel, read=weights.checkpoint.read))
        engine.cut_linears = share_linears(engine.module, config, group.parallel)
        if weights.checkpoint is not None:
            weights.checkpoint.fill(default_device())
        engine.module.to(default_device())
        return
    if weights.decoder is not None:
        weights.held.let_go(engine.module)
        engine.let_go()
    if weights.encoder is not None:
        weights.held.let_go(weights.encoder.own_layers)
        if weights.checkpoint is not None:
            weights.checkpoint.fill(default_device())
    if weights.checkpoint is not None:
        weights.checkpoint.close()


def _text_config(model: nn.Module) -> Any:
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _has_dtype(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type == "cuda" and dtype is torch.bfloat16:
        return torch.cuda.get_device_capability(device) >= (8, 0)  # older ones only emulate it
    try:
        torch.nn.functional.linear(*torch.ones(2, 1, 1, dtype=dtype, device=device))
    except (RuntimeError, TypeError):
        return False
    return True
