"""`verify_op`: compares every split that an op's annotation allows, in one process, with the op that is not split."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Placement
from torch.utils import _pytree as pytree

from hybrid_engine.extensions.parallelize.graph.registering import overload_of
from hybrid_engine.extensions.parallelize.library import rule_for
from hybrid_engine.extensions.parallelize.library.rules import Call, OpRule, Part, arguments_of, tensors_in
from hybrid_engine.extensions.parallelize.options.values import Rule, check, is_count, is_list_of, is_number

SHAPES = Rule(
    lambda value: is_list_of(
        value, lambda shape: shape is None or isinstance(shape, Tensor) or is_list_of(shape, is_size)
    ),
    "a list with a shape, a tensor or None for each operand",
)


def is_size(value: Any) -> bool:
    """Whether a value can be the size of a dimension."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def verify_op(
    op: Callable[..., Any],
    shapes: Sequence[Sequence[int] | Tensor | None],
    *args: Any,
    num_parts: int = 2,
    tolerance: float = 1e-4,
    **kwargs: Any,
) -> list[str]:
    """Names along which `op` was split into `num_parts`, each with the same results and gradients as the whole op.

    `shapes` gives the operands: a shape (random values in double precision), a tensor, or None for an operand that is
    left out. `args` and `kwargs` are the op's further arguments. Splits whose parts communicate while they run need
    several processes and are skipped. Raises ValueError for the first split whose results differ, and for an op without
    annotation.
    """
    overload = overload_of(op)
    if overload is None:
        raise ValueError(f"verify_op: {op} is no registered op; decorate it with register_op")
    check("shapes", shapes, SHAPES)
    check("num_parts", num_parts, Rule(lambda value: is_count(value) and value > 1, "a number of at least 2"))
    check("tolerance", tolerance, Rule(lambda value: is_number(value) and value >= 0, "a number of at least 0"))
    generator = torch.Generator().manual_seed(0)
    operands = [_operand(shape, generator) for shape in shapes]
    try:
        overload(*operands, *args, **kwargs)
        arguments = arguments_of(overload, (*operands, *args), kwargs)
        whole = _run(overload, arguments)
    except Exception as error:
        given = [list(s.shape) if isinstance(s, Tensor) else s for s in shapes]
        raise ValueError(f"verify_op: {overload} cannot be called with operands of shapes={given}: {error}") from error
    rule = rule_of_arguments(overload, arguments)
    names = [n for n in rule.splits(num_parts) if n not in rule.on_part or not rule.on_part[n].num_reductions]
    for name in names:
        parts = _run_split(overload, arguments, rule, name, num_parts, [tuple(t.shape) for t in whole])
        _compare(overload, rule, name, arguments, whole, parts, tolerance)
    return names


def rule_of_arguments(op: torch._ops.OpOverload, arguments: dict[str, Any]) -> OpRule:
    """The rule of a call of `op` with these arguments; computes shapes only."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        fakes = pytree.tree_map_only(Tensor, mode.from_tensor, arguments)
        results = op(**fakes)
    return rule_for(Call(op, fakes, tuple(tensors_in([results]))))


def _operand(shape: Sequence[int] | Tensor | None, generator: torch.Generator) -> Tensor | None:
    if shape is None or isinstance(shape, Tensor):
        return shape
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def _run(op: Callable[..., Any], arguments: dict[str, Any]) -> list[Tensor]:
    return list(tensors_in([op(**arguments)]))


def _run_split(
    op: torch._ops.OpOverload,
    arguments: dict[str, Any],
    rule: OpRule,
    name: str,
    num_parts: int,
    shapes: Sequence[Sequence[int]],
) -> list[Tensor]:
    """The results of `op`, joined from `num_parts` calls that are split along `name`."""
    wanted = [placements[0] for placements in rule.input_placements([name])]
    parts = []
    for rank in range(num_parts):
        placements = iter(wanted)
        local = pytree.tree_map_only(Tensor, lambda t, r=rank, p=placements: _part(t, next(p), r, num_parts), arguments)
        local |= rule.local_arguments(arguments, shapes[0], [name], [num_parts])
        on_part = rule.on_part.get(name)
        own = op if on_part is None else partial(on_part.function, part=Part(index=rank, count=num_parts))
        parts.append(_run(own, local))
    results = [placements[0] for placements in rule.output_placements([name])]
    return [_joined(pieces, where) for pieces, where in zip(zip(*parts, strict=True), results, strict=True)]


def _part(tensor: Tensor, placement: Placement, rank: int, num_parts: int) -> Tensor:
    """The part of a tensor that `rank` holds. For a partial sum rank 0 holds the value and the others hold zeros."""
    dim = getattr(placement, "dim", None)
    if dim is not None:
        return tensor.chunk(num_parts, dim)[rank]
    return tensor * (rank == 0) if placement.is_partial() else tensor


def _joined(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    dim = getattr(placement, "dim", None)
    if dim is not None:
        return torch.cat(list(parts), dim)
    return torch.stack(list(parts)).sum(0) if placement.is_partial() else parts[0]


def _compare(
    op: torch._ops.OpOverload,
    rule: OpRule,
    name: str,
    arguments: dict[str, Any],
    whole: Sequence[Tensor],
    joined: Sequence[Tensor],
    tolerance: float,
) -> None:
    """Raises ValueError unless results and gradients are equal up to `tolerance`."""
    leaves = [t for t in tensors_in(list(arguments.values())) if t.requires_grad]
    for position, (expected, found) in enumerate(zip(whole, joined, strict=True)):
        _check_equal(op, rule, name, f"result {position}", expected, found, tolerance)
        if not expected.requires_grad:
            continue
        weight = torch.randn_like(expected)
        gradients = [torch.autograd.grad(out, leaves, weight, True, allow_unused=True) for out in (expected, found)]
        for number, (one, other) in enumerate(zip(*gradients, strict=True)):
            if one is not None or other is not None:
                missing = torch.zeros_like(leaves[number])
                one, other = (missing if gradient is None else gradient for gradient in (one, other))
                _check_equal(op, rule, name, f"the gradient of operand {number}", one, other, tolerance)


def _check_equal(
    op: torch._ops.OpOverload, rule: OpRule, name: str, what: str, expected: Tensor, found: Tensor, tolerance: float
) -> None:
    if expected.shape == found.shape and torch.allclose(expected, found, rtol=tolerance, atol=tolerance):
        return
    difference = f"{(expected - found).abs().max()}" if expected.shape == found.shape else f"shape {[*found.shape]}"
    raise ValueError(
        f"{op} split along {name!r} of '{rule.annotation}': {what} differs ({difference}); mark {name} with ^, "
        "or correct the annotation"
    )
