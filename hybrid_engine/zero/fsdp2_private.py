"""Access to parts of FSDP2 that have no public API; no other file uses its private names.

The names were read in torch 2.11 to 2.15, and run with 2.11, 2.13 and 2.15; `pyproject.toml` allows no other. `make
versions` runs the tests with each of them.

| private name                                             | of                | torch         |
|----------------------------------------------------------|-------------------|---------------|
| `_get_fsdp_state()`                                      | FSDPModule        | 2.11 to 2.15  |
| `_lazy_init()`, `_fsdp_param_group`, `_training_state`   | its state         | 2.11 to 2.15  |
| `_register_root_post_backward_final_callback()`          | its state         | 2.11 to 2.15  |
| `_state_ctx.iter_forward_root`                           | its state         | 2.11 to 2.15  |
| `_state_ctx.post_backward_final_callback_queued`         | its state         | 2.11 to 2.15  |
| `_training_state`, `is_unsharded`, `fsdp_params`         | a parameter group | 2.11 to 2.15  |
| `_module_to_pre_{save,load}_state_dict_hook_handle`      | a parameter group | 2.11 to 2.15  |
| `pre_backward()`, `post_backward()`, `reduce_grads`      | a parameter group | 2.11 to 2.15  |
| `_root_post_backward_final_callback()`                   | its state         | 2.11 to 2.15  |
| `_orig_dtype`                                            | a parameter group | 2.11 to 2.14  |
| `_sharding_spec` (and its `tensor_meta`)                 | a parameter       | 2.11 to 2.14  |
| `sharded_param`, `unsharded_param`, `_unsharded_param`   | a parameter       | 2.11 to 2.15  |
| `_post_load_hook_handle`, `all_gather_outputs`           | a parameter       | 2.11 to 2.15  |
| `_auto_reshard_after_forward`                            | its state         | 2.11 to 2.14  |
| `post_forward_mesh_info`                                 | a parameter group | 2.11 to 2.14  |
| `free_unsharded_param()`                                 | a parameter       | 2.11 to 2.15  |
| `unsharded_accumulated_grad`                             | a parameter       | 2.11 to 2.14; |
|                                                          |                   | read-only 2.15|
| `_fsdp_common.TrainingState`, `_fsdp_param.FSDPParam`    | the package       | 2.11 to 2.15  |
| `_module_info`, `_orig_size`, `_contiguous_orig_stride`  | a parameter       | 2.11 to 2.15  |
| `sharded_size`, `contiguous_sharded_stride`              | a parameter       | 2.11 to 2.15  |
| `_sharded_param_data`, `_setattr_on_modules()`           | a parameter       | 2.11 to 2.15  |
| `to_sharded_dtensor()`, `reset_sharded_param()`          | a parameter       | 2.11 to 2.15  |
| `_get_grad_inner_tensor()`, `mesh_info`, `pin_memory`    | a parameter       | 2.11 to 2.15  |
| `is_dtensor`                                             | a parameter       | 2.11 to 2.15  |
| `_to_unsharded()`                                        | a parameter group | 2.11, 2.13    |
| `_pre_forward_hook_handle`, `_post_forward_hook_handle`  | its state         | 2.11 to 2.15  |
| `STATE_KEY`, `REGISTRY_KEY`                              | its contract      | 2.11 to 2.15  |
| `_composable_state._module_state_mapping`                | torch.distributed | 2.11 to 2.15  |

What torch 2.15 changed: a parameter's public `grad_dtype` says in which dtype FSDP2 leaves its reduced gradient, where
`_orig_dtype` and `_sharding_spec` said so before. Gradients that wait for their reduction are `_unsharded_param.grad`.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Replicate

from hybrid_engine.distributed.groups import all_gather_single


def make_root(module: FSDPModule) -> None:
    """Makes `module` the root for FSDP2, which would otherwise take the module whose forward pass comes first.

    That would be an inner module if the first call is `generate()` of a wrapper of a language model, such as peft's.
    """
    module._get_fsdp_state()._lazy_init()


def fsdp_params(modules: Iterable[FSDPModule], is_gathered: bool = False) -> Iterator[Any]:
    """FSDP2's own records of the modules' parameters, all or those that are gathered.

    In a record, `sharded_param` is this process's shard and `unsharded_param` the parameter that replaces it while it
    is gathered.
    """
    for group in _param_groups(modules):
        if group.is_unsharded or not is_gathered:
            yield from group.fsdp_params


def twins(modules: Iterable[FSDPModule]) -> Iterator[tuple[Any, Any]]:
    """Pairs of each parameter's shard and the parameter that replaces it while it is gathered; local.

    Each must have been gathered before.
    """
    for param in fsdp_params(modules):
        yield param.sharded_param, param._unsharded_param


def wholes(modules: Iterable[FSDPModule]) -> Iterator[Any]:
    """The tensor that replaces each parameter while it is gathered; None before the first time."""
    for param in fsdp_params(modules):
        yield getattr(param, "_unsharded_param", None)


def return_to_gathered_storage(param: Any) -> None:
    """Moves a gathered parameter back to the storage it is gathered to: a script may have set `data` to another tensor.

    Takes one of `fsdp_params`.
    """
    whole, gathered = param.unsharded_param, param.all_gather_outputs[0]
    if isinstance(whole, DTensor):  # a plan's part, whose `data` scripts do not set
        return
    if whole.untyped_storage().data_ptr() != gathered.untyped_storage().data_ptr():
        whole.data = gathered.view(-1)[: whole.numel()].view(whole.shape).copy_(whole)


@contextmanager
def keeping_reshard_after_forward(modules: Iterable[FSDPModule]) -> Iterator[None]:
    """Restores at the end whether, and to which mesh, `modules` are resharded after a forward pass."""
    states = [module._get_fsdp_state() for module in modules]
    holders = [(state, "_auto_reshard_after_forward") for state in states]
    holders += [(state._fsdp_param_group, "post_forward_mesh_info") for state in states if state._fsdp_param_group]
    values = [getattr(holder, name) for holder, name in holders]
    try:
        yield
    finally:
        for (holder, name), value in zip(holders, values, strict=True):
            setattr(holder, name, value)


def gathered_storages(modules: Iterable[FSDPModule]) -> Iterator[torch.UntypedStorage]:
    """Storages for the modules' gathered parameters, empty while not gathered; for parameters gathered before."""
    for param in fsdp_params(modules):
        yield from (output.untyped_storage() for output in param.all_gather_outputs)


def keep_gathered_storage(modules: Iterable[FSDPModule]) -> None:
    """Keeps gathered parameters at the same addresses from now on: resharding no longer frees their memory."""
    for param in fsdp_params(modules):
        param.free_unsharded_param = _free_nothing


def _free_nothing() -> None:
    pass


@contextmanager
def holding_gathered(modules: Iterable[FSDPModule]) -> Iterator[bool]:
    """Inside, resharding leaves gathered memory where it is. Yields whether all of it is gathered."""
    modules = list(modules)
    held = [param for param in fsdp_params(modules) if "free_unsharded_param" not in vars(param)]
    for param in held:
        param.free_unsharded_param = _free_nothing
    try:
        yield all(group.is_unsharded for group in _param_groups(modules))
    finally:
        for param in held:
            del param.free_unsharded_param


@torch.no_grad()
def gather_some(modules: Iterable[FSDPModule], changed: Collection[int]) -> None:
    """Gathers parameters again that were resharded inside `holding_gathered`; collective.

    Args:
        changed: the ids of the shards that are gathered; all others have not changed.
    """
    modules = list(modules)
    stale: defaultdict[tuple[Any, torch.dtype], list[Any]] = defaultdict(list)
    for param in fsdp_params(modules):
        if id(param.sharded_param) in changed:
            stale[param.mesh_info.shard_process_group, param._sharded_param_data.dtype].append(param)
    for (group, _), params in stale.items():
        shards = [param._sharded_param_data for param in params]
        mine = torch.cat(shards)
        gathered = mine
        if group.size() > 1:
            gathered = mine.new_empty(group.size() * len(mine))
            all_gather_single(gathered, mine, group=group)
        columns = gathered.view(group.size(), -1).split([len(shard) for shard in shards], dim=1)
        for param, values in zip(params, columns, strict=True):
            param.all_gather_outputs[0].view(group.size(), -1).copy_(values)
    for parameters in _param_groups(modules):
        parameters._to_unsharded()


def _param_groups(modules: Iterable[FSDPModule]) -> Iterator[Any]:
    """FSDP2's own records of parameters that it gathers and reduces at once; a module without parameters has none."""
    for module in modules:
        group = module._get_fsdp_state()._fsdp_param_group
        if group is not None:
            yield group


def keep_reduced_gradients(modules: Iterable[FSDPModule], dtype: torch.dtype) -> None:
    """Leaves reduced gradients in `dtype`; FSDP2 would round them to the dtype of the parameters.

    Needed before each backward pass up to torch 2.14, which reads the dtypes again whenever parameters are gathered or
    moved. Later ones keep to the `grad_dtype` that the parameters had when they were sharded.
    """
    for group in _param_groups(modules):
        if not hasattr(group, "_orig_dtype"):
            return
        group._orig_dtype = dtype
        for param in group.fsdp_params:
            param.sharded_param.grad_dtype = dtype
            # FSDP2 makes the gradient's DTensor from this spec, which would label fp32 values as bf16.
            if param._sharding_spec.tensor_meta.dtype != dtype:
                meta = param._sharding_spec.tensor_meta._replace(dtype=dtype)
                param._sharding_spec = replace(param._sharding_spec, tensor_meta=meta)


def has_unreduced_gradients(modules: Iterable[FSDPModule]) -> bool:
    """Whether a parameter has a gradient that is not reduced, except those kept for a later backward pass."""
    return any(
        hasattr(param, "_unsharded_param") and param._unsharded_param.grad is not None for param in fsdp_params(modules)
    )


def unreduced_gradients(modules: Iterable[FSDPModule]) -> Iterator[torch.Tensor]:
    """The gradients that wait for a backward pass to reduce them."""
    for param in fsdp_params(modules):
        apart = param.unsharded_accumulated_grad if _keeps_gradients_apart(param) else None
        own = param._unsharded_param.grad if hasattr(param, "_unsharded_param") else None
        yield from (grad for grad in (apart, own) if grad is not None)


def drop_unreduced_gradients(modules: Iterable[FSDPModule]) -> None:
    """Drops the gradients that wait for a backward pass to reduce them."""
    for param in fsdp_params(modules):
        _drop_unreduced(param)


def _drop_unreduced(param: Any) -> None:
    if _keeps_gradients_apart(param):
        param.unsharded_accumulated_grad = None
    if hasattr(param, "_unsharded_param"):
        param._unsharded_param.grad = None


def unreduced_gradient(param: Any) -> torch.Tensor | None:
    """This process's own gradient of a parameter's record while it waits for its reduction; whole."""
    if _keeps_gradients_apart(param) and param.unsharded_accumulated_grad is not None:
        return param.unsharded_accumulated_grad
    return param._unsharded_param.grad if hasattr(param, "_unsharded_param") else None


def reduce_unreduced_gradients(root: FSDPModule) -> None:
    """Reduces waiting gradients by an empty backward pass, whose end makes FSDP2 handle every group; collective."""
    with torch.enable_grad():
        start = torch.zeros((), requires_grad=True)
        start.register_hook(lambda grad: root._get_fsdp_state()._register_root_post_backward_final_callback())
        start.backward()


@torch.no_grad()
def finish_backward(root: FSDPModule, modules: Iterable[FSDPModule]) -> None:
    """After an error in a backward pass: joins the gathers and reductions of other processes in the rest; collective.

    `modules` are those that were not reduced yet, in the order of the pass. The gradients are not usable.
    """
    for group in _param_groups(modules):
        group.pre_backward(True)
        group.post_backward()
    root._get_fsdp_state()._root_post_backward_final_callback()


def reduce_without_empty(modules: Iterable[FSDPModule]) -> None:
    """Makes each group leave parameters without elements out of its reduction, which does not accept them.

    Their gradients are empty too.
    """
    for group in _param_groups(modules):
        empty = [param for param in group.fsdp_params if not param.sharded_param.numel()]
        if empty:
            group.post_backward = partial(_reduce_without, group, empty)


def _reduce_without(group: Any, empty: list[Any], *unused: Any) -> None:
    if group.reduce_grads:
        for param in empty:
            if unreduced_gradient(param) is not None:
                _drop_unreduced(param)
                shard = param.sharded_param
                shard.grad = torch.zeros_like(shard, dtype=shard.grad_dtype)
    type(group).post_backward(group, *unused)


def reduce_all_trained(modules: Iterable[FSDPModule], note: Callable[[int, list[Any]], None]) -> None:
    """Makes each group reduce the gradients of all its trained parameters, with zeros for those that have none here.

    Torch 2.13 has an option for the zeros, `set_reduce_scatter_unused_params`; 2.11 does not.

    Args:
        modules: numbered in this order.
        note: called with a module's number and the records of its parameters that have a gradient, before each
            reduction.
    """
    for number, module in enumerate(modules):
        for group in _param_groups([module]):
            group.post_backward = partial(_reduce_all, group, group.post_backward, partial(note, number))


def _reduce_all(group: Any, reduce: Callable[..., None], note: Callable[[list[Any]], None], *unused: Any) -> None:
    if group.reduce_grads:
        trained = [p for p in group.fsdp_params if hasattr(p, "_unsharded_param") and p._unsharded_param.requires_grad]
        gradients = [(param, unreduced_gradient(param)) for param in trained]
        note([param for param, grad in gradients if grad is not None])
        dtypes = {grad.dtype for _, grad in gradients if grad is not None}
        for param in trained:
            _hold_gradient(param, dtypes)
    reduce(*unused)


def _hold_gradient(param: Any, dtypes: set[torch.dtype]) -> None:
    """Gives a parameter without a gradient zeros, and all gradients the widest of `dtypes`, as a reduction needs."""
    own = param._unsharded_param
    dtype = max(dtypes or {own.dtype}, key=lambda dtype: dtype.itemsize)
    grad = unreduced_gradient(param)
    if grad is not None and grad.dtype == dtype:
        return
    grad = torch.zeros_like(own, dtype=dtype) if grad is None else grad.to(dtype)
    if _keeps_gradients_apart(param) and dtype != own.dtype:
        own.grad, param.unsharded_accumulated_grad = None, grad
    else:
        own.grad = grad


def _keeps_gradients_apart(param: Any) -> bool:
    """Whether waiting gradients have a separate attribute, as before torch 2.15."""
    return not isinstance(getattr(type(param), "unsharded_accumulated_grad", None), property)


class _ScalarParam(FSDPParam):
    """FSDP2's record of a scalar, converted from the record of a vector with one element per process.

    Each process gathers its copy with those of the others and computes with the first one. The reduction gives each
    process the sum of all gradients, because each gradient is repeated to one element per process.
    """

    def _get_grad_inner_tensor(self, grad: torch.Tensor) -> torch.Tensor:
        return super()._get_grad_inner_tensor(grad).repeat(self.mesh_info.shard_mesh_size)

    def reset_sharded_param(self) -> None:
        self.sharded_param = getattr(self._module_info.module, self._module_info.param_name)
        local = self.sharded_param._local_tensor
        if local.is_meta:
            return
        if self.pin_memory and not local.is_pinned():
            local = self.sharded_param._local_tensor = local.cpu().pin_memory()
        self._sharded_param_data = local.view(-1)
        self._sharding_spec = self.sharded_param._spec


def make_scalars(modules: Iterable[FSDPModule], scalars: Mapping[tuple[nn.Module, str], nn.Parameter]) -> None:
    """Turns records of vectors into records of `scalars`, which are keyed by their module and name."""
    for record in fsdp_params(modules):
        scalar = scalars.get((record._module_info.module, record._module_info.param_name))
        if scalar is not None:
            _make_scalar(record, scalar)


def _make_scalar(record: Any, scalar: nn.Parameter) -> None:
    record.__class__ = _ScalarParam
    record._orig_size = record.sharded_size = torch.Size()
    record._contiguous_orig_stride = record.contiguous_sharded_stride = ()
    everywhere = tuple(Replicate() for _ in record._sharding_spec.placements)
    meta = record._sharding_spec.tensor_meta._replace(shape=torch.Size(), stride=())
    record._sharding_spec = type(record._sharding_spec)(record._sharding_spec.mesh, everywhere, tensor_meta=meta)
    if record.is_dtensor:
        name = "_tp_spec" if hasattr(record, "_tp_spec") else "_unsharded_dtensor_spec"
        setattr(record, name, cast(DTensor, scalar)._spec)
    vector = record.sharded_param
    local = record._sharded_param_data.view(())
    record.sharded_param = nn.Parameter(record.to_sharded_dtensor(local), requires_grad=vector.requires_grad)
    if vector.grad_dtype != vector.dtype:
        record.sharded_param.grad_dtype = vector.grad_dtype
    record._setattr_on_modules(record.sharded_param)


def keep_whole_in_state_dict(modules: Iterable[FSDPModule]) -> None:
    """Removes FSDP2's hooks that expect shards whenever a state dict of `modules` is read or loaded."""
    for group in _param_groups(modules):
        for handle in (
            *group._module_to_pre_save_state_dict_hook_handle.values(),
            *group._module_to_pre_load_state_dict_hook_handle.values(),
            *[param._post_load_hook_handle for param in group.fsdp_params],
        ):
            handle.remove()


def on_wrapped_class(module: FSDPModule, name: str, function: Callable[..., Any]) -> None:
    """Adds a method to the class that FSDP2 made for `module`."""
    setattr(type(module), name, function)


def plain_class(module: FSDPModule) -> type[nn.Module]:
    """The class that `module` had before it was wrapped."""
    return type(module).__mro__[2]  # after the class that FSDP2 made and FSDPModule


def hook_ids(modules: Iterable[FSDPModule]) -> set[int]:
    """The ids of all hooks that FSDP2 has put on `modules` and on the modules of their parameters."""
    modules = list(modules)
    states = [module._get_fsdp_state() for module in modules]
    handles = [h for state in states for h in (state._pre_forward_hook_handle, state._post_forward_hook_handle)]
    for group in _param_groups(modules):
        handles += group._module_to_pre_save_state_dict_hook_handle.values()
        handles += group._module_to_pre_load_state_dict_hook_handle.values()
        handles += [param._post_load_hook_handle for param in group.fsdp_params]
    return {handle.id for handle in handles}


def forget_wrapping(attributes: dict[str, Any]) -> None:
    """Removes FSDP2's entries from a module's `attributes`."""
    for key in (STATE_KEY, REGISTRY_KEY, "_is_fsdp_managed_module", "_fsdp_use_orig_params"):
        attributes.pop(key, None)


def wrapping_of(module: nn.Module) -> object | None:
    """FSDP2's state of `module`, a new object after each wrapping; None if it is not wrapped."""
    return module._get_fsdp_state() if isinstance(module, FSDPModule) else None


def forget_states(modules: Iterable[FSDPModule]) -> None:
    """Allows `modules`, which were unwrapped for good, to be wrapped again."""
    for module in modules:
        _module_state_mapping.pop(module, None)


def end_passes(module: FSDPModule) -> None:
    """Ends the forward or backward pass that an error interrupted in `module`: FSDP2 does not free weights in use.

    Public since torch 2.13, as `reset_iter_state`, which also drops the gradients of earlier backward passes.
    """
    state = module._get_fsdp_state()
    state._training_state = TrainingState.IDLE
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    for group in _param_groups([module]):
        group._training_state = TrainingState.IDLE
