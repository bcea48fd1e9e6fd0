"""Views of the modules that a policy names: submodules, parameters, norms and embeddings, checked before binding."""

from typing import Any

import torch
from torch import nn

from hybrid_engine.containers.policy import NormKind, UnsupportedModelError
from hybrid_engine.containers.tensor_parallel import ALONE, TensorParallel, cut
from hybrid_engine.ops import NORM_OPS


def submodule(root: nn.Module, path: str) -> nn.Module:
    """Returns the module at `path`; raises UnsupportedModelError, which names both, if there is none."""
    try:
        return root.get_submodule(path)
    except AttributeError as error:
        raise UnsupportedModelError(f"{type(root).__name__} has no {path!r}, which its policy names") from error


def has_module(root: nn.Module, path: str) -> bool:
    """Whether there is a module at `path`."""
    try:
        root.get_submodule(path)
    except AttributeError:
        return False
    return True


def attribute(root: nn.Module, path: str) -> Any:
    """Returns the attribute at `path`, a parameter or a number."""
    owner, _, name = path.rpartition(".")
    module = submodule(root, owner) if owner else root
    if not hasattr(module, name):
        raise UnsupportedModelError(f"{type(root).__name__} has no {path!r}, which its policy names")
    return getattr(module, name)


def config_value(config: Any, name: str) -> Any:
    """Returns the config's value of `name`; raises UnsupportedModelError if it has none."""
    if not hasattr(config, name):
        raise UnsupportedModelError(f"{type(config).__name__} has no {name!r}, which the policy names")
    return getattr(config, name)


def class_name(module: nn.Module) -> str:
    """Qualified class name of `module` with its package, because adapters have the class names of what they adapt."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def norm_eps(norm: nn.Module) -> float:
    """Returns eps under either of the names in transformers' norms; raises UnsupportedModelError without one."""
    found = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if found is None:
        raise UnsupportedModelError(f"{class_name(norm)} in the place of a norm: it has no eps")
    return found


class NormView:
    """`gamma [E]` and `beta [E]` or None of one norm, its kind and eps."""

    def __init__(self, module: nn.Module, kind: NormKind, parallel: TensorParallel = ALONE):
        if getattr(module, "weight", None) is None:
            raise UnsupportedModelError(f"{type(module).__name__} has no weight")
        self.module, self.kind, self.eps, self.parallel = module, kind, norm_eps(module), parallel
        self.op: Any = NORM_OPS[kind](self.eps)
        self.gamma: torch.Tensor
        self.beta: torch.Tensor | None

    def bind(self) -> None:
        """Points the views at the parameters' current memory."""
        name, bias = type(self.module).__name__, getattr(self.module, "bias", None)
        self.gamma = self.parallel.take(self.module.weight, None, name)
        self.beta = None if bias is None else self.parallel.take(bias, None, name)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors that a forward pass reads."""
        return [self.gamma] if self.beta is None else [self.gamma, self.beta]

    def apply(self, input: torch.Tensor) -> torch.Tensor:
        """`[N, E]` -> `[N, E]`."""
        return self.op(input, self.gamma, self.beta)


class HeadNormsView:
    """Layer norms with separate weights for each head, stacked in a buffer that stays in place.

    Holds `num_heads` of all heads, from `first` on.
    """

    def __init__(self, module: nn.Module, first: int, num_heads: int, parallel: TensorParallel = ALONE):
        self.norms = [NormView(norm, "layer", parallel) for norm in submodule(module, "norms").children()]
        self.eps, self.parallel, self.heads = self.norms[0].eps, parallel, slice(first, first + num_heads)
        self.gamma: torch.Tensor | None = None  # [H, D]

    def bind(self) -> None:
        """Copies the current weights."""
        for norm in self.norms:
            norm.bind()
            if norm.beta is not None:
                raise UnsupportedModelError("norms of single heads with a bias")
        self.parallel.wait()
        stacked = torch.stack([norm.gamma for norm in self.norms[self.heads]])
        if self.gamma is None or self.gamma.device != stacked.device or self.gamma.dtype != stacked.dtype:
            self.gamma = stacked
        else:
            self.gamma.copy_(stacked)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors that a forward pass reads."""
        assert self.gamma is not None
        return [self.gamma]

    def apply(self, input: torch.Tensor) -> torch.Tensor:
        """`[N, H, D]` -> `[N, H, D]`."""
        assert self.gamma is not None
        return torch.nn.functional.layer_norm(input, input.shape[-1:], None, None, self.eps) * self.gamma


class EmbeddingView:
    """`weight [V, E]` of an embedding, or this rank's rows of it; every rank looks up the same result.

    Raises UnsupportedModelError for a module that is not an embedding.
    """

    def __init__(self, module: nn.Module, parallel: TensorParallel = ALONE, is_cut: bool = False):
        if not isinstance(module, nn.Embedding):
            raise UnsupportedModelError(f"{class_name(module)} in the place of an embedding")
        self.module, self.parallel = module, parallel
        self.ranges = parallel.chunks(module.num_embeddings) if is_cut else None
        # Gemma's embedding multiplies its result.
        self.scale: torch.Tensor | None = getattr(module, "embed_scale", None)
        self.weight: torch.Tensor = module.weight

    def bind(self) -> None:
        """Points the view at the parameter's current memory, or reads this rank's part of it."""
        self.weight = self.parallel.take(self.module.weight, cut(0, self.ranges), "the embedding")

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        """`[N]` -> `[N, E]`."""
        hidden = self.weight[tokens] if self.ranges is None else self._look_up_cut(tokens)
        return hidden if self.scale is None else hidden * self.scale.to(hidden.dtype)

    def _look_up_cut(self, tokens: torch.Tensor) -> torch.Tensor:
        """Looks up rows that are split over ranks: the rank that has a row returns it; the others add zeros."""
        assert self.ranges is not None
        ((start, stop),) = self.ranges[self.parallel.rank]
        is_here = (tokens >= start) & (tokens < stop)
        if stop == start:
            return self.parallel.all_reduce(self.weight.new_zeros(len(tokens), self.weight.shape[1]))
        rows = self.weight[(tokens - start).clamp(0, stop - start - 1)]
        return self.parallel.all_reduce(rows.masked_fill(~is_here[:, None], 0.0))
