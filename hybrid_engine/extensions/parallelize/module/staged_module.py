"""A module whose plan has stages: a process holds the parameters of its stages, and samples run through all stages.

Schedules and transfers are those of `torch.distributed.pipelining`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from hybrid_engine.config import EngineConfig
from hybrid_engine.distributed.processes import default_device
from hybrid_engine.distributed.verdict import agree, everyone
from hybrid_engine.extensions.parallelize.graph.annotations import local_shape
from hybrid_engine.extensions.parallelize.graph.graph import Graph
from hybrid_engine.extensions.parallelize.graph.stage_ops import StageOps, build_schedule, divide
from hybrid_engine.extensions.parallelize.module import parallel_module
from hybrid_engine.extensions.parallelize.module.held_module import Meshes, local_part
from hybrid_engine.extensions.parallelize.module.parallel_module import Latest, ParallelModule
from hybrid_engine.extensions.parallelize.module.reducer import Reducer
from hybrid_engine.extensions.parallelize.module.steps import Steps
from hybrid_engine.extensions.parallelize.planning.plan import Plan
from hybrid_engine.zero.split_module import BatchTraining

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
            shape = local_shape(value.shape, self.steps.layouts[key], self.mesh_sizes)
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


class _Stage(PipelineStage):
    """A stage whose backward pass continues with zeros after an error, which `runner` keeps."""

    runner: StageRunner

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
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


class StagedParallelModule(ParallelModule):
    """A `ParallelModule` in stages; `train_step`, `infer_step` or an engine's `train_batch` runs it."""

    def __init__(self, *parts: Any):
        """Takes the arguments of `ParallelModule`."""
        super().__init__(*parts)
        self.__dict__["_pipelines"], self.__dict__["_runner"] = Latest(), None

    def _remade_state(self) -> dict[str, Any]:
        return {**super()._remade_state(), "_pipelines": Latest(), "_runner": None}

    def _names_here(self) -> frozenset[str]:
        return frozenset().union(*(stage.held for stage in self._own_stages(self.plan.graph).values()))

    @property
    def unit_size(self) -> int:
        """Number of processes that compute this module together."""
        return self.compute_config.plan_ngpus

    @property
    def num_stages(self) -> int:
        """Number of consecutive groups of processes of a unit that hold stages."""
        assert self.meshes.stages is not None
        return self.meshes.stages.size()

    def adopt(self, mesh: DeviceMesh) -> None:
        """Replaces the unit's mesh by `mesh`, which has the same processes in the same order."""
        super().adopt(mesh)
        self._pipelines.clear()

    def check_engine(self, config: EngineConfig) -> None:
        """Raises ValueError if an engine with this config cannot train the module; local."""
        parallel_module.check_stages(self.plan, self.compute_config, config)
        parallel_module.check_dtype(self.plan, config)
        parallel_module.check_options(self.compute_config, self.plan, config.zero_optimization.stage)

    def stages_of(self, name: str) -> frozenset[int]:
        """The stages that hold parameters of the original's module, or the parameter, of that name."""
        every = [one for one, _ in self._original.named_parameters(remove_duplicate=False)]
        names = {self.canonical(one) for one in every if one == name or one.startswith(f"{name}.")}
        stages = divide(self.plan.graph, self.plan.stages)
        return frozenset(number for number, stage in enumerate(stages) if stage.held & names)

    def shared_by_stages(self) -> dict[tuple[int, ...], list[str]]:
        """Names of parameters that several stages read, keyed by the pipeline processes that hold copies."""
        found: dict[tuple[int, ...], list[str]] = {}
        stages = divide(self.plan.graph, self.plan.stages)
        for name in self.plan.graph.of_kind("parameter"):
            holders = {number % self.num_stages for number, stage in enumerate(stages) if name in stage.held}
            if len(holders) > 1:
                found.setdefault(tuple(sorted(holders)), []).append(name)
        return found

    def groups_of_holders(self) -> list[tuple[list[str], dist.ProcessGroup]]:
        """Names of parameters that several stages hold, with the group of the holders; collective."""
        found = []
        num_processes = self.unit_size // self.num_stages
        starts = range(0, self.compute_config.runtime_ngpus, self.compute_config.plan_ngpus)
        for stages, names in self.shared_by_stages().items():
            ranks = [
                [start + stage * num_processes + place for stage in stages]
                for start in starts
                for place in range(num_processes)
            ]
            if stages not in self.meshes.groups:
                self.meshes.groups[stages] = dist.new_subgroups_by_enumeration(ranks)[0]
            found.append((names, self.meshes.groups[stages]))
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs this process's stage for a micro-batch, inside a step; ValueError elsewhere."""
        return super().forward(*args, **kwargs) if self._runner is None else self._runner(*args, **kwargs)

    def _own_stages(self, graph: Graph) -> dict[int, StageOps]:
        assert self.meshes.stages is not None
        stages = divide(graph, self.plan.stages)
        return {
            number: stages[number]
            for number in range(self.meshes.stages.get_local_rank(), len(stages), self.num_stages)
        }

    def _fails_on_all(self) -> bool:
        return self.meshes.unit is None

    def _times_read(self) -> dict[int, int]:
        held = self.held()
        return Counter(id(held[name]) for stage in self._own_stages(self.plan.graph).values() for name in stage.held)

    def _run_samples(self, samples: Sequence[Any], loss: Callable[[Any, int], Tensor] | None) -> list[Any]:
        return self._run_together(lambda: [self._arguments(sample) for sample in samples], loss)

    def run_batches(self, batches: Sequence[Any], training: BatchTraining | None = None) -> list[Any]:
        """The results of `batches`, one per micro-batch, on all processes; with `training` their losses in fp32.

        Each batch is a mapping of arguments of the original's forward by name, or its first argument. Losses are
        computed on the last stage, and their gradients accumulated. Collective; an error of one process is raised on
        all.
        """

        def arguments() -> list[dict[str, Any]]:
            return [self._arguments(**one) if isinstance(one, Mapping) else self._arguments(one) for one in batches]

        if training is None:
            return self._run_together(arguments, None)
        losses = torch.zeros(len(batches), device=default_device())

        def scaled(result: Any, place: int) -> Tensor:
            loss = training.loss(result, place)
            losses[place] = loss.detach()
            return training.scale(loss)

        self._run_together(arguments, scaled, returns_results=False)
        for names, group in self.groups_of_holders():
            Reducer([p for name, p in training.parameters.items() if self.canonical(name) in names], group).reduce()
        assert self.meshes.stages is not None
        dist.broadcast(losses, group_src=self.num_stages - 1, group=self.meshes.stages.get_group())
        return list(losses.unbind())

    def _run_together(
        self,
        arguments_of: Callable[[], list[dict[str, Any]]],
        loss: Callable[[Any, int], Tensor] | None,
        returns_results: bool = True,
    ) -> list[Any]:
        with torch.set_grad_enabled(loss is not None):
            arguments, pipeline, graph = agree(lambda: self._prepared(arguments_of()))
            self._check_same_input(arguments[0])

        def loss_of(outputs: Sequence[Tensor | None], position: int) -> Tensor:
            assert loss is not None
            return loss(graph.result_of(outputs), position)

        if len(pipeline.runners) == 1:
            self.__dict__["_runner"] = next(iter(pipeline.runners.values()))
        try:
            inputs = [graph.inputs_of(entry) for entry in arguments]
            with self._overlapping(len(inputs)) if loss is not None else nullcontext():
                results = pipeline.run(inputs, loss_of if loss is not None else None, returns_results)
        finally:
            self.__dict__["_runner"] = None
        return [graph.result_of(outputs) for outputs in results]

    def _prepared(self, arguments: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], Pipeline, Graph]:
        if len(arguments) != self.plan.num_micro_batches:
            raise ValueError(
                f"{len(arguments)} samples are given; with stages there must be as many as pipeline_nmicros="
                f"{self.plan.num_micro_batches}"
            )
        self._check_runs()
        if len({self._key(entry) for entry in arguments}) > 1:
            raise ValueError("with stages all samples of a step must have the same shapes; pad them to one length")
        return arguments, *self._pipeline_for(arguments[0])

    def _pipeline_for(self, arguments: dict[str, Any]) -> tuple[Pipeline, Graph]:
        def made() -> tuple[Pipeline, Graph]:
            plan, graph = self._planned(arguments)
            folds = self.compute_config.constant_folding
            runners = {
                number: StageRunner(graph, plan, self.meshes, stage, self.held, self.together, folds)
                for number, stage in self._own_stages(graph).items()
            }
            return Pipeline(graph, plan, self.meshes, runners, self), graph

        return self._pipelines.get_or(self._key(arguments), made)
