"""Linear layers of a module that is trained, on the faster of two libraries (`ops/trained_linear.py`).

The layers stay what they are and where they are, with their weights, hooks and names; only what they run is a function
of ours, on each layer for good, so that a pass which computes activations again finds the same one, whoever runs it.
"""

from types import MethodType

import torch
from torch import nn

from hybrid_engine.ops.trained_linear import is_faster_on_onednn, linear


def forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """What `nn.Linear.forward` computes."""
    # Under its name a copied or pickled layer finds its forward again.
    if is_faster_on_onednn(input, self.weight):
        return linear(input, self.weight, self.bias)
    return nn.functional.linear(input, self.weight, self.bias)


def use_faster_linears(module: nn.Module) -> None:
    """From now on the plain linear layers below `module` run by the faster library, in forward and backward passes.

    Those of other classes, and those that somebody gave a forward of their own, stay as they are.
    """
    for part in module.modules():
        if type(part) is nn.Linear and "forward" not in vars(part):
            part.forward = MethodType(forward, part)  # type: ignore[method-assign]


def use_own_linears(module: nn.Module) -> None:
    """Undoes `use_faster_linears`."""
    for part in module.modules():
        if getattr(vars(part).get("forward"), "__func__", None) is forward:
            del part.forward
