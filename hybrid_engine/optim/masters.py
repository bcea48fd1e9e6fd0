"""Masters, and their step: fp32 copies of bf16 and fp16 parameters, each of this process's shard.

An offloaded optimizer also has masters of fp32 parameters, in CPU memory. Fingerprints of the parameters' bits, made on
the parameters' device, detect whether a script has written to them: comparing values would need all of the masters
there. Version counters do not detect it, because writes through `.data` do not change them.

An optimizer over DTensors computes the same as on one process, or torch raises: it has no sharded form of fused SGD and
Adagrad, nor of some operations of Rprop, Adafactor and Muon. `step_optimizer` runs these on plain tensors:
- elementwise optimizers step this process's shards;
- Adafactor and Muon, which need whole tensors, step one parameter at a time, gathered with its gradient and its state,
  on every process; where a shard is the whole, as at stage 0, they step the shard. The parameters that AdamW steps in a
  `MuonWithAdamW` are stepped as shards.

`param_groups` and the keys of `state` are the DTensors again after a step.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hybrid_engine.containers.device import record_event
from hybrid_engine.zero.sharding import TrainedParameter, full_tensor, local_tensor

WORDS_AT_ONCE = 2**22
"""Words of a fingerprint that are processed at once: 32 MiB for their place numbers, and for each product with them."""
WHOLE_TENSORS = ("Adafactor", "Muon", "MuonWithAdamW")
"""Class names of optimizers that need whole tensors, of torch.optim or others."""
NO_SHARDED_FORM = ("Sharding propagation failed", "sharding strategy", "mixed torch.Tensor and DTensor")
"""Text of torch's errors for an operation without a sharded form."""
Plain = Callable[[torch.Tensor], torch.Tensor]
"""Replaces a DTensor by a plain tensor: this process's shard, or the whole."""


class Masters:
    """The masters of the trained `parameters`, and the transfers in both directions; all of it local."""

    def __init__(self, parameters: list[TrainedParameter]) -> None:
        self._parameters = [trained for trained in parameters if trained.has_master]
        self._written: dict[int, torch.Tensor] = {}  # fingerprints after write_back, by parameter number

    @torch.no_grad()
    def take_gradients(self, parameters: list[TrainedParameter]) -> None:
        """Adds the gradients of `parameters` that have a master to those of the masters, and frees them."""
        taken = [(trained, trained.param.grad) for trained in parameters if trained.has_master]
        grads = [(trained, grad) for trained, grad in taken if grad is not None]
        for (trained, _), moved in zip(grads, _move_gradients(grads), strict=True):
            if trained.master.grad is None:
                trained.master.grad = moved.to(trained.master.dtype)
            else:
                local_tensor(trained.master.grad).add_(local_tensor(moved))
            trained.param.grad = None

    def renew(self) -> None:
        """Copies values written to the parameters since the last step; compares only those that may have changed."""
        pairs = self._pairs()
        changed = self._find_changed(pairs)
        renew_masters([pair for number, pair in enumerate(pairs) if number in changed])

    def _find_changed(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> set[int]:
        """Numbers of the parameters that may differ from the values written back. Synchronizes with the device once."""
        known = {
            number: written
            for number, written in self._written.items()
            if lies_apart(*pairs[number]) and written.device == pairs[number][0].device
        }
        if not known:
            return set(range(len(pairs)))
        is_same = [(fingerprint(pairs[number][0]) == written).all() for number, written in known.items()]
        same = zip(known, torch.stack(is_same).tolist(), strict=True)
        return set(range(len(pairs))) - {number for number, is_same_still in same if is_same_still}

    @torch.no_grad()
    def write_back(self) -> None:
        """Rounds the masters into the parameters, after a step or another change; does not wait for copies to a GPU."""
        pairs = self._pairs()
        near = [(param, master) for param, master in pairs if not _is_sent(param, master)]
        if near:
            params, masters = zip(*near, strict=True)
            torch._foreach_copy_(list(params), list(masters))
        for param, master in pairs:
            if _is_sent(param, master):
                param.copy_(_pinned_like(master, param.dtype).copy_(master), non_blocking=True)
        apart = [number for number, pair in enumerate(pairs) if lies_apart(*pair)]
        self._written = {number: fingerprint(pairs[number][0]) for number in apart}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The masters by name; they share the storage."""
        return {trained.name: trained.master.detach() for trained in self._parameters}

    @torch.no_grad()
    def load_state_dict(self, masters: dict[str, torch.Tensor]) -> None:
        """Copies the result of `state_dict`, taken on as many processes, into the masters."""
        for trained in self._parameters:
            local_tensor(trained.master).copy_(local_tensor(masters[trained.name]))

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(local_tensor(trained.param), local_tensor(trained.master)) for trained in self._parameters]


def lies_apart(param: torch.Tensor, master: torch.Tensor) -> bool:
    """Whether the two are on different devices."""
    return param.device != master.device


def _is_sent(param: torch.Tensor, master: torch.Tensor) -> bool:
    return param.is_cuda and master.device.type == "cpu"


def _pinned_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Memory that a GPU reads while the host goes on; PyTorch keeps it until the copy has ended, then for the next."""
    return torch.empty_like(tensor, dtype=dtype, pin_memory=True)


@torch.no_grad()
def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A hash `[2]` int64 of the bits of `tensor` and their places; does not wait for the device.

    Sums of words of 64 bits, and of their upper halves, times numbers that depend on the place: with the words alone
    two of the highest bits would cancel each other. On a GPU it reads and writes each word nine times: 1.3 billion
    parameters in 16 bits, 23 GB, which is 7 ms at 3.35 TB/s and not measured; sent to the masters they take 50 or more.
    """
    bits = tensor.contiguous().reshape(-1).view(torch.uint8)
    num_words = len(bits) // 8
    words = bits[: 8 * num_words].clone() if bits.storage_offset() % 8 else bits[: 8 * num_words]
    rest = bits[8 * num_words :].to(torch.int64)
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for number, part in enumerate([*words.view(torch.int64).split(WORDS_AT_ONCE), rest]):
        numbers = _place_numbers(len(part), tensor.device)
        sums = torch.stack(((part * numbers).sum(), ((part >> 32) * numbers).sum()))
        total += sums * (2 * number + 1)
    return total


def _place_numbers(count: int, device: torch.device) -> torch.Tensor:
    """`[count]` pseudo-random odd numbers, the same each time."""
    return _all_place_numbers(device)[:count]


@cache
def _all_place_numbers(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**62), 2**62, (WORDS_AT_ONCE,), generator=generator).mul_(2).add_(1).to(device)


def _move_gradients(grads: list[tuple[TrainedParameter, torch.Tensor]]) -> list[torch.Tensor]:
    """Each gradient on its master's device; all copies to the CPU are started before the first is waited for."""
    # These copies to the CPU use pinned memory, which PyTorch keeps for the next time.
    moved = [grad.to(trained.master.device, non_blocking=True) for trained, grad in grads]
    devices = {grad.device for trained, grad in grads if grad.is_cuda and trained.master.device.type == "cpu"}
    for device in devices:
        record_event(device).synchronize()
    return moved


def build_trained_parameters(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    master_dtype: torch.dtype = torch.float32,
    master_device: torch.device | None = None,
) -> list[TrainedParameter]:
    """The trained parameters with their masters; frozen parameters are left out.

    Args:
        named_parameters: the module's parameters by name.
        master_dtype: dtype in which the optimizer steps.
        master_device: device of the masters; None is the device of each parameter.
    """
    return [
        TrainedParameter(name=name, param=param, master=_build_master(param, master_dtype, master_device))
        for name, param in named_parameters
        if param.requires_grad
    ]


def _build_master(param: nn.Parameter, dtype: torch.dtype, device: torch.device | None) -> nn.Parameter:
    target = device or param.device
    if param.dtype == dtype and param.device.type == target.type:
        return param
    return nn.Parameter(param.detach().to(device=target, dtype=dtype))


@torch.no_grad()
def renew_masters(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies values that a script or `load_state_dict` has written to parameters into masters; a step would undo them.

    A value that equals its rounded master was not written to and keeps the master's precision. One synchronization with
    the device; masters on another device are rounded and sent there, 2 bytes for each value in 16 bits.

    Args:
        pairs: parameters and their masters, plain tensors of one shape, possibly on different devices.
    """
    # Writes 1 where they differ into the rounded copy itself and sums: 10 ms for 17M values on one core, 29 ms with a
    # tensor of booleans and `any`.
    counts = [_rounded(master, param).ne_(param).sum() for param, master in pairs]
    if not counts:
        return
    for (param, master), is_written in zip(pairs, torch.stack(counts).tolist(), strict=True):
        if is_written:
            written = (_rounded(master, param) != param).to(master.device)
            master.copy_(torch.where(written, param.to(device=master.device, dtype=master.dtype), master))


def _rounded(master: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    return master.to(device=param.device, dtype=param.dtype, copy=True)


def step_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """One step of `optimizer`; collective if its parameters are DTensors.

    Raises:
        ValueError: torch has no sharded form of its operations.
    """
    masters = [param for group in optimizer.param_groups for param in group["params"] if isinstance(param, DTensor)]
    if _steps_shards(optimizer, masters):
        _step_plain(optimizer, masters, local_tensor)
    elif masters and keeps_wholes(optimizer):
        by_number = _stepped_by_adamw(optimizer)
        if by_number:
            _step_plain(optimizer, by_number, local_tensor)
        for master in masters:
            if master.grad is not None and not any(master is other for other in by_number):
                _step_plain(optimizer, [master], _whole)
    else:
        _step_sharded(optimizer)
        return
    if any(not isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"]):
        _step_others(optimizer)


def keeps_wholes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its state of another shape than the parameter, such as Adafactor's of rows, is whole on every process."""
    return type(optimizer).__name__ in WHOLE_TENSORS


def _stepped_by_adamw(optimizer: torch.optim.Optimizer) -> list[Any]:
    groups = [group for group in optimizer.param_groups if group.get("use_muon") is False]
    return [param for group in groups for param in group["params"] if isinstance(param, DTensor)]


def _step_others(optimizer: torch.optim.Optimizer) -> None:
    kept = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [param for param in group["params"] if not isinstance(param, DTensor)]
    try:
        optimizer.step()
    finally:
        for group, params in zip(optimizer.param_groups, kept, strict=True):
            group["params"] = params


def _steps_shards(optimizer: torch.optim.Optimizer, masters: list[Any]) -> bool:
    """Whether stepping this process's shards equals stepping the whole, and torch has no sharded form of the step."""
    if not masters:
        return False
    if keeps_wholes(optimizer):
        return all(_is_whole(master) for master in masters)
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    kinds = (torch.optim.Rprop, torch.optim.SGD, torch.optim.Adagrad) if is_fused else (torch.optim.Rprop,)
    return type(optimizer) in kinds  # not a subclass of them, whose step may be another


def _is_whole(master: Any) -> bool:
    sizes = zip(master.device_mesh.shape, master.placements, strict=True)
    return all(size == 1 or placement.is_replicate() for size, placement in sizes)


def _step_sharded(optimizer: torch.optim.Optimizer) -> None:
    try:
        optimizer.step()
    except (NotImplementedError, RuntimeError) as error:
        if not any(words in str(error) for words in NO_SHARDED_FORM):
            raise
        raise ValueError(
            f"optimizer={type(optimizer).__name__} cannot step sharded parameters, torch has no sharded form of what "
            f"it does ({str(error).splitlines()[0]}); train on one process, or with another optimizer, such as AdamW"
        ) from error


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on the device of its shard: an offloaded one is in CPU memory."""
    return full_tensor(tensor).to(tensor.device)


def _step_plain(optimizer: torch.optim.Optimizer, masters: list[Any], plain: Plain) -> None:
    """Steps plain parameters with the optimizer's state of `masters`, and writes the results back to those."""
    stands = {master: _stand(optimizer, master, plain) for master in masters}
    kept = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [stands[param] for param in group["params"] if param in stands]
    try:
        optimizer.step()
    finally:
        for group, params in zip(optimizer.param_groups, kept, strict=True):
            group["params"] = params
        for master, stand in stands.items():
            _keep(master, stand)
            for key, value in optimizer.state.pop(stand, {}).items():
                _keep_state(optimizer.state[master], key, value, master, stand)


def _stand(optimizer: torch.optim.Optimizer, master: Any, plain: Plain) -> nn.Parameter:
    """The plain parameter that replaces `master`, with its gradient and its state."""
    stand = nn.Parameter(plain(master), requires_grad=master.requires_grad)
    stand.grad = None if master.grad is None else plain(master.grad)
    if master in optimizer.state:
        state = optimizer.state[master]
        optimizer.state[stand] = {key: plain(v) if isinstance(v, DTensor) else v for key, v in state.items()}
    return stand


def _keep_state(state: dict[str, Any], key: str, value: Any, master: Any, stand: nn.Parameter) -> None:
    """Stores one entry: sharded like the parameter if it has its size, otherwise as each process's own value.

    An entry of a parameter without a dimension is each process's own too, as a step count has the same size.
    """
    is_sharded = isinstance(state.get(key), DTensor)
    if not isinstance(value, torch.Tensor) or value.shape != stand.shape or not (master.dim() or is_sharded):
        state[key] = value
        return
    if not is_sharded:
        state[key] = torch.zeros_like(master, dtype=value.dtype)
    _keep(state[key], value)


def _keep(target: Any, value: torch.Tensor) -> None:
    """Copies values, this process's or whole ones, to a DTensor; does nothing if it shares their memory."""
    shard = local_tensor(target)
    if value.shape == target.shape != shard.shape:
        mesh = target.device_mesh
        whole = value.detach().to(mesh.device_type)
        value = local_tensor(distribute_tensor(whole, mesh, target.placements, src_data_rank=None))
    if value.data_ptr() != shard.data_ptr():
        shard.copy_(value)
