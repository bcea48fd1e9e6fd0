"""Divides a graph into pipeline stages: the ops of each stage, the tensors sent between stages, and the schedule.

An op runs in the stage that names its module. If no stage names it, the op runs in the earliest stage that has its
operands. Values that do not depend on parameters (masks, positions) are computed in each stage that reads them, because
every stage has the sample.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from hybrid_engine.extensions.parallelize.graph.graph import Graph, Op

Stages = Sequence[Sequence[str]]
SINGLE: Mapping[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "infer_pipe": ScheduleGPipe}
"""Schedules with one stage per process."""
SCHEDULES = (*SINGLE, "1f1b_interleaved")
REFUSED = {"1f1b_plus": "1f1b", "chimera_direct": "1f1b_interleaved"}
"""Schedules of nnScaler that PyTorch does not have, with the schedule to use instead."""


@dataclass(frozen=True, kw_only=True)
class StageOps:
    """The ops and tensors of one stage of a graph."""

    ops: tuple[str, ...]
    """Keys of the ops, in execution order."""
    held: frozenset[str]
    """Names of the parameters and buffers that the stage reads or changes."""
    received: tuple[str, ...]
    """Keys of the tensors from the previous stage, including those that this stage only passes on."""
    sent: tuple[str, ...]
    """Keys of the tensors for the next stage."""
    mutations: frozenset[str]
    """Names of the buffers that the stage changes."""
    is_last: bool


def divide(graph: Graph, stages: Stages) -> tuple[StageOps, ...]:
    """Divides the graph into stages.

    Raises ValueError if a stage reads the result of a later one, if no tensor passes between two stages, if a stage has
    no op, and if the forward pass writes into a tensor of which several stages hold copies.
    """
    made = _stage_of_values(graph, stages)
    _check_arguments_unwritten(graph)
    own = [[op for op in graph.ops.values() if made[op.key] == number] for number in range(len(stages))]
    if not all(own):
        empty = next(number for number, ops in enumerate(own) if not ops)
        raise ValueError(f"stage {empty}, {list(stages[empty])}, has no op of the model; name other modules")
    changes = [_mutations(graph, made, number) for number in range(len(stages))]
    ends: list[list[str]] = [[] for _ in own[1:]] + [[key for key in graph.outputs if key is not None]]
    runs = [
        _with_free(graph, made, ops, [*end, *(graph.mutations[name] for name in changed)])
        for ops, end, changed in zip(own, ends, changes, strict=True)
    ]
    crossing = _crossing(graph, made, [{*_inputs(graph, ops), *end} for ops, end in zip(runs, ends, strict=True)])
    held = [_held(graph, ops) | changed for ops, changed in zip(runs, changes, strict=True)]
    _check_one_changes(graph, made, held)
    unread = {key for kind in ("parameter", "buffer") for key in graph.of_kind(kind)} - frozenset().union(*held)
    return tuple(
        StageOps(
            ops=tuple(runs[number]),
            held=frozenset(held[number] | (unread if number == 0 else set())),
            received=crossing[number - 1] if number else (),
            sent=crossing[number] if number < len(stages) - 1 else (),
            mutations=frozenset(changes[number]),
            is_last=number == len(stages) - 1,
        )
        for number in range(len(stages))
    )


def _stage_of_values(graph: Graph, stages: Stages) -> dict[str, int | None]:
    """The stage of each op and each result, by key; None for those that depend on no parameter."""
    made: dict[str, int | None] = {}
    for op in graph.ops.values():
        reads = [made.get(key) for key in op.inputs]
        is_free = all(stage is None for stage in reads) and not any(_is_parameter(graph, key) for key in op.inputs)
        made[op.key] = None if is_free else _stage_of(op, stages, [stage for stage in reads if stage is not None])
        made |= dict.fromkeys(op.outputs, made[op.key])
    return made


def _is_parameter(graph: Graph, key: str) -> bool:
    return graph.values[key].kind == "parameter"


def _stage_of(op: Op, stages: Stages, reads: Sequence[int]) -> int:
    earliest = max(reads, default=0)
    named = stage_of_path(op.path, stages)
    if named is not None and named < earliest:
        raise ValueError(f"{op.key} of stage {named} reads what stage {earliest} makes; put {op.path!r} there or later")
    return earliest if named is None else named


def stage_of_path(path: str, stages: Stages) -> int | None:
    """The stage that names the module at `path`, or the innermost module around it; None if no stage does."""
    found = [
        (len(module), number) for number, modules in enumerate(stages) for module in modules if _is_in(path, module)
    ]
    return max(found)[1] if found else None


def _is_in(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")


def _mutations(graph: Graph, made: Mapping[str, int | None], number: int) -> set[str]:
    """Names of the buffers that a stage changes. Every stage changes those whose new value depends on no parameter."""
    return {name for name, key in graph.mutations.items() if made.get(key) in (number, None)}


def _check_arguments_unwritten(graph: Graph) -> None:
    written = [key.removeprefix("input:") for key in graph.mutations if graph.values[key].kind == "input"]
    if written:
        raise ValueError(
            f"forward writes into its argument {written[0]!r}, of which each stage has a copy; return the new value, "
            "or take a plan without stages"
        )


def _check_one_changes(graph: Graph, made: Mapping[str, int | None], held: Sequence[frozenset[str] | set[str]]) -> None:
    """Raises ValueError for a buffer that one stage changes and others read: their copies would not change."""
    for name, key in graph.mutations.items():
        number = made.get(key)
        others = [stage for stage, names in enumerate(held) if name in names and stage != number]
        if number is not None and others:
            raise ValueError(
                f"the buffer {name!r} is changed in stage {number} and read in stage {others[0]}, which would not see "
                "the change; put the modules that use it into one stage"
            )


def _with_free(graph: Graph, made: Mapping[str, int | None], own: Sequence[Op], ends: Sequence[str]) -> list[str]:
    """Keys of a stage's ops, including those that depend on no parameter and are read in this stage."""
    found = {op.key for op in own}
    wanted = [key for op in own for key in op.inputs] + list(ends)
    while wanted:
        key = wanted.pop()
        maker = key.rsplit("/", 1)[0]
        if maker in graph.ops and made[maker] is None and maker not in found:
            found.add(maker)
            wanted += graph.ops[maker].inputs
    return [key for key in graph.ops if key in found]


def _inputs(graph: Graph, ops: Iterable[str]) -> set[str]:
    return {key for op in ops for key in graph.ops[op].inputs}


def _crossing(graph: Graph, made: Mapping[str, int | None], read: Sequence[set[str]]) -> list[tuple[str, ...]]:
    """For each boundary, keys of the tensors that are made before it and read after it."""
    last = {key: number for number, keys in enumerate(read) for key in keys}
    boundaries = []
    for boundary in range(len(read) - 1):
        found = [k for k in graph.values if k in last and made.get(k) is not None and made[k] <= boundary < last[k]]  # type: ignore[operator]
        if not found:
            raise ValueError(f"nothing that stage {boundary + 1} reads comes from the stages before; join them")
        boundaries.append(tuple(found))
    return boundaries


def _held(graph: Graph, ops: Iterable[str]) -> set[str]:
    return {key for key in _inputs(graph, ops) if graph.values[key].kind in ("parameter", "buffer")}


def check_name(name: Any) -> None:
    """Raises ValueError for an unknown schedule."""
    if isinstance(name, str) and name in REFUSED:
        raise ValueError(f"pipeline_scheduler={name!r} is not one of PyTorch's; take {REFUSED[name]!r}")
    if name not in SCHEDULES:
        raise ValueError(f"pipeline_scheduler={name!r} must be one of {list(SCHEDULES)}")


def check_schedule(name: str, num_stages: int, num_micro_batches: int) -> None:
    """Raises ValueError for an unknown schedule, and for numbers that the schedule does not support."""
    check_name(name)
    if name == "1f1b" and num_micro_batches < num_stages:
        raise ValueError(
            f"pipeline_nmicros={num_micro_batches} must be at least the number of stages, {num_stages}, for '1f1b'; "
            "take 'gpipe' for fewer"
        )
    if name == "1f1b_interleaved" and (num_stages % 2 or num_stages < 4):
        raise ValueError(
            f"pipeline_nstages={num_stages} must be two for each of at least two processes for '1f1b_interleaved'"
        )
    rounds = max(1, num_micro_batches // max(num_stages // 2, 1))
    if name == "1f1b_interleaved" and num_micro_batches % rounds:
        raise ValueError(
            f"pipeline_nmicros={num_micro_batches} must be a multiple of {num_stages // 2}, the number of processes, "
            "or less, for '1f1b_interleaved'"
        )


def stages_each(name: str) -> int:
    """Number of stages per process."""
    return 2 if name == "1f1b_interleaved" else 1


def build_schedule(
    name: str, stages: Sequence[PipelineStage], num_micro_batches: int, loss_fn: Callable[..., Any] | None
) -> Any:
    """A schedule that sums gradients over micro-batches. Without `loss_fn` it has no backward pass."""
    if name == "1f1b_interleaved":
        return ScheduleInterleaved1F1B(list(stages), num_micro_batches, loss_fn=loss_fn, scale_grads=False)
    kind = ScheduleGPipe if loss_fn is None else SINGLE[name]
    return kind(stages[0], num_micro_batches, loss_fn=loss_fn, scale_grads=False)
