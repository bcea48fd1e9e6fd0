"""Which gradients are clipped by one norm, and how: all together, but for groups of parameters that ask to be apart."""

from typing import Any

import torch

from hybrid_engine.zero.trained_parameter import TrainedParameter

APART = "clips_apart"
"""Option of a parameter group: True clips its gradients by their own norm, as if an optimizer had them alone."""


def clipped_together(groups: list[dict[str, Any]], parameters: list[TrainedParameter]) -> list[list[TrainedParameter]]:
    """`parameters` in lists that are clipped by one norm each: the first has what no group keeps apart."""
    apart = [{id(param) for param in group["params"]} for group in groups if group.get(APART)]
    rest = [t for t in parameters if not any(id(t.master) in ids for ids in apart)]
    return [rest, *([t for t in parameters if id(t.master) in ids] for ids in apart)]


def rescale(gradients: list[torch.Tensor], scale: float, norm: float, bound: float) -> None:
    """Divides the loss scale out of gradients, and clips them where `norm`, theirs without it, is above `bound`.

    Args:
        gradients: changed in place.
        scale: what the loss was multiplied by.
        norm: the 2-norm of what is clipped together, without `scale`.
        bound: the largest norm; 0 clips nothing.
    """
    factor = 1.0 / scale
    if bound > 0:
        # The small number is torch's, in `clip_grad_norm_`.
        factor *= min(1.0, bound / (norm + 1e-6))
    if factor != 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)
