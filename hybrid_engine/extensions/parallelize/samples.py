"""The samples of a step of an end-to-end module, and the losses that its backward pass starts from."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from hybrid_engine.extensions.parallelize.values import Rule, check, is_list_of, is_switch, shown, takes

SAMPLES = Rule(lambda value: isinstance(value, list | tuple), "a list of samples, each the first argument of forward")
SCALE = Rule(lambda value: takes(value, 1), "a callable of one argument, the loss, or None")
DUMMIES = Rule(lambda value: is_list_of(value, is_switch), "a list of True or False")


def check_samples(samples: Any, is_dummy_batch: Any = None, scale_fn: Any = None) -> None:
    """ValueError for arguments of `train_step` and `infer_step` that are of another kind, or of different lengths."""
    check("samples", samples, SAMPLES)
    if not samples:
        raise ValueError("samples=[] must have at least one; give a dummy batch where a process has none")
    if scale_fn is not None:
        check("scale_fn", scale_fn, SCALE)
    if is_dummy_batch is not None:
        check("is_dummy_batch", is_dummy_batch, DUMMIES)
        if len(is_dummy_batch) != len(samples):
            raise ValueError(
                f"is_dummy_batch has {len(is_dummy_batch)} entries, samples {len(samples)}; give one for each"
            )


def scaled(loss: Tensor, scale_fn: Callable[[Tensor], Tensor]) -> Tensor:
    """What the backward pass starts from; ValueError where `scale_fn` gave something without a gradient."""
    scaled = scale_fn(loss)
    if not isinstance(scaled, Tensor) or scaled.dim() or scaled.requires_grad != loss.requires_grad:
        raise ValueError(
            f"scale_fn gave {shown(scaled)}; it must give a tensor without dimensions that is computed from the loss"
        )
    return scaled


def loss_of(result: Any) -> Tensor:
    """The first result of an end-to-end module."""
    loss = next((leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)), None)
    if loss is None or loss.dim():
        raise ValueError("the first result of an end-to-end module must be its loss, a tensor without dimensions")
    return loss
