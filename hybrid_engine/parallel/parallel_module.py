"""A module that runs by a plan: its parameters are this rank's parts, its forward is the planned graph.

Names of parameters and buffers are those of the module that it was made from.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import distribute_tensor
from torch.utils import _pytree as pytree

from hybrid_engine.parallel.compute_config import ComputeConfig
from hybrid_engine.parallel.graph.graph import Graph, build_graph
from hybrid_engine.parallel.lowering.layouts import Layout, parameter_layouts
from hybrid_engine.parallel.lowering.steps import Steps
from hybrid_engine.parallel.meshes import Meshes
from hybrid_engine.parallel.planning.plan import Plan


class ParallelModule(nn.Module):
    """What `parallelize` gives. `plan` and `config` say how it runs; `plan` changes nothing any more.

    A sample with arguments of other shapes than before is traced once more, for which the plan holds too.
    """

    plan: Plan
    config: ComputeConfig
    meshes: Meshes

    def __init__(self, module: nn.Module, plan: Plan, config: ComputeConfig, meshes: Meshes):
        super().__init__()
        self.plan, self.config, self.meshes = plan, config, meshes
        layouts = parameter_layouts(plan.graph, plan)
        parts = {id(p): self._part(p, layouts.get(name)) for name, p in module.named_parameters()}
        held = copy.deepcopy(module, dict(parts))  # type: ignore[arg-type]
        empty = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in module.parameters()}
        original = copy.deepcopy(module, {**empty, **{id(b): b.to("meta") for b in module.buffers()}})
        # Not a module of this one: it says how the module computes, and holds no weights.
        self.__dict__["_original"] = original
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = held.__dict__[name]
        self.training = module.training
        self.__dict__["_steps"] = {}
        self.__dict__["_is_in_step"] = False

    def _part(self, parameter: nn.Parameter, layout: Layout | None) -> nn.Parameter:
        if self.meshes.unit is None:
            return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        return nn.Parameter(distribute_tensor(parameter.detach(), self.meshes.unit, layout), parameter.requires_grad)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the original module's forward gives, whole on every process of the unit.

        ValueError for an end-to-end module, and where a buffer was never initialised.
        """
        if self.config.use_end2end and not self._is_in_step:
            raise ValueError("an end-to-end module has no forward of its own; call train_step or infer_step")
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        uninitialised = [name for name, buffer in self.named_buffers() if buffer.is_meta]
        if uninitialised:
            raise ValueError(f"buffers {uninitialised} were never initialised; load a state dict that has them")
        if self.config.inference_only and torch.is_grad_enabled() and self.training:
            raise ValueError("inference_only=True: the module is never trained; call eval(), or change the config")
        arguments = inspect.signature(self._original.forward).bind(*args, **kwargs).arguments
        arguments = _flat_arguments(self._original, arguments)
        steps, graph = self._steps_for(arguments)
        tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        held = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        outputs, mutations = steps.run(held, dict(zip(graph.of_kind("input"), tensors, strict=True)))
        with torch.no_grad():
            for name, value in mutations.items():
                held[name].copy_(value)
        return pytree.tree_unflatten(outputs, graph.out_spec)

    def _steps_for(self, arguments: dict[str, Any]) -> tuple[Steps, Graph]:
        """The planned graph for arguments of these shapes; traced where they are new."""
        leaves, spec = pytree.tree_flatten(arguments)
        words = tuple((t.shape, t.dtype) if isinstance(t, Tensor) else t for t in leaves)
        key = (self.training, str(spec), words)
        if key not in self._steps:
            self._original.train(self.training)
            graph = build_graph(self._original, arguments)
            plan = self.plan.for_graph(graph)
            self._steps[key] = Steps(graph, plan, self.meshes.unit), graph
        return self._steps[key]

    def train_step(
        self,
        samples: Sequence[Any],
        is_dummy_batch: Sequence[bool] | None = None,
        scale_fn: Callable[[Tensor], Tensor] | None = None,
    ) -> list[Any]:
        """Forward and backward of each sample; gradients are zeroed first and summed. The results of each forward.

        `is_dummy_batch` says of each sample whether its loss counts with 0, so that all processes have as many;
        `scale_fn` makes of the loss of a sample what its backward pass starts from.
        """
        self._check_end_to_end("train_step")
        if self.config.inference_only:
            raise ValueError("inference_only=True: train_step needs a plan for training; change the config")
        self._check_samples(samples, is_dummy_batch)
        self.zero_grad()
        results = []
        for position, sample in enumerate(samples):
            if isinstance(self, FSDPModule):
                self.set_requires_gradient_sync(position == len(samples) - 1)
            results.append(self._call(sample))
            loss = _loss_of(results[-1])
            loss = loss if scale_fn is None else scale_fn(loss)
            (loss * 0 if is_dummy_batch and is_dummy_batch[position] else loss).backward()
        return results

    def infer_step(self, samples: Sequence[Any]) -> list[Any]:
        """The results of the forward pass of each sample."""
        self._check_end_to_end("infer_step")
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
        if not self.config.use_end2end:
            raise ValueError(f"{name} needs use_end2end=True; call the module, or set it in the compute config")

    def _check_samples(self, samples: Sequence[Any], is_dummy_batch: Sequence[bool] | None) -> None:
        if not samples:
            raise ValueError("samples=[] must have at least one; give a dummy batch where a process has none")
        if is_dummy_batch is not None and len(is_dummy_batch) != len(samples):
            raise ValueError(
                f"is_dummy_batch has {len(is_dummy_batch)} entries, samples {len(samples)}; give one for each"
            )


def _flat_arguments(module: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, those of **kwargs beside the others."""
    kinds = inspect.signature(module.forward).parameters
    flat: dict[str, Any] = {}
    for name, value in arguments.items():
        if kinds[name].kind is inspect.Parameter.VAR_POSITIONAL:
            raise ValueError(f"forward(*{name}) of a parallel module takes arguments by name alone")
        flat |= value if kinds[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return flat


def _loss_of(result: Any) -> Tensor:
    """The first result of an end-to-end module."""
    loss = next((leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)), None)
    if loss is None or loss.dim():
        raise ValueError("the first result of an end-to-end module must be its loss, a tensor without dimensions")
    return loss
