"""The passes of an optimizer step: assigns rows to them, and makes them smaller when memory runs out.

A loss must be a share of the step's, so that it does not depend on how the rows are divided.

In each pass the processes exchange their errors. If one of them ran out of memory, all begin the step again with passes
of half the size, and later steps keep that size. Any other error ends the run on all.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeGuard

import torch

from hybrid_engine.config.checks import check_budget_holds
from hybrid_engine.distributed.processes import gather_objects, get_world_size
from hybrid_engine.distributed.verdict import agree, everyone, forget_frames, is_out_of_memory
from hybrid_engine.rlhf.batches.packing import Layout, SharedPrompt, layout_of
from hybrid_engine.rlhf.batches.passes import Items, PassShape, Result, RunPasses, until_it_fits
from hybrid_engine.rlhf.runs.run_log import say

Figures = dict[str, tuple[float, float]]
"""(sum, count) of each figure of a pass, as `experience.evaluation.step_means` takes them."""
DeviceFigures = dict[str, tuple[torch.Tensor | float, torch.Tensor | float]]
"""The same with 0-dimensional tensors that are still to be read: reading one waits for all work of the device."""


def check_budget(budget: int, lengths: Iterable[tuple[int, ...]]) -> None:
    """Raises ValueError if the largest item of these lengths does not fit into `--tokens-per-micro-batch`.

    A budget of 0 has no limit.
    """
    largest, item = max(((_cells(Layout.ROWS, [item]), item) for item in lengths), default=(0, ()))
    check_budget_holds(budget, largest, max(item, default=0))


def deal(items: Items, engine: Any, sizes: RunPasses) -> list[list[int]]:
    """Indices of `items` by forward pass, of similar length within a pass; as many passes on every process. Collective.

    Args:
        items: of this process; all processes have the same number. If passes share prompts, items with one prompt go
            into the same pass where there is room. Padded rows are padded on both sides of the prompts' end.
        engine: without a budget a pass has its `train_micro_batch_size_per_gpu()` items, or fewer if that many ran out
            of memory before.
        sizes: with the tokens of a pass, padding included; the passes are as equal as possible.
    """
    if not sizes.budget:
        size = engine.train_micro_batch_size_per_gpu()
        return deal_by_number(items, min(size, sizes.fitting or size))
    check_budget(sizes.budget, items.lengths)
    fill = filling(items, layout_of(engine))
    budget = min(sizes.budget, sizes.fitting or sizes.budget)  # a larger item is a pass by itself
    num_parts = max(gather_objects(len(fill(budget))))
    return _as_many(_evenly(fill, budget, num_parts), num_parts)


def deal_by_number(items: Items, size: int) -> list[list[int]]:
    """Indices of `items` by forward pass, `size` in each, as `deal` makes them without a budget; local."""
    order = _by_length(items)
    return [order[first : first + size] for first in range(0, len(order), size)]


def fill_evenly(items: Items, layout: Layout, budget: int) -> list[list[int]]:
    """Indices of `items` by forward pass, as `deal` makes them under a budget on one process; local."""
    fill = filling(items, layout)
    return _evenly(fill, budget, len(fill(budget)))


def filling(items: Items, layout: Layout) -> Callable[[int], list[list[int]]]:
    """A function from a budget in tokens to passes of `items`, the longest first; a pass holds at least one item."""
    order = _by_length(items)[::-1]
    if layout is Layout.PADDED:
        return partial(_fill_padded, [items.take([index]).shape(layout) for index in range(len(items))], order)
    if layout is not Layout.SPANS:
        return partial(_fill, items, order, layout)
    numbers: dict[SharedPrompt, SharedPrompt] = {}  # stands in for tokens, which would be hashed repeatedly
    for index in order:
        for prompt in items.prompts[index]:
            numbers.setdefault(prompt, SharedPrompt(len(numbers), prompt.length))
    numbered = Items(items.lengths, [tuple(numbers[prompt] for prompt in item) for item in items.prompts])
    longest: dict[SharedPrompt, int] = {}
    for index in order:
        longest.setdefault(numbered.prompts[index][0], max(items.lengths[index]))
    order.sort(key=lambda index: (-longest[numbered.prompts[index][0]], numbered.prompts[index][0]))
    return partial(_fill_sharing, numbered, order)


def _by_length(items: Items) -> list[int]:
    return sorted(range(len(items)), key=lambda index: max(items.lengths[index]))


def _evenly(fill: Callable[[int], list[list[int]]], budget: int, num_parts: int) -> list[list[int]]:
    """The parts of the smallest budget, up to `budget`, that makes at most `num_parts` of them."""
    low, high = 1, budget
    while num_parts > 1 and low < high:  # a single part is the same for any budget
        middle = (low + high) // 2
        low, high = (low, middle) if len(fill(middle)) <= num_parts else (middle + 1, high)
    return fill(high)


def _as_many(parts: list[list[int]], num_parts: int) -> list[list[int]]:
    """`parts` with the largest halved until there are `num_parts`; there must be at least as many items."""
    while len(parts) < num_parts:
        largest = max(parts, key=len)
        parts[parts.index(largest) : parts.index(largest) + 1] = _halves(largest)
    return parts


def _cells(layout: Layout, lengths: Iterable[tuple[int, ...]]) -> int:
    return layout.num_cells(sorted((length for item in lengths for length in item), reverse=True))


def _fill(items: Items, order: list[int], layout: Layout, budget: int) -> list[list[int]]:
    """Fills passes in which nothing is shared with the items in `order`."""
    tokens = [0, *accumulate(sum(items.lengths[index]) for index in order)]
    parts, first = list[list[int]](), 0
    while first < len(order):
        # Partly empty rows make it fewer items than tokens alone would.
        low, high = first + 1, max(first + 1, bisect_right(tokens, tokens[first] + budget) - 1)
        while low < high:
            middle = (low + high + 1) // 2
            fits = _cells(layout, (items.lengths[index] for index in order[first:middle])) <= budget
            low, high = (middle, high) if fits else (low, middle - 1)
        parts.append(order[first:low])
        first = low
    return parts or [[]]


def _fill_padded(shapes: list[PassShape], order: list[int], budget: int) -> list[list[int]]:
    """Fills passes of padded rows: prompts left of one column, responses right of it, each as wide as the longest.

    `shapes`: the shape of each item by itself.
    """
    parts = list[list[int]]()
    num_rows = prompt = response = 0
    for index in order:
        own = shapes[index]
        wider = max(prompt, own.prompt), max(response, own.response)
        if not parts or (num_rows + own.rows) * sum(wider) > budget:
            parts.append([])
            num_rows, wider = 0, (own.prompt, own.response)
        parts[-1].append(index)
        num_rows += own.rows
        prompt, response = wider
    return parts or [[]]


def _fill_sharing(items: Items, order: list[int], budget: int) -> list[list[int]]:
    """Fills passes along spans, where sequences with one prompt follow a single copy of it."""
    parts, cells = list[list[int]](), 0
    number_of = Counter[SharedPrompt]()
    for index in order:
        added = _added(items, index, number_of)
        if not parts or cells + added > budget:
            parts.append([])
            number_of.clear()
            cells, added = 0, _added(items, index, number_of)
        parts[-1].append(index)
        number_of.update(items.prompts[index])
        cells += added
    return parts or [[]]


def _added(items: Items, index: int, number_of: Counter[SharedPrompt]) -> int:
    """Cells that an item adds to a pass that already has `number_of` sequences of each prompt."""
    added = sum(items.lengths[index])
    for prompt, number in Counter(items.prompts[index]).items():
        before = number_of[prompt]
        added -= prompt.cells_spared(before + number) - prompt.cells_spared(before)
    return added


def _halves(part: list[int]) -> list[list[int]]:
    middle = (len(part) + 1) // 2
    return [part[:middle], part[middle:]]


class TrainingPasses:
    """The forward and backward passes of one optimizer step; collective.

        passes = TrainingPasses([actor], items, sizes)
        for rows in passes:
            with passes.fitting():
                actor.backward(passes.loss(partial(loss_of, rows)))
        actor.step()

    If a process runs out of memory, the loop begins again on all of them with passes of half the size; the sum of
    losses and gradients is the same. Keep no loss in a variable: it would hold the memory of a pass that failed.
    """

    def __init__(self, engines: Sequence[Any], items: Items, sizes: RunPasses) -> None:
        """Divides `items`, which the step learns from.

        Args:
            engines: those that step after the loop; the first determines the layout of passes.
            items, sizes: as in `deal`; smaller sizes are kept in `sizes` for the later steps of the run.
        """
        self._engines = engines
        self._sizes = sizes
        self._division = _Division(engines[0], items, sizes)
        self._parts = deal(items, engines[0], sizes)
        self._number = 0
        self._figures: list[DeviceFigures] = []
        self._begins_again = False
        self._agreed: BaseException | None = None

    def __iter__(self) -> Iterator[list[int]]:
        """Indices of the items of each pass; every pass but the last ends a micro-step."""
        self._begin()  # also discards a gradient that was left from before this step
        while self._number < len(self._parts):
            is_last = self._number + 1 == len(self._parts)
            for engine in self._engines:
                engine.set_gradient_accumulation_boundary(is_last)
            self._figures.append({})
            yield self._parts[self._number]
            if self._begins_again:
                self._begin()
                continue
            self._number += 1
            for engine in () if is_last else self._engines:
                engine.step()

    def _begin(self) -> None:
        for engine in self._engines:
            engine.begin_step_again()
        self._number, self._begins_again = 0, False
        self._figures.clear()

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Wraps a pass: an error on one process is raised on all, unless all can begin again with smaller passes.

        Raises:
            RuntimeError: memory ran out, and each pass has a single item already.
        """
        error: BaseException | None = None
        try:
            shape = self._division.shape_of(self._parts[self._number])
            with self._sizes.training_pass(shape, has_gradients=self._number > 0):
                yield
        except BaseException as raised:
            error = raised
        try:
            self._tell(error)
        except RuntimeError as raised:
            smaller = self._division.smaller(self._parts) if is_out_of_memory(raised) else None
            if smaller is None:
                raise
            forget_frames(raised)
            say(self._division.line(self._parts))
            self._parts, self._begins_again = smaller, True

    def _tell(self, error: BaseException | None) -> None:
        """Raises this process's `error`, or that of another one; it is exchanged once."""
        if error is not None and error is self._agreed:
            raise error
        everyone().raise_together(error)

    def loss(self, compute: Callable[[], tuple[torch.Tensor, DeviceFigures]]) -> torch.Tensor:
        """The loss of a pass, for an engine's `backward()`.

        Args:
            compute: runs a forward pass; returns the pass's share of the step's loss, and figures. It may meet the
                other processes only in the engine's forward pass, or must fail on all of them alike; it may run several
                times on the same items.
        """
        try:
            loss, figures = agree(compute)
        except BaseException as error:
            self._agreed = error
            raise
        self._figures[-1] |= figures
        # Shares are added up, while an engine divides by the micro-batches and averages over processes.
        return loss * (self._engines[0].gradient_accumulation_steps() * get_world_size())

    def figures(self) -> list[Figures]:
        """The figures of each pass, which are read from the device together; called after the step."""
        return read_figures(self._figures)


def read_figures(parts: Sequence[DeviceFigures]) -> list[Figures]:
    """`parts` as numbers, with a single read of the device."""
    tensors = [number.detach() for part in parts for pair in part.values() for number in pair if _is_tensor(number)]
    # fp64 represents every dtype that occurs here exactly.
    numbers = iter(torch.stack([tensor.double() for tensor in tensors]).tolist() if tensors else [])

    def read(number: torch.Tensor | float) -> float:
        return next(numbers) if _is_tensor(number) else number

    return [{name: (read(total), read(count)) for name, (total, count) in part.items()} for part in parts]


def _is_tensor(number: torch.Tensor | float) -> TypeGuard[torch.Tensor]:
    return isinstance(number, torch.Tensor)


def measure_in_parts(
    engine: Any, items: Items, sizes: RunPasses, compute: Callable[[list[int]], Result]
) -> list[Result]:
    """The result of `compute` for each part of `items`, divided as a training step would divide them; collective.

    Begins again with halves when memory runs out, as `TrainingPasses` does, whose arguments these are. `compute` must
    meet the same conditions as there.
    """

    def run(parts: list[list[int]]) -> list[Result]:
        return [agree(partial(compute, part)) for part in parts]

    division = _Division(engine, items, sizes)
    return until_it_fits(run, deal(items, engine, sizes), division.smaller, division.line)


class _Division(NamedTuple):
    """Divides the items of a step of `engine` into passes that fit into memory."""

    engine: Any
    items: Items
    sizes: RunPasses

    def smaller(self, parts: list[list[int]]) -> list[list[int]] | None:
        """`parts` in halves, as many on each process, to whose size later steps keep; None for single items."""
        halves = [half for part in parts for half in (_halves(part) if len(part) > 1 else [part])]
        number = max(gather_objects(len(halves)))
        if number == len(parts):
            return None
        less = _as_many(halves, number)
        self.sizes.note_fitting(self.size(less))
        return less

    def line(self, parts: list[list[int]]) -> str:
        """The log line about `parts` that ran out of memory."""
        fitting, kind = self.sizes.fitting, "tokens" if self.sizes.budget else "rows"
        advice = f"--micro-batch-size {fitting} avoids it"
        if self.sizes.budget:  # a single long sequence may need a larger value
            advice = f"a smaller --tokens-per-micro-batch avoids it, {fitting} if the longest sequence allows that"
        return (
            f"out of memory in a pass over up to {self.size(parts)} {kind}: redone in halves, as later steps are; "
            f"{advice}"
        )

    def size(self, parts: list[list[int]]) -> int:
        """Size of the largest part over all processes, counted as `RunPasses.fitting`."""
        has_budget = self.sizes.budget > 0
        return max(gather_objects(max(self.shape_of(part).num_cells if has_budget else len(part) for part in parts)))

    def shape_of(self, part: list[int]) -> PassShape:
        """The shape of the pass over a part."""
        return self.items.take(part).shape(layout_of(self.engine))
