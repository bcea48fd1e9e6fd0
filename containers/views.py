"""Views of what a policy names: submodules, single parameters and norms, checked by name before anything is bound."""

from typing import Any

import torch
from torch import nn

from hybrid_engine.containers.linear import whole
from hybrid_engine.containers.policy import NormKind, UnsupportedModelError
from hybrid_engine.ops import NORM_OPS


def submodule(root: nn.Module, path: str) -> nn.Module:
    """The module at `path`; a policy that does not fit names both."""
    try:
        return root.get_submodule(path)
    except AttributeError as error:
        raise UnsupportedModelError(f"{type(root).__name__} has no {path!r}, which its policy names") from error


def attribute(root: nn.Module, path: str) -> Any:
    """The attribute at `path`, a parameter or a number."""
    owner, _, name = path.rpartition(".")
    module = submodule(root, owner) if owner else root
    if not hasattr(module, name):
        raise UnsupportedModelError(f"{type(root).__name__} has no {path!r}, which its policy names")
    return getattr(module, name)


def config_value(config: Any, name: str) -> Any:
    """The config's value of `name`; UnsupportedModelError where it has none."""
    if not hasattr(config, name):
        raise UnsupportedModelError(f"{type(config).__name__} has no {name!r}, which the policy names")
    return getattr(config, name)


def norm_eps(norm: nn.Module) -> float:
    """eps under either of the names that transformers' norms use."""
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


class NormView:
    """`gamma [E]` and `beta [E]` or None of one norm, its kind and eps."""

    def __init__(self, module: nn.Module, kind: NormKind):
        if getattr(module, "weight", None) is None:
            raise UnsupportedModelError(f"{type(module).__name__} has no weight")
        self.module, self.kind, self.eps = module, kind, norm_eps(module)
        self.op: Any = NORM_OPS[kind](self.eps)
        self.gamma: torch.Tensor
        self.beta: torch.Tensor | None

    def bind(self) -> None:
        """Points at the parameters as they lie in memory now."""
        self.gamma = whole(self.module.weight, type(self.module).__name__)
        bias = getattr(self.module, "bias", None)
        self.beta = None if bias is None else bias.detach()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What a forward pass reads."""
        return [self.gamma] if self.beta is None else [self.gamma, self.beta]

    def apply(self, input: torch.Tensor) -> torch.Tensor:
        """`[N, E]` -> `[N, E]`."""
        return self.op(input, self.gamma, self.beta)


class HeadNormsView:
    """Layer norms that each head has for itself, their weights side by side in a buffer that stays in place."""

    def __init__(self, module: nn.Module):
        self.norms = [NormView(norm, "layer") for norm in submodule(module, "norms").children()]
        self.eps = self.norms[0].eps
        self.gamma: torch.Tensor | None = None  # [H, D]

    def bind(self) -> None:
        """Copies the weights as they are now."""
        for norm in self.norms:
            norm.bind()
            if norm.beta is not None:
                raise UnsupportedModelError("norms of single heads with a bias")
        stacked = torch.stack([norm.gamma for norm in self.norms])
        if self.gamma is None or self.gamma.device != stacked.device or self.gamma.dtype != stacked.dtype:
            self.gamma = stacked
        else:
            self.gamma.copy_(stacked)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What a forward pass reads."""
        assert self.gamma is not None
        return [self.gamma]

    def apply(self, input: torch.Tensor) -> torch.Tensor:
        """`[N, H, D]` -> `[N, H, D]`."""
        assert self.gamma is not None
        return torch.nn.functional.layer_norm(input, input.shape[-1:], None, None, self.eps) * self.gamma
