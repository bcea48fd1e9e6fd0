"""`build_optimizer`: any optimizer on the parameters that this rank holds, with gradients summed over units."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hybrid_engine.distributed.processes import default_device, gather_objects
from hybrid_engine.distributed.verdict import agree, everyone
from hybrid_engine.extensions.parallelize.checkpoints.optimizer_states import GROUP, NAMES, NUMBERS
from hybrid_engine.extensions.parallelize.module.parallel_module import ParallelModule
from hybrid_engine.extensions.parallelize.module.reducer import Bucket, Hook, OverlappingReducer, Reducer
from hybrid_engine.extensions.parallelize.options.values import (
    CALLABLE,
    Rule,
    check,
    check_alike,
    is_list_of,
    is_number,
    name_of,
    shown,
    words_of,
)
from hybrid_engine.extensions.parallelize.training.gradient_sums import GradientSums
from hybrid_engine.extensions.parallelize.training.zero_sharding import shard, sharded_parameters, zero_buckets
from hybrid_engine.optim import plain_steps

NamedParameters = Iterable[tuple[str, nn.Parameter]]
AT_LEAST_0 = "a number of at least 0, or None"
MODULE = Rule(lambda value: isinstance(value, nn.Module), "a torch.nn.Module")
GROUPS = Rule(
    lambda value: is_list_of(value, lambda group: isinstance(group, dict) and "params" in group) and len(value) > 0,
    "a list of dicts with 'params'",
)


def build_optimizer(
    module: nn.Module,
    optimizer_fn: Callable[..., torch.optim.Optimizer],
    *args: Any,
    param_groups: Callable[[NamedParameters], list[dict[str, Any]]] | None = None,
    **kwargs: Any,
) -> torch.optim.Optimizer:
    """`optimizer_fn(parameters, *args, **kwargs)` for a parallel module, or a plain one that contains such.

    `param_groups` makes groups from names and parameters; without it there is one. The optimizer gets these besides:
    `sync_shard_grad()`, which sums gradients over units (`step()` does when nobody did), `scale_grads(factor)` and
    `clip_gnorm(max_norm)`, which need that first. What torch has no sharded form of is stepped on whole tensors, as
    Adafactor is.

    `register_reducer_pre_hook` and `register_reducer_post_hook` take `hook(reducer, gradient)`, called where processes
    sum the gradients of `reducer.parameters` over `reducer.group`. Before, `gradient` is flat and has this unit's,
    after, the sum over all units; with ZeRO the part of it that this process keeps. What a hook changes in place before
    is a term of the sum, so that scaling by 2 doubles gradients; what it changes after is what is clipped and stepped,
    and must be the same on all processes that keep that part. Hooks are called once a step for each dtype and bucket,
    before the sum within the backward pass where the config says `use_async_reducer`; with ZeRO once for each part that
    FSDP2 gathers, a layer where the lowering is eager, at the end of `train_step`, and of every backward pass of a loop
    without it, for what that pass gave: what is not linear means another thing there. Hooks are those of the optimizer
    that was built last. Copies that several stages have are added up later. What a hook raises on one process is raised
    on all where gradients are synced, and leaves none that could be stepped.

    Where the config says `use_zero`, the module is sharded over units here. Collective. ValueError, on every process,
    for modules without a parallel part or a trained parameter, of different configs, or for inference, for groups that
    are none, for options that the optimizer has not or refuses, and where processes give it different ones.
    """
    parts = agree(lambda: checked_parts(module, optimizer_fn, args, kwargs, param_groups))
    for part in parts:
        shard(part)
    inside = {id(p) for part in parts for p in sharded_parameters(part)}
    parallel = {id(p) for part in parts for p in part.parameters()}
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not any(gather_objects(bool(trained))):
        raise ValueError("module trains no parameter; call requires_grad_() on some before build_optimizer")
    group = parts[0].meshes.data.get_group() if parts[0].meshes.data is not None else None
    reducers = [
        _reducer_of(parts, [p for _, p in trained if id(p) in parallel and id(p) not in inside], group),
        Reducer([p for _, p in trained if id(p) not in parallel], group),
    ]
    places = _places(module, trained)

    def built() -> torch.optim.Optimizer:
        whole = [{"params": [p for _, p in trained]}]
        given = whole if param_groups is None else checked_groups(param_groups(trained), places)
        groups, described = _of_one_kind(given, places)
        optimizer = made_by(optimizer_fn, groups, args, kwargs)
        check_steps_parts(optimizer, parts)
        for live, description in zip(optimizer.param_groups, described, strict=True):
            live.update(description)
        return optimizer

    optimizer = agree(built)
    own = options_of(optimizer.param_groups, GROUP, (NAMES, NUMBERS, GROUP))
    check_alike({"optimizer_fn": name_of(type(optimizer)), **own})
    additions = _Additions(module, optimizer, reducers, [p for _, p in trained])
    for part in parts:
        additions.hooked.extend(zero_buckets(part))
        additions.after.extend(_between_stages(part))
        additions.stages = part.meshes.stages if part.plan.stages else None
    additions.attach()
    return optimizer


def _reducer_of(
    parts: Sequence[ParallelModule], parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None
) -> Reducer:
    """What sums the gradients of parallel parts over units: as their config says, where they are one end to end."""
    config = parts[0].compute_config
    if not config.use_async_reducer:
        return Reducer(parameters, group, config.bucket_bytes)
    reducer = OverlappingReducer(parameters, group, config.bucket_bytes)
    for part in parts:
        if part.overlapping_reducer is not None:
            part.overlapping_reducer.drop()
        part.overlapping_reducer = reducer
    return reducer


def _places(module: nn.Module, trained: Sequence[tuple[str, nn.Parameter]]) -> dict[int, tuple[str, int]]:
    """By the identity of each parameter its name and place in the original module."""
    if not isinstance(module, ParallelModule):
        return {id(p): (name, place) for place, (name, p) in enumerate(trained)}
    places = module.places()
    return {id(p): (module.canonical(name), places[module.canonical(name)]) for name, p in trained}


def _between_stages(part: ParallelModule) -> list[Reducer]:
    """For each set of stages with copies of the same parameters, what adds their gradients up; collective."""
    held = part.held()
    return [
        Reducer([p for p in (held.get(n) for n in names) if isinstance(p, nn.Parameter) and p.requires_grad], group)
        for names, group in part.groups_of_holders()
    ]


def _of_one_kind(
    groups: list[dict[str, Any]], places: Mapping[int, tuple[str, int]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The groups, each divided by what its parameters are sharded over: optimizers step those of one kind at once.

    Beside them what checkpoints say of each group: names of the parameters, their places, the number of the group. One
    of which this process trains nothing, as where its stage is frozen, stays as an empty one.
    """
    divided, described = [], []
    for number, group in enumerate(groups):
        kinds: dict[Any, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            kinds.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
        for parameters in kinds.values() or [[]]:
            divided.append({**group, "params": parameters})
            named = [places[id(p)] for p in parameters]
            described.append({NAMES: [n for n, _ in named], NUMBERS: [at for _, at in named], GROUP: number})
    return divided, described


class _Additions:
    """What `build_optimizer` adds to an optimizer."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        reducers: list[Reducer],
        parameters: list[nn.Parameter],
    ):
        self.optimizer, self.reducers, self.parameters = optimizer, reducers, parameters
        self.sums = GradientSums(module, parameters, [p for reducer in reducers for p in reducer.parameters])
        self.hooked: list[Bucket] = list(reducers)  # and what FSDP2 reduces
        self._is_stepping = False
        self.after: list[Reducer] = []  # of parameters that several stages hold
        self.stages: DeviceMesh | None = None

    def attach(self) -> None:
        """Gives the optimizer its methods, and has `step` sync first."""
        optimizer: Any = self.optimizer
        optimizer.sync_shard_grad = self.sync_shard_grad
        optimizer.scale_grads = self.scale_grads
        optimizer.clip_gnorm = self.clip_gnorm
        optimizer.register_reducer_pre_hook = lambda hook: self._register("pre_hooks", hook)
        optimizer.register_reducer_post_hook = lambda hook: self._register("post_hooks", hook)
        optimizer._non_parallel_module_reducer = self.reducers[1]
        optimizer.register_step_pre_hook(lambda *_: None if self._is_stepping else self.sync_shard_grad())
        optimizer.register_step_post_hook(lambda *_: None if self._is_stepping else self.sums.end_step())
        if any(isinstance(parameter, DTensor) for parameter in self.parameters):
            optimizer.step = self._step_with(optimizer.step)
        zero_grad = type(optimizer).zero_grad

        def zero_and_begin(self_: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            zero_grad(self_, set_to_none)
            self.sums.forget()
            for bucket in self.hooked:
                bucket.drop()

        optimizer.zero_grad = MethodType(zero_and_begin, optimizer)

    def _step_with(self, step: Callable[..., Any]) -> MethodType:
        """`step` by `plain_steps`, which calls it several times where torch has no sharded form of what it does."""

        def stepped(optimizer: torch.optim.Optimizer, closure: Callable[[], float] | None = None) -> Any:
            if closure is not None:
                return step(closure)
            if self._is_stepping:
                return step()
            self.sync_shard_grad()
            self._is_stepping = True
            try:
                plain_steps.step(optimizer)
            finally:
                self._is_stepping = False
                self.sums.end_step()
            return None

        return MethodType(stepped, self.optimizer)  # schedulers of torch look for a method's function

    def _register(self, which: str, hook: Hook) -> None:
        check("hook", hook, CALLABLE)
        for bucket in self.hooked:
            getattr(bucket, which).append(hook)

    def sync_shard_grad(self) -> None:
        """Sums gradients over units; nothing where they are the sums already, as in a second step. Collective.

        ValueError where a gradient is a sum already and has grown, or is that of a parameter nobody trains; what a hook
        has raised. An error of one process is raised on all.
        """
        given = [reducer for reducer in (*self.reducers, *self.after) if reducer.parameters]
        are_several = any(reducer.group is not None for reducer in given)
        may_fail = any(bucket.may_fail for bucket in self.hooked)
        must_sum, may_fail = self.sums.must_be_made(are_several, self.stages is not None, may_fail)
        with self.sums.entering():
            for reducer in given if must_sum else ():
                reducer.reduce()
            if may_fail:  # here or elsewhere: a hook that prints may be rank 0's alone
                errors = [bucket.take_error() for bucket in self.hooked]
                everyone().raise_together(next((error for error in errors if error is not None), None))

    def scale_grads(self, factor: float) -> None:
        """Multiplies all gradients; ValueError before they are synced, when units would sum what was scaled apart."""
        check("factor", factor, Rule(lambda v: is_number(v) or (isinstance(v, Tensor) and v.numel() == 1), "a number"))
        if not self.sums.are_there:
            raise ValueError("scale_grads before the gradients are synced; call sync_shard_grad() first")
        with self.sums.entering():  # they are sums also after a step, which may be followed by another one
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    @torch.no_grad()
    def clip_gnorm(self, max_norm: float | None = None) -> Tensor:
        """The norm of all gradients over all axes, which are scaled down to `max_norm` if it is greater; collective.

        0 and None leave them as they are.
        """
        rule = Rule(
            lambda value: value is None or value == float("inf") or (is_number(value) and value >= 0), AT_LEAST_0
        )
        check("max_norm", max_norm, rule)
        self.sync_shard_grad()
        # Of parameters that several stages hold, the first counts.
        counted = {id(p) for reducer in self.after if dist.get_rank(reducer.group) for p in reducer.parameters}
        norms = [_norm(p.grad) for p in self.parameters if p.grad is not None and id(p) not in counted]
        total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=default_device())
        if self.stages is not None:
            squared = total.float().square()
            dist.all_reduce(squared, group=self.stages.get_group())
            total = squared.sqrt()
        if max_norm is not None and max_norm > 0:
            self.scale_grads(min(1.0, max_norm / (float(total) + 1e-6)))
        return total


def _norm(gradient: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(gradient.coalesce().values() if gradient.is_sparse else gradient)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


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
