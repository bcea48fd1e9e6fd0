"""`parallelize`: from a module, a sample and a policy to a module that runs on any number of processes."""

import os
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from hybrid_engine.distributed.processes import (
    broadcast_module,
    gather_objects,
    get_rank,
    get_world_size,
    on_rank_zero,
)
from hybrid_engine.distributed.verdict import agree
from hybrid_engine.parallel.compute_config import BroadcastGenFilesStrategy, ComputeConfig, ReuseType
from hybrid_engine.parallel.eager_module import Carried, EagerModule, class_of, lower_eagerly
from hybrid_engine.parallel.graph.graph import Graph, build_graph, graph_of_trace
from hybrid_engine.parallel.graph.storing import dump_trace, load_trace, trace_key
from hybrid_engine.parallel.graph.tracing import trace
from hybrid_engine.parallel.kept_files import Kept, kept_plan, stored_trace, write_plan, write_trace
from hybrid_engine.parallel.meshes import build_meshes
from hybrid_engine.parallel.parallel_module import ParallelModule
from hybrid_engine.parallel.planning.named_policies import Policy, check_runs, plan_by
from hybrid_engine.parallel.planning.plan import Plan
from hybrid_engine.parallel.staged_module import StagedModule

Option = TypeVar("Option", bound=Enum)

SENDS_GRAPH = (BroadcastGenFilesStrategy.ALL, BroadcastGenFilesStrategy.NO_WEIGHTS)
SENDS_WEIGHTS = (BroadcastGenFilesStrategy.NONE, BroadcastGenFilesStrategy.ALL)


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

    Rank 0 makes the plan, or reads it from the folder, and all take it. `load_module=False` needs no process group.
    `broadcast_strategy` says what else they get: the graph, which they do not trace then, weights, files of a node.
    Parameters are rank 0's, with `init_module_params=False` those of each unit's first process. ValueError, on every
    rank, where the arguments do not fit, the module cannot be traced, or what lies in the folder is for something else.
    """
    if isinstance(module_or_module_class, ParallelModule) or (
        isinstance(module_or_module_class, type) and issubclass(module_or_module_class, ParallelModule)
    ):
        return module_or_module_class
    reuse = _member(ReuseType, "reuse", reuse)
    strategy = _member(BroadcastGenFilesStrategy, "broadcast_strategy", broadcast_strategy)
    _check_processes(compute_config, load_module, strategy)
    init_module_params = init_module_params and strategy in SENDS_WEIGHTS
    is_class = isinstance(module_or_module_class, type)
    if module_fn is not None and not is_class:
        raise ValueError(f"module_fn={module_fn} builds a class's modules, and a module is given; leave it out")
    build = (module_fn or module_or_module_class) if is_class else (lambda: module_or_module_class)
    traced = _on_meta(build) if is_class else module_or_module_class
    _check_not_nested(traced)
    if module_dtype is not None:
        traced = traced.to(module_dtype)
    folder = Path(gen_savedir) / f"{_full_name(traced)}" / (instance_name or "_")
    content = None
    if reuse is ReuseType.GRAPH or strategy in SENDS_GRAPH:
        content = on_rank_zero(lambda: _trace_of(traced, dummy_forward_args, compute_config, folder, reuse))
        graph = graph_of_trace(load_trace(content), traced)
    else:
        graph = build_graph(traced, dummy_forward_args)
    kept = on_rank_zero(lambda: _planned(graph, pas_policy, compute_config, folder, reuse))
    agree(
        lambda: _send_to_nodes(
            strategy, folder, kept, trace_key(traced, dummy_forward_args, compute_config.user_config), content
        )
    )
    plan = Plan.from_json(kept.content, graph)
    check_runs(plan, compute_config)  # what lies in the folder may have been edited
    is_eager = compute_config.lowering == "eager"
    carried = Carried(traced, dummy_forward_args, plan) if is_eager else None
    if not load_module:
        return None

    def built() -> nn.Module:
        module = build() if is_class else traced
        _initialise(module if module_dtype is None else module.to(module_dtype), init_module_params)
        return module

    if is_class:
        return _subclass(module_or_module_class, built, plan, compute_config, carried, dummy_forward_args)
    meshes = build_meshes(plan, compute_config)
    if carried is not None:
        return lower_eagerly(built(), plan, compute_config, meshes, carried)
    return _class_for(plan)(built(), plan, compute_config, meshes, dummy_forward_args)


def _class_for(plan: Plan) -> type[ParallelModule]:
    return StagedModule if plan.stages else ParallelModule


def _member(kind: type[Option], name: str, value: Option | str) -> Option:
    """`value` as one of an option's values; ValueError where it is none."""
    try:
        return kind(value)
    except ValueError as error:
        raise ValueError(f"{name}={value!r} must be one of {[member.value for member in kind]}") from error


def _check_processes(config: ComputeConfig, load_module: bool, strategy: BroadcastGenFilesStrategy) -> None:
    world_size = get_world_size()
    if strategy is not BroadcastGenFilesStrategy.NONE and not dist.is_initialized():
        raise ValueError(
            f"broadcast_strategy={strategy.value!r} needs a process group to send over; call init_process_group first, "
            "or pass 'none'"
        )
    if load_module and config.runtime_ngpus != world_size:
        remedy = "start as many" if dist.is_initialized() else "call init_distributed() first in each of as many"
        raise ValueError(
            f"runtime_ngpus={config.runtime_ngpus} must be the number of processes, {world_size}; {remedy}, or pass "
            "load_module=False to make the plan alone"
        )


def _check_not_nested(module: nn.Module) -> None:
    inner = [name for name, part in module.named_modules() if isinstance(part, ParallelModule)]
    if inner:
        raise ValueError(f"{inner[0]!r} of the module is parallel already; parallelize the parts, or the whole")


def _on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def _full_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}".replace("<locals>", "_")


def _planned(graph: Graph, policy: str | Policy, config: ComputeConfig, folder: Path, reuse: ReuseType) -> Kept:
    """The plan as its file holds it: that of the folder where `reuse` says so and it fits, else a new one."""
    name = policy if isinstance(policy, str) else f"{policy.__module__}.{getattr(policy, '__qualname__', policy)}"
    return kept_plan(
        folder,
        {"graph": graph.hash, "policy": name, **config.to_json()},
        reuse,
        lambda content, file: Plan.from_json(content, graph, file).to_json(),
        lambda: plan_by(policy, graph, config).to_json(),
    )


def _trace_of(
    module: nn.Module, arguments: Mapping[str, Any], config: ComputeConfig, folder: Path, reuse: ReuseType
) -> bytes:
    """The traced forward pass: that of the folder where `reuse` says so and it is of the same, else a new one."""
    key = trace_key(module, arguments, config.user_config)
    content = stored_trace(folder, key) if reuse is ReuseType.GRAPH else None
    if content is None:
        content = dump_trace(trace(module, arguments))
        write_trace(folder, key, content)
    return content


def _send_to_nodes(
    strategy: BroadcastGenFilesStrategy, folder: Path, kept: Kept, key: str, content: bytes | None
) -> None:
    """Writes what was made now into the folder of every other node, by its first process."""
    if strategy is BroadcastGenFilesStrategy.NONE or not kept.is_new or get_rank() == 0:
        return
    if int(os.environ.get("LOCAL_RANK", get_rank())) == 0:
        write_plan(folder, kept)
        if content is not None:
            write_trace(folder, key, content)


def _initialise(module: nn.Module, init_module_params: bool) -> None:
    """Gives all processes rank 0's values where all want such; else each unit's first process gives its own."""
    if all(gather_objects(init_module_params)):
        broadcast_module(module)


def _subclass(
    module_class: type[nn.Module],
    build: Callable[[], nn.Module],
    plan: Plan,
    config: ComputeConfig,
    carried: Carried | None,
    sample: Mapping[str, Any],
) -> type[ParallelModule]:
    """A class whose objects are the parallelised module, each built anew by `build`."""
    kind = _class_for(plan)

    def __init__(self: ParallelModule) -> None:
        kind.__init__(self, build(), plan, config, build_meshes(plan, config), sample)

    def __new__(cls: type[EagerModule]) -> EagerModule:
        return lower_eagerly(build(), plan, config, build_meshes(plan, config), carried, cls)  # type: ignore[arg-type]

    if carried is not None:
        return class_of(module_class, {"__new__": __new__, "__init__": lambda self: None})
    return type(f"Parallel{module_class.__name__}", (kind,), {"__init__": __init__})
