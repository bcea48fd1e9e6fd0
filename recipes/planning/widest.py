"""The largest training pass of a process of a run, from the lengths of what it learns."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, product
from typing import Any, NamedTuple

from hybrid_engine.recipes.data.micro_batches import check_budget, deal_by_number, fill_evenly, filling
from hybrid_engine.recipes.data.packable import expected_layout
from hybrid_engine.recipes.data.packing import Layout, Prompt
from hybrid_engine.recipes.data.pass_shapes import Items, shape_of, size_of
from hybrid_engine.recipes.data.spans import TOGETHER
from hybrid_engine.recipes.planning.read import Learned, Read
from hybrid_engine.recipes.runs.engine_config import largest_micro_batch
from hybrid_engine.training.pass_memory import PassShape

MOST_LAID_OUT = 5000
"""Items of steps that are laid out, each some 0.1 ms: padding, and items that stay together, leave passes less than
full."""


class Widest(NamedTuple):
    """The largest pass of some steps."""

    shape: PassShape
    has_gradients: bool
    """Whether gradients may be there when it begins: those of earlier passes of a step."""
    has_state: bool = True
    """Whether the optimizer has its state then: not in the first step."""


def widest_passes(read: Read, config: Any, per_process: int, num_processes: int) -> list[Widest]:
    """The largest pass behind the first step, and the first step's, where that is known and larger still.

    Args: as of `widest_pass`.
    """
    if read.learned is None:
        return [widest_pass(read, config, per_process, num_processes)]
    batches = read.learned.batches
    parts = [read.learned._replace(batches=part) for part in (batches[:1], batches[1:]) if part]
    layout = _layout_of(read, config)
    first, *later = (_widest_of(_steps(part, num_processes), config, layout, per_process) for part in parts)
    is_largest = all(size_of(first.shape) > size_of(other.shape) for other in later)
    return [*later, *([first._replace(has_state=False)] if is_largest else [])]


def widest_pass(read: Read, config: Any, per_process: int, num_processes: int) -> Widest:
    """The largest pass of a run.

    Args:
        read: what the run learns; of answers that it is still to draw the largest pass that may be.
        config: of the recipe.
        per_process: items of a step on one process.
        num_processes: of the run.
    """
    layout = _layout_of(read, config)
    if read.learned is None:
        return _widest_drawn(read, config, layout, per_process)
    return _widest_of(_steps(read.learned, num_processes), config, layout, per_process)


def _layout_of(read: Read, config: Any) -> Layout:
    return expected_layout(config, read.first) if config.tokens_per_micro_batch else Layout.PADDED


class _Step(NamedTuple):
    """What a process learns from at once."""

    items: Items
    prompts: list[Prompt] | None

    @property
    def num_tokens(self) -> int:
        """Of all sequences, whatever they share."""
        return sum(map(sum, self.items))

    def take(self, indices: Sequence[int]) -> "_Step":
        """The items at `indices`."""
        prompts = None if self.prompts is None else [self.prompts[index] for index in indices]
        return _Step([self.items[index] for index in indices], prompts)


def _steps(learned: Learned, num_processes: int) -> list[_Step]:
    """Those of all processes."""
    everything, ranks = _Step(learned.items, learned.prompts), range(num_processes)
    return [everything.take(batch[rank::num_processes]) for batch in learned.batches for rank in ranks]


def _widest_of(steps: list[_Step], config: Any, layout: Layout, per_process: int) -> Widest:
    """The largest pass of `steps`, dealt out as the run will deal them."""
    budget = config.tokens_per_micro_batch
    if budget:
        check_budget(budget, [item for step in steps for item in step.items])
        steps = _likely(steps, budget)
        dealt = [fill_evenly(step.items, step.prompts, layout, budget) for step in steps]
    else:
        size = largest_micro_batch(per_process, config.micro_batch_size)
        dealt = [deal_by_number(step.items, size) for step in steps]
    passes = (step.take(part) for step, parts in zip(steps, dealt, strict=True) for part in parts)
    widest = max((shape_of(*one, layout) for one in passes), key=size_of)
    return Widest(widest, has_gradients=any(len(parts) > 1 for parts in dealt))


def _likely(steps: list[_Step], budget: int) -> list[_Step]:
    """Of the steps with as many passes each those with most tokens.

    A step just above the budget has passes of half of it.
    """
    alike = defaultdict[int, list[_Step]](list)
    for step in sorted(steps, key=lambda step: -step.num_tokens):
        alike[-(-step.num_tokens // budget)].append(step)
    most = max(1, MOST_LAID_OUT // max(1, sum(len(group[0].items) for group in alike.values())))
    return list(chain.from_iterable(group[:most] for group in alike.values()))


def _widest_drawn(read: Read, config: Any, layout: Layout, per_process: int) -> Widest:
    """The largest pass over answers that are still to be drawn."""
    drawn, budget = _Drawn.of(read, config), config.tokens_per_micro_batch
    if not budget:
        size = largest_micro_batch(per_process, config.micro_batch_size)
        prompt = drawn.prompts[-1]
        shape = shape_of(*drawn.step(size, prompt, drawn.longest_answer(prompt), 1), layout)
        return Widest(shape, has_gradients=per_process > size)
    longest = drawn.step(per_process, drawn.prompts[-1], drawn.longest_answer(drawn.prompts[-1]), 1)
    check_budget(budget, longest.items)
    widest = max((shape_of(*one, layout) for one in drawn.full_passes(per_process, budget, layout)), key=size_of)
    return Widest(widest, has_gradients=len(fill_evenly(*longest, layout, budget)) > 1)


class _Drawn(NamedTuple):
    """Answers of a run that draws them itself; P and T: tokens of a prompt and of an answer."""

    prompts: list[int]
    """Lengths of those that may be, the longest last."""
    num_tokens: int
    """Of the longest prompt with an answer."""
    has_turns: bool
    max_new_tokens: int
    answers_of_item: int
    group_size: int
    """Items with one prompt."""

    @classmethod
    def of(cls, read: Read, config: Any) -> "_Drawn":
        """What `read` and the config of its recipe say of them."""
        assert read.answered is not None
        shortest, longest = read.answered
        pair = 2 if hasattr(config, "loss") else 1
        return cls(
            prompts=[shortest] if read.has_turns else [shortest, longest],
            num_tokens=longest + config.max_new_tokens,
            has_turns=read.has_turns,
            max_new_tokens=config.max_new_tokens,
            answers_of_item=pair,
            group_size=1 if pair == 2 else getattr(config, "group_size", 1),
        )

    def longest_answer(self, prompt: int) -> int:
        """Of one behind a prompt of so many tokens."""
        return self.num_tokens - prompt if self.has_turns else self.max_new_tokens

    def step(self, num_items: int, prompt: int, answer: int, sharing: int) -> _Step:
        """So many items of such lengths, `sharing` of which have a prompt together."""
        items = [(prompt + answer,) * self.answers_of_item] * num_items
        return _Step(items, [Prompt(number // sharing, prompt) for number in range(num_items)])

    def full_passes(self, num_items: int, budget: int, layout: Layout) -> Iterator[_Step]:
        """Passes of up to `num_items`, as full as the budget allows, that differ in what is largest of them.

        Answers may be long, or so short beside their prompts that most keys are copied; prompts may be shared or not.
        """
        for prompt, is_short, sharing in product(self.prompts, (False, True), {1, self.group_size}):
            most = self.longest_answer(prompt)
            answer = max(1, min(most, int(TOGETHER * prompt) - 1)) if is_short else most
            step = self.step(num_items, prompt, answer, sharing)
            for part in filling(*step, layout)(budget):
                yield self._filled_up(step.take(part), num_items, budget, layout)

    def _filled_up(self, step: _Step, num_items: int, budget: int, layout: Layout) -> _Step:
        """`step` with another item that is shorter, or of shorter ones, where the budget leaves room for it."""
        assert step.prompts is not None
        if len(step.items) == num_items:
            return step
        if layout.is_one_row:
            room = budget - shape_of(*step, layout).num_cells
            answer = min(room - 1, self.max_new_tokens)
            return step if answer < 1 else _Step([*step.items, (room,)], [*step.prompts, Prompt(None, room - answer)])
        more = len(step.items) + 1
        prompt, width = self.prompts[0], budget // (more * self.answers_of_item)
        answer = min(width - prompt, self.longest_answer(prompt))
        return step if answer < 1 else self.step(more, width - answer, answer, 1)
