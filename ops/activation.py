"""Activations of the MLP, by the names that Hugging Face configs use (`hidden_act`, `activation_function`).

`ACTIVATIONS` are the references; `activate` is the same functions inside a kernel, in fp32. There
tanh(u) is 2 sigmoid(2u) - 1, so 0.5 x (1 + tanh(u)) is x sigmoid(2u).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from hybrid_engine.ops.dispatch import tl, triton


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by the tanh approximation (Hendrycks & Gimpel 2016), the one that GPT-2 was trained with."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU by the sigmoid approximation (Hendrycks & Gimpel 2016), rounded where transformers rounds."""
    return x * torch.sigmoid(1.702 * x)


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """relu(x)^2 (So et al. 2021, arXiv 2109.08668)."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "relu2": relu_squared,
    "gelu": F.gelu,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
}


@triton.jit
def activate(x, NAME: tl.constexpr):
    """fp32 in, fp32 out; NAME is a key of ACTIVATIONS. NaN stays NaN."""
    if NAME == "silu" or NAME == "swish":
        y = x * tl.sigmoid(x)
    elif NAME == "relu":
        y = tl.where(x < 0, 0.0, x)
    elif NAME == "relu2":
        y = tl.where(x < 0, 0.0, x * x)
    elif NAME == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif NAME == "quick_gelu":
        y = x * tl.sigmoid(1.702 * x)
    else:
        tl.static_assert(NAME == "gelu_new" or NAME == "gelu_fast" or NAME == "gelu_pytorch_tanh")
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return y
