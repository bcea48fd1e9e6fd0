"""Changes of layout of a local tensor, with the inverse change of its gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hybrid_engine.extensions.parallelize.planning.moving import Layout, gradient_layout


@dataclass(frozen=True)
class Relay:
    """A tensor that lies in one layout and is read in another, and the layout of the gradient that its reader gives."""

    layout: Layout
    wanted: Layout
    gradient: Layout

    def is_kept(self, needs_gradient: bool) -> bool:
        """Whether nothing has to be done."""
        return self.wanted == self.layout and (self.gradient == gradient_layout(self.layout) or not needs_gradient)

    def entered(self, tensor: Tensor, mesh: DeviceMesh) -> DTensor:
        """The local tensor as one over `mesh`, in the layout that is wanted as far as there is a way to it.

        ValueError where a dimension that is to be split does not divide.
        """
        for dim, size in self._split_dims(mesh):
            if tensor.shape[dim] % size:
                raise ValueError(
                    f"a tensor of shape {tuple(tensor.shape)} is split along dimension {dim} over {size} processes, "
                    f"which must divide it; pad it to a multiple of {size}"
                )
        distributed = DTensor.from_local(tensor, mesh, self.layout, run_check=False)
        return distributed.redistribute(mesh, self.reached)

    def left(self, distributed: DTensor) -> Tensor:
        """The local part of what `entered` gave, as the reader wants it."""
        local = distributed.to_local(grad_placements=self.gradient)
        return term_of_sum(local, distributed.device_mesh, self.wanted, self.reached)

    @property
    def reached(self) -> Layout:
        """The layout that is wanted, but no sum of what is none."""
        return tuple(reachable(*pair) for pair in zip(self.wanted, self.layout, strict=True))

    def _split_dims(self, mesh: DeviceMesh) -> list[tuple[int, int]]:
        pairs = enumerate(zip(self.layout, self.wanted, strict=True))
        return [(to.dim, mesh.size(axis)) for axis, (of, to) in pairs if isinstance(to, Shard) and of != to]


def reachable(wanted: Placement, placement: Placement) -> Placement:
    """What a tensor is redistributed to where an op wants `wanted`: DTensor makes no sums of what is none."""
    return Replicate() if wanted.is_partial() and not placement.is_partial() else wanted


def term_of_sum(local: Tensor, mesh: DeviceMesh, wanted: Sequence[Placement], reached: Sequence[Placement]) -> Tensor:
    """`local` as a term of the sum that is wanted, where it is the whole."""
    pairs = enumerate(zip(wanted, reached, strict=True))
    num_terms = prod(mesh.size(axis) for axis, (one, other) in pairs if one != other)
    return local if num_terms == 1 else _Term.apply(local, num_terms)


class _Term(torch.autograd.Function):
    """A tensor that every rank has, as a sum over ranks. Every rank has the sum's gradient, which is the tensor's."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, num_terms: int) -> Tensor:
        return tensor / num_terms

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
