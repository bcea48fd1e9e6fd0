"""What `build_optimizer` is given: a module with parallel parts, an optimizer and its options, groups of parameters."""

import inspect
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_engine.extensions.parallelize.alike import name_of, words_of
from hybrid_engine.extensions.parallelize.parallel_module import ParallelModule
from hybrid_engine.extensions.parallelize.values import CALLABLE, Rule, check, is_list_of, shown

MODULE = Rule(lambda value: isinstance(value, nn.Module), "a torch.nn.Module")
GROUPS = Rule(
    lambda value: is_list_of(value, lambda group: isinstance(group, dict) and "params" in group) and len(value) > 0,
    "a list of dicts with 'params'",
)


def checked_parts(
    module: Any, optimizer_fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], param_groups: Any
) -> list[ParallelModule]:
    """The parallel parts of a module; ValueError for arguments that are wrong, or do not go together; local."""
    check("module", module, MODULE)
    check("optimizer_fn", optimizer_fn, CALLABLE)
    if param_groups is not None:
        check("param_groups", param_groups, CALLABLE)
    _check_options(optimizer_fn, args, kwargs)
    parts = [part for part in module.modules() if isinstance(part, ParallelModule)]
    if not parts:
        raise ValueError("module has no parallel part; call parallelize, or build the optimizer itself")
    if any(part.compute_config.inference_only for part in parts):
        raise ValueError("inference_only=True: the module is never trained; change the compute config")
    for name in ("plan_ngpus", "runtime_ngpus"):
        values = sorted({getattr(part.compute_config, name) for part in parts})
        if len(values) > 1:
            raise ValueError(f"the parallel parts have {name} of {values}; all must have the same")
    return parts


def _check_options(optimizer_fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """ValueError for options that the optimizer has not, and where it needs more, as far as its signature says."""
    try:
        signature = inspect.signature(optimizer_fn)
    except (TypeError, ValueError):
        return  # of C, whose signature nobody knows
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    named = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    options = named[1:] if named and inspect.Parameter.POSITIONAL_ONLY not in kinds else named
    for name, value in kwargs.items() if inspect.Parameter.VAR_KEYWORD not in kinds else ():
        if name not in options:
            near = get_close_matches(name, options, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"{name}={shown(value)} is no option of optimizer_fn={name_of(optimizer_fn)}; {hint}it has {options}"
            )
    try:
        signature.bind(None, *args, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"optimizer_fn={name_of(optimizer_fn)} cannot be called with the parameters, {list(args)} and "
            f"{dict(kwargs)}: {error}; give build_optimizer what it takes: {signature}"
        ) from error


def made_by(
    optimizer_fn: Any, groups: list[dict[str, Any]], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """What an optimizer's class or factory makes; ValueError where it refuses a value, or gives something else."""
    try:
        optimizer = optimizer_fn(groups, *args, **kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"optimizer_fn={name_of(optimizer_fn)} refuses {[*args, *(f'{k}={shown(v)}' for k, v in kwargs.items())]}: "
            f"{error}; correct that option, or the groups of param_groups"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer_fn={shown(optimizer_fn)} gave {shown(optimizer)}; it must give an optimizer of torch"
        )
    return optimizer


def check_steps_parts(optimizer: torch.optim.Optimizer, parts: Sequence[ParallelModule]) -> None:
    """ValueError for an optimizer whose step needs the gradients of all parameters, where a process has some; local."""
    if isinstance(optimizer, torch.optim.LBFGS) and any(part.plan.stages for part in parts):
        raise ValueError(
            "optimizer_fn=LBFGS looks along one line for all parameters at once, and with stages no process has all; "
            "take a plan without stages, or an optimizer such as AdamW"
        )


def checked_groups(groups: Any, places: Mapping[int, Any]) -> list[dict[str, Any]]:
    """The groups that `param_groups` gave, with lists of parameters; ValueError for what is none, and for others'."""
    check("param_groups' result", groups, GROUPS)
    seen: set[int] = set()
    found = []
    for number, group in enumerate(groups):
        params = group["params"]
        listed = [params] if isinstance(params, Tensor) else list(params)
        for parameter in listed:
            if id(parameter) not in places:
                raise ValueError(
                    f"param_groups: params of group {number} have {shown(parameter)}, which is no trained parameter of "
                    "the module; take them from what param_groups is given"
                )
            if id(parameter) in seen:
                raise ValueError(f"param_groups: {places[id(parameter)][0]!r} is there twice; put it into one group")
            seen.add(id(parameter))
        found.append({**group, "params": listed})
    return found


def options_of(groups: Sequence[Mapping[str, Any]], number: str, without: Sequence[str]) -> dict[str, str]:
    """The options of an optimizer's groups in words, by the user's number of each, which stands in it as `number`."""
    return {
        f"group {group[number]} of the optimizer: {name}": words_of(value)
        for group in groups
        for name, value in group.items()
        if name not in ("params", *without)
    }
