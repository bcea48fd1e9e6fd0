"""Rows that are too long: reported with other bad rows, or left out and counted under `--skip-too-long`."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

from hybrid_engine.rlhf.data.rows import Row, each_good, say_what_is_gone, shown_source
from hybrid_engine.rlhf.options.shared import DatasetOptions
from hybrid_engine.rlhf.runs.run_log import say


class Tokens(Protocol):
    """A row as tokens."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest sequence that a model reads of the row."""


R = TypeVar("R", bound=Row)
T = TypeVar("T", bound=Tokens)


class Limit(NamedTuple):
    """The largest number of tokens of a row; None: no limit."""

    tokens: int | None
    name: str
    """The origin of the limit, such as `--max-tokens=512`."""
    remedy: str
    """The remedy for a longer row, such as "raise it"."""


def limit_of(max_tokens: int | None, positions: int | None, model: str) -> Limit:
    """The limit of `--max-tokens`, or the positions of `model` if there are fewer; None is no bound."""
    if max_tokens is not None and (positions is None or max_tokens <= positions):
        return Limit(max_tokens, f"--max-tokens={max_tokens}", "raise it")
    return Limit(positions, f"the {positions} positions of {model}", "use a model with more")


def keep_fitting(
    config: DatasetOptions, rows: Sequence[R], tokens: Sequence[T], limit: Limit
) -> tuple[list[R], list[T]]:
    """The rows within `limit`, and their tokens.

    With `--skip-too-long` the others are left out, which is logged; without it they are bad rows, as `each_good` treats
    them.

    Args:
        config: options of the data set of these rows.
        rows: as read.
        tokens: of each row.
        limit: the largest number of tokens.

    Raises:
        ValueError: with the rows that are too long, and their lengths.
    """
    is_long = [limit.tokens is not None and entry.num_tokens > limit.tokens for entry in tokens]
    pairs = list(zip(rows, tokens, strict=True))
    if any(is_long) and config.skip_too_long:
        say(f"{sum(is_long)} of {len(rows)} rows have more tokens than {limit.name} and are left out")
        kept = [pair for pair, is_left_out in zip(pairs, is_long, strict=True) if not is_left_out]
    else:
        option = "" if config.skip_bad_rows else ", or leave out what is longer by --skip-too-long"
        remedies = iter([f"; {limit.remedy}{option}"])

        def check(pair: tuple[R, T]) -> None:
            row, found = pair[0], pair[1].num_tokens
            if limit.tokens is not None and found > limit.tokens:  # gives the remedy once: it is the same for all
                raise ValueError(f"{row.place} has {found} tokens, more than {limit.name}{next(remedies, '')}")

        kept, _ = each_good(pairs, check, shown_source(config, rows), skips=config.skip_bad_rows)
    say_what_is_gone(rows, [row for row, _ in kept])
    return [row for row, _ in kept], [found for _, found in kept]
