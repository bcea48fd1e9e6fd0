"""The public names for type checkers; `__init__.py` imports each when it is first read."""

from hybrid_engine.engine.attached import Attached as Attached
from hybrid_engine.engine.attached import attach as attach
from hybrid_engine.engine.deepspeed_engine import DeepSpeedEngine as DeepSpeedEngine
from hybrid_engine.engine.deepspeed_hybrid_engine import DeepSpeedHybridEngine as DeepSpeedHybridEngine
from hybrid_engine.engine.hybrid_engine import HybridEngine as HybridEngine
from hybrid_engine.engine.zero_engine import ZeroEngine as ZeroEngine
from hybrid_engine.entry import initialize as initialize
from hybrid_engine.extensions.deepspeed.accelerator import get_accelerator as get_accelerator
from hybrid_engine.extensions.deepspeed.comm import add_config_arguments as add_config_arguments
from hybrid_engine.extensions.deepspeed.comm import init_distributed as init_distributed
from hybrid_engine.extensions.deepspeed.deepspeed_names import __git_branch__ as __git_branch__
from hybrid_engine.extensions.deepspeed.deepspeed_names import __git_hash__ as __git_hash__
from hybrid_engine.extensions.deepspeed.deepspeed_names import enable_compat as enable_compat
from hybrid_engine.extensions.deepspeed.runtime_names import DeepSpeedConfig as DeepSpeedConfig
from hybrid_engine.extensions.deepspeed.runtime_names import DeepSpeedConfigError as DeepSpeedConfigError
from hybrid_engine.extensions.deepspeed.runtime_names import DeepSpeedOptimizer as DeepSpeedOptimizer
from hybrid_engine.extensions.deepspeed.utils import DeepSpeedDataLoader as DeepSpeedDataLoader
from hybrid_engine.extensions.deepspeed.utils import OnDevice as OnDevice
from hybrid_engine.extensions.deepspeed.utils import is_compile_supported as is_compile_supported
from hybrid_engine.extensions.deepspeed.utils import log_dist as log_dist
from hybrid_engine.extensions.deepspeed.utils import logger as logger
from hybrid_engine.extensions.parallelize.checkpoints import broadcast_weights as broadcast_weights
from hybrid_engine.extensions.parallelize.checkpoints import deduped_state_dict as deduped_state_dict
from hybrid_engine.extensions.parallelize.checkpoints import (
    load_deduped_state_dict as load_deduped_state_dict,
)
from hybrid_engine.extensions.parallelize.checkpoints import load_merged_state_dicts as load_merged_state_dicts
from hybrid_engine.extensions.parallelize.checkpoints import merge_state_dicts as merge_state_dicts
from hybrid_engine.extensions.parallelize.graph.compute_config import (
    BroadcastGenFilesStrategy as BroadcastGenFilesStrategy,
)
from hybrid_engine.extensions.parallelize.graph.compute_config import ComputeConfig as ComputeConfig
from hybrid_engine.extensions.parallelize.graph.compute_config import ReuseType as ReuseType
from hybrid_engine.extensions.parallelize.graph.register_op import register_op as register_op
from hybrid_engine.extensions.parallelize.graph.register_op import verify_op as verify_op
from hybrid_engine.extensions.parallelize.module.parallel_module import ParallelModule as ParallelModule
from hybrid_engine.extensions.parallelize.optimizer import build_optimizer as build_optimizer
from hybrid_engine.extensions.parallelize.parallelize import parallelize as parallelize
from hybrid_engine.extensions.parallelize.planning.autodist import explain as explain
from hybrid_engine.extensions.parallelize.planning.plan import Plan as Plan
from hybrid_engine.inference.build import init_inference as init_inference
from hybrid_engine.inference.config import DeepSpeedInferenceConfig as DeepSpeedInferenceConfig
from hybrid_engine.inference.config import InferenceConfig as InferenceConfig
from hybrid_engine.inference.engine import InferenceEngine as InferenceEngine

__version__: str
__all__: list[str]
_ABSENT: tuple[str, ...]
