"""An integer programme while it is put together, and its solution by HiGHS."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hybrid_engine.extensions.parallelize.planning.cost import Cost

GAP = 1e-6
"""How far, relatively, a solution may be from the optimum."""
Variables = tuple[int, ...]
"""Variables whose sum is 1 where something is so, else 0."""
Row = tuple[dict[int, float], float, float]
"""Coefficients of variables, and between what their sum must be."""


@dataclass
class Programme:
    """Variables of at least 0, what each costs where it is 1, and what must hold of their sums."""

    costs: list[Cost] = field(default_factory=list)
    """Of each variable."""
    is_integer: list[bool] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def variable(self, cost: Cost | None = None, is_integer: bool = False) -> int:
        """A new one by its number; `is_integer`: it is 0 or 1."""
        self.costs.append(cost or Cost())
        self.is_integer.append(is_integer)
        return len(self.costs) - 1

    def charge(self, variables: Iterable[int], cost: Cost) -> None:
        """Adds `cost` where one of `variables` is 1."""
        for variable in variables:
            self.costs[variable] += cost

    def row(self, terms: Iterable[tuple[Variables, float]], low: float, high: float) -> None:
        """Demands that a sum of variables, each times the factor beside it, is from `low` to `high`."""
        coefficients: dict[int, float] = {}
        for variables, factor in terms:
            for variable in variables:
                coefficients[variable] = coefficients.get(variable, 0.0) + factor
        self.rows.append((coefficients, low, high))

    def any_of(self, indicators: Sequence[Variables], cost: Cost) -> None:
        """Adds `cost` once where at least one of `indicators` is 1."""
        if cost == Cost():
            return
        if len(indicators) == 1:
            self.charge(indicators[0], cost)
            return
        shared = self.variable(cost)
        for indicator in indicators:
            self.row([((shared,), 1.0), (indicator, -1.0)], 0.0, np.inf)

    def solution(self, objective: np.ndarray, more: Sequence[Row]) -> np.ndarray | None:
        """The values for which `objective` is least, also under `more` rows; None where nothing fulfils all."""
        # Half a second to import, which nobody else needs.
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
