"""Rows that are too long: refused by name, or left out and counted where `--skip-too-long` says so."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

from hybrid_engine.recipes.data.bad_rows import say_what_is_gone
from hybrid_engine.recipes.data.rows import Row
from hybrid_engine.recipes.runs.run_log import say


class Tokens(Protocol):
    """A row as tokens."""

    @property
    def num_tokens(self) -> int:
        """The tokens of the longest sequence that a model reads of the row."""


R = TypeVar("R", bound=Row)
T = TypeVar("T", bound=Tokens)


class Limit(NamedTuple):
    """How many tokens a row may have; None: as many as it likes."""

    tokens: int | None
    name: str
    """What sets it, such as `--max-tokens=512`."""
    remedy: str
    """What to do about it, such as "raise it"."""


def limit_of(max_tokens: int | None, positions: int | None, model: str) -> Limit:
    """What `--max-tokens` lets in, or what `model` has positions for where that is less; None is no bound."""
    if max_tokens is not None and (positions is None or max_tokens <= positions):
        return Limit(max_tokens, f"--max-tokens={max_tokens}", "raise it")
    return Limit(positions, f"the {positions} positions of {model}", "use a model with more")


def keep_fitting(rows: Sequence[R], tokens: Sequence[T], limit: Limit, *, skips: bool) -> tuple[list[R], list[T]]:
    """The rows within `limit`, and their tokens; all of them, unless `skips` says that others are left out.

    Args:
        rows: as read.
        tokens: of each row.
        limit: the most that there may be.
        skips: whether rows that are too long are left out, which is said; else they are an error.

    Raises:
        ValueError: naming the first row that is too long.
    """
    lengths = [entry.num_tokens for entry in tokens]
    too_long = [] if limit.tokens is None else [index for index, found in enumerate(lengths) if found > limit.tokens]
    if not too_long:
        return list(rows), list(tokens)
    if skips:
        say(f"{len(too_long)} of {len(rows)} rows have more tokens than {limit.name} and are left out")
        left = sorted(set(range(len(rows))) - set(too_long))
        kept = [rows[index] for index in left]
        say_what_is_gone(rows, kept)
        return kept, [tokens[index] for index in left]
    others = f" (and {len(too_long) - 1} more rows are too long)" if len(too_long) > 1 else ""
    raise ValueError(
        f"{rows[too_long[0]].place} has {lengths[too_long[0]]} tokens, more than {limit.name}{others}; {limit.remedy}, "
        "shorten or remove what is too long, or leave it out by --skip-too-long"
    )
