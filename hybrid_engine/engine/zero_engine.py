"""ZeroEngine: trains an ordinary PyTorch module under ZeRO, mixed precision and gradient accumulation.

    for batch in dataloader:
        loss = engine(**batch).loss
        engine.backward(loss)  # or engine.scale(loss).backward()
        engine.step()

Parts: sharding in `zero/wrapping.py`, masters, clipping and loss scaling in `optim/optimizer.py`, files in
`checkpoint/` and `export.py`. Names and meanings are those of DeepSpeed's engine.
"""

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map

from hybrid_engine import checkpoint
from hybrid_engine.checkpoint.saving import RunLock, seed_everything
from hybrid_engine.config import EngineConfig
from hybrid_engine.config.checks import check_flag, check_integer, check_path
from hybrid_engine.containers.device import launching
from hybrid_engine.containers.quantised import keep_as_loaded
from hybrid_engine.distributed.dataloader import build_training_dataloader
from hybrid_engine.distributed.processes import broadcast_module, default_device, get_rank, get_world_size
from hybrid_engine.distributed.verdict import agree, attempt, holding_interrupts, naming_who_left, restoring_modes
from hybrid_engine.engine.batches import Batches, LossFunction, StagedBatches, SuccessiveBatches
from hybrid_engine.engine.checks import CallChecks, check_loss, check_training
from hybrid_engine.engine.faster_linears import use_faster_linears
from hybrid_engine.metrics.observer import Observer
from hybrid_engine.ops.dispatch import naming_kernels
from hybrid_engine.optim.accumulation import GradientAccumulation, StepCounters
from hybrid_engine.optim.backward_hooks import BackwardHooks
from hybrid_engine.optim.build import build_lr_scheduler, build_optimizer, cast_parameters
from hybrid_engine.optim.optimizer import ZeroOptimizer
from hybrid_engine.optim.state_offload import OffloadStateTypeEnum, describe_memory
from hybrid_engine.zero.fsdp2_private import wrapping_of
from hybrid_engine.zero.gathered_parameters import (
    MIXED,
    describe_shard_used,
    keeping_attributes,
    mark_copies,
    mark_parameters,
)
from hybrid_engine.zero.passes import Passes
from hybrid_engine.zero.sharding import mesh_shape
from hybrid_engine.zero.split_module import num_stages_of, original_of, together, unit_size_of
from hybrid_engine.zero.unwrapping import Uncopied, found_sharding, take_over
from hybrid_engine.zero.wrapping import place_module, shard_module

if TYPE_CHECKING:
    from hybrid_engine.checkpoint.export import Probe

logger = logging.getLogger("hybrid_engine")


def _counter(name: str) -> Any:
    def read(engine: "ZeroEngine") -> int:
        return getattr(engine.counters, name)  # type: ignore[no-any-return]

    def write(engine: "ZeroEngine", value: int) -> None:
        setattr(engine.counters, name, value)

    return property(read, write)


class ZeroEngine(Uncopied):
    """A module that is trained with `engine(...)`, `engine.backward(loss)` and `engine.step()`.

    Attributes that the engine does not have are looked up on the module; DeepSpeed's other names are in
    `engine/deepspeed_engine.py`. Without an optimizer, passed or in the config, it only evaluates and `optimizer` is
    None.
    """

    is_engine = True
    """Marks engines, which cannot be passed to `initialize()` as a model."""

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
            config: the result of `load_config`.
            optimizer: an optimizer on the model's parameters, or a function of parameter groups that builds one;
                None takes the one of the config.
            model_parameters: the parameters for the config's or the function's optimizer; None is all that require a
                gradient.
            lr_scheduler: a scheduler on that optimizer, or a function of the optimizer; None takes the config's.
            training_data: a map-style dataset, for `training_dataloader`.
            collate_fn: makes a batch from a list of samples.

        Raises:
            ValueError: the model cannot be trained; it is then unchanged.
        """
        super().__init__()
        trains = optimizer is not None or config.optimizer is not None
        groups = check_training(model, config, optimizer, model_parameters, lr_scheduler, trains)
        self.training_dataloader = (
            build_training_dataloader(training_data, collate_fn, config, unit_size=unit_size_of(model))
            if training_data is not None
            else None
        )
        # All checks are done; from here on the model is changed.
        mesh = mesh_shape(config, get_world_size() // unit_size_of(model))
        take_over(model, config.zero_optimization.rules, mesh)
        keep_as_loaded(model)
        self.config = config
        self.device = default_device()
        if config.seed is not None:
            seed_everything(config.seed + get_rank() // unit_size_of(model))  # processes of a unit draw the same
        cast_parameters(model, config)
        use_faster_linears(model)
        place_module(model, config, self.device)
        if num_stages_of(model) == 1:  # stages differ, and have rank 0's weights from parallelize()
            broadcast_module(model)
        self.sharding = shard_module(model, config, trains)
        self._wrapping = wrapping_of(model)
        self.passes = Passes(self.sharding, config, trains)
        mark_parameters(self.sharding)
        self.module = model
        self.optimizer = build_optimizer(optimizer, groups, self.passes, config) if trains else None
        self.sharding.settle()
        mark_copies(self.sharding)
        self.checks = CallChecks(self.optimizer, self.sharding)
        self.lr_scheduler = build_lr_scheduler(lr_scheduler, self.optimizer, config)
        self.counters = StepCounters(
            num_micro_batches=config.gradient_accumulation_steps,
            micro_batch_size=config.train_micro_batch_size_per_gpu,
            batch_size=config.train_batch_size,
        )
        self.observer = Observer(config, self.device, self.sharding.rank)
        self.run_lock = RunLock()
        parts = self.counters, self.passes, self.optimizer
        self.accumulation = GradientAccumulation(*parts, is_managed=config.managed_gradient_accumulation)
        self.backward_hooks = BackwardHooks(*parts, self.accumulation, scales_loss=config.fp16.enabled)
        is_staged = num_stages_of(model) > 1
        self.batches: Batches = StagedBatches(self.optimizer, model) if is_staged else SuccessiveBatches()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        return getattr(self.module, name)

    global_steps = _counter("global_steps")
    """Optimizer steps, including those that overflowed."""
    global_samples = _counter("global_samples")
    """Samples of those steps, over all processes."""
    skipped_steps = _counter("skipped_steps")
    """Optimizer steps that overflowed."""
    micro_steps = _counter("micro_steps")
    """Micro-batches of this process."""
    num_pending_micro_batches = _counter("num_pending_micro_batches")
    """Micro-batches since the last optimizer step."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "ZeroEngine":
        """Implements `to()` and similar methods; collective below stage 3, where the parameters end up whole."""
        with self.sharding.as_shards(), keeping_attributes(self.module):
            return super()._apply(fn, recurse)

    @naming_who_left("forward()")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward; collective at stage 3, where an error on one process is raised on all.

        Raises:
            ValueError: the forward uses a parameter that is only a shard; or the module's parameters are no longer
                those that the engine trains.
        """
        self._follow_wrapping()
        output = self.passes.forward_together(partial(self._forward, args, kwargs))
        self.backward_hooks.watch(output)
        return output

    def _follow_wrapping(self) -> None:
        """Updates an evaluation engine after another engine has taken over its module."""
        if self.optimizer is None and wrapping_of(self.module) is not self._wrapping:
            self._wrapping, self.sharding = wrapping_of(self.module), found_sharding(self.sharding)
            self.passes, self.checks = Passes(self.sharding, self.config, False), CallChecks(None, self.sharding)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.checks.check_single_passes("forward()")
        self.checks.check_parameters(self.module)
        if self.config.fp16.enabled and self.config.fp16.auto_cast:
            args, kwargs = tree_map(_to_half, (args, kwargs))
        self.checks.check_whole("forward()", OffloadStateTypeEnum.lp_params)
        self.backward_hooks.recover()
        self.passes.expect_backward(torch.is_grad_enabled() and self.optimizer is not None)
        observed = self.observer.forward(self.counters.global_steps, self.module.training)
        with restoring_modes(), observed, self._saving_activations(), self.passes.ending_on_error(), naming_kernels():
            try:
                with launching(self.device):
                    return self.module(*args, **kwargs)
            except RuntimeError as error:
                if MIXED in str(error):
                    raise ValueError(describe_shard_used(error, self.module, self.sharding.layers)) from error
                raise

    @naming_who_left("backward()")
    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Adds the gradients of `loss / gradient_accumulation_steps` to those of this step; returns the quotient.

        Collective when the gradients are reduced here: in stages 2 and 3, and at the accumulation boundary.

        Args:
            loss: one number.
            retain_graph: whether the graph is kept for another backward pass.
            scale_wrt_gas: False does not divide by the accumulation steps, and returns `loss`.

        Raises:
            ValueError: `loss` is not one number or does not depend on the parameters; the engine does not train, or not
                the module's current parameters; a parameter of a layer was used before it.

        After an error, including Ctrl-C, all gradients are dropped and the accumulation starts again.
        """
        optimizer = self._agree_to_backward(loss)
        num_micro_batches = self.counters.num_micro_batches if scale_wrt_gas else 1
        try:
            with self._backward_together(loss, optimizer):
                scaled = optimizer.scale_loss(loss.float() * (self.passes.loss_factor / num_micro_batches))
                self._run_autograd(scaled, retain_graph)  # FSDP2 reduces each layer's gradients in it, if they are due
                optimizer.accumulate_gradients()
            self.accumulation.reduce_at_end()  # of processes that used different layers
            # Inside the try: Ctrl-C before the return counts as an error too.
            return loss / num_micro_batches if scale_wrt_gas else loss
        except BaseException:
            self.drop_accumulation()
            raise

    def _agree_to_backward(self, loss: torch.Tensor) -> ZeroOptimizer:
        self.checks.check_single_passes("backward()")
        optimizer: ZeroOptimizer = self.check_trains("backward()")
        self.backward_hooks.recover()
        self.accumulation.agree_to_begin(lambda: self.checks.check_backward(loss, self.module))
        return optimizer

    @contextmanager
    def _backward_together(self, loss: torch.Tensor, optimizer: ZeroOptimizer) -> Iterator[None]:
        """Wraps a backward pass; at its end all processes learn about an error on one."""
        own_pass = self.backward_hooks.own_pass(optimizer.cur_scale)
        with restoring_modes(), self.observer.backward(), self.accumulation.backward_pass(), own_pass:
            yield
        self.counters.add_loss(loss)

    def _run_autograd(self, scaled: torch.Tensor, retain_graph: bool) -> None:
        with together(self.module), launching(self.device), naming_kernels():
            scaled.backward(retain_graph=retain_graph)
        self.accumulation.check_pass()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss for PyTorch's own `backward()`: in fp16 it is multiplied by the loss scale.

        Gradients are divided by the accumulation steps when they reach the parameters. After an error in the backward
        pass, the next call of the engine drops all gradients.

        Raises:
            ValueError: the engine does not train; `loss` is not one number or does not depend on parameters.
        """
        self.check_trains("scale()")
        check_loss("scale()", loss)
        return self.backward_hooks.scale(loss)

    @naming_who_left("train_batch()")
    def train_batch(self, batches: Iterable[Any], loss_fn: LossFunction | None = None) -> torch.Tensor:
        """Steps on the next `gradient_accumulation_steps` micro-batches; returns their mean loss, of this unit.

        The only way to train a module in stages; otherwise the same as `forward`, `backward` and `step` on each.
        Collective.

        Args:
            batches: the micro-batches, or an iterator over them. Each is a mapping of arguments of the module's forward
                by name, or its first argument, or a pair of these and the targets for `loss_fn`. In stages all have one
                shape and are the same on all processes of a unit.
            loss_fn: computes one number from the module's result and the targets (without them the arguments), on the
                last stage; None takes the first tensor of the module's result.

        Raises:
            ValueError: as `backward()` and `step()`; there are fewer micro-batches. In stages an error on one process
                is raised on all, and gradients are dropped.
        """
        self.check_trains("train_batch()")
        self.backward_hooks.recover()
        return self.batches.train(self, batches, loss_fn)

    @naming_who_left("eval_batch()")
    def eval_batch(self, batches: Iterable[Any]) -> list[Any]:
        """The module's results for each of the next `gradient_accumulation_steps` micro-batches, without gradients.

        The only forward pass of a module in stages; all processes of the unit get the results. Collective.
        """
        with torch.no_grad():
            return self.batches.evaluate(self, batches)

    @naming_who_left("step()")
    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Ends a micro-batch; at the accumulation boundary the optimizer and the scheduler step.

        Args:
            lr_kwargs: keyword arguments of the scheduler's `step()`, such as `metrics` of ReduceLROnPlateau.

        Raises:
            ValueError: no `backward()` since the last `step()`; the module's parameters are no longer those that the
                engine trains; or a non-finite gradient norm outside fp16, or no gradient of any trained parameter:
                nothing was stepped, the gradients are dropped and the accumulation starts again.

        If the optimizer steps, an error on one process is raised on all. An error during the step, such as no memory
        for its state, leaves parameters torn on all, until a checkpoint is loaded; an earlier one leaves them
        unchanged. Ctrl-C is raised after the step.
        """
        optimizer = self.check_trains("step()")
        error = attempt(self._check_step)[1]
        with holding_interrupts(), self._ending_micro_batch(error) as is_boundary:
            if is_boundary:
                with self.accumulation.stepping_together(error):
                    optimizer.step()  # unscales and clips the gradients, updates the masters, publishes their values
                self._advance_schedule(optimizer, lr_kwargs or {})

    @contextmanager
    def _ending_micro_batch(self, error: BaseException | None) -> Iterator[bool]:
        """Wraps the end of a micro-batch and counts it; yields whether the optimizer steps."""
        with self.accumulation.step(error) as is_boundary, self.observer.step(is_boundary):
            yield is_boundary
            if is_boundary:
                self._count_step()
            else:
                self.counters.num_pending_micro_batches += 1
        self.counters.micro_steps += 1
        if is_boundary:
            self.observer.print_times(self.counters.global_steps)

    def _count_step(self) -> None:
        assert self.optimizer is not None
        self.counters.global_steps += 1
        self.counters.global_samples += self.accumulation.num_samples()
        self.counters.skipped_steps += int(self.optimizer.overflow)
        self.observer.finish_step(self.optimizer, self.counters)
        self.zero_grad()

    def _advance_schedule(self, optimizer: ZeroOptimizer, lr_kwargs: dict[str, Any]) -> None:
        if self.lr_scheduler is not None and not optimizer.overflow:
            self.lr_scheduler.step(**lr_kwargs)

    def pass_step(self) -> None:
        """Counts an optimizer step in which no process has a gradient: only the schedule advances.

        The same as `step()` with gradients of 0, without the optimizer's momentum and weight decay. Every process must
        call it.

        Raises:
            ValueError: there has been a `backward()` since the last step.
        """
        optimizer: ZeroOptimizer = self.check_trains("pass_step()")
        if self.accumulation.num_passes or self.counters.num_pending_micro_batches:
            raise ValueError("pass_step(): micro-batches of a step are done; end it with step(), or begin_step_again()")
        with holding_interrupts():
            optimizer.forget_norms()
            self.counters.global_steps += 1
            self.counters.global_samples += self.counters.batch_size
            with warnings.catch_warnings():
                # PyTorch warns about a wrong order if the optimizer has not stepped yet.
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                self._advance_schedule(optimizer, {})
            self.observer.finish_step(optimizer, self.counters)

    def _check_step(self) -> None:
        self.checks.check_parameters(self.module)
        self.checks.check_whole("step()")
        self.backward_hooks.recover()
        self.accumulation.check_step()

    def drop_accumulation(self) -> None:
        """Drops all gradients; the next micro-batch is the first of a step again."""
        self.accumulation.drop()

    def begin_step_again(self) -> None:
        """Drops all progress of a step, including forward passes without a backward pass; collective."""
        self.passes.end()
        self.drop_accumulation()
        self.sharding.settle()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, including those of the micro-batches since the last boundary."""
        self.accumulation.zero_grad()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last of its optimizer step."""
        return self.accumulation.is_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Sets whether each micro-batch from now on ends an optimizer step; None returns to counting them.

        The loss is divided by `gradient_accumulation_steps` in either case.
        """
        if is_boundary is not None:
            check_flag("is_boundary", is_boundary)
        self.accumulation.set_boundary(is_boundary)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside do not reduce gradients. See `GradientAccumulation.no_sync`."""
        return self.accumulation.no_sync()

    def was_step_applied(self) -> bool:
        """Whether the last `step()` at a boundary changed the parameters; False before the first and after a skip."""
        return self.counters.global_steps > 0 and self.optimizer is not None and not self.optimizer.overflow

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

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the samples per step, by the number of micro-batches; between two steps, the same on all processes.

        Raises:
            ValueError: it is not a multiple of a micro-batch of all processes, or micro-batches of a step are done.
        """
        size, world_size = self.config.train_micro_batch_size_per_gpu, self.sharding.num_units
        if train_batch_size < size * world_size or train_batch_size % (size * world_size):
            raise ValueError(
                f"{train_batch_size=} must be a multiple of train_micro_batch_size_per_gpu={size} times {world_size} "
                f"processes"
            )
        self._set_batch_sizes(size, train_batch_size // (size * world_size))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the samples per micro-batch, and so those per step; otherwise like `set_train_batch_size`."""
        check_integer("micro_batch_size", micro_batch_size, 1)
        self._set_batch_sizes(micro_batch_size, self.config.gradient_accumulation_steps)

    def _set_batch_sizes(self, micro_batch_size: int, num_micro_batches: int) -> None:
        self.counters.check_between_steps()
        self.counters.set_sizes(micro_batch_size, num_micro_batches, self.sharding.num_units)
        self.config = replace(
            self.config,
            train_batch_size=self.counters.batch_size,
            train_micro_batch_size_per_gpu=micro_batch_size,
            gradient_accumulation_steps=num_micro_batches,
        )
        self.observer.throughput.batch_size = self.config.train_batch_size

    @naming_who_left("save_checkpoint()")
    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Any = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Path:
        """Saves everything needed to continue, on disk when it returns; collective. See `checkpoint.save`.

        Between two boundaries the gradients so far stay in the engine, and are not in the checkpoint.
        `save_latest=False` does not change the tag that is loaded by default. A checkpoint with
        `exclude_frozen_parameters` can only be loaded into a model that already has them, such as the base of adapters.
        """
        self.backward_hooks.recover()
        self.checks.check_whole_module_saves("save_checkpoint()")
        agree(lambda: self.checks.check_saves("save_checkpoint()", save_dir))
        tag = checkpoint.choose_tag(tag, self.config.checkpoint.tag_validation)
        return checkpoint.save(self, save_dir, tag, client_state, save_latest, exclude_frozen_parameters)

    @naming_who_left("load_checkpoint()")
    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str, Any]:
        """Continues a saved run, by default the latest; collective. Returns its path and the client state.

        Args:
            load_dir: folder that the run was saved to.
            tag: the checkpoint's tag; None is the latest.
            load_module_strict: False leaves weights that only the model or only the checkpoint has as they are.
            load_optimizer_states: False leaves the optimizer's state and options as they are; schedule, counters,
                random states and the position in the data are the checkpoint's.
            load_lr_scheduler_states: False leaves the schedule as it is.
            load_module_only: loads only the weights; counters are not changed.
            custom_load_fn: must be None: DeepSpeed's gets the whole state dict, which does not exist here.

        Raises:
            ValueError: see `checkpoint.load`; a `custom_load_fn`. The engine is then unchanged, as after Ctrl-C.
        """
        self.backward_hooks.recover()
        self.checks.check_whole_module_saves("load_checkpoint()")
        check_path("load_dir", load_dir)
        if custom_load_fn is not None:
            raise ValueError(
                f"load_checkpoint(): {custom_load_fn=} is not supported, as the weights are read as shards and never "
                f"as one state dict; leave it out, and change the weights after loading"
            )
        self.checks.check_not_offloaded("load_checkpoint()")
        path, client_state = checkpoint.load(
            self,
            load_dir,
            tag,
            module_only=load_module_only,
            with_optimizer=load_optimizer_states,
            with_scheduler=load_lr_scheduler_states,
            is_strict=load_module_strict,
        )
        if self.optimizer is not None:
            self.optimizer.is_torn = False
        return str(path), client_state

    @naming_who_left("save_16bit_model()")
    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str | None = None,
        exclude_frozen_parameters: bool = False,
    ) -> Path | bool:
        """Saves the weights in the precision they are computed in; collective.

        Args:
            save_dir: the folder. For a model of transformers it can be loaded by `from_pretrained`, with adapters
                merged.
            save_filename: writes the module's state dict to this file in it instead, like DeepSpeed; None means
                "pytorch_model.bin" for a module that is not of transformers.
            exclude_frozen_parameters: always writes a state dict, without these parameters.

        Returns:
            The folder; False with a warning if the config forbids gathering a stage 3 model.
        """
        # Imported here: training a plain module needs neither transformers nor peft.
        from hybrid_engine.checkpoint.export import save_16bit_model

        self.backward_hooks.recover()
        self.checks.check_whole_module_saves("save_16bit_model()")
        agree(lambda: self.checks.check_saves("save_16bit_model()", save_dir, OffloadStateTypeEnum.lp_params))
        zero = self.config.zero_optimization
        if zero.rules.shards_parameters and not zero.stage3_gather_16bit_weights_on_model_save:
            logger.warning(
                "save_16bit_model(): nothing was saved, zero_optimization.stage3_gather_16bit_weights_on_model_save "
                "is false"
            )
            return False
        probe = self._ask_for_export() if save_filename is None and not exclude_frozen_parameters else None
        self.sharding.settle()
        module = original_of(self.module)
        return save_16bit_model(module, save_dir, save_filename, exclude_frozen_parameters, probe)

    def _ask_for_export(self) -> "Probe | None":
        """Logits to compare a saved model with; None, with a line that says so, if the module cannot compute them."""
        from hybrid_engine.checkpoint.export import ask_model

        if original_of(self.module) is not self.module:  # a plan's module only accepts the shapes it was planned for
            return None
        self.passes.expect_backward(False)
        ask = partial(ask_model, self.module, self.device)
        with restoring_modes():
            probe, error = attempt(partial(self.passes.forward_together, ask))
        if error is not None:
            if not isinstance(error, Exception):  # Ctrl-C
                raise error
            logger.warning("save_16bit_model(): the saved model is not compared with the trained one (%s)", error)
        return probe

    def report(self) -> str:
        """Describes how this engine trains: stage, processes, precision, sharding, and this process's memory."""
        return describe_memory(self.sharding, self.optimizer, self.config)

    def _saving_activations(self) -> AbstractContextManager[Any]:
        if not self.config.activation_checkpointing.cpu_checkpointing or self.device.type == "cpu":
            return nullcontext()
        return save_on_cpu(pin_memory=True)

    def check_trains(self, what: str) -> Any:
        if self.optimizer is None:
            raise ValueError(f"{what}: this engine only evaluates; pass an optimizer to initialize()")
        return self.optimizer

    def measured_values(self) -> dict[str, Any]:
        """Returns no metrics: training reads none later."""
        return {}

    def restore_measured_values(self, values: dict[str, Any]) -> None:
        """Does nothing."""


def _to_half(value: Any) -> Any:
    return value.half() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
