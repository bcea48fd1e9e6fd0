"""Activations of the MLP, by the names that Hugging Face configs use (`hidden_act`, `activation_function`)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by the tanh approximation (Hendrycks & Gimpel 2016), the one that GPT-2 was trained with."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
}
