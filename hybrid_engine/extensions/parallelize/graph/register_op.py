"""Functions of the user as ops of the graph: `register_op`, `verify_op`, and custom `torch.autograd.Function`s.

    @hybrid_engine.register_op("m k+, n k+ -> m n")
    def product(x: Tensor, weight: Tensor) -> Tensor: ...

Gradient hooks that a graph would lose are refused here too; tracing calls these functions.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import Placement
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.nn.modules import module as torch_modules
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from hybrid_engine.extensions.parallelize.graph import layers  # noqa: F401  # its rules enter LIBRARY
from hybrid_engine.extensions.parallelize.graph.annotations import (
    Annotation,
    OpCall,
    OpPart,
    OpRule,
    arguments_of,
    parse,
    tensors_in,
)
from hybrid_engine.extensions.parallelize.graph.compute_config import (
    CALLABLE,
    TEXT,
    ValueRule,
    check,
    is_count,
    is_list_of,
    is_number,
    shown,
)
from hybrid_engine.extensions.parallelize.graph.library import LIBRARY, MakeRule, op_name, rule_for, whole

NAMESPACE = "hybrid_engine_ops"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
SHAPES = ValueRule(
    lambda value: is_list_of(
        value, lambda shape: shape is None or isinstance(shape, Tensor) or is_list_of(shape, is_size)
    ),
    "a list with a shape, a tensor or None for each operand",
)
FUNCTIONS = "hybrid_engine_functions"
_FUNCTIONS = torch.library.Library(FUNCTIONS, "FRAGMENT")
_SingleLevel: Any = torch.autograd.function._SingleLevelFunction  # `apply` of all Functions ends here
_ops: dict[tuple[type, str], Any] = {}
"""The op that runs a Function, keyed by the Function and the types of its arguments and results."""
REMEDY = (
    "which a traced graph does not run; write it as a torch.autograd.Function, which is kept, or take "
    "lowering='eager' in units of one process"
)
PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
MODULE_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
TENSOR_HOOKS = {Tensor: ("register_hook", "register_post_accumulate_grad_hook")}
GRAPH_HOOKS = {torch.autograd.graph: ("register_multi_grad_hook",)}
NODE_HOOKS = ("register_hook", "register_prehook")
_GRAD_FN = torch._C.TensorBase.grad_fn
TYPES = {bool: "bool", int: "int", float: "float", str: "str", torch.dtype: "ScalarType", torch.device: "Device"}
"""Types of a Function's arguments that an op accepts in addition to tensors, with their names in schemas."""


def register_op(annotation: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that makes a function one op of traced graphs, split along the names of `annotation`.

    The function takes and returns tensors and numbers, with type hints. Gradients are those of its code. An op that is
    already registered with PyTorch (`torch.ops.mine.product`, a `torch.library.custom_op`) is annotated as it is.
    `hybrid_engine.extensions.parallelize.graph.annotations` explains the tokens.

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


def annotated_by_text(text: str) -> MakeRule:
    """The rule of an op with the annotation `text`, one operand per argument (`register_op`)."""
    return lambda call: _registered(call, text)


def _registered(call: OpCall, text: str) -> OpRule:
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
    check("num_parts", num_parts, ValueRule(lambda value: is_count(value) and value > 1, "a number of at least 2"))
    check("tolerance", tolerance, ValueRule(lambda value: is_number(value) and value >= 0, "a number of at least 0"))
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
    return rule_for(OpCall(op, fakes, tuple(tensors_in([results]))))


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
        own = op if on_part is None else partial(on_part.function, part=OpPart(index=rank, count=num_parts))
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


def check_hooks(module: nn.Module, runs_code: bool) -> None:
    """Raises ValueError for gradient hooks that would not run. `runs_code`: own code runs, on whole tensors."""
    for name, parameter in module.named_parameters():
        if any(_of_users(getattr(parameter, hooks)) for hooks in PARAMETER_HOOKS):
            raise ValueError(
                f"the parameter {name!r} has gradient hooks, and parallelize() puts others in the place of parameters; "
                "register them on those of the module that it gives"
            )
    if runs_code:
        return
    for path, part in module.named_modules():
        if any(getattr(part, hooks) for hooks in MODULE_HOOKS):
            raise ValueError(f"{path or type(part).__name__!r} has backward hooks, {REMEDY}")
    if torch_modules._global_backward_hooks or torch_modules._global_backward_pre_hooks:
        raise ValueError(f"torch.nn.modules.module has backward hooks for all modules, {REMEDY}")


def _of_users(hooks: Any) -> bool:
    """Whether any hook does not come from this package's optimizers."""
    return any(not str(getattr(hook, "__module__", "")).startswith("hybrid_engine.") for hook in (hooks or {}).values())


@contextmanager
def own_gradients(runs_code: bool) -> Iterator[None]:
    """Context for tracing a module: custom Functions become ops; gradient hooks and reentrant checkpoints raise.

    `runs_code` as in `check_hooks`: if True, both are allowed.
    """
    with ExitStack() as stack:
        stack.enter_context(_replaced(_SingleLevel, "apply", classmethod(_apply)))
        for owner, names in {} if runs_code else (TENSOR_HOOKS | GRAPH_HOOKS).items():
            for name in names:
                stack.enter_context(_replaced(owner, name, _refusing(name)))
        if not runs_code:
            stack.enter_context(_replaced(Tensor, "grad_fn", property(_grad_fn_without_hooks)))
            stack.enter_context(_replaced(saved_tensors_hooks, "__enter__", _enter_saved_tensors_hooks))
            stack.enter_context(_replaced(CheckpointFunction, "apply", staticmethod(_refuse_reentrant)))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _refusing(name: str) -> Callable[..., None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise LostGradient(f"{name}() puts a hook on a gradient, {REMEDY}")

    return refuse


def _refuse_reentrant(*_: Any) -> None:
    raise LostGradient(
        "torch.utils.checkpoint with use_reentrant=True hides its gradients from a traced graph; pass "
        "use_reentrant=False, to transformers as gradient_checkpointing_enable({'use_reentrant': False})"
    )


def _enter_saved_tensors_hooks(hooks: saved_tensors_hooks, enter: Any = saved_tensors_hooks.__enter__) -> None:
    if type(hooks) is saved_tensors_hooks:  # those of torch's own subclasses change no values
        raise LostGradient(f"saved_tensors_hooks() changes what a backward pass reads, {REMEDY}")
    enter(hooks)


def _grad_fn_without_hooks(tensor: Tensor) -> Any:
    node = _GRAD_FN.__get__(tensor)
    return None if node is None else _NodeWithoutHooks(node)


class _NodeWithoutHooks:
    """Stands for an autograd node while a module is traced, and refuses hooks on it."""

    def __init__(self, node: Any):
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return _refusing(f"grad_fn.{name}") if name in NODE_HOOKS else getattr(self._node, name)


class LostGradient(ValueError):
    """A forward pass computes a gradient in a way that a graph would lose."""


def _apply(function: Any, *arguments: Any) -> Any:
    """Replaces `Function.apply` while a module is traced."""
    is_traced = get_proxy_mode() is not None and torch.is_grad_enabled()
    if not is_traced or function.__module__.startswith("torch."):
        return _run_function(function, arguments)
    return _op_of(function, arguments)(*arguments)


def _run_function(function: Any, arguments: tuple[Any, ...]) -> Any:
    return super(_SingleLevel, function).apply(*arguments)


def _op_of(function: type, arguments: tuple[Any, ...]) -> Any:
    """The op that runs `function` for arguments and results of these types; LostGradient if there cannot be one."""
    name = f"{function.__module__}.{function.__qualname__}"
    takes = [_type_of(name, argument) for argument in arguments]
    versions = [argument._version for argument in arguments if isinstance(argument, Tensor)]
    with disable_proxy_modes_tracing():
        results = _run_function(function, arguments)
    if versions != [argument._version for argument in arguments if isinstance(argument, Tensor)]:
        raise LostGradient(f"{name}.apply writes into its arguments, which a graph does not; give new tensors")
    gives = "Tensor" if isinstance(results, Tensor) else "Tensor[]"
    if not isinstance(results, Tensor) and not all(isinstance(result, Tensor) for result in results):
        raise LostGradient(f"{name}.apply gives {shown(results)}, of which a graph takes tensors alone; give those")
    schema = f"({', '.join(f'{kind} a{place}' for place, kind in enumerate(takes))}) -> {gives}"
    key = function, schema
    if key not in _ops:
        _ops[key] = _defined(re.sub(r"\W", "_", f"{name}_{len(takes)}"), schema, function)
    return _ops[key]


def _type_of(name: str, argument: Any) -> str:
    if argument is None or isinstance(argument, Tensor):
        return "Tensor?"
    if isinstance(argument, list | tuple) and all(type(entry) is int for entry in argument):
        return "int[]"
    if type(argument) not in TYPES:
        raise LostGradient(
            f"{name}.apply is given {shown(argument)}, which a graph cannot hold; give tensors, numbers and texts, or "
            "put the call into a function that hybrid_engine.register_op makes an op"
        )
    return TYPES[type(argument)]


def _defined(name: str, schema: str, function: type) -> Any:
    """A new op. Its name is the same in every process that defines the same ops in the same order."""
    same = sum(op.startswith(f"{FUNCTIONS}::{name}_of_") for op in LIBRARY)
    name = f"{name}_of_{same}"

    def run(*arguments: Any) -> Any:
        results = _run_function(function, arguments)
        return list(results) if isinstance(results, tuple) else results

    def run_with_gradients(*arguments: Any) -> Any:
        if get_proxy_mode() is None:
            return run(*arguments)
        with torch._C._AutoDispatchBelowAutograd():  # a second trace rewrites writes into tensors
            return op(*arguments)

    _FUNCTIONS.define(name + schema)
    _FUNCTIONS.impl(name, run, "CompositeExplicitAutograd")
    _FUNCTIONS.impl(name, run_with_gradients, "Autograd")
    torch.library.register_fake(f"{FUNCTIONS}::{name}", run, lib=_FUNCTIONS)
    LIBRARY[f"{FUNCTIONS}::{name}"] = whole
    op = getattr(getattr(torch.ops, FUNCTIONS), name)
    return op
