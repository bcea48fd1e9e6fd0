"""One step of a pipeline: every process has all samples, runs its stages, and receives the results of the last one.

An error in a stage's forward or backward pass, or in the loss function, does not stop its process, because others wait
for it: it sends zeros, and all processes raise the error at the end of the step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from hybrid_engine.distributed.processes import default_device
from hybrid_engine.distributed.verdict import everyone
from hybrid_engine.extensions.parallelize.graph.graph import Graph
from hybrid_engine.extensions.parallelize.graph.stage_ops import StageOps, build_schedule
from hybrid_engine.extensions.parallelize.lowering.meshes import Meshes
from hybrid_engine.extensions.parallelize.lowering.parts import local_part
from hybrid_engine.extensions.parallelize.lowering.steps import Steps
from hybrid_engine.extensions.parallelize.planning.moving import Layout
from hybrid_engine.extensions.parallelize.planning.plan import Plan

Inputs = Mapping[str, Tensor]
"""The tensors of one sample, by the names of their values."""
Outputs = list[Tensor | None]
"""The flattened results of the forward pass of one sample."""


class StageRunner(nn.Module):
    """One stage, as torch.distributed.pipelining calls it: once for each micro-batch, in order."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        meshes: Meshes,
        stage: StageOps,
        held: Callable[[], dict[str, Tensor]],
        together: Callable[[], AbstractContextManager[None]],
        folds: bool,
    ):
        """`together` is the context around each pass of the processes that share this stage.

        `folds` as in `Steps`.
        """
        super().__init__()
        self.together = together
        self.graph, self.mesh_sizes, self.stage, self.held = graph, plan.mesh, stage, held
        self.steps = Steps(graph, plan, meshes.unit, stage.ops, stage.sent, folds)
        self.samples: Sequence[Inputs] = ()
        self.keeps_outputs = True
        self.outputs: list[Outputs] = []
        self.error: Exception | None = None
        self.count = 0
        self.buffers: dict[str, Tensor] = {}
        """Buffers that this stage changes, as its last micro-batch left them. If several stages of a process change a
        buffer that depends on no parameter, each computes the same value.
        """

    def begin(self, samples: Sequence[Inputs], keeps_outputs: bool = True) -> None:
        """Sets the samples of the next step; `keeps_outputs`: keep the results of all samples until its end."""
        self.samples, self.keeps_outputs, self.outputs, self.error, self.count = samples, keeps_outputs, [], None, 0
        held = self.held()
        self.buffers = {name: held[name].clone() for name in self.stage.mutations}

    @torch.no_grad()
    def end(self) -> None:
        """Writes the buffers that the step changed into the module."""
        held = self.held()
        for name, value in self.buffers.items():
            held[name].copy_(value)

    def forward(self, *received: Tensor) -> tuple[Tensor, ...]:
        """The tensors for the next stage, or the tensor results of the last stage."""
        sample = self.samples[self.count]
        self.count += 1
        held: dict[str, Tensor] = {}
        try:
            with self.together():
                held = self.held()
                return self._run(sample, received, held)
        except Exception as error:
            self.error = self.error or error
            return self._zeros((*held.values(), *received))

    def _run(self, sample: Inputs, received: Sequence[Tensor], held: dict[str, Tensor]) -> tuple[Tensor, ...]:
        given = {**sample, **dict(zip(self.stage.received, received, strict=True))}
        values = self.steps.values(held | self.buffers, given)
        # New tensors, because the backward pass of an earlier micro-batch may still read the old values.
        self.buffers = self.steps.mutations(values, self.stage.mutations)
        if not self.stage.is_last:
            tensors = {key: values.tensors[key] for key in self.stage.sent}
            # A tensor that is only passed on must differ from the received one, to which the gradient is added.
            return tuple(_sendable(tensor, key in self.stage.received) for key, tensor in tensors.items())
        outputs = self.steps.outputs(values)
        if self.keeps_outputs:
            self.outputs.append([None if output is None else _sendable(output.detach(), True) for output in outputs])
        return tuple(output for output in outputs if output is not None)

    def _zeros(self, read: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Zeros in the shapes of the results, after an error; their gradients reach the tensors that are read here."""
        device, nothing = default_device(), _nothing_of(read)
        if not self.stage.is_last:
            zeros = [torch.zeros_like(tensor, device=device) for tensor in self.like(self.stage.sent)]
            return tuple(zero + nothing if zero.is_floating_point() else zero for zero in zeros)
        shown = [self.graph.values[key] for key in self.graph.outputs if key is not None]
        zeros = [torch.zeros(v.shape, dtype=v.dtype, device=device) for v in shown]
        self.outputs.append([None if key is None else zeros[0] for key in self.graph.outputs])
        return tuple(zero + nothing if zero.is_floating_point() else zero for zero in zeros)

    def like(self, keys: Sequence[str]) -> tuple[Tensor, ...]:
        """Empty tensors with the shapes of this process's parts of the tensors that cross a boundary."""
        found = []
        for key in keys:
            value = self.graph.values[key]
            shape = _local_shape(value.shape, self.mesh_sizes, self.steps.layouts[key])
            is_float = value.dtype.is_floating_point
            found.append(torch.empty(shape, dtype=value.dtype, device="meta", requires_grad=is_float))
        return tuple(found)


def _sendable(tensor: Tensor, must_be_another: bool) -> Tensor:
    """The tensor in contiguous memory, which sending requires; a copy if `must_be_another`."""
    return tensor.clone(memory_format=torch.contiguous_format) if must_be_another else tensor.contiguous()


def _nothing_of(tensors: Iterable[Tensor]) -> Tensor:
    """A zero whose backward pass gives zero gradients to all of `tensors`.

    FSDP2 then still reduces the gradients that other units wait for, and the previous stage receives gradients.
    """
    trained = [local_part(tensor) for tensor in tensors if tensor.requires_grad]
    return torch.zeros((), device=default_device(), requires_grad=True) + sum(t.sum() * 0 for t in trained)


def _local_shape(shape: Sequence[int], sizes: Sequence[int], layout: Layout) -> list[int]:
    local = list(shape)
    for size, placement in zip(sizes, layout, strict=True):
        if placement.is_shard():
            local[placement.dim] //= size  # type: ignore[attr-defined]
    return local


class _Stage(PipelineStage):
    """A stage whose backward pass continues with zeros after an error, which `runner` keeps."""

    runner: StageRunner

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """The gradients of the tensors that the stage received."""
        try:
            with self.runner.together():
                return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        except Exception as error:
            # PyTorch wraps the error in one that describes shapes.
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            self.runner.error = self.runner.error or cause
        nothing = _nothing_of((*self.submod.parameters(), *bwd_kwargs["input_values"]))
        zeros = {"stage_output": nothing, "output_grads": None, "input_values": bwd_kwargs["input_values"]}
        return super().backward_maybe_with_nosync(backward_type, zeros, last_backward)


class Pipeline:
    """The stages of this process for samples of one set of shapes."""

    def __init__(self, graph: Graph, plan: Plan, meshes: Meshes, runners: Mapping[int, StageRunner], owner: nn.Module):
        """`runners` are keyed by stage number. `owner`, the module, runs the only stage if FSDP2 has sharded it."""
        self.graph, self.plan, self.runners, self.owner = graph, plan, runners, owner
        assert meshes.stages is not None
        self.group = meshes.stages.get_group()
        self._loss: Callable[[Outputs, int], Tensor] = lambda outputs, position: torch.zeros(())
        self._schedules: dict[bool, Any] = {}

    def run(
        self,
        samples: Sequence[Inputs],
        loss: Callable[[Outputs, int], Tensor] | None,
        returns_outputs: bool = True,
    ) -> list[Outputs]:
        """The results of each sample, on all processes; with `loss`, gradients are accumulated. Collective.

        `loss` maps the results of a sample and its index to the value that the backward pass starts from. Without
        `returns_outputs` no results are kept, sent or returned. An error of one process is raised on all.
        """
        schedule = self._schedule(loss is not None)
        self._loss = loss or self._loss
        for runner in self.runners.values():
            runner.begin(samples, returns_outputs)
        places = torch.arange(len(samples))
        with torch.set_grad_enabled(loss is not None):
            step = schedule.step if loss is not None or self.plan.schedule != "1f1b_interleaved" else schedule.eval
            step(target=places, return_outputs=False)
        for runner in self.runners.values():
            runner.end()
        everyone().raise_together(next((r.error for r in self.runners.values() if r.error is not None), None))
        return self._everywhere(len(samples)) if returns_outputs else []

    def _schedule(self, has_backward: bool) -> Any:
        if has_backward not in self._schedules:
            stages = [self._stage(number, runner) for number, runner in self.runners.items()]
            is_single = self.plan.schedule != "1f1b_interleaved"
            loss_fn = None if is_single and not has_backward else self._loss_of
            self._schedules[has_backward] = build_schedule(
                self.plan.schedule, stages, self.plan.num_micro_batches, loss_fn
            )
        return self._schedules[has_backward]

    def _stage(self, number: int, runner: StageRunner) -> PipelineStage:
        stage = _Stage(
            self.owner if isinstance(self.owner, FSDPModule) else runner,
            number,
            len(self.plan.stages),
            default_device(),
            input_args=runner.like(runner.stage.received),
            output_args=runner.like(runner.stage.sent) if not runner.stage.is_last else self._output_shapes(),
            group=self.group,
        )
        stage.runner = runner
        return stage

    def _output_shapes(self) -> tuple[Tensor, ...]:
        shown = [self.graph.values[key] for key in self.graph.outputs if key is not None]
        return tuple(torch.empty(value.shape, dtype=value.dtype, device="meta") for value in shown)

    def _loss_of(self, outputs: Sequence[Tensor], place: Tensor) -> Tensor:
        given = iter(outputs)
        try:
            return self._loss([None if key is None else next(given) for key in self.graph.outputs], int(place))
        except Exception as error:
            runner = self.runners[len(self.plan.stages) - 1]
            runner.error = runner.error or error
            nothing = torch.zeros((), device=default_device(), requires_grad=True)
            return nothing + sum(output.sum() * 0 for output in outputs if output.requires_grad)

    def _everywhere(self, num_samples: int) -> list[Outputs]:
        """Sends the results of the last stage to all processes of the unit."""
        last = self.runners.get(len(self.plan.stages) - 1)
        source = dist.get_world_size(self.group) - 1
        results = []
        for place in range(num_samples):
            outputs: Outputs = []
            for position, key in enumerate(self.graph.outputs):
                value = None if key is None else self.graph.values[key]
                if value is None:
                    outputs.append(None)
                    continue
                found = last.outputs[place][position] if last is not None else None
                tensor = (
                    torch.empty(value.shape, dtype=value.dtype, device=default_device()) if found is None else found
                )
                dist.broadcast(tensor, group_src=source, group=self.group)
                outputs.append(tensor)
            results.append(outputs)
        return results
