"""What the same weights need to generate: gathered weights, and keys and values of tokens."""

from math import prod

from hybrid_engine.parallel.graph.graph import Graph
from hybrid_engine.parallel.planning.op_costs import ATTENTION
from hybrid_engine.parallel.planning.setting import Setting

COPIES = frozenset({"expand", "reshape", "view", "clone", "contiguous", "repeat_interleave", "transpose", "unsqueeze"})
"""Ops by which keys come to be there once for each query head."""


def generation_bytes(graph: Graph, setting: Setting) -> float:
    """The bytes that one process needs to generate beside its parts of parameters and optimizer, 0 where none does.

    Where the processes of a unit generate together, each does from what it holds, unless ZeRO shares that out.
    """
    generation = setting.generation
    if generation is None:
        return 0.0
    holds_its_part = generation.tensor_parallel == setting.plan_ngpus
    is_gathered = not holds_its_part or (setting.use_zero and setting.num_units > 1)
    weights = sum(prod(v.shape) * setting.weights.itemsize(v.dtype) for v in graph.of_kind("parameter").values())
    cache = generation.num_tokens * token_bytes(graph, setting)
    return (weights * is_gathered + cache) / generation.tensor_parallel


def token_bytes(graph: Graph, setting: Setting) -> float:
    """The bytes of the keys and values of one token in all layers."""
    makers = {key: op for op in graph.ops.values() for key in op.outputs}
    total = 0.0
    for op in graph.ops.values():
        for key in op.inputs[1:3] if op.name == ATTENTION else ():
            shape = graph.values[key].shape
            num_tokens = shape[-2] * (shape[0] if len(shape) > 3 else 1)
            least = prod(shape)
            while key in makers and makers[key].name in COPIES:
                key = makers[key].inputs[0]
                least = min(least, prod(graph.values[key].shape))
            total += least / num_tokens * setting.weights.itemsize(graph.values[key].dtype)
    return total
