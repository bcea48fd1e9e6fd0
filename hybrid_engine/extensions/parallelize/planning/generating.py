"""What the same weights need to generate: gathered weights, and keys and values of tokens."""

from collections.abc import Sequence
from math import prod

from hybrid_engine.extensions.parallelize.graph.graph import Graph, Op
from hybrid_engine.extensions.parallelize.planning.op_costs import ATTENTION
from hybrid_engine.extensions.parallelize.planning.setting import Setting

COPIES = frozenset({"expand", "reshape", "view", "clone", "contiguous", "repeat_interleave", "transpose", "unsqueeze"})
"""Ops by which keys come to be there once for each query head."""


def generation_bytes(graph: Graph, setting: Setting, ops: Sequence[Op], num_parts: int) -> float:
    """The bytes that one process needs to generate with the layers of `ops`, beside what it has of their parameters.

    `num_parts` processes share these: where they generate together, each does from what it holds and from copies
    (`Cost.copied_bytes`); else weights are gathered. 0 where nobody generates.
    """
    generation = setting.generation
    if generation is None:
        return 0.0
    needed = generation.num_tokens * token_bytes(graph, setting, ops)
    if generation.tensor_parallel != num_parts:
        values = graph.of_kind("parameter")
        read = {key for op in ops for key in op.inputs} & values.keys()
        needed += sum(prod(values[key].shape) * setting.weights.itemsize(values[key].dtype) for key in read)
    return needed / generation.tensor_parallel


def token_bytes(graph: Graph, setting: Setting, ops: Sequence[Op]) -> float:
    """The bytes of the keys and values of one token in the layers of `ops`."""
    makers = {key: op for op in graph.ops.values() for key in op.outputs}
    total = 0.0
    for op in ops:
        for key in op.inputs[1:3] if op.name == ATTENTION else ():
            shape = graph.values[key].shape
            num_tokens = shape[-2] * (shape[0] if len(shape) > 3 else 1)
            least = prod(shape)
            while key in makers and makers[key].name in COPIES:
                key = makers[key].inputs[0]
                least = min(least, prod(graph.values[key].shape))
            total += least / num_tokens * setting.weights.itemsize(graph.values[key].dtype)
    return total
