"""DeepSpeed's configuration keys that no dataclass of this package reads, as data, and how each is answered.

A key of DeepSpeed's ds_config either is a field of a dataclass and *works*; or is accepted, because what it
tunes has *no meaning here*; or would change what is computed, saved or where, and is *not supported* while
it is switched on. Anything else is unknown: `reading.py` says when that is an error. To teach the engine a
key, delete its row here and give it a field there. `docs/config.md` is written from these tables.

Source of the names and neutral values: DeepSpeed 0.19, `runtime/config.py`, `runtime/zero/config.py`,
`runtime/zero/offload_config.py`, `runtime/constants.py`, `runtime/precision_config.py`, `monitor/config.py`.
"""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NotSupported:
    """A key of DeepSpeed that would change results and that this engine does not implement."""

    why: str
    """The engine's own way to do this, or why it has none."""
    off: tuple[Any, ...] = (False, None)
    """Values that leave the feature switched off; they pass silently."""
    switch: str = ""
    """The key inside the block that switches it; a block without it is off. Empty: the value itself is the switch,
    and a block is off when all of its entries are."""

    def is_off(self, value: Any) -> bool:
        """Whether `value` leaves the feature switched off."""
        if isinstance(value, dict):
            # A technique of compression_training has its switch among what its groups share.
            value = value.get("shared_parameters", value)
        if isinstance(value, dict):
            if self.switch or "enabled" in value:
                return self.is_off(value.get(self.switch or "enabled"))
            return all(self.is_off(entry) for entry in value.values())
        # Compared with the type: 1 == True in Python, and `true` for a size of 1 is not its neutral value.
        return any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in (*self.off, None))

    def remedy(self, path: str) -> str:
        """How a user switches it off."""
        if self.switch:
            return f"remove {path} or set {path}.{self.switch} to {as_json(self.off[0])}"
        return f"remove {path} or set it to {as_json(self.off[0])}"


def as_json(value: Any) -> str:
    """`value` as it would stand in the JSON file."""
    return json.dumps(value, default=repr)


def block(why: str) -> NotSupported:
    """A feature that `enabled` in its block switches on."""
    return NotSupported(why, switch="enabled")


FSDP2_BUCKETS = "FSDP2 communicates one transformer layer at a time, without buckets"
FSDP2_PREFETCH = "FSDP2 always prefetches the next layer"
OTHER_NAME = "internal name in DeepSpeed for {}"
PIPELINES = "there is no pipeline engine"
NVME = "NVMe offloading is not supported"
SEQUENCES = "sequence parallelism is not supported"
COMPRESSION = "weights are never quantized or pruned during training"
UNSCALED = "the loss is not scaled in bf16"
DATA_PIPELINE = "the caller chooses the samples and their order"

OTHER_NAMES = {
    "bfloat16": "bf16",
    "data_types.grad_accum_dtype": "gradient_accumulation_dtype",
    "zero_optimization.cpu_offload": "zero_optimization.offload_optimizer.device",
    "zero_optimization.cpu_offload_param": "zero_optimization.offload_param.device",
    "zero_optimization.gather_16bit_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
}
"""Old names of DeepSpeed that work, and the key each stands for."""
MISTAKEN = {"bp16": "bf16"}
"""Unknown keys at the top level whose author means the known one, though another one looks as much like it."""

LEARNING_RATE = "optimizer.params.lr (or warmup_max_lr and the like of scheduler.params)"
MICRO_BATCH_SIZE = "train_micro_batch_size_per_gpu"
WARMUP = "scheduler.params.warmup_num_steps"
PRECISION = "fp16.enabled or bf16.enabled"
CALLED_ELSEWHERE = {
    "accumulation_steps": "gradient_accumulation_steps",
    "adam_beta1": "optimizer.params.betas",
    "adam_beta2": "optimizer.params.betas",
    "adam_epsilon": "optimizer.params.eps",
    "adam_eps": "optimizer.params.eps",
    "base_lr": LEARNING_RATE,
    "batch_size": f"train_batch_size, which is that of all processes and accumulation steps, or {MICRO_BATCH_SIZE}",
    "beta1": "optimizer.params.betas",
    "beta2": "optimizer.params.betas",
    "betas": "optimizer.params.betas",
    "clip_grad": "gradient_clipping",
    "clip_grad_norm": "gradient_clipping",
    "eps": "optimizer.params.eps",
    "epsilon": "optimizer.params.eps",
    "global_batch_size": "train_batch_size",
    "grad_accum": "gradient_accumulation_steps",
    "grad_accum_steps": "gradient_accumulation_steps",
    "grad_accumulation": "gradient_accumulation_steps",
    "grad_accumulation_steps": "gradient_accumulation_steps",
    "grad_clip": "gradient_clipping",
    "grad_clipping": "gradient_clipping",
    "gradient_accumulation": "gradient_accumulation_steps",
    "gradient_clip": "gradient_clipping",
    "gradient_clip_val": "gradient_clipping",
    "learning_rate": LEARNING_RATE,
    "learningrate": LEARNING_RATE,
    "lr": LEARNING_RATE,
    "lr_scheduler_type": "scheduler.type",
    "max_grad_norm": "gradient_clipping",
    "max_lr": LEARNING_RATE,
    "max_norm": "gradient_clipping",
    "max_out_tokens": "hybrid_engine.max_out_tokens",
    "micro_batch": MICRO_BATCH_SIZE,
    "micro_batch_size": MICRO_BATCH_SIZE,
    "micro_batch_size_per_gpu": MICRO_BATCH_SIZE,
    "min_lr": "scheduler.params.warmup_min_lr",
    "mini_batch_size": MICRO_BATCH_SIZE,
    "mixed_precision": PRECISION,
    "num_warmup_steps": WARMUP,
    "optimizer_type": "optimizer.type",
    "per_device_batch_size": MICRO_BATCH_SIZE,
    "per_device_train_batch_size": MICRO_BATCH_SIZE,
    "per_gpu_train_batch_size": MICRO_BATCH_SIZE,
    "precision": PRECISION,
    "scheduler_type": "scheduler.type",
    "total_num_steps": "scheduler.params.total_num_steps",
    "warmup": WARMUP,
    "warmup_max_lr": "scheduler.params.warmup_max_lr",
    "warmup_min_lr": "scheduler.params.warmup_min_lr",
    "warmup_num_steps": WARMUP,
    "warmup_ratio": f"{WARMUP} (steps, not a share of them)",
    "warmup_steps": WARMUP,
    "weight_decay": "optimizer.params.weight_decay",
    "zero_stage": "zero_optimization.stage",
}
"""Keys at the top level, in lower case, that other programs and their authors call options which have another place
here. Read past they would leave the option at its default."""
TAKES_MEMORY = ("zero_optimization.zero_quantized_nontrainable_weights",)
"""Keys without meaning here whose author counts on memory that is not saved; the log says so."""

NO_MEANING: dict[str, dict[str, str]] = {
    "": {
        "aio": NVME,
        "allgather_size": FSDP2_BUCKETS,
        "comms_logger": "torch.profiler shows the collectives",
        "compile": "the caller may compile the module with torch.compile",
        "dataloader_drop_last": "an incomplete last batch always moves to the next epoch",
        "datastates_ckpt": "save_checkpoint() returns after the checkpoint is on disk",
        "disable_allgather": "FSDP2 chooses its collectives",
        "disable_python_gc": "the caller controls Python's garbage collector",
        "dump_state": "engine.report() describes the engine",
        "graph_harvesting": "training does not use CUDA graphs",
        "log_level": "set the level of the logger `hybrid_engine` of Python's logging",
        "memory_breakdown": "engine.report() shows the memory use",
        "pipeline": PIPELINES,
        "seq_parallel_comm_data_type": SEQUENCES,
        "seq_parallel_communication_data_type": SEQUENCES,
        "timers": "times are measured only for wall_clock_breakdown, after a synchronization",
        "use_data_before_expert_parallelism": "expert parallelism is not supported",
        "vocabulary_size": "it concerns the model of DeepSpeed's own examples",
        "zero_allow_untested_optimizer": "every torch.optim optimizer is allowed",
        "zero_force_ds_cpu_optimizer": "PyTorch's fused optimizers run on the CPU",
    },
    "zero_optimization": {
        "allgather_bucket_size": FSDP2_BUCKETS,
        "allgather_partitions": FSDP2_BUCKETS,
        "allgather_sequential": OTHER_NAME.format("stage3_allgather_sequential"),
        "contiguous_gradients": "FSDP2 reduces a layer's gradients from one buffer",
        "cpu_offload_use_pin_memory": "the old name of offload_param.pin_memory",
        "elastic_checkpoint": "every checkpoint loads on any number of processes",
        "enable_sanity_checks": "the necessary checks are always on",
        "grad_hooks": "FSDP2 has its own hooks",
        "ignore_unused_parameters": "parameters without a gradient are not updated",
        "leaf_module": "the groups are the transformer layers",
        "legacy_stage1": "there is one implementation",
        "load_from_fp32_weights": "a checkpoint stores only fp32 master weights; 16-bit weights follow from them",
        "log_trace_cache_warnings": "the order of layers is not traced",
        "max_live_parameters": OTHER_NAME.format("stage3_max_live_parameters"),
        "max_reuse_distance": OTHER_NAME.format("stage3_max_reuse_distance"),
        "memory_efficient_linear": "torch.nn.Linear saves no copies for autograd",
        "mics_hierarchical_params_gather": "the process group's backend chooses its algorithm",
        "model_persistence_threshold": OTHER_NAME.format("stage3_model_persistence_threshold"),
        "module_granularity_threshold": OTHER_NAME.format("stage3_module_granularity_threshold"),
        "override_module_apply": "zero.Init shards parameters when they are created or accessed in a constructor",
        "overlap_comm": "FSDP2 always overlaps communication and computation",
        "param_persistence_threshold": OTHER_NAME.format("stage3_param_persistence_threshold"),
        "pipeline_loading_checkpoint": "checkpoints are read in shards",
        "prefetch_bucket_size": OTHER_NAME.format("stage3_prefetch_bucket_size"),
        "reduce_bucket_size": FSDP2_BUCKETS,
        "reduce_scatter": "FSDP2 always uses reduce-scatter",
        "round_robin_gradients": "each gradient is sharded evenly over all processes",
        "save_muon_momentum_buffer_in_memory": "Muon's momentum is stored with the other optimizer state",
        "stage3_allgather_sequential": FSDP2_PREFETCH,
        "stage3_max_live_parameters": FSDP2_PREFETCH,
        "stage3_max_reuse_distance": FSDP2_PREFETCH,
        "stage3_model_persistence_threshold": "small parameters are gathered with the rest of their layer",
        "stage3_module_granularity_threshold": "the groups are the transformer layers",
        "stage3_param_persistence_threshold": "small parameters are gathered with the rest of their layer",
        "stage3_partition_stream_chunk_size": FSDP2_PREFETCH,
        "stage3_prefetch_bucket_size": FSDP2_PREFETCH,
        "stage3_use_all_reduce_for_fetch_params": "FSDP2 gathers a layer in one collective",
        "sub_group_size": "the fused optimizers update all parameters at once",
        "use_all_reduce_for_fetch_params": OTHER_NAME.format("stage3_use_all_reduce_for_fetch_params"),
        "use_multi_rank_bucket_allreduce": FSDP2_BUCKETS,
        "zero_quantized_nontrainable_weights": "frozen weights keep their dtype",
    },
    "zero_optimization.offload_optimizer": {
        "buffer_count": NVME,
        "convert_grad_on_cpu": "gradients are converted on the device of the master weights",
        "cpuadam_cores_perc": "OMP_NUM_THREADS sets the number of PyTorch's threads",
        "fast_init": NVME,
        "nvme_path": NVME,
        "pin_memory": "copies from and to master weights use pinned memory in any case",
        "pipeline": NVME,
        "pipeline_read": NVME,
        "pipeline_write": NVME,
        "super_offload": "the optimizer steps after the backward pass, not in parallel",
    },
    "zero_optimization.offload_param": {
        "buffer_count": NVME,
        "buffer_size": NVME,
        "max_in_cpu": NVME,
        "nvme_path": NVME,
    },
    "fp16": {
        "fused_mode": "PyTorch's fused optimizers update all parameters at once",
        "opt_level": "a key of NVIDIA Apex, which DeepSpeed reads only in amp",
    },
    "bf16": {
        "auto_cast": "DeepSpeed reads it only in fp16",
        "hysteresis": UNSCALED,
        "immediate_grad_update": "gradients are accumulated in fp32 after every micro-batch",
        "initial_scale_power": UNSCALED,
        "loss_scale": UNSCALED,
        "loss_scale_window": UNSCALED,
        "min_loss_scale": UNSCALED,
    },
    "optimizer": {
        "adam_w_mode": "DeepSpeed reads it only in optimizer.params",
        "legacy_fusion": "PyTorch's fused optimizers update all parameters at once",
    },
    "optimizer.params": {
        "foreach": "the fastest available implementation is used",
        "fused": "the fastest available implementation is used",
        "ns_method": "the Newton-Schulz iteration of Muon is torch.optim.Muon's",
        "set_grad_none": "gradients are always freed",
        "torch_adam": "the optimizer is always PyTorch's",
    },
    "activation_checkpointing": {
        "contiguous_memory_optimization": "PyTorch's allocator manages saved activations",
        "number_checkpoints": "it sizes the buffer of contiguous_memory_optimization",
        "partition_activations": "training has no tensor parallelism, so activations are not replicated",
        "profile": "torch.profiler shows the recomputation",
        "synchronize_checkpoint_boundary": "the caller may synchronize",
    },
    "flops_profiler": {"recompute_fwd_factor": "recomputed operations are counted as they run"},
    "comet": {"samples_log_interval": "metrics are logged at every step that is printed or written elsewhere"},
    "checkpoint": {
        "load_universal": "every checkpoint loads on any number of processes and at any stage",
        "parallel_write": PIPELINES,
        "writer": "torch.distributed.checkpoint writes in parallel",
    },
}

NOT_SUPPORTED: dict[str, dict[str, NotSupported]] = {
    "": {
        "amp": block("NVIDIA Apex is superseded by bf16 and fp16"),
        "autotuning": block("the caller chooses the sizes"),
        "compression_training": NotSupported(COMPRESSION),
        "curriculum_learning": block(DATA_PIPELINE),
        "data_efficiency": block(DATA_PIPELINE),
        "datastates": block("save_checkpoint() returns after the checkpoint is on disk"),
        "eigenvalue": block("the quantization that it controls is not supported"),
        "elasticity": block("a checkpoint loads on any number of processes instead"),
        "expert_parallel": block("experts are sharded like every other parameter"),
        "gradient_allreduce_op": NotSupported("gradients are averaged", off=("avg", "mean")),
        "msamp": block("parameters and optimizer state are never in fp8"),
        "nebula": block("checkpoints are plain folders"),
        "progressive_layer_drop": block("the engine does not change the model's layers"),
        "quantize_training": block(COMPRESSION),
        "sequence_parallel_size": NotSupported("there is no sequence parallelism", off=(1,)),
        "sparse_attention": NotSupported("the engine does not change the model's attention"),
        "sparse_gradients": NotSupported("gradients are dense"),
        "tensor_parallel": NotSupported("training is sharded only by ZeRO", off=(1, 0), switch="autotp_size"),
        "torch_autocast": block("fp16 and bf16 choose one dtype for all parameters"),
        "trackio": block("tensorboard, wandb, csv_monitor and comet are supported"),
        "weight_quantization": NotSupported(COMPRESSION),
    },
    "data_types": {
        "buffer_dtype": NotSupported(
            "saved buffers have the dtype of the parameters, others keep their own", off=(None,)
        ),
        "param_dtype": NotSupported("fp16 and bf16 choose the dtype of parameters", off=(None,)),
    },
    "zero_optimization": {
        "zenflow": NotSupported("all gradients are applied at once"),
        "zero_quantized_gradients": NotSupported("communication_data_type sets the dtype of collectives"),
        "zero_quantized_weights": NotSupported("communication_data_type sets the dtype of collectives"),
        "zeropp_loco_param": NotSupported("communication_data_type sets the dtype of collectives"),
    },
    "zero_optimization.offload_optimizer": {
        "ratio": NotSupported("the whole optimizer state is offloaded", off=(1.0,)),
    },
    "bf16": {
        "bf16_master_weights_and_grads": NotSupported("master weights are fp32"),
        "bf16_optimizer_states": NotSupported("optimizer state is fp32"),
    },
    "optimizer.params": {
        "amsgrad": NotSupported("DeepSpeed's own Adam refuses it too"),
        "fp32_optimizer_states": NotSupported("optimizer state is fp32", off=(True,)),
        "max_grad_norm": NotSupported("gradient_clipping at the top level replaces it", off=(0.0,)),
    },
    "scheduler.params": {
        "last_batch_iteration": NotSupported("load_checkpoint() continues a schedule", off=(-1,)),
    },
}

OPTIMIZERS_NOT_SUPPORTED = (
    "MuAdam",
    "MuAdamW",
    "MuSGD",
    "OneBitAdam",
    "OneBitLamb",
    "ZeroOneAdam",
)
"""Types of DeepSpeed's `optimizer` block; any torch.optim optimizer can be passed to `initialize` instead."""

WRITTEN_BY_LIBRARIES = tuple(
    f"zero_optimization.{key}"
    for key in ("reduce_bucket_size", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size")
)
"""Keys that accelerate and TRL write at the top level, where DeepSpeed ignores them; no user has asked for them."""
