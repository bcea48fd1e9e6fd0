"""Embeddings, softmax and losses whose vocabulary is shared out: each part computes with the rows or classes it has.

The way is Megatron-LM's (Shoeybi et al., 2019, section 3, "parallel embedding" and "parallel cross entropy"): what of
another part is looked up counts 0 here and the results are added up; of a softmax the maximum and the sum of
exponentials alone are exchanged, so that no process needs all logits.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_engine.extensions.parallelize.graph.rules import OnPart, Part


def embedding_on_part(weight: Tensor, indices: Tensor, *, part: Part, padding_idx: int = -1, **_: Any) -> Tensor:
    """The rows `indices` of the whole weight, where this part has them, else zeros; IndexError where no part has one.

    The row `padding_idx` gets no gradient.
    """
    place, is_here = _place(indices, weight.shape[0], part)
    found = F.embedding(place, weight)
    if padding_idx >= 0:
        found = torch.where((indices == padding_idx)[..., None], found.detach(), found)
    return found.masked_fill(~is_here[..., None], 0.0)


def nll_on_part(
    log_probs: Tensor, target: Tensor, *, part: Part, reduction: int, ignore_index: int, **_: Any
) -> Tensor:
    """Of log_probs [m, c], a part of the classes, the losses of the targets in it, 0 of others; their sum with 2."""
    is_counted = target != ignore_index
    place, is_here = _place(torch.where(is_counted, target, 0), log_probs.shape[1], part)
    losses = -log_probs.gather(1, place[:, None]).squeeze(1)
    losses = losses.masked_fill(~(is_here & is_counted), 0.0)
    return losses.sum() if reduction == 2 else losses


def log_softmax_on_part(self: Tensor, dim: int, *, part: Part, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """The logarithm of the softmax along `dim`, of which each process has a part. Collective."""
    logits = self if dtype is None else self.to(dtype)
    is_short = logits.dtype in (torch.float16, torch.bfloat16)
    found: Tensor = _LogSoftmax.apply(logits.float() if is_short else logits, dim, part)
    return found.to(logits.dtype) if is_short else found


def cross_entropy_on_part(self: Tensor, target: Tensor, *, part: Part, **arguments: Any) -> Tensor:
    """This part's summand of the losses of logits [m, c], a part of the classes. Collective."""
    return nll_on_part(log_softmax_on_part(self, 1, part=part), target, part=part, **arguments)


EMBEDDING = OnPart(embedding_on_part)
NLL = OnPart(lambda self, target, **arguments: nll_on_part(self, target, **arguments))
LOG_SOFTMAX = OnPart(log_softmax_on_part, num_reductions=3)
CROSS_ENTROPY = OnPart(cross_entropy_on_part, num_reductions=3)


def _place(indices: Tensor, size: int, part: Part) -> tuple[Tensor, Tensor]:
    """Where each index is in this part of `size`, 0 where it is in another; and whether it is here.

    One that is in no part stays as it is, too large for any: looking it up is an error, as it is on one process.
    """
    place = indices - part.index * size
    is_here = (place >= 0) & (place < size)
    is_elsewhere = ~is_here & (indices >= 0) & (indices < size * part.count)
    return torch.where(is_here, place, indices).masked_fill(is_elsewhere, 0), is_here


class _LogSoftmax(torch.autograd.Function):
    """log_softmax along a dimension that is shared out; keeps its result alone, as PyTorch's does."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, dim: int, part: Part) -> Tensor:
        assert part.all_reduce is not None, f"{part=}"
        shifted = logits - part.all_reduce(logits.amax(dim, keepdim=True), "max")
        total = part.all_reduce(shifted.exp().sum(dim, keepdim=True), "sum")
        result = shifted.sub_(total.log())
        ctx.save_for_backward(result)
        ctx.dim, ctx.part = dim, part
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (result,) = ctx.saved_tensors
        total = ctx.part.all_reduce(gradient.sum(ctx.dim, keepdim=True), "sum")
        return gradient - result.exp().mul_(total), None, None
