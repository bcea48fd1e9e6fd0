"""Policy `tp`: tensor parallelism in Megatron-LM's layout, for `parallelize`.

A linear that reads whole tensors is split by columns: queries, keys and values by heads, the way up of an MLP. The ops
after it work on these parts, up to a linear that reads them; that one is split by rows, and its partial sums are added
up where they are read. Embeddings and logits are split by vocabulary. What does not divide by the number of processes
is whole on each of them.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from torch.distributed.tensor import Placement

from hybrid_engine.extensions.parallelize.graph.code import RESHAPES
from hybrid_engine.extensions.parallelize.graph.graph import Graph, Op
from hybrid_engine.extensions.parallelize.library.annotations import SUMMED
from hybrid_engine.extensions.parallelize.options.compute_config import ComputeConfig
from hybrid_engine.extensions.parallelize.planning.following import following
from hybrid_engine.extensions.parallelize.planning.op_costs import ATTENTION
from hybrid_engine.extensions.parallelize.planning.plan import Plan


def tensor_parallel(graph: Graph, config: ComputeConfig) -> Plan:
    """The plan of `tp`.

    Columns that an op would have to gather before it can go on stay whole, and the plan is made again without them:
    keys with fewer heads than processes, or queries, keys and values of one linear. Only results of the module and
    logits may be gathered. With `lowering="eager"` embeddings are whole too.
    """
    size = config.plan_ngpus
    columns = {op.key for op in graph.ops.values() if is_product(op, graph) and op.rule.can_split(("n",), (size,))}
    logits = _last_products(graph)
    while True:
        walk = _Walk(graph, size, columns, logits, _vocabulary(graph, logits), is_eager=config.lowering == "eager")
        plan = walk.plan()
        if not walk.gathered:
            return plan
        columns -= walk.gathered


def _last_products(graph: Graph) -> set[str]:
    """Keys of the products from whose results no other product is computed: those that give logits."""
    read: set[str] = set()
    last: set[str] = set()
    for op in reversed(graph.ops.values()):
        is_read = any(key in read for key in op.outputs)
        if is_product(op, graph) and not is_read:
            last.add(op.key)
        if is_product(op, graph) or is_read:
            read.update(op.inputs)
    return last


def _vocabulary(graph: Graph, logits: Collection[str]) -> int:
    """Number of rows of the largest embedding, of those with a row for each logit if there are any; else 0."""
    rows = {op.rule.sizes["v"] for op in graph.ops.values() if op.name == "embedding" and "v" in op.rule.sizes}
    return max(rows & {graph.ops[key].rule.sizes.get("n", 0) for key in logits} or rows, default=0)


def is_product(op: Op, graph: Graph) -> bool:
    """Whether an op multiplies with a parameter whose columns are features."""
    return op.name in ("linear", "addmm") and any(graph.values[key].kind == "parameter" for key in op.inputs)


@dataclass
class _Walk:
    """The ops in their order, with what is known about the tensors that are made so far."""

    graph: Graph
    size: int
    columns: Collection[str]
    """Keys of the linears that are split by columns where they read whole tensors."""
    logits: Collection[str]
    """Keys of the linears whose results may be gathered."""
    vocabulary: int
    is_eager: bool
    parts: dict[str, Placement] = field(default_factory=dict)
    """The placement of each tensor that lies in parts."""
    sources: dict[str, set[str]] = field(default_factory=dict)
    """For each tensor in parts, the columns that it comes from; logits do not count."""
    sums: dict[str, str] = field(default_factory=dict)
    """For each partial sum, the path of the module that makes it."""
    gathered: set[str] = field(default_factory=set)
    """Columns whose parts an op has to gather."""

    def plan(self) -> Plan:
        """The plan with these columns."""
        found = Plan(graph=self.graph, mesh=(self.size,))
        activations = {key for key, value in self.graph.values.items() if value.kind in ("result", "input")}
        for op in self.graph.ops.values():
            # Attention alone may cut whole tensors: keys and values of fewer heads than there are processes. Under
            # eager it may not, as layouts cannot change inside of a module's code.
            may_cut = op.name == ATTENTION and not self.is_eager
            name = self._name(op, following(op, self.parts, (self.size,), whole=() if may_cut else activations))
            if name is not None:
                found.splits[op.key] = (name,)
            self._note(op, name)
        return found

    def _name(self, op: Op, follows: str | None) -> str | None:
        """The name along which an op is split; `follows` is the one that fits the parts that it reads."""
        if follows is not None:
            return None if self.is_eager and op.rule.on_part_of((follows,)) else follows
        if op.key in self.columns:
            return "n"
        if op.name in RESHAPES and self.sums.get(op.inputs[0]) == op.path:
            return SUMMED
        is_split = (
            op.name == "embedding"
            and op.rule.sizes.get("v") == self.vocabulary
            and op.rule.can_split(("v",), (self.size,))
        )
        return "v" if is_split and not self.is_eager else None

    def _note(self, op: Op, name: str | None) -> None:
        is_columns = op.key in self.columns and name == "n"
        is_logits = is_columns and op.key in self.logits
        wanted = op.rule.annotation.input_placements(name)
        sources = set[str]()
        for key, placement in zip(op.inputs, wanted, strict=True):
            if key in self.parts and placement == self.parts[key]:
                sources |= self.sources[key]
            elif key in self.parts:
                self.gathered |= self.sources[key]
        if is_columns and not is_logits:
            sources = {op.key}
        made = op.rule.annotation.output_placements(name)
        for key in op.outputs:
            placement = made[int(key.rsplit("/", 1)[1])]
            if placement.is_partial():
                self.sums[key] = op.path
            if placement.is_shard() and not (is_logits and self.is_eager):
                self.parts[key], self.sources[key] = placement, sources
