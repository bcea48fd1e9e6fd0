"""Masters: fp32 copies of bf16 and fp16 parameters that the optimizer steps, each of this process's shard.

An offloaded optimizer also has masters of fp32 parameters, in CPU memory. Fingerprints of the parameters' bits, made on
the parameters' device, detect whether a script has written to them: comparing values would need all of the masters
there. Version counters do not detect it, because writes through `.data` do not change them.
"""

from collections.abc import Iterable
from functools import cache

import torch
from torch import nn

from hybrid_engine.containers.device import record_event
from hybrid_engine.zero.sharding import TrainedParameter, local_tensor

WORDS_AT_ONCE = 2**22
"""Words of a fingerprint that are processed at once: 32 MiB for their place numbers, and for each product with them."""


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
        """Rounds the masters into the parameters, after a step or another change."""
        pairs = self._pairs()
        if pairs:
            params, masters = zip(*pairs, strict=True)
            torch._foreach_copy_(list(params), list(masters))
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
