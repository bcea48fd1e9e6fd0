"""The passes of an optimizer step: assigns rows to them, runs them, and makes them smaller when memory runs out.

A loss must be a share of the step's, so that it does not depend on how the rows are divided.

After each forward and each backward pass the processes exchange their errors. If one of them ran out of memory, all
begin the step again with passes of half the size, and later steps keep that size. Any other error ends the run on all.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import nn

from hybrid_engine.distributed.processes import gather_objects, get_world_size
from hybrid_engine.distributed.verdict import agree
from hybrid_engine.metrics.memory_use import MemoryUse, Pass
from hybrid_engine.rlhf.batches.packing import Layout, Prompt, layout_of
from hybrid_engine.rlhf.batches.passes import Items, Result, extent_of, until_it_fits
from hybrid_engine.rlhf.passes.pass_memory import PassShape

Figures = dict[str, tuple[float, float]]
"""(sum, count) of each figure of a pass, as `experience.evaluation.step_means` takes them."""
DeviceFigures = dict[str, tuple[torch.Tensor | float, torch.Tensor | float]]
"""The same with 0-dimensional tensors that are still to be read: reading one waits for all work of the device."""
LossOf = Callable[[list[int]], tuple[torch.Tensor, DeviceFigures]]
"""Runs a forward pass over the items at the given indices: returns their share of the step's loss, and its figures."""
_fitting: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Models whose passes ran out of memory: tokens of the largest pass since then, or items without a budget. The same on
all processes.
"""


def check_budget(budget: int, lengths: Iterable[tuple[int, ...]]) -> None:
    """Raises ValueError if the largest item of these lengths does not fit into `--tokens-per-micro-batch`.

    A budget of 0 has no limit.
    """
    largest, item = max(((_cells(Layout.ROWS, [item]), item) for item in lengths), default=(0, ()))
    if budget and largest > budget:
        raise ValueError(
            f"--tokens-per-micro-batch={budget} must hold the largest of what is learned from, {largest} tokens "
            f"(its longest sequence has {max(item)}); raise it to {largest} or more, or shorten the sequences"
        )


def deal(items: Items, engine: Any, budget: int) -> list[list[int]]:
    """Indices of `items` by forward pass, of similar length within a pass; as many passes on every process. Collective.

    Args:
        items: of this process; all processes have the same number. If passes share prompts, items with one prompt go
            into the same pass where there is room. Padded rows are padded on both sides of the prompts' end.
        engine: without a budget a pass has its `train_micro_batch_size_per_gpu()` items, or fewer if that many ran out
            of memory before.
        budget: tokens of a pass, padding included; the passes are as equal as possible. 0: there is none.
    """
    if not budget:
        size = engine.train_micro_batch_size_per_gpu()
        return deal_by_number(items, min(size, _fitting.get(engine.module, size)))
    check_budget(budget, items.lengths)
    fill = filling(items, layout_of(engine))
    budget = min(budget, _fitting.get(engine.module, budget))  # an item that is larger than that is a pass by itself
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
    numbers: dict[Prompt, Prompt] = {}  # stands in for tokens, which would be hashed repeatedly
    for index in order:
        for prompt in items.prompts[index]:
            numbers.setdefault(prompt, Prompt(len(numbers), prompt.length))
    numbered = Items(items.lengths, [tuple(numbers[prompt] for prompt in item) for item in items.prompts])
    longest: dict[Prompt, int] = {}
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
    number_of = Counter[Prompt]()
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


def _added(items: Items, index: int, number_of: Counter[Prompt]) -> int:
    """Cells that an item adds to a pass that already has `number_of` sequences of each prompt."""
    added = sum(items.lengths[index])
    for prompt, number in Counter(items.prompts[index]).items():
        before = number_of[prompt]
        added -= prompt.cells_spared(before + number) - prompt.cells_spared(before)
    return added


def _halves(part: list[int]) -> list[list[int]]:
    middle = (len(part) + 1) // 2
    return [part[:middle], part[middle:]]


def train_in_parts(
    engines: Sequence[Any], items: Items, budget: int, losses: Sequence[tuple[Any, LossOf]]
) -> list[Figures]:
    """One optimizer step of `engines` on `items`, with a forward and a backward pass for each part of them; collective.

    If a process runs out of memory, all begin again with parts of half the size; the sum of losses and gradients is the
    same.

    Args:
        engines: those that step; the first determines the layout of passes.
        items, budget: as in `deal`.
        losses: objects that run backward (engines, or roles of one), each with its loss. Each in turn goes forward and
            backward over a part. A loss may meet the other processes only in the engine's forward pass, or must fail on
            all of them alike; it may run several times on the same items.

    Returns:
        The figures of each part, which are read together after the step.

    Raises:
        RuntimeError: each part has a single item already.
    """
    passes, dealt = _Passes(engines[0], items, budget), deal(items, engines[0], budget)

    def run(parts: list[list[int]]) -> list[DeviceFigures]:
        if parts is not dealt:
            for engine in engines:
                engine.begin_step_again()
        return _run(engines, parts, [passes.shape_of(part) for part in parts], losses)

    for engine in engines:
        engine.begin_step_again()  # discards a gradient that was left from before this step
    figures = passes.run(run, dealt)
    for engine in engines:
        engine.step()
    return read_figures(figures)


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


def measure_in_parts(engine: Any, items: Items, budget: int, compute: Callable[[list[int]], Result]) -> list[Result]:
    """The result of `compute` for each part of `items`, divided as a training step would divide them; collective.

    Begins again with halves when memory runs out, as `train_in_parts` does, whose arguments these are. `compute` must
    meet the same conditions as a loss there.
    """

    def run(parts: list[list[int]]) -> list[Result]:
        return [agree(partial(compute, part)) for part in parts]

    return _Passes(engine, items, budget).run(run, deal(items, engine, budget))


class _Passes(NamedTuple):
    """Divides the items of a step of `engine` into passes that fit into memory."""

    engine: Any
    items: Items
    budget: int

    def run(self, run: Callable[[list[list[int]]], Result], parts: list[list[int]]) -> Result:
        """`run(parts)`, or of halves of them where memory runs out; collective."""
        return until_it_fits(run, parts, self.smaller, self.line)

    def smaller(self, parts: list[list[int]]) -> list[list[int]] | None:
        """`parts` in halves, as many on each process, to whose size later steps keep; None for single items."""
        halves = [half for part in parts for half in (_halves(part) if len(part) > 1 else [part])]
        number = max(gather_objects(len(halves)))
        if number == len(parts):
            return None
        less = _as_many(halves, number)
        size = self.size(less)
        _fitting[self.engine.module] = min(size, _fitting.get(self.engine.module, size))
        return less

    def line(self, parts: list[list[int]]) -> str:
        """The log line about `parts` that ran out of memory."""
        fitting = _fitting[self.engine.module]
        advice = f"--micro-batch-size {fitting} avoids it"
        if self.budget:  # a single long sequence may need a larger value
            advice = f"a smaller --tokens-per-micro-batch avoids it, {fitting} if the longest sequence allows that"
        return (
            f"out of memory in a pass over up to {self.size(parts)} {'tokens' if self.budget else 'rows'}: redone in "
            f"halves, as later steps are; {advice}"
        )

    def size(self, parts: list[list[int]]) -> int:
        """Size of the largest part over all processes, counted as in `_fitting`."""
        return max(gather_objects(max(self.shape_of(part).num_cells if self.budget else len(part) for part in parts)))

    def shape_of(self, part: list[int]) -> PassShape:
        """The shape of the pass over a part."""
        return self.items.take(part).shape(layout_of(self.engine))


def _run(
    engines: Sequence[Any], parts: list[list[int]], shapes: list[PassShape], losses: Sequence[tuple[Any, LossOf]]
) -> list[DeviceFigures]:
    """Runs all passes of an optimizer step, and ends each micro-step but the last."""
    figures = []
    for number, part in enumerate(parts):
        for engine in engines:
            engine.set_gradient_accumulation_boundary(number + 1 == len(parts))
        with measured_pass(engines[0], shapes[number], has_gradients=number > 0):
            found: DeviceFigures = {}
            for trained, loss_of in losses:
                loss, found_here = agree(partial(loss_of, part))
                # The losses are shares of the step's; an engine divides by the micro-batches and averages over
                # processes.
                scaled = loss * (engines[0].gradient_accumulation_steps() * get_world_size())
                agree(partial(trained.backward, scaled))
                del loss, scaled
                found |= found_here
            figures.append(found)
        if number + 1 < len(parts):
            for engine in engines:
                engine.step()
    return figures


def measured_pass(engine: Any, shape: PassShape, *, has_gradients: bool) -> AbstractContextManager[None]:
    """Measures the forward and backward passes of this shape, of which `engine` trains the first.

    Measures nothing where the engine's memory is not tracked.
    """
    use: MemoryUse | None = getattr(engine, "memory_use", None)
    if use is None:
        return nullcontext()
    generator = getattr(engine, "generator", None)
    cache_bytes = generator.workspace.allocated_bytes if generator is not None else 0
    of = Pass(shape, has_gradients=has_gradients, has_state=engine.global_steps > 0)
    return use.training_pass(of, extent_of(shape), cache_bytes)
