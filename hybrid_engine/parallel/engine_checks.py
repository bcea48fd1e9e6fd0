"""Which parallel modules an engine trains: those whose own forward runs, on one axis of processes."""

from torch import nn

from hybrid_engine.parallel.eager_module import EagerModule
from hybrid_engine.parallel.parallel_module import ParallelModule


def check_parallel(model: nn.Module, stage: int) -> None:
    """ValueError for a model that is parallel, or has parallel parts, in a way that no engine trains; local."""
    if not isinstance(model, nn.Module):
        return  # refused by its kind
    parts = [(name, part) for name, part in model.named_modules() if isinstance(part, ParallelModule)]
    for name, part in parts:
        if part is not model:
            raise ValueError(f"model.{name} is parallel and the model is not; parallelize the whole model")
        config = part.compute_config
        if not isinstance(part, EagerModule):
            raise ValueError(
                f"model: lowering={config.lowering!r} runs a traced graph, which neither an engine trains nor anything "
                "generates from; parallelize it with ComputeConfig(lowering='eager')"
            )
        if config.use_end2end:
            raise ValueError("model: use_end2end=True, whose forward is train_step's alone; leave it out")
        if config.inference_only:
            raise ValueError("model: inference_only=True, and the engine trains; leave it out")
        if sum(size > 1 for size in part.plan.mesh) > 1:
            raise ValueError(
                f"model: the plan splits over {list(part.plan.mesh)}, and an engine has one axis beside its data; give "
                "plan_ngpus the size of one, the other processes are units"
            )
        if config.use_zero and stage == 0:
            raise ValueError(
                "model: use_zero=True and zero_optimization.stage=0 contradict each other; set stage 1, 2 or 3"
            )
