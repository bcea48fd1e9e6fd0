"""The largest training passes of a process, from the lengths of its training data.

`roles.py` counts each of them. For data that is known before the run, its steps are divided into passes as the run
divides them; for answers that are still to be sampled, passes are made as full as they may become.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple

from hybrid_engine.rlhf.batches.micro_batches import check_budget, deal_by_number, fill_evenly, filling
from hybrid_engine.rlhf.batches.packable import expected_layout
from hybrid_engine.rlhf.batches.packing import TOGETHER, Layout, SharedPrompt
from hybrid_engine.rlhf.batches.passes import Extent, Items, PassShape, extent_of
from hybrid_engine.rlhf.options.shared import AnswerOptions, TrainingOptions
from hybrid_engine.rlhf.planning.reading import Read
from hybrid_engine.rlhf.runs.engine_config import largest_micro_batch

MOST_LAID_OUT = 5000
"""Number of items of steps that are laid out, at some 0.1 ms each. Padding, and items that stay together, leave passes
partly empty, so that several steps must be compared.
"""


class Pass(NamedTuple):
    """A forward and backward pass."""

    shape: PassShape
    has_gradients: bool
    """Whether gradients of earlier passes existed."""
    has_state: bool
    """Whether the optimizer had its state, which exists from the second step on."""


def widest_passes(read: Read, config: TrainingOptions, per_process: int, num_processes: int) -> list[Pass]:
    """Passes of a run of which one is the largest.

    Args:
        read: the training data; for answers that are still to be sampled, the largest passes that may occur.
        config: of the recipe.
        per_process: items of a step on one process.
        num_processes: of the run.
    """
    layout = expected_layout(config, read.first) if config.tokens_per_micro_batch else Layout.PADDED
    if read.learned is None:
        assert isinstance(config, AnswerOptions)
        shapes, accumulates = _drawn_passes(read, config, layout, per_process)
        return [Pass(shape, accumulates, has_state=True) for shape in _largest(shapes)]
    found = list[Pass]()
    items, batches = read.learned
    for is_first, part in ((False, batches[1:]), (True, batches[:1])):  # the optimizer has no state in the first step
        steps = [items.take(batch[rank::num_processes]) for batch in part for rank in range(num_processes)]
        shapes, accumulates = _passes_of(steps, config, layout, per_process)
        known = [extent_of(one.shape) for one in found]
        found += [
            Pass(shape, accumulates, has_state=not is_first)
            for shape in _largest(shapes)
            if not any(extent_of(shape).is_within(other) for other in known)
        ]
    return found


def _largest(shapes: Iterable[PassShape]) -> list[PassShape]:
    """The passes with the most of each thing that takes memory; none of them has less of everything than another."""
    extents = {extent_of(shape): shape for shape in shapes}
    kept = list[Extent]()
    for of_kind in Extent._fields:
        most = max(extents, key=lambda extent: (getattr(extent, of_kind), sum(extent)), default=None)
        if most is not None and not any(most.is_within(one) for one in kept):
            kept.append(most)
    return [extents[extent] for extent in kept]


def _passes_of(
    steps: list[Items], config: TrainingOptions, layout: Layout, per_process: int
) -> tuple[Iterator[PassShape], bool]:
    """The passes of `steps`, divided as in the run, and whether a step has several."""
    budget = config.tokens_per_micro_batch
    if budget:
        check_budget(budget, (item for step in steps for item in step.lengths))
        # From the largest step to the smallest: a step just above the budget has passes of half of it.
        every = -(-sum(map(len, steps)) // MOST_LAID_OUT)
        steps = sorted(steps, key=lambda step: -step.num_tokens)[:: every or 1]
        dealt = [fill_evenly(step, layout, budget) for step in steps]
    else:
        size = largest_micro_batch(per_process, config.micro_batch_size)
        dealt = [deal_by_number(step, size) for step in steps]
    passes = (step.take(part) for step, parts in zip(steps, dealt, strict=True) for part in parts)
    return (one.shape(layout) for one in passes), any(len(parts) > 1 for parts in dealt)


def _drawn_passes(
    read: Read, config: AnswerOptions, layout: Layout, per_process: int
) -> tuple[Iterator[PassShape], bool]:
    """Passes over answers that are still to be sampled, one of which is the largest; and whether a step has several."""
    drawn, budget = _Drawn.of(read, config), config.tokens_per_micro_batch
    prompt = drawn.prompts[-1]
    if not budget:
        size = largest_micro_batch(per_process, config.micro_batch_size)
        return iter([drawn.step(size, prompt, drawn.longest_answer(prompt), 1).shape(layout)]), per_process > size
    longest = drawn.step(per_process, prompt, drawn.longest_answer(prompt), 1)
    check_budget(budget, longest.lengths)
    shapes = (one.shape(layout) for one in drawn.full_passes(per_process, budget, layout))
    return shapes, len(fill_evenly(longest, layout, budget)) > 1


class _Drawn(NamedTuple):
    """Answers that a run samples itself."""

    prompts: list[int]
    """Prompt lengths to try; the last is the longest that an answer may follow."""
    num_tokens: int
    """Tokens of the longest prompt with an answer."""
    has_turns: bool
    max_new_tokens: int
    answers_of_item: int
    group_size: int
    """Items with the same prompt."""

    @classmethod
    def of(cls, read: Read, config: AnswerOptions) -> "_Drawn":
        """The answers for `read` and the config of its recipe."""
        assert read.answered is not None
        shortest, longest = read.answered
        pair = config.ANSWERS_IN_PASS
        group = 1 if pair == 2 else config.group_size
        # After longer prompts there is room for fewer answers, and a copy of a shorter one serves several of them.
        most_copied = int(config.max_new_tokens / TOGETHER)
        most_masked = config.tokens_per_micro_batch - group * pair * (config.max_new_tokens + 1)
        tried = {min(longest, max(shortest, prompt)) for prompt in (shortest, most_copied, most_masked, longest)}
        return cls(
            prompts=[shortest] if read.has_turns else sorted(tried),
            num_tokens=longest + config.max_new_tokens,
            has_turns=read.has_turns,
            max_new_tokens=config.max_new_tokens,
            answers_of_item=pair,
            group_size=group,
        )

    def longest_answer(self, prompt: int) -> int:
        """Tokens of the longest answer to a prompt of `prompt` tokens."""
        return self.num_tokens - prompt if self.has_turns else self.max_new_tokens

    def step(self, num_items: int, prompt: int, answer: int, sharing: int) -> Items:
        """Items of these lengths, of which each `sharing` have the same prompt."""
        prompts = [(SharedPrompt(number // sharing, prompt),) * self.answers_of_item for number in range(num_items)]
        return Items([(prompt + answer,) * self.answers_of_item] * num_items, prompts)

    def full_passes(self, num_items: int, budget: int, layout: Layout) -> Iterator[Items]:
        """Passes of up to `num_items`, as full as the budget allows, that differ in which part of them is largest.

        Answers may be long, or so short relative to their prompts that most keys are copied; prompts may be shared or
        not.
        """
        for prompt, is_short, sharing in product(self.prompts, (False, True), {1, self.group_size}):
            most = self.longest_answer(prompt)
            answer = max(1, min(most, int(TOGETHER * prompt) - 1)) if is_short else most
            step = self.step(num_items, prompt, answer, sharing)
            for part in filling(step, layout)(budget):
                one = step.take(part)
                yield one
                yield self._filled_up(one, num_items, budget, layout)

    def _filled_up(self, step: Items, num_items: int, budget: int, layout: Layout) -> Items:
        """`step` with another item that is shorter, or as more and shorter items, if the budget leaves room."""
        if len(step) == num_items:
            return step
        if layout.is_one_row:
            room = budget - step.shape(layout).num_cells
            answer = min(room - 1, self.max_new_tokens)
            rest = Items([(room,)], [(SharedPrompt(None, room - answer),)])
            return step if answer < 1 else Items([*step.lengths, *rest.lengths], [*step.prompts, *rest.prompts])
        more = len(step) + 1
        prompt, width = self.prompts[0], budget // (more * self.answers_of_item)
        answer = min(width - prompt, self.longest_answer(prompt))
        return step if answer < 1 else self.step(more, width - answer, answer, 1)
