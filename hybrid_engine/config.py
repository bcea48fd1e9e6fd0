"""The engine's configuration: DeepSpeed's JSON format read into frozen dataclasses, every key checked.

    config = load_config("ds_config.json", world_size=2)
    config.train_micro_batch_size_per_gpu, config.zero_optimization.stage, config.dtype

Names, defaults and meanings are DeepSpeed's. Every key of a block is either a field of its dataclass or a
row of `config_keys.py`; anything else is an error, so a misspelt option cannot be silently dropped.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch

from hybrid_engine.batch_sizes import solve_batch_sizes
from hybrid_engine.config_checks import check_flag, check_integer, check_number
from hybrid_engine.config_keys import OPTIMIZERS_NOT_BUILT, SCHEDULERS_NOT_BUILT
from hybrid_engine.config_reading import child_block, find_nearest, read_block, read_json

logger = logging.getLogger("hybrid_engine")

Block = TypeVar("Block")
ADAM_DEFAULTS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
WARMUP_PARAMS = ("warmup_num_steps", "warmup_type")
SCHEDULER_PARAMS = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", *WARMUP_PARAMS),
    "WarmupDecayLR": ("total_num_steps", "warmup_min_lr", "warmup_max_lr", *WARMUP_PARAMS),
    "WarmupCosineLR": ("total_num_steps", "warmup_min_ratio", "cos_min_ratio", *WARMUP_PARAMS),
}


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """`zero_optimization`: what is sharded over the processes."""

    stage: int = 0
    """0 replicates, 1 and 2 shard optimizer state and gradients, 3 also shards the parameters."""

    def __post_init__(self) -> None:
        check_integer("zero_optimization.stage", self.stage, 0, 3)


@dataclass(frozen=True, kw_only=True)
class Fp16Config:
    """`fp16`: parameters in half precision, with the loss scaled so that small gradients survive."""

    enabled: bool = False
    """Whether parameters are stored and computed with in fp16."""
    loss_scale: float = 0
    """The static loss scale; 0 chooses dynamic scaling."""
    initial_scale_power: int = 16
    """Dynamic scaling starts at 2 to this power."""
    loss_scale_window: int = 1000
    """Steps without overflow after which the dynamic scale doubles."""
    hysteresis: int = 2
    """Overflows that are forgiven before the dynamic scale halves."""
    consecutive_hysteresis: bool = False
    """Whether a step without overflow refills the hysteresis."""
    min_loss_scale: float = 1
    """The dynamic scale never falls below this."""

    def __post_init__(self) -> None:
        check_flag("fp16.enabled", self.enabled)
        check_number("fp16.loss_scale", self.loss_scale, 0)
        # 2**126 is the largest power whose double is still finite in fp32, where the scaled loss lives.
        check_integer("fp16.initial_scale_power", self.initial_scale_power, 0, 126)
        check_integer("fp16.loss_scale_window", self.loss_scale_window, 1)
        check_integer("fp16.hysteresis", self.hysteresis, 1)
        check_flag("fp16.consecutive_hysteresis", self.consecutive_hysteresis)
        check_number("fp16.min_loss_scale", self.min_loss_scale, 0)
        if self.min_loss_scale == 0:
            raise ValueError("fp16.min_loss_scale=0 must be above 0; a loss scaled by 0 has no gradient; set it to 1")


@dataclass(frozen=True, kw_only=True)
class Bf16Config:
    """`bf16` (or its old name `bfloat16`): parameters in bfloat16, without loss scaling."""

    enabled: bool = False
    """Whether parameters are stored and computed with in bfloat16."""

    def __post_init__(self) -> None:
        check_flag("bf16.enabled", self.enabled)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """`optimizer`: the optimizer that the engine builds, in the terms of `torch.optim`."""

    type: str
    """"Adam" (decay added to the gradient) or "AdamW" (decoupled decay), as `torch.optim` names them."""
    params: dict[str, Any] = field(default_factory=dict)
    """Its keyword arguments `lr`, `betas`, `eps`, `weight_decay`; those not given have DeepSpeed's defaults."""

    def __post_init__(self) -> None:
        assert self.type in ("Adam", "AdamW"), f"{self.type=}"
        # torch.optim's own default weight decay differs, so no default is left to it.
        object.__setattr__(self, "params", ADAM_DEFAULTS | self.params)
        for name in ("lr", "eps", "weight_decay"):
            check_number(f"optimizer.params.{name}", self.params[name], 0)
        betas = self.params["betas"]
        if not isinstance(betas, tuple) or len(betas) != 2:
            raise ValueError(f"optimizer.params.betas={betas!r} must be two numbers; write it like [0.9, 0.999]")
        for index, beta in enumerate(betas):
            check_number(f"optimizer.params.betas[{index}]", beta, 0, 1)
            if beta == 1:
                raise ValueError(f"optimizer.params.betas[{index}]=1 must be below 1; write it like 0.9 or 0.999")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """`scheduler`: the learning-rate schedule that the engine builds and steps after each optimizer step."""

    type: str
    """"WarmupLR", "WarmupDecayLR" or "WarmupCosineLR"."""
    params: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that class of `hybrid_engine.zero.lr_schedules`; absent ones have its defaults."""

    def __post_init__(self) -> None:
        assert self.type in SCHEDULER_PARAMS, f"{self.type=}"
        needs_total = "total_num_steps" in SCHEDULER_PARAMS[self.type]
        if needs_total and "total_num_steps" not in self.params:
            raise ValueError(
                f"scheduler.params.total_num_steps is missing; {self.type} needs the number of steps to plan"
            )
        for name, value in self.params.items():
            path = f"scheduler.params.{name}"
            if name in ("total_num_steps", "warmup_num_steps"):
                check_integer(path, value, 1)
            elif name == "warmup_type":
                if value not in ("log", "linear"):
                    raise ValueError(f'{path}={value!r} must be "log" or "linear"; "log" is DeepSpeed\'s default')
            else:
                for entry in value if isinstance(value, (list, tuple)) else [value]:
                    check_number(path, entry, 0)


@dataclass(frozen=True, kw_only=True)
class HybridEngineConfig:
    """`hybrid_engine`: generation inside the training engine."""

    enabled: bool = False
    """Whether `initialize` returns a `HybridEngine` instead of a `ZeroEngine`."""
    max_out_tokens: int = 512
    """Prompt and answer tokens that one sequence may hold together."""
    inference_tp_size: int = 1
    """Tensor-parallel degree inside `generate()`; only 1 is built."""
    release_inference_cache: bool = False
    """Whether the KV workspace gives its memory back after each `generate()`."""
    pin_parameters: bool = True
    """ZeRO-3: gather the whole model once around `generate()`; false streams it layer by layer."""
    enable_cuda_graph: bool = True
    """On a GPU: whether a decode step is replayed as one graph wherever it can be. DeepSpeed's default is false."""
    tp_gather_partition_size: int = 8
    """Layers gathered at a time while slicing for tensor parallelism; nothing to do while that is not built."""
    max_running: int = 0
    """Rows decoded at once; 0 lets the engine choose. This key and those below are not DeepSpeed's."""
    kv_block_size: int = 0
    """Tokens per block of the KV workspace; 0 lets the engine choose."""
    max_kv_blocks: int = 0
    """Cap on the blocks of the KV workspace; 0 sizes it from the demand and the free memory."""

    def __post_init__(self) -> None:
        for name in ("enabled", "release_inference_cache", "pin_parameters", "enable_cuda_graph"):
            check_flag(f"hybrid_engine.{name}", getattr(self, name))
        for name in ("max_out_tokens", "inference_tp_size", "tp_gather_partition_size"):
            check_integer(f"hybrid_engine.{name}", getattr(self, name), 1)
        for name in ("max_running", "kv_block_size", "max_kv_blocks"):
            check_integer(f"hybrid_engine.{name}", getattr(self, name), 0)
        if self.inference_tp_size > 1:
            raise ValueError(
                f"hybrid_engine.inference_tp_size={self.inference_tp_size} is known to DeepSpeed, not built yet here; "
                f"set it to 1: every process then generates its own rows with the whole model"
            )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything `initialize` reads from the config."""

    train_batch_size: int
    """Samples per optimizer step over all processes."""
    train_micro_batch_size_per_gpu: int
    """Samples per forward pass of one process."""
    gradient_accumulation_steps: int
    """Forward passes per optimizer step."""
    zero_optimization: ZeroConfig = field(default_factory=ZeroConfig)
    """Sharding."""
    fp16: Fp16Config = field(default_factory=Fp16Config)
    """Half precision."""
    bf16: Bf16Config = field(default_factory=Bf16Config)
    """Bfloat16."""
    gradient_clipping: float = 0.0
    """Largest global gradient norm; 0 does not clip."""
    optimizer: OptimizerConfig | None = None
    """The optimizer to build when the caller passes none."""
    scheduler: SchedulerConfig | None = None
    """The learning-rate schedule to build when the caller passes none."""
    steps_per_print: int = 0
    """Optimizer steps between two progress lines; 0 prints none."""
    hybrid_engine: HybridEngineConfig = field(default_factory=HybridEngineConfig)
    """Generation inside the training engine."""

    def __post_init__(self) -> None:
        check_number("gradient_clipping", self.gradient_clipping, 0)
        check_integer("steps_per_print", self.steps_per_print, 0)
        if self.fp16.enabled and self.bf16.enabled:
            raise ValueError(
                "fp16.enabled=true and bf16.enabled=true exclude each other; parameters have one dtype: disable one"
            )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that parameters are stored and computed in."""
        if self.fp16.enabled:
            return torch.float16
        return torch.bfloat16 if self.bf16.enabled else torch.float32


def load_config(config: Mapping[str, Any] | str | os.PathLike[str], *, world_size: int) -> EngineConfig:
    """Reads and checks a DeepSpeed-format config.

    Args:
        config: the config as a dict (not changed), or the path of a JSON file.
        world_size: number of data-parallel processes, which the batch sizes are checked against.

    Returns:
        The checked config. Accepted keys without effect here are named in one line of the log.

    Raises:
        ValueError: for an unreadable file or any option that is unknown, not built or out of range.
    """
    assert world_size >= 1, f"{world_size=}"
    whole = dict(config) if isinstance(config, Mapping) else read_json(config)
    without_effect: list[str] = []
    top = read_block(
        whole, "", [*(entry.name for entry in fields(EngineConfig)), "bfloat16", "checkpoint"], without_effect
    )
    _merge_legacy_bf16(top)
    read_block(child_block(top, "checkpoint"), "checkpoint", (), without_effect)
    batch_sizes = solve_batch_sizes(
        top.get("train_batch_size"),
        top.get("train_micro_batch_size_per_gpu"),
        top.get("gradient_accumulation_steps"),
        world_size,
    )
    result = EngineConfig(
        **batch_sizes,
        zero_optimization=_build(ZeroConfig, top, "zero_optimization", without_effect),
        fp16=_build(Fp16Config, top, "fp16", without_effect),
        bf16=_build(Bf16Config, top, "bf16", without_effect),
        gradient_clipping=top.get("gradient_clipping", 0.0),
        optimizer=_build_optimizer(child_block(top, "optimizer"), without_effect),
        scheduler=_build_scheduler(child_block(top, "scheduler"), without_effect),
        steps_per_print=0 if top.get("steps_per_print") is None else top["steps_per_print"],
        hybrid_engine=_build(HybridEngineConfig, top, "hybrid_engine", without_effect),
    )
    if without_effect:
        logger.warning("config: accepted, without effect in this engine: %s", ", ".join(without_effect))
    return result


def _merge_legacy_bf16(top: dict[str, Any]) -> None:
    if "bfloat16" in top:
        if "bf16" in top:
            raise ValueError("bf16 and bfloat16 are two names of one block; keep bf16 and remove bfloat16")
        top["bf16"] = top.pop("bfloat16")


def _build(cls: type[Block], top: dict[str, Any], path: str, without_effect: list[str]) -> Block:
    known = [entry.name for entry in fields(cls)]  # type: ignore[arg-type]
    return cls(**read_block(child_block(top, path), path, known, without_effect))


def _build_optimizer(block: dict[str, Any], without_effect: list[str]) -> OptimizerConfig | None:
    if not block:
        return None
    block = read_block(block, "optimizer", ("type", "params"), without_effect)
    kind = _choose_type("optimizer", block.get("type"), ("Adam", "AdamW"), OPTIMIZERS_NOT_BUILT)
    given = child_block(block, "params", "optimizer")
    params = read_block(given, "optimizer.params", (*ADAM_DEFAULTS, "adam_w_mode"), without_effect)
    if isinstance(params.get("betas"), list):
        params["betas"] = tuple(params["betas"])
    decoupled = params.pop("adam_w_mode", True)
    check_flag("optimizer.params.adam_w_mode", decoupled)
    # DeepSpeed's "Adam" decouples the weight decay too unless adam_w_mode is false.
    return OptimizerConfig(type="AdamW" if decoupled or kind == "AdamW" else "Adam", params=params)


def _build_scheduler(block: dict[str, Any], without_effect: list[str]) -> SchedulerConfig | None:
    if not block:
        return None
    block = read_block(block, "scheduler", ("type", "params"), without_effect)
    kind = _choose_type("scheduler", block.get("type"), tuple(SCHEDULER_PARAMS), SCHEDULERS_NOT_BUILT)
    given = child_block(block, "params", "scheduler")
    return SchedulerConfig(
        type=kind, params=read_block(given, "scheduler.params", SCHEDULER_PARAMS[kind], without_effect)
    )


def _choose_type(path: str, kind: Any, built: tuple[str, ...], not_built: tuple[str, ...]) -> str:
    """The spelling in `built` of the type a user gave; like DeepSpeed, letter case does not matter."""
    if not isinstance(kind, str):
        raise ValueError(f"{path}.type={kind!r} must be one of {', '.join(built)}; write it as a string")
    by_lower_case = {name.lower(): name for name in built}
    if kind.lower() in by_lower_case:
        return by_lower_case[kind.lower()]
    if kind.lower() in [name.lower() for name in not_built]:
        raise ValueError(f"{path}.type={kind!r} is known to DeepSpeed, not built yet here; use {' or '.join(built)}")
    close = find_nearest(kind, built)
    advice = f"did you mean {close}?" if close else f"use {' or '.join(built)}"
    raise ValueError(f"{path}.type={kind!r} is not known; {advice}")
