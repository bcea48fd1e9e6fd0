"""Registers the modules of this folder under the paths that DeepSpeed has for them.

`import hybrid_engine` does it below `hybrid_engine`, so `import hybrid_engine as deepspeed` is all a script changes;
`enable_compat()` does it below `deepspeed` too, for scripts that cannot be changed.
"""

import importlib
import sys
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType

from hybrid_engine.extensions.deepspeed import absent, version_names
from hybrid_engine.extensions.deepspeed.presence import VERSION, announce

NAMESPACE = ""
ALIASES = {
    "accelerator": "hybrid_engine.extensions.deepspeed.accelerator",
    "accelerator.abstract_accelerator": "hybrid_engine.extensions.deepspeed.accelerator",
    "accelerator.real_accelerator": "hybrid_engine.extensions.deepspeed.accelerator",
    "checkpoint.utils": "hybrid_engine.extensions.deepspeed.utils",
    "checkpointing": "hybrid_engine.extensions.deepspeed.checkpointing",
    "comm": "hybrid_engine.extensions.deepspeed.comm",
    "comm.comm": "hybrid_engine.extensions.deepspeed.comm",
    "compression.helper": "hybrid_engine.extensions.deepspeed.compression_helper",
    "constants": "hybrid_engine.extensions.deepspeed.config_names",
    "git_version_info": "hybrid_engine.extensions.deepspeed.version_names",
    "moe.utils": "hybrid_engine.extensions.deepspeed.moe_utils",
    "ops.adagrad": "hybrid_engine.extensions.deepspeed.adagrad",
    "ops.adam.cpu_adam": "hybrid_engine.ops.adam",
    "ops.adam.fused_adam": "hybrid_engine.ops.adam",
    "ops.lamb.fused_lamb": "hybrid_engine.ops.lamb",
    "ops.lion.cpu_lion": "hybrid_engine.ops.lion",
    "ops.lion.fused_lion": "hybrid_engine.ops.lion",
    "profiling": NAMESPACE,
    "profiling.flops_profiler": "hybrid_engine.extensions.deepspeed.flops_profiler",
    "profiling.flops_profiler.profiler": "hybrid_engine.extensions.deepspeed.flops_profiler",
    "runtime": NAMESPACE,
    "runtime.activation_checkpointing": NAMESPACE,
    "runtime.activation_checkpointing.checkpointing": "hybrid_engine.extensions.deepspeed.checkpointing",
    "runtime.base_optimizer": "hybrid_engine.extensions.deepspeed.optimizer_names",
    "runtime.bf16_optimizer": "hybrid_engine.extensions.deepspeed.optimizer_names",
    "runtime.compiler": "hybrid_engine.extensions.deepspeed.compiler_names",
    "runtime.config": "hybrid_engine.extensions.deepspeed.config_names",
    "runtime.constants": "hybrid_engine.extensions.deepspeed.config_names",
    "runtime.dataloader": "hybrid_engine.extensions.deepspeed.utils",
    "runtime.engine": "hybrid_engine.engine.deepspeed_engine",
    "runtime.fp16": NAMESPACE,
    "runtime.fp16.fused_optimizer": "hybrid_engine.extensions.deepspeed.optimizer_names",
    "runtime.fp16.unfused_optimizer": "hybrid_engine.extensions.deepspeed.optimizer_names",
    "runtime.hybrid_engine": "hybrid_engine.engine.deepspeed_engine",
    "runtime.lr_schedules": "hybrid_engine.optim.lr_schedules",
    "runtime.rollout": "hybrid_engine.extensions.deepspeed.rollout",
    "runtime.rollout.base": "hybrid_engine.extensions.deepspeed.rollout",
    "runtime.rollout.hybrid_engine_rollout": "hybrid_engine.extensions.deepspeed.rollout",
    "runtime.utils": "hybrid_engine.extensions.deepspeed.runtime_utils",
    "runtime.zero": "hybrid_engine.zero",
    "runtime.zero.config": "hybrid_engine.extensions.deepspeed.config_names",
    "runtime.zero.mics": "hybrid_engine.zero",
    "runtime.zero.offload_config": "hybrid_engine.extensions.deepspeed.offload_config",
    "runtime.zero.partition_parameters": "hybrid_engine.extensions.deepspeed.partition_parameters",
    "runtime.zero.stage3": "hybrid_engine.extensions.deepspeed.stage3_names",
    "runtime.zero.stage_1_and_2": "hybrid_engine.extensions.deepspeed.stage3_names",
    "runtime.zero.tiling": "hybrid_engine.zero.tiled_linear",
    "runtime.zero.utils": "hybrid_engine.extensions.deepspeed.partition_parameters",
    "utils": "hybrid_engine.extensions.deepspeed.utils",
    "utils.groups": "hybrid_engine.extensions.deepspeed.groups",
    "utils.init_on_device": "hybrid_engine.extensions.deepspeed.utils",
    "utils.logging": "hybrid_engine.extensions.deepspeed.utils",
    "utils.nvtx": "hybrid_engine.extensions.deepspeed.utils",
    "utils.tensor_fragment": "hybrid_engine.extensions.deepspeed.utils",
    "utils.z3_leaf_module": "hybrid_engine.extensions.deepspeed.leaf_modules",
    "utils.zero_to_fp32": "hybrid_engine.extensions.deepspeed.zero_to_fp32",
}
"""DeepSpeed's path of a module, and ours; a namespace only holds others. What is absent is in `absent.py`."""
BELOW_DEEPSPEED = {
    "launcher": "hybrid_engine.extensions.deepspeed.launcher_names",
    "launcher.runner": "hybrid_engine.extensions.deepspeed.launcher_names",
}
"""The same where our own package has another module of that name."""
REAL_MODULES = (
    "checkpoint",
    "inference",
    "inference.config",
    "inference.engine",
    "ops",
    "ops.adam",
    "ops.lamb",
    "ops.lion",
    "zero",
)
"""Modules that have DeepSpeed's path already."""


def register(root: str) -> None:
    """Makes every alias, absent module and absent name importable below the imported module `root`, once or again."""
    absent.find_below_absent_modules()
    aliases = ALIASES | (BELOW_DEEPSPEED if root == "deepspeed" else {})
    for path in sorted([*aliases, *absent.MODULES], key=lambda path: path.count(".")):  # parents first
        _place(f"{root}.{path}", _build(path, aliases.get(path)))
    for path, why in absent.NAMES.items():
        parent, _, name = f"{root}.{path}".rpartition(".")
        if name not in vars(sys.modules[parent]):
            setattr(sys.modules[parent], name, absent.absence(path, why))


def enable_compat() -> None:
    """Makes `import deepspeed` and its submodules mean this engine, for code that cannot be changed.

    That is also what transformers' ZeRO-3 loading (`HfDeepSpeedConfig`), its Trainer and accelerate need.

    Raises:
        ValueError: the real DeepSpeed was imported before; what holds its objects would go on with them.
    """
    ours = sys.modules["hybrid_engine"]
    namesake = sys.modules.setdefault("deepspeed", _build_namesake(ours))
    if getattr(namesake, "initialize", None) is not ours.initialize:
        raise ValueError(
            "enable_compat(): the real deepspeed is already imported; call enable_compat() before anything imports it"
        )
    for path in REAL_MODULES:
        sys.modules[f"deepspeed.{path}"] = importlib.import_module(f"hybrid_engine.{path}")
    register("deepspeed")
    announce()


def _build_namesake(ours: ModuleType) -> ModuleType:
    """Our package with DeepSpeed's version, which callers compare; it has no modules but those registered below it."""
    namesake = ModuleType("deepspeed", ours.__doc__)
    own = {
        name: value for name, value in vars(ours).items() if not name.startswith("__") and name not in BELOW_DEEPSPEED
    }
    spec = ModuleSpec("deepspeed", loader=None, is_package=True)  # importlib.util.find_spec() looks at it
    versions = {name: value for name, value in vars(version_names).items() if "version" in name or "git_" in name}
    vars(namesake).update(own, **versions, __version__=VERSION, __path__=[], __all__=ours.__all__, __spec__=spec)
    return namesake


def _build(path: str, target: str | None) -> ModuleType:
    if target is None:
        return absent.absent_module(path)
    return _namespace(path) if target == NAMESPACE else importlib.import_module(target)


@cache
def _namespace(path: str) -> ModuleType:
    return ModuleType(f"deepspeed.{path}")


def _place(name: str, module: ModuleType) -> None:
    module = sys.modules.setdefault(name, module)
    parent, _, child = name.rpartition(".")
    # What a module has of its own comes first: `utils` has a function `z3_leaf_module`, and PyTorch as `torch`.
    if child not in vars(sys.modules[parent]):
        setattr(sys.modules[parent], child, module)
