"""ZeroEngine: trains an ordinary PyTorch module under ZeRO, mixed precision and gradient accumulation.

    for batch in dataloader:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()

Where things are: sharding in `zero/sharding.py`, masters, clipping and loss scaling in `zero/optimizer.py`, files in
`checkpoint.py` and `export.py`. Names and meanings are those of DeepSpeed's engine.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from hybrid_engine import checkpoint
from hybrid_engine.config import EngineConfig
from hybrid_engine.dataloader import TrainingDataLoader
from hybrid_engine.memory import describe_memory
from hybrid_engine.zero.build import build_lr_scheduler, build_optimizer, cast_parameters, check_choices
from hybrid_engine.zero.param_groups import name_groups
from hybrid_engine.zero.processes import (
    broadcast_module,
    check_same_architecture,
    default_device,
    get_rank,
    get_world_size,
)
from hybrid_engine.zero.sharding import shard_module


class ZeroEngine(nn.Module):
    """A module that is trained with `engine(...)`, `engine.backward(loss)` and `engine.step()`.

    Attributes that the module has and the engine has not are the module's. Without an optimizer, neither passed nor in
    the config, it only evaluates and `optimizer` is None.
    """

    def __init__(
        self,
        model: nn.Module,
        config: EngineConfig,
        *,
        optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
        model_parameters: Iterable[Any] | None = None,
        lr_scheduler: LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        training_data: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """Takes over `model`: casts its parameters in place, moves it to the device and shards it.

        Args:
            model: the same architecture on every process; the weights are rank 0's.
            config: read by `load_config`.
            optimizer: an optimizer on the model's parameters, or a function of parameter groups that builds one;
                None takes the one of the config.
            model_parameters: what the config's or the function's optimizer steps; None is all that require a gradient.
            lr_scheduler: a scheduler on that optimizer, or a function of the optimizer; None takes the config's.
            training_data: a map-style dataset, for `training_dataloader`.
            collate_fn: makes a batch of a list of samples.

        Raises:
            ValueError: for what cannot be trained; the model is then as it was.
        """
        super().__init__()
        check_choices(model, optimizer, lr_scheduler, config)
        trains = optimizer is not None or config.optimizer is not None
        stepped = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else model_parameters
        groups = name_groups(stepped, model) if trains else []
        check_same_architecture(model)
        self.training_dataloader = _build_dataloader(training_data, collate_fn, config)
        # Everything is checked; from here on the model is changed.
        self.config = config
        self.device = default_device()
        cast_parameters(model, config.dtype)
        broadcast_module(model.to(self.device))
        self.sharding = shard_module(model, stage=config.zero_optimization.stage)
        self.module = model
        self.optimizer = build_optimizer(optimizer, groups, self.sharding, config) if trains else None
        self.lr_scheduler = build_lr_scheduler(lr_scheduler, self.optimizer, config)
        self.global_steps = 0
        self.micro_steps = 0
        self.global_samples = 0
        self.skipped_steps = 0
        self._backward_was_called = False
        self._loss_sum: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Adds the gradients of `loss / gradient_accumulation_steps` to those of this step; returns `loss`.

        Collective when the gradients are reduced here: in stages 2 and 3, and at the accumulation boundary.

        Raises:
            ValueError: `loss` is not one number or does not depend on the parameters; the engine does not train.
        """
        optimizer = self._check_trains("backward()")
        _check_loss(loss)
        self.sharding.set_gradient_sync(self.is_gradient_accumulation_boundary())
        optimizer.scale_loss(loss.float() / self.config.gradient_accumulation_steps).backward()
        optimizer.accumulate_gradients()
        self._backward_was_called = True
        # Added on the device: reading the number would wait for it at every micro-batch.
        self._loss_sum = loss.detach() if self._loss_sum is None else self._loss_sum + loss.detach()
        return loss

    def step(self) -> None:
        """Ends a micro-batch; at the accumulation boundary the optimizer and the scheduler step.

        Raises:
            ValueError: no `backward()` since the last `step()`; or a non-finite gradient norm outside fp16: nothing
                was stepped, the gradients are dropped and the accumulation starts again.
        """
        self._check_trains("step()")
        if not self._backward_was_called:
            raise ValueError("step(): there are no gradients; call backward(loss) before each step()")
        self._backward_was_called = False
        if not self.is_gradient_accumulation_boundary():
            self.micro_steps += 1
            return
        try:
            self._step_optimizer()
        except ValueError:
            self.micro_steps -= self.config.gradient_accumulation_steps - 1
            self.zero_grad()
            raise
        self.micro_steps += 1

    def _step_optimizer(self) -> None:
        assert self.optimizer is not None
        self.sharding.reshard()
        self.optimizer.step()
        self.global_steps += 1
        self.global_samples += self.config.train_batch_size
        if self.optimizer.overflow:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self._print_step()
        self.zero_grad()

    def _print_step(self) -> None:
        every = self.config.steps_per_print
        if every == 0 or self.global_steps % every != 0 or self.sharding.rank != 0:
            return
        assert self.optimizer is not None and self._loss_sum is not None
        loss = self._loss_sum.item() / self.config.gradient_accumulation_steps
        print(
            f"step={self.global_steps} loss={loss:.6g} lr={self.get_lr()} grad_norm={self.optimizer.grad_norm:.6g} "
            f"loss_scale={self.optimizer.cur_scale:g} skipped={self.skipped_steps}",
            flush=True,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, also those of the micro-batches since the last boundary."""
        self.module.zero_grad(set_to_none=True)
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        self.sharding.drop_pending_gradients()
        self._loss_sum = None

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way is the last of its optimizer step."""
        return (self.micro_steps + 1) % self.config.gradient_accumulation_steps == 0

    def get_global_grad_norm(self) -> float | None:
        """The gradients' 2-norm at the last step, before clipping and without the loss scale; None before the first."""
        return self.optimizer.grad_norm if self.optimizer is not None else None

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups] if self.optimizer is not None else []

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.config.gradient_accumulation_steps

    def train_batch_size(self) -> int:
        """Samples per optimizer step over all processes."""
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per micro-batch of this process."""
        return self.config.train_micro_batch_size_per_gpu

    def save_checkpoint(
        self, save_dir: str | os.PathLike[str], tag: str | int | None = None, client_state: Any = None
    ) -> Path:
        """Saves everything needed to go on, on disk when it returns; collective. See `checkpoint.save`."""
        return checkpoint.save(self, save_dir, tag, client_state)

    def load_checkpoint(self, load_dir: str | os.PathLike[str], tag: str | int | None = None) -> tuple[str, Any]:
        """Continues a saved run, by default the latest; collective. Returns its path and the client state.

        Raises:
            ValueError: see `checkpoint.load`; the engine is then unchanged.
        """
        path, client_state = checkpoint.load(self, load_dir, tag)
        return str(path), client_state

    def save_16bit_model(self, save_dir: str | os.PathLike[str]) -> Path:
        """Saves the weights as a folder for `from_pretrained`, adapters merged; collective.

        Raises:
            ValueError: the module is not a model of transformers.
        """
        # Here, not at the top: training a plain module needs neither transformers nor peft.
        from hybrid_engine.export import save_16bit_model

        self.sharding.reshard()
        return save_16bit_model(self.module, save_dir)

    def report(self) -> str:
        """How this engine trains: stage, processes, precision, sharding, and the bytes that takes on this process."""
        return describe_memory(self.sharding, self.optimizer, self.config)

    def _check_trains(self, what: str) -> Any:
        if self.optimizer is None:
            raise ValueError(f"{what}: this engine only evaluates; pass an optimizer to initialize()")
        return self.optimizer


def _build_dataloader(
    dataset: Any, collate_fn: Callable[[list[Any]], Any] | None, config: EngineConfig
) -> TrainingDataLoader | None:
    if dataset is None:
        return None
    return TrainingDataLoader(
        dataset,
        micro_batch_size=config.train_micro_batch_size_per_gpu,
        rank=get_rank(),
        world_size=get_world_size(),
        collate_fn=collate_fn,
    )


def _check_loss(loss: torch.Tensor) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(f"backward(): the loss has shape {shape}, it must be one number; reduce it, e.g. loss.mean()")
    if not loss.requires_grad:
        raise ValueError(
            "backward(): the loss does not depend on trainable parameters (requires_grad is False); compute it from "
            "the engine's output outside torch.no_grad()"
        )
