"""Checks of whether a training engine can train a parallel module; `check_engine` of the modules calls them."""

from hybrid_engine.config import EngineConfig
from hybrid_engine.extensions.parallelize.graph.stage_ops import divide
from hybrid_engine.extensions.parallelize.options.compute_config import ComputeConfig
from hybrid_engine.extensions.parallelize.planning.plan import Plan

MOST_ZERO_WITH_STAGES = 1
"""A process keeps the gradients of all micro-batches of its stage, and reads its weights for each."""
MOST_AXES = 2
"""Maximum number of split axes of parameters that FSDP2 can shard further."""


def check_graph(config: ComputeConfig, unit_size: int) -> None:
    """Raises ValueError for a module whose traced graph runs on one process; local."""
    if unit_size == 1:
        raise ValueError(
            f"model: lowering={config.lowering!r} runs a traced graph, which a unit of one process has no use for; "
            "parallelize it with ComputeConfig(lowering='eager'), or pass the model itself"
        )
    check_end2end(config)


def check_end2end(config: ComputeConfig) -> None:
    """Raises ValueError for an end-to-end module; local."""
    if config.use_end2end:
        raise ValueError("model: use_end2end=True, whose forward is train_step's alone; leave it out")


def check_options(config: ComputeConfig, plan: Plan, stage: int) -> None:
    """Raises ValueError for options of `parallelize` that contradict ZeRO's stage, or an engine; local."""
    for name in ("use_async_reducer", "reducer_bucket_cap_mb"):
        if value := getattr(config, name):
            raise ValueError(
                f"model: {name}={value} is for build_optimizer; an engine reduces gradients by itself: leave it out"
            )
    if config.inference_only:
        raise ValueError("model: inference_only=True, and the engine trains; leave it out")
    check_axes(plan)
    if config.use_zero and stage == 0:
        raise ValueError(
            "model: use_zero=True and zero_optimization.stage=0 contradict each other; set stage 1, 2 or 3"
        )


def check_axes(plan: Plan) -> None:
    """Raises ValueError if a plan splits over more axes than an engine supports; local."""
    if len(plan.mesh) > MOST_AXES:
        raise ValueError(
            f"model: the plan splits over {list(plan.mesh)}, and an engine has at most {MOST_AXES} axes beside stages "
            "and units; give two of them together as one"
        )


def check_stages(plan: Plan, compute_config: ComputeConfig, config: EngineConfig) -> None:
    """Raises ValueError for stages that the engine cannot train; local."""
    zero = config.zero_optimization
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
        num_samples = config.train_micro_batch_size_per_gpu * plan.num_micro_batches * compute_config.num_units
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


def check_dtype(plan: Plan, config: EngineConfig) -> None:
    """Raises ValueError if the engine would compute in another dtype than the traced graph."""
    values = plan.graph.of_kind("parameter").values()
    found = {value.dtype for value in values if value.dtype.is_floating_point}
    if found - {config.dtype}:
        raise ValueError(
            f"bf16, fp16: the engine computes in {config.dtype}, and the plan was made for parameters in "
            f"{', '.join(sorted(map(str, found)))}; pass module_dtype={config.dtype} to parallelize()"
        )
