"""A module whose plan has stages: a process holds the parameters of its stages, and samples run through all stages."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hybrid_engine.config import EngineConfig
from hybrid_engine.distributed.processes import default_device
from hybrid_engine.distributed.verdict import agree
from hybrid_engine.extensions.parallelize.graph.graph import Graph
from hybrid_engine.extensions.parallelize.graph.stage_ops import StageOps, divide
from hybrid_engine.extensions.parallelize.lowering.pipeline import Pipeline, StageRunner
from hybrid_engine.extensions.parallelize.module import engine_checks
from hybrid_engine.extensions.parallelize.module.parallel_module import Latest, ParallelModule
from hybrid_engine.extensions.parallelize.module.reducer import Reducer
from hybrid_engine.zero.split_module import BatchTraining


class StagedModule(ParallelModule):
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
        engine_checks.check_stages(self.plan, self.compute_config, config)
        engine_checks.check_dtype(self.plan, config)
        engine_checks.check_options(self.compute_config, self.plan, config.zero_optimization.stage)

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
        """The stages of this process by their numbers."""
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
        """The stages of this process for samples of these shapes."""

        def made() -> tuple[Pipeline, Graph]:
            plan, graph = self._planned(arguments)
            folds = self.compute_config.constant_folding
            runners = {
                number: StageRunner(graph, plan, self.meshes, stage, self.held, self.together, folds)
                for number, stage in self._own_stages(graph).items()
            }
            return Pipeline(graph, plan, self.meshes, runners, self), graph

        return self._pipelines.get_or(self._key(arguments), made)
