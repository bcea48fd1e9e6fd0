"""Weights that transformers loaded in 4 or 8 bits, and what they are in the precision that their model computes in.

bitsandbytes keeps blocks of packed values beside their scales (`Params4bit.quant_state`), torchao a tensor whose
`dequantize()` gives the values. Both libraries' own products multiply by these values, so that rollout and trainer
agree; where the inputs of a product are rounded too, as bitsandbytes' LLM.int8 does, containers would not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hybrid_engine.containers.policy import UnsupportedModelError


@dataclass(frozen=True)
class Quantised:
    """A weight that has to be dequantised to be read."""

    shape: tuple[int, int]  # [out, in]
    dtype: torch.dtype  # of its values
    device: torch.device
    dequantise: Callable[[], torch.Tensor]  # a new tensor [out, in]

    def no_values(self) -> torch.Tensor:
        """`[in, 0]`: stands for the weight until it is dequantised; no product takes it for one."""
        return torch.empty(self.shape[1], 0, dtype=self.dtype, device=self.device)


def is_quantised(parameter: object) -> bool:
    """Whether a parameter holds packed values of bitsandbytes or torchao."""
    kind = type(parameter)
    return kind.__name__ in ("Params4bit", "Int8Params") or kind.__module__.partition(".")[0] == "torchao"


def read_quantised(module: nn.Module, name: str) -> Quantised | None:
    """How the weight of the linear `module` is dequantised; None for one that is not quantised.

    Raises:
        UnsupportedModelError: the module's own product is another than one by those values.
    """
    weight = module.weight
    if not isinstance(weight, torch.Tensor) or not is_quantised(weight):
        return None
    if type(weight).__name__ == "Int8Params":
        raise UnsupportedModelError(
            f"{name} rounds its inputs to 8 bits too (bitsandbytes' LLM.int8), which containers do not; load the model "
            "in 4 bits, or in 8 by torchao's Int8WeightOnlyConfig"
        )
    if getattr(weight, "act_quant_kwargs", None) is not None or "Activation" in type(weight).__name__:
        raise UnsupportedModelError(
            f"{name} rounds its inputs too ({type(weight).__name__}), which containers do not; quantise weights only"
        )
    shape = (module.out_features, module.in_features)
    return Quantised(shape, values_dtype(weight), weight.device, lambda: dequantise(module.weight))


def stored_tensors(parameter: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a parameter lies in: itself, or packed values and scales."""
    if type(parameter).__name__ == "Params4bit":
        state = parameter.quant_state  # type: ignore[attr-defined]
        states = [state] if state.state2 is None else [state, state.state2]
        return [parameter.data, *(part for one in states for part in (one.absmax, one.code))]
    if type(parameter).__name__ == "Int8Params":
        return [parameter.data, *([] if parameter.SCB is None else [parameter.SCB])]  # type: ignore[attr-defined]
    if not is_quantised(parameter):
        return [parameter]
    names, _ = parameter.__tensor_flatten__()  # type: ignore[attr-defined]
    return [part for name in names for part in stored_tensors(getattr(parameter, name))]


def keep_as_loaded(model: nn.Module) -> None:
    """Before a model is used: bitsandbytes leaves its packed weights as they are.

    On CPUs with AVX512-BF16 its first forward pass in eval mode would repack them in place, their scales rounded to
    bf16 (0.50, bitsandbytes/nn/modules.py, `Linear4bit.forward`): another function than the one that is trained.

    Raises:
        ValueError: it has done so already.
    """
    for name, module in model.named_modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
                raise ValueError(
                    f"model: {name} was repacked by a forward pass of bitsandbytes in eval mode, which rounds its "
                    "scales; load the model anew, and pass it on before it is used"
                )
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def values_dtype(weight: torch.Tensor) -> torch.dtype:
    """What a quantised weight is dequantised to."""
    state = getattr(weight, "quant_state", None)
    return weight.dtype if state is None else state.dtype


def dequantise_weight_of(module: Any) -> torch.Tensor:
    """The values `[out, in]` of the quantised weight of a linear, of whatever kind; as `dequantise`.

    The first forward pass of bitsandbytes' LLM.int8 takes the scales from the weight to the module's state.
    """
    weight = module.weight
    if type(weight).__name__ != "Int8Params":
        return dequantise(weight)
    scales = module.state.SCB if weight.SCB is None else weight.SCB
    return weight.detach().float() * (scales.float().view(-1, 1) / 127)


def dequantise(weight: torch.Tensor) -> torch.Tensor:
    """The values `[out, in]` of a quantised weight, in a new tensor; the weight stays as it is.

    Not of LLM.int8, whose products are others than by these values.
    """
    if type(weight).__name__ != "Params4bit":
        return weight.detach().dequantize()
    # Here, not at the top: an optional package, of which the weight is.
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, weight.quant_state)  # type: ignore[attr-defined]
