"""All that a user imports from `hybrid_engine`: importing this module puts it there, DeepSpeed's module paths too."""

import sys
from importlib.metadata import version

from hybrid_engine.engine.attached import Attached, attach
from hybrid_engine.engine.deepspeed_engine import DeepSpeedEngine, DeepSpeedHybridEngine
from hybrid_engine.engine.hybrid_engine import HybridEngine
from hybrid_engine.engine.zero_engine import ZeroEngine
from hybrid_engine.entry import initialize
from hybrid_engine.extensions.deepspeed.accelerator import get_accelerator
from hybrid_engine.extensions.deepspeed.aliases import enable_compat, register
from hybrid_engine.extensions.deepspeed.arguments import add_config_arguments
from hybrid_engine.extensions.deepspeed.compiler_names import is_compile_supported
from hybrid_engine.extensions.deepspeed.config_names import DeepSpeedConfig, DeepSpeedConfigError
from hybrid_engine.extensions.deepspeed.distributed import init_distributed
from hybrid_engine.extensions.deepspeed.optimizer_names import DeepSpeedOptimizer
from hybrid_engine.extensions.deepspeed.utils import DeepSpeedDataLoader, OnDevice, log_dist, logger
from hybrid_engine.extensions.deepspeed.version_names import __git_branch__, __git_hash__
from hybrid_engine.extensions.parallelize.checkpoints.deduplicating import (
    broadcast_weights,
    deduped_state_dict,
    load_deduped_state_dict,
)
from hybrid_engine.extensions.parallelize.checkpoints.merging import load_merged_state_dicts, merge_state_dicts
from hybrid_engine.extensions.parallelize.graph.registering import register_op
from hybrid_engine.extensions.parallelize.graph.verifying import verify_op
from hybrid_engine.extensions.parallelize.module.parallel_module import ParallelModule
from hybrid_engine.extensions.parallelize.options.compute_config import (
    BroadcastGenFilesStrategy,
    ComputeConfig,
    ReuseType,
)
from hybrid_engine.extensions.parallelize.parallelize import parallelize
from hybrid_engine.extensions.parallelize.planning.explaining import explain
from hybrid_engine.extensions.parallelize.planning.plan import Plan
from hybrid_engine.extensions.parallelize.training.optimizer import build_optimizer
from hybrid_engine.inference import InferenceConfig, InferenceEngine, init_inference

__version__ = version("hybrid-engine")

DeepSpeedInferenceConfig = InferenceConfig

__all__ = [
    "Attached",
    "BroadcastGenFilesStrategy",
    "ComputeConfig",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedDataLoader",
    "DeepSpeedEngine",
    "DeepSpeedHybridEngine",
    "DeepSpeedInferenceConfig",
    "DeepSpeedOptimizer",
    "HybridEngine",
    "InferenceEngine",
    "OnDevice",
    "ParallelModule",
    "Plan",
    "ReuseType",
    "ZeroEngine",
    "__git_branch__",
    "__git_hash__",
    "add_config_arguments",
    "attach",
    "broadcast_weights",
    "build_optimizer",
    "deduped_state_dict",
    "enable_compat",
    "explain",
    "get_accelerator",
    "init_distributed",
    "init_inference",
    "initialize",
    "is_compile_supported",
    "load_deduped_state_dict",
    "load_merged_state_dicts",
    "log_dist",
    "logger",
    "merge_state_dicts",
    "parallelize",
    "register_op",
    "verify_op",
]

_package = sys.modules["hybrid_engine"]
vars(_package).update({name: globals()[name] for name in __all__}, __all__=__all__, __version__=__version__)
register("hybrid_engine")
