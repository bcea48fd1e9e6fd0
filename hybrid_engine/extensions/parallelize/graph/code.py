"""Which module's code an op stands in: between two ops of it there is no module's border.

A *leaf* is a module whose forward calls ops and no module that does.
"""

from dataclasses import dataclass

from hybrid_engine.extensions.parallelize.graph.graph import Graph, Op

RESHAPES = ("view", "reshape", "_unsafe_view")

FREE, FIXED, RESHAPED, SHARED, END = WAYS = ("free", "fixed", "reshaped", "shared", "end")
"""It is read in any layout; as it is made; so too, but of a whole one each process may have a term of the gradient; in
one layout by all that read it this way, and its gradient lies alike; whole, as a result of the module."""


@dataclass(frozen=True)
class Code:
    """The ops of a graph by the modules that call them."""

    graph: Graph
    leaves: frozenset[str]
    makers: dict[str, Op]
    """By the key of a result, the op that makes it."""

    @classmethod
    def of(cls, graph: Graph) -> "Code":
        """That of a graph."""
        paths = {op.path for op in graph.ops.values()}
        leaves = frozenset(path for path in paths if not any(_is_inside(other, path) for other in paths))
        return cls(graph, leaves, {key: op for op in graph.ops.values() for key in op.outputs})

    def origin(self, key: str, path: str | None) -> str:
        """The tensor that code outside of a leaf reads where the trace saw it leave a cast in it that changes nothing.

        Such a cast gives the very tensor that it was given, which the hooks of that leaf do not change.
        """
        maker = self.makers.get(key)
        if maker is None or maker.name not in ("to", "contiguous") or maker.path == path:
            return key
        source, result = self.graph.values[maker.inputs[0]], self.graph.values[key]
        is_same = (source.dtype, source.shape) == (result.dtype, result.shape) and maker.path in self.leaves
        return self.origin(source.key, path) if is_same else key

    def is_own(self, op: Op, key: str) -> bool:
        """Whether `op` reads what the code of its own module made, or holds as a buffer or constant."""
        kind = self.graph.values[key].kind
        return self.makers[key].path == op.path if kind == "result" else kind in ("buffer", "constant")

    def way(self, op: Op, key: str) -> str:
        """How a tensor gets to `op` where layouts change at borders of modules alone; see `WAYS`."""
        maker = self.makers.get(key)
        if self.graph.values[key].kind == "parameter":
            return FREE
        if op.path in self.leaves:
            if not self.is_own(op, key):
                return FREE
            return RESHAPED if maker is not None and self.is_reshaped_inside(maker, key) else FIXED
        return SHARED if maker is not None and maker.path in self.leaves else FIXED

    def is_reshaped_inside(self, maker: Op, key: str) -> bool:
        """Whether a leaf only reshapes to `key` what it is given, for itself."""
        readers = [op.path for op in self.graph.ops.values() if key in op.inputs]
        return maker.name in RESHAPES and maker.path in self.leaves and set(readers) == {maker.path}


def _is_inside(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(f"{outer}."))
