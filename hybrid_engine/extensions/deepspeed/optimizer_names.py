"""The classes of DeepSpeed's optimizers, which code asks `engine.optimizer` for: there is one here, `ZeroOptimizer`.

isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3)   # whether the engine is one of stage 3
"""

from typing import Any

from hybrid_engine.optim.optimizer import ZeroOptimizer

DeepSpeedOptimizer = ZeROOptimizer = BF16_Optimizer = FP16_Optimizer = FP16_UnfusedOptimizer = ZeroOptimizer


class _AtStage3(type):
    """A class whose objects are the optimizers of stage 3, or the others."""

    is_stage_3: bool

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, ZeroOptimizer) and _is_of_stage_3(instance) is cls.is_stage_3


class DeepSpeedZeroOptimizer_Stage3(ZeroOptimizer, metaclass=_AtStage3):
    """The optimizer of an engine of stage 3."""

    is_stage_3 = True


class DeepSpeedZeroOptimizer(ZeroOptimizer, metaclass=_AtStage3):
    """The optimizer of an engine of stage 0, 1 or 2."""

    is_stage_3 = False


def _is_of_stage_3(optimizer: ZeroOptimizer) -> bool:
    return any(hasattr(trained.param, "ds_id") for trained in optimizer.parameters)
