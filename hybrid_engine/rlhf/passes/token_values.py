"""A number for every token that another head reads from a causal model's last hidden states; its logits are not made.

As in `head_log_probs.py` what the model's own head is given is caught before it, inside the forward pass, where sharded
weights are whole, and becomes the model's output.

R rows, W columns, E hidden size.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def token_values(model: nn.Module, head: nn.Linear, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """`[R, W]` fp32: what `head [1, E]` says of each token, differentiable in both. Collective where `model` is.

    Args:
        model: a causal model of transformers, one with adapters of peft, or an engine around one.
        head: a part of that model's module, so that it is sharded and trained with it.
        inputs: what the model's forward takes.
    """
    module: Any = getattr(model, "module", model)
    found: dict[str, torch.Tensor] = {}

    def before_head(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        (hidden,) = arguments
        found["values"] = head(hidden).squeeze(-1).float()
        return (hidden[:, :0],)

    def after_model(_: nn.Module, arguments: Any, output: Any) -> dict[str, torch.Tensor]:
        return found

    hooks = [
        module.get_output_embeddings().register_forward_pre_hook(before_head),
        module.register_forward_hook(after_model, prepend=True),
    ]
    try:
        return model(**inputs, use_cache=False)["values"]
    finally:
        for hook in hooks:
            hook.remove()
