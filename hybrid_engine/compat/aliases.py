"""Registers the modules of this folder under the paths that DeepSpeed has for them.

`import hybrid_engine` does it below `hybrid_engine`, so `import hybrid_engine as deepspeed` is all a script changes;
`enable_compat()` does it below `deepspeed` too, for scripts that cannot be changed.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from hybrid_engine.compat.presence import VERSION, announce

NAMESPACE = ""
ALIASES = {
    "accelerator": "hybrid_engine.compat.accelerator",
    "accelerator.real_accelerator": "hybrid_engine.compat.accelerator",
    "checkpoint.utils": "hybrid_engine.compat.utils",
    "checkpointing": "hybrid_engine.compat.checkpointing",
    "comm": "hybrid_engine.compat.comm",
    "comm.comm": "hybrid_engine.compat.comm",
    "compression": NAMESPACE,
    "compression.helper": "hybrid_engine.compat.compression_helper",
    "ops.adam.cpu_adam": "hybrid_engine.ops.adam",
    "ops.adam.fused_adam": "hybrid_engine.ops.adam",
    "runtime": NAMESPACE,
    "runtime.activation_checkpointing": NAMESPACE,
    "runtime.activation_checkpointing.checkpointing": "hybrid_engine.compat.checkpointing",
    "runtime.dataloader": "hybrid_engine.compat.utils",
    "runtime.engine": "hybrid_engine.compat.engines",
    "runtime.hybrid_engine": "hybrid_engine.compat.engines",
    "runtime.lr_schedules": "hybrid_engine.zero.lr_schedules",
    "runtime.utils": "hybrid_engine.compat.utils",
    "runtime.rollout": "hybrid_engine.compat.rollout",
    "runtime.rollout.base": "hybrid_engine.compat.rollout",
    "runtime.rollout.hybrid_engine_rollout": "hybrid_engine.compat.rollout",
    "runtime.zero": "hybrid_engine.zero",
    "runtime.zero.partition_parameters": "hybrid_engine.compat.partition_parameters",
    "utils": "hybrid_engine.compat.utils",
    "utils.logging": "hybrid_engine.compat.utils",
    "utils.tensor_fragment": "hybrid_engine.compat.whole_values",
    "utils.zero_to_fp32": "hybrid_engine.compat.zero_to_fp32",
}
"""DeepSpeed's path of a module, and ours; a namespace only holds others. Parents come before their children."""
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
    """Makes every alias importable below the imported module `root`, once or again."""
    for path, target in ALIASES.items():
        name = f"{root}.{path}"
        _place(name, ModuleType(name) if target == NAMESPACE else importlib.import_module(target))


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
    own = {name: value for name, value in vars(ours).items() if not name.startswith("__")}
    spec = ModuleSpec("deepspeed", loader=None, is_package=True)  # importlib.util.find_spec() looks at it
    vars(namesake).update(own, __version__=VERSION, __path__=[], __all__=ours.__all__, __spec__=spec)
    return namesake


def _place(name: str, module: ModuleType) -> None:
    module = sys.modules.setdefault(name, module)
    parent, _, child = name.rpartition(".")
    setattr(sys.modules[parent], child, module)
