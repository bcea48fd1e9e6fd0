"""The largest training pass of a process of a run, from the lengths of what it learns.

P and T: tokens of a prompt and of a response.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from hybrid_engine.recipes.data.micro_batches import check_budget, fill_evenly
from hybrid_engine.recipes.data.packable import expected_layout
from hybrid_engine.recipes.data.packing import Layout, Prompt, lay_out_spans
from hybrid_engine.recipes.data.spans import Span
from hybrid_engine.recipes.planning.read import Item, Read
from hybrid_engine.recipes.runs.engine_config import largest_micro_batch
from hybrid_engine.training.pass_memory import PassShape

MOST_LAID_OUT = 5000
"""Items of steps that are laid out, each some 0.1 ms: padding, and items that stay together, leave passes less than
full."""


class Widest(NamedTuple):
    """The largest pass of some steps."""

    shape: PassShape
    accumulates: bool
    """Whether a step has several."""
    has_state: bool = True
    """Whether the optimizer has its state then: not in the first step."""


def widest_passes(read: Read, config: Any, per_process: int, num_processes: int) -> list[Widest]:
    """The largest pass behind the first step, and the first step's, where that is known and larger still.

    Args: as of `widest_pass`.
    """
    if not read.batches:
        return [Widest(*widest_pass(read, config, per_process, num_processes))]
    parts = [replace(read, batches=batches) for batches in (read.batches[:1], read.batches[1:]) if batches]
    first, *later = (Widest(*widest_pass(part, config, per_process, num_processes)) for part in parts)
    is_largest = all(_size(first.shape) > _size(other.shape) for other in later)
    return [*later, *([first._replace(has_state=False)] if is_largest else [])]


def widest_pass(read: Read, config: Any, per_process: int, num_processes: int) -> tuple[PassShape, bool]:
    """The largest pass, and whether a step of it has several.

    Args:
        read: what the run learns; answers that it is still to draw are taken to be as long as they may be.
        config: of the recipe.
        per_process: items of a step on one process.
        num_processes: of the run.
    """
    steps = _steps(read, config, per_process, num_processes)
    if config.tokens_per_micro_batch:
        return _widest_packed(steps, config, expected_layout(config, read.first), is_known=bool(read.items))
    size = largest_micro_batch(per_process, config.micro_batch_size)
    ordered = [sorted(items, key=lambda item: max(map(sum, item))) for items in steps]
    parts_of = [items[first : first + size] for items in ordered for first in range(0, len(items), size)]
    return max((_padded(part) for part in parts_of), key=_size), per_process > size


def _widest_packed(steps: list[list[Item]], config: Any, layout: Layout, *, is_known: bool) -> tuple[PassShape, bool]:
    """The largest pass under a budget, and whether a step has several.

    A step just above the budget has passes of half of it, so that of the steps with as many passes each the largest
    are laid out.
    """
    budget = config.tokens_per_micro_batch
    check_budget(budget, [tuple(map(sum, item)) for items in steps for item in items])
    alike = defaultdict[int, list[list[Item]]](list)
    for items in sorted(steps, key=lambda items: -sum(map(_tokens, items))):
        alike[-(-sum(map(_tokens, items)) // budget)].append(items)
    shapes, accumulates = list[PassShape](), False
    most = max(1, MOST_LAID_OUT // max(1, sum(map(len, (group[0] for group in alike.values())))))
    for items in chain.from_iterable(group[:most] for group in alike.values()):
        prompts = [Prompt(number, item[0][0]) for number, item in enumerate(items)]
        parts = fill_evenly([tuple(map(sum, item)) for item in items], prompts, layout, budget)
        shapes += [_laid_out([items[index] for index in part], layout) for part in parts]
        accumulates |= len(parts) > 1
    widest = max(shapes, key=_size)
    if not is_known and accumulates:  # behind shorter prompts more answers meet, in passes as full as may be
        widest = max(widest, of_so_many(widest, budget), key=_size)
    return widest, accumulates


def of_so_many(shape: PassShape, num_tokens: int) -> PassShape:
    """`shape` with as many rows and `num_tokens` in all, the responses' share of them the same; nothing is shared."""
    width = -(-num_tokens // shape.rows)
    response = max(1, round(width * shape.response / (shape.prompt + shape.response)))
    longest = max((sum(span[1::2]) for span in shape.spans), default=0)
    lengths = [min(longest, num_tokens - first) for first in range(0, num_tokens, longest)] if longest else []
    spans = tuple(lay_out_spans(lengths, [Prompt(number, 0) for number in range(len(lengths))]))
    return PassShape(shape.rows, width - response, response, spans)


def _steps(read: Read, config: Any, per_process: int, num_processes: int) -> list[list[Item]]:
    """The items of each step on each process; of items that may meet as they like the longest ones."""
    if not read.items:
        pair = 2 if hasattr(config, "loss") else 1  # of answers
        return [[((read.prompt_tokens, config.max_new_tokens),) * pair] * per_process]
    if read.batches is None:
        return [sorted(read.items, key=_tokens)[-per_process:]]
    ranks = range(num_processes)
    return [[read.items[index] for index in batch[rank::num_processes]] for batch in read.batches for rank in ranks]


def _tokens(item: Item) -> int:
    return sum(map(sum, item))


def _size(shape: PassShape) -> int:
    """By which passes are compared: a copied key and value of a shared prompt are a tenth of what a cell keeps."""
    return shape.rows * (shape.prompt + shape.response) + sum(span[3] for span in shape.spans) // 10


def _padded(items: Sequence[Item]) -> PassShape:
    sequences = [sequence for item in items for sequence in item]
    prompt, response = (max(lengths) for lengths in zip(*sequences, strict=True))
    return PassShape(len(sequences), prompt, response)


def _laid_out(items: Sequence[Item], layout: Layout) -> PassShape:
    """The pass of `items`; where rows hold several sequences, with the responses' share of all tokens in each."""
    if layout is Layout.PADDED:
        return _padded(items)
    sequences = [sequence for item in items for sequence in item]
    prompts, responses = (sum(lengths) for lengths in zip(*sequences, strict=True))
    if layout.is_one_row:
        spans = _spans_of(items) if layout is Layout.SPANS else ()
        return PassShape(1, prompts - _spared(items, layout), responses, spans)
    width = max(map(sum, sequences))
    rows = layout.num_cells(sorted(map(sum, sequences), reverse=True)) // width
    response = -(-width * responses // (prompts + responses))
    return PassShape(rows, width - response, response)


def _spans_of(items: Sequence[Item]) -> tuple[Span, ...]:
    """Where everything lies of items whose sequences share a prompt each, or have prompts of their own."""
    lengths, prompts = list[int](), list[Prompt]()
    for number, item in enumerate(items):
        is_shared = len({prompt for prompt, _ in item}) == 1
        for place, (prompt, response) in enumerate(item):
            lengths.append(prompt + response)
            prompts.append(Prompt((number, 0 if is_shared else place), prompt))
    return tuple(lay_out_spans(lengths, prompts))


def _spared(items: Sequence[Item], layout: Layout) -> int:
    """Tokens of prompts that the sequences of an item share, where all begin with one."""
    if layout is not Layout.SPANS:
        return 0
    return sum(Prompt(None, item[0][0]).cells_spared(len(item)) for item in items if len({p for p, _ in item}) == 1)
