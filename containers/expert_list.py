"""Stacks experts that a model keeps as a list of modules into one tensor, which the grouped product reads.

DeepSpeed's MoE layers have such lists (deepspeed/moe/experts.py). Their weights are separate, so a view cannot stack
them: each `bind` copies them into the same buffer. X experts.
"""

import torch
from torch import nn

from hybrid_engine.containers.linear import TransposedLinear
from hybrid_engine.containers.policy import UnsupportedModelError
from hybrid_engine.containers.tensor_parallel import ALONE, Ranges, TensorParallel
from hybrid_engine.containers.views import submodule


class ExpertList:
    """`tensor [X, out, in]` and `bias [X, out]` or None: the linear at `path` of every expert, or this rank's part.

    Raises UnsupportedModelError if an expert has no such linear, or one of another shape.
    """

    def __init__(
        self,
        experts: nn.Module,
        path: str,
        name: str,
        parallel: TensorParallel = ALONE,
        columns: Ranges | None = None,
        rows: Ranges | None = None,
    ):
        self.name, self.parallel = f"{name}.{path}", parallel
        self.linears = [
            TransposedLinear(submodule(expert, path), f"{name}.{index}.{path}", parallel, columns, rows)
            for index, expert in enumerate(experts.children())
        ]
        sizes = {(linear.num_outputs, linear.num_inputs) for linear in self.linears}
        if len(sizes) != 1:
            raise UnsupportedModelError(f"{self.name} has linears of {len(sizes)} shapes; expected one")
        self.shape = (len(self.linears), *sizes.pop())
        self.tensor = torch.empty(0)  # empty until `bind`
        self.bias: torch.Tensor | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors that a forward pass reads."""
        return [self.tensor] if self.bias is None else [self.tensor, self.bias]

    def bind(self) -> None:
        """Copies the current parameters, unfused."""
        for linear in self.linears:
            linear.bind()
        self.parallel.wait()
        self._copy()

    @property
    def buffer_bytes(self) -> int:
        """Returns 0: the buffer of `fuse_lora` exists already."""
        return 0

    def fuse_lora(self) -> int:
        """Copies weights with the active adapters added; returns 0, because the buffer exists already."""
        if sum(linear.fuse_lora() for linear in self.linears) > 0:
            self._copy()
            for linear in self.linears:
                linear.unfuse_lora()
        return 0

    def unfuse_lora(self) -> None:
        """Does nothing: the parameters were never written to, and `bind` copies them again."""

    def _copy(self) -> None:
        weights, biases = zip(*(linear.pair for linear in self.linears), strict=True)
        self.tensor = _stacked([weight.t() for weight in weights], self.tensor)
        self.bias = None if biases[0] is None else _stacked(list(biases), self.bias)


def _stacked(parts: list[torch.Tensor], buffer: torch.Tensor | None) -> torch.Tensor:
    """Stacks the parts into `buffer`, so that its address stays, or into a new one if they do not fit."""
    first = parts[0]
    if buffer is None or not buffer.numel() or buffer.dtype != first.dtype or buffer.device != first.device:
        return torch.stack(parts)
    for place, part in zip(buffer, parts, strict=True):
        place.copy_(part)
    return buffer
