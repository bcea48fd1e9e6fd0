"""A module whose plan has stages: this process holds the parameters of its stages, and samples run through all stages.

`StagedBatches` runs such a module in a training engine.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hybrid_engine.config import EngineConfig
from hybrid_engine.distributed.interrupts import restoring_modes
from hybrid_engine.distributed.verdict import agree
from hybrid_engine.extensions.parallelize.graph.graph import Graph
from hybrid_engine.extensions.parallelize.graph.stage_ops import StageOps, divide
from hybrid_engine.extensions.parallelize.lowering.pipeline import Pipeline, StageRunner
from hybrid_engine.extensions.parallelize.module import engine_checks
from hybrid_engine.extensions.parallelize.module.parallel_module import Latest, ParallelModule
from hybrid_engine.extensions.parallelize.module.reducer import Reducer
from hybrid_engine.optim.accumulation import Batches, LossFunction, loss_of, next_batches, split_batch
from hybrid_engine.optim.optimizer import ZeroOptimizer
from hybrid_engine.optim.state_offload import TRAINING

if TYPE_CHECKING:
    from hybrid_engine.engine.zero_engine import ZeroEngine


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

    def build_batches(self, optimizer: ZeroOptimizer | None) -> Batches:
        """Runs the micro-batches of an engine that trains this module, all of a step at once. Collective."""
        return StagedBatches(optimizer, self)

    def stages_of(self, path: str) -> frozenset[int]:
        """The stages that hold parameters of the original's module at `path`."""
        names = {self.canonical(f"{path}.{name}") for name, _ in self._original.get_submodule(path).named_parameters()}
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

    def run_batches(
        self, batches: Sequence[Any], loss: Callable[[Any, int], Tensor] | None, returns_results: bool = True
    ) -> list[Any]:
        """The results of `batches`, one per micro-batch, on all processes; with `loss`, gradients are accumulated.

        Each batch is a mapping of arguments of the original's forward by name, or its first argument. `loss` maps a
        result and its index to the value that the backward pass starts from, on the last stage. Without
        `returns_results` the list is empty. Collective; an error of one process is raised on all.
        """
        return self._run_together(
            lambda: [
                self._arguments(**batch) if isinstance(batch, Mapping) else self._arguments(batch) for batch in batches
            ],
            loss,
            returns_results,
        )

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


class StagedBatches:
    """Runs the micro-batches of one engine, all of a step at once. An error of one process is raised on all."""

    def __init__(self, optimizer: ZeroOptimizer | None, module: "StagedModule") -> None:
        """`optimizer` and `module`, in stages, are those of the engine; collective."""
        self._module = module
        self._reducers = []
        parameters = optimizer.parameters if optimizer is not None else []
        for names, group in module.groups_of_holders():
            shared = [t for t in parameters if self._module.canonical(t.name) in names]
            if shared and optimizer is not None:
                self._reducers.append(Reducer([t.param for t in shared], group))
                optimizer.norms.count_holders({t.name: dist.get_world_size(group) for t in shared})

    def train(self, engine: "ZeroEngine", batches: Iterable[Any], loss_fn: LossFunction | None) -> Tensor:
        """Runs the micro-batches through the stages, and the step. See `Batches`; an error drops gradients."""
        given = agree(lambda: self._checked(engine, batches))
        try:
            observed = engine.observer.forward(engine.counters.global_steps, True)
            with restoring_modes(), observed, engine.backward_hooks.own_pass(1.0):
                losses = self._run(engine, given, loss_fn)
        except BaseException:
            engine.drop_accumulation()
            engine.sharding.settle()
            raise
        with engine.observer.backward():
            engine.accumulation.end_pass()
        engine.counters.add_loss(losses.sum())
        engine.counters.num_pending_micro_batches = len(given) - 1
        engine.counters.micro_steps += len(given) - 1
        engine.step()
        return losses.mean()

    def evaluate(self, engine: "ZeroEngine", batches: Iterable[Any]) -> list[Any]:
        """The results of the last stage for each batch, on all processes of the unit. See `Batches`."""
        given = agree(lambda: next_batches(batches, engine.counters.num_micro_batches))
        return self._module.run_batches([split_batch(batch)[0] for batch in given], None)

    def _checked(self, engine: "ZeroEngine", batches: Iterable[Any]) -> list[Any]:
        engine.checks.check_whole("train_batch()", *TRAINING)
        engine.checks.check_parameters(engine.module)
        return next_batches(batches, engine.counters.num_micro_batches)

    def _run(self, engine: "ZeroEngine", batches: Sequence[Any], loss_fn: LossFunction | None) -> Tensor:
        """The losses `[micro-batches]` fp32, on all processes of the unit; accumulates their gradients."""
        optimizer = engine.optimizer
        assert optimizer is not None
        losses = torch.zeros(len(batches), device=engine.device)
        factor = engine.passes.loss_factor / len(batches)

        def scaled(result: Any, place: int) -> Tensor:
            loss = loss_of(result, split_batch(batches[place])[1], loss_fn)
            losses[place] = loss.detach()
            return optimizer.scale_loss(loss.float() * factor)

        engine.passes.expect_gradients(True)
        self._module.run_batches([split_batch(batch)[0] for batch in batches], scaled, returns_results=False)
        for reducer in self._reducers:
            reducer.reduce()
        optimizer.accumulate_gradients()
        stages = self._module.meshes.stages
        assert stages is not None
        dist.broadcast(losses, group_src=stages.size() - 1, group=stages.get_group())
        return losses
