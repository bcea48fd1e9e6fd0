"""Measures the difference between the rollout's and the trainer's log-probabilities."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

Parameters = list[tuple[dict[str, Any], str, Any]]
"""The dictionary that holds a parameter, its name there, and the parameter."""


@dataclass(frozen=True)
class LogprobDifference:
    """Absolute difference of log-probabilities, rollout against trainer, per token."""

    mean: float
    max: float
    past_switch: "LogprobDifference | None" = None
    """The difference around the length that changes rope's frequencies, where both must differ; None: none does."""


def describe_switch(difference: LogprobDifference, length: int) -> str:
    """Describes in one line how far rollouts that grow beyond `length` tokens are from the trainer."""
    return (
        f"rollouts that grow beyond {length} tokens: rope's frequencies change there, in the rollout for the tokens "
        "that follow, in the trainer's forward for all of them; around that length log-probabilities are "
        f"{difference.mean:.2g} apart in the mean and {difference.max:.2g} at most"
    )


def compare_logprobs(
    rollout: torch.Tensor, trainer: torch.Tensor, mask: torch.Tensor, world_size: int = 1
) -> LogprobDifference:
    """Compares at the places where `mask` is True, which has the others' shape, over `world_size` processes.

    Collective if there are several, so that all make the same decision.
    """
    difference = (rollout.detach().float() - trainer.detach().float()).abs()[mask.bool()].double()
    total = torch.stack([difference.sum(), torch.tensor(float(difference.numel())).to(difference)])
    largest = torch.cat([difference, difference.new_zeros(1)]).max()
    if world_size > 1:
        dist.all_reduce(total)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return LogprobDifference((total[0] / total[1].clamp(min=1)).item(), largest.item())


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, the module is in eval mode; on exit, every submodule gets its own mode back."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for submodule, mode in modes:
            submodule.training = mode


@contextmanager
def widened(module: nn.Module, layers: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, forward passes of `module` compute in fp32; `layers` are the parts that are widened as one."""
    handles: list[Any] = []
    for unit in _units(module, set(layers)):
        kept: Parameters = []
        handles.append(unit.register_forward_pre_hook(_widening(kept), with_kwargs=True))
        # Runs first of all hooks, before FSDP2 frees the gathered parameters, and also after an error.
        handles.append(unit.register_forward_hook(_restoring(kept), prepend=True, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _units(module: nn.Module, layers: set[nn.Module]) -> Iterator[nn.Module]:
    """Yields the parts to widen while they run: layers, and modules outside them that have parameters of their own."""
    if module in layers:
        yield module
        return
    if any(parameter is not None for parameter in module._parameters.values()):
        yield module
    for child in module.children():
        yield from _units(child, layers)


def _widening(kept: Parameters) -> Any:
    def widen(unit: nn.Module, args: Any, kwargs: Any) -> Any:
        for part in unit.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter.is_floating_point():
                    kept.append((part._parameters, name, parameter))
                    part._parameters[name] = nn.Parameter(parameter.detach().float(), requires_grad=False)
        return tree_map(_wide, (args, kwargs))

    return widen


def _restoring(kept: Parameters) -> Any:
    def restore(*_: Any) -> None:
        for parameters, name, parameter in kept:
            parameters[name] = parameter
        kept.clear()

    return restore


def _wide(value: Any) -> Any:
    is_narrow = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_narrow else value
