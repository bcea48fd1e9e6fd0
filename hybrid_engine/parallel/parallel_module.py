"""A module that runs by a plan: its parameters are this rank's parts, its forward is the planned graph.

Names of parameters and buffers are those of the module that it was made from.
"""

import copy
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import distribute_tensor
from torch.utils import _pytree as pytree

from hybrid_engine.distributed.verdict import agree
from hybrid_engine.parallel.compute_config import ComputeConfig
from hybrid_engine.parallel.graph.graph import Graph, build_graph
from hybrid_engine.parallel.graph.tracing import arguments_by_name
from hybrid_engine.parallel.lowering.layouts import parameter_layouts
from hybrid_engine.parallel.lowering.steps import Steps
from hybrid_engine.parallel.meshes import Meshes
from hybrid_engine.parallel.pipelining.pipeline import Pipeline, StageRunner
from hybrid_engine.parallel.pipelining.stage_ops import StageOps, divide
from hybrid_engine.parallel.planning.moving import Layout
from hybrid_engine.parallel.planning.plan import Plan


class ParallelModule(nn.Module):
    """What `parallelize` gives. `plan` and `compute_config` say how it runs; `plan` changes nothing any more.

    A sample with arguments of other shapes than before is traced once more, for which the plan holds too; `sample` are
    the arguments for which `plan` has the graph.
    """

    plan: Plan
    compute_config: ComputeConfig
    meshes: Meshes

    def __init__(self, module: nn.Module, plan: Plan, config: ComputeConfig, meshes: Meshes, sample: Mapping[str, Any]):
        super().__init__()
        self.plan, self.compute_config, self.meshes = plan, config, meshes
        layouts = parameter_layouts(plan.graph, plan)
        self.__dict__["_stages"] = stages = self._own_stages(plan.graph)
        names = None if stages is None else frozenset().union(*(stage.held for stage in stages.values()))
        parts = {
            id(p): part_of(p, meshes.unit, layouts.get(name))
            if names is None or name in names
            else nn.Parameter(torch.empty(0))
            for name, p in module.named_parameters()
        }
        held = copy.deepcopy(module, dict(parts))  # type: ignore[arg-type]
        if names is not None:
            self._leave_out(held, names)
        empty = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in module.parameters()}
        original = copy.deepcopy(module, {**empty, **{id(b): b.to("meta") for b in module.buffers()}})
        # Not a module of this one: it says how the module computes, and holds no weights.
        self.__dict__["_original"] = original
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = held.__dict__[name]
        self.training = module.training
        self.__dict__["_steps"] = {}
        self.__dict__["_pipelines"] = {}
        self.__dict__["_runner"] = None
        self.__dict__["_is_in_step"] = False
        self.__dict__["_graphs"] = {self._key(dict(sample)): plan.graph}

    def _own_stages(self, graph: Graph) -> dict[int, StageOps] | None:
        """The stages of this process by their numbers; None where there is one stage in all."""
        if not self.plan.stages:
            return None
        assert self.meshes.stages is not None
        first, size = self.meshes.stages.get_local_rank(), self.meshes.stages.size()
        stages = divide(graph, self.plan.stages)
        return {number: stages[number] for number in range(first, len(stages), size)}

    def _leave_out(self, held: nn.Module, names: Collection[str]) -> None:
        """Takes from the module the parameters and buffers of other stages."""
        for path, owner in held.named_modules():
            for tensors in (owner._parameters, owner._buffers):
                for name in list(tensors):
                    if tensors[name] is not None and self.canonical(f"{path}.{name}".lstrip(".")) not in names:
                        del tensors[name]

    def canonical(self, name: str) -> str:
        """The name that a parameter or buffer has in the plan's graph, the first one of those that are tied."""
        return self.plan.graph.aliases.get(name, name)

    def places(self) -> dict[str, int]:
        """The places of all parameters in the original module by name, those of other stages too."""
        return {name: place for place, (name, _) in enumerate(self._original.named_parameters())}

    def shared_by_stages(self) -> dict[tuple[int, ...], list[str]]:
        """By the processes of a pipeline that hold copies, the names of parameters that several stages read."""
        if not self.plan.stages:
            return {}
        assert self.meshes.stages is not None
        found: dict[tuple[int, ...], list[str]] = {}
        stages = divide(self.plan.graph, self.plan.stages)
        for name in self.plan.graph.of_kind("parameter"):
            holders = {number % self.meshes.stages.size() for number, s in enumerate(stages) if name in s.held}
            if len(holders) > 1:
                found.setdefault(tuple(sorted(holders)), []).append(name)
        return found

    def held(self) -> dict[str, Tensor]:
        """This process's parameters and buffers by their names in the graph."""
        named = [*self.named_parameters(remove_duplicate=False), *self.named_buffers(remove_duplicate=False)]
        return {self.canonical(name): tensor for name, tensor in named}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the original module's forward gives, whole on every process of the unit.

        ValueError for an end-to-end module, and where a buffer was never initialised.
        """
        if self._runner is not None:
            return self._runner(*args, **kwargs)
        if self.compute_config.use_end2end and not self._is_in_step:
            raise ValueError("an end-to-end module has no forward of its own; call train_step or infer_step")
        return self._run(*args, **kwargs)

    def _check_runs(self) -> None:
        """ValueError where there must be no forward pass now."""
        uninitialised = [name for name, buffer in self.named_buffers() if buffer.is_meta]
        if uninitialised:
            raise ValueError(f"buffers {uninitialised} were never initialised; load a state dict that has them")
        if self.compute_config.inference_only and torch.is_grad_enabled() and self.training:
            raise ValueError("inference_only=True: the module is never trained; call eval(), or change the config")

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self._check_runs()
        arguments = self._arguments(*args, **kwargs)
        steps, graph = self._steps_for(arguments)
        held = self.held()
        # The backward pass may yet read a buffer that is changed below, as that of a batch norm does.
        given = held | {name: held[name].clone() for name in graph.mutations}
        outputs, mutations = steps.run(given, inputs_of(graph, arguments))
        with torch.no_grad():
            for name, value in mutations.items():
                held[name].copy_(value)
        return pytree.tree_unflatten(outputs, graph.out_spec)

    def _arguments(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return arguments_by_name(self._original, args, kwargs)

    def _key(self, arguments: dict[str, Any]) -> Hashable:
        """What the graph depends on."""
        leaves, spec = pytree.tree_flatten(arguments)
        words = tuple((t.shape, t.dtype, t.device.type) if isinstance(t, Tensor) else t for t in leaves)
        return self.training, str(spec), words

    def _planned(self, arguments: dict[str, Any]) -> tuple[Plan, Graph]:
        key = self._key(arguments)
        if key not in self._graphs:
            self._original.train(self.training)
            self._graphs[key] = build_graph(self._original, arguments)
        return self.plan.for_graph(self._graphs[key]), self._graphs[key]

    def _steps_for(self, arguments: dict[str, Any]) -> tuple[Steps, Graph]:
        """The planned graph for arguments of these shapes; traced where they are new."""
        key = self._key(arguments)
        if key not in self._steps:
            plan, graph = self._planned(arguments)
            self._steps[key] = Steps(graph, plan, self.meshes.unit), graph
        return self._steps[key]

    def _pipeline_for(self, arguments: dict[str, Any]) -> tuple[Pipeline, Graph]:
        """The stages of this process for samples of these shapes."""
        key = self._key(arguments)
        if key not in self._pipelines:
            plan, graph = self._planned(arguments)
            stages = self._own_stages(graph) or {}
            runners = {n: StageRunner(graph, plan, self.meshes, stage, self.held) for n, stage in stages.items()}
            self._pipelines[key] = Pipeline(graph, plan, self.meshes, runners, self), graph
        return self._pipelines[key]

    def _through_stages(self, samples: Sequence[Any], loss: Callable[[Any, int], Tensor] | None) -> list[Any]:
        """The results of each sample, on all processes; with `loss`, their gradients are added up. Collective."""
        arguments, pipeline, graph = agree(lambda: self._prepared(samples))

        def loss_of(outputs: Sequence[Tensor | None], position: int) -> Tensor:
            assert loss is not None
            return loss(pytree.tree_unflatten(outputs, graph.out_spec), position)

        if len(pipeline.runners) == 1:
            self.__dict__["_runner"] = next(iter(pipeline.runners.values()))
        try:
            inputs = [inputs_of(graph, entry) for entry in arguments]
            results = pipeline.run(inputs, loss_of if loss is not None else None)
        finally:
            self.__dict__["_runner"] = None
        return [pytree.tree_unflatten(outputs, graph.out_spec) for outputs in results]

    def _prepared(self, samples: Sequence[Any]) -> tuple[list[dict[str, Any]], Pipeline, Graph]:
        if len(samples) != self.plan.num_micro_batches:
            raise ValueError(
                f"{len(samples)} samples are given; with stages there must be as many as pipeline_nmicros="
                f"{self.plan.num_micro_batches}"
            )
        arguments = [self._arguments(sample) for sample in samples]
        if len({self._key(entry) for entry in arguments}) > 1:
            raise ValueError("with stages all samples of a step must have the same shapes; pad them to one length")
        return arguments, *self._pipeline_for(arguments[0])

    def train_step(
        self,
        samples: Sequence[Any],
        is_dummy_batch: Sequence[bool] | None = None,
        scale_fn: Callable[[Tensor], Tensor] | None = None,
    ) -> list[Any]:
        """Forward and backward of each sample; gradients are zeroed first and summed. The results of each forward.

        Collective: an error of one process is raised on all, but where others wait for it in the middle of a pass, in
        layouts that change or ZeRO's gathers, which end with its process.

        `is_dummy_batch` says of each sample whether its loss counts with 0, so that all processes have as many;
        `scale_fn` makes of the loss of a sample what its backward pass starts from.
        """
        self._check_end_to_end("train_step")
        if self.compute_config.inference_only:
            raise ValueError("inference_only=True: train_step needs a plan for training; change the config")
        self._check_samples(samples, is_dummy_batch)
        self.zero_grad()

        def backward_from(result: Any, position: int) -> Tensor:
            loss = _loss_of(result)
            loss = loss if scale_fn is None else scale_fn(loss)
            return loss * 0 if is_dummy_batch and is_dummy_batch[position] else loss

        if self.plan.stages:
            return self._through_stages(samples, backward_from)
        if self.meshes.unit is None and not isinstance(self, FSDPModule):
            return agree(lambda: self._one_by_one(samples, backward_from))
        return self._one_by_one(samples, backward_from)

    def _one_by_one(self, samples: Sequence[Any], backward_from: Callable[[Any, int], Tensor]) -> list[Any]:
        results = []
        for position, sample in enumerate(samples):
            if isinstance(self, FSDPModule):
                self.set_requires_gradient_sync(position == len(samples) - 1)
            results.append(self._call(sample))
            backward_from(results[-1], position).backward()
        return results

    def infer_step(self, samples: Sequence[Any]) -> list[Any]:
        """The results of the forward pass of each sample."""
        self._check_end_to_end("infer_step")
        if self.plan.stages:
            return self._through_stages(samples, None)
        with torch.no_grad():
            return [self._call(sample) for sample in samples]

    def _call(self, sample: Any) -> Any:
        """The forward pass of an end-to-end module, through the hooks of FSDP2."""
        self.__dict__["_is_in_step"] = True
        try:
            return self(sample)
        finally:
            self.__dict__["_is_in_step"] = False

    def _check_end_to_end(self, name: str) -> None:
        if not self.compute_config.use_end2end:
            raise ValueError(f"{name} needs use_end2end=True; call the module, or set it in the compute config")

    def _check_samples(self, samples: Sequence[Any], is_dummy_batch: Sequence[bool] | None) -> None:
        if not samples:
            raise ValueError("samples=[] must have at least one; give a dummy batch where a process has none")
        if is_dummy_batch is not None and len(is_dummy_batch) != len(samples):
            raise ValueError(
                f"is_dummy_batch has {len(is_dummy_batch)} entries, samples {len(samples)}; give one for each"
            )


def part_of(parameter: nn.Parameter, unit: DeviceMesh | None, layout: Layout | None) -> nn.Parameter:
    """This process's part of a whole parameter, as a copy; all of it where a unit is one process. Collective."""
    if unit is None:
        return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    return nn.Parameter(distribute_tensor(parameter.detach(), unit, layout), parameter.requires_grad)


def inputs_of(graph: Graph, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors among the arguments of a forward pass by the names of their values."""
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    return dict(zip(graph.of_kind("input"), tensors, strict=True))


def _loss_of(result: Any) -> Tensor:
    """The first result of an end-to-end module."""
    loss = next((leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)), None)
    if loss is None or loss.dim():
        raise ValueError("the first result of an end-to-end module must be its loss, a tensor without dimensions")
    return loss
