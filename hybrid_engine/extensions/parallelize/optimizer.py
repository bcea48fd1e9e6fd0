"""`build_optimizer`: any optimizer on the parameters that this rank holds, with gradients summed over units.

With `use_zero` FSDP2 shards the parameters over units and sums their gradients, with hooks around its reductions.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from hybrid_engine.config.checks import find_nearest
from hybrid_engine.distributed.groups import reduce_scatter_single
from hybrid_engine.distributed.processes import default_device, gather_objects
from hybrid_engine.distributed.verdict import agree, everyone
from hybrid_engine.extensions.parallelize.graph.compute_config import (
    CALLABLE,
    ValueRule,
    check,
    check_alike,
    is_list_of,
    is_number,
    name_of,
    shown,
    words_of,
)
from hybrid_engine.extensions.parallelize.module.eager_module import EagerModule
from hybrid_engine.extensions.parallelize.module.parallel_module import ParallelModule
from hybrid_engine.extensions.parallelize.module.reducer import (
    GradientBucket,
    GradientSums,
    Hook,
    OverlappingReducer,
    Reducer,
)
from hybrid_engine.extensions.parallelize.optimizer_states import GROUP, NAMES, NUMBERS
from hybrid_engine.optim.masters import step_optimizer
from hybrid_engine.zero.fsdp2_private import reduce_without_empty
from hybrid_engine.zero.wrapping import copy_views_in_outputs, find_groups

NamedParameters = Iterable[tuple[str, nn.Parameter]]
AT_LEAST_0 = "a number of at least 0, or None"
MODULE = ValueRule(lambda value: isinstance(value, nn.Module), "a torch.nn.Module")
GROUPS = ValueRule(
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
    """`optimizer_fn(parameters, *args, **kwargs)` for a parallel module, or a plain module that contains parallel ones.

    `param_groups` makes groups from names and parameters; without it there is one group. The optimizer has these
    additional methods: `sync_shard_grad()`, which sums gradients over units (`step()` calls it if necessary),
    `scale_grads(factor)`, which requires that gradients are synced, and `clip_gnorm(max_norm)`, which syncs them.
    Optimizers without a sharded form in torch, such as Adafactor, step on whole tensors.

    `register_reducer_pre_hook` and `register_reducer_post_hook` take `hook(reducer, gradient)`, which is called where
    processes sum the gradients of `reducer.parameters` over `reducer.group`. In a pre-hook `gradient` is flat and holds
    this unit's gradients. In a post-hook it is the sum over all units; with ZeRO, the part of the sum that this process
    keeps. A change in place in a pre-hook changes a term of the sum, so that scaling by 2 doubles gradients. A change
    in a post-hook changes the gradients that are clipped and stepped, and must be the same on all processes that keep
    that part.

    Hooks are called once per step for each dtype and bucket. With `use_async_reducer` pre-hooks run within the backward
    pass. With ZeRO hooks are called once for each part that FSDP2 gathers (a layer if the lowering is eager), at the
    end of `train_step`. In a loop without `train_step`, ZeRO calls them at the end of every backward pass, for the
    gradients of that pass, so that hooks that are not linear have another effect there. The hooks of the last optimizer
    that was built are in effect. Copies of parameters in several stages are summed later. An error in a hook on one
    process is raised on all processes when gradients are synced, and no gradients remain that could be stepped.

    If the config has `use_zero`, this shards the module over units. Collective. Raises ValueError on every process for
    modules without a parallel part or a trained parameter, with different configs, or for inference; for invalid
    groups; for options that the optimizer does not have or refuses; and if processes pass different options.
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
    """Maps the id of each parameter to its name and position in the original module."""
    if not isinstance(module, ParallelModule):
        return {id(p): (name, place) for place, (name, p) in enumerate(trained)}
    places = module.places()
    return {id(p): (module.canonical(name), places[module.canonical(name)]) for name, p in trained}


def _between_stages(part: ParallelModule) -> list[Reducer]:
    """For each set of stages with copies of the same parameters, the reducer that sums their gradients; collective."""
    held = part.held()
    return [
        Reducer([p for p in (held.get(n) for n in names) if isinstance(p, nn.Parameter) and p.requires_grad], group)
        for names, group in part.groups_of_holders()
    ]


def _of_one_kind(
    groups: list[dict[str, Any]], places: Mapping[int, tuple[str, int]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The groups, each divided by the device mesh of its parameters, since optimizers step one kind at once.

    The second list has the checkpoint entries of each group: names of the parameters, their positions, the number of
    the user's group. A group without trained parameters on this process, such as in a frozen stage, stays as an empty
    one.
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
    """The methods and state that `build_optimizer` adds to an optimizer."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        reducers: list[Reducer],
        parameters: list[nn.Parameter],
    ):
        self.optimizer, self.reducers, self.parameters = optimizer, reducers, parameters
        self.sums = GradientSums(module, parameters, [p for reducer in reducers for p in reducer.parameters])
        self.hooked: list[GradientBucket] = list(reducers)  # with the reductions of FSDP2
        self._is_stepping = False
        self.after: list[Reducer] = []  # for parameters that several stages hold
        self.stages: DeviceMesh | None = None

    def attach(self) -> None:
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
        """Replaces `step` by `step_optimizer`, which calls it several times if torch has no sharded form of it."""

        def stepped(optimizer: torch.optim.Optimizer, closure: Callable[[], float] | None = None) -> Any:
            if closure is not None:
                return step(closure)
            if self._is_stepping:
                return step()
            self.sync_shard_grad()
            self._is_stepping = True
            try:
                step_optimizer(optimizer)
            finally:
                self._is_stepping = False
                self.sums.end_step()
            return None

        return MethodType(stepped, self.optimizer)  # torch's schedulers look for a method's function

    def _register(self, which: str, hook: Hook) -> None:
        check("hook", hook, CALLABLE)
        for bucket in self.hooked:
            getattr(bucket, which).append(hook)

    def sync_shard_grad(self) -> None:
        """Sums gradients over units; does nothing if they are already summed, as in a second step. Collective.

        Raises ValueError if a summed gradient was added to, or if a parameter that the optimizer lacks has a gradient.
        Raises the errors of hooks. An error of one process is raised on all.
        """
        given = [reducer for reducer in (*self.reducers, *self.after) if reducer.parameters]
        are_several = any(reducer.group is not None for reducer in given)
        may_fail = any(bucket.may_fail for bucket in self.hooked)
        must_sum, may_fail = self.sums.must_be_made(are_several, self.stages is not None, may_fail)
        with self.sums.entering():
            for reducer in given if must_sum else ():
                reducer.reduce()
            if may_fail:  # here or elsewhere: a hook may exist on rank 0 only
                errors = [bucket.take_error() for bucket in self.hooked]
                everyone().raise_together(next((error for error in errors if error is not None), None))

    def scale_grads(self, factor: float) -> None:
        """Multiplies all gradients; ValueError before they are synced, because units would then sum scaled terms."""
        check(
            "factor",
            factor,
            ValueRule(lambda v: is_number(v) or (isinstance(v, Tensor) and v.numel() == 1), "a number"),
        )
        if not self.sums.are_there:
            raise ValueError("scale_grads before the gradients are synced; call sync_shard_grad() first")
        with self.sums.entering():  # they remain sums after a step, which another may follow
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    @torch.no_grad()
    def clip_gnorm(self, max_norm: float | None = None) -> Tensor:
        """The norm of all gradients over all axes. Scales them down to `max_norm` if the norm is greater; collective.

        0 and None leave the gradients unchanged.
        """
        rule = ValueRule(
            lambda value: value is None or value == float("inf") or (is_number(value) and value >= 0), AT_LEAST_0
        )
        check("max_norm", max_norm, rule)
        self.sync_shard_grad()
        # Only the first holder counts a parameter that several stages hold.
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
    """The parallel parts of a module; ValueError for arguments that are wrong or do not go together; local."""
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
    """Raises ValueError for unknown or missing options of the optimizer, as far as its signature says."""
    try:
        signature = inspect.signature(optimizer_fn)
    except (TypeError, ValueError):
        return  # a C function without a signature
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    named = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    options = named[1:] if named and inspect.Parameter.POSITIONAL_ONLY not in kinds else named
    for name, value in kwargs.items() if inspect.Parameter.VAR_KEYWORD not in kinds else ():
        if name not in options:
            near = find_nearest(name, options)
            hint = f"did you mean {near!r}? " if near else ""
            raise ValueError(
                f"{name}={shown(value)} is not an option of optimizer_fn={name_of(optimizer_fn)}; {hint}it has "
                f"{options}"
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
    """The optimizer that a class or factory returns; ValueError if it refuses a value or returns something else."""
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
    """Raises ValueError for an optimizer that needs all gradients if the process has only some; local."""
    if isinstance(optimizer, torch.optim.LBFGS) and any(part.plan.stages for part in parts):
        raise ValueError(
            "optimizer_fn=LBFGS looks along one line for all parameters at once, and with stages no process has all; "
            "take a plan without stages, or an optimizer such as AdamW"
        )


def checked_groups(groups: Any, places: Mapping[int, Any]) -> list[dict[str, Any]]:
    """The groups of `param_groups`, with lists of parameters; ValueError for invalid groups and parameters."""
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
    """Descriptions of the options of an optimizer's groups; `number` is the key of the user's group number."""
    return {
        f"group {group[number]} of the optimizer: {name}": words_of(value)
        for group in groups
        for name, value in group.items()
        if name not in ("params", *without)
    }


def shard(part: ParallelModule) -> None:
    """Shards a part whose config has `use_zero`, once. The backward pass then sums gradients as it makes them.

    Gradients are never averaged. If the module's own forward runs, its layers are gathered and reduced one by one; a
    graph can read parameters at any time, so that it is one FSDP unit. If each unit is its own group, nothing is
    sharded. Collective.
    """
    mesh = part.meshes.zero
    if not part.compute_config.use_zero or mesh is None or mesh.size(-1) == 1 or isinstance(part, FSDPModule):
        return
    scalars = {p for p in part.parameters() if not p.dim()}
    for scalar in scalars:
        scalar.data = scalar.data.to(default_device())  # as FSDP2 moves what it shards
    layers = find_groups(part).modules if isinstance(part, EagerModule) else []
    groups = [*layers, part]
    for group in groups:
        copy_views_in_outputs(group)
        sharded = fully_shard(group, mesh=mesh, reshard_after_forward=False, ignored_params=scalars)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    reduce_without_empty(groups)


def sharded_parameters(part: ParallelModule) -> list[nn.Parameter]:
    """The parameters that are sharded over units, whose gradients FSDP2 sums."""
    return [p for p in part.parameters() if p.dim()] if isinstance(part, FSDPModule) else []


class ZeroBucket(GradientBucket):
    """The parameters that FSDP2 reduces together, and the collective that it uses, with hooks around it.

    FSDP2 passes gradients in the order of the collective: first the part for the first process of a group, then the
    part for the second, with zeros if a parameter does not divide evenly. It receives the part of the sum that this
    process keeps.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, has_groups: bool):
        """`has_groups`: sums of several groups of units are added up afterwards, and are not final before."""
        super().__init__(parameters, group)
        self.has_groups = has_groups

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates the memory that FSDP2 requests before the collective."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Runs the reduce-scatter for FSDP2, on its stream."""
        self.run_hooks(self.pre_hooks, input_tensor)
        work = reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        if work is not None:
            work.wait()
        if not self.has_groups:
            self.after(output_tensor)
        return work

    def after(self, gradients: Tensor) -> None:
        """Calls the post-hooks with `gradients`, the part of the sum over all units that this process keeps."""
        self.run_hooks(self.post_hooks, gradients)


def zero_buckets(part: ParallelModule) -> list[ZeroBucket]:
    """The buckets that FSDP2 reduces for a part, layers first, without hooks; they replace earlier ones."""
    if not isinstance(part, FSDPModule):
        return []
    assert part.meshes.data is not None and part.meshes.zero is not None
    group, has_groups = part.meshes.data.get_group(), part.meshes.zero.ndim > 1
    left = {p for p in sharded_parameters(part) if p.requires_grad}
    found = []
    for module in reversed([module for module in part.modules() if isinstance(module, FSDPModule)]):
        own = [p for p in module.parameters() if p in left]
        left -= set(own)
        bucket = ZeroBucket(own, group, has_groups)
        module.set_custom_reduce_scatter(bucket)
        if has_groups:
            module.set_all_reduce_hook(bucket.after)
        found.append(bucket)
    return found
