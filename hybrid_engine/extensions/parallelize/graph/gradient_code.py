"""Gradients that a module's own code computes and that tracing would lose.

A custom `torch.autograd.Function` becomes one op of the graph, which keeps its backward pass. Gradient hooks of
modules, of parameters, and of tensors inside a forward pass are refused, because a graph does not run them.
`parallelize` and `trace` call this.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.nn.modules import module as torch_modules

from hybrid_engine.extensions.parallelize.library.entries import LIBRARY, whole
from hybrid_engine.extensions.parallelize.options.values import shown

NAMESPACE = "hybrid_engine_functions"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
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
TYPES = {bool: "bool", int: "int", float: "float", str: "str", torch.dtype: "ScalarType", torch.device: "Device"}
"""Types of a Function's arguments that an op accepts in addition to tensors, with their names in schemas."""


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
    """Context for tracing a module: custom Functions become ops, and hooks on tensors raise ValueError.

    `runs_code` as in `check_hooks`: if True, hooks are allowed.
    """
    with ExitStack() as stack:
        stack.enter_context(_replaced(_SingleLevel, "apply", classmethod(_apply)))
        for owner, names in {} if runs_code else (TENSOR_HOOKS | GRAPH_HOOKS).items():
            for name in names:
                stack.enter_context(_replaced(owner, name, _refusing(name)))
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


class LostGradient(ValueError):
    """A forward pass computes a gradient in a way that a graph would lose."""


def _apply(function: Any, *arguments: Any) -> Any:
    """Replaces `Function.apply` while a module is traced."""
    is_traced = get_proxy_mode() is not None and torch.is_grad_enabled()
    if not is_traced or function.__module__.startswith("torch."):
        return _run(function, arguments)
    return _op_of(function, arguments)(*arguments)


def _run(function: Any, arguments: tuple[Any, ...]) -> Any:
    return super(_SingleLevel, function).apply(*arguments)


def _op_of(function: type, arguments: tuple[Any, ...]) -> Any:
    """The op that runs `function` for arguments and results of these types; LostGradient if there cannot be one."""
    name = f"{function.__module__}.{function.__qualname__}"
    takes = [_type_of(name, argument) for argument in arguments]
    versions = [argument._version for argument in arguments if isinstance(argument, Tensor)]
    with disable_proxy_modes_tracing():
        results = _run(function, arguments)
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
    same = sum(op.startswith(f"{NAMESPACE}::{name}_of_") for op in LIBRARY)
    name = f"{name}_of_{same}"

    def run(*arguments: Any) -> Any:
        results = _run(function, arguments)
        return list(results) if isinstance(results, tuple) else results

    def run_with_gradients(*arguments: Any) -> Any:
        if get_proxy_mode() is None:
            return run(*arguments)
        with torch._C._AutoDispatchBelowAutograd():  # a second trace rewrites writes into tensors
            return op(*arguments)

    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, run_with_gradients, "Autograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", run, lib=_LIBRARY)
    LIBRARY[f"{NAMESPACE}::{name}"] = whole
    op = getattr(getattr(torch.ops, NAMESPACE), name)
    return op
