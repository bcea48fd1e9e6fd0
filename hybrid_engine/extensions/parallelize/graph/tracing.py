"""Traces a module with sample arguments to a graph of ops on tensors without data, by torch.export.

Weights need not be in memory: parameters and arguments are traced as fake tensors. Ops such as `linear` and
`scaled_dot_product_attention` stay whole. Writes into tensors become ops with results, buffers that a forward pass
changes become results of the graph, and regions without gradients end in `detach`. State that a forward pass leaves for
the next one is written into buffers in place; other state gets a warning.
"""

import copy
import inspect
import keyword
import logging
import re
import sys
import warnings
from collections.abc import Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram, default_decompositions
from torch.utils import _pytree as pytree

from hybrid_engine.distributed.processes import default_device
from hybrid_engine.extensions.parallelize.graph.library import is_annotated
from hybrid_engine.extensions.parallelize.graph.register_op import LostGradient, own_gradients

OF_VALUES = ("DataDependent", "DynamicOutputShape", "Unbacked")
"""Parts of the names of PyTorch's errors for a forward pass whose ops depend on values."""
UNKNOWN_CONTAINER = re.compile(r"(?:Found|Unsupported input type) <class '([^']+)'>")
"""Matches torch.export's errors about an argument or result of a container type that it does not know."""
NO_GRADIENT_REGION = "wrap_with_set_grad_enabled"
LOGGERS = (
    "torch._export.non_strict_utils",
    "torch._subclasses.fake_tensor",
    "torch.export._trace",
    "torch.fx.experimental.symbolic_shapes",
)
PARTIAL_GRAPH = "def forward(self, arg"
"""The beginning of the code that torch.export prints for what it has traced before an error."""
PLAIN = (bool, int, float, str)


def trace(module: nn.Module, arguments: Mapping[str, Any], runs_code: bool = False) -> ExportedProgram:
    """Traces the forward pass of `module` with arguments like these, passed by name. Changes neither.

    `runs_code`: the module's own code will run, or no code will be trained, so that gradient hooks in it are allowed.
    Raises ValueError if the arguments do not fit `forward`, and if the ops depend on the values of tensors; the error
    names the line of the module.
    """
    check_arguments(module, arguments)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = _device_of(module, arguments)
    # torch.export records regions without gradients only if gradients are enabled around them.
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        _fake_tensors(module, mode, device),
        only_our_words(),
    ):
        try:
            with kept_state(module), own_gradients(runs_code):
                exported = torch.export.export(module, (), _fake(dict(arguments), mode, device), strict=False)
            _check_autocast(exported.graph_module)
            _open_regions(exported.graph_module)
            exported.graph_module.recompile()
            return open_composites(exported.run_decompositions(WRITTEN) if _writes(exported.graph_module) else exported)
        except _AutocastInside:
            raise
        except Exception as error:
            raise ValueError(_untraceable(module, error)) from error


def _copied(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return source.to(to.dtype).expand(to.shape)


WRITTEN = {torch.ops.aten.copy.default: _copied}
"""Replacement for writes into a part of a tensor: PyTorch's own op for it has no derivative."""


def _writes(graph_module: fx.GraphModule) -> bool:
    """Whether any op writes into a tensor. If none does, the rewrite, which is the slowest step, is skipped."""
    ops = [node.target for node in graph_module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return any(op._schema.is_mutable or "batch_norm" in op._schema.name for op in ops)


def check_arguments(module: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Raises ValueError unless `arguments` can be passed to the module's forward by name."""
    signature = inspect.signature(module.forward)
    positional = [p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.POSITIONAL_ONLY]
    if positional:
        raise ValueError(
            f"{type(module).__name__}.forward takes {positional} by position alone; remove the '/' of its signature"
        )
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"dummy_forward_args={sorted(arguments)} do not fit {type(module).__name__}.forward{signature}: {error}"
        ) from error


def check_takes_sample(module_class: type[nn.Module]) -> None:
    """Raises ValueError unless the class's forward can be called with a sample as its only argument."""
    signature = inspect.signature(module_class.forward)
    try:
        signature.bind(None, None)  # self and the sample
    except TypeError as error:
        raise ValueError(
            f"{module_class.__name__}.forward{signature} must take a sample as its first argument, and have defaults "
            f"for all others, for train_step and infer_step (use_end2end=True): {error}"
        ) from error


def arguments_by_name(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of the module's forward by name, **kwargs included; ValueError if they do not fit."""
    signature = inspect.signature(module.forward)
    flat: dict[str, Any] = {}
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise ValueError(f"{type(module).__name__}.forward{signature} does not take what is given: {error}") from error
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise ValueError(f"forward(*{name}) of a parallel module takes arguments by name alone")
        flat |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return flat


def _device_of(module: nn.Module, arguments: Mapping[str, Any]) -> torch.device:
    """The device to trace tensors on meta on: that of the first tensor that is elsewhere, otherwise the CPU."""
    tensors = [*pytree.tree_leaves(dict(arguments)), *module.parameters(), *module.buffers()]
    devices = [tensor.device for tensor in tensors if isinstance(tensor, Tensor) and not tensor.is_meta]
    return next(iter(devices), torch.device("cpu"))


def _fake(value: Any, mode: FakeTensorMode, device: torch.device) -> Any:
    """The nested arguments with fake tensors; a tensor that appears twice gets the same fake tensor."""
    with mode:
        return pytree.tree_map_only(Tensor, lambda tensor: _fake_tensor(tensor.detach(), device), value)


def _fake_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """An empty tensor like `tensor`, on `device` if `tensor` is on meta."""
    return torch.empty_like(tensor, device=device if tensor.is_meta else tensor.device)


@contextmanager
def _fake_tensors(module: nn.Module, mode: FakeTensorMode, device: torch.device) -> Iterator[None]:
    """Replaces parameters and buffers by fake tensors, and restores them at the end."""
    kept = [(owner, dict(owner._parameters), dict(owner._buffers)) for owner in module.modules()]
    fakes: dict[int, Tensor] = {}
    with mode:
        for owner, parameters, buffers in kept:
            for name, tensor in parameters.items():
                if tensor is not None:
                    fake = nn.Parameter(_fake_tensor(tensor.detach(), device), requires_grad=tensor.requires_grad)
                    owner._parameters[name] = fakes.setdefault(id(tensor), fake)  # type: ignore[assignment]
            for name, buffer in buffers.items():
                if buffer is not None:
                    owner._buffers[name] = fakes.setdefault(id(buffer), _fake_tensor(buffer, device))
    try:
        yield
    finally:
        for owner, parameters, buffers in kept:
            owner._parameters.update(parameters)
            owner._buffers.update(buffers)


def _untraceable(module: nn.Module, error: Exception) -> str:
    """The error text for a module that cannot be traced, with the last line of its own code."""
    frames, cause = [], error.__traceback__
    while cause is not None:
        frames.append((cause.tb_frame.f_code.co_filename, cause.tb_lineno))
        cause = cause.tb_next
    own = {inspect.getsourcefile(type(part)) for part in module.modules()} - {None}
    lines = [f"{file}:{line}" for file, line in frames if file in own and "/torch/" not in file]
    where = f" at {lines[-1]}" if lines else ""
    if isinstance(error, LostGradient):
        return f"{type(module).__name__} cannot be traced{where}: {error}"
    reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    advice = "Check first that the module runs by itself on arguments of these shapes and types"
    if any(word in type(error).__name__ for word in OF_VALUES):
        advice = (
            "What is computed must not depend on the values of tensors; use torch.where or a mask in place of an if"
        )
        if getattr(getattr(module, "config", None), "_experts_implementation", None) == "eager":
            advice = (
                "Which experts are called depends on what they are given: call "
                'model.set_experts_implementation("batched_mm") or ("grouped_mm") before'
            )
    elif found := UNKNOWN_CONTAINER.search(str(error)):
        advice = (
            "Tensors are seen in lists, tuples, dicts and named tuples, and in a dataclass after "
            f"torch.export.register_dataclass({found[1].rpartition('.')[2]}); give one of these"
        )
    elif type(error).__name__ == "UnsupportedOperatorException":
        advice = "Say what shape and type its result has: torch.library.register_fake"
    elif isinstance(error, SyntaxError) and ".from" in (error.text or ""):
        advice = "PyTorch cannot write random_(from, to) in a graph; take torch.randint(from, to, size) in its place"
    elif names := _taken_names(module):
        advice = f"torch.export cannot write code with the names {names}; give what the module calls so other names"
    return f"{type(module).__name__} cannot be traced{where}: {reason}\n{advice}"


def _taken_names(module: nn.Module) -> list[str]:
    """Names of submodules, parameters and buffers that are keywords, or, outermost, attributes of a graph."""
    names = {name for part in module.modules() for name in _names_in(part) if keyword.iskeyword(name)}
    own = {*dir(fx.GraphModule), "meta"} - set(dir(nn.Module))
    return sorted(names | (own & set(_names_in(module))))


def _names_in(module: nn.Module) -> list[str]:
    return [*module._modules, *module._parameters, *module._buffers]


class _AutocastInside(ValueError):
    """A region of the forward pass uses another autocast state than the call."""


def _check_autocast(graph_module: fx.GraphModule) -> None:
    graphs = [part.graph for part in graph_module.modules() if isinstance(part, fx.GraphModule)]
    if any("wrap_with_autocast" in str(node.target) for graph in graphs for node in graph.nodes):
        raise _AutocastInside(
            "torch.autocast inside of a forward pass is not traced, nor are parts that switch it off where it is on "
            "around the call; take lowering='eager', or module_dtype and no autocast"
        )


def _open_regions(graph_module: fx.GraphModule) -> None:
    """Inlines the ops of `no_grad` regions; their results are detached."""
    for node in list(graph_module.graph.nodes):
        if node.op == "call_function" and NO_GRADIENT_REGION in str(node.target):
            _open_region(graph_module, node)


def _open_region(graph_module: fx.GraphModule, node: fx.Node) -> None:
    has_gradients, inner, *arguments = node.args
    assert isinstance(inner, fx.Node), f"{inner=}"
    body = getattr(graph_module, str(inner.target))
    _open_regions(body)
    copies = dict(zip((n for n in body.graph.nodes if n.op == "placeholder"), arguments, strict=True))
    results: list[Any] = []
    with graph_module.graph.inserting_before(node):
        for entry in body.graph.nodes:
            if entry.op == "output":
                results = [
                    _detached(graph_module, copies[n]) if not has_gradients else copies[n] for n in entry.args[0]
                ]
            elif entry.op == "get_attr":
                setattr(graph_module, f"{inner.target}_{entry.target}", getattr(body, entry.target))
                copies[entry] = graph_module.graph.get_attr(f"{inner.target}_{entry.target}")
            elif entry.op != "placeholder":
                copies[entry] = graph_module.graph.node_copy(entry, copies.__getitem__)
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        graph_module.graph.erase_node(user)
    graph_module.graph.erase_node(node)
    if not inner.users:
        graph_module.graph.erase_node(inner)


def _detached(graph_module: fx.GraphModule, node: fx.Node) -> fx.Node:
    detached = graph_module.graph.call_function(torch.ops.aten.detach.default, (node,))
    detached.meta = copy.copy(node.meta)
    return detached


def open_composites(exported: ExportedProgram) -> ExportedProgram:
    """The program with composite ops that have no annotation decomposed; the same object if there are none."""
    before: set[torch._ops.OpOverload] = set()
    while (composites := _composites(exported)) and composites != before:
        table = default_decompositions()
        # Views are not in the table; they are decomposed in any case.
        exported = exported.run_decompositions({op: table[op] for op in composites if op in table})
        before = composites
    return exported


def _composites(exported: ExportedProgram) -> set[torch._ops.OpOverload]:
    """The composite ops of the program that have no annotation."""
    ops = {node.target for node in exported.graph.nodes if node.op == "call_function"}
    known = {op for op in ops if isinstance(op, torch._ops.OpOverload)}
    return {op for op in known if not is_annotated(op) and _is_composite(op)}


def _is_composite(op: torch._ops.OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


@contextmanager
def only_our_words() -> Iterator[None]:
    """Context for tracing: hides PyTorch's reports and all warnings except those about state that a forward pass keeps.

    Messages below the level of warnings that TORCH_LOGS enabled, and the module's own output, still appear.
    """
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", "forward sets the attributes")
        for logger in map(logging.getLogger, LOGGERS):
            logger.addFilter(_is_no_warning)
            stack.callback(logger.removeFilter, _is_no_warning)
        stream: Any = _WithoutGraphs(sys.stderr)
        stack.enter_context(redirect_stderr(stream))
        yield


def _is_no_warning(record: logging.LogRecord) -> bool:
    return record.levelno < logging.WARNING


class _WithoutGraphs:
    """A stream that drops printed graphs and the line end that `print` writes after each of them."""

    def __init__(self, stream: Any):
        self._stream, self._is_left_out = stream, False

    def write(self, text: str) -> int:
        """Writes the text unless it is a graph."""
        was_left_out, self._is_left_out = self._is_left_out, text.lstrip().startswith(PARTIAL_GRAPH)
        is_end = was_left_out and text == "\n"
        if not self._is_left_out and not is_end:
            self._stream.write(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def kept_state(module: nn.Module) -> Iterator[None]:
    """Context for tracing `module`: a buffer that a submodule replaces (`self.queue = ...`) is written in place.

    torch.export handles this for the outermost module only, and loses it for others. Raises ValueError if the new value
    has another shape or dtype. Numbers and tensors in plain attributes cannot be kept: a warning names them.
    """
    buffers: dict[str, tuple[nn.Module, dict[str, Tensor | None]]] = {}
    attributes: dict[str, Any] = {}

    def before(*_: Any) -> None:
        buffers.update((path, (part, dict(part._buffers))) for path, part in module.named_modules())
        attributes.update(_attributes(module))

    def after(*_: Any) -> None:
        for path, (part, found) in buffers.items():
            for name, buffer in found.items():
                if part._buffers.get(name) is not buffer:
                    _write_back(part, f"{path}.{name}".removeprefix("."), buffer)
        _warn_of(sorted(name for name, value in _attributes(module).items() if _is_lost(attributes.get(name), value)))

    hooks = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _write_back(part: nn.Module, path: str, buffer: Tensor | None) -> None:
    name = path.rsplit(".", 1)[-1]
    new = part._buffers.get(name)
    if buffer is None or new is None or buffer.shape != new.shape or buffer.dtype != new.dtype:
        raise ValueError(
            f"forward makes of the buffer {path!r}, {_shown(buffer)}, {_shown(new)}; it must stay as it is registered"
        )
    if path == name:
        return  # torch.export handles buffers of the outermost module
    with torch.no_grad():
        buffer.copy_(new)
    part._buffers[name] = buffer


def _shown(buffer: Tensor | None) -> str:
    return "None" if buffer is None else f"{buffer.dtype} of {tuple(buffer.shape)}"


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        f"{path}.{name}".removeprefix("."): value
        for path, part in module.named_modules()
        for name, value in part.__dict__.items()
    }


def _is_lost(old: Any, new: Any) -> bool:
    """Whether a forward pass has set the attribute to a tensor or another number."""
    return old is not new and (isinstance(new, Tensor) or (_is_number(old) and _is_number(new) and old != new))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _warn_of(names: list[str]) -> None:
    if names:
        warnings.warn(
            f"forward sets the attributes {names}; a graph that is traced from it computes with what they were before "
            "the first call. What a later call reads must be a buffer: register_buffer",
            stacklevel=2,
        )


def trace_state(module: nn.Module) -> Hashable:
    """Autocast's dtype or None, and the modes, numbers and strings that the parts of `module` hold, in their order."""
    return autocast_dtype(), tuple(tuple(plain_attributes(part).items()) for part in module.modules())


def autocast_dtype() -> torch.dtype | None:
    """The dtype of torch.autocast on this process's device; None if it is off."""
    kind = default_device().type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def copy_trace_state(module: nn.Module, to: nn.Module) -> None:
    """Copies the modes and plain attributes of `module` to `to`, which has the same module tree."""
    for path, part in module.named_modules():
        other = vars(to.get_submodule(path))
        other.update((name, value) for name, value in plain_attributes(part).items() if name in other)


def plain_attributes(part: nn.Module) -> dict[str, Any]:
    """The numbers and strings that a module holds under public names."""
    return {name: value for name, value in vars(part).items() if type(value) in PLAIN and name[0] != "_"}
