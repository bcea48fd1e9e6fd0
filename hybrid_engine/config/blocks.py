"""The blocks that say how the engine trains and saves: sharding, precision, recomputation, checkpoints."""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from hybrid_engine.config.checks import (
    check_choice,
    check_flag,
    check_integer,
    check_number,
    check_path_inside,
    check_text,
)


class StageRules(NamedTuple):
    """The rules of a stage of ZeRO for several processes; `zero/sharding.py` has the table and its reasons."""

    shards_optimizer: bool
    """Whether a process has its shard of the optimizer's state only."""
    shards_gradients: bool
    """Whether a process has its shard of the gradients only, so that every backward pass reduces them."""
    shards_parameters: bool
    """Whether a process has its shard of the parameters only between two calls of the engine; a forward pass gathers
    them with the other processes and frees them again."""


ZERO_STAGES = {
    0: StageRules(shards_optimizer=False, shards_gradients=False, shards_parameters=False),
    1: StageRules(shards_optimizer=True, shards_gradients=False, shards_parameters=False),
    2: StageRules(shards_optimizer=True, shards_gradients=True, shards_parameters=False),
    3: StageRules(shards_optimizer=True, shards_gradients=True, shards_parameters=True),
}
"""The rules by `zero_optimization.stage`."""


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """`zero_optimization.offload_optimizer` and `.offload_param`: what is kept in the CPU's memory."""

    block: str = field(repr=False)
    """The block's full name, for errors."""
    device: str = "none"
    """"cpu" stores it in CPU memory, "none" on the compute device. Without a GPU, both are the same."""

    def __post_init__(self) -> None:
        if self.device == "nvme":
            raise ValueError(
                f'{self.block}.device="nvme" is not supported: there is no NVMe offloading; set it to "cpu"'
            )
        check_choice(f"{self.block}.device", self.device, ("none", "cpu"))


@dataclass(frozen=True, kw_only=True)
class OffloadParamConfig(OffloadConfig):
    """`zero_optimization.offload_param`."""

    pin_memory: bool = False
    """Whether this CPU memory is pinned (page-locked), for faster copies."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag(f"{self.block}.pin_memory", self.pin_memory)


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """`zero_optimization`: what is sharded over the processes and what lies in the CPU's memory."""

    stage: int = 0
    """ZeRO stage: 0 replicates, 1 and 2 shard optimizer state and gradients, 3 also shards parameters."""
    offload_optimizer: OffloadConfig = OffloadConfig(block="zero_optimization.offload_optimizer")
    """Where fp32 master weights and optimizer state are stored and updated."""
    offload_param: OffloadParamConfig = OffloadParamConfig(block="zero_optimization.offload_param")
    """Where parameters and gradients are stored between uses; only read at stage 3, as in DeepSpeed."""
    zero_hpz_partition_size: int = 1
    """Processes that share one copy of a stage 3 model, with replicas across groups; 1 shards over all processes."""
    mics_shard_size: int = -1
    """Alias of zero_hpz_partition_size in DeepSpeed; -1 shards over all processes."""
    stage3_gather_16bit_weights_on_model_save: bool = True
    """Whether save_16bit_model() may gather a stage 3 model in rank 0's memory; if false, it saves nothing, which is
    DeepSpeed's default."""

    def __post_init__(self) -> None:
        check_choice("zero_optimization.stage", self.stage, tuple(ZERO_STAGES))
        check_flag(
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            self.stage3_gather_16bit_weights_on_model_save,
        )
        check_integer("zero_optimization.zero_hpz_partition_size", self.zero_hpz_partition_size, 0)
        check_integer("zero_optimization.mics_shard_size", self.mics_shard_size, -1)
        hpz, mics = self.zero_hpz_partition_size, self.mics_shard_size
        if hpz > 1 and mics > 0:
            raise ValueError(
                f"zero_optimization.zero_hpz_partition_size={hpz} and zero_optimization.mics_shard_size={mics} are two "
                f"names of one thing; keep one of them"
            )
        if self.shard_size is not None and not self.rules.shards_parameters:
            name = "zero_hpz_partition_size" if hpz > 1 else "mics_shard_size"
            raise ValueError(
                f"zero_optimization.{name}={self.shard_size} and zero_optimization.stage={self.stage} contradict each "
                f"other: only stage 3 shards parameters; set the stage to 3 or remove {name}"
            )

    @property
    def rules(self) -> StageRules:
        """The rules of the stage."""
        return ZERO_STAGES[self.stage]

    @property
    def shard_size(self) -> int | None:
        """Processes that share one copy of the model; None for all of them."""
        if self.zero_hpz_partition_size > 1:
            return self.zero_hpz_partition_size
        return self.mics_shard_size if self.mics_shard_size > 0 else None

    @property
    def offloads_parameters(self) -> bool:
        return self.rules.shards_parameters and self.offload_param.device == "cpu"

    @property
    def offloads_optimizer(self) -> bool:
        return self.offload_optimizer.device == "cpu" or self.offloads_parameters


@dataclass(frozen=True, kw_only=True)
class Fp16Config:
    """`fp16`: parameters in half precision, with the loss scaled so that small gradients survive."""

    enabled: bool = False
    """Whether parameters and computation are in fp16."""
    auto_cast: bool = False
    """Whether floating-point inputs of the engine are cast to fp16."""
    loss_scale: float = 0
    """Static loss scale; 0 means dynamic scaling."""
    initial_scale_power: int = 16
    """Exponent of the initial dynamic loss scale, a power of 2."""
    loss_scale_window: int = 1000
    """Steps without overflow before the dynamic loss scale doubles."""
    hysteresis: int = 2
    """Overflows tolerated before the dynamic loss scale is halved."""
    consecutive_hysteresis: bool = False
    """Whether a step without overflow resets the hysteresis."""
    min_loss_scale: float = 1
    """Minimum dynamic loss scale; 0 means the smallest normal number of fp32."""
    fp16_master_weights_and_grads: bool = False
    """Whether the optimizer updates fp16 parameters directly, with fp16 state: less memory, less precision."""

    def __post_init__(self) -> None:
        for name in ("enabled", "auto_cast", "consecutive_hysteresis", "fp16_master_weights_and_grads"):
            check_flag(f"fp16.{name}", getattr(self, name))
        check_number("fp16.loss_scale", self.loss_scale, 0)
        # 2**126 is the largest power whose double is still finite in fp32, where the scaled loss lives.
        check_integer("fp16.initial_scale_power", self.initial_scale_power, 0, 126)
        check_integer("fp16.loss_scale_window", self.loss_scale_window, 1)
        check_integer("fp16.hysteresis", self.hysteresis, 1)
        check_number("fp16.min_loss_scale", self.min_loss_scale, 0)


@dataclass(frozen=True, kw_only=True)
class Bf16Config:
    """`bf16` (or its old name `bfloat16`): parameters in bfloat16, without loss scaling."""

    enabled: bool = False
    """Whether parameters and computation are in bf16."""
    check_grad_overflow: bool = False
    """Whether a non-finite gradient skips the step, as in fp16, instead of raising an error."""

    def __post_init__(self) -> None:
        check_flag("bf16.enabled", self.enabled)
        check_flag("bf16.check_grad_overflow", self.check_grad_overflow)


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointingConfig:
    """`activation_checkpointing`: what a recomputed layer keeps. The model says what is recomputed, for instance by
    gradient_checkpointing_enable() or `hybrid_engine.checkpointing.checkpoint`."""

    cpu_checkpointing: bool = False
    """Whether activations saved for the backward pass are stored in CPU memory."""

    def __post_init__(self) -> None:
        check_flag("activation_checkpointing.cpu_checkpointing", self.cpu_checkpointing)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """`checkpoint`: how save_checkpoint() saves."""

    tag_validation: str = "Warn"
    """Action if processes pass different tags: "Ignore", "Warn" or "Fail". Rank 0's tag is used."""
    use_node_local_storage: bool = False
    """Whether each machine stores checkpoints on its own disk; no effect on one machine, an error on several."""

    def __post_init__(self) -> None:
        check_flag("checkpoint.use_node_local_storage", self.use_node_local_storage)
        name = self.tag_validation
        object.__setattr__(self, "tag_validation", name.capitalize() if isinstance(name, str) else name)
        check_choice("checkpoint.tag_validation", self.tag_validation, ("Ignore", "Warn", "Fail"))


@dataclass(frozen=True, kw_only=True)
class HybridEngineConfig:
    """`hybrid_engine`: generation inside the training engine."""

    prefix: ClassVar[str] = "hybrid_engine."
    """The prefix that messages of generation put before a key, to name it as its user writes it."""
    enabled: bool = False
    """Whether `initialize` returns a `HybridEngine` instead of a `ZeroEngine`."""
    max_out_tokens: int = 512
    """Maximum length of a sequence, prompt and answer together, in tokens."""
    inference_tp_size: int = 1
    """Tensor-parallel size inside `generate()`: this many consecutive processes share the model and their prompts."""
    release_inference_cache: bool = False
    """Whether the KV workspace is freed after each `generate()`; if false, it is kept while memory allows."""
    pin_parameters: bool = True
    """Whether `generate()` gathers the whole model once, with adapters merged and quantized weights dequantized; if
    false, it streams the model layer by layer, with two layers in memory."""
    enable_cuda_graph: bool = True
    """Whether decode steps are replayed where possible: as one CUDA graph on a GPU, from a tape of calls on a CPU.

    DeepSpeed's default is false.
    """
    tp_gather_partition_size: int = 8
    """Layers that are gathered at a time if processes share the model."""
    max_running: int = 0
    """Maximum rows decoded at once; 0 lets the engine choose. This key and those below are not DeepSpeed's."""
    kv_block_size: int = 0
    """Tokens per block of the KV workspace; 0 lets the engine choose."""
    max_kv_blocks: int = 0
    """Maximum blocks of the KV workspace; 0 sizes it by demand and free memory."""
    prefix_cache: bool = True
    """Whether prompts that begin alike share the keys and values of that beginning, while the weights stay the same.

    Needs blocks smaller than a sequence: those of servers and of a GPU are, a rollout's on a CPU only by kv_block_size.
    Models whose layers keep a state per sequence have no such cache.
    """
    training_free_share: float = 0.1
    """Memory fraction that training must leave free for the KV workspace to stay during `train()`; 1: never."""
    print_latency: bool = True
    """Whether `eval()` prints the iteration's latencies, as in DeepSpeed; `latency_stats()` always returns them."""

    exact: bool = False
    """Whether log-probabilities are bitwise equal in every batch and in training (docs/exact.md)."""

    def __post_init__(self) -> None:
        for name in (
            "enabled",
            "release_inference_cache",
            "pin_parameters",
            "enable_cuda_graph",
            "prefix_cache",
            "print_latency",
            "exact",
        ):
            check_flag(f"hybrid_engine.{name}", getattr(self, name))
        for name in ("max_out_tokens", "inference_tp_size", "tp_gather_partition_size"):
            check_integer(f"hybrid_engine.{name}", getattr(self, name), 1)
        for name in ("max_running", "kv_block_size", "max_kv_blocks"):
            check_integer(f"hybrid_engine.{name}", getattr(self, name), 0)
        check_number("hybrid_engine.training_free_share", self.training_free_share, 0, 1)
        if self.inference_tp_size > 1 and not self.pin_parameters:
            raise ValueError(
                f"hybrid_engine.inference_tp_size={self.inference_tp_size} keeps each process's part of the weights "
                "for a whole rollout, which pin_parameters=false forbids; leave pin_parameters at true"
            )
        if self.exact and (self.inference_tp_size > 1 or not self.pin_parameters):
            raise ValueError(
                "hybrid_engine.exact generates with the whole model on each process; use inference_tp_size=1 and "
                "pin_parameters=true"
            )


@dataclass(frozen=True, kw_only=True)
class TensorBoardConfig:
    """`tensorboard`: events for TensorBoard, through accelerate's tracker."""

    enabled: bool = False
    """Whether metrics are written."""
    output_path: str = ""
    """Output folder; empty means the working directory."""
    job_name: str = "DeepSpeedJobName"
    """Subfolder of `output_path`."""

    def __post_init__(self) -> None:
        check_flag("tensorboard.enabled", self.enabled)
        check_text("tensorboard.output_path", self.output_path)
        check_path_inside("tensorboard.job_name", self.job_name)


@dataclass(frozen=True, kw_only=True)
class CsvMonitorConfig:
    """`csv_monitor`: one file of rows `step, value` for each quantity."""

    enabled: bool = False
    """Whether metrics are written."""
    output_path: str = ""
    """Output folder; empty means the working directory."""
    job_name: str = "DeepSpeedJobName"
    """Subfolder of `output_path`."""

    def __post_init__(self) -> None:
        check_flag("csv_monitor.enabled", self.enabled)
        check_text("csv_monitor.output_path", self.output_path)
        check_path_inside("csv_monitor.job_name", self.job_name)


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """`wandb`: Weights & Biases, through accelerate's tracker."""

    enabled: bool = False
    """Whether metrics are sent."""
    project: str = "deepspeed"
    """Project name."""
    group: str | None = None
    """Run group."""
    team: str | None = None
    """Team name (wandb's entity)."""

    def __post_init__(self) -> None:
        check_flag("wandb.enabled", self.enabled)
        for name in ("project", "group", "team"):
            check_text(f"wandb.{name}", getattr(self, name), is_optional=name != "project")


@dataclass(frozen=True, kw_only=True)
class CometConfig:
    """`comet`: Comet, through accelerate's tracker."""

    enabled: bool = False
    """Whether metrics are sent."""
    project: str | None = None
    """Project name; null uses Comet's own configuration."""
    workspace: str | None = None
    """Workspace name."""
    api_key: str | None = None
    """API key."""
    experiment_name: str | None = None
    """Experiment name."""
    experiment_key: str | None = None
    """Key of an experiment to continue."""
    online: bool | None = None
    """Whether the experiment is sent online; if false, it is stored on disk."""
    mode: str | None = None
    """Mode: "get", "create" or "get_or_create"."""

    def __post_init__(self) -> None:
        check_flag("comet.enabled", self.enabled)
        if self.online is not None:
            check_flag("comet.online", self.online)
        for name in ("project", "workspace", "api_key", "experiment_name", "experiment_key", "mode"):
            check_text(f"comet.{name}", getattr(self, name), is_optional=True)


@dataclass(frozen=True, kw_only=True)
class FlopsProfilerConfig:
    """`flops_profiler`: the floating-point operations of one step, counted by PyTorch's FlopCounterMode."""

    enabled: bool = False
    """Whether the operations are counted."""
    profile_step: int = 1
    """Optimizer step, counted from 0, whose first micro-batch is profiled; -1 disables profiling."""
    module_depth: int = -1
    """Depth of submodules in the table; -1 shows all."""
    top_modules: int = 1
    """Number of modules with the most operations to show if `detailed` is false."""
    detailed: bool = True
    """Whether all modules down to `module_depth` are shown."""
    output_file: str | None = None
    """Output file; null prints the table."""

    def __post_init__(self) -> None:
        check_flag("flops_profiler.enabled", self.enabled)
        check_flag("flops_profiler.detailed", self.detailed)
        check_integer("flops_profiler.profile_step", self.profile_step, -1)
        check_integer("flops_profiler.module_depth", self.module_depth, -1)
        check_integer("flops_profiler.top_modules", self.top_modules, 1)
        check_text("flops_profiler.output_file", self.output_file, is_optional=True)
