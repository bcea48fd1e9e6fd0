"""This rank's part of every weight, read once and held; what it was cut from is then let go."""

from collections.abc import Callable

import torch
from torch import nn

from hybrid_engine.containers.tensor_parallel import Cut, read_whole


class HeldSlices:
    """Reads parts for containers, each once.

    Args:
        device: where parts are held.
        source: reads a part of a parameter from where it lies.
    """

    def __init__(
        self,
        device: torch.device,
        source: Callable[[torch.Tensor, Cut | None, int, str], torch.Tensor] = read_whole,
    ):
        self.device, self.source = device, source
        self._held: dict[tuple[int, Cut | None], torch.Tensor] = {}

    def read(self, parameter: torch.Tensor, cut: Cut | None, rank: int, name: str) -> torch.Tensor:
        """The part of `rank`, whose memory is this object's own."""
        key = (id(parameter), cut)
        if key not in self._held:
            part = self.source(parameter, cut, rank, name).to(self.device)
            # A view would keep the whole alive.
            self._held[key] = part.contiguous() if part.nbytes == part.untyped_storage().nbytes() else part.clone()
        return self._held[key]

    @property
    def num_bytes(self) -> int:
        """Bytes of the slices held now."""
        return sum(part.nbytes for part in self._held.values())

    def let_go(self, module: nn.Module) -> None:
        """Puts meta tensors in the place of the module's parameters; parts are found by those from then on."""
        replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in replaced:
                    empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
                    replaced[id(parameter)] = parameter, empty
                part._parameters[name] = replaced[id(parameter)][1]
        self._held = {(id(replaced[key][1]), cut): part for (key, cut), part in self._held.items()}
