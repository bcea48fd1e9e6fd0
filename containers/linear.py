"""A linear as inference reads it: an [in, out] view of its weight, or LoRA fused into a scratch of that shape.

Fusing never writes to the base weight: it computes `W^T + sum_i s_i A_i^T B_i^T` in fp32 into a buffer of
its own, rounded once to the weight's dtype. Unfusing drops the buffer, so the weights after are the
weights before, to the bit.

peft's layers are read by their attributes (`base_layer`, `lora_A`, `lora_B`, `scaling`, `active_adapters`,
`disable_adapters`, `merged`): https://github.com/huggingface/peft, src/peft/tuners/lora/layer.py.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hybrid_engine.containers.policy import UnsupportedModelError


@dataclass(frozen=True)
class LoraAdapter:
    """One low-rank update: `scale * B A` is added to the [out, in] weight."""

    a: nn.Linear  # weight [r, in]
    b: nn.Linear  # weight [out, r]; its bias, if any, is added with the same scale
    scale: float


def active_adapters(module: nn.Module, name: str) -> list[LoraAdapter]:
    """The adapters that `module`'s own forward would add now; none for a module that is not peft's."""
    if not hasattr(module, "base_layer"):
        return []
    if module.disable_adapters and module.merged:
        raise UnsupportedModelError(f"the adapters of {name} are merged and disabled; call unmerge_adapter() first")
    if module.disable_adapters or module.merged:
        return []
    if not hasattr(module, "lora_A"):
        raise UnsupportedModelError(f"{name} carries a {type(module).__name__}, which is not LoRA on a linear")
    names = [adapter for adapter in module.active_adapters if adapter in module.lora_A]
    for adapter in names:
        parts = module.lora_A[adapter], module.lora_B[adapter]
        if not all(isinstance(part, nn.Linear) for part in parts):
            raise UnsupportedModelError(f"adapter {adapter!r} of {name} is a {type(module).__name__}, not plain LoRA")
        if adapter in getattr(module, "lora_variant", {}):
            variant = type(module.lora_variant[adapter]).__name__
            raise UnsupportedModelError(f"adapter {adapter!r} of {name} is a LoRA variant ({variant})")
    return [
        LoraAdapter(module.lora_A[adapter], module.lora_B[adapter], float(module.scaling[adapter])) for adapter in names
    ]


def whole(parameter: torch.Tensor, name: str) -> torch.Tensor:
    """A detached alias of a parameter that must lie whole in memory; RuntimeError for a shard or freed storage."""
    if isinstance(parameter, DTensor) or parameter.untyped_storage().nbytes() == 0:
        raise RuntimeError(f"{name} is not gathered; gather the weights before binding them")
    return parameter.detach()


class TransposedLinear:
    """`weight [in, out]` and `bias [out]` or None, ready for the ops; valid from `bind` until the weights move.

    A parameter that is not gathered is a RuntimeError at `bind`, never silent garbage.

    Raises UnsupportedModelError for a module that is neither a linear nor peft LoRA on one.
    """

    def __init__(self, module: nn.Module, name: str):
        self.module, self.name = module, name
        self.base = getattr(module, "base_layer", module)
        # Conv1D is transformers' GPT-2 linear, whose weight is stored [in, out].
        self.is_stored_transposed = type(self.base).__name__ == "Conv1D"
        if not (isinstance(self.base, nn.Linear) or self.is_stored_transposed):
            raise UnsupportedModelError(f"{name} is a {type(self.base).__name__}, not a linear")
        shape = (self.base.nx, self.base.nf) if self.is_stored_transposed else self._linear_shape()
        if tuple(self.base.weight.shape) != shape or not self.base.weight.is_floating_point():
            raise UnsupportedModelError(f"{name} packs its weight as {self.base.weight.dtype} {self.base.weight.shape}")
        active_adapters(module, name)
        self.view: tuple[torch.Tensor, torch.Tensor | None]  # of the parameters
        self.pair: tuple[torch.Tensor, torch.Tensor | None]  # (weight, bias) as the ops take them: view or fused

    def _linear_shape(self) -> tuple[int, int]:
        return self.base.out_features, self.base.in_features

    def bind(self) -> None:
        """Points at the parameters as they lie in memory now. They must be whole: gathered, if sharded."""
        weight = whole(self.base.weight, self.name)
        bias = None if self.base.bias is None else self.base.bias.detach()
        self.view = self.pair = (weight if self.is_stored_transposed else weight.t(), bias)

    def fuse_lora(self) -> int:
        """Adds the active adapters into a buffer of this linear's own; returns its bytes, 0 without adapters."""
        adapters = active_adapters(self.module, self.name)
        if not adapters:
            return 0
        (weight, bias), dtype = self.view, self.view[0].dtype
        weight = weight.float()
        for adapter in adapters:
            a, b = adapter.a.weight.detach().float(), adapter.b.weight.detach().float()
            weight = torch.addmm(weight, a.t(), b.t(), alpha=adapter.scale)
            if adapter.b.bias is not None:
                offset = adapter.scale * adapter.b.bias.detach()
                bias = offset if bias is None else bias + offset
        weight = weight.to(dtype)
        self.pair = (weight, bias if bias is None else bias.to(dtype))
        return weight.nbytes

    def unfuse_lora(self) -> None:
        """Back to the parameters, which fusing has not touched; the buffer is freed."""
        self.pair = self.view

    @property
    def is_fused(self) -> bool:
        """Whether the ops see the adapters fused."""
        return self.pair is not self.view
