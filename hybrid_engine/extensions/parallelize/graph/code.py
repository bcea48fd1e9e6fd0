"""Which module's code each op belongs to, for planning and lowering with `eager`.

There is no module border between two ops of the same code. A *leaf* is a module whose forward calls ops and does not
call a module that calls ops.
"""

from dataclasses import dataclass

from hybrid_engine.extensions.parallelize.graph.graph import Graph, Op

RESHAPES = ("view", "reshape", "_unsafe_view")

FREE, FIXED, RESHAPED, SHARED, END = WAYS = ("free", "fixed", "reshaped", "shared", "end")
"""How an op can read a tensor: in any layout (free); in the layout in which it was made (fixed); the same, but each
process may hold a partial sum of the gradient of a whole tensor (reshaped); in one layout for all ops that read it this
way, with the gradient in the same layout (shared); whole, as a result of the module (end).
"""


@dataclass(frozen=True)
class Code:
    """The ops of a graph, grouped by the modules that call them."""

    graph: Graph
    leaves: frozenset[str]
    makers: dict[str, Op]
    """Maps the key of a result to the op that makes it."""

    @classmethod
    def of(cls, graph: Graph) -> "Code":
        """Groups the ops of a graph."""
        paths = {op.path for op in graph.ops.values()}
        leaves = frozenset(path for path in paths if not any(_is_inside(other, path) for other in paths))
        return cls(graph, leaves, {key: op for op in graph.ops.values() for key in op.outputs})

    def origin(self, key: str, path: str | None) -> str:
        """The tensor that code at `path` reads as `key`: the operand of a leaf's cast if the cast changed nothing.

        Such a cast returns the same tensor object that it received, which the hooks of that leaf do not change.
        """
        maker = self.makers.get(key)
        if maker is None or maker.name not in ("to", "contiguous") or maker.path == path:
            return key
        source, result = self.graph.values[maker.inputs[0]], self.graph.values[key]
        is_same = (source.dtype, source.shape) == (result.dtype, result.shape) and maker.path in self.leaves
        return self.origin(source.key, path) if is_same else key

    def is_own(self, op: Op, key: str) -> bool:
        """Whether `op` reads a result of its own module's code, or a buffer or constant."""
        kind = self.graph.values[key].kind
        return self.makers[key].path == op.path if kind == "result" else kind in ("buffer", "constant")

    def way(self, op: Op, key: str) -> str:
        """How a tensor reaches `op` if layouts change only at module borders; one of `WAYS`."""
        maker = self.makers.get(key)
        if self.graph.values[key].kind == "parameter":
            return FREE
        if op.path in self.leaves:
            if not self.is_own(op, key):
                return FREE
            return RESHAPED if maker is not None and self.is_reshaped_inside(maker, key) else FIXED
        return SHARED if maker is not None and maker.path in self.leaves else FIXED

    def is_reshaped_inside(self, maker: Op, key: str) -> bool:
        """Whether `key` is a reshape of a leaf's input that only the leaf itself reads."""
        readers = [op.path for op in self.graph.ops.values() if key in op.inputs]
        return maker.name in RESHAPES and maker.path in self.leaves and set(readers) == {maker.path}


def _is_inside(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(f"{outer}."))
