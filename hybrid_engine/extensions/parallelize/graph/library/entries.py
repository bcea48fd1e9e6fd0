"""The entries of the library of annotations, and what rules are written with.

Each rule is a function from a call to its annotation: sizes and arguments decide what can be split. Names of the usual
ops are those of their equations (`linear`: `* k+, n k+, n + -> * n`); of ops that work on every dimension alike they
are `a`, `b`, ... by the dimensions of the result.
"""

from collections.abc import Callable, Mapping, Sequence
from string import ascii_lowercase

import torch

from hybrid_engine.extensions.parallelize.graph.annotations import parse
from hybrid_engine.extensions.parallelize.graph.calls import Call
from hybrid_engine.extensions.parallelize.graph.rules import OnPart, OpRule

Rule = Callable[[Call], OpRule]
LIBRARY: dict[str, Rule] = {}
"""By the name of an op without its namespace and overload: `linear` for aten.linear.default."""


def rule_for(call: Call) -> OpRule:
    """How `call` can be split; ValueError for an op that nobody annotated."""
    rule = _entry(call.op)
    if rule is None:
        operands = ", ".join(" ".join(letters(len(shape), "^")) for shape in call.shapes)
        raise ValueError(
            f"op {op_name(call.op)} has no annotation, so that nobody knows how to split it; write "
            f'register_op("{operands} -> ...")(torch.ops.{call.op}) with the names of its dimensions'
        )
    # Collectives do not carry complex numbers everywhere: each rank computes all of them.
    return whole(call) if any(t.is_complex() for t in (*call.tensors, *call.outputs)) else rule(call)


def is_annotated(op: torch._ops.OpOverload) -> bool:
    """Whether somebody said how `op` can be split."""
    return _entry(op) is not None


def _entry(op: torch._ops.OpOverload) -> Rule | None:
    name = op_name(op)
    return LIBRARY.get(name) or LIBRARY.get(name.split("::")[-1])


def op_name(op: torch._ops.OpOverload) -> str:
    """`linear` for aten.linear.default, `namespace::name` for ops of others."""
    name = op._schema.name
    return name.removeprefix("aten::")


def of_text(
    call: Call,
    text: str,
    sizes: dict[str, int] | None = None,
    shape_argument: str | None = None,
    on_part: Mapping[str, OnPart] | None = None,
) -> OpRule:
    """The rule that `text` gives for the operands of `call`; `sizes` of names that no operand has."""
    annotation = parse(text, [len(shape) for shape in call.shapes])
    known = annotation.sizes(call.shapes, sizes or {})
    return OpRule(annotation=annotation, sizes=known, shape_argument=shape_argument, on_part=on_part or {})


def annotate(*names: str) -> Callable[[Rule], Rule]:
    """Enters a rule for the ops of these names."""

    def enter(rule: Rule) -> Rule:
        LIBRARY.update(dict.fromkeys(names, rule))
        return rule

    return enter


def letters(num_dims: int, mark: str = "") -> list[str]:
    """The names of an op's dimensions where no equation gives others: a, b, ..., each with `mark`."""
    return [letter + mark for letter in ascii_lowercase[:num_dims]]


def whole(call: Call) -> OpRule:
    """An op that is not split: each rank computes all of it."""
    inputs = ["?"] * len(call.tensors)
    return of_text(call, f"{', '.join(inputs)} -> {', '.join('?' for _ in call.outputs)}")


def aligned(operand: Sequence[int], shape: Sequence[int], names: Sequence[str]) -> str:
    """The names of an operand that is broadcast to `shape`; a dimension that is repeated is `1`."""
    start = len(shape) - len(operand)
    return " ".join(
        names[start + i] if size == shape[start + i] and size != 1 else "1" for i, size in enumerate(operand)
    )
