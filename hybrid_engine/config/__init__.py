"""The engine's configuration: DeepSpeed's JSON format read into frozen dataclasses, every key checked.

    config = load_config("ds_config.json", world_size=2)
    config.train_micro_batch_size_per_gpu, config.zero_optimization.stage, config.dtype

Names, defaults and meanings are DeepSpeed's. Every key of a block is either a field of its dataclass or a
row of `keys.py`; anything else is an error or reported, so a misspelt option cannot be silently dropped.
`docs/config.md` lists them all and is written by `python -m hybrid_engine.cli.config_page`.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from hybrid_engine.config.blocks import (
    ActivationCheckpointingConfig,
    Bf16Config,
    CheckpointConfig,
    CometConfig,
    CsvMonitorConfig,
    FlopsProfilerConfig,
    Fp16Config,
    HybridEngineConfig,
    OffloadConfig,
    OffloadParamConfig,
    TensorBoardConfig,
    WandbConfig,
    ZeroConfig,
)
from hybrid_engine.config.checks import (
    DTYPES,
    check_choice,
    check_flag,
    check_integer,
    check_number,
    dtype_name,
    torch_dtype_of,
)
from hybrid_engine.config.notices import say_once
from hybrid_engine.config.optimizer import (
    OptimizerConfig,
    SchedulerConfig,
    build_optimizer_config,
    build_scheduler_config,
)
from hybrid_engine.config.reading import child_block, read_block, read_json, resolve_auto, with_integers, without_auto

if TYPE_CHECKING:  # the command reads its options without torch
    import torch

Block = TypeVar("Block")
SIMPLE_BLOCKS: dict[str, Any] = {
    "fp16": Fp16Config,
    "bf16": Bf16Config,
    "activation_checkpointing": ActivationCheckpointingConfig,
    "checkpoint": CheckpointConfig,
    "tensorboard": TensorBoardConfig,
    "csv_monitor": CsvMonitorConfig,
    "wandb": WandbConfig,
    "comet": CometConfig,
    "flops_profiler": FlopsProfilerConfig,
    "hybrid_engine": HybridEngineConfig,
}
"""Blocks whose keys are the fields of a dataclass."""
MAY_DIFFER = (
    "comet",
    "csv_monitor",
    "flops_profiler",
    "seed",
    "steps_per_print",
    "tensorboard",
    "wall_clock_breakdown",
    "wandb",
)
"""Keys that need not be the same on all processes."""
BATCH_PRODUCT = "train_micro_batch_size_per_gpu * gradient_accumulation_steps * world_size"


__all__ = [
    "Bf16Config",
    "EngineConfig",
    "Fp16Config",
    "HybridEngineConfig",
    "OffloadConfig",
    "OffloadParamConfig",
    "OptimizerConfig",
    "SchedulerConfig",
    "ZeroConfig",
    "load_config",
]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything `initialize` reads from the config."""

    train_batch_size: int
    """Samples per optimizer step over all processes."""
    train_micro_batch_size_per_gpu: int
    """Samples per forward pass on one process."""
    gradient_accumulation_steps: int
    """Forward passes per optimizer step."""
    zero_optimization: ZeroConfig = field(default_factory=ZeroConfig)
    """Sharding across processes; true means stage 1, false stage 0."""
    fp16: Fp16Config = field(default_factory=Fp16Config)
    """fp16 training."""
    bf16: Bf16Config = field(default_factory=Bf16Config)
    """bf16 training."""
    managed_gradient_accumulation: bool = True
    """Whether the engine counts micro-batches; if false, gradients accumulate until `step()`, which always updates."""
    gradient_clipping: float = 1.0
    """Maximum global gradient norm; 0 disables clipping. DeepSpeed's default was 0 before 0.19.3."""
    prescale_gradients: bool = False
    """Whether gradients are divided by the number of processes before the reduction instead of after it."""
    gradient_predivide_factor: float = 1.0
    """Divisor of gradients before the reduction; the rest of the division follows it."""
    gradient_accumulation_dtype: str | None = None
    """Dtype of gradient accumulation: "fp32" or that of the parameters; null means "fp32"."""
    communication_data_type: str | None = None
    """Dtype of gradient reduction: "fp32", "fp16" or "bf16"; null means "fp32"."""
    seed: int | None = None
    """Seed of Python, numpy and torch (plus the rank) in `initialize` and of the training data's order; null seeds
    nothing."""
    optimizer: OptimizerConfig | None = None
    """The optimizer to build when the caller passes none."""
    scheduler: SchedulerConfig | None = None
    """The learning-rate schedule to build when the caller passes none."""
    activation_checkpointing: ActivationCheckpointingConfig = field(default_factory=ActivationCheckpointingConfig)
    """Activation checkpointing."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """How checkpoints are saved."""
    steps_per_print: int = 0
    """Optimizer steps between progress lines; 0, null or infinity prints none."""
    wall_clock_breakdown: bool = False
    """Whether progress lines report the milliseconds of forward, backward and step, with the device synchronized."""
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    """Logging to TensorBoard."""
    csv_monitor: CsvMonitorConfig = field(default_factory=CsvMonitorConfig)
    """Logging to CSV files."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """Logging to Weights & Biases."""
    comet: CometConfig = field(default_factory=CometConfig)
    """Logging to Comet."""
    flops_profiler: FlopsProfilerConfig = field(default_factory=FlopsProfilerConfig)
    """Floating-point operations of one step."""
    hybrid_engine: HybridEngineConfig = field(default_factory=HybridEngineConfig)
    """Generation inside the training engine."""
    given: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The config as given, "auto" resolved; `config["zero_optimization"]["stage"]` and `config.get(...)` read from it:
    in DeepSpeed `engine.config` is that dict."""

    def __getitem__(self, key: str) -> Any:
        return self.given[key]

    def __contains__(self, key: object) -> bool:
        return key in self.given

    def get(self, key: str, default: Any = None) -> Any:
        """The value at the top-level `key` of the config as it was given."""
        return self.given.get(key, default)

    def __post_init__(self) -> None:
        check_number("gradient_clipping", self.gradient_clipping, 0)
        if self.steps_per_print == inf:  # how accelerate says that nothing is to be printed
            object.__setattr__(self, "steps_per_print", 0)
        check_integer("steps_per_print", self.steps_per_print, 0)
        for name in ("managed_gradient_accumulation", "prescale_gradients", "wall_clock_breakdown"):
            check_flag(name, getattr(self, name))
        check_number("gradient_predivide_factor", self.gradient_predivide_factor, 0)
        if self.gradient_predivide_factor == 0:
            raise ValueError("gradient_predivide_factor=0 must be above 0; set it to 1 to divide after the sum only")
        if self.seed is not None:
            check_integer("seed", self.seed, 0, 2**31)
        for name in ("gradient_accumulation_dtype", "communication_data_type"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, dtype_name(value) or value.lower().removeprefix("torch."))
            if value is not None:
                check_choice(name, getattr(self, name), sorted(DTYPES, reverse=True))
        if self.fp16.enabled and self.bf16.enabled:
            raise ValueError(
                "fp16.enabled=true and bf16.enabled=true exclude each other; parameters have one dtype: disable one"
            )
        if self._accumulation_name not in ("fp32", self._dtype_name):
            raise ValueError(
                f"gradient_accumulation_dtype={self.gradient_accumulation_dtype} and parameters in {self._dtype_name} "
                f'are incompatible; use "fp32" or "{self._dtype_name}"'
            )

    def differences(self, other: "EngineConfig") -> list[str]:
        """The keys that differ between two processes which train together, with both values.

        What each process may choose alone is left out: its seed, and what it writes down.
        """
        pairs = ((entry.name, getattr(self, entry.name), getattr(other, entry.name)) for entry in fields(self))
        return [
            f"{name} ({mine} and {theirs})"
            for name, mine, theirs in pairs
            if mine != theirs and name not in (*MAY_DIFFER, "given")
        ]

    @property
    def _dtype_name(self) -> str:
        if self.fp16.enabled:
            return "fp16"
        return "bf16" if self.bf16.enabled else "fp32"

    @property
    def _accumulation_name(self) -> str:
        if self.fp16.enabled and self.fp16.fp16_master_weights_and_grads:
            return "fp16"
        return self.gradient_accumulation_dtype or "fp32"

    @property
    def dtype(self) -> "torch.dtype":
        """The dtype that parameters are stored and computed in."""
        return torch_dtype_of(self._dtype_name)

    @property
    def accumulation_dtype(self) -> "torch.dtype":
        """The dtype that gradients of micro-batches are added up in."""
        return torch_dtype_of(self._accumulation_name)

    @property
    def communication_dtype(self) -> "torch.dtype":
        """The dtype that gradients are reduced in."""
        return torch_dtype_of(self.communication_data_type or "fp32")

    @property
    def skips_overflow(self) -> bool:
        """Whether a non-finite gradient skips the step instead of being an error."""
        return self.fp16.enabled or (self.bf16.enabled and self.bf16.check_grad_overflow)


def load_config(
    config: Mapping[str, Any] | str | os.PathLike[str], *, world_size: int, arguments: Any = None
) -> EngineConfig:
    """Reads and checks a DeepSpeed-format config.

    Args:
        config: the config as a dict (not changed), the path of a JSON file, or its content in URL-safe base64.
        world_size: number of data-parallel processes, which the batch sizes are checked against.
        arguments: TrainingArguments of transformers, which fill in "auto"; see `resolve_auto`.

    Returns:
        The checked config. Accepted keys without effect here are named in one line of the log, on rank 0.

    Raises:
        ValueError: for an unreadable file or any option that is unknown, not supported or out of range; the message
            begins with the file, if there is one.
    """
    assert world_size >= 1, f"{world_size=}"
    if isinstance(config, Mapping):
        return _read_config(dict(config), world_size, arguments)
    whole = read_json(config)
    try:
        return _read_config(whole, world_size, arguments)
    except ValueError as error:
        source = os.fspath(config) if os.path.exists(config) else "config in base64"
        raise ValueError(f"{source}: {error}") from error


def _read_config(whole: dict[str, Any], world_size: int, arguments: Any) -> EngineConfig:
    without_effect: list[str] = []
    resolved = resolve_auto(whole, arguments)
    known = [entry.name for entry in fields(EngineConfig) if entry.name != "given"]
    top = read_block(resolved, "", [*known, "bfloat16", "data_types"], without_effect)
    _rename(top, "", "bfloat16", "bf16")
    _merge_data_types(top, without_effect)
    top = with_integers(top, EngineConfig)
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    train, micro, steps = (top.pop(name, None) for name in sizes)
    values: dict[str, Any] = {**solve_batch_sizes(train, micro, steps, world_size)}
    blocks: dict[str, Any] = {
        name: _build(cls, child_block(top, name), name, without_effect) for name, cls in SIMPLE_BLOCKS.items()
    }
    if isinstance(top.get("zero_optimization"), bool):  # as DeepSpeed had it before there were stages
        top["zero_optimization"] = {"stage": int(top["zero_optimization"])}
    blocks["zero_optimization"] = _build_zero(child_block(top, "zero_optimization"), without_effect)
    blocks["optimizer"] = build_optimizer_config(child_block(top, "optimizer"), without_effect)
    blocks["scheduler"] = build_scheduler_config(child_block(top, "scheduler"), without_effect)
    # Null stands for the default.
    values |= {name: value for name, value in top.items() if name not in blocks and value is not None}
    result = EngineConfig(**values, **blocks, given=without_auto(resolved))
    _check_storage(result.checkpoint, world_size)
    if world_size % (result.zero_optimization.shard_size or 1):
        raise ValueError(
            f"zero_optimization: {result.zero_optimization.shard_size} processes per copy of the model do not divide "
            f"the {world_size} processes; choose a divisor for zero_hpz_partition_size or mics_shard_size"
        )
    if without_effect:
        # What has a remark to it, unknown keys above all, comes first: large files have many others.
        names = ", ".join(sorted(without_effect, key=lambda entry: "(" not in entry))
        say_once(f"config: accepted, without effect in this engine: {names}")
    return result


def _check_storage(config: CheckpointConfig, world_size: int) -> None:
    """Raises ValueError if the processes may be on several machines and each is to write to a disk of its own."""
    if config.use_node_local_storage and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < world_size:
        raise ValueError(
            f"checkpoint.use_node_local_storage=true is supported on one machine only: all {world_size} processes "
            f"write one checkpoint to one directory; share a directory between the machines and remove it (torchrun "
            f"says by LOCAL_WORLD_SIZE how many processes are on a machine)"
        )


def _rename(block: dict[str, Any], path: str, old: str, new: str) -> None:
    """Moves the value at `old` to `new`; both are keys of `block`, which is found at `path`."""
    if old in block:
        if new in block:
            prefix = f"{path}." if path else ""
            raise ValueError(f"{prefix}{new} and {prefix}{old} are two names of one option; keep {new}, remove {old}")
        block[new] = block.pop(old)


def _merge_data_types(top: dict[str, Any], without_effect: list[str]) -> None:
    block = child_block(top, "data_types")
    top.pop("data_types", None)
    dtype = read_block(block, "data_types", ("grad_accum_dtype",), without_effect).get("grad_accum_dtype")
    if dtype is not None and top.get("gradient_accumulation_dtype") is not None:
        raise ValueError("gradient_accumulation_dtype and data_types.grad_accum_dtype are two names of one option")
    if dtype is not None:
        top["gradient_accumulation_dtype"] = dtype


def _build(cls: type[Block], block: dict[str, Any], path: str, without_effect: list[str], /, **more: Any) -> Block:
    known = [entry.name for entry in fields(cls) if entry.name not in more]  # type: ignore[arg-type]
    return cls(**with_integers(read_block(block, path, known, without_effect), cls), **more)


def _build_zero(block: dict[str, Any], without_effect: list[str]) -> ZeroConfig:
    path = "zero_optimization"
    for old in ("gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"):
        _rename(block, path, old, "stage3_gather_16bit_weights_on_model_save")
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if old in block:
            check_flag(f"{path}.{old}", block[old])
            if block.pop(old):
                block = {**block, old: {"device": "cpu"}}
                _rename(block, path, old, new)
    values = read_block(block, path, [entry.name for entry in fields(ZeroConfig)], without_effect)
    for name, kind in (("offload_optimizer", OffloadConfig), ("offload_param", OffloadParamConfig)):
        inner = f"{path}.{name}"
        values[name] = _build(kind, child_block(block, name, path), inner, without_effect, block=inner)
    result = ZeroConfig(**with_integers(values, ZeroConfig))
    if result.offload_param.device == "cpu" and not result.offloads_parameters:
        without_effect.append(f"{path}.offload_param (read at stage 3)")
    return result


def solve_batch_sizes(train: int | None, micro: int | None, steps: int | None, world_size: int) -> dict[str, int]:
    """The three batch sizes from those given (None: not given), by DeepSpeed's rules.

    Any two give the third; one of the first two alone means one accumulation step.

    Raises:
        ValueError: for a value below 1, a division with a remainder, or a triple that contradicts itself.
    """
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name, value in zip(names, (train, micro, steps), strict=True):
        if value is not None:
            check_integer(name, value, 1)
    if train is None and micro is None:
        raise ValueError(
            "train_batch_size and train_micro_batch_size_per_gpu are both missing; give one of them: "
            f"train_batch_size = {BATCH_PRODUCT}"
        )
    if steps is None and (train is None or micro is None):
        steps = 1
    if train is None:
        assert micro is not None and steps is not None
        train = micro * steps * world_size
    elif micro is None:
        assert steps is not None
        micro = _divide(train, {"gradient_accumulation_steps": steps, "world_size": world_size})
    elif steps is None:
        steps = _divide(train, {"train_micro_batch_size_per_gpu": micro, "world_size": world_size})
    assert micro is not None and steps is not None
    if train != micro * steps * world_size:
        raise ValueError(
            f"train_batch_size={train} must be {BATCH_PRODUCT}"
            f" = {micro} * {steps} * {world_size} = {micro * steps * world_size}; "
            f"set train_batch_size to {micro * steps * world_size} or remove one of the three"
        )
    return dict(zip(names, (train, micro, steps), strict=True))


def _divide(train: int, factors: dict[str, int]) -> int:
    product = math.prod(factors.values())
    if train % product:
        rest = train % product
        choices = [str(size) for size in (train - rest, train - rest + product) if size > 0]
        raise ValueError(
            f"train_batch_size={train} must be a multiple of {' * '.join(factors)}"
            f" = {' * '.join(map(str, factors.values()))} = {product}, but {train} / {product} leaves {rest}; "
            f"set train_batch_size to {' or '.join(choices)}"
        )
    return train // product
