"""`deepspeed.runtime.engine`: the engine with what scripts read and call on it beyond what training itself needs."""

import os
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from hybrid_engine.distributed.dataloader import build_training_dataloader
from hybrid_engine.engine.whole_values import link_parameters
from hybrid_engine.engine.zero_engine import ZeroEngine
from hybrid_engine.metrics.monitor import Monitor
from hybrid_engine.metrics.observer import ThroughputTimer
from hybrid_engine.zero.sharding import full_tensor
from hybrid_engine.zero.split_module import unit_size_of

ROUTE_TRAIN = "train"
"""The route of `deepspeed_io` for batches that are trained on."""


class WithoutParameters:
    """Stands for the module whose parameters have records of the hooks to clear: none has."""

    def named_parameters(self, recurse: bool = True) -> list[tuple[str, Any]]:
        """No parameters: none has records of hooks."""
        return []

    def ds_external_parameters(self) -> list[tuple[str, Any]]:
        """No parameters: none has records of hooks."""
        return []


class ParameterOffload:
    """`optimizer.parameter_offload`: DeepSpeed's names for hooks that gather parameters; there are none here.

    TRL's `unwrap_model_for_generation` takes DeepSpeed's hooks off a gathered model, because they would gather and
    free each parameter again, and puts them back. Here a gathered model generates as it is.
    """

    def __init__(self) -> None:
        self.module = WithoutParameters()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: Any) -> None:
        """Does nothing: there are no hooks to put back."""


class DeepSpeedEngine(ZeroEngine):
    """ZeroEngine with what else DeepSpeed's engine answers to; `initialize()` builds one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what ZeroEngine takes."""
        super().__init__(*args, **kwargs)
        if self.optimizer is not None:
            link_parameters(self.sharding, self.optimizer)
            self.optimizer.parameter_offload = ParameterOffload()

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
        """This process's number on its machine."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def global_rank(self) -> int:
        """This process's number."""
        return self.sharding.rank

    @property
    def world_size(self) -> int:
        """Processes that train together."""
        return self.sharding.world_size

    dp_world_size = world_size

    @property
    def basic_optimizer(self) -> Any:
        """The torch.optim optimizer inside the shim; None without one."""
        return self.optimizer.inner if self.optimizer is not None else None

    @property
    def training_mode(self) -> bool:
        """Whether the module is in training mode."""
        return self.module.training

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
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
        """Whether the optimizer state lies in the CPU's memory."""
        return self.config.zero_optimization.offloads_optimizer

    def zero_offload_param(self) -> bool:
        """Whether the parameters lie in the CPU's memory."""
        return self.config.zero_optimization.offloads_parameters

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether the weights of a stage 3 model may be gathered for saving."""
        return self.config.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The module's state dict, whole, in the memory of rank 0; empty on other processes. Collective.

        The name is private in DeepSpeed too, and accelerate and transformers call it to save a stage 3 model. Other
        processes get None from DeepSpeed. Here `save_pretrained(state_dict=None)` would look into tied shards, which
        is a collective that rank 0 does not come to.
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
        """What the loss is multiplied by."""
        return self.optimizer.cur_scale if self.optimizer is not None else 1.0

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts to overflows."""
        return self.config.fp16.enabled and self.config.fp16.loss_scale == 0

    def gradient_clipping(self) -> float:
        """The largest gradient norm; 0 does not clip."""
        return self.config.gradient_clipping

    def prescale_gradients(self) -> bool:
        """Whether gradients are divided before they are added up."""
        return self.config.prescale_gradients

    def gradient_predivide_factor(self) -> float:
        """What gradients are divided by before they are added up."""
        return self.config.gradient_predivide_factor

    def steps_per_print(self) -> int:
        """Optimizer steps between two progress lines; 0 prints none."""
        return self.config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether times are printed."""
        return self.config.wall_clock_breakdown

    def get_mom(self) -> list[Any]:
        """The momentum of each parameter group: `betas`, or `momentum`."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [group["betas"] if "betas" in group else group.get("momentum", 0.0) for group in groups]

    def get_type(self) -> list[str | None]:
        """The kind of schedule of each parameter group; None for those that say nothing."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [group.get("type") for group in groups]

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of all parameter groups; a scheduler sets its own at its next step."""
        for group in self.optimizer.param_groups if self.optimizer is not None else []:
            group["lr"] = lr

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples per step of all processes, per micro-batch of one, and micro-batches per step."""
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
        """A loader of micro-batches of `dataset`, as `initialize(training_data=...)` builds one.

        With a sampler, for another route than "train" and of an IterableDataset it is PyTorch's DataLoader; for
        another route every process then gets all samples, in their order.

        Args:
            batch_size: samples of a micro-batch; None is the config's.
            route: "train", "eval" or "predict".
            pin_memory: has no meaning here.
            collate_fn: makes a batch of a list of samples; None is what `initialize()` was given.
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
        """The module's state dict: whole below stage 3, there with shards."""
        state = self.module.state_dict(keep_vars=True)
        return {
            name: tensor.detach()
            for name, tensor in state.items()
            if tensor.requires_grad or not (exclude_frozen_parameters and isinstance(tensor, nn.Parameter))
        }

    def optimizer_params(self) -> dict[str, Any] | None:
        """The optimizer's arguments in the config; None without one there."""
        config = self.config.optimizer
        return dict(config.params) if config is not None else None

    def scheduler_params(self) -> dict[str, Any] | None:
        """The scheduler's arguments in the config; None without one there."""
        config = self.config.scheduler
        return dict(config.params) if config is not None else None

    def save_fp16_model(self, save_dir: Any, save_filename: str | None = None) -> Any:
        """The old name of `save_16bit_model`."""
        return self.save_16bit_model(save_dir, save_filename)

    def empty_partition_cache(self) -> None:
        """Frees what is gathered of a stage 3 model."""
        self.sharding.settle()

    def optimizer_name(self) -> str | None:
        """The optimizer's type in the config; None without one there."""
        config = self.config.optimizer
        return config.type.lower() if config is not None else None

    def scheduler_name(self) -> str | None:
        """The scheduler's type in the config; None without one there."""
        config = self.config.scheduler
        return config.type if config is not None else None

    def managed_gradient_accumulation(self) -> bool:
        """Whether the engine counts the micro-batches of a step."""
        return self.accumulation.is_managed

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Backward passes inside reduce their gradients once, at its end. See `GradientAccumulation.coalesce`."""
        return self.accumulation.coalesce()

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Moves what training keeps to the CPU's memory. See `StateOffload.offload`."""
        self.state_offload.offload(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Moves it back. See `StateOffload.reload`."""
        self.state_offload.reload(non_blocking)

    def allreduce_gradients(self) -> None:
        """Does nothing: the backward pass has reduced the gradients."""

    def destroy(self) -> None:
        """Does nothing: an engine has no state outside itself."""
