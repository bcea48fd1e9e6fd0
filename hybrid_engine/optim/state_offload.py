"""`engine.offload_states()` and `reload_states()`: move training state to CPU memory for a while, and back.

RLHF frameworks call them around sampling by another engine, which uses the device's memory meanwhile. All objects stay
the same: parameters, their masters, the optimizer's groups. Only the location of their values changes, so the run
continues with the same bits. On a machine without a GPU the values move within CPU memory.
"""

import gc
from collections.abc import Callable, Container
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hybrid_engine.config import EngineConfig
from hybrid_engine.distributed.processes import default_device
from hybrid_engine.zero.gathered_parameters import keeping_attributes, renew_copies
from hybrid_engine.zero.passes import Passes
from hybrid_engine.zero.sharding import TrainedParameter
from hybrid_engine.zero.wrapping import offloads_parameters


class OffloadStateTypeEnum(str, Enum):
    """Kinds of state that an engine keeps between two steps."""

    optim_states = "optim_states"
    """The optimizer's state, such as Adam's moments."""
    hp_params = "hp_params"
    """The fp32 masters of parameters in 16 bits."""
    lp_params = "lp_params"
    """The parameters, or this process's shards."""
    lp_grads = "lp_grads"
    """Gradients that wait for the step."""
    contiguous_grad_buffer = "contiguous_grad_buffer"
    """Has no effect: FSDP2 does not keep a buffer for gradients."""


Kind = OffloadStateTypeEnum
KINDS = tuple(kind.value for kind in Kind)
TRAINING = (Kind.lp_params, Kind.hp_params, Kind.lp_grads)
"""Kinds that a backward pass reads or adds to. Gradients move with the tensor that they belong to."""
Move = Callable[[torch.Tensor], torch.Tensor]


class StateOffload:
    """The offloaded state of one optimizer and its parameters; `offloaded` has its kinds."""

    def __init__(
        self, inner: torch.optim.Optimizer, parameters: list[TrainedParameter], passes: Passes, config: EngineConfig
    ) -> None:
        """`inner` steps the masters of `parameters`, which are the trained ones of the module of `passes`."""
        self._inner, self._parameters, self._passes, self._config = inner, parameters, passes, config
        self._device = default_device()
        self.offloaded: set[Kind] = set()
        self._grads: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._followers: list[Callable[[], None]] = []

    def call_after_moves(self, follower: Callable[[], None]) -> None:
        """Calls `follower` each time after the parameters were given other storage."""
        self._followers.append(follower)

    def check(self, what: str, *kinds: Kind) -> None:
        """Raises ValueError, naming the call `what`, if one of `kinds`, or any kind if none is given, is offloaded."""
        missing = [kind.value for kind in Kind if kind in self.offloaded and (kind in kinds or not kinds)]
        if missing:
            raise ValueError(f"{what}: {', '.join(missing)} are offloaded; call reload_states() first")

    @torch.no_grad()
    def offload(
        self, include: Container[Any] | None, device: Any, pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Moves the kinds of state in `include` to the CPU; kinds that are there already stay. Local.

        Raises:
            ValueError: another device; an unknown kind; parameters that the config offloads; in the middle of an
                accumulation whose gradients are not reduced. Nothing was moved then.
        """
        self._check_offload(include, device)
        new = [kind for kind in Kind if kind not in self.offloaded and (include is None or kind in include)]

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type == "cpu" and self._device.type != "cpu":
                return tensor  # the config keeps it there
            if pin_memory and torch.cuda.is_available() and not isinstance(tensor, DTensor):
                pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
                return pinned.copy_(tensor, non_blocking=non_blocking)
            return tensor.detach().to("cpu", copy=True, non_blocking=non_blocking)

        # First, so that after an error reload() moves back everything that was moved.
        self.offloaded.update(new)
        if any(kind in TRAINING for kind in new):
            self._take_grads(move)
        self._move(new, move)
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()

    @torch.no_grad()
    def reload(self, non_blocking: bool = False) -> None:
        """Moves everything back to the engine's device; collective below stage 3, where the parameters become whole."""
        keeps_optimizer = self._config.zero_optimization.offloads_optimizer

        def move(tensor: torch.Tensor, device: Any = self._device) -> torch.Tensor:
            return tensor.detach().to(device, copy=True, non_blocking=non_blocking)

        for kind in [kind for kind in Kind if kind in self.offloaded]:
            if not keeps_optimizer or kind is Kind.lp_params:
                self._move([kind], move)
        for owner, grad in self._grads:
            owner.grad = move(grad, owner.device)
        self._grads = []
        is_moved = Kind.lp_params in self.offloaded
        self.offloaded.clear()
        if is_moved:
            self._passes.sharding.settle()
            self._tell_followers()

    def forget_gradients(self) -> None:
        """Drops the offloaded gradients."""
        self._grads = []

    def _check_offload(self, include: Container[Any] | None, device: Any) -> None:
        target = getattr(device, "value", str(device))
        if target != "cpu":
            raise ValueError(f'offload_states(): device={target!r} must be "cpu"; there is no other place to go to')
        for kind in include if isinstance(include, list | tuple | set | frozenset) else ():
            if getattr(kind, "value", kind) not in KINDS:
                raise ValueError(f"offload_states(): include has {kind!r}; use {', '.join(KINDS)}")
        if offloads_parameters(self._config):
            raise ValueError(
                "offload_states(): zero_optimization.offload_param keeps the parameters on the CPU already; leave one "
                "of them out"
            )
        if self._passes.has_unreduced:
            raise ValueError(
                "offload_states(): the gradients of earlier backward passes are not reduced yet; call it after the "
                "step() that ends the accumulation"
            )

    def _take_grads(self, move: Move) -> None:
        """Holds gradients here, as a gradient must be on its parameter's device."""
        for trained in self._parameters:
            for owner in dict.fromkeys((trained.param, trained.master)):
                if owner.grad is not None:
                    self._grads.append((owner, move(owner.grad)))
                    owner.grad = None

    def _move(self, kinds: list[Kind], move: Move) -> None:
        if Kind.lp_params in kinds:
            self._move_parameters(move)
        for trained in self._parameters if Kind.hp_params in kinds else ():
            if trained.has_master:
                _replace(trained.master, move(trained.master))
        for state in self._inner.state.values() if Kind.optim_states in kinds else ():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    state[name] = move(value)

    def _move_parameters(self, move: Move) -> None:
        """Moves the shards; gathered copies are freed."""
        module = self._passes.sharding.root
        self._passes.end()
        moved = {id(param) for param in module.parameters()}
        with keeping_attributes(module):
            module._apply(lambda tensor: move(tensor) if id(tensor) in moved else tensor)
        renew_copies(self._passes.sharding)
        self._tell_followers()

    def _tell_followers(self) -> None:
        for follower in self._followers:
            follower()


def _replace(param: nn.Parameter, value: torch.Tensor) -> None:
    if isinstance(param, DTensor):  # assigning its `data` does not replace the local part
        torch.utils.swap_tensors(param, nn.Parameter(value, requires_grad=param.requires_grad))
    else:
        param.data = value
