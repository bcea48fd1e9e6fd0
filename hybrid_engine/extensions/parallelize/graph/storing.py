"""Stores a traced forward pass as bytes without weights, for a file or another process.

`parallelize` uses this for `reuse='graph'` and for broadcasts of the graph.
"""

import hashlib
import inspect
import io
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree as pytree

from hybrid_engine.extensions.parallelize.graph.gradient_code import NAMESPACE as FUNCTIONS
from hybrid_engine.extensions.parallelize.graph.kept_state import autocast_dtype


def dump_trace(exported: ExportedProgram) -> bytes:
    """The bytes that `load_trace` reads; ValueError for arguments or results that torch.export cannot write."""
    kept = exported._state_dict, exported._example_inputs, exported._constants
    file = io.BytesIO()
    exported._state_dict = {name: _without_data(tensor) for name, tensor in exported.state_dict.items()}
    exported._example_inputs = None  # type: ignore[assignment]
    # Buffers that are in no state dict. The file would store only the first one's storage for several without data.
    exported._constants = {name: _without_data(v) if _is_empty(v) else v for name, v in exported.constants.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _check_written(exported)
            torch.export.save(exported, file)
    except Exception as error:
        raise ValueError(
            f"the graph cannot be kept ({type(error).__name__}: {str(error).strip().splitlines()[0]}); pass "
            "broadcast_strategy='none' or 'code', and another reuse than 'graph'"
        ) from error
    finally:
        exported._state_dict, exported._example_inputs, exported._constants = kept
    return file.getvalue()


def _check_written(exported: ExportedProgram) -> None:
    """Raises TypeError for results that torch.export cannot read, such as strings, and for process-local ops."""
    (results,) = next(iter(reversed(exported.graph.nodes))).args
    functions = [node.target for node in exported.graph.nodes if FUNCTIONS in str(node.target)]
    if functions:
        raise TypeError(f"{functions[0]} is a custom autograd.Function, which no file can hold")
    for result in results:
        if not isinstance(result, fx.Node | bool | int | float | None):
            raise TypeError(f"{result!r} is among the results, and is no tensor and no number")


def _is_empty(value: Any) -> bool:
    return isinstance(value, FakeTensor) or (isinstance(value, Tensor) and value.is_meta)


def _without_data(tensor: Tensor) -> Tensor:
    """A tensor of the same shape whose storage is one element."""
    empty = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def load_trace(content: bytes) -> ExportedProgram:
    """The traced forward pass. Which tensors share memory is computed again, because files do not store it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.load(io.BytesIO(content))
    nodes = exported.graph_module.graph.nodes
    given = [node.meta["val"] for node in nodes if node.op == "placeholder"]
    mode = next((value.fake_mode for value in given if hasattr(value, "fake_mode")), None)
    if mode is not None:
        FakeTensorProp(exported.graph_module, mode).propagate_dont_convert_inputs(*given)
    return exported


def trace_key(module: nn.Module, arguments: Mapping[str, Any], user_config: Mapping[str, Any]) -> str:
    """SHA-256 of everything that a trace depends on and that is known without tracing.

    This covers: shapes and dtypes of tensor arguments, other arguments, parameters and buffers, numbers and strings
    that modules hold, the source of their classes, autocast, the version of torch, and `user_config`. It does not cover
    functions that the classes call.
    """
    leaves, spec = pytree.tree_flatten(dict(arguments))
    words = [torch.__version__, str(spec), str(dict(user_config)), str(autocast_dtype())]
    words += [_words(leaf) for leaf in leaves]
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    for name, tensor in named:
        words.append(f"{name} {first.setdefault(id(tensor), name)} {_words(tensor)} {tensor.requires_grad}")
    for name, part in module.named_modules():
        plain = {key: value for key, value in vars(part).items() if isinstance(value, bool | int | float | str)}
        words.append(f"{name} {type(part).__qualname__} {sorted(plain.items())} {getattr(part, 'config', '')}")
    words += [_source(kind) for kind in dict.fromkeys(type(part) for part in module.modules())]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


def _words(leaf: Any) -> str:
    return f"{tuple(leaf.shape)} {leaf.dtype} {leaf.device.type}" if isinstance(leaf, Tensor) else repr(leaf)


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return f"{kind.__module__}.{kind.__qualname__}"
