"""Backward passes in PyTorch's own style: `loss.backward()` does what `engine.backward(loss)` does before and after.

    engine.scale(engine(**batch).loss).backward()
    (actor_loss + critic_loss).backward()          # one loss over two engines

A pass begins for an engine with the first gradient of an output of its forward pass, or of one of its parameters, and
ends with the pass itself. The division by the accumulation steps happens at the parameters: each gradient is divided
once, even if one output depends on another, or one engine's input on another's output.

PyTorch has no hook for a pass that ends with an error. So the other processes, which wait for this one in the pass,
learn about it with the engine's next call here, or when the process ends; if one pass goes through several engines,
only when it ends.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.autograd.variable import Variable
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import unserializable_hook

from hybrid_engine.distributed.verdict import ErrorNotice
from hybrid_engine.optim.accumulation import GradientAccumulation, StepCounters
from hybrid_engine.optim.optimizer import ZeroOptimizer
from hybrid_engine.optim.state_offload import TRAINING
from hybrid_engine.zero.passes import Passes

ENDED = ErrorNotice(kind=RuntimeError, text="loss.backward() ended there with an error, which that process has raised")


@dataclass(kw_only=True)
class PassUnderWay:
    """Facts about the backward pass that currently runs in this process; there is never more than one."""

    scales: set[float] = field(default_factory=set)
    """Factors that engines have multiplied losses by; empty if none has."""
    is_divided: bool = False
    """Whether an engine has divided the loss by its accumulation steps."""

    def clear(self) -> None:
        """Resets the facts before the next pass."""
        self.scales, self.is_divided = set(), False


# The only state that engines share: a gradient does not tell whose `backward()` or `scale()` started its pass.
_under_way = PassUnderWay()


class BackwardHooks:
    """Notifies one engine when backward passes begin and end that it did not start itself."""

    def __init__(
        self,
        counters: StepCounters,
        passes: Passes,
        optimizer: ZeroOptimizer | None,
        accumulation: GradientAccumulation,
        *,
        scales_loss: bool,
    ) -> None:
        """`scales_loss`: whether losses are multiplied by the optimizer's loss scale, as in fp16."""
        self._counters, self._passes, self._optimizer = counters, passes, optimizer
        self._accumulation, self._scales_loss = accumulation, scales_loss
        self.is_in_pass = False
        """Whether a backward pass is under way that the engine did not start itself, or one failed."""
        self._is_in_own_pass = False
        leaves = passes.sharding.leaves() if optimizer is not None else ()
        self._accumulators = [self._watch_parameter(param) for param in leaves if param.requires_grad]

    def _watch_parameter(self, param: nn.Parameter) -> Any:
        param.register_hook(_weak_hook(self._divide))
        return get_gradient_edge(param).node

    @contextmanager
    def own_pass(self, scale: float) -> Iterator[None]:
        """Wraps the pass of `engine.backward()`, whose loss is divided and multiplied by `scale`."""
        _under_way.scales, _under_way.is_divided = {scale}, True
        self._is_in_own_pass = True
        try:
            yield
        finally:
            self._is_in_own_pass = False
            _under_way.clear()

    def watch(self, output: Any) -> None:
        """Watches the output of a forward pass; without a tensor in it, passes begin at the engine's parameters."""
        if not self._accumulators or not torch.is_grad_enabled():
            return
        hook = _weak_hook(self._begin)
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(hook)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the loss scale, which is recorded for its pass; `loss` itself without a scale."""
        assert self._optimizer is not None
        if not self._scales_loss:
            return loss
        scale = self._optimizer.cur_scale
        scaled = loss.float() * scale  # in fp16 the product would overflow

        @unserializable_hook
        def note_scale(grad: torch.Tensor) -> None:
            _under_way.scales.add(scale)
            _at_end_of_pass(_under_way.clear)

        scaled.register_hook(note_scale)
        return scaled

    def recover(self) -> None:
        """Ends a pass that failed, so that its last hook never ran, and tells the other processes of the pass.

        Collective after a failed pass; each call of the engine begins with it.
        """
        if torch._C._current_graph_task_id() != -1:
            return  # inside a pass that recomputes activations
        _under_way.clear()
        if self.is_in_pass:
            self.is_in_pass = False
            self._accumulation.leave_pass(ENDED)
            self._drop()

    def _drop(self) -> None:
        self._passes.end()
        self._accumulation.drop()

    def _begin(self, grad: torch.Tensor) -> None:
        if self.is_in_pass or self._is_in_own_pass or not self._accumulates():
            return
        try:
            self._accumulation.agree_to_begin(self._check)
            self._accumulation.begin_pass()
        except BaseException:  # on every process, if they communicate here
            self._drop()
            raise
        self.is_in_pass = True
        _at_end_of_pass(self._end)

    def _check(self) -> None:
        assert self._optimizer is not None
        self._optimizer.state_offload.check("backward()", *TRAINING)
        if self._scales_loss:
            _check_scale(self._optimizer.cur_scale)

    def _accumulates(self) -> bool:
        """Whether the pass adds to gradients of parameters; `torch.autograd.grad` does not."""
        return any(map(_is_executed, self._accumulators))

    def _divide(self, grad: torch.Tensor) -> torch.Tensor | None:
        self._begin(grad)
        if not self.is_in_pass:
            return None
        num_micro_batches = 1 if _under_way.is_divided else self._counters.num_micro_batches
        factor = self._passes.loss_factor / num_micro_batches
        return None if factor == 1.0 else grad * factor

    def _end(self) -> None:
        assert self._optimizer is not None
        self.is_in_pass = False
        try:
            with self._accumulation.agreeing():
                self._optimizer.accumulate_gradients()
        except BaseException:
            self._drop()
            raise
        self._accumulation.end_pass()


def _is_executed(accumulator: Any) -> bool:
    """Whether the current pass reaches a parameter's node that adds to its gradient."""
    try:
        return torch._C._will_engine_execute_node(accumulator)
    except RuntimeError:  # torch.autograd.grad returns the gradient instead
        return False


def _weak_hook(method: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """A tensor hook that calls `method` while its object is alive: a tensor must not keep an engine alive."""
    reference = weakref.WeakMethod(method)

    @unserializable_hook
    def hook(grad: torch.Tensor) -> Any:
        living = reference()
        return None if living is None else living(grad)

    return hook


def _check_scale(scale: float) -> None:
    if scale in _under_way.scales:
        return
    if not _under_way.scales:
        raise ValueError(
            "backward(): fp16 needs the loss multiplied by the loss scale; call engine.backward(loss) or "
            "engine.scale(loss).backward()"
        )
    others = ", ".join(f"{other:g}" for other in sorted(_under_way.scales))
    raise ValueError(
        f"backward(): the loss was multiplied by another engine's loss scale {others} and not by this one's {scale:g}; "
        "give both the same fp16.loss_scale, or use bf16"
    )


def _at_end_of_pass(action: Callable[[], None]) -> None:
    """Calls `action()` at the end of the current backward pass, after actions that were queued before."""
    Variable._execution_engine.queue_callback(action)
