"""Whole parameters for a block of code: `zero.GatheredParameters`, and the marks that scripts read on parameters.

    with GatheredParameters(params, modifier_rank=0):
        if rank == 0:
            params[0].data.zero_()

A sharded parameter is a DTensor, which cannot be combined with plain tensors. Inside the block the same object acts as
a plain tensor: every torch function that takes it gets the whole value instead. Its class is changed meanwhile to one
whose `__torch_function__` does this; PyTorch is not patched.

At stage 3 parameters carry DeepSpeed's marks: `ds_id`, `ds_status`, `ds_shape`, `ds_numel`, `ds_tensor` (this
process's shard).
"""

import copy
import itertools
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map
from torch.utils.hooks import unserializable_hook

from hybrid_engine.config.checks import check_integer
from hybrid_engine.distributed.processes import default_device, get_world_size
from hybrid_engine.distributed.verdict import holding_interrupts
from hybrid_engine.zero.sharding import Sharding, full_tensor, local_tensor

MARKS = ("ds_id", "ds_shape", "ds_numel", "ds_tensor")
COPY = "_number_of_copy"
"""Attribute of a parameter that every process holds whole, below stage 3: its number. Scripts do not read it."""
WRITTEN = "_written_in_a_block"
"""Attribute of a parameter that every process holds whole: the sum of its bits after a block without a modifier."""
_numbers = itertools.count()
ATTRIBUTE = "_external_params"
"""Attribute of a module: its registered external parameters, until the model is sharded."""
MIXED = "got mixed torch.Tensor and DTensor"
"""Text of PyTorch's error for an operation on a shard and a plain tensor."""
_REMEDY = (
    "call zero.register_external_parameter(module, parameter) before initialize() for the module that uses it outside "
    "its layer"
)
SHARD_USED = (
    f"forward(): a parameter of a transformer layer was used outside of that layer, where stage 3 has only its shard; "
    f"{_REMEDY}"
)
LATE = (
    f"backward(): a parameter of a transformer layer was used before that layer, so its gradient came after the "
    f"layer's were reduced; the gradients were dropped; {_REMEDY}"
)


class ZeroParamStatus(Enum):
    """Whether a sharded parameter is whole in this process."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class WholeParameter(DTensor):
    """A sharded parameter while it is gathered; torch functions see its attribute `ds_whole`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_to_whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if "ds_release" in self.__dict__:
            self.__dict__["ds_release"]()
            return copy.deepcopy(self, memo)
        memo[id(self)] = copy.deepcopy(self.__dict__["ds_whole"], memo)
        return memo[id(self)]


def _to_whole(value: Any) -> Any:
    return value.__dict__["ds_whole"] if type(value) is WholeParameter else value


def mark_parameters(sharding: Sharding) -> None:
    """Gives the parameters of a stage 3 model DeepSpeed's attributes; other stages do not have them."""
    if not sharding.rules.shards_parameters:
        return
    for param in sharding.root.parameters():
        mark_parameter(param)
    # A forward pass uses other parameters, while they are gathered; scripts read the marks there too.
    for shard, whole in sharding.gathered_pairs():
        vars(whole).update({name: value for name, value in vars(shard).items() if name in MARKS})
        whole.ds_status, whole.ds_is_copy = ZeroParamStatus.AVAILABLE, True


def mark_copies(sharding: Sharding) -> None:
    """Marks parameters that several processes hold whole: one process's changes inside a block are sent to all."""
    if sharding.world_size > 1 and sharding.unit_size == 1 and (sharding.stays_whole or not sharding.is_sharded):
        for param in sharding.leaves():
            vars(param)[COPY] = next(_numbers)


def mark_parameter(param: Any) -> None:
    """Gives a parameter DeepSpeed's attributes; processes must mark theirs in the same order, the order of `ds_id`."""
    param.ds_id = next(_numbers)
    param.ds_shape, param.ds_numel = param.shape, param.numel()
    param.ds_tensor = local_tensor(param)
    param.ds_status = ZeroParamStatus.NOT_AVAILABLE if isinstance(param, DTensor) else ZeroParamStatus.AVAILABLE


@contextmanager
def keeping_attributes(module: nn.Module) -> Iterator[None]:
    """Inside, shards may be moved: PyTorch swaps their tensors, and their attributes with them."""
    kept = [(vars(param).copy(), param.grad_dtype) for param in module.parameters()]
    yield
    for param, (attributes, grad_dtype) in zip(module.parameters(), kept, strict=True):
        vars(param).update(attributes)
        param.grad_dtype = grad_dtype
        if "ds_tensor" in attributes:
            param.ds_tensor = local_tensor(param)  # type: ignore[attr-defined]


def renew_copies(sharding: Sharding) -> None:
    """Updates `ds_tensor` of the gathered parameters after the shards were moved."""
    for shard, whole in sharding.twins():
        if "ds_tensor" in vars(whole):
            whole.ds_tensor = local_tensor(shard)


class GatheredParameters:
    """Makes stage 3 parameters whole inside the block; collective, entered and left by every process.

    Args:
        params: a parameter or several. Those without `ds_id` are always whole and only get the modifier's changes;
            parameters that do not belong to an engine are ignored.
        modifier_rank: the process whose changes are sent to all processes, and reach the fp32 masters with the next
            step. None discards all changes at stage 3. Below stage 3 each process keeps its own changes, which must be
            the same; otherwise the next step raises an error on all. Changes outside of a block are not detected.
        fwd_module: ignored.
        enabled: False does nothing.

    Raises:
        ValueError: on entering, for a parameter that an enclosing block has gathered, or that a forward pass has
            gathered if it is to be changed; in a backward pass that reaches a gathered parameter, which has no
            gradient.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: Any = None,
        enabled: bool = True,
    ) -> None:
        if not isinstance(params, Iterable):
            raise ValueError(f"GatheredParameters: params={params!r} must be a parameter or several; pass a list")
        entries = [params] if isinstance(params, torch.Tensor) else list(params)
        for entry in entries:
            if entry is not None and not isinstance(entry, torch.Tensor):  # a linear without a bias has None there
                raise ValueError(f"GatheredParameters: {entry!r} in params must be a parameter; pass parameters only")
        if modifier_rank is not None:
            check_integer("GatheredParameters: modifier_rank", modifier_rank, 0, get_world_size() - 1)
        marked = {id(p): p for p in entries if hasattr(p, "ds_id")} if enabled else {}
        self.params: list[Any] = sorted(marked.values(), key=lambda p: p.ds_id)
        copies = {id(p): p for p in entries if enabled and p is not None and COPY in vars(p)}
        self.copies: list[Any] = sorted(copies.values(), key=lambda p: vars(p)[COPY])
        self.modifier_rank = modifier_rank
        self._sums: list[int] = []  # of the copies, if each process may change them
        self._is_inside = False

    def __enter__(self) -> None:
        try:
            with holding_interrupts(), torch.no_grad():
                self._enter()
                self._is_inside = True
        except BaseException as error:
            if self._is_inside:  # after Ctrl-C no block follows whose end would leave it
                self.__exit__(type(error), error, None)
            raise

    def _enter(self) -> None:
        for param in self.params:
            if "ds_release" in param.__dict__:  # gathered only because a constructor has just used it
                param.ds_release()
            if "ds_whole" in param.__dict__ or "ds_gathered" in param.__dict__:
                raise ValueError(
                    f"GatheredParameters: a parameter of shape {tuple(param.ds_shape)} is gathered already by a block "
                    f"around this one; gather each parameter once"
                )
            if self.modifier_rank is not None and hasattr(param, "ds_is_copy"):
                raise ValueError(
                    f"GatheredParameters: modifier_rank={self.modifier_rank} cannot change a parameter of shape "
                    f"{tuple(param.ds_shape)} that a forward pass has gathered; change it before, or after backward()"
                )
        if self.modifier_rank is None:
            self._sums = [sum_of_bits(param) for param in self.copies]
        # All steps that may fail come first: __exit__ is not called for a block that was not entered.
        values = [_gather(param) if isinstance(param, DTensor) else self._keep(param) for param in self.params]
        for param, value in zip(self.params, values, strict=True):
            if isinstance(param, DTensor):
                param.ds_whole, param.ds_status = value, ZeroParamStatus.AVAILABLE
                param.ds_class, param.__class__ = type(param), WholeParameter
            else:
                param.ds_gathered = value

    def _keep(self, param: torch.Tensor) -> torch.Tensor | None:
        return None if self.modifier_rank is not None else param.detach().clone()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with holding_interrupts(), torch.no_grad():
            self._leave(error)
            self._is_inside = False

    def _leave(self, error: BaseException | None) -> None:
        changed = []
        for param in self.params:
            if type(param) is WholeParameter:
                whole = param.__dict__.pop("ds_whole")
                param.__class__, param.ds_status = param.__dict__.pop("ds_class"), ZeroParamStatus.NOT_AVAILABLE
                param.requires_grad_(whole.requires_grad)
                changed.append((param, whole.detach()))
            else:
                kept = param.__dict__.pop("ds_gathered")
                if kept is not None:
                    # Results computed from it inside may still go backward: the value is the same.
                    with torch.autograd._unsafe_preserve_version_counter(param):
                        param.copy_(kept)
        for param, before in zip(self.copies, self._sums, strict=False):
            if (now := sum_of_bits(param)) != before:
                vars(param)[WRITTEN] = now
        # After an error the other processes may not reach this collective.
        if self.modifier_rank is not None and error is None:
            for param, whole in changed:
                _write_back(param, whole, self.modifier_rank)
            for param in self.copies:
                _send_copy(param, self.modifier_rank)


def sum_of_bits(param: torch.Tensor) -> int:
    """A checksum: differs for different values, but not for the same values in another order."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[param.element_size()]
    return int(param.detach().contiguous().view(words).sum(dtype=torch.int64))


def _gather(param: DTensor) -> nn.Parameter:
    with torch._C.DisableTorchFunctionSubclass():  # a parameter under construction would gather itself
        whole = nn.Parameter(full_tensor(param).clone(), requires_grad=param.requires_grad)
    if whole.requires_grad:
        whole.register_hook(_refuse_gradient)
    return whole


@unserializable_hook
def _refuse_gradient(grad: torch.Tensor) -> None:
    raise ValueError(
        "backward(): the loss depends on a parameter inside GatheredParameters, where it has no gradient; compute the "
        "loss by the engine's forward pass"
    )


def _send_copy(param: nn.Parameter, modifier_rank: int) -> None:
    """Sends the modifier's value of a parameter that every process holds whole to all processes."""
    sent = param.data.to(default_device()).contiguous()
    dist.broadcast(sent, src=modifier_rank)
    if sent.data_ptr() != param.data.data_ptr():
        param.data.copy_(sent)


def _write_back(param: DTensor, whole: torch.Tensor, modifier_rank: int) -> None:
    """Gives every process its shard of the modifier's value."""
    if whole.shape != param.shape:
        raise ValueError(
            f"GatheredParameters: a parameter of shape {tuple(param.shape)} has become one of shape "
            f"{tuple(whole.shape)}; change values only, or resize the model before initialize()"
        )
    # An offloaded parameter is on the CPU, which nccl does not reach.
    whole = whole.to(device=param.device_mesh.device_type, dtype=param.dtype).contiguous()
    dist.broadcast(whole, src=modifier_rank)
    shard = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
    local_tensor(param).copy_(local_tensor(shard))


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Yields the engine `model` with its stage 3 parameters whole, so that its module can generate; collective.

    A hybrid engine's `generate()` gathers by itself; for it nothing is done.
    """
    with GatheredParameters(model.parameters(), enabled=not model.config.hybrid_engine.enabled):
        yield model


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Registers, before `initialize()`, that the forward pass of `module` uses a `parameter` of another module.

    Needed only for a parameter of a transformer layer that is used outside that layer, on several processes.
    """
    if not isinstance(parameter, nn.Parameter):
        raise ValueError(f"register_external_parameter(): {type(parameter).__name__} is no parameter; pass one")
    vars(module).setdefault(ATTRIBUTE, []).append(parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Removes a registration; raises ValueError if it does not exist."""
    registered = vars(module).get(ATTRIBUTE, [])
    places = [index for index, param in enumerate(registered) if param is parameter]
    if not places:
        raise ValueError("unregister_external_parameter(): the parameter is not registered for this module")
    del registered[places[0]]


def take_external_uses(root: nn.Module) -> list[tuple[nn.Module, nn.Parameter]]:
    """The registered uses, each with its module; removes the registrations, which would keep whole weights alive."""
    return [(part, param) for part in root.modules() for param in vars(part).pop(ATTRIBUTE, ())]


def describe_shard_used(error: BaseException, root: nn.Module, groups: Sequence[nn.Module]) -> str:
    """The error message for an operation on a shard and a plain tensor, with the module whose code did it.

    Args:
        error: the error that PyTorch raised.
        root: the engine's module.
        groups: the parts of it that are gathered alone.
    """
    names = {module: name for name, module in root.named_modules()}
    frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    used = [module for module in frames if isinstance(module, nn.Module) and module in names]
    if not used:
        return SHARD_USED
    group = next((group for group in groups if used[-1] in set(group.modules())), None)
    where = f"in {names[used[-1]] or 'the model itself'} ({type(used[-1]).__name__})"
    if group is not None:
        where += f"; {names[group]} ({type(group).__name__}) is gathered for its own forward(), not for other methods"
    return f"{SHARD_USED}. It was {where}"
