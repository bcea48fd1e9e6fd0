"""`parallelize`: makes a module that runs on any number of processes from a module, a sample and a policy.

The helpers here make the plan or read it from its folder, store it and the traced graph, and build the parallel module
or class.
"""

import copy
import hashlib
import inspect
import io
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree as pytree

from hybrid_engine.distributed.processes import broadcast_module, default_device, gather_objects, get_rank, on_rank_zero
from hybrid_engine.distributed.verdict import agree
from hybrid_engine.extensions.parallelize.arguments import (
    Policy,
    agree_on,
    built_by,
    check_not_nested,
    check_runs,
    plan_by,
)
from hybrid_engine.extensions.parallelize.graph.compute_config import (
    BroadcastGenFilesStrategy,
    ComputeConfig,
    ReuseType,
    name_of,
)
from hybrid_engine.extensions.parallelize.graph.graph import Graph, build_graph, graph_of_trace
from hybrid_engine.extensions.parallelize.graph.register_op import FUNCTIONS, check_hooks
from hybrid_engine.extensions.parallelize.graph.tracing import autocast_dtype, trace
from hybrid_engine.extensions.parallelize.module.eager_module import EagerModule, HookPlan, class_of, lower_eagerly
from hybrid_engine.extensions.parallelize.module.held_module import build_meshes
from hybrid_engine.extensions.parallelize.module.parallel_module import ParallelModule
from hybrid_engine.extensions.parallelize.module.staged_module import StagedParallelModule
from hybrid_engine.extensions.parallelize.planning.plan import Plan, read_content

PLAN_FILE, MADE_FOR_FILE = "plan.json", "made_for.json"
TRACE_FILE, TRACE_KEY_FILE = "graph.pt2", "graph.sha256"
FILES = (PLAN_FILE, MADE_FOR_FILE, TRACE_FILE, TRACE_KEY_FILE)
STORED_POLICIES = {"tp": "tensor_parallel"}
"""Policies that a plan's folder stores by another name, since earlier releases made other plans by the same one."""
SENDS_GRAPH = (BroadcastGenFilesStrategy.ALL, BroadcastGenFilesStrategy.NO_WEIGHTS)
SENDS_WEIGHTS = (BroadcastGenFilesStrategy.NONE, BroadcastGenFilesStrategy.ALL)


@dataclass(frozen=True)
class StoredPlan:
    """A plan as its file stores it."""

    content: dict[str, Any]
    made_for: Mapping[str, Any]
    is_new: bool
    """Whether the plan was made in this call, not read from the folder."""


def kept_plan(
    folder: Path,
    made_for: Mapping[str, Any],
    reuse: ReuseType,
    check: Callable[[Any, str], dict[str, Any]],
    make: Callable[[], dict[str, Any]],
) -> StoredPlan:
    """The plan to use: the stored one or a new one.

    The plan in the folder is used if `reuse` allows it and it was made for the same thing; `check(content, file)`
    checks it. Otherwise the old plan is deleted, and the result of `make` is stored. Raises ValueError if the plan must
    match and does not, and if its file was edited into something unreadable.
    """
    made_for = json.loads(json.dumps(made_for, default=str))
    before = _made_for(folder) if reuse in (ReuseType.MATCH, ReuseType.MOO) else None
    if before is not None:
        differing = [key for key in made_for if before.get(key) != made_for[key]]
        if not differing:
            content = read_content(folder / PLAN_FILE)
            return StoredPlan(check(content, str(folder / PLAN_FILE)), made_for, is_new=False)
        if reuse is ReuseType.MATCH:
            raise ValueError(
                f"{folder} holds a plan for another {', '.join(differing)}; pass reuse='moo' to make it anew, or "
                "another instance_name to keep both"
            )
    _remove_plan(folder)
    found = StoredPlan(make(), made_for, is_new=True)
    write_plan(folder, found)
    return found


@contextmanager
def removed_on_error(folder: Path, reuse: ReuseType) -> Iterator[None]:
    """Context around the work before a plan is made. An error deletes the stored plan, unless `reuse` is MATCH."""
    try:
        yield
    except Exception:
        if reuse is not ReuseType.MATCH and get_rank() == 0:
            _remove_plan(folder)
        raise


def _remove_plan(folder: Path) -> None:
    for name in (MADE_FOR_FILE, PLAN_FILE):
        (folder / name).unlink(missing_ok=True)


def write_plan(folder: Path, kept: StoredPlan) -> None:
    """Writes the files of a plan. `made_for.json` comes last, so that an interrupted write leaves no valid plan."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MADE_FOR_FILE).unlink(missing_ok=True)
    (folder / PLAN_FILE).write_text(json.dumps(kept.content, indent=1) + "\n")
    (folder / MADE_FOR_FILE).write_text(json.dumps(kept.made_for, indent=1) + "\n")


def _made_for(folder: Path) -> dict[str, Any] | None:
    """Description of what the stored plan was made for; None if there is no complete plan."""
    try:
        found = json.loads((folder / MADE_FOR_FILE).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) and (folder / PLAN_FILE).exists() else None


def stored_trace(folder: Path, key: str) -> bytes | None:
    """The stored traced graph; None if there is none with this key."""
    try:
        is_same = (folder / TRACE_KEY_FILE).read_text() == key
        return (folder / TRACE_FILE).read_bytes() if is_same else None
    except FileNotFoundError:
        return None


def write_trace(folder: Path, key: str, content: bytes) -> None:
    """Writes a traced graph. The key comes last, so that an interrupted write leaves no valid graph."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TRACE_KEY_FILE).unlink(missing_ok=True)
    (folder / TRACE_FILE).write_bytes(content)
    (folder / TRACE_KEY_FILE).write_text(key)


def parallelize(
    module_or_module_class: nn.Module | type[nn.Module],
    dummy_forward_args: Mapping[str, Any],
    pas_policy: str | Policy,
    compute_config: ComputeConfig,
    *,
    gen_savedir: str | Path = "./.hybrid_engine",
    reuse: ReuseType | str = ReuseType.MATCH,
    instance_name: str | None = None,
    load_module: bool = True,
    module_dtype: torch.dtype | None = None,
    module_fn: Callable[[], nn.Module] | None = None,
    init_module_params: bool = True,
    broadcast_strategy: BroadcastGenFilesStrategy | str = "none",
) -> Any:
    """A `ParallelModule` for an object, a subclass of it for a class, None with `load_module=False`; collective.

    Rank 0 makes the plan or reads it from the folder, and sends it to all processes. `load_module=False` needs no
    process group. `broadcast_strategy` says what else rank 0 sends: the graph (which the other processes then do not
    trace), weights, or files for each node. Parameters are rank 0's; with `init_module_params=False` they are those of
    the first process of each unit. Raises ValueError on every rank if the arguments do not fit, if the module cannot be
    traced, or if the folder holds files for something else.
    """
    if isinstance(module_or_module_class, ParallelModule) or (
        isinstance(module_or_module_class, type) and issubclass(module_or_module_class, ParallelModule)
    ):
        return module_or_module_class
    given = {
        "module_or_module_class": module_or_module_class,
        "dummy_forward_args": dummy_forward_args,
        "pas_policy": pas_policy,
        "compute_config": compute_config,
        "gen_savedir": gen_savedir,
        "instance_name": instance_name,
        "load_module": load_module,
        "module_dtype": module_dtype,
        "module_fn": module_fn,
        "init_module_params": init_module_params,
    }
    reuse, strategy = agree_on(given, reuse, broadcast_strategy)
    init_module_params = init_module_params and strategy in SENDS_WEIGHTS
    is_class = isinstance(module_or_module_class, type)

    def build() -> nn.Module:
        if not is_class:
            return module_or_module_class
        name = "module_or_module_class" if module_fn is None else "module_fn"
        return built_by(module_fn or module_or_module_class, module_or_module_class, name)

    traced = agree(lambda: _traced(build, is_class, module_dtype))
    if load_module and not is_class:
        agree(lambda: _check_initialised(traced, init_module_params))
    runs_code = compute_config.inference_only or (compute_config.lowering == "eager" and compute_config.plan_ngpus == 1)
    agree(lambda: None if compute_config.inference_only else check_hooks(traced, runs_code))
    folder = Path(gen_savedir) / f"{_full_name(traced)}" / (instance_name or "_")
    content = None
    with removed_on_error(folder, reuse):
        if reuse is ReuseType.GRAPH or strategy in SENDS_GRAPH:
            content = on_rank_zero(
                lambda: _trace_of(traced, dummy_forward_args, compute_config, folder, reuse, runs_code)
            )
            graph = agree(lambda: graph_of_trace(load_trace(content), traced))
        else:
            graph = agree(lambda: build_graph(traced, dummy_forward_args, runs_code))
    kept = on_rank_zero(lambda: _planned(graph, pas_policy, compute_config, folder, reuse))
    agree(
        lambda: _send_to_nodes(
            strategy, folder, kept, trace_key(traced, dummy_forward_args, compute_config.user_config), content
        )
    )
    plan = agree(lambda: Plan.from_json(kept.content, graph))  # all ranks refuse a plan of another model
    is_eager = compute_config.lowering == "eager"
    carried = agree(lambda: HookPlan(traced, dummy_forward_args, plan)) if is_eager else None
    if not load_module:
        return None

    def built() -> nn.Module:
        module = build() if is_class else traced
        _check_initialised(module, init_module_params)
        return _initialised(module if module_dtype is None else module.to(module_dtype), init_module_params)

    if is_class:
        return _subclass(module_or_module_class, built, plan, compute_config, carried, dummy_forward_args)
    meshes = build_meshes(plan, compute_config)
    if carried is not None:
        return lower_eagerly(built(), plan, compute_config, meshes, carried)
    return _class_for(plan)(built(), plan, compute_config, meshes, dummy_forward_args)


def _class_for(plan: Plan) -> type[ParallelModule]:
    return StagedParallelModule if plan.stages else ParallelModule


def _traced(build: Callable[[], nn.Module], is_class: bool, dtype: torch.dtype | None) -> nn.Module:
    """The module whose forward pass is traced: the object itself, or an instance of the class on meta."""
    with torch.device("meta") if is_class else nullcontext():
        module = build()
    check_not_nested(module)
    return module if dtype is None else module.to(dtype)


def _full_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}".replace("<locals>", "_")


def _planned(graph: Graph, policy: str | Policy, config: ComputeConfig, folder: Path, reuse: ReuseType) -> StoredPlan:
    """The plan as its file stores it: the one in the folder if `reuse` allows it and it fits, otherwise a new one."""
    name = STORED_POLICIES.get(policy, policy) if isinstance(policy, str) else name_of(policy)
    return kept_plan(
        folder,
        {"graph": graph.hash, "policy": name, **config.to_json()},
        reuse,
        lambda content, file: _edited(content, graph, config, file).to_json(),
        lambda: plan_by(policy, graph, config).to_json(),
    )


def _edited(content: Any, graph: Graph, config: ComputeConfig, file: str) -> Plan:
    plan = Plan.from_json(content, graph, file)
    try:
        check_runs(plan, config)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return plan


def _trace_of(
    module: nn.Module,
    arguments: Mapping[str, Any],
    config: ComputeConfig,
    folder: Path,
    reuse: ReuseType,
    runs_code: bool,
) -> bytes:
    """The traced forward pass: the stored one if `reuse` allows it and its key matches, otherwise a new one."""
    key = trace_key(module, arguments, config.user_config)
    content = stored_trace(folder, key) if reuse is ReuseType.GRAPH else None
    if content is None:
        content = dump_trace(trace(module, arguments, runs_code))
        write_trace(folder, key, content)
    return content


def _send_to_nodes(
    strategy: BroadcastGenFilesStrategy, folder: Path, kept: StoredPlan, key: str, content: bytes | None
) -> None:
    """Writes new files into the folder of every other node; the first process of the node writes them."""
    if strategy is BroadcastGenFilesStrategy.NONE or not kept.is_new or get_rank() == 0:
        return
    if int(os.environ.get("LOCAL_RANK", get_rank())) == 0:
        write_plan(folder, kept)
        if content is not None:
            write_trace(folder, key, content)


def _check_initialised(module: nn.Module, init_module_params: bool) -> None:
    missing = [name for name, parameter in module.named_parameters() if parameter.is_meta]
    if missing and init_module_params:
        raise ValueError(
            f"parameters {missing[:3]} are on meta and have no values; pass init_module_params=False and load a state "
            "dict, or load_module=False to make the plan alone"
        )


def _initialised(module: nn.Module, init_module_params: bool) -> nn.Module:
    """The module with rank 0's values if all processes ask for them; else with those of each unit's first process.

    Parameters on meta are replaced by empty ones, in a copy of the module.
    """
    if all(gather_objects(init_module_params)):
        broadcast_module(module)
        return module
    empty: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device=default_device()), p.requires_grad)
        for p in module.parameters()
        if p.is_meta
    }
    return copy.deepcopy(module, empty) if empty else module


def _subclass(
    module_class: type[nn.Module],
    build: Callable[[], nn.Module],
    plan: Plan,
    config: ComputeConfig,
    carried: HookPlan | None,
    sample: Mapping[str, Any],
) -> type[ParallelModule]:
    """A class whose instances are the parallelized module, each built by its own call of `build`."""
    kind = _class_for(plan)

    def __init__(self: ParallelModule) -> None:
        kind.__init__(self, build(), plan, config, build_meshes(plan, config), sample)

    def __new__(cls: type[EagerModule]) -> EagerModule:
        return lower_eagerly(build(), plan, config, build_meshes(plan, config), carried, cls)  # type: ignore[arg-type]

    if carried is not None:
        return class_of(module_class, {"__new__": __new__, "__init__": lambda self: None})
    return type(f"Parallel{module_class.__name__}", (kind,), {"__init__": __init__})


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
