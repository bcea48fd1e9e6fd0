"""Bytes of a forward and backward pass, counted on a model without weights: every op runs on shapes alone.

What is counted are the storages that ops make, while they are alive: what autograd keeps, gradients, and what comes and
goes between. What an op takes and frees inside itself is not in it. The head's pieces, whose ops look at values, are
stood in for by tensors of their sizes (`ops/linear_log_prob.py`).

B rows, P and T columns of prompts and responses, N = B T; E hidden size, V vocabulary.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from hybrid_engine.ops.linear_log_prob import PieceBytes, piece_bytes


class PassShape(NamedTuple):
    """Rows of what a pass reads, with the tokens of a row's prompt and of its response."""

    rows: int
    prompt: int
    response: int


class PassBytes(NamedTuple):
    """What a pass takes beyond weights and the gradients that were there before it."""

    activations: int
    """Bytes that the body's forward pass leaves for its backward pass."""
    pieces: int
    """Bytes of the head: kept tiles, one more, and the rows that it reads."""
    peak: int
    """The most bytes at once, new gradients included."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that ops make: what is alive, and the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = self.peak_bytes = 0
        self._seen = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What came in was made before: a view of it, or it itself in an op in place, is nothing new.
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._seen.setdefault(tensor.untyped_storage(), True)
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._enter(tensor.untyped_storage())
        return result

    def _enter(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen[storage] = True
        self.num_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        weakref.finalize(storage, self._leave, storage.nbytes())

    def _leave(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


def count_pass(
    model: nn.Module,
    body: Callable[..., Any],
    head: nn.Linear,
    shape: PassShape,
    *,
    is_language: bool,
    accumulates: bool,
    device: str,
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
    """
    with FakeTensorMode(), torch.device("cpu"):
        _give_shapes(model, accumulates)
        input_ids = torch.zeros(shape.rows, shape.prompt + shape.response, dtype=torch.int64)
        mask = torch.ones_like(input_ids)
        with LiveBytes() as live:
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
            hidden = body(input_ids=input_ids, attention_mask=mask, position_ids=positions, use_cache=False)[0]
            activations = live.num_bytes
            if is_language:
                rows = hidden[:, -shape.response - 1 : -1].reshape(-1, hidden.shape[-1])
                pieces = piece_bytes(len(rows), rows.shape[1], len(head.weight), head.weight.requires_grad, device)
                result = _HeadPieces.apply(rows, head.weight, pieces)
                of_head = pieces.kept + pieces.tile + rows.nbytes
            else:
                result, of_head = head(hidden), 0
            result.backward(torch.ones_like(result))
        return PassBytes(activations, of_head, live.peak_bytes)


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
