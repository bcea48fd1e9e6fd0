"""Passes that memory does not hold are begun again by halves, on all processes alike; passes without gradients, which
then keep to the rows that fitted.

After each pass the processes tell each other of errors (`distributed/verdict.py`): where memory ended on one of them,
all begin again with less; any other error ends the run on all.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from hybrid_engine.distributed.processes import gather_objects, get_rank, get_world_size
from hybrid_engine.distributed.verdict import agree, forget_frames, is_out_of_memory
from hybrid_engine.rlhf.batches.packing import Layout, Prompt, fit_rows, lay_out_spans
from hybrid_engine.rlhf.batches.spans import Span, count_copied
from hybrid_engine.rlhf.passes.pass_memory import PassShape
from hybrid_engine.rlhf.runs.run_log import say

ROWS_PER_PASS = 32
"""Rows of a forward pass without gradients, if nothing else is said."""
Size = TypeVar("Size")
Part = TypeVar("Part")
Result = TypeVar("Result")
_limits: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def until_it_fits(
    run: Callable[[Size], Result],
    size: Size,
    smaller: Callable[[Size], Size | None],
    line: Callable[[Size], str],
) -> Result:
    """`run(size)`; where its memory is not enough, again with what is `smaller`, after a line about the size before.

    Collective where `run` is, which then must run out of memory on all processes alike.

    Raises:
        RuntimeError: there is no smaller size: `smaller` gave None.
    """
    while True:
        try:
            return run(size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            less = smaller(size)
            if less is None:
                raise
            forget_frames(error)
        say(line(size))
        size = less


def limit_rows(model: nn.Module, most: int) -> None:
    """From now on passes without gradients of `model`, or of the model of an engine, have so many rows; 0: no limit."""
    if most:
        _limits[getattr(model, "module", model)] = most


def rows_per_pass(model: nn.Module, most: int = ROWS_PER_PASS) -> int:
    """Rows of a forward pass of `model` without gradients: `most`, or fewer where `limit_rows` said so."""
    return min(most, _limits.get(getattr(model, "module", model), most))


def in_passes(
    model: nn.Module,
    parts_of: Callable[[int], Sequence[Part]],
    run: Callable[[Part], Result],
    most: int = ROWS_PER_PASS,
) -> list[Result]:
    """What `run` gives of each of `parts_of(rows)`, whose parts have so many rows at most; collective.

    Where memory ends on one process, all begin again with half as many rows, and keep to that in later passes.

    Args:
        model: or an engine, whose passes they are.
        parts_of: one part at least; a process with fewer than others runs its last once more, whose result is dropped.
        run: a forward pass without gradients. It meets the other processes nowhere but in the model's forward pass, or
            fails on all of them alike; it may run several times on the same rows.
        most: rows of a part, or fewer as `rows_per_pass` says; alike on every process.

    Raises:
        RuntimeError: the memory of one process does not hold a single row.
    """

    def run_all(rows: int) -> list[Result]:
        parts = parts_of(rows)
        num_turns = max(gather_objects(len(parts)))
        return [agree(partial(run, parts[min(turn, len(parts) - 1)])) for turn in range(num_turns)][: len(parts)]

    return until_fewer_rows_fit(model, run_all, most)


def until_fewer_rows_fit(model: nn.Module, run: Callable[[int], Result], most: int = ROWS_PER_PASS) -> Result:
    """`run(rows)` with as many rows as `rows_per_pass` says, or half as many as often as memory ends, with a line.

    Passes of `model` have no more rows from then on.

    Raises:
        RuntimeError: memory does not hold a single row.
    """

    def half(rows: int) -> int | None:
        limit_rows(model, rows // 2)
        return rows // 2 or None

    return until_it_fits(run, rows_per_pass(model, most), half, _fewer_rows_line)


def _fewer_rows_line(rows: int) -> str:
    return (
        f"out of memory in a pass over {rows} rows without gradients: redone with {rows // 2}; --rows-per-pass "
        f"{rows // 2} avoids it"
    )


def split(items: Sequence[Part], size: int) -> list[Sequence[Part]]:
    """`items` in parts of `size`, the last of what is left."""
    return [items[first : first + size] for first in range(0, len(items), size)]


def turns(parts: Sequence[Part]) -> list[tuple[Part, bool]]:
    """This process's of `parts`, which are alike on all processes: as many on each, since they gather weights together.

    Beside each part stands whether it counts; one that does not is the last once more.
    """
    mine = range(get_rank(), -(-len(parts) // get_world_size()) * get_world_size(), get_world_size())
    return [(parts[min(turn, len(parts) - 1)], turn < len(parts)) for turn in mine]


class Item(Protocol):
    """What stays together in a pass: a sequence, or the two of a pair."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """What each begins with."""


@dataclass(frozen=True)
class Items:
    """Items that are learned from at once."""

    lengths: Sequence[tuple[int, ...]]
    """Tokens of each item's sequences."""
    prompts: Sequence[tuple[Prompt, ...]]
    """What each of them begins with; the rest is a response."""

    @classmethod
    def of(cls, items: Iterable[Item]) -> "Items":
        """Answers behind their prompts, or pairs of them, as they are encoded."""
        given = list(items)
        return cls([item.lengths for item in given], [item.prompts for item in given])

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Of all sequences, whatever they share."""
        return sum(map(sum, self.lengths))

    def take(self, indices: Iterable[int]) -> "Items":
        """The items at `indices`."""
        chosen = list(indices)
        return Items([self.lengths[index] for index in chosen], [self.prompts[index] for index in chosen])

    def shape(self, layout: Layout) -> PassShape:
        """Of a pass over all of them; where rows hold several sequences, with the responses' share of all tokens."""
        lengths = [length for item in self.lengths for length in item]
        prompts = [prompt for item in self.prompts for prompt in item]
        responses = [length - prompt.length for length, prompt in zip(lengths, prompts, strict=True)]
        if layout is Layout.PADDED:  # prompts to the left, the rest to the right of one column
            prompt, response = max((prompt.length for prompt in prompts), default=0), max(responses, default=0)
            padding = len(lengths) * response - sum(responses)
            return PassShape(len(lengths), prompt, response, padding=padding)
        if layout is Layout.ROWS:
            width = max(lengths, default=0)
            response = -(-width * sum(responses) // max(1, sum(lengths)))
            num_rows = len(fit_rows(lengths))
            return PassShape(num_rows, width - response, response, padding=num_rows * response - sum(responses))
        spans = tuple(lay_out_spans(lengths, prompts)) if layout is Layout.SPANS else ()
        num_cells = sum(span.length for span in spans) if spans else sum(lengths)
        return PassShape(1, num_cells - sum(responses), sum(responses), spans)


class Extent(NamedTuple):
    """How much there is in a pass of all that takes memory; a pass with less of each is smaller."""

    cells: int
    """Tokens that the model reads, padding included."""
    responses: int
    """Those of them that the head reads."""
    copied: int
    """Tokens of prompts whose keys and values are copied."""
    pairs: int
    """Pairs of tokens in masks of attention, or in its scores."""


def extent_of(shape: PassShape) -> Extent:
    """The extent of a pass."""
    width = shape.prompt + shape.response
    copied, pairs = count_copied([Span(*span) for span in shape.spans]) if shape.spans else (0, shape.rows * width**2)
    return Extent(shape.num_cells, shape.num_asked, copied, pairs)
