"""What generation copies: parts of parameters that a plan keeps otherwise than containers read them.

Both are asked of those who do it: containers say what each rank reads, `hybrid_engine.zero.unit_parts` whether that
lies in what its process holds.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import nn

from hybrid_engine.containers import InferenceModel, UnsupportedModelError
from hybrid_engine.containers.tensor_parallel import Cut, TensorParallel
from hybrid_engine.extensions.parallelize.graph.graph import Graph
from hybrid_engine.extensions.parallelize.planning.moving import Layout
from hybrid_engine.zero.unit_parts import bounds_of, inside_of, part_shape, places_of_ranks

Reads = dict[str, list[Cut | None]]
"""By the name of a parameter, what ranks read of it; None: all of it."""


class Copies:
    """The copies that processes need which generate together from the parts that they train.

    They are a mesh of these sizes; `order` are its axes, that one first which is the outermost for tensor parallelism.
    """

    def __init__(self, graph: Graph, sizes: Sequence[int], order: Sequence[int]):
        self._sizes, self._reads = tuple(sizes), reads_of(graph.original, prod(sizes))
        places = places_of_ranks(sizes, order)
        coordinates = list(torch.cartesian_prod(*(torch.arange(size) for size in sizes)).view(-1, len(sizes)).tolist())
        self._coordinates = [coordinates[place] for place in places]

    def num_elements(self, name: str, shape: Sequence[int], layout: Layout) -> int:
        """The elements of a parameter, kept in `layout`, of which a process makes a copy."""
        return sum(self._copied(shape, layout, cut) for cut in self._reads.get(name, ()))

    def _copied(self, shape: Sequence[int], layout: Layout, cut: Cut | None) -> int:
        """Nothing where each rank reads one range of what its process holds, which is a view."""
        held = [bounds_of(shape, layout, self._sizes, coordinate) for coordinate in self._coordinates]
        inside = [inside_of(bounds, cut, rank, shape) for rank, bounds in enumerate(held)]
        if all(part is not None and all(len(ranges) == 1 for ranges in part.ranges) for part in inside):
            return 0
        return max(prod(part_shape(shape, cut, rank)) for rank in range(len(held)))


def reads_of(module: nn.Module, num_parts: int) -> Reads:
    """What `num_parts` processes read of the parameters of `module` to generate; of a model without containers nothing.

    Adapters, which are fused into weights, are not among them.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found: Reads = {}

    def read(parameter: torch.Tensor, cut: Cut | None, rank: int, name: str) -> torch.Tensor:
        cuts = found.setdefault(names[id(parameter)], [])
        cuts += [] if cut in cuts else [cut]
        return parameter.new_empty(part_shape(parameter.shape, cut, rank), device="meta")

    try:
        InferenceModel(module, TensorParallel(size=num_parts, read=read)).bind()
    except (UnsupportedModelError, ValueError):
        return {}
    return found
