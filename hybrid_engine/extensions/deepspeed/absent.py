"""Modules and names of DeepSpeed without an implementation here: they import, and say what to use when they are used.

from deepspeed.pipe import PipelineModule   # works, also in a script that never builds one
isinstance(model, PipelineModule)           # False
PipelineModule(layers)                      # NotImplementedError: ... is not supported: there is no pipeline ...
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from hybrid_engine.lazy import import_below

_COMPRESSION = "weights are not pruned, quantised or distilled; use torchao before initialize()"
_DATA = "there are no curricula and no data analysis; choose and order the samples in the dataset or its sampler"
_EXPERTS = "experts are sharded like every other parameter; train the model's own mixture-of-experts layers as they are"
_HELPERS = "it is a helper inside DeepSpeed; use PyTorch's own"
_INJECTION = "init_inference() chooses containers by the model's class; leave injection policies out"
_NVME = "nothing is offloaded to NVMe; use offload_optimizer and offload_param with device cpu"
_OPS = "nothing is compiled at import: hybrid_engine.ops has Triton kernels with a PyTorch reference each"
_PIPELINE = (
    "there is no pipeline engine; use zero_optimization.stage 3 for a model that does not fit, or parallelize() "
    "with the policy 'pp', whose engine has train_batch()"
)
_QUANTISED = "nothing is quantised; bf16 or fp16 halve what weights take"
_SEQUENCE = "there is no sequence parallelism; use gradient checkpointing for long sequences"
_STORED = "checkpoints are a format of this engine's own; hybrid_engine.utils.zero_to_fp32 reads their weights"
_TENSOR = (
    "there is no tensor parallelism in training; use zero_optimization.stage 3, and hybrid_engine.inference_tp_size"
)
_CONFIG = "the config is read into dataclasses; pass a dict or the path of a JSON file to initialize()"
_TIMES = "engine.report(), wall_clock_breakdown and torch.profiler say where time and memory go"
_ESTIMATES = "DeepSpeed's estimates are not of this engine; engine.report() says what an engine takes"
_ZERO = "ZeRO stands on PyTorch's FSDP2, and has none of DeepSpeed's own hooks, buckets and flat buffers"
_COMMUNICATION = "collectives are torch.distributed's; use hybrid_engine.comm"

MODULES = {
    "autotuning": "batch sizes are the caller's choice; try train_micro_batch_size_per_gpu by hand",
    "checkpoint.constants": _STORED,
    "checkpoint.deepspeed_checkpoint": _STORED,
    "checkpoint.ds_to_universal": "every checkpoint loads on any number of processes and at any stage as it is",
    "checkpoint.reshape_utils": _STORED,
    "checkpoint.universal_checkpoint": "every checkpoint loads on any number of processes and at any stage as it is",
    "compile": "the module may be compiled by the caller with torch.compile",
    "compression": _COMPRESSION,
    "elasticity": "a checkpoint loads on any number of processes instead; start again with as many as there are",
    "env_report": "there are no ops to build that it would list; engine.report() says how an engine trains",
    "inference.quantization": _QUANTISED,
    "inference.v2": "generate() batches continuously; use init_inference() or hybrid_engine.enabled",
    "io": _NVME,
    "linear": "use peft for adapters; there are no sharded or quantised linears",
    "model_implementations": _INJECTION,
    "module_inject": _INJECTION,
    "moe": _EXPERTS,
    "monitor": "use engine.monitor, and the config's tensorboard, wandb, comet and csv_monitor",
    "nebula": "checkpoints are folders on a disk",
    "ops.aio": _NVME,
    "ops.deepspeed4science": _OPS,
    "ops.fp_quantizer": _QUANTISED,
    "ops.gds": _NVME,
    "ops.muon": 'write "Muon" as optimizer.type of the config, or pass torch.optim.Muon to initialize()',
    "ops.op_builder": _OPS,
    "ops.quantizer": _QUANTISED,
    "ops.random_ltd": _DATA,
    "ops.sparse_attention": "the model's attention is its own; choose attn_implementation in from_pretrained()",
    "ops.transformer": "layers are the model's own; use its class of transformers, and init_inference() for inference",
    "pipe": _PIPELINE,
    "profiling.config": _CONFIG,
    "runtime.bs_schedules": _DATA,
    "runtime.checkpoint_engine": _STORED,
    "runtime.comm": _COMMUNICATION,
    "runtime.compression": _COMMUNICATION,
    "runtime.config_utils": _CONFIG,
    "runtime.data_pipeline": _DATA,
    "runtime.domino": _TENSOR,
    "runtime.eigenvalue": _COMPRESSION,
    "runtime.fp16.onebit": "there are no 1-bit optimizers; use Adam, AdamW, Lamb or Lion",
    "runtime.fp16.loss_scaler": "the config's block fp16 sets the loss scale, and engine.optimizer.cur_scale has it",
    "runtime.pipe": _PIPELINE,
    "runtime.progressive_layer_drop": "the model's layers are its own",
    "runtime.quantize": _COMPRESSION,
    "runtime.sequence_parallel": _SEQUENCE,
    "runtime.sparse_tensor": "gradients are dense",
    "runtime.state_dict_factory": "init_inference(checkpoint=...) reads Megatron's checkpoints",
    "runtime.superoffload": "the optimizer steps after the backward pass; use offload_optimizer with device cpu",
    "runtime.swap_tensor": _NVME,
    "runtime.tensor_parallel": _TENSOR,
    "runtime.weight_quantizer": _QUANTISED,
    "runtime.zenflow": "all gradients are applied at once; use offload_optimizer with device cpu",
    "runtime.zero.contiguous_memory_allocator": _ZERO,
    "runtime.zero.linear": "memory_efficient_linear has no meaning here: torch.nn.Linear keeps no copies",
    "runtime.zero.mics_utils": _ZERO,
    "runtime.zero.parameter_offload": _ZERO,
    "runtime.zero.partitioned_param_coordinator": _ZERO,
    "runtime.zero.partitioned_param_profiler": _TIMES,
    "sequence": _SEQUENCE,
    "utils.bwc": _HELPERS,
    "utils.comms_logging": "torch.profiler shows the collectives",
    "utils.config": _HELPERS,
    "utils.debug": "named_parameters() has the names of parameters",
    "utils.numa": "OMP_NUM_THREADS and numactl say which cores are used",
    "utils.timer": _TIMES,
    "utils.torch": _HELPERS,
    "utils.types": _OPS,
}
"""DeepSpeed's modules that are absent here, by their path, and what to use. Those below them are absent too, except
the files of `paths/` that import something."""
NAMES = {
    "DeepSpeedTransformerConfig": MODULES["ops.transformer"],
    "DeepSpeedTransformerLayer": MODULES["ops.transformer"],
    "PipelineEngine": _PIPELINE,
    "PipelineModule": _PIPELINE,
    "default_inference_config": "the defaults are those of hybrid_engine.inference.InferenceConfig",
    "add_tuning_arguments": "write the arguments of a schedule into the config's block scheduler.params",
    "replace_transformer_layer": _INJECTION,
    "revert_transformer_layer": _INJECTION,
    "set_autotp_mode": _TENSOR,
    "tp_model_init": _TENSOR,
    "checkpointing.CheckpointFunction": "call checkpointing.checkpoint(function, *inputs)",
    "checkpointing.model_parallel_reconfigure_tp_seed": _TENSOR,
    "runtime.activation_checkpointing.checkpointing.CheckpointFunction": (
        "call checkpointing.checkpoint(function, *inputs)"
    ),
    "runtime.activation_checkpointing.checkpointing.model_parallel_reconfigure_tp_seed": _TENSOR,
    "runtime.utils.CheckOverflow": "engine.optimizer.check_overflow() and .overflow say it",
    "runtime.utils.PartitionedTensor": _PIPELINE,
    "runtime.utils.partition_balanced": _PIPELINE,
    "runtime.utils.partition_uniform": _PIPELINE,
    "runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_cold": _ESTIMATES,
    "runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_live": _ESTIMATES,
    "runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_cold": _ESTIMATES,
    "runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live": _ESTIMATES,
    "runtime.zero.partition_parameters.AllGatherCoalescedHandle": _ZERO,
    "runtime.zero.partition_parameters.AllGatherHandle": _ZERO,
    "runtime.zero.partition_parameters.InsertPostInitMethodToModuleSubClasses": "use zero.Init",
    "runtime.zero.partition_parameters.free_param": "use zero.GatheredParameters, which frees what it has gathered",
    "utils.groups._create_expert_and_data_parallel": _EXPERTS,
    "utils.groups._create_expert_data_and_model_parallel": _EXPERTS,
    "utils.groups._get_expert_data_parallel_group": _EXPERTS,
    "utils.groups._get_expert_parallel_group": _EXPERTS,
    "utils.groups._get_expert_parallel_rank": _EXPERTS,
    "utils.groups._get_expert_parallel_world_size": _EXPERTS,
    "utils.groups.initialize": _EXPERTS,
    "utils.zero_to_fp32.get_checkpoint_files": _STORED,
    "utils.zero_to_fp32.get_model_state_file": _STORED,
    "utils.zero_to_fp32.get_optim_files": _STORED,
}
"""Names in modules that there are, by their path, and what to use."""


class Absence(type):
    """The class of an absent name: a class of which there are no objects, and which may be inherited from."""

    remedy = ""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Raises NotImplementedError, because calling the name or making an object of it is a use."""
        raise NotImplementedError(cls.remedy)

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(cls.remedy)


@cache
def absence(path: str, why: str) -> Absence:
    """The class that stands for the name at `path`, e.g. "pipe.PipelineModule"; the same one at each call."""
    *parents, name = path.split(".")
    remedy = f"deepspeed.{path} is not supported: {why}"
    return Absence(name, (), {"remedy": remedy, "__module__": ".".join(["deepspeed", *parents]), "__doc__": remedy})


def attributes_of(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a thin file of `paths/`: modules below it, and names of DeepSpeed that are absent here.

    Args:
        module: its whole name, below `hybrid_engine` or `deepspeed`.
    """
    path = module.partition(".")[2]
    why = why_absent(path)

    def read(name: str) -> Any:
        whole_path = f"{path}.{name}"
        if whole_path in NAMES:
            return absence(whole_path, NAMES[whole_path])
        try:
            return import_below(module, name)
        except AttributeError:
            if why is None or name.startswith("__"):
                raise
            return absence(whole_path, why)

    return read


def why_absent(path: str) -> str | None:
    """The reason of the nearest absent module at or above `path`; None where there is none."""
    parts = path.split(".")
    above = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((MODULES[parent] for parent in above if parent in MODULES), None)


def __getattr__(name: str) -> Absence:
    """The absent names at the top of the package."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return absence(name, NAMES[name])
