"""Runs passes that may exceed memory: retries them with half the size, on all processes alike.

After each pass the processes exchange their errors (`distributed/verdict.py`): if one of them ran out of memory, all
begin again with less; any other error ends the run on all. `RunPasses` keeps the sizes that fit, for the later passes
of a run. `Items`, `PassShape` and `Extent` describe what a pass holds and how large it is.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from hybrid_engine.distributed.processes import gather_objects, get_rank, get_world_size
from hybrid_engine.distributed.verdict import agree, forget_frames, is_out_of_memory
from hybrid_engine.rlhf.batches.packing import Layout, SharedPrompt, Span, count_copied, fit_rows, lay_out_spans
from hybrid_engine.rlhf.options.shared import RunOptions
from hybrid_engine.rlhf.runs.run_log import say

ROWS_PER_PASS = 32
"""Default number of rows of a forward pass without gradients."""
Size = TypeVar("Size")
Part = TypeVar("Part")
Result = TypeVar("Result")


def until_it_fits(
    run: Callable[[Size], Result],
    size: Size,
    smaller: Callable[[Size], Size | None],
    line: Callable[[Size], str],
) -> Result:
    """`run(size)`; when it runs out of memory, logs a line and runs again with `smaller(size)`.

    Collective if `run` is; it must then run out of memory on all processes alike.

    Raises:
        RuntimeError: `smaller` returned None, because there is no smaller size.
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


class PassShape(NamedTuple):
    """The rows of a pass, with the tokens of a row's prompt and of its response."""

    rows: int
    prompt: int
    response: int
    spans: tuple[tuple[int, int, int, int], ...] = ()
    """Spans of a single row, if attention goes along them: first cell and length of each, then those of its prefix."""
    padding: int = 0
    """Number of response tokens that are padding, which the head does not read."""

    @property
    def num_asked(self) -> int:
        """Tokens that the head reads."""
        return self.rows * self.response - self.padding

    @property
    def num_cells(self) -> int:
        """Tokens that the model reads, padding included."""
        return self.rows * (self.prompt + self.response)


class PassMeter(Protocol):
    """Measures the training passes of a run, as the memory plan does (`planning/comparison.py`)."""

    def training_pass(self, shape: PassShape, *, has_gradients: bool) -> AbstractContextManager[None]:
        """Wraps a forward and backward pass; `has_gradients`: those of earlier passes exist."""


class RunPasses:
    """The sizes of a run's passes: those of its options, and smaller ones since memory ran out.

    The same on all processes. Made once for a run; `TrainingPasses` and the passes without gradients take it.
    """

    def __init__(self, budget: int = 0, most_rows: int = 0) -> None:
        """Takes the sizes of the options.

        Args:
            budget: tokens of a training pass; 0: it has the samples of a micro-batch.
            most_rows: rows of a pass without gradients, at most; 0: the caller of a pass says how many.
        """
        self.budget = budget
        self.fitting: int | None = None
        """Tokens of the largest training pass since memory ran out, or samples without a budget; None: it did not."""
        self._most_rows = most_rows
        self._meter: PassMeter | None = None

    @classmethod
    def of(cls, config: RunOptions) -> "RunPasses":
        """The sizes for the options of a recipe."""
        return cls(config.tokens_per_micro_batch, config.rows_per_pass)

    def register_meter(self, meter: PassMeter) -> None:
        """Measures all later training passes by `meter`."""
        self._meter = meter

    def training_pass(self, shape: PassShape, *, has_gradients: bool) -> AbstractContextManager[None]:
        """Wraps a training pass, which is measured if a meter is registered."""
        return self._meter.training_pass(shape, has_gradients=has_gradients) if self._meter else nullcontext()

    def note_fitting(self, size: int) -> None:
        """Keeps later training passes to `size`: tokens, or samples without a budget."""
        self.fitting = min(size, self.fitting or size)

    def without_gradients(
        self,
        parts_of: Callable[[int], Sequence[Part]],
        run: Callable[[Part], Result],
        most: int = ROWS_PER_PASS,
    ) -> list[Result]:
        """The result of `run` for each of `parts_of(rows)`, whose parts have at most `rows` rows; collective.

        If one process runs out of memory, all begin again with half as many rows, and keep that number in later passes.

        Args:
            parts_of: returns at least one part; a process with fewer parts than others runs its last one again and
                drops the result.
            run: a forward pass without gradients. It may meet the other processes only in the model's forward pass, or
                must fail on all of them alike; it may run several times on the same rows.
            most: rows of a part, or fewer if the options or an earlier pass say so; the same on every process.

        Raises:
            RuntimeError: one process does not have memory for a single row.
        """

        def run_all(rows: int) -> list[Result]:
            parts = parts_of(rows)
            num_turns = max(gather_objects(len(parts)))
            return [agree(partial(run, parts[min(turn, len(parts) - 1)])) for turn in range(num_turns)][: len(parts)]

        return self.until_fewer_rows_fit(run_all, most)

    def until_fewer_rows_fit(self, run: Callable[[int], Result], most: int = ROWS_PER_PASS) -> Result:
        """`run(rows)` with up to `most` rows, halved with a log line each time memory runs out; local.

        Raises:
            RuntimeError: memory does not hold a single row.
        """

        def half(rows: int) -> int | None:
            self._most_rows = rows // 2 or self._most_rows
            return rows // 2 or None

        return until_it_fits(run, min(most, self._most_rows or most), half, _fewer_rows_line)


def _fewer_rows_line(rows: int) -> str:
    return (
        f"out of memory in a pass over {rows} rows without gradients: redone with {rows // 2}; --rows-per-pass "
        f"{rows // 2} avoids it"
    )


def split(items: Sequence[Part], size: int) -> list[Sequence[Part]]:
    """`items` in parts of `size`; the last part may be smaller."""
    return [items[first : first + size] for first in range(0, len(items), size)]


def turns(parts: Sequence[Part]) -> list[tuple[Part, bool]]:
    """This process's share of `parts`, the same list on all processes; all shares have the same length.

    So all processes gather weights together. Each part comes with a flag: False for a repetition of the last part,
    whose result does not count.
    """
    mine = range(get_rank(), -(-len(parts) // get_world_size()) * get_world_size(), get_world_size())
    return [(parts[min(turn, len(parts) - 1)], turn < len(parts)) for turn in mine]


class Item(Protocol):
    """Sequences that stay together in a pass: a single one, or the two of a pair."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""

    @property
    def prompts(self) -> tuple[SharedPrompt, ...]:
        """The prompt of each sequence."""


@dataclass(frozen=True)
class Items:
    """Items that one step learns from."""

    lengths: Sequence[tuple[int, ...]]
    """Tokens of each item's sequences."""
    prompts: Sequence[tuple[SharedPrompt, ...]]
    """The prompt of each sequence; the rest of it is a response."""

    @classmethod
    def of(cls, items: Iterable[Item]) -> "Items":
        """The items for encoded answers with their prompts, or for pairs of them."""
        given = list(items)
        return cls([item.lengths for item in given], [item.prompts for item in given])

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences, counting shared prompts each time."""
        return sum(map(sum, self.lengths))

    def take(self, indices: Iterable[int]) -> "Items":
        """The items at `indices`."""
        chosen = list(indices)
        return Items([self.lengths[index] for index in chosen], [self.prompts[index] for index in chosen])

    def shape(self, layout: Layout) -> PassShape:
        """The shape of a pass over all items.

        In rows that hold several sequences, the response's share of a row is the responses' share of all tokens.
        """
        lengths = [length for item in self.lengths for length in item]
        prompts = [prompt for item in self.prompts for prompt in item]
        responses = [length - prompt.length for length, prompt in zip(lengths, prompts, strict=True)]
        if layout is Layout.PADDED:  # prompts left of one column, responses right of it
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
    """The amount of each thing in a pass that takes memory; a pass with less of each is smaller."""

    cells: int
    """Tokens that the model reads, padding included."""
    responses: int
    """Tokens that the head reads."""
    copied: int
    """Tokens of prompts whose keys and values are copied."""
    pairs: int
    """Pairs of tokens in attention masks, or in attention scores."""

    def is_within(self, other: "Extent") -> bool:
        """Whether this pass has no more of anything than the other."""
        return all(mine <= theirs for mine, theirs in zip(self, other, strict=True))


def extent_of(shape: PassShape) -> Extent:
    width = shape.prompt + shape.response
    copied, pairs = count_copied([Span(*span) for span in shape.spans]) if shape.spans else (0, shape.rows * width**2)
    return Extent(shape.num_cells, shape.num_asked, copied, pairs)
