"""The largest training passes of a process, from the lengths of its training data, and the bytes of a pass.

For data that is known before the run, its steps are divided into passes as the run divides them; for answers that are
still to be sampled, passes are made as full as they may become. A pass is counted on a model without weights: every op
runs on shapes alone, and the storages that ops allocate are added up while they are alive: activations that autograd
stores, gradients, and temporaries. Memory that an op allocates and frees internally is not included. The head's pieces,
whose ops depend on values, are replaced by tensors of their sizes (`ops/linear_log_prob.py`). `memory_plan.py` calls
both.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_engine.metrics.memory import LiveBytes
from hybrid_engine.ops.linear_log_prob import PieceBytes, piece_bytes
from hybrid_engine.ops.support_log_prob import support_piece_bytes
from hybrid_engine.rlhf.batches.head_log_probs import logit_shape
from hybrid_engine.rlhf.batches.micro_batches import check_budget, deal_by_number, fill_evenly, filling
from hybrid_engine.rlhf.batches.packable import expected_layout, takes_spans
from hybrid_engine.rlhf.batches.packing import ATTENTION, TOGETHER, Layout, SharedPrompt, Span, Spans
from hybrid_engine.rlhf.batches.passes import Extent, Items, PassShape, extent_of
from hybrid_engine.rlhf.batches.sequences import ValueModel
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


class PassBytes(NamedTuple):
    """Bytes of a pass in addition to weights and earlier gradients."""

    activations: int
    """Bytes that the body's forward pass stores for its backward pass."""
    pieces: int
    """Bytes of a language model's head: stored tiles, one more, and the rows that it reads; 0 for other heads."""
    peak: int
    """Peak bytes, new gradients included."""


def base_of(model: nn.Module) -> Any:
    """A transformer of transformers, below its adapter or its head of values."""
    model = model.backbone if isinstance(model, ValueModel) else model
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def count_pass(
    model: nn.Module, shape: PassShape, *, accumulates: bool, device: str, has_supports: bool = False
) -> PassBytes:
    """Counts a pass of `model`, which cannot be used for anything else afterwards.

    Args:
        model: a causal model, a classifier or a `ValueModel` on the meta device, in training mode. A causal model
            computes log-probabilities of response tokens, and its full logits never exist at once.
        shape: rows of padded prompts and responses.
        accumulates: whether gradients exist already.
        device: its type; on a GPU the head's kernels store nothing.
        has_supports: whether log-probabilities are over recorded supports.
    """
    base = base_of(model)
    body: Callable[..., Any] = model.backbone if isinstance(model, ValueModel) else base.base_model
    head: Any = model.head if isinstance(model, ValueModel) else base.get_output_embeddings() or base.score
    with torch.device("cpu"):
        spans = _spans(base, shape)
    with FakeTensorMode() as shapes, GroupedProducts(), torch.device("cpu"):
        _give_shapes(model, accumulates)
        inputs = _inputs(body, shape) | pytree.tree_map_only(torch.Tensor, shapes.from_tensor, spans)
        with LiveBytes() as live:
            hidden = body(**inputs, use_cache=False)[0]
            activations, pieces = live.num_bytes, 0
            if head.out_features > 1:
                has_softcap = logit_shape(base, 1.0).softcap is not None
                result, pieces = _log_probs(hidden, head, shape, device, has_softcap, has_supports)
            else:
                result = head(hidden)
            result.backward(torch.ones_like(result))
    given = sum(part.nbytes for part in pytree.tree_leaves(spans) if isinstance(part, torch.Tensor))
    return PassBytes(activations + given, pieces, live.peak_bytes + given)


def _inputs(body: Callable[..., Any], shape: PassShape) -> dict[str, Any]:
    """Tokens, mask and positions of a pass, as far as the body takes them."""
    input_ids = torch.zeros(shape.rows, shape.prompt + shape.response, dtype=torch.int64)
    mask = torch.ones_like(input_ids)
    inputs = {"input_ids": input_ids, "attention_mask": mask, "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)}
    # A single row has no padding, and its sequences are kept apart without a mask; transformers takes a 4-D mask as
    # complete. Attention with ALiBi reads the mask, and there a row is one sequence.
    if shape.rows == 1 and getattr(body, "_supports_attention_backend", False):
        inputs["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    if not set(inspect.signature(getattr(body, "forward", body)).parameters) & {"position_ids", "kwargs"}:
        del inputs["position_ids"]
    return inputs


def _spans(base: Any, shape: PassShape) -> dict[str, Spans]:
    """The input of attention along spans, which `base` computes from now on; empty if it does not go along spans."""
    if not shape.spans or not takes_spans(base.config):  # a critic's layout may differ from the actor's
        return {}
    base.set_attn_implementation(ATTENTION)
    return {"spans": Spans.of([Span(*span) for span in shape.spans])}


def _log_probs(
    hidden: torch.Tensor, head: nn.Linear, shape: PassShape, device: str, has_softcap: bool, has_supports: bool
) -> tuple[torch.Tensor, int]:
    """The log-probabilities of the tokens that the head reads, and the bytes of the head's pieces."""
    places = torch.arange(shape.num_asked)
    rows = hidden[:, -shape.response - 1 : -1][places // shape.response, places % shape.response]
    sizes = len(rows), rows.shape[1], len(head.weight), head.weight.requires_grad
    if has_supports:
        pieces = support_piece_bytes(*sizes, head.weight.itemsize, device)
    else:
        pieces = piece_bytes(*sizes, device, has_softcap)
    return _HeadPieces.apply(rows, head.weight, pieces), pieces.kept + pieces.tile + rows.nbytes


def _give_shapes(model: nn.Module, accumulates: bool) -> None:
    """Replaces parameters and buffers by ones that claim to be on the CPU; tied ones stay tied.

    Parameters that are trained get gradients if the pass accumulates.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                shapes = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype), parameter.requires_grad)
                shapes.grad = torch.empty_like(shapes) if accumulates and shapes.requires_grad else None
                made[id(parameter)] = made[id(shapes)] = shapes
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


class _HeadPieces(torch.autograd.Function):
    """Has the sizes of `linear_log_prob`, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, pieces: PieceBytes) -> torch.Tensor:
        ctx.pieces = pieces
        ctx.save_for_backward(rows, weight, _of_size(rows, pieces.kept))
        _of_size(rows, pieces.tile)
        return rows.new_empty(len(rows), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, above: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:  # type: ignore[override]
        rows, weight, _ = ctx.saved_tensors
        of_rows, of_weight = (
            torch.empty_like(x) if needed else None
            for x, needed in zip((rows, weight), ctx.needs_input_grad[:2], strict=True)
        )
        _of_size(rows, ctx.pieces.tile)
        return of_rows, of_weight, None


def _of_size(like: torch.Tensor, num_bytes: int) -> torch.Tensor:
    return like.new_empty(num_bytes, dtype=torch.uint8)


class GroupedProducts(TorchDispatchMode):
    """Gives grouped products of experts a shape in every precision; torch has them for bf16 alone.

    `[M, K] @ [G, K, N] -> [M, N]`; for a weight's gradient `[K, M] @ [M, N] -> [G, K, N]`.
    """

    lets_compiled_run = True
    """For `ops/cpu_kernels.py`, as in `LiveBytes`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **(kwargs or {}))
        left, right, ends = args[:3]
        shape = (left.shape[0], right.shape[-1])
        return left.new_empty((len(ends), *shape) if right.dim() == 2 else shape)
