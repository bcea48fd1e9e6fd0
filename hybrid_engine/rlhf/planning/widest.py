"""The largest training passes of a process, from the lengths of its training data."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, product
from typing import NamedTuple

from transformers import PretrainedConfig

from hybrid_engine.metrics.memory_use import Pass, is_within
from hybrid_engine.ops.linear_log_prob import piece_bytes
from hybrid_engine.rlhf.batches.micro_batches import check_budget, deal_by_number, fill_evenly, filling
from hybrid_engine.rlhf.batches.packable import expected_layout, supports_attention_backend
from hybrid_engine.rlhf.batches.packing import TOGETHER, Layout, SharedPrompt
from hybrid_engine.rlhf.batches.pass_memory import PassShape
from hybrid_engine.rlhf.batches.passes import Extent, Items, extent_of
from hybrid_engine.rlhf.options.shared import AnswerOptions, TrainingOptions
from hybrid_engine.rlhf.planning.reading import Learned, Read
from hybrid_engine.rlhf.runs.engine_config import largest_micro_batch, torch_dtype

MOST_LAID_OUT = 5000
"""Number of items of steps that are laid out, at some 0.1 ms each. Padding, and items that stay together, leave passes
partly empty, so that several steps must be compared.
"""
CLOSE = 0.7
"""A pass whose estimate is at least this fraction of the largest one may be larger than that."""
MOST_COUNTED = 4
"""Number of passes that are counted, at a second each for a model of 28 layers."""
Estimate = Callable[[Extent], float]


def widest_passes(read: Read, config: TrainingOptions, per_process: int, num_processes: int, device: str) -> list[Pass]:
    """Passes of a run of which one is the largest; the first has the largest estimate.

    Args:
        read: the training data; for answers that are still to be sampled, the largest passes that may occur.
        config: of the recipe.
        per_process: items of a step on one process.
        num_processes: of the run.
        device: its type.
    """
    layout = expected_layout(config, read.first) if config.tokens_per_micro_batch else Layout.PADDED
    estimate = estimate_of(read.first, config, device)
    if read.learned is None:
        assert isinstance(config, AnswerOptions)
        shapes, accumulates = _drawn_passes(read, config, layout, per_process)
        return _passes(_largest(shapes, estimate), accumulates, has_state=True)
    batches = read.learned.batches
    found = list[Pass]()
    for is_first, part in ((False, batches[1:]), (True, batches[:1])):  # the optimizer has no state in the first step
        steps = _steps(read.learned._replace(batches=part), num_processes)
        shapes, accumulates = _passes_of(steps, config, layout, per_process)
        largest = _largest(shapes, estimate)
        if is_first and found:  # only matters if it is larger than later passes
            least = estimate(extent_of(found[0].shape))
            largest = [shape for shape in largest if estimate(extent_of(shape)) > CLOSE * least]
        found += _passes(largest, accumulates, has_state=not is_first)
    return found


def _passes(shapes: Iterable[PassShape], accumulates: bool, has_state: bool) -> list[Pass]:
    return [Pass(shape, has_gradients=accumulates, has_state=has_state) for shape in shapes]


def _largest(shapes: Iterable[PassShape], estimate: Estimate) -> list[PassShape]:
    """The passes that may be the largest by their estimates; none of them has less of everything than another."""
    extents = {extent_of(shape): shape for shape in shapes}
    ranked = sorted(extents, key=estimate, reverse=True)
    kept = list[Extent]()
    for extent in ranked:
        if len(kept) == MOST_COUNTED or estimate(extent) < CLOSE * estimate(ranked[0]):
            break
        if not any(is_within(extent, one) for one in kept):
            kept.append(extent)
    return [extents[extent] for extent in kept]


def _steps(learned: Learned, num_processes: int) -> list[Items]:
    """The items of each step on each process."""
    ranks = range(num_processes)
    return [learned.items.take(batch[rank::num_processes]) for batch in learned.batches for rank in ranks]


def _passes_of(
    steps: list[Items], config: TrainingOptions, layout: Layout, per_process: int
) -> tuple[Iterator[PassShape], bool]:
    """The passes of `steps`, divided as in the run, and whether a step has several."""
    budget = config.tokens_per_micro_batch
    if budget:
        check_budget(budget, (item for step in steps for item in step.lengths))
        steps = _likely(steps, budget)
        dealt = [fill_evenly(step, layout, budget) for step in steps]
    else:
        size = largest_micro_batch(per_process, config.micro_batch_size)
        dealt = [deal_by_number(step, size) for step in steps]
    passes = (step.take(part) for step, parts in zip(steps, dealt, strict=True) for part in parts)
    return (one.shape(layout) for one in passes), any(len(parts) > 1 for parts in dealt)


def _likely(steps: list[Items], budget: int) -> list[Items]:
    """Among steps that fill a budget equally often, without sharing, those with most tokens.

    A step just above the budget has passes of half of it.
    """
    alike = defaultdict[int, list[Items]](list)
    for step in sorted(steps, key=lambda step: -step.num_tokens):
        alike[-(-step.num_tokens // budget)].append(step)
    most = max(1, MOST_LAID_OUT // max(1, sum(len(group[0]) for group in alike.values())))
    return list(chain.from_iterable(group[:most] for group in alike.values()))


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


def estimate_of(model: PretrainedConfig, config: TrainingOptions, device: str) -> Callable[[Extent], float]:
    """Estimates the bytes of a pass of a causal model, given its extent.

    A layer stores some 8 E + 4 I values per token: the inputs and outputs of its two norms, four projections, attention
    and MLP. Layers that are recomputed store E, and one of them at a time the rest.

    Args:
        model: its config.
        config: of the recipe.
        device: its type.
    """
    text, value = model.get_text_config(), torch_dtype(config.dtype, device).itemsize
    hidden, layers = text.hidden_size, text.num_hidden_layers
    mlp = (getattr(text, "moe_intermediate_size", 0) or 0) * (getattr(text, "num_experts_per_tok", 0) or 0)
    mlp = mlp or getattr(text, "intermediate_size", 0) or 4 * hidden
    heads = getattr(text, "num_attention_heads", 0) or 1
    width = getattr(text, "head_dim", 0) or hidden // heads
    of_layer, copied = 8 * hidden + 4 * mlp, 2 * width * (getattr(text, "num_key_value_heads", 0) or heads)
    whole = 1 if config.activation_checkpointing else layers
    per_cell = value * (whole * of_layer + (layers - whole) * hidden)
    # Other attention (ALiBi) stores scores, their softmax and the result of dropout.
    is_plain = supports_attention_backend(model)
    per_pair = value if is_plain else value * whole * heads * 3
    of_head = not config.lora_rank, device, getattr(text, "final_logit_softcapping", None) is not None

    def estimate(extent: Extent) -> float:
        pieces = piece_bytes(extent.responses, hidden, text.vocab_size, *of_head)
        head = pieces.kept + pieces.tile + value * extent.responses * hidden
        return extent.cells * per_cell + value * whole * extent.copied * copied + extent.pairs * per_pair + head

    return estimate
