"""Linear layers of a trained module, on the faster of two libraries (`ops/trained_linear.py`).

The layers keep their class, place, weights, hooks and names; only their forward function is replaced, permanently, so
that a pass that recomputes activations uses the same function whatever starts it.
"""

from types import MethodType

import torch
from torch import nn

from hybrid_engine.ops.trained_linear import is_faster_on_onednn, linear


def forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """The forward of `nn.Linear`."""
    # It has this name so that a copied or pickled layer finds its forward again.
    if is_faster_on_onednn(input, self.weight):
        return linear(input, self.weight, self.bias)
    return nn.functional.linear(input, self.weight, self.bias)


def use_faster_linears(module: nn.Module) -> None:
    """Makes the plain linear layers below `module` use the faster library, in forward and backward passes.

    Layers of other classes, and layers whose `forward` was replaced, stay as they are.
    """
    for part in module.modules():
        if type(part) is nn.Linear and "forward" not in vars(part):
            part.forward = MethodType(forward, part)  # type: ignore[method-assign]


def use_own_linears(module: nn.Module) -> None:
    """Undoes `use_faster_linears`."""
    for part in module.modules():
        if getattr(vars(part).get("forward"), "__func__", None) is forward:
            del part.forward
