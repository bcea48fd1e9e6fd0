"""Finds the best plan of a space by an integer program: one binary variable for each split of each class of ops.

A tensor's way from the layout it is made in to a layout that is read is a continuous variable, which the variables of
its maker and its reader fix. If several readers share a way, a variable that is at least each of theirs stands for it.
HiGHS finds the optimum.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from hybrid_engine.extensions.parallelize.graph.graph import SHARED
from hybrid_engine.extensions.parallelize.planning.layouts import Layout, kept_layout
from hybrid_engine.extensions.parallelize.planning.op_classes import Reader, State, TensorClass
from hybrid_engine.extensions.parallelize.planning.setting import Cost, peaks
from hybrid_engine.extensions.parallelize.planning.space import Space

GAP = 1e-6
"""Maximum relative distance of a solution from the optimum."""
Variables = tuple[int, ...]
"""Variables whose sum is 1 if a condition holds, otherwise 0."""
Row = tuple[dict[int, float], float, float]
"""Coefficients of variables, and the lower and upper bounds of their sum."""
Limits = list[tuple[dict[int, float], float]]
"""For each moment at which memory may be scarce, the GB that each variable takes, and the GB that are always used."""
GB = 1e9
Pairs = dict[tuple[Layout, State], Variables]
"""Maps a source layout and a reader's state to the variables that say that the tensor goes this way."""


@dataclass
class Programme:
    """Variables of at least 0, the cost of each if it is 1, and linear constraints."""

    costs: list[Cost] = field(default_factory=list)
    """Cost of each variable."""
    is_integer: list[bool] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def variable(self, cost: Cost | None = None, is_integer: bool = False) -> int:
        """The number of a new variable; `is_integer`: it is 0 or 1."""
        self.costs.append(cost or Cost())
        self.is_integer.append(is_integer)
        return len(self.costs) - 1

    def charge(self, variables: Iterable[int], cost: Cost) -> None:
        """Adds `cost` if one of `variables` is 1."""
        for variable in variables:
            self.costs[variable] += cost

    def row(self, terms: Iterable[tuple[Variables, float]], low: float, high: float) -> None:
        """Requires that the sum of the variables, each times its factor, is between `low` and `high`."""
        coefficients: dict[int, float] = {}
        for variables, factor in terms:
            for variable in variables:
                coefficients[variable] = coefficients.get(variable, 0.0) + factor
        self.rows.append((coefficients, low, high))

    def any_of(self, indicators: Sequence[Variables], cost: Cost) -> None:
        """Adds `cost` once if at least one of `indicators` is 1."""
        if cost == Cost():
            return
        if len(indicators) == 1:
            self.charge(indicators[0], cost)
            return
        shared = self.variable(cost)
        for indicator in indicators:
            self.row([((shared,), 1.0), (indicator, -1.0)], 0.0, np.inf)

    def solution(self, objective: np.ndarray, more: Sequence[Row]) -> np.ndarray | None:
        """The values that minimize `objective`, also under the rows `more`; None if no values satisfy all rows."""
        # The import takes half a second and is needed only here.
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_matrix

        rows = [*self.rows, *more]
        places = [(number, column, factor) for number, (row, _, _) in enumerate(rows) for column, factor in row.items()]
        numbers, columns, factors = zip(*places, strict=True)
        matrix = csr_matrix((factors, (numbers, columns)), shape=(len(rows), len(objective)))
        result = milp(
            objective,
            constraints=LinearConstraint(matrix, [low for _, low, _ in rows], [high for _, _, high in rows]),
            integrality=np.array(self.is_integer, dtype=int),
            bounds=Bounds(0.0, np.where(self.is_integer, 1.0, np.inf)),
            options={"mip_rel_gap": GAP},
        )
        assert result.status in (0, 2), f"{result.message=}"
        return result.x if result.status == 0 else None


class Infeasible(ValueError):
    """No plan fits into the available memory; `least_bytes` is the minimum that a plan needs."""

    def __init__(self, least_bytes: float):
        super().__init__(f"{least_bytes=}")
        self.least_bytes = least_bytes


def solve(space: Space, constants: float = 0.0, excluded: Sequence[Mapping[int, int]] = ()) -> list[int]:
    """A choice for each class: the fastest plan within `memory_bytes`; Infeasible if there is none.

    `constants` is the bytes that generation needs in addition to resident and copied ones. Plans that make all choices
    of one entry of `excluded` (by class) are left out.
    """
    programme, chosen, memory = _build(space, constants)
    for choices in excluded:
        taken = tuple(chosen[number][choice] for number, choice in choices.items())
        programme.row([(taken, 1.0)], 0.0, len(taken) - 1)
    setting = space.setting
    least = sum(min(c.seconds(setting.num_micro_batches) for c in one.costs) for one in space.classes)
    scale = 1000.0 / max(least, 1e-12)
    objective = np.array([cost.seconds(setting.num_micro_batches) * scale for cost in programme.costs])
    limits = [(row, -np.inf, setting.memory_bytes / GB - constant) for row, constant in memory]
    found = programme.solution(objective, limits if np.isfinite(setting.memory_bytes) else [])
    if found is None:
        raise Infeasible(_least(programme, memory)[1])
    return _choices(found, chosen)


def frugal(space: Space) -> list[int]:
    """A choice for each class: the plan that needs the least memory."""
    programme, chosen, memory = _build(space, 0.0)
    return _choices(_least(programme, memory)[0], chosen)


def _build(space: Space, constants: float) -> tuple[Programme, list[list[int]], Limits]:
    programme = Programme()
    chosen = [[programme.variable(cost, is_integer=True) for cost in one.costs] for one in space.classes]
    for variables in chosen:
        programme.row([(tuple(variables), 1.0)], 1.0, 1.0)
    for tensor in space.tensors:
        _enter_tensor(programme, space, tensor, chosen)
    largest = _enter_largest(programme, space, chosen)
    return programme, chosen, _memory_rows(programme, space, largest, constants)


def _choices(found: np.ndarray, chosen: Sequence[Sequence[int]]) -> list[int]:
    return [int(np.argmax(found[list(variables)])) for variables in chosen]


def _memory_rows(programme: Programme, space: Space, largest: int, constants: float) -> Limits:
    rows: dict[str, dict[int, float]] = {}
    for variable, cost in enumerate(programme.costs):
        for moment, num_bytes in peaks(cost, 0.0, space.setting).items():
            if num_bytes:
                rows.setdefault(moment, {})[variable] = num_bytes / GB
    for moment, num_bytes in peaks(Cost(), 1.0, space.setting).items():
        if num_bytes:
            rows.setdefault(moment, {})[largest] = num_bytes
    return [(row, constants / GB if moment == "generation" else 0.0) for moment, row in rows.items()]


def _enter_largest(programme: Programme, space: Space, chosen: list[list[int]]) -> int:
    largest = programme.variable()
    floor = max((min(one.largest) for one in space.classes), default=0.0)
    for one, variables in zip(space.classes, chosen, strict=True):
        if max(one.largest) >= floor and max(one.largest) > 0:
            terms = [((v,), -size / GB) for v, size in zip(variables, one.largest, strict=True)]
            programme.row([((largest,), 1.0), *terms], 0.0, np.inf)
    return largest


def _enter_tensor(programme: Programme, space: Space, tensor: TensorClass, chosen: list[list[int]]) -> None:
    """Adds the costs of moving and keeping the tensors of a class."""
    if tensor.value.kind == "parameter":
        ways = _parameter_ways(programme, space, tensor, chosen)
    else:
        made = _made(space, tensor, chosen)
        ways = [_ways(programme, space, tensor, reader, made, chosen) for reader in tensor.readers]
        _enter_shared(programme, space, tensor, chosen)
        for source, variables in made.items():
            _charge_maker(programme, space, tensor, source, variables)
    together: dict[tuple[Layout, State], list[Variables]] = {}
    kept: dict[tuple[Layout, Layout, bool], list[Variables]] = {}
    for reader, pairs in zip(tensor.readers, ways, strict=True):
        by_layout: dict[tuple[Layout, Layout], Variables] = {}
        for (source, state), variables in pairs.items():
            together.setdefault((source, state), []).append(variables)
            by_layout[source, state[0]] = by_layout.get((source, state[0]), ()) + variables
        if reader.keeps:
            for (source, layout), variables in by_layout.items():
                kept.setdefault((source, layout, reader.again), []).append(variables)
    for (source, state), indicators in together.items():
        programme.any_of(indicators, space.costs.move(tensor, source, state))
    for (source, layout, again), indicators in kept.items():
        if not space.costs.is_kept_free(tensor, source, layout, again):
            programme.any_of(indicators, space.costs.keep(tensor, layout, again))


def _charge_maker(
    programme: Programme, space: Space, tensor: TensorClass, source: Layout, variables: Variables
) -> None:
    if tensor.kept_by_maker:
        programme.charge(variables, space.costs.keep(tensor, source, tensor.made_again))
    if tensor.enters and variables:
        programme.charge(variables, space.costs.keep(tensor, source, False))


def _made(space: Space, tensor: TensorClass, chosen: list[list[int]]) -> dict[Layout, Variables]:
    """Maps a layout to the variables of the choices that make the tensor in it; () for an input of the graph."""
    if tensor.maker is None:
        return {space.whole: ()}
    number, position = tensor.maker
    found: dict[Layout, Variables] = {}
    for variable, outputs in zip(chosen[number], space.classes[number].outputs, strict=True):
        found[outputs[position]] = (*found.get(outputs[position], ()), variable)
    return found


def _wanted(space: Space, reader: Reader, chosen: list[list[int]]) -> dict[State, Variables]:
    """Maps a state to the variables of the choices that need it; empty for a result of the graph, which is whole."""
    if reader.op_class is None:
        return {(space.whole, space.whole): ()}
    found: dict[State, Variables] = {}
    for variable, state in zip(chosen[reader.op_class], space.reader_states(reader), strict=True):
        found[state] = (*found.get(state, ()), variable)
    return found


def _ways(
    programme: Programme,
    space: Space,
    tensor: TensorClass,
    reader: Reader,
    made: Mapping[Layout, Variables],
    chosen: list[list[int]],
) -> Pairs:
    """Variables for each way of a tensor from its maker to a reader; impossible ways are forbidden."""
    wanted = _wanted(space, reader, chosen)
    ways = [(source, state) for source in made for state in wanted]
    possible = [way for way in ways if tensor.may_go(reader, *way)]
    if len(made) == 1 or len(wanted) == 1:
        pairs = {way: wanted[way[1]] if len(made) == 1 else made[way[0]] for way in ways}
        for way in ways:
            if way not in possible and pairs[way]:
                programme.row([(pairs[way], 1.0)], 0.0, 0.0)
        return pairs
    pairs = {way: (programme.variable(),) for way in possible}
    for source, variables in made.items():
        programme.row([*((pairs[way], 1.0) for way in possible if way[0] == source), (variables, -1.0)], 0.0, 0.0)
    for state, variables in wanted.items():
        programme.row([*((pairs[way], 1.0) for way in possible if way[1] == state), (variables, -1.0)], 0.0, 0.0)
    return pairs


def _enter_shared(programme: Programme, space: Space, tensor: TensorClass, chosen: list[list[int]]) -> None:
    """Makes readers that need one common layout agree with the first; whole for a result of the graph."""
    by_layout: list[dict[Layout, Variables]] = []
    for reader in (one for one in tensor.readers if one.way == SHARED):
        found: dict[Layout, Variables] = {}
        for (layout, _), variables in _wanted(space, reader, chosen).items():
            found[layout] = found.get(layout, ()) + variables
        by_layout.append(found)
    is_result = any(one.way == SHARED and one.op_class is None for one in tensor.readers)
    for one in by_layout if is_result else ():
        for layout, variables in one.items():
            if layout != space.whole:
                programme.row([(variables, 1.0)], 0.0, 0.0)
    for one in () if is_result else by_layout[1:]:
        for layout in {**by_layout[0], **one}:
            programme.row([(one.get(layout, ()), 1.0), (by_layout[0].get(layout, ()), -1.0)], 0.0, 0.0)


def _parameter_ways(programme: Programme, space: Space, tensor: TensorClass, chosen: list[list[int]]) -> list[Pairs]:
    """A variable for each combination of the readers' states, which decides the layout of the parameter."""
    wanted = [_wanted(space, reader, chosen) for reader in tensor.readers]
    ways: list[Pairs] = [{} for _ in wanted]
    marginals: list[dict[State, list[int]]] = [{} for _ in wanted]
    for states in product(*wanted):
        source = kept_layout((layout for layout, _ in states), space.whole)
        variables: Variables = wanted[0][states[0]] if len(wanted) == 1 else (programme.variable(),)
        programme.charge(variables, space.costs.parameter(tensor, source))
        for position, state in enumerate(states):
            ways[position][source, state] = ways[position].get((source, state), ()) + variables
            marginals[position].setdefault(state, []).extend(variables)
    if len(wanted) > 1:
        for by_state, found in zip(wanted, marginals, strict=True):
            for state, ones in found.items():
                programme.row([(tuple(ones), 1.0), (by_state[state], -1.0)], 0.0, 0.0)
    return ways


def _least(programme: Programme, memory: Limits) -> tuple[np.ndarray, float]:
    peak = programme.variable()
    objective = np.zeros(len(programme.costs))
    objective[peak] = 1.0
    found = programme.solution(objective, [({**row, peak: -1.0}, -np.inf, -constant) for row, constant in memory])
    if found is None:  # only with lowering="eager", where readers must agree
        raise Infeasible(float("inf"))
    return found, float(found[peak]) * GB
