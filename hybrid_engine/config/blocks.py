"""The blocks that say how the engine trains and saves: sharding, precision, recomputation, checkpoints."""

from dataclasses import dataclass, field

from hybrid_engine.config.checks import check_choice, check_flag, check_integer, check_number


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """`zero_optimization.offload_optimizer` and `.offload_param`: what is kept in the CPU's memory."""

    block: str = field(repr=False)
    """The block's full name, for errors."""
    device: str = "none"
    """"cpu" keeps it in the CPU's memory; "none" on the device that computes. On a machine without GPU both are the
    same."""

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
    """Whether that memory is page-locked, which makes copies faster."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag(f"{self.block}.pin_memory", self.pin_memory)


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """`zero_optimization`: what is sharded over the processes and what lies in the CPU's memory."""

    stage: int = 0
    """0 replicates, 1 and 2 shard optimizer state and gradients, 3 also shards the parameters."""
    offload_optimizer: OffloadConfig = OffloadConfig(block="zero_optimization.offload_optimizer")
    """Where fp32 masters and optimizer state lie and are stepped."""
    offload_param: OffloadParamConfig = OffloadParamConfig(block="zero_optimization.offload_param")
    """Where parameters and gradients lie between uses; read at stage 3, as in DeepSpeed."""
    zero_hpz_partition_size: int = 1
    """Processes that share one copy of a stage 3 model, with copies across; 1 shards over all of them."""
    mics_shard_size: int = -1
    """The same as zero_hpz_partition_size under another name of DeepSpeed; -1 shards over all processes."""
    stage3_gather_16bit_weights_on_model_save: bool = True
    """Whether save_16bit_model() may gather a stage 3 model in rank 0's memory; false saves nothing, as in DeepSpeed,
    whose default that is."""

    def __post_init__(self) -> None:
        check_choice("zero_optimization.stage", self.stage, (0, 1, 2, 3))
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
        if self.shard_size is not None and self.stage != 3:
            name = "zero_hpz_partition_size" if hpz > 1 else "mics_shard_size"
            raise ValueError(
                f"zero_optimization.{name}={self.shard_size} and zero_optimization.stage={self.stage} contradict each "
                f"other: only stage 3 shards parameters; set the stage to 3 or remove {name}"
            )

    @property
    def shard_size(self) -> int | None:
        """Processes that share one copy of the model; None for all of them."""
        if self.zero_hpz_partition_size > 1:
            return self.zero_hpz_partition_size
        return self.mics_shard_size if self.mics_shard_size > 0 else None

    @property
    def offloads_parameters(self) -> bool:
        return self.stage == 3 and self.offload_param.device == "cpu"

    @property
    def offloads_optimizer(self) -> bool:
        return self.offload_optimizer.device == "cpu" or self.offloads_parameters


@dataclass(frozen=True, kw_only=True)
class Fp16Config:
    """`fp16`: parameters in half precision, with the loss scaled so that small gradients survive."""

    enabled: bool = False
    """Whether parameters are stored and computed with in fp16."""
    auto_cast: bool = False
    """Whether floating-point inputs of the engine are cast to fp16."""
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
    """The dynamic scale never falls below this; 0 is the smallest normal number of fp32."""
    fp16_master_weights_and_grads: bool = False
    """Whether the optimizer steps the fp16 parameters themselves, with its state in fp16: less memory, less precise."""

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
    """Whether parameters are stored and computed with in bfloat16."""
    check_grad_overflow: bool = False
    """Whether a non-finite gradient skips the step, as in fp16, instead of being an error."""

    def __post_init__(self) -> None:
        check_flag("bf16.enabled", self.enabled)
        check_flag("bf16.check_grad_overflow", self.check_grad_overflow)


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointingConfig:
    """`activation_checkpointing`: what a recomputed layer keeps. The model says what is recomputed, for instance by
    gradient_checkpointing_enable() or `hybrid_engine.checkpointing.checkpoint`."""

    cpu_checkpointing: bool = False
    """Whether what the forward pass saves for the backward pass lies in the CPU's memory."""

    def __post_init__(self) -> None:
        check_flag("activation_checkpointing.cpu_checkpointing", self.cpu_checkpointing)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """`checkpoint`: how save_checkpoint() saves."""

    tag_validation: str = "Warn"
    """What to do about processes that give different tags: "Ignore", "Warn" or "Fail". Rank 0's is used."""
    use_node_local_storage: bool = False
    """Whether each machine has a disk of its own for checkpoints; on one machine that is no difference, on several it
    is an error."""

    def __post_init__(self) -> None:
        check_flag("checkpoint.use_node_local_storage", self.use_node_local_storage)
        name = self.tag_validation
        object.__setattr__(self, "tag_validation", name.capitalize() if isinstance(name, str) else name)
        check_choice("checkpoint.tag_validation", self.tag_validation, ("Ignore", "Warn", "Fail"))
