"""One call of an op in a traced graph, with its arguments by the names of the op's schema."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx


@dataclass(frozen=True)
class Call:
    """The arguments of one call, defaults included; tensors are fake ones, which have shapes and dtypes alone."""

    op: torch._ops.OpOverload
    arguments: dict[str, Any]
    outputs: tuple[Tensor, ...]

    @property
    def tensors(self) -> list[Tensor]:
        """The operands, in the order of the arguments; those of lists one by one."""
        return list(tensors_in(list(self.arguments.values())))

    @property
    def shapes(self) -> list[list[int]]:
        """The shapes of the operands."""
        return [list(tensor.shape) for tensor in self.tensors]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def dim(self, name: str = "dim") -> int:
        """The argument `name`, a dimension of the first operand, counted from the front."""
        return self.arguments[name] % max(self.tensors[0].dim(), 1)


def tensors_in(value: Any) -> Iterator[Any]:
    """The tensors, or nodes whose value is a tensor, in nested lists of arguments."""
    if isinstance(value, Tensor) or (isinstance(value, fx.Node) and isinstance(value.meta.get("val"), Tensor)):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from tensors_in(entry)


def arguments_of(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, in the schema's order, with the schema's defaults."""
    found = {}
    for position, argument in enumerate(op._schema.arguments):
        if position < len(args):
            found[argument.name] = args[position]
        elif argument.name in kwargs:
            found[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            found[argument.name] = argument.default_value
    return found


def call_of(node: fx.Node) -> Call:
    """The call that a node of the graph is."""
    assert isinstance(node.target, torch._ops.OpOverload), f"{node.target=}"
    arguments = arguments_of(node.target, node.args, dict(node.kwargs))
    values = fx.node.map_arg(arguments, lambda entry: entry.meta["val"])
    outputs = tuple(tensors_in([node.meta["val"]]))
    return Call(node.target, dict(values), outputs)
