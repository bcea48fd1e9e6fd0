"""LoRA as scripts for DeepSpeed write it themselves: a linear's place is taken by a module with these attributes."""

import math

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D


class LinearLoRA(nn.Module):
    """Behaves as DeepSpeed-Chat's does: `train()` returns nothing and reaches the dropout only, `fuse_lora` skips."""

    def __init__(self, linear: nn.Module, rank: int = 3, scaling: float = 2.0, dropout: float = 0.2):
        nn.Module.__init__(self)
        self.weight, self.bias = linear.weight, linear.bias
        outputs, inputs = self.sizes()
        self.lora_right_weight = nn.Parameter(torch.empty(inputs, rank))
        self.lora_left_weight = nn.Parameter(torch.zeros(rank, outputs))
        nn.init.kaiming_uniform_(self.lora_right_weight, a=math.sqrt(5))
        self.lora_scaling = scaling / rank
        self.lora_dropout = nn.Dropout(dropout) if dropout > 0 else nn.Identity()
        self.weight.requires_grad = False
        self.fuse_lora = False

    def sizes(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.weight.shape[0], self.weight.shape[1]

    def train(self, mode: bool = True) -> None:
        self.lora_dropout.train(mode)

    def eval(self) -> None:
        self.train(False)

    def update(self) -> torch.Tensor:
        """What the adapter adds to the weight, in its shape."""
        return self.lora_scaling * (self.lora_right_weight @ self.lora_left_weight).t()

    def fuse_lora_weight(self) -> None:
        if not self.fuse_lora:
            self.weight.data += self.update()
        self.fuse_lora = True

    def unfuse_lora_weight(self) -> None:
        if self.fuse_lora:
            self.weight.data -= self.update()
        self.fuse_lora = False

    def base(self, input: torch.Tensor) -> torch.Tensor:
        """Without the adapter."""
        return nn.functional.linear(input, self.weight, self.bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = self.base(input)
        if self.fuse_lora:
            return output
        return output + (self.lora_dropout(input) @ self.lora_right_weight @ self.lora_left_weight) * self.lora_scaling


class Conv1DLoRA(LinearLoRA, Conv1D):
    """The same for transformers' GPT-2 linear, whose weight is `[in, out]`."""

    def __init__(self, conv: Conv1D, **options: float):
        super().__init__(conv, **options)
        self.nx, self.nf = conv.nx, conv.nf

    def sizes(self) -> tuple[int, int]:
        return self.weight.shape[1], self.weight.shape[0]

    def update(self) -> torch.Tensor:
        return super().update().t()

    def base(self, input: torch.Tensor) -> torch.Tensor:
        return Conv1D.forward(self, input)


def replace_linears(model: nn.Module, **options: float) -> nn.Module:
    """Puts an adapted linear in the place of every linear; like a new adapter it adds nothing yet. Returns `model`."""
    torch.manual_seed(4)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear | Conv1D):
                setattr(parent, name, (Conv1DLoRA if isinstance(child, Conv1D) else LinearLoRA)(child, **options))
    return model


def adapters(model: nn.Module) -> list[LinearLoRA]:
    return [module for module in model.modules() if isinstance(module, LinearLoRA)]


@torch.no_grad()
def randomise_adapters(model: nn.Module) -> nn.Module:
    """Adapters that do something, as after training. Returns `model`."""
    torch.manual_seed(5)
    for adapter in adapters(model):
        adapter.lora_left_weight.normal_(std=0.3)
    return model
