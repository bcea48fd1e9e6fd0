"""DeepSpeed's names that public code imports, and a check of all of them below a package's name."""

import importlib

from hybrid_engine.extensions.deepspeed.absent import Absence

# What public code imports, by the module it is imported from: trainers, RLHF frameworks, examples.
WORKING = {
    "": "DeepSpeedConfig DeepSpeedConfigError DeepSpeedEngine InferenceEngine OnDevice __git_branch__ __git_hash__ "
    "add_config_arguments checkpointing comm get_accelerator init_distributed init_inference initialize ops zero",
    "accelerator": "get_accelerator",
    "accelerator.real_accelerator": "get_accelerator",
    "checkpoint.utils": "clone_tensors_for_torch_save",
    "checkpointing": "checkpoint configure is_configured non_reentrant_checkpoint reset",
    "comm": "all_reduce barrier get_rank get_world_size init_distributed is_initialized",
    "compression.helper": "recursive_getattr recursive_setattr",
    "constants": "TORCH_DISTRIBUTED_DEFAULT_PORT default_pg_timeout",
    "git_version_info": "git_branch git_hash version",
    "inference.engine": "InferenceEngine",
    "moe.utils": "has_moe_layers is_moe_param split_params_into_different_moe_groups_for_optimizer",
    "ops.adagrad": "DeepSpeedCPUAdagrad",
    "ops.adam": "DeepSpeedCPUAdam FusedAdam",
    "ops.lamb": "FusedLamb",
    "ops.lion": "DeepSpeedCPULion FusedLion",
    "ops.lion.cpu_lion": "DeepSpeedCPULion",
    "profiling.flops_profiler": "FlopsProfiler get_model_profile",
    "profiling.flops_profiler.profiler": "FlopsProfiler get_model_profile",
    "runtime.activation_checkpointing": "checkpointing",
    "runtime.activation_checkpointing.checkpointing": "checkpoint get_cuda_rng_tracker",
    "runtime.base_optimizer": "DeepSpeedOptimizer ZeROOptimizer",
    "runtime.bf16_optimizer": "BF16_Optimizer",
    "runtime.compiler": "is_compile_supported",
    "runtime.config": "DeepSpeedConfig DeepSpeedConfigError",
    "runtime.constants": "ROUTE_EVAL ROUTE_PREDICT ROUTE_TRAIN",
    "runtime.dataloader": "DeepSpeedDataLoader RepeatingLoader",
    "runtime.engine": "DeepSpeedEngine",
    "runtime.fp16.fused_optimizer": "FP16_Optimizer",
    "runtime.hybrid_engine": "DeepSpeedHybridEngine",
    "runtime.lr_schedules": "WarmupCosineLR WarmupDecayLR WarmupLR VALID_LR_SCHEDULES",
    "runtime.utils": "clip_grad_norm_ empty_cache ensure_directory_exists move_to_device see_memory_usage",
    "runtime.zero": "GatheredParameters Init MiCS_Init TiledLinear ZeroParamStatus unwrap_model_for_generation",
    "runtime.zero.config": "DeepSpeedZeroConfig ZeroStageEnum",
    "runtime.zero.partition_parameters": "GatheredParameters Init ZeroParamStatus is_zero_param",
    "runtime.zero.stage3": "DeepSpeedZeroOptimizer_Stage3 unwrap_model_for_generation",
    "runtime.zero.stage_1_and_2": "DeepSpeedZeroOptimizer",
    "runtime.zero.tiling": "TiledLinear TiledLinearReturnBias",
    "utils": "OnDevice RepeatingLoader get_z3_leaf_modules groups log_dist logger safe_get_full_fp32_param "
    "safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad "
    "safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state "
    "safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state set_z3_leaf_modules "
    "unset_z3_leaf_modules z3_leaf_module z3_leaf_parameter",
    "utils.groups": "_get_data_parallel_group _get_data_parallel_rank _get_data_parallel_world_size "
    "_get_sequence_parallel_group _get_sequence_parallel_rank _get_sequence_parallel_world_size",
    "utils.logging": "log_dist logger",
    "utils.nvtx": "instrument_w_nvtx",
    "utils.tensor_fragment": "safe_get_full_fp32_param",
    "utils.zero_to_fp32": "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint",
    "zero": "GatheredParameters Init MiCS_Init TiledLinear register_external_parameter",
}
ABSENT = {
    "": "PipelineEngine PipelineModule DeepSpeedTransformerConfig DeepSpeedTransformerLayer tp_model_init",
    "autotuning": "Autotuner",
    "checkpoint.constants": "PARAM_SHAPES",
    "checkpoint.ds_to_universal": "main",
    "checkpointing": "CheckpointFunction",
    "compression.compress": "init_compression redundancy_clean",
    "elasticity": "compute_elastic_config",
    "inference.v2.engine_v2": "InferenceEngineV2",
    "linear": "LoRAConfig OptimizedLinear QuantizationConfig",
    "model_implementations.transformers.ds_llama2": "DeepSpeedLlama2Inference",
    "module_inject": "HFBertLayerPolicy replace_transformer_layer",
    "module_inject.replace_policy": "HFGPT2LayerPolicy",
    "moe.layer": "MoE",
    "moe.sharded_moe": "TopKGate top2gating",
    "monitor.monitor": "MonitorMaster",
    "ops.aio": "AsyncIOBuilder",
    "ops.op_builder": "CPUAdamBuilder FusedAdamBuilder UtilsBuilder",
    "ops.op_builder.builder": "OpBuilder",
    "ops.sparse_attention": "FixedSparsityConfig SparseAttentionUtils SparseSelfAttention",
    "ops.transformer": "DeepSpeedTransformerLayer",
    "ops.transformer.inference": "DeepSpeedTransformerInference",
    "pipe": "LayerSpec PipelineModule TiedLayerSpec",
    "runtime.data_pipeline.data_sampling.data_analyzer": "DataAnalyzer",
    "runtime.fp16.onebit.adam": "OnebitAdam",
    "runtime.pipe.engine": "PipelineEngine",
    "runtime.pipe.topology": "PipeModelDataParallelTopology ProcessTopology",
    "runtime.sequence_parallel.ulysses_sp": "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter",
    "runtime.state_dict_factory": "SDLoaderFactory",
    "runtime.zero.parameter_offload": "DeepSpeedZeRoOffload",
    "runtime.zero.stage3": "estimate_zero3_model_states_mem_needs_all_live",
    "runtime.zero.stage_1_and_2": "estimate_zero2_model_states_mem_needs_all_live",
    "sequence.layer": "DistributedAttention",
    "utils.groups": "_get_expert_parallel_group",
    "utils.timer": "SynchronizedWallClockTimer",
    "utils.zero_to_fp32": "get_model_state_file get_optim_files",
}


def check_names(root: str) -> None:
    """Imports every name below `root` as scripts do; those that are absent say so when they are called."""
    for path, names in WORKING.items():
        for name, value in _imported(root, path, names):
            assert not isinstance(value, Absence), (path, name)
    for path, names in ABSENT.items():
        for name, value in _imported(root, path, names):
            start = "deepspeed." + ".".join(filter(None, (path, name))) + " is not supported: "
            message = _message_of_call(value)
            assert message.startswith(start) and len(message) > len(start) + 10, (path, name, message)


def _imported(root, path, names):
    module = ".".join(filter(None, (root, path)))
    importlib.import_module(module)
    for name in names.split():
        space = {}
        exec(f"from {module} import {name}", space)
        yield name, space[name]


def _message_of_call(value):
    try:
        value(1, a=2)
    except NotImplementedError as error:
        return str(error)
    return "nothing was raised"
