"""The training state of this process: `offload_states()` and `reload_states()`, which move it, and counts of its bytes.

RLHF frameworks move it to CPU memory around sampling by another engine, which uses the device's memory meanwhile. All
objects stay the same: parameters, their masters, the optimizer's groups. Only the location of their values changes, so
the run continues with the same bits. On a machine without a GPU the values move within CPU memory.

`ZeroEngine.report()` prints the counts; the memory plan of a run is compared with them.
"""

import gc
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hybrid_engine.config import EngineConfig
from hybrid_engine.containers.device import num_bytes
from hybrid_engine.distributed.processes import default_device
from hybrid_engine.metrics.memory import format_bytes
from hybrid_engine.zero.fsdp2_private import fsdp_params, unreduced_gradients
from hybrid_engine.zero.gathered_parameters import keeping_attributes, renew_copies
from hybrid_engine.zero.passes import Passes
from hybrid_engine.zero.sharding import Sharding, TrainedParameter, local_tensor
from hybrid_engine.zero.wrapping import offloads_parameters

if TYPE_CHECKING:
    from hybrid_engine.optim.optimizer import ZeroOptimizer

Move = Callable[[torch.Tensor], torch.Tensor]
WEIGHTS_BY_STAGE = (
    "whole, gradients averaged at the accumulation boundary",
    "whole, and as shards that the optimizer steps; gradients reduced at the accumulation boundary",
    "whole, and as shards that the optimizer steps; gradients reduced at every micro-batch",
    "sharded; gathered layer by layer in forward and backward, gradients reduced at every micro-batch",
)


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


@dataclass(frozen=True, kw_only=True)
class TrainingBytes:
    """Bytes of storage in this process's memory, including FSDP2's padding."""

    parameters: int
    """Bytes of the parameters: whole, or shards at stage 3."""
    shards: int
    """Bytes of the shards of parameters that are also kept whole."""
    masters: int
    """Bytes of the copies that the optimizer steps in place of the parameters."""
    state: int
    """Bytes of the optimizer's state."""
    gradients: int
    """Bytes of the gradients, both reduced and waiting for reduction."""


def count_bytes(sharding: Sharding, optimizer: "ZeroOptimizer | None") -> TrainingBytes:
    """Counts the bytes of this process now; local."""
    trained = optimizer.parameters if optimizer is not None else []
    states = optimizer.state.values() if optimizer is not None else []
    pairs = list(sharding.twins()) if sharding.stays_whole else []
    owners = [*(t.param for t in trained), *(t.master for t in trained), *(whole for _, whole in pairs)]
    waiting = unreduced_gradients(sharding.fsdp_modules())
    return TrainingBytes(
        parameters=num_bytes(_kept_parameters(sharding)),
        shards=num_bytes(shard for shard, _ in pairs),
        masters=num_bytes(t.master for t in trained if t.has_master),
        state=num_bytes(v for values in states for v in values.values() if isinstance(v, torch.Tensor)),
        gradients=num_bytes([*(owner.grad for owner in owners if owner.grad is not None), *waiting]),
    )


def _kept_parameters(sharding: Sharding) -> Iterator[torch.Tensor]:
    """Yields the module's parameters; at stage 3 their shards, even while they are gathered."""
    if not sharding.is_sharded or sharding.stays_whole:
        yield from sharding.root.parameters()
        return
    gathered = fsdp_params(sharding.fsdp_modules(), is_gathered=True)
    shard_of = {id(param.unsharded_param): param.sharded_param for param in gathered}
    for parameter in sharding.root.parameters():
        yield shard_of.get(id(parameter), parameter)


def describe_memory(sharding: Sharding, optimizer: "ZeroOptimizer | None", config: EngineConfig) -> str:
    """Describes stage, processes, precision, sharding and bytes of this process in a few lines."""
    held = count_bytes(sharding, optimizer)
    beside = f", and {format_bytes(held.shards)} of shards" if held.shards else ""
    lines = [
        f"ZeRO stage {sharding.stage}, rank {sharding.rank} of {sharding.world_size}; "
        f"parameters in {str(config.dtype).removeprefix('torch.')}",
        f"weights: {_describe_sharding(sharding)}",
        f"parameters: {format_bytes(held.parameters)}{beside} on this process",
    ]
    if optimizer is None:
        return "\n".join([*lines, "no optimizer: this engine only evaluates"])
    masters = [t.master for t in optimizer.parameters]
    gradients = sum(local_tensor(master).numel() * config.accumulation_dtype.itemsize for master in masters)
    return "\n".join(
        [
            *lines,
            f"trained: {len(masters)} parameters; gradients {format_bytes(gradients)} at the step, "
            f"{format_bytes(held.gradients)} now",
            f"masters: {format_bytes(held.masters)}",
            f"optimizer state: {format_bytes(held.state)} ({type(optimizer.inner).__name__})",
        ]
    )


def _describe_sharding(sharding: Sharding) -> str:
    if sharding.unit_size > 1 and not sharding.is_sharded:
        return f"split by a plan over the {sharding.unit_size} processes of a unit"
    if not sharding.is_sharded and sharding.world_size > 1:
        return "whole on every process and unwrapped, nothing is trained"
    if not sharding.is_sharded:
        return "whole and unwrapped, a single process has nobody to share with"
    groups = f"{len(sharding.layers) + 1} FSDP groups, {len(sharding.layers)} for layers and one for the rest"
    return f"{WEIGHTS_BY_STAGE[sharding.stage]}; {groups}"
