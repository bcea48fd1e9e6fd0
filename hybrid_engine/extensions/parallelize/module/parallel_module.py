"""A module that runs by a plan: its parameters are this rank's parts, its forward is the planned graph.

`check_engine` says whether a training engine can train it.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree

from hybrid_engine.config import EngineConfig
from hybrid_engine.distributed.processes import gather_objects
from hybrid_engine.distributed.verdict import agree, everyone
from hybrid_engine.extensions.parallelize.graph.compute_config import (
    ComputeConfig,
    ValueRule,
    check,
    is_list_of,
    is_switch,
    shown,
    takes,
)
from hybrid_engine.extensions.parallelize.graph.graph import Graph, build_graph
from hybrid_engine.extensions.parallelize.graph.stage_ops import divide
from hybrid_engine.extensions.parallelize.graph.tracing import (
    arguments_by_name,
    check_takes_sample,
    copy_trace_state,
    trace_state,
)
from hybrid_engine.extensions.parallelize.module.held_module import HeldModule, Meshes, UnitPasses, check_same_input
from hybrid_engine.extensions.parallelize.module.reducer import OverlappingReducer
from hybrid_engine.extensions.parallelize.module.steps import Steps
from hybrid_engine.extensions.parallelize.planning.plan import Plan

MOST_GRAPHS = 32
"""Maximum number of graphs that a module keeps: those of the most recent shapes."""
SAMPLES = ValueRule(
    lambda value: isinstance(value, list | tuple), "a list of samples, each the first argument of forward"
)
SCALE = ValueRule(lambda value: takes(value, 1), "a callable of one argument, the loss, or None")
DUMMIES = ValueRule(lambda value: is_list_of(value, is_switch), "a list of True or False")
MOST_ZERO_WITH_STAGES = 1
"""A process keeps the gradients of all micro-batches of its stage, and reads its weights for each."""
MOST_AXES = 2
"""Maximum number of split axes of parameters that FSDP2 can shard further."""


class Latest(dict[Hashable, Any]):
    """A cache that keeps the entries of the most recently used keys."""

    def get_or(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The entry of `key`; `make` returns it if it is missing."""
        self[key] = self.pop(key) if key in self else make()
        if len(self) > MOST_GRAPHS:
            del self[next(iter(self))]
        return self[key]


class ParallelModule(HeldModule):
    """The result of `parallelize`. `plan` and `compute_config` describe it; changes to `plan` have no effect.

    A sample with arguments of new shapes is traced once more and runs under the same plan; so is the next sample after
    a change of modes or plain attributes of a submodule. `sample` has the arguments of the graph in `plan`.
    """

    compute_config: ComputeConfig
    joint_passes: UnitPasses | None
    """The passes of the processes over which ops are split; None if each process computes whole ops."""
    overlapping_reducer: OverlappingReducer | None = None
    """The reducer that sums gradients during the last backward pass of `train_step`; set by `build_optimizer`."""
    runs_graph = True

    def __init__(self, module: nn.Module, plan: Plan, config: ComputeConfig, meshes: Meshes, sample: Mapping[str, Any]):
        super().__init__(module, plan, meshes)
        self.compute_config = config
        self.joint_passes = None if meshes.unit is None else UnitPasses(meshes)
        self.__dict__["_steps"], self.__dict__["_is_in_step"] = Latest(), False
        # The graph is for another module or state if a factory returned another module, or if autocast differs here.
        is_of_this = trace_state(module) == plan.graph.trace_state
        self.__dict__["_graphs"] = Latest({self._key(dict(sample)): plan.graph} if is_of_this else {})

    def adopt(self, mesh: DeviceMesh) -> None:
        """Replaces the unit's mesh by `mesh`, which has the same processes in the same order."""
        super().adopt(mesh)
        if self.joint_passes is not None:
            self.joint_passes.adopt(mesh)
        self._steps.clear()

    def _remade_state(self) -> dict[str, Any]:
        return {
            **super()._remade_state(),
            "joint_passes": self.joint_passes,
            "overlapping_reducer": None,
            "_steps": Latest(),
            "_graphs": Latest(self.__dict__.get("_graphs", {})),
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the original module's forward, whole on every process of the unit.

        Raises ValueError for an end-to-end module, and if a buffer was never initialized.
        """
        if self.compute_config.use_end2end and not self._is_in_step:
            raise ValueError("an end-to-end module has no forward of its own; call train_step or infer_step")
        return self._run(*args, **kwargs)

    def together(self) -> AbstractContextManager[None]:
        """Context around a pass: an error inside is raised on all processes over which the ops are split."""
        return nullcontext() if self.joint_passes is None else self.joint_passes.together()

    def check_engine(self, config: EngineConfig) -> None:
        """Raises ValueError if an engine with this config cannot train the module; local."""
        check_graph(self.compute_config, self.unit_size)
        check_dtype(self.plan, config)
        check_options(self.compute_config, self.plan, config.zero_optimization.stage)

    def groups_of_holders(self) -> list[tuple[list[str], dist.ProcessGroup]]:
        """Names of parameters that several stages hold, with the group of the holders; collective."""
        return []

    def _check_runs(self) -> None:
        uninitialised = [name for name, buffer in self.named_buffers() if buffer.is_meta]
        if uninitialised:
            raise ValueError(f"buffers {uninitialised} were never initialised; load a state dict that has them")
        if self.compute_config.inference_only and torch.is_grad_enabled() and self.training:
            raise ValueError("inference_only=True: the module is never trained; call eval(), or change the config")

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        with self.together():
            self._check_runs()
            arguments = self._arguments(*args, **kwargs)
            self._check_same_input(arguments)
            steps, graph = self._steps_for(arguments)
            held, inputs = self.held(), graph.inputs_of(arguments)
            # The backward pass may still read a buffer that is changed below, for example in a batch norm.
            before = {name: (held | inputs)[name].clone() for name in graph.mutations}
            outputs, mutations = steps.run(_updated(held, before), _updated(inputs, before))
        for name, value in mutations.items():
            if name in inputs:
                inputs[name].copy_(value)
            else:
                with torch.no_grad():
                    held[name].copy_(value)
        return graph.result_of(outputs)

    def _check_same_input(self, arguments: Mapping[str, Any]) -> None:
        """Raises ValueError on all processes that compute this pass, unless all begin it alike.

        Inside torch.compile, which cannot trace process groups, nothing is compared.
        """
        if torch.compiler.is_compiling():
            return
        meshes = [mesh for mesh in (self.meshes.unit, self.meshes.stages) if mesh is not None]
        check_same_input(arguments, self, [group for mesh in meshes for group in mesh.get_all_groups()])

    def _arguments(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return arguments_by_name(self._original, args, kwargs)

    def _key(self, arguments: dict[str, Any]) -> Hashable:
        """The key of a graph: everything that it depends on."""
        leaves, spec = pytree.tree_flatten(arguments)
        words = tuple((t.shape, t.dtype, t.device.type) if isinstance(t, Tensor) else t for t in leaves)
        return trace_state(self), str(spec), words

    def _planned(self, arguments: dict[str, Any]) -> tuple[Plan, Graph]:
        def traced() -> Graph:
            copy_trace_state(self, self._original)
            return build_graph(self._original, arguments, self.compute_config.inference_only)

        graph = self._graphs.get_or(self._key(arguments), traced)
        return self.plan.for_graph(graph), graph

    def _steps_for(self, arguments: dict[str, Any]) -> tuple[Steps, Graph]:
        """The planned graph for arguments of these shapes; traced if they are new, or were not used for long."""

        def planned() -> tuple[Steps, Graph]:
            plan, graph = self._planned(arguments)
            return Steps(graph, plan, self.meshes.unit, folds=self.compute_config.constant_folding), graph

        return self._steps.get_or(self._key(arguments), planned)

    def train_step(
        self,
        samples: Sequence[Any],
        is_dummy_batch: Sequence[bool] | None = None,
        scale_fn: Callable[[Tensor], Tensor] | None = None,
    ) -> list[Any]:
        """Forward and backward of each sample; gradients are zeroed first and then summed. Returns the forward results.

        Collective: an error of one process is raised on all. If the others wait for it in the middle of a pass, because
        layouts change, all must be restarted then. In ZeRO's gathers they wait until its process ends.

        `is_dummy_batch` says for each sample whether its loss counts as 0, so that all processes can have equally many.
        `scale_fn` maps the loss of a sample to the value that its backward pass starts from.
        """
        if self.overlapping_reducer is not None:
            self.overlapping_reducer.check()
        with self.together():
            agree(lambda: self._check_train_step(samples, is_dummy_batch, scale_fn))
            self._check_counts(len(samples))
        self.zero_grad()

        def backward_from(result: Any, position: int) -> Tensor:
            loss = loss_of(result)
            loss = loss if scale_fn is None else scaled(loss, scale_fn)
            return loss * 0 if is_dummy_batch and is_dummy_batch[position] else loss

        return self._run_samples(samples, backward_from)

    def _overlapping(self, num_samples: int) -> AbstractContextManager[None]:
        if self.overlapping_reducer is None:
            return nullcontext()
        return self.overlapping_reducer.overlapping(num_samples, self._fails_on_all(), self._times_read())

    def _fails_on_all(self) -> bool:
        """Whether an error within a step is raised on all processes, which can continue after it."""
        return self.meshes.unit is None and not isinstance(self, FSDPModule)

    def _times_read(self) -> dict[int, int]:
        """Number of backward additions per sample to a parameter's gradient, keyed by the parameter's id.

        Parameters with one addition are left out.
        """
        return {}

    def _check_train_step(self, samples: Any, is_dummy_batch: Any, scale_fn: Any) -> None:
        self._check_end_to_end("train_step")
        if self.compute_config.inference_only:
            raise ValueError("inference_only=True: train_step needs a plan for training; change the config")
        check_samples(samples, is_dummy_batch, scale_fn)

    def _check_counts(self, num_samples: int) -> None:
        """Raises ValueError on all processes if those of one pass have different numbers of samples."""
        if everyone().highest([num_samples, -num_samples]) == [num_samples, -num_samples]:
            return
        counts = gather_objects(num_samples)
        size = self.compute_config.plan_ngpus
        units = [set(counts[start : start + size]) for start in range(0, len(counts), size)]
        if isinstance(self, FSDPModule) or any(len(unit) > 1 for unit in units):
            of_all = "all processes, whose gradients ZeRO sums in each pass,"
            who = of_all if isinstance(self, FSDPModule) else "the processes of one unit"
            raise ValueError(
                f"samples: the processes have {counts}, and {who} must have equally many; fill up with dummy "
                "batches (is_dummy_batch)"
            )

    def infer_step(self, samples: Sequence[Any]) -> list[Any]:
        """The results of the forward pass of each sample."""
        self._check_end_to_end("infer_step")
        check_samples(samples)
        return self._run_samples(samples, None)

    def _run_samples(self, samples: Sequence[Any], loss: Callable[[Any, int], Tensor] | None) -> list[Any]:
        """The results of each sample. With `loss`, a function of a result and its index, accumulates gradients."""
        if loss is None:
            with torch.no_grad():
                return [self._call(sample) for sample in samples]
        if self._fails_on_all():
            return agree(lambda: self._one_by_one(samples, loss))
        return self._one_by_one(samples, loss)

    def _one_by_one(self, samples: Sequence[Any], loss: Callable[[Any, int], Tensor]) -> list[Any]:
        results = []
        with self._overlapping(len(samples)):
            for position, sample in enumerate(samples):
                if isinstance(self, FSDPModule):
                    self.set_requires_gradient_sync(position == len(samples) - 1)
                with self.together():
                    results.append(self._call(sample))
                    loss(results[-1], position).backward()
        return results

    def _call(self, sample: Any) -> Any:
        self.__dict__["_is_in_step"] = True
        try:
            return self(sample)
        finally:
            self.__dict__["_is_in_step"] = False

    def _check_end_to_end(self, name: str) -> None:
        if not self.compute_config.use_end2end:
            raise ValueError(f"{name} needs use_end2end=True; call the module, or set it in the compute config")
        check_takes_sample(type(self._original if self.runs_graph else self))


def _updated(tensors: dict[str, Tensor], others: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: others.get(name, tensor) for name, tensor in tensors.items()}


def check_samples(samples: Any, is_dummy_batch: Any = None, scale_fn: Any = None) -> None:
    """Raises ValueError for arguments of `train_step` and `infer_step` of the wrong type, or of different lengths."""
    check("samples", samples, SAMPLES)
    if not samples:
        raise ValueError("samples=[] must have at least one; give a dummy batch where a process has none")
    if scale_fn is not None:
        check("scale_fn", scale_fn, SCALE)
    if is_dummy_batch is not None:
        check("is_dummy_batch", is_dummy_batch, DUMMIES)
        if len(is_dummy_batch) != len(samples):
            raise ValueError(
                f"is_dummy_batch has {len(is_dummy_batch)} entries, samples {len(samples)}; give one for each"
            )


def scaled(loss: Tensor, scale_fn: Callable[[Tensor], Tensor]) -> Tensor:
    """The value that the backward pass starts from; ValueError if `scale_fn` returned something without a gradient."""
    scaled = scale_fn(loss)
    if not isinstance(scaled, Tensor) or scaled.dim() or scaled.requires_grad != loss.requires_grad:
        raise ValueError(
            f"scale_fn gave {shown(scaled)}; it must give a tensor without dimensions that is computed from the loss"
        )
    return scaled


def loss_of(result: Any) -> Tensor:
    """The first result of an end-to-end module."""
    loss = next((leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)), None)
    if loss is None or loss.dim():
        raise ValueError("the first result of an end-to-end module must be its loss, a tensor without dimensions")
    return loss


def check_graph(config: ComputeConfig, unit_size: int) -> None:
    """Raises ValueError for a module whose traced graph runs on one process; local."""
    if unit_size == 1:
        raise ValueError(
            f"model: lowering={config.lowering!r} runs a traced graph, which a unit of one process has no use for; "
            "parallelize it with ComputeConfig(lowering='eager'), or pass the model itself"
        )
    check_end2end(config)


def check_end2end(config: ComputeConfig) -> None:
    """Raises ValueError for an end-to-end module; local."""
    if config.use_end2end:
        raise ValueError("model: use_end2end=True, whose forward is train_step's alone; leave it out")


def check_options(config: ComputeConfig, plan: Plan, stage: int) -> None:
    """Raises ValueError for options of `parallelize` that contradict ZeRO's stage, or an engine; local."""
    for name in ("use_async_reducer", "reducer_bucket_cap_mb"):
        if value := getattr(config, name):
            raise ValueError(
                f"model: {name}={value} is for build_optimizer; an engine reduces gradients by itself: leave it out"
            )
    if config.inference_only:
        raise ValueError("model: inference_only=True, and the engine trains; leave it out")
    check_axes(plan)
    if config.use_zero and stage == 0:
        raise ValueError(
            "model: use_zero=True and zero_optimization.stage=0 contradict each other; set stage 1, 2 or 3"
        )


def check_axes(plan: Plan) -> None:
    """Raises ValueError if a plan splits over more axes than an engine supports; local."""
    if len(plan.mesh) > MOST_AXES:
        raise ValueError(
            f"model: the plan splits over {list(plan.mesh)}, and an engine has at most {MOST_AXES} axes beside stages "
            "and units; give two of them together as one"
        )


def check_stages(plan: Plan, compute_config: ComputeConfig, config: EngineConfig) -> None:
    """Raises ValueError for stages that the engine cannot train; local."""
    zero = config.zero_optimization
    if plan.schedule == "1f1b_interleaved":
        raise ValueError(
            f"model: the plan has schedule={plan.schedule!r}, two stages a process, and an engine has one; take "
            "pipeline_scheduler='1f1b' or 'gpipe'"
        )
    if zero.stage > MOST_ZERO_WITH_STAGES:
        raise ValueError(
            f"zero_optimization.stage={zero.stage}: with the plan's {len(plan.stages)} stages it must be at most "
            f"{MOST_ZERO_WITH_STAGES}, every micro-batch reads a stage's whole weights; set 0 or 1"
        )
    graph = plan.graph
    trains = [bool(stage.held & graph.requires_grad) for stage in divide(graph, plan.stages)]
    if any(trains) and not all(trains):
        raise ValueError(
            f"model: all parameters of stage {trains.index(False)} are frozen, and an engine trains some on each "
            "process; leave some of them trained, name other stages, or train by build_optimizer and train_step"
        )
    if config.gradient_accumulation_steps != plan.num_micro_batches:
        num_samples = config.train_micro_batch_size_per_gpu * plan.num_micro_batches * compute_config.num_units
        raise ValueError(
            f"gradient_accumulation_steps={config.gradient_accumulation_steps} must be the plan's pipeline_nmicros="
            f"{plan.num_micro_batches}; set it, and train_batch_size={num_samples} for micro-batches of "
            f"{config.train_micro_batch_size_per_gpu}"
        )
    if not config.managed_gradient_accumulation:
        raise ValueError(
            "managed_gradient_accumulation=False: a step in stages is one train_batch() of pipeline_nmicros; leave it "
            "out"
        )


def check_dtype(plan: Plan, config: EngineConfig) -> None:
    """Raises ValueError if the engine would compute in another dtype than the traced graph."""
    values = plan.graph.of_kind("parameter").values()
    found = {value.dtype for value in values if value.dtype.is_floating_point}
    if found - {config.dtype}:
        raise ValueError(
            f"bf16, fp16: the engine computes in {config.dtype}, and the plan was made for parameters in "
            f"{', '.join(sorted(map(str, found)))}; pass module_dtype={config.dtype} to parallelize()"
        )
