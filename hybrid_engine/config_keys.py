"""DeepSpeed's configuration keys that no dataclass of `config.py` reads, as data, and how each is answered.

Three things can happen to such a key. It only tunes DeepSpeed's speed: it is accepted and reported as
having no effect. It would change what is computed, saved or where: it is refused while it is switched on.
Nobody knows it: it is refused with its nearest neighbour. To teach the engine a key, delete its row here
and give it a field there.

Source of the names and neutral values: DeepSpeed 0.19, `runtime/config.py`, `runtime/zero/config.py`,
`runtime/constants.py`, `runtime/precision_config.py`.
"""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NotBuilt:
    """A key of DeepSpeed that would change results and that this engine does not implement."""

    off: tuple[Any, ...] = (False, None)
    """Values that leave the feature switched off; they pass silently."""
    switch: str = ""
    """The key inside the block that switches it; a block without it is off. Empty: the value itself is the switch,
    and a block is off when all of its entries are."""

    def is_off(self, value: Any) -> bool:
        """Whether `value` leaves the feature switched off."""
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


FLAG = NotBuilt()
BLOCK = NotBuilt(switch="enabled")
DEVICE = NotBuilt(off=("none", False), switch="device")
UNSET = NotBuilt(off=(None, False))

WITHOUT_EFFECT: dict[str, frozenset[str]] = {
    "": frozenset(
        {
            "aio",
            "compile",
            "disable_allgather",
            "dump_state",
            "graph_harvesting",
            "memory_breakdown",
            "pipeline",
            "timers",
            "use_data_before_expert_parallelism",
            "vocabulary_size",
            "wall_clock_breakdown",
            "zero_allow_untested_optimizer",
            "zero_force_ds_cpu_optimizer",
        }
    ),
    "zero_optimization": frozenset(
        {
            "allgather_bucket_size",
            "allgather_partitions",
            "contiguous_gradients",
            "cpu_offload_use_pin_memory",
            "enable_sanity_checks",
            "gather_16bit_weights_on_model_save",
            "ignore_unused_parameters",
            "leaf_module",
            "legacy_stage1",
            "log_trace_cache_warnings",
            "memory_efficient_linear",
            "mics_hierarchical_params_gather",
            "override_module_apply",
            "overlap_comm",
            "pipeline_loading_checkpoint",
            "reduce_bucket_size",
            "reduce_scatter",
            "round_robin_gradients",
            "save_muon_momentum_buffer_in_memory",
            "stage3_allgather_sequential",
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_model_persistence_threshold",
            "stage3_module_granularity_threshold",
            "stage3_param_persistence_threshold",
            "stage3_partition_stream_chunk_size",
            "stage3_prefetch_bucket_size",
            "stage3_use_all_reduce_for_fetch_params",
            "sub_group_size",
            "use_multi_rank_bucket_allreduce",
        }
    ),
    "fp16": frozenset({"fused_mode"}),
    "bf16": frozenset({"immediate_grad_update"}),
    "optimizer": frozenset({"legacy_fusion"}),
    "optimizer.params": frozenset({"fused", "set_grad_none", "torch_adam"}),
    "checkpoint": frozenset({"parallel_write", "tag_validation", "writer"}),
}

NOT_BUILT: dict[str, dict[str, NotBuilt]] = {
    "": {
        "activation_checkpointing": UNSET,
        "amp": BLOCK,
        "autotuning": BLOCK,
        "comet": BLOCK,
        "comms_logger": BLOCK,
        "communication_data_type": UNSET,
        "compression_training": UNSET,
        "csv_monitor": BLOCK,
        "curriculum_learning": BLOCK,
        "data_efficiency": BLOCK,
        "data_types": NotBuilt(off=(None,), switch="grad_accum_dtype"),
        "dataloader_drop_last": FLAG,
        "datastates": BLOCK,
        "eigenvalue": BLOCK,
        "elasticity": BLOCK,
        "expert_parallel": BLOCK,
        "flops_profiler": BLOCK,
        "gradient_allreduce_op": NotBuilt(off=("avg", "mean")),
        "gradient_predivide_factor": NotBuilt(off=(1.0,)),
        "managed_gradient_accumulation": NotBuilt(off=(True,)),
        "nebula": BLOCK,
        "prescale_gradients": FLAG,
        "progressive_layer_drop": BLOCK,
        "quantize_training": BLOCK,
        "seq_parallel_comm_data_type": NotBuilt(off=("fp32",)),
        "sequence_parallel_size": NotBuilt(off=(1,)),
        "sparse_attention": UNSET,
        "sparse_gradients": FLAG,
        "tensor_parallel": NotBuilt(off=(1, 0), switch="autotp_size"),
        "tensorboard": BLOCK,
        "torch_autocast": BLOCK,
        "wandb": BLOCK,
        "weight_quantization": UNSET,
    },
    "zero_optimization": {
        "cpu_offload": FLAG,
        "cpu_offload_param": FLAG,
        "elastic_checkpoint": FLAG,
        "load_from_fp32_weights": NotBuilt(off=(True,)),
        "mics_shard_size": NotBuilt(off=(-1, 0)),
        "offload_optimizer": DEVICE,
        "offload_param": DEVICE,
        "zenflow": UNSET,
        "zero_hpz_partition_size": NotBuilt(off=(1, 0)),
        "zero_quantized_gradients": FLAG,
        "zero_quantized_nontrainable_weights": FLAG,
        "zero_quantized_weights": FLAG,
        "zeropp_loco_param": UNSET,
    },
    "fp16": {"auto_cast": FLAG, "fp16_master_weights_and_grads": FLAG},
    "bf16": {"bf16_master_weights_and_grads": FLAG, "bf16_optimizer_states": FLAG, "check_grad_overflow": FLAG},
    "optimizer.params": {
        "amsgrad": FLAG,
        "bias_correction": NotBuilt(off=(True,)),
        "max_grad_norm": NotBuilt(off=(0.0,)),
    },
    "scheduler.params": {"last_batch_iteration": NotBuilt(off=(-1,))},
    "checkpoint": {"load_universal": FLAG, "use_node_local_storage": FLAG},
}

OPTIMIZERS_NOT_BUILT = (
    "Adagrad",
    "Lamb",
    "Lion",
    "MuAdam",
    "MuAdamW",
    "MuSGD",
    "Muon",
    "OneBitAdam",
    "OneBitLamb",
    "ZeroOneAdam",
)
SCHEDULERS_NOT_BUILT = ("LRRangeTest", "OneCycle")
