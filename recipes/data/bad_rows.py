"""Rows that cannot be used: told all together, or left out and counted where `--skip-bad-rows` says so."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from hybrid_engine.recipes.data.rows import Row
from hybrid_engine.recipes.runs.options import DatasetOptions
from hybrid_engine.recipes.runs.run_log import say

R = TypeVar("R")
T = TypeVar("T")
OfDataSet = TypeVar("OfDataSet", bound=Row)
NUM_SHOWN = 5


def each_good(rows: Sequence[R], make: Callable[[R], T], source: str, *, skips: bool) -> tuple[list[R], list[T]]:
    """The rows from which `make` makes something, and what it makes of them.

    Args:
        rows: of a data set.
        make: raises ValueError, naming the row, for one that cannot be used.
        source: the option that names the data set, as it is typed.
        skips: whether rows that cannot be used are left out, which is said; else they are an error.

    Raises:
        ValueError: with the number of all rows that cannot be used and what is wrong with the first of them; with
            `skips` where there are no others.
    """
    kept: list[R] = []
    made: list[T] = []
    problems: list[str] = []
    for row in rows:
        try:
            made.append(make(row))
        except ValueError as error:
            problems.append(str(error))
        else:
            kept.append(row)
    if problems:
        _tell(problems, len(rows), source, skips=skips)
    return kept, made


def encode_each(
    config: DatasetOptions, rows: Sequence[OfDataSet], encode: Callable[[OfDataSet], T]
) -> tuple[list[OfDataSet], list[T]]:
    """`each_good` of the rows of `--dataset`, or of a recipe's own task, whose tokens `encode` makes."""
    kept, made = each_good(rows, encode, config.source.shown, skips=config.skip_bad_rows)
    say_what_is_gone(rows, kept)
    return kept, made


def say_what_is_gone(rows: Sequence[Row], kept: Sequence[Row]) -> None:
    """One line for each data set of a mixture that has some of `rows` and none of `kept`, which are left of them."""
    if len(kept) == len(rows) or not kept:  # nothing is left out, or all of it, which is told elsewhere
        return
    counts, left = (Counter(row.place.rpartition(": ")[0] for row in part) for part in (rows, kept))
    for data_set, count in counts.items():
        if data_set not in left:
            say(f"{data_set}: none of its {count} rows here is left")


def _tell(problems: Sequence[str], num_rows: int, source: str, *, skips: bool) -> None:
    is_all = len(problems) == num_rows
    if skips and not is_all:
        say(
            f"--skip-bad-rows: {source}: {len(problems)} of {num_rows} rows are left out: {_first_of(problems, source)}"
        )
    elif skips:
        raise ValueError(f"--skip-bad-rows leaves none of {num_rows} rows of {source}: {_first_of(problems, source)}")
    elif len(problems) == 1:
        raise ValueError(f"{problems[0]}; --skip-bad-rows leaves it out")
    else:
        raise ValueError(
            f"{source}: {len(problems)} of {num_rows} rows cannot be used: {_first_of(problems, source)}; "
            "--skip-bad-rows leaves them out"
        )


def _first_of(problems: Iterable[str], source: str) -> str:
    """The first problems, without the source that the line names already."""
    shown = [problem.removeprefix(f"{source}: ") for problem in problems]
    more = len(shown) - NUM_SHOWN
    return " | ".join(shown[:NUM_SHOWN]) + (f" | and {more} more" if more > 0 else "")
