"""The optimizer shim: handles precision, clipping and overflow of a step around a plain `torch.optim` optimizer.

fp32 parameters are stepped in place. For bf16 and fp16 parameters the gradients of all micro-batches are added up in
fp32, by FSDP2 or in their masters (`masters.py`), which are stepped and rounded into the parameters. Sharding affects
only the computation of norms; frozen parameters have neither master nor state.

The loss scalers of fp16 are at the end. The rules, names and defaults of the dynamic one are those of DeepSpeed's
`runtime/fp16/loss_scaler.py`, so that a run started there behaves the same here.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hybrid_engine.config.notices import say_once
from hybrid_engine.distributed.groups import host_group
from hybrid_engine.distributed.processes import default_device
from hybrid_engine.distributed.verdict import everyone
from hybrid_engine.optim.masters import Masters, step_optimizer
from hybrid_engine.optim.state_offload import StateOffload
from hybrid_engine.zero.sharding import TrainedParameter, local_tensor
from hybrid_engine.zero.split_module import num_copies

MAX_NAMES_IN_ERROR = 5
APART = "clips_apart"
"""Option of a parameter group: True clips its gradients by their own norm, as in a separate optimizer."""


class StaticLossScaler:
    """A scale that never changes; 1.0 for fp32 and bf16, which do not need one."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def update(self, overflow: bool) -> None:
        """Ignores the result of an optimizer step."""

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]


class DynamicLossScaler:
    """Halves the scale when gradients overflow, doubles it after every `window` steps without overflow.

    As in DeepSpeed, the step that follows the start or an overflow is not counted: the first doubling comes with the
    step after `window` good ones. `hysteresis` overflows are forgiven before the scale is first halved. The credit is
    refilled when the scale grows or, with `consecutive_hysteresis`, at every step without overflow.
    """

    FACTOR = 2.0

    def __init__(
        self,
        initial_scale: float,
        *,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_scale: float = 1.0,
    ) -> None:
        self.scale = initial_scale
        self.window = window
        self.hysteresis = hysteresis
        self.consecutive_hysteresis = consecutive_hysteresis
        self.min_scale = min_scale
        self._credit = hysteresis
        self._num_steps = 0
        self._last_overflow_step = -1

    def update(self, overflow: bool) -> None:
        """Records one optimizer step, skipped or not, and sets the scale of the next.

        Raises:
            ValueError: the gradients overflow at the smallest scale.
        """
        if overflow:
            self._shrink()
            self._last_overflow_step = self._num_steps
        else:
            self._grow_if_due()
        self._num_steps += 1

    def _shrink(self) -> None:
        if self._credit > 1:
            self._credit -= 1
            return
        if self.scale <= self.min_scale:
            raise ValueError(
                f"fp16: the gradients overflow at the loss scale {self.scale:g}, which is already "
                f"min_loss_scale={self.min_scale:g}; lower the learning rate, or train with bf16"
            )
        self.scale = max(self.scale / self.FACTOR, self.min_scale)

    def _grow_if_due(self) -> None:
        if self.consecutive_hysteresis:
            self._credit = self.hysteresis
        num_good = self._num_steps - self._last_overflow_step - 1
        if num_good > 0 and num_good % self.window == 0:
            self._credit = self.hysteresis
            self.scale *= self.FACTOR

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "credit": self._credit,
            "num_steps": self._num_steps,
            "last_overflow_step": self._last_overflow_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]
        self._credit = state["credit"]
        self._num_steps = state["num_steps"]
        self._last_overflow_step = state["last_overflow_step"]


LossScaler = StaticLossScaler | DynamicLossScaler


class ZeroOptimizer(torch.optim.Optimizer):
    """Steps `inner` with the attributes that scripts written for DeepSpeed's optimizers read.

    `inner` is the `torch.optim` optimizer over the masters; `param_groups`, `state` and `defaults` are its own, so a
    scheduler may be built on either. `overflow` is True if the last step was skipped. Setting `skip_step` skips the
    next one, on every process or on none: two models then keep their steps aligned when only one of them overflows.
    `is_torn` is True after an error in the middle of a step, until a checkpoint is loaded.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        parameters: list[TrainedParameter],
        *,
        loss_scaler: LossScaler,
        skips_overflow: bool,
        gradient_clipping: float = 0.0,
        state_offload: StateOffload,
        norm_group: dist.ProcessGroup | None = None,
        accumulates_in_masters: bool = True,
    ) -> None:
        """Takes over `inner`.

        Args:
            inner: its groups hold the masters of `parameters`.
            parameters: the trained parameters, in the same order on every process.
            loss_scaler: holds the scale that `scale_loss` multiplies with and `step` divides by.
            skips_overflow: whether a non-finite gradient skips the step (fp16) or is an error.
            gradient_clipping: largest global gradient norm; 0 disables clipping.
            state_offload: moves the state of `inner` and `parameters` to the CPU and back.
            norm_group: the processes whose shards together are the model; None when this process has all of it.
            accumulates_in_masters: whether the gradients of micro-batches are added up in the masters' dtype; False
                leaves that to autograd, in the parameters' dtype.
        """
        # Does not call torch's initializer: the groups and the state are those of `inner`.
        self.inner = inner
        self.parameters = parameters
        self.loss_scaler = loss_scaler
        self.skips_overflow = skips_overflow
        self.gradient_clipping = gradient_clipping
        self.accumulates_in_masters = accumulates_in_masters
        self.masters = Masters(parameters)
        self.norms = GradientNorms(parameters, norm_group)
        self.overflow = False
        self.skip_step = False
        self.is_torn = False
        self.grad_norm: float | None = None
        self.grad_norms: list[float] = []
        """Norms of the parameters clipped together, at the last step, before clipping and without the loss scale."""
        self.state_offload = state_offload

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch's version patches the class's `step` for all optimizers if it finds one without hooks.
        self.__dict__.update(state)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    @property
    def cur_scale(self) -> float:
        """The factor of the loss; 1.0 except in fp16."""
        return self.loss_scaler.scale

    loss_scale = cur_scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call `backward()` on."""
        return loss if self.cur_scale == 1.0 else loss * self.cur_scale

    def accumulate_gradients(self) -> None:
        """Adds the gradients of one backward pass to the masters'; local, without a synchronization.

        Gradients with the master's dtype and device, such as fp32 under FSDP2, stay where the next pass adds to them.
        """
        if self.accumulates_in_masters:
            self.masters.take_gradients([t for t in self.parameters if not t.grad_lies_like_masters])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Clips, steps and rounds the masters into the parameters, after `take_gradients()`; collective if sharded.

        A non-finite gradient norm skips the step in fp16 (`overflow` is then True and the loss scale lowered).

        Raises:
            ValueError: a non-finite gradient norm in fp32 or bf16, naming the first parameters concerned; no gradient
                of any parameter; or a closure. Raised on every process, and nothing was stepped.
            BaseException: the error of a process that could not step; raised on all, whose parameters are torn then.
        """
        if closure is not None:
            raise ValueError("closure: the engine computes the loss itself, call step() without one")
        parts = clipped_together(self.param_groups, self.parameters)
        is_finite = self._measure_norms(parts)
        if not self.overflow:
            with self._torn_until_done():
                self._unscale_and_clip(parts)
                step_optimizer(self.inner)
                self.masters.write_back()
        if not is_finite or not self.skip_step:  # a step skipped on request does not tell about the scale
            self.loss_scaler.update(not is_finite)
        self.skip_step = False

    def _measure_norms(self, parts: list[list[TrainedParameter]]) -> bool:
        """Sets the norms and `overflow`; returns whether the gradients are finite, on all processes."""
        norms, num_gradients = self.norms.measure(parts)
        scaled_norm = math.hypot(*norms)
        if num_gradients == 0 and not self.skip_step:
            raise ValueError(
                f"step(): none of the {len(self.parameters)} trained parameters has a gradient, on no process; compute "
                f"the loss from the output of the engine's forward pass, with parameters that are not frozen"
            )
        is_finite = math.isfinite(scaled_norm)
        if not is_finite and not self.skips_overflow:
            raise ValueError(self._describe_non_finite(scaled_norm))
        self.grad_norm, self.grad_norms = scaled_norm / self.cur_scale, [norm / self.cur_scale for norm in norms]
        self.overflow = not is_finite or self.skip_step
        return is_finite

    @contextmanager
    def _torn_until_done(self) -> Iterator[None]:
        """Wraps the part of a step that changes parameters; an error on one process is raised on all."""
        self.is_torn = True
        with everyone().agreeing():
            yield
        self.is_torn = False

    def _unscale_and_clip(self, parts: list[list[TrainedParameter]]) -> None:
        for part, norm in zip(parts, self.grad_norms, strict=True):
            rescale(local_gradients(part), self.cur_scale, norm, self.gradient_clipping)

    def take_gradients(self) -> None:
        """Before each step: moves all gradients, and values written to the parameters, to the masters; local."""
        self.masters.take_gradients(self.parameters)
        self.masters.renew()

    def forget_norms(self) -> None:
        """Sets the norms to 0, after a step without gradients."""
        self.overflow, self.grad_norm, self.grad_norms = False, 0.0, [0.0 for _ in self.grad_norms]

    @torch.no_grad()
    def check_overflow(self, external: bool = False) -> bool:
        """Whether the gradients at an accumulation boundary are non-finite on any process; collective when sharded.

        Nothing is changed: the next `step()` gets the same result. `external` exists for DeepSpeed's signature.
        """
        self.masters.take_gradients(self.parameters)
        norms, _ = self.norms.measure(clipped_together(self.param_groups, self.parameters))
        return not all(map(math.isfinite, norms))

    @cached_property
    def parameter_offload(self) -> "ParameterOffload":
        """Always without hooks."""
        return ParameterOffload()

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Moves state to the CPU; see the engine's `offload_states`. DeepSpeed has this method here too."""
        self.state_offload.offload(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Moves everything back; see the engine's `reload_states`."""
        self.state_offload.reload(non_blocking)

    def quantize_nontrainable_params(self) -> None:
        """Only prints a line: frozen weights keep their dtype."""
        say_once("quantize_nontrainable_params(): frozen weights keep their dtype")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Frees the gradients of parameters and masters; always sets them to None, as zeros would only take memory."""
        for trained in self.parameters:
            trained.param.grad = None
            trained.master.grad = None
        self.state_offload.forget_gradients()

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Everything that `load_state_dict` needs on the same number of processes; checkpoints do not use it."""
        self.masters.renew()
        return {
            "optimizer": self.inner.state_dict(),
            "masters": self.masters.state_dict(),
            "loss_scaler": self.loss_scaler.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        self.inner.load_state_dict(state_dict["optimizer"])
        self.loss_scaler.load_state_dict(state_dict["loss_scaler"])
        self.masters.load_state_dict(state_dict["masters"])
        self.masters.write_back()

    def restore(
        self,
        param_groups: list[dict[str, Any]],
        tensors: dict[str, dict[str, torch.Tensor]],
        values: dict[str, dict[str, Any]],
    ) -> None:
        """Takes over a checkpoint's groups and state, keyed by parameter name; the masters were loaded in place.

        Args:
            param_groups: like those of this optimizer, with `names` in place of `params`.
            tensors: the state's tensors, used without a copy where their dtype and device fit.
            values: the state's other values.
        """
        numbers = {t.name: number for number, t in enumerate(self.parameters)}
        groups = [{**group, "params": [numbers[name] for name in group["names"]]} for group in param_groups]
        for group in groups:
            del group["names"]
        state = {numbers[name]: {**tensors[name], **values[name]} for name in numbers if tensors[name] or values[name]}
        self.inner.load_state_dict({"state": state, "param_groups": groups})
        self.masters.write_back()

    def _describe_non_finite(self, norm: float) -> str:
        names = self.norms.names_of_non_finite()
        shown = ", ".join(names[:MAX_NAMES_IN_ERROR]) + (", ..." if len(names) > MAX_NAMES_IN_ERROR else "")
        return (
            f"step(): the gradient norm is {norm}, it must be finite; {len(names)} of {len(self.parameters)} "
            f"parameters have a non-finite gradient: {shown}. Nothing was "
            f"stepped and the gradients were dropped; look for a log or a division of zero in the loss, or lower the "
            f"learning rate"
        )


def clipped_together(groups: list[dict[str, Any]], parameters: list[TrainedParameter]) -> list[list[TrainedParameter]]:
    """Lists of `parameters` that are clipped by one norm each: those in no group with `APART`, then one list per such
    group.
    """
    apart = [{id(param) for param in group["params"]} for group in groups if group.get(APART)]
    rest = [t for t in parameters if not any(id(t.master) in ids for ids in apart)]
    return [rest, *([t for t in parameters if id(t.master) in ids] for ids in apart)]


def rescale(gradients: list[torch.Tensor], scale: float, norm: float, bound: float) -> None:
    """Divides gradients by the loss scale, and clips them if `norm`, their norm without the scale, is above `bound`.

    Args:
        gradients: changed in place.
        scale: factor of the loss.
        norm: the 2-norm of all gradients that are clipped together, without `scale`.
        bound: the largest norm; 0 disables clipping.
    """
    factor = 1.0 / scale
    if bound > 0:
        # 1e-6 as in torch's `clip_grad_norm_`.
        factor *= min(1.0, bound / (norm + 1e-6))
    if factor != 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)


class WithoutParameters:
    """A module without parameters, and so without records of hooks to clear."""

    def named_parameters(self, recurse: bool = True) -> list[tuple[str, Any]]:
        """No parameters, so no records of hooks."""
        return []

    def ds_external_parameters(self) -> list[tuple[str, Any]]:
        """No parameters, so no records of hooks."""
        return []


class ParameterOffload:
    """`optimizer.parameter_offload`: DeepSpeed's names for hooks that gather parameters; this engine has no such hooks.

    TRL's `unwrap_model_for_generation` removes DeepSpeed's hooks from a gathered model, because they would gather and
    free each parameter again, and restores them. Here a gathered model generates as it is.
    """

    def __init__(self) -> None:
        self.module = WithoutParameters()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: Any) -> None:
        """Does nothing: there are no hooks to restore."""


class GradientNorms:
    """Measures the gradients of `parameters`, which differ between pipeline stages."""

    def __init__(self, parameters: list[TrainedParameter], group: dist.ProcessGroup | None) -> None:
        """`group`: the processes whose shards together are the model; None if this process has all of it."""
        self._parameters, self._group = parameters, group
        self._copies = {t.name: num_copies(t.master) for t in parameters}

    def measure(self, parts: list[list[TrainedParameter]]) -> tuple[list[float], int]:
        """Each part's 2-norm, still multiplied by the loss scale, and the number of gradients; collective."""
        if not self._parameters:
            return [0.0], 0
        none = [torch.zeros((), device=local_tensor(self._parameters[0].master).device)]
        gradients = [local_gradients(part) for part in parts]
        norms = [torch._foreach_norm(grads, 2, torch.float32) if grads else none for grads in gradients]
        squares = [torch.stack(list(norm)).float().square() for norm in norms]
        if max(self._copies.values()) > 1:  # each process of a unit adds its share of parts that several have
            squares = [square / self._copies_in(part, square) for part, square in zip(parts, squares, strict=True)]
        count = squares[0].new_full((), sum(map(len, gradients)))
        sums = self._added_up(torch.stack([*(square.sum() for square in squares), count]))
        sums[:-1].sqrt_()
        *totals, num_gradients = sums.tolist()  # a synchronization with the device
        return totals, round(num_gradients)

    def count_holders(self, holders: Mapping[str, int]) -> None:
        """Sets in how many pipeline stages each parameter is, by name."""
        self._copies = {name: copies * holders.get(name, 1) for name, copies in self._copies.items()}

    def names_of_non_finite(self) -> list[str]:
        """Names of the parameters whose gradient is not finite on some process; collective."""
        found: list[Any] = [[t.name for t in self._parameters if _has_non_finite(t.master)]]
        if self._group is not None:
            found *= dist.get_world_size(self._group)
            dist.all_gather_object(found, found[0], group=host_group(self._group))
        return list(dict.fromkeys(name for names in found for name in names))

    def _copies_in(self, part: list[TrainedParameter], squares: torch.Tensor) -> torch.Tensor:
        """Number of processes that hold the parameter of each gradient of a part."""
        copies = [self._copies[t.name] for t in part if t.master.grad is not None]
        return torch.tensor(copies or [1], device=squares.device)

    def _added_up(self, values: torch.Tensor) -> torch.Tensor:
        if self._group is None:
            return values
        # Offloaded gradients are on the CPU, which nccl does not reach, so the reduction runs on the device.
        values = values.to(default_device().type)
        dist.all_reduce(values, group=self._group)
        return values


def local_gradients(part: list[TrainedParameter]) -> list[torch.Tensor]:
    """This process's parts of the gradients of the masters that have one."""
    return [local_tensor(t.master.grad) for t in part if t.master.grad is not None]


def _has_non_finite(master: nn.Parameter) -> bool:
    return master.grad is not None and not bool(local_tensor(master.grad).isfinite().all())
