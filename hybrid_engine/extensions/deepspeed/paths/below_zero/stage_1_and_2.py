"""`deepspeed.runtime.zero.stage_1_and_2`."""

from hybrid_engine.extensions.deepspeed.absent import attributes_of
from hybrid_engine.extensions.deepspeed.runtime_names import DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3
from hybrid_engine.zero.gathered_parameters import unwrap_model_for_generation

__getattr__ = attributes_of(__name__)
