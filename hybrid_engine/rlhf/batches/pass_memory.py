"""Bytes of a forward and backward pass, counted on a model without weights: every op runs on shapes alone.

Counts the storages that ops allocate, while they are alive: activations that autograd stores, gradients, and
temporaries. Memory that an op allocates and frees internally is not included. The head's pieces, whose ops depend on
values, are replaced by tensors of their sizes (`ops/linear_log_prob.py`).

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
from hybrid_engine.rlhf.batches.head_log_probs import logit_shape


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


class PassBytes(NamedTuple):
    """Bytes of a pass in addition to weights and earlier gradients."""

    activations: int
    """Bytes that the body's forward pass stores for its backward pass."""
    pieces: int
    """Bytes of the head: stored tiles, one more, and the rows that it reads."""
    peak: int
    """Peak bytes, new gradients included."""


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
    """Counts a pass of `body` and `head`, parts of `model`; the model cannot be used for anything else afterwards.

    Args:
        model: built on the meta device, in training mode.
        body: a transformer of transformers.
        head: over the vocabulary if `is_language`, and its full logits never exist at once; otherwise a head of values.
        shape: rows of padded prompts and responses.
        is_language: whether the pass computes log-probabilities of response tokens.
        accumulates: whether gradients exist already.
        device: its type; on a GPU the head's kernels store nothing.
        more_inputs: inputs of the body other than tokens, masks and positions, with tensors that have values; made for
            the pass.
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
    """Inputs of a pass over `input_ids [B, P+T]` other than the tokens: mask and positions."""
    mask = torch.ones_like(input_ids)
    masks = {"attention_mask": mask, "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)}
    # A single row has no padding, and its sequences are kept apart without a mask; transformers takes a 4-D mask as
    # complete. Attention with ALiBi reads the mask, and there a row is one sequence.
    if len(input_ids) == 1 and getattr(body, "_supports_attention_backend", False):
        masks["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    positions = set(inspect.signature(getattr(body, "forward", body)).parameters) & {"position_ids", "kwargs"}
    return masks if positions else {"attention_mask": masks["attention_mask"]}


def _give_shapes(model: nn.Module, accumulates: bool) -> None:
    """Replaces parameters and buffers by ones that claim to be on the CPU; tied ones stay tied. Optionally adds
    gradients.
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
