"""`deepspeed.runtime.engine`: the engine with DeepSpeed's names that scripts use but training does not need.

Also `deepspeed.utils.safe_get_...` and `safe_set_...`: whole values of the optimizer for one parameter. They take the
module's parameters at every stage of ZeRO, on one process or several; collective if the module is sharded.
"""

import os
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import DataLoader, IterableDataset

from hybrid_engine.distributed.dataloader import build_training_dataloader
from hybrid_engine.engine.zero_engine import ZeroEngine
from hybrid_engine.metrics.observer import Monitor, ThroughputTimer
from hybrid_engine.optim.masters import TrainedParameter, renew_masters
from hybrid_engine.optim.optimizer import ZeroOptimizer
from hybrid_engine.zero.fsdp2_private import fsdp_params, unreduced_gradient
from hybrid_engine.zero.sharding import Sharding, full_tensor, local_tensor
from hybrid_engine.zero.split_module import unit_size_of

ROUTE_TRAIN = "train"
"""The route of `deepspeed_io` for training batches."""


class DeepSpeedEngine(ZeroEngine):
    """ZeroEngine with the other attributes of DeepSpeed's engine; `initialize()` builds one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of ZeroEngine."""
        super().__init__(*args, **kwargs)
        if self.optimizer is not None:
            link_parameters(self.sharding, self.optimizer)

    @property
    def monitor(self) -> Monitor:
        """The trackers; `monitor.write_events([(name, value, step), ...])`."""
        return self.observer.monitor

    @property
    def tput_timer(self) -> ThroughputTimer:
        """Samples per second."""
        return self.observer.throughput

    @property
    def local_rank(self) -> int:
        """The index of this process on its machine."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def global_rank(self) -> int:
        """The rank of this process."""
        return self.sharding.rank

    @property
    def world_size(self) -> int:
        """Number of processes that train together."""
        return self.sharding.world_size

    dp_world_size = world_size

    @property
    def basic_optimizer(self) -> Any:
        """The torch.optim optimizer inside the shim, or None."""
        return self.optimizer.inner if self.optimizer is not None else None

    @property
    def training_mode(self) -> bool:
        """Whether the module is in training mode."""
        return self.module.training

    def zero_optimization(self) -> bool:
        """Whether any state is sharded."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        """ZeRO's stage, 0 to 3."""
        return self.config.zero_optimization.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded."""
        return self.zero_optimization_stage() >= 3

    def zero_offload_optimizer(self) -> bool:
        """Whether the optimizer state is in CPU memory."""
        return self.config.zero_optimization.offloads_optimizer

    def zero_offload_param(self) -> bool:
        """Whether the parameters are in CPU memory."""
        return self.config.zero_optimization.offloads_parameters

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether the weights of a stage 3 model may be gathered for saving."""
        return self.config.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The module's state dict, whole, in the memory of rank 0; empty on other processes. Collective.

        The name is private in DeepSpeed too; accelerate and transformers call it to save a stage 3 model. DeepSpeed
        returns None on other processes. Here `save_pretrained(state_dict=None)` would read tied shards, a collective
        that rank 0 does not join.
        """
        self.sharding.settle()
        state: dict[str, Any] = {}
        copies: dict[int, torch.Tensor] = {}
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            if exclude_frozen_parameters and isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
                continue
            if id(tensor) not in copies:  # tied parameters stay one
                whole = full_tensor(tensor)
                copies[id(tensor)] = whole.to("cpu", copy=True) if self.global_rank == 0 else whole.new_empty(0)
            if self.global_rank == 0:
                state[name] = copies[id(tensor)]
        return state

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bfloat16."""
        return self.config.bf16.enabled

    def fp16_enabled(self) -> bool:
        """Whether parameters are fp16."""
        return self.config.fp16.enabled

    def fp16_auto_cast(self) -> bool:
        """Whether inputs are cast to fp16."""
        return self.config.fp16.auto_cast

    def loss_scale(self) -> float:
        """The factor of the loss."""
        return self.optimizer.cur_scale if self.optimizer is not None else 1.0

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts to overflows."""
        return self.config.fp16.enabled and self.config.fp16.loss_scale == 0

    def gradient_clipping(self) -> float:
        """The largest gradient norm; 0 disables clipping."""
        return self.config.gradient_clipping

    def prescale_gradients(self) -> bool:
        """Whether gradients are divided before they are added up."""
        return self.config.prescale_gradients

    def gradient_predivide_factor(self) -> float:
        """The divisor of gradients before they are added up."""
        return self.config.gradient_predivide_factor

    def steps_per_print(self) -> int:
        """Optimizer steps between two progress lines; 0 disables them."""
        return self.config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether times are printed."""
        return self.config.wall_clock_breakdown

    def get_mom(self) -> list[Any]:
        """The momentum of each parameter group: `betas`, or `momentum`."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [group["betas"] if "betas" in group else group.get("momentum", 0.0) for group in groups]

    def get_type(self) -> list[str | None]:
        """The type of schedule of each parameter group; None for groups without one."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [group.get("type") for group in groups]

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of all parameter groups; a scheduler sets its own at its next step."""
        for group in self.optimizer.param_groups if self.optimizer is not None else []:
            group["lr"] = lr

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples per step over all processes, samples per micro-batch of one process, and micro-batches per step."""
        config = self.config
        return config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = ROUTE_TRAIN,
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """A loader of micro-batches of `dataset`, as built by `initialize(training_data=...)`.

        With a sampler, a route other than "train" or an IterableDataset it is PyTorch's DataLoader; for another route
        every process then gets all samples, in order.

        Args:
            batch_size: samples of a micro-batch; None is the config's.
            route: "train", "eval" or "predict".
            pin_memory: ignored.
            collate_fn: makes a batch from a list of samples; None is the function given to `initialize()`.
            num_local_io_workers: processes of a DataLoader.
        """
        size = batch_size or self.config.train_micro_batch_size_per_gpu
        loader = self.training_dataloader
        collate_fn = collate_fn or (loader.collate_fn if loader is not None else None)
        if data_sampler is None and route == ROUTE_TRAIN and not isinstance(dataset, IterableDataset):
            return build_training_dataloader(dataset, collate_fn, self.config, size, unit_size_of(self.module))
        return DataLoader(
            dataset, size, sampler=data_sampler, collate_fn=collate_fn, num_workers=num_local_io_workers or 0
        )

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The module's state dict: whole below stage 3, with shards at stage 3."""
        state = self.module.state_dict(keep_vars=True)
        return {
            name: tensor.detach()
            for name, tensor in state.items()
            if tensor.requires_grad or not (exclude_frozen_parameters and isinstance(tensor, nn.Parameter))
        }

    def optimizer_params(self) -> dict[str, Any] | None:
        """The optimizer's arguments in the config, or None."""
        config = self.config.optimizer
        return dict(config.params) if config is not None else None

    def scheduler_params(self) -> dict[str, Any] | None:
        """The scheduler's arguments in the config, or None."""
        config = self.config.scheduler
        return dict(config.params) if config is not None else None

    def save_fp16_model(self, save_dir: Any, save_filename: str | None = None) -> Any:
        """The old name of `save_16bit_model`."""
        return self.save_16bit_model(save_dir, save_filename)

    def empty_partition_cache(self) -> None:
        """Frees gathered parameters of a stage 3 model."""
        self.sharding.settle()

    def optimizer_name(self) -> str | None:
        """The optimizer's type in the config, or None."""
        config = self.config.optimizer
        return config.type.lower() if config is not None else None

    def scheduler_name(self) -> str | None:
        """The scheduler's type in the config, or None."""
        config = self.config.scheduler
        return config.type if config is not None else None

    def managed_gradient_accumulation(self) -> bool:
        """Whether the engine counts the micro-batches of a step."""
        return self.accumulation.is_managed

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Backward passes inside reduce their gradients once, at the end. See `GradientAccumulation.coalesce`."""
        return self.accumulation.coalesce()

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Moves training state to CPU memory. See `StateOffload.offload`."""
        self.check_trains("offload_states()").offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Moves training state back. See `StateOffload.reload`."""
        if self.optimizer is not None:
            self.optimizer.reload_states(non_blocking)

    def allreduce_gradients(self) -> None:
        """Does nothing: the backward pass has reduced the gradients."""

    def destroy(self) -> None:
        """Does nothing: an engine has no state outside itself."""


class OptimizerLink:
    """A parameter's link to its optimizer; a copy of the parameter does not have one, as it is not trained."""

    def __init__(self, optimizer: ZeroOptimizer, trained: TrainedParameter, record: Any) -> None:
        """`record` is FSDP2's record of the parameter; None if nothing is wrapped."""
        # Weak: otherwise a model would stay in memory until the garbage collector finds the cycle. References to the
        # tensors themselves would keep `engine.to()` from swapping them.
        self._optimizer, self._trained = weakref.ref(optimizer), weakref.ref(trained)
        self._record: Callable[[], Any] = (lambda: None) if record is None else weakref.ref(record)

    @property
    def master(self) -> Any:
        """The master that the optimizer steps; None if it steps the parameter itself, or is gone."""
        trained = self._trained()
        return trained.master if trained is not None and trained.has_master else None

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of the current step; this process's own if it is not reduced yet."""
        trained, record = self._trained(), self._record()
        owners = (trained.master, trained.param) if trained is not None else ()
        reduced = next((owner.grad for owner in owners if owner.grad is not None), None)
        return unreduced_gradient(record) if reduced is None and record is not None else reduced

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state of this parameter; empty before the first step."""
        optimizer, trained = self._optimizer(), self._trained()
        return optimizer.state.get(trained.master, {}) if optimizer is not None and trained is not None else {}

    def __reduce__(self) -> Any:
        return type(None), ()


def link_parameters(sharding: Sharding, optimizer: ZeroOptimizer) -> None:
    """Links the module's parameters, in the form that scripts see, to the optimizer that trains them."""
    trained = {entry.name: entry for entry in optimizer.parameters}
    records = {id(record.unsharded_param): record for record in fsdp_params(sharding.fsdp_modules())}
    for name, param in sharding.root.named_parameters():
        if name in trained:
            link = OptimizerLink(optimizer, trained[name], records.get(id(param)))
            param.ds_optimizer = link  # type: ignore[attr-defined]


@torch.no_grad()
def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor:
    """The value that the optimizer steps, in fp32."""
    master = _master(param)
    if master is None:
        return _copy(param).float()
    if isinstance(param, DTensor) == isinstance(master, DTensor):
        renew_masters([(local_tensor(param), local_tensor(master))])
    return _copy(master).float()


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets the parameter, and its fp32 master, to `value`, which must be the same on every process."""
    master = _master(param)
    if master is not None:
        _assign(master, value)
    _assign(param, value)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The gradient between `backward()` and `step()`, in fp32, or None.

    Below stage 2 it is this process's own until the backward pass that ends the accumulation. In fp16 it is multiplied
    by the loss scale.
    """
    grad = _grad(param)
    return None if grad is None else _copy(grad).float()


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets the gradient that `safe_get_full_grad` returns; raises ValueError if there is none."""
    grad = _grad(param)
    if grad is None:
        raise ValueError("safe_set_full_grad(): the parameter has no gradient; call it between backward() and step()")
    _assign(grad, value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """The optimizer's tensor `optim_state_key`, such as "exp_avg"; None for a parameter that is not trained.

    Raises:
        ValueError: the optimizer does not have this state, or not yet: the first step creates it.
    """
    return None if _link(param) is None else _copy(_state(param, optim_state_key))


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Sets the tensor that `safe_get_full_optimizer_state` returns."""
    _assign(_state(param, optim_state_key), value)


def _link(param: nn.Parameter) -> OptimizerLink | None:
    return getattr(param, "ds_optimizer", None)


def _master(param: nn.Parameter) -> torch.Tensor | None:
    link = _link(param)
    return None if link is None else link.master


def _grad(param: nn.Parameter) -> torch.Tensor | None:
    link = _link(param)
    return param.grad if link is None else link.grad


def _state(param: nn.Parameter, key: str) -> torch.Tensor:
    link = _link(param)
    state = link.state if link is not None else {}
    if key not in state:
        raise ValueError(
            f"{key!r} is not in the optimizer state of this parameter; it has {', '.join(state) or 'none'}"
        )
    return state[key]


@torch.no_grad()
def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return full_tensor(tensor).clone()


@torch.no_grad()
def _assign(target: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(target, DTensor):
        value = value.to(target.device_mesh.device_type)
        value = local_tensor(distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None))
    local_tensor(target).copy_(value)
