"""A hybrid RLHF engine: one process and one set of weights that trains under ZeRO-3 and generates.

    import hybrid_engine as deepspeed

runs code written for DeepSpeed: its modules are found below this package, in `extensions/deepspeed/paths/`.

This file only says which module has which name. A module is imported when one of its names is first read, because
torch and transformers take seconds, which `hybrid-engine --help` must not wait for. Type checkers read `__init__.pyi`.
"""

from typing import Any

from hybrid_engine.lazy import lazy_attributes

_DEEPSPEED = "hybrid_engine.extensions.deepspeed"
_PARALLELIZE = "hybrid_engine.extensions.parallelize"
_NAMES_OF = {
    "hybrid_engine.engine.attached": ("Attached", "attach"),
    "hybrid_engine.engine.deepspeed_engine": ("DeepSpeedEngine",),
    "hybrid_engine.engine.deepspeed_hybrid_engine": ("DeepSpeedHybridEngine",),
    "hybrid_engine.engine.hybrid_engine": ("HybridEngine",),
    "hybrid_engine.engine.zero_engine": ("ZeroEngine",),
    "hybrid_engine.entry": ("initialize",),
    "hybrid_engine.inference.build": ("init_inference",),
    "hybrid_engine.inference.config": ("DeepSpeedInferenceConfig", "InferenceConfig"),
    "hybrid_engine.inference.engine": ("InferenceEngine",),
    f"{_DEEPSPEED}.accelerator": ("get_accelerator",),
    f"{_DEEPSPEED}.deepspeed_names": ("__git_branch__", "__git_hash__", "enable_compat"),
    f"{_DEEPSPEED}.comm": ("add_config_arguments", "init_distributed"),
    f"{_DEEPSPEED}.runtime_names": ("DeepSpeedConfig", "DeepSpeedConfigError", "DeepSpeedOptimizer"),
    f"{_DEEPSPEED}.utils": ("DeepSpeedDataLoader", "OnDevice", "is_compile_supported", "log_dist", "logger"),
    f"{_PARALLELIZE}.checkpoints": (
        "broadcast_weights",
        "deduped_state_dict",
        "load_deduped_state_dict",
        "load_merged_state_dicts",
        "merge_state_dicts",
    ),
    f"{_PARALLELIZE}.graph.compute_config": ("BroadcastGenFilesStrategy", "ComputeConfig", "ReuseType"),
    f"{_PARALLELIZE}.graph.register_op": ("register_op", "verify_op"),
    f"{_PARALLELIZE}.optimizer": ("build_optimizer",),
    f"{_PARALLELIZE}.module.parallel_module": ("ParallelModule",),
    f"{_PARALLELIZE}.parallelize": ("parallelize",),
    f"{_PARALLELIZE}.planning.autodist": ("explain",),
    f"{_PARALLELIZE}.planning.plan": ("Plan",),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}
# Names of DeepSpeed with nothing behind them here, which say so when they are used.
_ABSENT = (
    "DeepSpeedTransformerConfig",
    "DeepSpeedTransformerLayer",
    "PipelineEngine",
    "PipelineModule",
    "add_tuning_arguments",
    "default_inference_config",
    "replace_transformer_layer",
    "revert_transformer_layer",
    "set_autotp_mode",
    "tp_model_init",
)

__all__ = sorted(_MODULE_OF)
__path__.append(f"{__path__[0]}/extensions/deepspeed/paths")
_read = lazy_attributes(__name__, {**_MODULE_OF, **dict.fromkeys(_ABSENT, f"{_DEEPSPEED}.absent")})


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # takes as long as everything else here

        return version("hybrid-engine")
    return _read(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
