"""Dequantizes weights that transformers loaded in 4 or 8 bits to the precision that their model computes in.

bitsandbytes keeps blocks of packed values with their scales (`Params4bit.quant_state`), torchao a tensor whose
`dequantize()` returns the values. Both libraries' own products multiply by these values, so rollout and trainer agree.
If a product's inputs are rounded too, as in bitsandbytes' LLM.int8, containers would not agree.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hybrid_engine.containers.policy import UnsupportedModelError


@dataclass(frozen=True)
class Quantised:
    """A weight that must be dequantized before it is read."""

    shape: tuple[int, int]  # [out, in]
    dtype: torch.dtype  # dtype of its values
    device: torch.device
    dequantise: Callable[[], torch.Tensor]  # a new tensor [out, in]

    def no_values(self) -> torch.Tensor:
        """Returns `[in, 0]`, which replaces the weight until it is dequantized; no product accepts it as a weight."""
        return torch.empty(self.shape[1], 0, dtype=self.dtype, device=self.device)


def is_quantised(parameter: object) -> bool:
    """Whether a parameter holds packed values of bitsandbytes or torchao."""
    kind = type(parameter)
    return kind.__name__ in ("Params4bit", "Int8Params") or kind.__module__.partition(".")[0] == "torchao"


def read_quantised(module: nn.Module, name: str) -> Quantised | None:
    """Describes how the weight of the linear `module` is dequantized; None if it is not quantized.

    Raises:
        UnsupportedModelError: the module's own product is not a product by those values.
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
    """Returns the plain tensors that store a parameter: itself, or packed values and scales."""
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
    """Prevents bitsandbytes from repacking its weights; called before a model is used.

    On CPUs with AVX512-BF16 its first forward pass in eval mode would repack them in place, with scales rounded to bf16
    (0.50, bitsandbytes/nn/modules.py, `Linear4bit.forward`), which changes the function that is trained.

    Raises:
        ValueError: the weights were repacked already.
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
    """Returns the dtype that a quantized weight is dequantized to."""
    state = getattr(weight, "quant_state", None)
    return weight.dtype if state is None else state.dtype


def dequantise_weight_of(module: Any) -> torch.Tensor:
    """Returns the values `[out, in]` of the quantized weight of a linear of any kind. See `dequantise`.

    The first forward pass of bitsandbytes' LLM.int8 moves the scales from the weight to the module's state.
    """
    weight = module.weight
    if type(weight).__name__ != "Int8Params":
        return dequantise(weight)
    scales = module.state.SCB if weight.SCB is None else weight.SCB
    return weight.detach().float() * (scales.float().view(-1, 1) / 127)


def dequantise(weight: torch.Tensor) -> torch.Tensor:
    """Returns the values `[out, in]` of a quantized weight in a new tensor; the weight is not changed.

    Not for LLM.int8, whose products are not products by these values.
    """
    if type(weight).__name__ != "Params4bit":
        return weight.detach().dequantize()
    # Imported here, not at the top: bitsandbytes is optional; a weight of its type implies that it is installed.
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, weight.quant_state)  # type: ignore[attr-defined]
