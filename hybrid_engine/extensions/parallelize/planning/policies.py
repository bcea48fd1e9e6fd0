"""Plans without a search (`data`, `tp`, `pp`, `hybrid`), and the splits among which `autodist` searches.

`tp` is tensor parallelism in Megatron-LM's layout. A linear that reads whole tensors is split by columns: queries, keys
and values by heads, the way up of an MLP. The ops after it work on these parts, up to a linear that reads them; that
one is split by rows, and its partial sums are added up where they are read. Embeddings and logits are split by
vocabulary. What does not divide by the number of processes is whole on each of them.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from torch.distributed.tensor import Placement, Shard

from hybrid_engine.extensions.parallelize.graph.annotations import SUMMED
from hybrid_engine.extensions.parallelize.graph.compute_config import COUNT, ComputeConfig, check
from hybrid_engine.extensions.parallelize.graph.graph import RESHAPES, Graph, Op, layer_of
from hybrid_engine.extensions.parallelize.graph.stage_ops import check_name, check_schedule, stage_of_path, stages_each
from hybrid_engine.extensions.parallelize.planning.op_classes import ATTENTION, split_degree
from hybrid_engine.extensions.parallelize.planning.plan import Names, Plan, following, nearest_paths
from hybrid_engine.extensions.parallelize.planning.setting import PlanSetting

STAGE_OPTIONS = frozenset({"pipeline_nmicros", "pipeline_scheduler", "pipeline_nstages"})
WHOLE = "whole"
KEYS = {"modules", "ops", "splits"}


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
        path = layer_of(op.path) or op.path
        if path:
            new = {key for key in op.inputs if graph.values[key].kind == "parameter"} - seen
            seen |= new
            sizes[path] = sizes.get(path, 0) + 1 + sum(graph.values[key].num_bytes for key in new)
    # An op of a module around others runs where its operands are.
    return {path: size for path, size in sizes.items() if not any(other.startswith(f"{path}.") for other in sizes)}


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
            placements |= op.by_result(given)
    return plan


def tensor_parallel(graph: Graph, config: ComputeConfig) -> Plan:
    """The plan of `tp`.

    Columns that an op would have to gather before it can go on stay whole, and the plan is made again without them:
    keys with fewer heads than processes, or queries, keys and values of one linear. Only results of the module and
    logits may be gathered. With `lowering="eager"` embeddings are whole too.
    """
    size = config.plan_ngpus
    columns = {op.key for op in graph.ops.values() if is_product(op, graph) and op.rule.can_split(("n",), (size,))}
    logits = _last_products(graph)
    while True:
        walk = _Walk(graph, size, columns, logits, _vocabulary(graph, logits), is_eager=config.lowering == "eager")
        plan = walk.plan()
        if not walk.gathered:
            return plan
        columns -= walk.gathered


def _last_products(graph: Graph) -> set[str]:
    """Keys of the products from whose results no other product is computed: those that give logits."""
    read: set[str] = set()
    last: set[str] = set()
    for op in reversed(list(graph.ops.values())):
        is_read = any(key in read for key in op.outputs)
        if is_product(op, graph) and not is_read:
            last.add(op.key)
        if is_product(op, graph) or is_read:
            read.update(op.inputs)
    return last


def _vocabulary(graph: Graph, logits: Collection[str]) -> int:
    """Number of rows of the largest embedding, of those with a row for each logit if there are any; else 0."""
    rows = {op.rule.sizes["v"] for op in graph.ops.values() if op.name == "embedding" and "v" in op.rule.sizes}
    return max(rows & {graph.ops[key].rule.sizes.get("n", 0) for key in logits} or rows, default=0)


def is_product(op: Op, graph: Graph) -> bool:
    """Whether an op multiplies with a parameter whose columns are features."""
    return op.name in ("linear", "addmm") and any(graph.values[key].kind == "parameter" for key in op.inputs)


@dataclass
class _Walk:
    """The ops in their order, with what is known about the tensors that are made so far."""

    graph: Graph
    size: int
    columns: Collection[str]
    """Keys of the linears that are split by columns where they read whole tensors."""
    logits: Collection[str]
    """Keys of the linears whose results may be gathered."""
    vocabulary: int
    is_eager: bool
    parts: dict[str, Placement] = field(default_factory=dict)
    """The placement of each tensor that lies in parts."""
    sources: dict[str, set[str]] = field(default_factory=dict)
    """For each tensor in parts, the columns that it comes from; logits do not count."""
    sums: dict[str, str] = field(default_factory=dict)
    """For each partial sum, the path of the module that makes it."""
    gathered: set[str] = field(default_factory=set)
    """Columns whose parts an op has to gather."""

    def plan(self) -> Plan:
        found = Plan(graph=self.graph, mesh=(self.size,))
        activations = {key for key, value in self.graph.values.items() if value.kind in ("result", "input")}
        for op in self.graph.ops.values():
            # Attention alone may cut whole tensors: keys and values of fewer heads than there are processes. Under
            # eager it may not, as layouts cannot change inside of a module's code.
            may_cut = op.name == ATTENTION and not self.is_eager
            name = self._name(op, following(op, self.parts, (self.size,), whole=() if may_cut else activations))
            if name is not None:
                found.splits[op.key] = (name,)
            self._note(op, name)
        return found

    def _name(self, op: Op, follows: str | None) -> str | None:
        """The name along which an op is split; `follows` is the one that fits the parts that it reads."""
        if follows is not None:
            return None if self.is_eager and op.rule.on_part_of((follows,)) else follows
        if op.key in self.columns:
            return "n"
        if op.name in RESHAPES and self.sums.get(op.inputs[0]) == op.path:
            return SUMMED
        is_split = (
            op.name == "embedding"
            and op.rule.sizes.get("v") == self.vocabulary
            and op.rule.can_split(("v",), (self.size,))
        )
        return "v" if is_split and not self.is_eager else None

    def _note(self, op: Op, name: str | None) -> None:
        is_columns = op.key in self.columns and name == "n"
        is_logits = is_columns and op.key in self.logits
        wanted = op.rule.annotation.input_placements(name)
        sources = set[str]()
        for key, placement in zip(op.inputs, wanted, strict=True):
            if key in self.parts and placement == self.parts[key]:
                sources |= self.sources[key]
            elif key in self.parts:
                self.gathered |= self.sources[key]
        if is_columns and not is_logits:
            sources = {op.key}
        made = op.rule.annotation.output_placements(name)
        for key, placement in op.by_result(made).items():
            if placement.is_partial():
                self.sums[key] = op.path
            if placement.is_shard() and not (is_logits and self.is_eager):
                self.parts[key], self.sources[key] = placement, sources


def all_choices(mesh: Sequence[int], setting: PlanSetting) -> Callable[[Op], list[Names]]:
    """All splits of an op over a mesh that divide its sizes and make no more parts than allowed."""

    def choices(op: Op) -> list[Names]:
        names = product(*(((None, *op.rule.annotation.candidates) if size > 1 else (None,)) for size in mesh))
        fitting = [found for found in names if op.rule.can_split(found, mesh)]
        limit = setting.max_partition_degree
        return [found for found in fitting if split_degree(op.rule, found, mesh) <= limit]

    return choices


def batch_choices(graph: Graph, mesh: Sequence[int], setting: PlanSetting) -> Callable[[Op], list[Names]]:
    """Splits that put the batch on the first axis of the mesh where possible, with all splits over the other axes."""
    splits_of_batch, anything = batch_plan(graph, mesh), all_choices(mesh, setting)

    def choices(op: Op) -> list[Names]:
        first = splits_of_batch.split_of(op)[0]
        return [names for names in anything(op) if names[0] == first] or [splits_of_batch.split_of(op)]

    return choices


def eager_choices(graph: Graph, size: int) -> Callable[[Op], list[Names]]:
    """Splits that module hooks support: columns of products with parameters, splits that follow, and rows.

    A module's own code works on parts of features and heads. It would take parts of samples or positions for all of
    them.
    """
    plan = Plan(graph=graph, mesh=(size,))
    products = [op for op in graph.ops.values() if is_product(op, graph)]
    plan.splits = {op.key: ("n",) for op in products if op.rule.can_split(["n"], (size,))}
    plan.follow()
    found = {key: [names] for key, names in plan.splits.items() if graph.ops[key].rule.on_part_of(names) is None}
    layouts = {key: where for op in graph.ops.values() for key, where in _made(plan, op).items()}
    rows: dict[str, str] = {}
    for op in products:
        if (name := following(op, layouts, (size,))) is not None:
            found.setdefault(op.key, []).append((name,))
            rows |= dict.fromkeys(op.outputs, op.path)
    for op in graph.ops.values():
        if op.name in RESHAPES and rows.get(op.inputs[0]) == op.path and op.rule.can_split([SUMMED], (size,)):
            found.setdefault(op.key, []).append((SUMMED,))  # summed where it leaves the module
    return lambda op: [(None,), *found.get(op.key, [])]


def _made(plan: Plan, op: Op) -> dict[str, Placement]:
    given = op.rule.output_placements(plan.split_of(op))
    return {key: layout[0] for key, layout in op.by_result(given).items() if layout[0].is_shard()}


def choices_of(plan: Plan) -> Callable[[Op], list[Names]]:
    """Only the split that the plan has for each op."""
    return lambda op: [plan.split_of(op)]


@dataclass(frozen=True)
class Constraint:
    """Requires that ops of modules that match `modules` are split along one of `splits`, if they have one."""

    modules: str
    ops: str
    splits: tuple[str, ...]

    def matches(self, op: Op) -> bool:
        """Whether the constraint applies to `op`."""
        is_named = fnmatchcase(op.path, self.modules) and fnmatchcase(op.name, self.ops)
        return is_named and (WHOLE in self.splits or bool(set(self.splits) & set(op.rule.annotation.candidates)))

    def allows(self, names: Names) -> bool:
        """Whether the constraint allows a split along `names`."""
        return all((name or WHOLE) in self.splits for name in names)


def read_constraints(path: str | Path, graph: Graph) -> list[Constraint]:
    """The constraints of a YAML file; ValueError for an invalid one, and for one that matches no op of the graph."""
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"partition_constraints_path={str(path)!r} cannot be read: {error}") from error
    if not isinstance(content, list):
        raise ValueError(f"{path} must be a list of entries with the keys {sorted(KEYS)}")
    return [_constraint(entry, f"{path}, entry {number}", graph) for number, entry in enumerate(content)]


def _constraint(entry: Any, place: str, graph: Graph) -> Constraint:
    if not isinstance(entry, dict) or not {"modules", "splits"} <= set(entry) <= KEYS:
        raise ValueError(f"{place}: {entry!r} must have the keys 'modules' and 'splits', and may have 'ops'")
    splits = entry["splits"]
    if not isinstance(splits, list) or not splits or not all(isinstance(name, str) for name in splits):
        raise ValueError(f"{place}: splits={splits!r} must be a list of names, or of {WHOLE!r}")
    found = Constraint(str(entry["modules"]), str(entry.get("ops", "*")), tuple(splits))
    named = [op for op in graph.ops.values() if fnmatchcase(op.path, found.modules) and fnmatchcase(op.name, found.ops)]
    if not named:
        raise ValueError(
            f"{place}: no op matches {found.modules!r}, {found.ops!r}; {nearest_paths(graph, found.modules)}"
        )
    possible = {name for op in named for name in op.rule.annotation.candidates} | {WHOLE}
    if unknown := sorted(set(splits) - possible):
        raise ValueError(f"{place}: no op of {found.modules!r} has {unknown}; they have {sorted(possible)}")
    return found


def constrained(
    choices: Callable[[Op], list[Names]], constraints: Sequence[Constraint], mesh: Sequence[int]
) -> Callable[[Op], list[Names]]:
    """The `choices` that the constraints allow; ValueError if none is left for an op."""

    def allowed(op: Op) -> list[Names]:
        matching = [constraint for constraint in constraints if constraint.matches(op)]
        found = [names for names in choices(op) if all(constraint.allows(names) for constraint in matching)]
        if not found and max(mesh) > 1:
            splits = [list(constraint.splits) for constraint in matching]
            raise ValueError(
                f"{op.key}: the constraints allow {splits} alone, of which none divides its sizes "
                f"{dict(op.rule.sizes)} by the mesh {list(mesh)}; allow {WHOLE!r}"
            )
        return found or choices(op)

    return allowed
