"""The rows of a dataset: one small class for each kind of training data, and the columns that each kind has.

The columns are the field's (TRL's "dataset formats"). A value is text, or a conversation: a list of messages, each with
a `role` and a `content`. The functions below report rows that cannot be used.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hybrid_engine.rlhf.options.shared import DatasetOptions
from hybrid_engine.rlhf.runs.run_log import say

Message = dict[str, Any]
Turns = str | list[Message]
"""Text, or the messages of a conversation."""
FORMATS: dict[str, frozenset[str]] = {
    "labelled answers": frozenset({"prompt", "completion", "label"}),
    "preference pairs": frozenset({"chosen", "rejected"}),
    "conversations": frozenset({"messages"}),
    "prompts with answers": frozenset({"prompt", "completion"}),
    "prompts": frozenset({"prompt"}),
    "plain text": frozenset({"text"}),
}
"""Formats of a dataset by their columns: the first whose columns are all there applies."""
R = TypeVar("R")
T = TypeVar("T")
NUM_SHOWN = 5
OWN_ROWS = "the task that is learned without --dataset"


def detect_format(columns: Collection[str]) -> str | None:
    """The entry of `FORMATS` for a dataset with these columns; None if there is none."""
    return next((name for name, needed in FORMATS.items() if needed <= set(columns)), None)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Fields that every kind of row has."""

    place: str = "this row"
    """Its place, for errors: `--dataset='data.jsonl': line 3`."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The dataset's other columns by name: reference values for a reward, and `tools` for a chat template."""


@dataclass(frozen=True, kw_only=True)
class PromptRow(Row):
    """A prompt that a model answers."""

    prompt: Turns


@dataclass(frozen=True, kw_only=True)
class CompletionRow(Row):
    """A prompt and the answer that is learned; both are text or both conversations."""

    prompt: Turns
    completion: Turns


@dataclass(frozen=True, kw_only=True)
class ConversationRow(Row):
    """A whole conversation, of which the assistant's turns are learned."""

    messages: list[Message]


@dataclass(frozen=True, kw_only=True)
class TextRow(Row):
    """Text of which every token is learned."""

    text: str


@dataclass(frozen=True, kw_only=True)
class PreferenceRow(Row):
    """Two different answers to one prompt; all three are text or all three conversations."""

    prompt: Turns
    chosen: Turns
    rejected: Turns
    margin: float | None = None
    """The margin by which `chosen` is better, in units of the reward; None if the dataset has no such column."""


@dataclass(frozen=True, kw_only=True)
class LabelledRow(Row):
    """An answer to a prompt and whether it is good; both are text or both conversations."""

    prompt: Turns
    completion: Turns
    label: bool


LearnedRow = CompletionRow | ConversationRow | TextRow
"""The rows of supervised training."""


def texts_of(row: LearnedRow) -> list[str]:
    """All text in `row`, in order, to train a tokenizer on."""
    if isinstance(row, TextRow):
        return [row.text]
    parts: list[Turns] = [row.messages] if isinstance(row, ConversationRow) else [row.prompt, row.completion]
    texts = [part if isinstance(part, str) else [turn.get("content") for turn in part] for part in parts]
    flat = [text for part in texts for text in ([part] if isinstance(part, str) else part)]
    return [text for text in flat if isinstance(text, str)]


OfDataSet = TypeVar("OfDataSet", bound=Row)


@dataclass
class _BadRows:
    """Rows that cannot be used and are not reported yet."""

    source: str = ""
    """The option that names the dataset of the first."""
    problems: list[str] = field(default_factory=list)
    num_read: int = 0
    """Number of rows that were read, including good ones."""

    def tell(self) -> None:
        """Raises ValueError if there are any."""
        if self.problems:
            _tell(self.problems, max(self.num_read, len(self.problems)), self.source, skips=False)


_UNTOLD: ContextVar[_BadRows | None] = ContextVar("rows that wait to be told", default=None)


@contextmanager
def told_together(*, waits: bool = True) -> Iterator[None]:
    """Reports rows that cannot be used at the end of the context, or in place of another ValueError.

    Args:
        waits: False if the context contains work that must not begin before bad rows are reported.
    """
    untold = _BadRows()
    token = _UNTOLD.set(untold if waits else None)
    try:
        yield
    except ValueError:
        untold.tell()
        raise
    finally:
        _UNTOLD.reset(token)
    untold.tell()


def each_good(
    rows: Sequence[R], make: Callable[[R], T], source: str, *, skips: bool, is_reading: bool = False
) -> tuple[list[R], list[T]]:
    """The rows for which `make` succeeds, and its results.

    Args:
        rows: of a dataset.
        make: raises ValueError, naming the row, for one that cannot be used.
        source: the option that names the dataset, as it is typed.
        skips: whether rows that cannot be used are left out, which is logged; otherwise they are an error.
        is_reading: whether `rows` are all rows of a dataset, and not those that an earlier step left.

    Raises:
        ValueError: with the number of all rows that cannot be used and the problems of the first of them; with `skips`
            only if there are no others. Inside `told_together` it is raised later, if there are other rows.
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
    untold = None if skips else _UNTOLD.get()
    if untold is None:
        if problems:
            _tell(problems, len(rows), source, skips=skips)
        return kept, made
    untold.num_read += len(rows) * is_reading
    untold.source = untold.source or source
    untold.problems += problems
    if rows and not kept:  # later steps could only report that there are no rows
        untold.tell()
    return kept, made


def encode_each(
    config: DatasetOptions, rows: Sequence[OfDataSet], encode: Callable[[OfDataSet], T]
) -> tuple[list[OfDataSet], list[T]]:
    """`each_good` for the rows of `--dataset`, or of a recipe's own task; `encode` makes their tokens."""
    kept, made = each_good(rows, encode, shown_source(config, rows), skips=config.skip_bad_rows)
    say_what_is_gone(rows, kept)
    return kept, made


def shown_source(config: DatasetOptions, rows: Sequence[Row]) -> str:
    """The option that names the dataset of `rows` as it is typed; without one they are the recipe's own."""
    if config.dataset is None:
        return OWN_ROWS
    data_sets = {row.place.rpartition(": ")[0] for row in rows}
    return (data_sets.pop() if len(data_sets) == 1 else "") or config.source.shown


def say_what_is_gone(rows: Sequence[Row], kept: Sequence[Row]) -> None:
    """Logs a line for each dataset of a mixture that has some of `rows` and none of `kept`, the rows that are left."""
    if len(kept) == len(rows) or not kept:  # nothing or everything is left out; the latter is reported elsewhere
        return
    counts, left = (Counter(row.place.rpartition(": ")[0] for row in part) for part in (rows, kept))
    for data_set, count in counts.items():
        if data_set not in left:
            say(f"{data_set}: none of its {count} rows remains")


def _tell(problems: Sequence[str], num_rows: int, source: str, *, skips: bool) -> None:
    is_all = len(problems) == num_rows
    remedy = "" if source == OWN_ROWS else f"; --skip-bad-rows leaves {'it' if len(problems) == 1 else 'them'} out"
    if skips and not is_all:
        say(
            f"--skip-bad-rows: {source}: {len(problems)} of {num_rows} rows are left out: {_first_of(problems, source)}"
        )
    elif skips:
        raise ValueError(f"--skip-bad-rows leaves none of {num_rows} rows of {source}: {_first_of(problems, source)}")
    elif len(problems) == 1:
        raise ValueError(f"{problems[0]}{remedy}")
    else:
        raise ValueError(
            f"{source}: {len(problems)} of {num_rows} rows cannot be used: {_first_of(problems, source)}{remedy}"
        )


def _first_of(problems: Iterable[str], source: str) -> str:
    """The first problems, without the source that the line already names."""
    shown = [problem.removeprefix(f"{source}: ") for problem in problems]
    more = len(shown) - NUM_SHOWN
    return " | ".join(shown[:NUM_SHOWN]) + (f" | and {more} more" if more > 0 else "")
