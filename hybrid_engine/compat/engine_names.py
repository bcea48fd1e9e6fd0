"""What scripts written for DeepSpeed read and call on an engine, beyond what training itself needs.

`ZeroEngine` keeps one `EngineNames` and finds these names there before it looks at its module, so the engine's own
file stays about training.
"""

import os
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from hybrid_engine.compat.config_names import ROUTE_TRAIN
from hybrid_engine.config.checks import check_integer
from hybrid_engine.distributed.dataloader import build_training_dataloader
from hybrid_engine.observing.monitor import Monitor
from hybrid_engine.observing.timing import ThroughputTimer
from hybrid_engine.zero.sharding import full_tensor

if TYPE_CHECKING:
    from hybrid_engine.engine import ZeroEngine


class EngineNames:
    """Accessors of one engine, under DeepSpeed's names."""

    def __init__(self, engine: "ZeroEngine") -> None:
        self._engine = engine

    @property
    def monitor(self) -> Monitor:
        """The trackers; `monitor.write_events([(name, value, step), ...])`."""
        return self._engine.observer.monitor

    @property
    def tput_timer(self) -> ThroughputTimer:
        """Samples per second."""
        return self._engine.observer.throughput

    @property
    def local_rank(self) -> int:
        """This process's number on its machine."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def global_rank(self) -> int:
        """This process's number."""
        return self._engine.sharding.rank

    @property
    def world_size(self) -> int:
        """Processes that train together."""
        return self._engine.sharding.world_size

    dp_world_size = world_size

    @property
    def basic_optimizer(self) -> Any:
        """The torch.optim optimizer inside the shim; None without one."""
        return self._engine.optimizer.inner if self._engine.optimizer is not None else None

    @property
    def training_mode(self) -> bool:
        """Whether the module is in training mode."""
        return self._engine.module.training

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        """ZeRO's stage, 0 to 3."""
        return self._engine.config.zero_optimization.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded."""
        return self.zero_optimization_stage() >= 3

    def zero_offload_optimizer(self) -> bool:
        """Whether the optimizer state lies in the CPU's memory."""
        return self._engine.config.zero_optimization.offloads_optimizer

    def zero_offload_param(self) -> bool:
        """Whether the parameters lie in the CPU's memory."""
        return self._engine.config.zero_optimization.offloads_parameters

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether the weights of a stage 3 model may be gathered for saving."""
        return self._engine.config.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The module's state dict, whole, in the memory of rank 0; empty on other processes. Collective.

        The name is private in DeepSpeed too, and accelerate and transformers call it to save a stage 3 model. Other
        processes get None from DeepSpeed. Here `save_pretrained(state_dict=None)` would look into tied shards, which
        is a collective that rank 0 does not come to.
        """
        self._engine.sharding.settle()
        state: dict[str, Any] = {}
        copies: dict[int, torch.Tensor] = {}
        for name, tensor in self._engine.module.state_dict(keep_vars=True).items():
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
        return self._engine.config.bf16.enabled

    def fp16_enabled(self) -> bool:
        """Whether parameters are fp16."""
        return self._engine.config.fp16.enabled

    def fp16_auto_cast(self) -> bool:
        """Whether inputs are cast to fp16."""
        return self._engine.config.fp16.auto_cast

    def loss_scale(self) -> float:
        """What the loss is multiplied by."""
        return self._engine.optimizer.cur_scale if self._engine.optimizer is not None else 1.0

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts to overflows."""
        return self._engine.config.fp16.enabled and self._engine.config.fp16.loss_scale == 0

    def gradient_clipping(self) -> float:
        """The largest gradient norm; 0 does not clip."""
        return self._engine.config.gradient_clipping

    def prescale_gradients(self) -> bool:
        """Whether gradients are divided before they are added up."""
        return self._engine.config.prescale_gradients

    def gradient_predivide_factor(self) -> float:
        """What gradients are divided by before they are added up."""
        return self._engine.config.gradient_predivide_factor

    def steps_per_print(self) -> int:
        """Optimizer steps between two progress lines; 0 prints none."""
        return self._engine.config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether times are printed."""
        return self._engine.config.wall_clock_breakdown

    def get_mom(self) -> list[Any]:
        """The momentum of each parameter group: `betas`, or `momentum`."""
        groups = self._engine.optimizer.param_groups if self._engine.optimizer is not None else []
        return [group["betas"] if "betas" in group else group.get("momentum", 0.0) for group in groups]

    def get_type(self) -> list[str | None]:
        """The kind of schedule of each parameter group; None for those that say nothing."""
        groups = self._engine.optimizer.param_groups if self._engine.optimizer is not None else []
        return [group.get("type") for group in groups]

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of all parameter groups; a scheduler sets its own at its next step."""
        for group in self._engine.optimizer.param_groups if self._engine.optimizer is not None else []:
            group["lr"] = lr

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples per step of all processes, per micro-batch of one, and micro-batches per step."""
        config = self._engine.config
        return config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the samples per step, by the number of micro-batches; between two steps, alike on all processes.

        Raises:
            ValueError: it is no multiple of a micro-batch of all processes, or micro-batches of a step are done.
        """
        config = self._engine.config
        num_per_pass = config.train_micro_batch_size_per_gpu * self.world_size
        if train_batch_size < num_per_pass or train_batch_size % num_per_pass:
            raise ValueError(
                f"{train_batch_size=} must be a multiple of train_micro_batch_size_per_gpu="
                f"{config.train_micro_batch_size_per_gpu} times {self.world_size} processes"
            )
        self._set_batch_sizes(config.train_micro_batch_size_per_gpu, train_batch_size // num_per_pass)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the samples per micro-batch, and with them those per step; else as `set_train_batch_size`."""
        check_integer("micro_batch_size", micro_batch_size, 1)
        self._set_batch_sizes(micro_batch_size, self._engine.config.gradient_accumulation_steps)

    def _set_batch_sizes(self, micro_batch_size: int, num_micro_batches: int) -> None:
        engine = self._engine
        if engine.num_pending_micro_batches:
            raise ValueError(
                f"batch sizes: {engine.num_pending_micro_batches} micro-batches of a step are done; change them after "
                f"the step() that ends the accumulation"
            )
        engine.config = replace(
            engine.config,
            train_batch_size=micro_batch_size * num_micro_batches * self.world_size,
            train_micro_batch_size_per_gpu=micro_batch_size,
            gradient_accumulation_steps=num_micro_batches,
        )
        self.tput_timer.batch_size = engine.config.train_batch_size
        engine.micro_steps = engine.global_steps * num_micro_batches

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
        size = batch_size or self._engine.config.train_micro_batch_size_per_gpu
        loader = self._engine.training_dataloader
        collate_fn = collate_fn or (loader.collate_fn if loader is not None else None)
        if data_sampler is None and route == ROUTE_TRAIN and not isinstance(dataset, IterableDataset):
            return build_training_dataloader(dataset, collate_fn, self._engine.config, size)
        return DataLoader(
            dataset, size, sampler=data_sampler, collate_fn=collate_fn, num_workers=num_local_io_workers or 0
        )

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The module's state dict: whole below stage 3, there with shards."""
        state = self._engine.module.state_dict(keep_vars=True)
        return {
            name: tensor.detach()
            for name, tensor in state.items()
            if tensor.requires_grad or not (exclude_frozen_parameters and isinstance(tensor, nn.Parameter))
        }

    def optimizer_params(self) -> dict[str, Any] | None:
        """The optimizer's arguments in the config; None without one there."""
        config = self._engine.config.optimizer
        return dict(config.params) if config is not None else None

    def scheduler_params(self) -> dict[str, Any] | None:
        """The scheduler's arguments in the config; None without one there."""
        config = self._engine.config.scheduler
        return dict(config.params) if config is not None else None

    def save_fp16_model(self, save_dir: Any, save_filename: str | None = None) -> Any:
        """The old name of `save_16bit_model`."""
        return self._engine.save_16bit_model(save_dir, save_filename)

    def empty_partition_cache(self) -> None:
        """Frees what is gathered of a stage 3 model."""
        self._engine.sharding.settle()

    def optimizer_name(self) -> str | None:
        """The optimizer's type in the config; None without one there."""
        config = self._engine.config.optimizer
        return config.type.lower() if config is not None else None

    def scheduler_name(self) -> str | None:
        """The scheduler's type in the config; None without one there."""
        config = self._engine.config.scheduler
        return config.type if config is not None else None

    def managed_gradient_accumulation(self) -> bool:
        """Whether the engine counts the micro-batches of a step."""
        return self._engine.accumulation.is_managed

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Backward passes inside reduce their gradients once, at its end. See `GradientAccumulation.coalesce`."""
        return self._engine.accumulation.coalesce()

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Moves what training keeps to the CPU's memory. See `StateOffload.offload`."""
        self._engine.state_offload.offload(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Moves it back. See `StateOffload.reload`."""
        self._engine.state_offload.reload(non_blocking)

    def allreduce_gradients(self) -> None:
        """Does nothing: the backward pass has reduced the gradients."""

    def destroy(self) -> None:
        """Does nothing: an engine has no state outside itself."""
