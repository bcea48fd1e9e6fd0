"""What bench_rollout.py measured, as a table and as CSV rows."""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from common import Ceilings, Quantiles, Shape
from rich.table import Table
from rollout_engines import ModuleRollout
from roofline import Pass

BASELINE = ModuleRollout.name
# The least time of a rollout that only moves its bytes, that only computes, and that does both at once.
ROOFS: dict[str, Callable[[list[Pass], Ceilings], float]] = {
    "bandwidth": lambda passes, ceilings: sum(one.num_bytes for one in passes) / ceilings.bytes_per_second,
    "matrix": lambda passes, ceilings: sum(one.flops for one in passes) / ceilings.flops_per_second,
    "roofline": lambda passes, ceilings: sum(one.seconds(ceilings) for one in passes),
}


@dataclass(frozen=True)
class Run:
    """One timed rollout. `passes` are the fewest that its answers' lengths allow; none: they were not counted."""

    seconds: float
    tokens: int
    passes: list[Pass]


@dataclass
class Measured:
    """An engine in a case; `error` is why it has no runs."""

    peak_bytes: int = 0
    error: str | None = None
    runs: list[Run] = field(default_factory=list)

    @property
    def seconds(self) -> Quantiles:
        """Of the runs."""
        return Quantiles.of([run.seconds for run in self.runs])

    @property
    def tokens_per_second(self) -> Quantiles:
        """Of the runs."""
        return Quantiles.of([run.tokens / run.seconds for run in self.runs])

    def shares(self, ceilings: Ceilings) -> dict[str, float]:
        """Median over the runs of the time under each roof, by the time taken; empty if passes were not counted."""
        if not all(run.passes for run in self.runs):
            return {}
        return {
            name: statistics.median(least(run.passes, ceilings) / run.seconds for run in self.runs)
            for name, least in ROOFS.items()
        }


def ratio_to_baseline(measured: dict[str, Measured], name: str) -> float:
    """Median tokens per second over those of `model.generate()`."""
    return measured[name].tokens_per_second.p50 / measured[BASELINE].tokens_per_second.p50


def results_table(shape: Shape, dtype: str, results: dict[str, dict[str, Measured]], ceilings: Ceilings) -> Table:
    """`results` by case and engine."""
    title = f"{shape.prompts} prompts of {shape.prompt_tokens} tokens, up to {shape.new_tokens} new ones, {dtype}"
    table = Table("case", "engine", title=title)
    for name in ("seconds p50 [p20, p80]", "tokens/s", "to generate()", *ROOFS, "peak MiB"):
        table.add_column(name, justify="right")
    for case, measured in results.items():
        for name in measured:
            table.add_row(case, name, *_cells(measured, name, ceilings))
        table.add_section()
    return table


def _cells(measured: dict[str, Measured], name: str, ceilings: Ceilings) -> list[str]:
    one = measured[name]
    if one.error is not None:
        return [one.error]
    seconds = one.seconds
    return [
        f"{seconds.p50:.3f} [{seconds.p20:.3f}, {seconds.p80:.3f}]",
        f"{one.tokens_per_second.p50:,.0f}",
        f"{ratio_to_baseline(measured, name):.2f}x",
        *([f"{share:.1%}" for share in one.shares(ceilings).values()] or ["-"] * len(ROOFS)),
        f"{one.peak_bytes / 2**20:,.0f}",
    ]


def results_rows(
    results: dict[str, dict[str, Measured]], ceilings: Ceilings, columns: dict[str, Any]
) -> list[dict[str, Any]]:
    """A row per case and engine with `columns` in each; one that could not run has an error and empty figures."""
    rows = []
    for case, measured in results.items():
        figures = {name: _figures(measured, name, ceilings) for name in measured if measured[name].error is None}
        empty = dict.fromkeys(figures[BASELINE], "")
        rows += [
            {"case": case, "engine": name, **figures.get(name, empty), "error": one.error or "", **columns}
            for name, one in measured.items()
        ]
    return rows


def _figures(measured: dict[str, Measured], name: str, ceilings: Ceilings) -> dict[str, Any]:
    one = measured[name]
    rates = asdict(one.tokens_per_second)
    return {
        "tokens_p50": statistics.median(run.tokens for run in one.runs),
        **{f"seconds_{quantile}": round(value, 5) for quantile, value in asdict(one.seconds).items()},
        **{f"tokens_per_second_{quantile}": round(value, 1) for quantile, value in rates.items()},
        "ratio": round(ratio_to_baseline(measured, name), 4),
        **{f"{roof}_share": round(share, 5) for roof, share in one.shares(ceilings).items()},  # none of a family
        "peak_bytes": one.peak_bytes,
    }
