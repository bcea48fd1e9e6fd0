"""Bytes of a forward and backward pass, counted on a model without weights: every op runs on shapes alone.

What is counted are the storages that ops make, while they are alive: what autograd keeps, gradients, and what comes and
goes between. What an op takes and frees inside itself is not in it. The head's pieces, whose ops look at values, are
stood in for by tensors of their sizes (`ops/linear_log_prob.py`).

B rows, P and T columns of prompts and responses, N = B T; E hidden size, V vocabulary.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_engine.metrics.memory_use import LiveBytes
from hybrid_engine.ops.linear_log_prob import PieceBytes, piece_bytes
from hybrid_engine.rlhf.passes.head_log_probs import logit_shape


class PassShape(NamedTuple):
    """Rows of what a pass reads, with the tokens of a row's prompt and of its response."""

    rows: int
    prompt: int
    response: int
    spans: tuple[tuple[int, int, int, int], ...] = ()
    """Where attention goes along spans of one row: of each the first cell and how many, then those of its prefix."""
    padding: int = 0
    """Of the responses' tokens, for which the head is not asked."""

    @property
    def num_asked(self) -> int:
        """Tokens that the head is asked for."""
        return self.rows * self.response - self.padding

    @property
    def num_cells(self) -> int:
        """Tokens that the model reads, padding included."""
        return self.rows * (self.prompt + self.response)


class PassBytes(NamedTuple):
    """What a pass takes beyond weights and the gradients that were there before it."""

    activations: int
    """Bytes that the body's forward pass leaves for its backward pass."""
    pieces: int
    """Bytes of the head: kept tiles, one more, and the rows that it reads."""
    peak: int
    """The most bytes at once, new gradients included."""


def count_pass(
    model: nn.Module,
    body: Callable[..., Any],
    head: nn.Linear,
    shape: PassShape,
    *,
    is_language: bool,
    accumulates: bool,
    device: str,
    more_inputs: Mapping[str, Any] | None = None,
) -> PassBytes:
    """A pass of `body` and `head`, parts of `model`; the model is of no other use afterwards.

    Args:
        model: built on the meta device, in training mode.
        body: a transformer of transformers.
        head: over the vocabulary where `is_language`, whose logits never exist at once; else of values.
        shape: rows of padded prompts and responses.
        is_language: whether tokens of responses are asked for their log-probabilities.
        accumulates: whether gradients are there already.
        device: its type; of a GPU the head's kernels keep nothing.
        more_inputs: of the body beside tokens, masks and positions, with tensors that have values; made for the pass.
    """
    with FakeTensorMode() as shapes, GroupedProducts(), torch.device("cpu"):
        _give_shapes(model, accumulates)
        input_ids = torch.zeros(shape.rows, shape.prompt + shape.response, dtype=torch.int64)
        masks = _masks_of(body, input_ids)
        more = pytree.tree_map_only(torch.Tensor, shapes.from_tensor, dict(more_inputs or {}))
        with LiveBytes() as live:
            hidden = body(input_ids=input_ids, **masks, **more, use_cache=False)[0]
            activations = live.num_bytes
            if is_language:
                places = torch.arange(shape.num_asked)
                rows = hidden[:, -shape.response - 1 : -1][places // shape.response, places % shape.response]
                sizes = len(rows), rows.shape[1], len(head.weight)
                has_softcap = logit_shape(body, 1.0).softcap is not None
                pieces = piece_bytes(*sizes, head.weight.requires_grad, device, has_softcap)
                result = _HeadPieces.apply(rows, head.weight, pieces)
                of_head = pieces.kept + pieces.tile + rows.nbytes
            else:
                result, of_head = head(hidden), 0
            result.backward(torch.ones_like(result))
        given = sum(part.nbytes for part in pytree.tree_leaves(more) if isinstance(part, torch.Tensor))
        return PassBytes(activations + given, of_head, live.peak_bytes + given)


def _masks_of(body: Callable[..., Any], input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a pass over `input_ids [B, P+T]` is given beside them."""
    mask = torch.ones_like(input_ids)
    masks = {"attention_mask": mask, "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)}
    # Nothing is padded in one row, and sequences in it are kept apart without a mask, of which transformers takes four
    # dims for complete; attention with ALiBi reads it, and then one sequence is a row.
    if len(input_ids) == 1 and getattr(body, "_supports_attention_backend", False):
        masks["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    positions = set(inspect.signature(getattr(body, "forward", body)).parameters) & {"position_ids", "kwargs"}
    return masks if positions else {"attention_mask": masks["attention_mask"]}


def _give_shapes(model: nn.Module, accumulates: bool) -> None:
    """Parameters and buffers that say they lie on the CPU, tied ones together, with gradients where asked for."""
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
    """Inside, products of experts have shapes in every precision; torch has them for bf16 alone.

    `[M, K] @ [G, K, N] -> [M, N]`; of a weight's gradient `[K, M] @ [M, N] -> [G, K, N]`.
    """

    lets_compiled_run = True
    """For `ops/cpu_kernels.py`, as of `LiveBytes`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **(kwargs or {}))
        left, right, ends = args[:3]
        shape = (left.shape[0], right.shape[-1])
        return left.new_empty((len(ends), *shape) if right.dim() == 2 else shape)
