"""Checks of the arguments of `parallelize`, agreement on them between processes, and the policies by name."""

import inspect
import os
from collections import Counter
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from hybrid_engine.config.checks import find_nearest
from hybrid_engine.distributed.processes import get_world_size, on_rank_zero
from hybrid_engine.distributed.verdict import agree
from hybrid_engine.extensions.parallelize.graph.annotations import call_of
from hybrid_engine.extensions.parallelize.graph.compute_config import (
    SWITCH,
    BroadcastGenFilesStrategy,
    ComputeConfig,
    ReuseType,
    ValueRule,
    check,
    check_alike,
    has_names,
    name_of,
    shown,
    takes,
    words_by_name,
    words_of,
)
from hybrid_engine.extensions.parallelize.graph.graph import Graph
from hybrid_engine.extensions.parallelize.module.parallel_module import ParallelModule
from hybrid_engine.extensions.parallelize.planning.autodist import autodist, explain
from hybrid_engine.extensions.parallelize.planning.plan import Plan
from hybrid_engine.extensions.parallelize.planning.policies import (
    STAGE_OPTIONS,
    batch_plan,
    check_pipeline,
    check_pipeline_and_batch,
    replicated_plan,
    stages_and_batch,
    stages_of_equal_size,
    tensor_parallel,
)
from hybrid_engine.extensions.parallelize.planning.setting import OPTION_NAMES, Options

Policy = Callable[[Graph, ComputeConfig], Plan | None]
OPTIONS: Mapping[str, frozenset[str]] = {
    "dp": frozenset(),
    "tp": frozenset({"seed"}),  # whose check names the remedy
    "data": frozenset(),
    "pp": STAGE_OPTIONS - {"pipeline_nstages"},
    "hybrid": STAGE_OPTIONS,
    "autodist": OPTION_NAMES,
}
Option = TypeVar("Option", bound=Enum)


def check_one_process(config: ComputeConfig) -> None:
    """Raises ValueError unless a unit is one process."""
    if config.plan_ngpus != 1:
        raise ValueError(
            f"policy 'dp' needs plan_ngpus=1, not {config.plan_ngpus}; use 'data' or 'tp' for larger units"
        )


def check_no_seed(config: ComputeConfig) -> None:
    """Raises ValueError for the option `seed` of earlier releases, whose `tp` drew a random split for each op."""
    if "seed" in config.pas_config:
        raise ValueError(
            f"pas_config['seed']={config.pas_config['seed']!r}: policy 'tp' is tensor parallelism (heads, columns then "
            "rows, vocabulary) and draws nothing; leave seed out, or pass a callable that returns the Plan to try"
        )


def data_parallel(graph: Graph, config: ComputeConfig) -> Plan:
    """`dp`: every process has the whole module."""
    return replicated_plan(graph, (1,))


def split_batch(graph: Graph, config: ComputeConfig) -> Plan:
    """`data`: dimension 0 of the arguments is split inside the unit."""
    return batch_plan(graph, (config.plan_ngpus,))


POLICIES: Mapping[str, Policy] = {
    "dp": data_parallel,
    "tp": tensor_parallel,
    "data": split_batch,
    "pp": stages_of_equal_size,
    "hybrid": stages_and_batch,
    "autodist": autodist,
}


CHECKS: Mapping[str, Callable[[ComputeConfig], Any]] = {
    "dp": check_one_process,
    "tp": check_no_seed,
    "data": lambda config: None,
    "pp": check_pipeline,
    "hybrid": check_pipeline_and_batch,
    "autodist": lambda config: Options.of(config.pas_config),
}
"""Checks of each policy's option values that run before a module is traced."""


def plan_by(policy: str | Policy, graph: Graph, config: ComputeConfig) -> Plan:
    """The plan that a policy makes, checked; ValueError for an unknown policy or option, or for an invalid plan.

    A callable receives the graph and the config and returns a plan.
    """
    if not isinstance(policy, str):
        plan = policy(graph, config)
        if not isinstance(plan, Plan):
            raise ValueError(f"pas_policy={policy} returned {type(plan).__name__}; return a hybrid_engine Plan")
        if not isinstance(plan.graph, Graph) or plan.graph.signature != graph.signature:
            raise ValueError(f"pas_policy={policy} returned a plan of another graph; make it for the one it is given")
    else:
        check_policy(policy, config)
        plan = POLICIES[policy](graph, config)
        if policy == "autodist" and plan is not None and config.pas_config.get("verbose"):
            print(explain(plan, config))
        assert plan is not None, f"{policy=}"
    plan.check()
    check_runs(plan, config)
    return plan


def check_runs(plan: Plan, config: ComputeConfig) -> None:
    """Raises ValueError for a plan that cannot run under this config."""
    if plan.plan_ngpus != config.plan_ngpus:
        raise ValueError(f"the plan is for {plan.plan_ngpus} processes, plan_ngpus={config.plan_ngpus}; change either")
    plan.check_runs()
    _check_gradients(plan, config)
    if not plan.stages:
        return
    if not config.use_end2end:
        raise ValueError("a plan with stages needs use_end2end=True: train_step alone runs them; set it")
    if config.inference_only != (plan.schedule == "infer_pipe"):
        raise ValueError(
            f"inference_only={config.inference_only} does not go with the schedule {plan.schedule!r}; 'infer_pipe' is "
            "for inference_only=True, all others are for training"
        )
    if config.use_zero and plan.schedule == "1f1b_interleaved":
        raise ValueError("use_zero=True does not go with '1f1b_interleaved'; take '1f1b', or leave use_zero out")


def _check_gradients(plan: Plan, config: ComputeConfig) -> None:
    if config.inference_only:
        return
    is_alone = config.num_units == 1 and (plan.plan_ngpus == len(plan.stages) or plan.plan_ngpus == 1)
    num_readers = Counter(key for op in plan.graph.ops.values() for key in set(op.inputs))
    for op in plan.graph.ops.values():
        trained = [key for key in op.inputs if key in plan.graph.requires_grad]
        # Other stages may also have a copy of a parameter that other ops read.
        is_summed = not is_alone or (plan.stages and any(num_readers[key] > 1 for key in trained))
        if trained and is_summed and call_of(op.node).arguments.get("sparse"):
            raise ValueError(
                f"{op.key} has sparse=True, and sparse gradients are not added up over processes; pass sparse=False to "
                f"the embedding at {op.path!r}"
            )


def check_policy(policy: str | Policy, config: ComputeConfig) -> None:
    """Raises ValueError for an unknown policy, and for wrong options of a known one; reads no file."""
    if isinstance(policy, str):
        _check_names(policy, config.pas_config)
        CHECKS[policy](config)


def _check_names(policy: str, options: Mapping[str, Any]) -> None:
    if policy not in POLICIES:
        raise ValueError(f"pas_policy={policy!r} must be one of {sorted(POLICIES)}, or a callable")
    for name in options:
        if not name.startswith("_") and name not in OPTIONS[policy]:
            near = find_nearest(name, OPTIONS[policy])
            hint = f"did you mean {near!r}? " if near else ""
            known = sorted(OPTIONS[policy])
            raise ValueError(
                f"pas_config[{name!r}] is not an option of {policy!r}; {hint}it has {known}; free ones begin with _"
            )


def _is_module(value: Any) -> bool:
    return isinstance(value, nn.Module) or (isinstance(value, type) and issubclass(value, nn.Module))


def _is_policy(value: Any) -> bool:
    return isinstance(value, str) or (not _is_module(value) and takes(value, 2))


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and not Path(value).is_file()


def _is_folder_name(value: Any) -> bool:
    return value is None or (isinstance(value, str) and bool(value) and value not in (".", "..") and "/" not in value)


RULES: Mapping[str, ValueRule] = {
    "module_or_module_class": ValueRule(_is_module, "a torch.nn.Module or a class of such"),
    "dummy_forward_args": ValueRule(has_names, "a dict of sample values by the names of forward's arguments"),
    "pas_policy": ValueRule(_is_policy, f"one of {sorted(POLICIES)}, or a callable (graph, config) -> Plan"),
    "compute_config": ValueRule(lambda value: isinstance(value, ComputeConfig), "a hybrid_engine.ComputeConfig"),
    "gen_savedir": ValueRule(_is_path, "the path of a folder, which is made where there is none"),
    "instance_name": ValueRule(_is_folder_name, "the name of a folder, without '/', or None"),
    "load_module": SWITCH,
    "module_dtype": ValueRule(
        lambda value: value is None or (isinstance(value, torch.dtype) and value.is_floating_point),
        "a dtype of floating-point numbers, as torch.bfloat16, or None",
    ),
    "module_fn": ValueRule(
        lambda value: value is None or (callable(value) and not isinstance(value, nn.Module)),
        "a callable that builds the module, or None",
    ),
    "init_module_params": SWITCH,
}


def agree_on(
    given: Mapping[str, Any], reuse: Any, broadcast_strategy: Any
) -> tuple[ReuseType, BroadcastGenFilesStrategy]:
    """Checks the arguments and returns `reuse` and `broadcast_strategy` as members of their enums; collective.

    Raises ValueError on all processes if an argument in `given` breaks its rule, if arguments do not go together, or if
    they differ between processes.
    """
    agree(lambda: check_arguments(given))
    kinds = agree(
        lambda: (
            member(ReuseType, "reuse", reuse),
            member(BroadcastGenFilesStrategy, "broadcast_strategy", broadcast_strategy),
        )
    )
    config, load_module = given["compute_config"], given["load_module"]
    agree(lambda: check_processes(config, load_module, kinds[1]))
    check_same(given, kinds)
    on_rank_zero(lambda: check_policy(given["pas_policy"], config))
    on_rank_zero(lambda: check_folder(given["gen_savedir"]))
    return kinds


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raises ValueError for an argument that breaks its rule, and for a factory with a module object; local."""
    for name, value in given.items():
        check(name, value, RULES[name])
    if given["module_fn"] is not None and not isinstance(given["module_or_module_class"], type):
        raise ValueError(
            f"module_fn={shown(given['module_fn'])} builds a class's modules, and a module is given; leave it out"
        )


def member(kind: type[Option], name: str, value: Option | str) -> Option:
    """The enum member that `value` names; ValueError if there is no such member; local."""
    try:
        return kind(value)
    except ValueError as error:
        raise ValueError(f"{name}={shown(value)} must be one of {[member.value for member in kind]}") from error


def check_processes(config: ComputeConfig, load_module: bool, strategy: BroadcastGenFilesStrategy) -> None:
    """Raises ValueError for another number of processes than the config's, or a missing process group; local."""
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


def check_folder(path: str | os.PathLike[str]) -> None:
    """Creates the folder if it is missing; ValueError if it cannot be created; local."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"gen_savedir={str(path)!r} cannot be made ({error}); pass a folder you may write to"
        ) from error


def check_same(given: Mapping[str, Any], kinds: tuple[ReuseType, BroadcastGenFilesStrategy]) -> None:
    """Raises ValueError on all processes unless all of them pass the same arguments; collective.

    Samples are compared by shapes, dtypes and their entries that are not tensors. Weights and folders may differ.
    """
    config, module = given["compute_config"], given["module_or_module_class"]
    own = {name: words_of(value) for name, value in vars(config).items() if not isinstance(value, Mapping)}
    own |= words_by_name("pas_config", config.pas_config) | words_by_name("user_config", config.user_config)
    own |= words_by_name("dummy_forward_args", given["dummy_forward_args"])
    own |= {name: words_of(given[name]) for name in ("pas_policy", "load_module", "module_dtype", "instance_name")}
    own |= {"reuse": kinds[0].value, "broadcast_strategy": kinds[1].value}
    is_class = isinstance(module, type)
    own["module_or_module_class"] = f"{'the class' if is_class else 'an object of'} {name_of(module)}"
    if not is_class:
        own["the module's training"] = str(module.training)
    check_alike(own)


def check_not_nested(module: nn.Module) -> None:
    """Raises ValueError if a submodule is already parallel; local."""
    inner = [name for name, part in module.named_modules() if isinstance(part, ParallelModule)]
    if inner:
        raise ValueError(f"{inner[0]!r} of the module is parallel already; parallelize the parts, or the whole")


def built_by(build: Callable[[], nn.Module], module_class: type[nn.Module], name: str) -> nn.Module:
    """The module that `build` returns; ValueError if it needs arguments or returns another type; local."""
    try:
        inspect.signature(build).bind()
    except TypeError as error:
        raise ValueError(
            f"{name}={shown(build)} is called without arguments ({error}); pass module_fn=lambda: "
            f"{module_class.__name__}(...)"
        ) from error
    module = build()
    if not isinstance(module, module_class):
        raise ValueError(f"{name}={shown(build)} gave {shown(module)}; it must give a {module_class.__name__}")
    return module
