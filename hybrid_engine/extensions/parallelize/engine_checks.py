"""Which parallel modules an engine trains: those that several processes compute together, or that run eagerly."""

from torch import nn

from hybrid_engine.config import EngineConfig
from hybrid_engine.extensions.parallelize.eager_module import EagerModule
from hybrid_engine.extensions.parallelize.parallel_module import ParallelModule
from hybrid_engine.extensions.parallelize.pipelining.stage_ops import divide
from hybrid_engine.extensions.parallelize.planning.plan import Plan
from hybrid_engine.extensions.parallelize.staged_module import StagedModule

MOST_ZERO_WITH_STAGES = 1
"""A process keeps the gradients of all micro-batches of its stage, and reads its weights for each."""
MOST_AXES = 2
"""Those over which FSDP2 takes parameters that are split before."""


def check_parallel(model: nn.Module, engine_config: EngineConfig) -> None:
    """ValueError for a model that is parallel, or has parallel parts, in a way that no engine trains; local."""
    stage = engine_config.zero_optimization.stage
    if not isinstance(model, nn.Module):
        return  # refused by its kind
    parts = [(name, part) for name, part in model.named_modules() if isinstance(part, ParallelModule)]
    for name, part in parts:
        if part is not model:
            raise ValueError(f"model.{name} is parallel and the model is not; parallelize the whole model")
        config = part.compute_config
        if isinstance(part, StagedModule):
            _check_stages(part, engine_config)
        elif not isinstance(part, EagerModule) and part.unit_size == 1:
            raise ValueError(
                f"model: lowering={config.lowering!r} runs a traced graph, which a unit of one process has no use for; "
                "parallelize it with ComputeConfig(lowering='eager'), or pass the model itself"
            )
        elif config.use_end2end:
            raise ValueError("model: use_end2end=True, whose forward is train_step's alone; leave it out")
        if not isinstance(part, EagerModule):
            _check_dtype(part, engine_config)
        for name in ("use_async_reducer", "reducer_bucket_cap_mb"):
            if value := getattr(config, name):
                raise ValueError(
                    f"model: {name}={value} is for build_optimizer; an engine reduces gradients by itself: leave it out"
                )
        if config.inference_only:
            raise ValueError("model: inference_only=True, and the engine trains; leave it out")
        check_axes(part.plan)
        if config.use_zero and stage == 0:
            raise ValueError(
                "model: use_zero=True and zero_optimization.stage=0 contradict each other; set stage 1, 2 or 3"
            )


def check_axes(plan: Plan) -> None:
    """ValueError where a plan splits over more axes than an engine trains; local."""
    if len(plan.mesh) > MOST_AXES:
        raise ValueError(
            f"model: the plan splits over {list(plan.mesh)}, and an engine has at most {MOST_AXES} axes beside stages "
            "and units; give two of them together as one"
        )


def _check_stages(module: StagedModule, config: EngineConfig) -> None:
    plan, zero = module.plan, config.zero_optimization
    if plan.schedule == "1f1b_interleaved":
        raise ValueError(
            f"model: the plan has schedule={plan.schedule!r}, two stages a process, and an engine has one; take "
            "pipeline_scheduler='1f1b' or 'gpipe'"
        )
    if zero.stage > MOST_ZERO_WITH_STAGES:
        raise ValueError(
            f"zero_optimization.stage={zero.stage}: with the plan's {len(plan.stages)} stages it must be at most "
            f"{MOST_ZERO_WITH_STAGES}, every micro-batch reads a stage's whole weights; set 0 or 1"
        )
    graph = plan.graph
    trains = [bool(stage.held & graph.requires_grad) for stage in divide(graph, plan.stages)]
    if any(trains) and not all(trains):
        raise ValueError(
            f"model: all parameters of stage {trains.index(False)} are frozen, and an engine trains some on each "
            "process; leave some of them trained, name other stages, or train by build_optimizer and train_step"
        )
    if config.gradient_accumulation_steps != plan.num_micro_batches:
        num_samples = config.train_micro_batch_size_per_gpu * plan.num_micro_batches * module.compute_config.num_units
        raise ValueError(
            f"gradient_accumulation_steps={config.gradient_accumulation_steps} must be the plan's pipeline_nmicros="
            f"{plan.num_micro_batches}; set it, and train_batch_size={num_samples} for micro-batches of "
            f"{config.train_micro_batch_size_per_gpu}"
        )
    if not config.managed_gradient_accumulation:
        raise ValueError(
            "managed_gradient_accumulation=False: a step in stages is one train_batch() of pipeline_nmicros; leave it "
            "out"
        )


def _check_dtype(module: ParallelModule, config: EngineConfig) -> None:
    """ValueError where the engine would compute in another dtype than the traced graph does."""
    values = module.plan.graph.of_kind("parameter").values()
    found = {value.dtype for value in values if value.dtype.is_floating_point}
    if found - {config.dtype}:
        raise ValueError(
            f"bf16, fp16: the engine computes in {config.dtype}, and the plan was made for parameters in "
            f"{', '.join(sorted(map(str, found)))}; pass module_dtype={config.dtype} to parallelize()"
        )
