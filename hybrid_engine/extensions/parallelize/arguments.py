"""Checks of the arguments of `parallelize`: each against its rule, and all for agreement between processes."""

import inspect
import os
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from hybrid_engine.distributed.processes import get_world_size, on_rank_zero
from hybrid_engine.distributed.verdict import agree
from hybrid_engine.extensions.parallelize.module.parallel_module import ParallelModule
from hybrid_engine.extensions.parallelize.options.compute_config import (
    BroadcastGenFilesStrategy,
    ComputeConfig,
    ReuseType,
)
from hybrid_engine.extensions.parallelize.options.values import (
    SWITCH,
    Rule,
    check,
    check_alike,
    has_names,
    name_of,
    shown,
    takes,
    words_by_name,
    words_of,
)
from hybrid_engine.extensions.parallelize.planning.named_policies import POLICIES, check_policy

Option = TypeVar("Option", bound=Enum)


def _is_module(value: Any) -> bool:
    return isinstance(value, nn.Module) or (isinstance(value, type) and issubclass(value, nn.Module))


def _is_policy(value: Any) -> bool:
    return isinstance(value, str) or (not _is_module(value) and takes(value, 2))


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and not Path(value).is_file()


def _is_folder_name(value: Any) -> bool:
    return value is None or (isinstance(value, str) and bool(value) and value not in (".", "..") and "/" not in value)


RULES: Mapping[str, Rule] = {
    "module_or_module_class": Rule(_is_module, "a torch.nn.Module or a class of such"),
    "dummy_forward_args": Rule(has_names, "a dict of sample values by the names of forward's arguments"),
    "pas_policy": Rule(_is_policy, f"one of {sorted(POLICIES)}, or a callable (graph, config) -> Plan"),
    "compute_config": Rule(lambda value: isinstance(value, ComputeConfig), "a hybrid_engine.ComputeConfig"),
    "gen_savedir": Rule(_is_path, "the path of a folder, which is made where there is none"),
    "instance_name": Rule(_is_folder_name, "the name of a folder, without '/', or None"),
    "load_module": SWITCH,
    "module_dtype": Rule(
        lambda value: value is None or (isinstance(value, torch.dtype) and value.is_floating_point),
        "a dtype of floating-point numbers, as torch.bfloat16, or None",
    ),
    "module_fn": Rule(
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
