"""Bytes of a forward and backward pass, counted on a model without weights: every op runs on shapes alone.

Counts the storages that ops allocate, while they are alive: activations that autograd stores, gradients, and
temporaries. Memory that an op allocates and frees internally is not included. The head's pieces, whose ops depend on
values, are replaced by tensors of their sizes (`ops/linear_log_prob.py`). `roles.py` calls it for each trained model.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_engine.metrics.memory import LiveBytes
from hybrid_engine.ops.linear_log_prob import PieceBytes, piece_bytes
from hybrid_engine.rlhf.batches.head_log_probs import logit_shape
from hybrid_engine.rlhf.batches.packable import takes_spans
from hybrid_engine.rlhf.batches.packing import ATTENTION, Span, Spans
from hybrid_engine.rlhf.batches.passes import PassShape
from hybrid_engine.rlhf.batches.sequences import ValueModel


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


def count_pass(model: nn.Module, shape: PassShape, *, accumulates: bool, device: str) -> PassBytes:
    """Counts a pass of `model`, which cannot be used for anything else afterwards.

    Args:
        model: a causal model, a classifier or a `ValueModel` on the meta device, in training mode. A causal model
            computes log-probabilities of response tokens, and its full logits never exist at once.
        shape: rows of padded prompts and responses.
        accumulates: whether gradients exist already.
        device: its type; on a GPU the head's kernels store nothing.
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
                result, pieces = _log_probs(hidden, head, shape, device, logit_shape(base, 1.0).softcap is not None)
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
    hidden: torch.Tensor, head: nn.Linear, shape: PassShape, device: str, has_softcap: bool
) -> tuple[torch.Tensor, int]:
    """The log-probabilities of the tokens that the head reads, and the bytes of the head's pieces."""
    places = torch.arange(shape.num_asked)
    rows = hidden[:, -shape.response - 1 : -1][places // shape.response, places % shape.response]
    sizes = len(rows), rows.shape[1], len(head.weight)
    pieces = piece_bytes(*sizes, head.weight.requires_grad, device, has_softcap)
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
