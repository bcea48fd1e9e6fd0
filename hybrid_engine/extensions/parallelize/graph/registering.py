"""`register_op`: makes a user's function one op of the graph, which is split as its annotation says.

@hybrid_engine.register_op("m k+, n k+ -> m n")
def product(x: Tensor, weight: Tensor) -> Tensor: ...
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from hybrid_engine.extensions.parallelize.library import LIBRARY, Rule, op_name
from hybrid_engine.extensions.parallelize.library.annotations import Annotation, parse
from hybrid_engine.extensions.parallelize.library.rules import Call, OpRule
from hybrid_engine.extensions.parallelize.options.values import CALLABLE, TEXT, check

NAMESPACE = "hybrid_engine_ops"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def register_op(annotation: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that makes a function one op of traced graphs, split along the names of `annotation`.

    The function takes and returns tensors and numbers, with type hints. Gradients are those of its code. An op that is
    already registered with PyTorch (`torch.ops.mine.product`, a `torch.library.custom_op`) is annotated as it is.
    `hybrid_engine.extensions.parallelize.library.annotations` explains the tokens.

    Raises ValueError for an invalid annotation, for a function without type hints, and for a function whose name is
    already registered.
    """
    check("annotation", annotation, TEXT)
    _check_text(annotation)

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        check("register_op: function", function, CALLABLE)
        overload = overload_of(function)
        if overload is not None:
            LIBRARY[op_name(overload)] = annotated_by_text(annotation)
            return function
        name = f"{function.__module__}_{function.__qualname__}".replace(".", "_").replace("<locals>", "in")
        if f"{NAMESPACE}::{name}" in LIBRARY:
            raise ValueError(f"register_op: {function.__module__}.{function.__qualname__} is registered already")
        _define(name, function)
        LIBRARY[f"{NAMESPACE}::{name}"] = annotated_by_text(annotation)
        return getattr(getattr(torch.ops, NAMESPACE), name)

    return register


def overload_of(op: Any) -> torch._ops.OpOverload | None:
    """The registered op that `op` stands for; None for a plain function."""
    op = getattr(op, "_opoverload", op)
    if isinstance(op, torch._ops.OpOverloadPacket):
        op = op.default
    return op if isinstance(op, torch._ops.OpOverload) else None


def _check_text(annotation: str) -> None:
    """Raises ValueError for an annotation that is invalid for any operands."""
    operands = annotation.split("->")[0].split(",")
    parse(annotation, [None if part.strip() == "?" else _num_dims(part) for part in operands])


def _num_dims(part: str) -> int:
    words = part.replace("(", " (").split()
    depth, count = 0, 0
    for word in words:
        count += depth == 0 and word not in ("+", "*")
        depth += word.count("(") - word.count(")")
    return count


def _define(name: str, function: Callable[..., Any]) -> None:
    missing = [p.name for p in inspect.signature(function).parameters.values() if p.annotation is p.empty]
    if missing:
        raise ValueError(f"register_op: {function.__qualname__} has no type hints for {missing}; write `x: Tensor`")
    try:
        schema = torch.library.infer_schema(function, mutates_args=())
    except Exception as error:
        raise ValueError(
            f"register_op: {function.__qualname__} has type hints that PyTorch's ops cannot have ({error}); take "
            "Tensor, int, float, bool and str"
        ) from error
    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, function, "CompositeImplicitAutograd")


def annotated_by_text(text: str) -> Rule:
    """The rule of an op with the annotation `text`, one operand per argument (`register_op`)."""
    return lambda call: _registered(call, text)


def _registered(call: Call, text: str) -> OpRule:
    sides = text.split("->")[0].split(",")
    values = list(call.arguments.items())
    if len(sides) > len(values):
        raise ValueError(f"annotation {text!r} has {len(sides)} operands, {call.op} has {len(values)} arguments")
    tensors = [value for _, value in values[: len(sides)]]
    if any(isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value) for value in tensors):
        raise ValueError(f"annotation {text!r}: an argument of {call.op} is a list of tensors; give them one by one")
    is_tensor = [isinstance(value, torch.Tensor) for value in tensors]
    whole = parse(text, [value.dim() if isinstance(value, torch.Tensor) else None for value in tensors])
    keywords = {name: value for name, value in values if isinstance(value, int) and not isinstance(value, bool)}
    used = frozenset(keywords) & frozenset(whole._names)
    sizes = whole.sizes([list(v.shape) if isinstance(v, torch.Tensor) else None for v in tensors], keywords)
    inputs = tuple(pattern for pattern, is_one in zip(whole.inputs, is_tensor, strict=True) if is_one)
    annotation = Annotation(inputs, whole.outputs, whole.summed, whole.fixed)
    return OpRule(annotation=annotation, sizes=sizes, keywords=used)
