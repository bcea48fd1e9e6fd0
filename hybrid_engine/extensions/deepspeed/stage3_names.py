"""`deepspeed.runtime.zero.stage3` and `stage_1_and_2`: their optimizers' classes, and a model whole for a rollout."""

from hybrid_engine.extensions.deepspeed.optimizer_names import DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3
from hybrid_engine.zero.gathered_parameters import unwrap_model_for_generation

__all__ = ["DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "unwrap_model_for_generation"]
