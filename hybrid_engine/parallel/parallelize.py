"""`parallelize`: from a module, a sample and a policy to a module that runs on any number of processes."""

import json
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from hybrid_engine.distributed.processes import broadcast_module, gather_objects, get_world_size, on_rank_zero
from hybrid_engine.parallel.compute_config import BroadcastGenFilesStrategy, ComputeConfig, ReuseType
from hybrid_engine.parallel.eager_module import Carried, EagerModule, class_of, lower_eagerly
from hybrid_engine.parallel.graph.graph import Graph, build_graph
from hybrid_engine.parallel.meshes import build_meshes
from hybrid_engine.parallel.parallel_module import ParallelModule
from hybrid_engine.parallel.planning.named_policies import Policy, check_runs, plan_by
from hybrid_engine.parallel.planning.plan import Plan

Option = TypeVar("Option", bound=Enum)

PLAN_FILE = "plan.json"
MADE_FOR_FILE = "made_for.json"


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
    Parameters are rank 0's, with `init_module_params=False` those of each unit's first process. ValueError, on every
    rank, where the arguments do not fit, the module cannot be traced, or what lies in the folder is for something else.
    """
    if isinstance(module_or_module_class, ParallelModule) or (
        isinstance(module_or_module_class, type) and issubclass(module_or_module_class, ParallelModule)
    ):
        return module_or_module_class
    reuse = _member(ReuseType, "reuse", reuse)
    _check_effects(reuse, _member(BroadcastGenFilesStrategy, "broadcast_strategy", broadcast_strategy))
    _check_processes(compute_config, load_module)
    is_class = isinstance(module_or_module_class, type)
    if module_fn is not None and not is_class:
        raise ValueError(f"module_fn={module_fn} builds a class's modules, and a module is given; leave it out")
    build = (module_fn or module_or_module_class) if is_class else (lambda: module_or_module_class)
    traced = _on_meta(build) if is_class else module_or_module_class
    _check_not_nested(traced)
    if module_dtype is not None:
        traced = traced.to(module_dtype)
    folder = Path(gen_savedir) / f"{_full_name(traced)}" / (instance_name or "_")
    graph = build_graph(traced, dummy_forward_args)
    content = on_rank_zero(lambda: _planned(graph, pas_policy, compute_config, folder, reuse))
    plan = Plan.from_json(content, graph)
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
    return ParallelModule(built(), plan, compute_config, meshes, dummy_forward_args)


def _member(kind: type[Option], name: str, value: Option | str) -> Option:
    """`value` as one of an option's values; ValueError where it is none."""
    try:
        return kind(value)
    except ValueError as error:
        raise ValueError(f"{name}={value!r} must be one of {[member.value for member in kind]}") from error


def _check_effects(reuse: ReuseType, strategy: BroadcastGenFilesStrategy) -> None:
    """ValueError for what would change nothing."""
    if reuse is ReuseType.GRAPH:
        raise ValueError("reuse='graph' is not supported, graphs are traced anew in any case; pass 'override'")
    if strategy is not BroadcastGenFilesStrategy.NONE:
        raise ValueError(
            f"broadcast_strategy={strategy.value!r} is not supported: rank 0 alone reads and writes gen_savedir, and "
            "sends all others the plan; pass 'none'"
        )


def _check_processes(config: ComputeConfig, load_module: bool) -> None:
    world_size = get_world_size()
    if load_module and config.runtime_ngpus != world_size:
        raise ValueError(
            f"runtime_ngpus={config.runtime_ngpus} must be the number of processes, {world_size}; start as many, or "
            "pass load_module=False to make the plan alone"
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


def _planned(
    graph: Graph, policy: str | Policy, config: ComputeConfig, folder: Path, reuse: ReuseType
) -> dict[str, Any]:
    """The plan as its file holds it: that of the folder where `reuse` says so and it fits, else a new one."""
    name = policy if isinstance(policy, str) else f"{policy.__module__}.{getattr(policy, '__qualname__', policy)}"
    made_for = {"graph": graph.hash, "policy": name, **config.to_json()}
    made_for = json.loads(json.dumps(made_for, default=str))
    stored = _stored(folder)
    if stored is not None and reuse in (ReuseType.MATCH, ReuseType.MOO):
        differing = [key for key in made_for if stored[1].get(key) != made_for[key]]
        if not differing:
            return Plan.from_json(stored[0], graph, str(folder / PLAN_FILE)).to_json()
        if reuse is ReuseType.MATCH:
            raise ValueError(
                f"{folder} holds a plan for another {', '.join(differing)}; pass reuse='moo' to make it anew, or "
                "another instance_name to keep both"
            )
    if folder.exists():
        _remove(folder)
    plan = plan_by(policy, graph, config)
    folder.mkdir(parents=True, exist_ok=True)
    plan.save(folder / PLAN_FILE)
    (folder / MADE_FOR_FILE).write_text(json.dumps(made_for, indent=1) + "\n")
    return plan.to_json()


def _stored(folder: Path) -> tuple[Any, dict[str, Any]] | None:
    """The plan in the folder and what it was made for, None where there is none that is complete."""
    try:
        return tuple(json.loads((folder / name).read_text()) for name in (PLAN_FILE, MADE_FOR_FILE))  # type: ignore[return-value]
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _remove(folder: Path) -> None:
    """Removes what this module wrote into the folder."""
    for name in (PLAN_FILE, MADE_FOR_FILE):
        (folder / name).unlink(missing_ok=True)


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

    def __init__(self: ParallelModule) -> None:
        ParallelModule.__init__(self, build(), plan, config, build_meshes(plan, config), sample)

    def __new__(cls: type[EagerModule]) -> EagerModule:
        return lower_eagerly(build(), plan, config, build_meshes(plan, config), carried, cls)  # type: ignore[arg-type]

    if carried is not None:
        return class_of(module_class, {"__new__": __new__, "__init__": lambda self: None})
    return type(f"Parallel{module_class.__name__}", (ParallelModule,), {"__init__": __init__})
