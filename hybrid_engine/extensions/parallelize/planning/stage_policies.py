"""The policies `pp` (stages of one process) and `hybrid` (stages that split the batch), and plans without a search.

`replicated_plan` and `batch_plan` are the plans of `dp` and `data`.
"""

from collections.abc import Sequence

from torch.distributed.tensor import Placement, Shard

from hybrid_engine.extensions.parallelize.graph.graph import Graph, Op
from hybrid_engine.extensions.parallelize.graph.stage_ops import check_name, check_schedule, stage_of_path, stages_each
from hybrid_engine.extensions.parallelize.options.compute_config import ComputeConfig
from hybrid_engine.extensions.parallelize.options.values import COUNT, check
from hybrid_engine.extensions.parallelize.planning.following import Names, following
from hybrid_engine.extensions.parallelize.planning.plan import Plan

STAGE_OPTIONS = frozenset({"pipeline_nmicros", "pipeline_scheduler", "pipeline_nstages"})


def stages_of_equal_size(graph: Graph, config: ComputeConfig) -> Plan:
    """`pp`: one stage per process (two with 1f1b_interleaved), with about equally many parameters."""
    schedule = check_pipeline(config)
    plan = replicated_plan(graph, (1,))
    return _with_stages(plan, config, schedule, config.plan_ngpus * stages_each(schedule))


def stages_and_batch(graph: Graph, config: ComputeConfig) -> Plan:
    """`hybrid`: `pipeline_nstages` stages; dimension 0 is split over the processes of each stage."""
    schedule, num_stages = check_pipeline_and_batch(config)
    num_groups = num_stages // stages_each(schedule)
    return _with_stages(batch_plan(graph, (config.plan_ngpus // num_groups,)), config, schedule, num_stages)


def check_pipeline(config: ComputeConfig) -> str:
    """The schedule; ValueError for an unknown one, and for an invalid number of micro-batches."""
    schedule: str = config.pas_config.get("pipeline_scheduler", "infer_pipe" if config.inference_only else "1f1b")
    check_name(schedule)
    if "pipeline_nmicros" in config.pas_config:
        check("pipeline_nmicros", config.pas_config["pipeline_nmicros"], COUNT)
    return schedule


def check_pipeline_and_batch(config: ComputeConfig) -> tuple[str, int]:
    """The schedule and the number of stages; ValueError if the processes cannot be divided evenly among the stages."""
    schedule = check_pipeline(config)
    num_stages = config.pas_config.get("pipeline_nstages", config.plan_ngpus * stages_each(schedule))
    check("pipeline_nstages", num_stages, COUNT)
    num_groups = num_stages // stages_each(schedule)
    if num_groups < 1 or num_stages % stages_each(schedule) or config.plan_ngpus % num_groups:
        raise ValueError(
            f"pipeline_nstages={num_stages!r} must share plan_ngpus={config.plan_ngpus} out evenly; take a divisor"
        )
    if "pipeline_nmicros" not in config.pas_config:
        raise ValueError("policy 'hybrid' needs pas_config['pipeline_nmicros'], the number of micro-batches; give it")
    return schedule, num_stages


def _with_stages(plan: Plan, config: ComputeConfig, schedule: str, num_stages: int) -> Plan:
    plan.num_micro_batches = config.pas_config.get("pipeline_nmicros", num_stages)
    if num_stages > 1:
        check_schedule(schedule, num_stages, plan.num_micro_batches)
        plan.schedule, plan.stages = schedule, equal_stages(plan.graph, num_stages)
    return plan


def equal_stages(graph: Graph, num_stages: int) -> tuple[tuple[str, ...], ...]:
    """The modules in execution order, divided into stages so that the largest stage is as small as possible.

    A module is a layer of a list (`layers.3`) or one outside lists. Modules that run in turns stay together. Raises
    ValueError if there are fewer modules than stages.
    """
    sizes = _sizes(graph)
    groups = _apart(graph, list(sizes))
    if len(groups) < num_stages:
        raise ValueError(
            f"the model has {len(groups)} modules that run one after the other, {[' with '.join(g) for g in groups]}, "
            f"for {num_stages} stages; ask for fewer"
        )
    ends = _smallest_largest([sum(sizes[path] for path in group) for group in groups], num_stages)
    return tuple(
        tuple(path for group in groups[start:end] for path in group)
        for start, end in zip([0, *ends], ends, strict=False)
    )


def _apart(graph: Graph, paths: Sequence[str]) -> list[list[str]]:
    """The modules in groups that must stay in one stage, because one reads a later one's result."""
    single = tuple((path,) for path in paths)
    latest: dict[str, int] = {}  # for each tensor, the last module that was needed to make it
    with_next = set[int]()
    for op in graph.ops.values():
        read = max((latest.get(key, -1) for key in op.inputs), default=-1)
        place = stage_of_path(op.path, single)
        if place is not None:
            with_next.update(range(place, read))
        latest |= dict.fromkeys(op.outputs, read if place is None else max(read, place))
    groups: list[list[str]] = []
    for number, path in enumerate(paths):
        if number - 1 in with_next:
            groups[-1].append(path)
        else:
            groups.append([path])
    return groups


def _sizes(graph: Graph) -> dict[str, int]:
    """For each module path, bytes of the parameters that the module reads first, plus one per op."""
    sizes: dict[str, int] = {}
    seen: set[str] = set()
    is_made_of_parameters: set[str] = set()
    for op in graph.ops.values():
        reads = [key for key in op.inputs if graph.values[key].kind == "parameter" or key in is_made_of_parameters]
        if not reads:
            continue
        is_made_of_parameters |= set(op.outputs)
        path = _layer(op)
        if path:
            new = {key for key in op.inputs if graph.values[key].kind == "parameter"} - seen
            seen |= new
            sizes[path] = sizes.get(path, 0) + 1 + sum(graph.values[key].num_bytes for key in new)
    # An op of a module around others runs where its operands are.
    return {path: size for path, size in sizes.items() if not any(other.startswith(f"{path}.") for other in sizes)}


def _layer(op: Op) -> str:
    """The path up to its first number."""
    parts = op.path.split(".")
    numbers = [position for position, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else op.path


def _smallest_largest(sizes: Sequence[int], num_stages: int) -> list[int]:
    """The ends of stages, each with at least one entry, whose largest sum is minimal."""
    best: list[list[tuple[float, list[int]]]] = [[(float("inf"), [])] * (len(sizes) + 1) for _ in range(num_stages + 1)]
    best[0][0] = (0.0, [])
    for stage in range(1, num_stages + 1):
        for end in range(stage, len(sizes) + 1):
            options = (
                (max(best[stage - 1][start][0], sum(sizes[start:end])), [*best[stage - 1][start][1], end])
                for start in range(stage - 1, end)
                if best[stage - 1][start][0] < float("inf")
            )
            best[stage][end] = min(options, default=(float("inf"), []))
    return best[num_stages][len(sizes)][1]


def replicated_plan(graph: Graph, mesh: Sequence[int]) -> Plan:
    """A plan by which every rank computes everything."""
    return Plan(graph=graph, mesh=tuple(mesh))


def batch_plan(graph: Graph, mesh: Sequence[int]) -> Plan:
    """A plan that splits dimension 0 of the arguments, and every op that can follow, over the first axis of the mesh.

    An op that needs the whole batch (a batch norm) is computed whole by every rank.
    """
    plan = replicated_plan(graph, mesh)
    size = mesh[0]
    placements: dict[str, Placement] = {
        key: Shard(0)
        for key, value in graph.of_kind("input").items()
        if value.shape and value.shape[0] % size == 0 and value.shape[0] > 0
    }
    for op in graph.ops.values():
        name = following(op, placements, mesh)
        if name is not None:
            names: Names = (name, *(None for _ in mesh[1:]))
            plan.splits[op.key] = names
            given = op.rule.annotation.output_placements(name)
            placements |= {key: given[int(key.rsplit("/", 1)[1])] for key in op.outputs}
    return plan
