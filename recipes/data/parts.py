"""The rows of a run in two parts: to train on, and held out to measure on. No prompt is in both."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from hybrid_engine.recipes.data.held_out import R, earlier_prompt_keys, hold_out, prompt_text, row_keys
from hybrid_engine.recipes.data.reasoning_gym_rows import HELD_OUT, SCHEME
from hybrid_engine.recipes.data.sources import DataSource
from hybrid_engine.recipes.runs.run_log import say

Read = Callable[[DataSource], list[R]]


def load_parts(source: DataSource, read: Read[R], columns: Collection[str] = ()) -> tuple[list[R], list[R]]:
    """Training and held-out rows of a run's data, in the parts that the data set itself has, if it has any.

    Args:
        source: what the options say.
        read: of `reading.py`, for the rows that the recipe trains on.
        columns: those that the rewards read, by which rows with one prompt may be tasks of their own.

    Raises:
        ValueError: the data cannot be read, or one of the parts would be empty.
    """
    columns = source.row_key or columns
    rows = read_once(source, read, columns)
    if all(dataset.startswith(f"{SCHEME}:") for dataset in source.datasets):
        return rows, read_once(replace(source, split=HELD_OUT), read, columns)
    train, held_out = hold_out(rows, source.held_out_share, columns)
    train = _apart_from(held_out, train)
    check_parts(source, train, held_out)
    return train, held_out


def read_once(source: DataSource, read: Read[R], columns: Collection[str]) -> list[R]:
    """The rows of the data; with `--deduplicate` of those that say the same the first."""
    rows = read(source)
    if not source.deduplicates:
        return rows
    different: dict[Any, R] = {}
    for row, key in zip(rows, row_keys(rows, columns), strict=True):
        different.setdefault((key, *_answers(row)), row)
    say(f"--deduplicate: {len(rows) - len(different)} of {len(rows)} rows say what another says, and are left out")
    return list(different.values())


def check_parts(source: DataSource, train: Sequence[Any], held_out: Sequence[Any]) -> None:
    """ValueError where nothing is left to train on or, if some of it is to be held out, to measure."""
    if not train or (source.held_out_share and not held_out):
        raise ValueError(
            f"--held-out-share={source.held_out_share} of {source.shown} leaves {len(train)} rows to train on and "
            f"{len(held_out)} to measure: prompts are held out by their hash, rows of one prompt together; give more "
            "prompts, name the columns that tell rows of one prompt apart by --row-key, or change the share"
        )


def _apart_from(held_out: Sequence[R], train: list[R]) -> list[R]:
    """`train` without the conversations that answer a held-out prompt on their way."""
    keys = set(row_keys(held_out))
    kept = [row for row in train if keys.isdisjoint(earlier_prompt_keys(row))]
    if len(kept) < len(train):
        say(f"{len(train) - len(kept)} conversations answer a held-out prompt before their end, and are left out")
    return kept


def _answers(row: R) -> tuple[str, ...]:
    """What a row says besides its prompt and its other columns, in an order of its own."""
    fields = vars(replace(row, place="", columns={}))
    return tuple(prompt_text(value) if isinstance(value, list) else repr(value) for name, value in fields.items())
