"""A module that runs by a plan with its own code: tree, names and forward are the original's, and hooks change layouts.

It stays an instance of its class with all methods: a causal model also generates by its own `generate()`.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hybrid_engine.config import EngineConfig
from hybrid_engine.extensions.parallelize.lowering.borders import Border, borders_of
from hybrid_engine.extensions.parallelize.lowering.hooks import Hooks, sizes_on_parts
from hybrid_engine.extensions.parallelize.lowering.meshes import Meshes
from hybrid_engine.extensions.parallelize.module import engine_checks
from hybrid_engine.extensions.parallelize.module.held_module import part_of
from hybrid_engine.extensions.parallelize.module.joint_passes import JointPasses, check_same_input
from hybrid_engine.extensions.parallelize.module.parallel_module import Latest, ParallelModule
from hybrid_engine.extensions.parallelize.options.compute_config import ComputeConfig
from hybrid_engine.extensions.parallelize.planning.layouts import parameter_layouts, whole
from hybrid_engine.extensions.parallelize.planning.plan import Plan


class EagerModule(ParallelModule):
    """A `ParallelModule` that is lowered by hooks; its class also inherits from the original's class."""

    hooks: Hooks | None
    runs_graph = False

    # torch.compile would keep the parameters of the first call, which hooks exchange.
    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the original's forward, never compiled. An error in it is raised on all processes of the unit."""
        with self.together():
            if self.meshes.unit is not None:
                check_same_input((args, kwargs), self, self.meshes.unit.get_all_groups())
            return super().__call__(*args, **kwargs)

    def places(self) -> dict[str, int]:
        """The positions of all parameters by name."""
        return {name: place for place, (name, _) in enumerate(self.named_parameters())}

    def adopt(self, mesh: DeviceMesh) -> None:
        """Replaces the unit's mesh by `mesh`, which has the same processes in the same order."""
        super().adopt(mesh)
        if self.hooks is not None:
            self.hooks.mesh = mesh

    def original(self) -> nn.Module:
        """Returns this module, whose own forward runs."""
        return self

    def check_engine(self, config: EngineConfig) -> None:
        """Raises ValueError if an engine with this config cannot train the module; local."""
        engine_checks.check_end2end(self.compute_config)
        engine_checks.check_options(self.compute_config, self.plan, config.zero_optimization.stage)

    def _check_forward(self, *_: Any) -> None:
        """Runs before each forward: ValueError if none is allowed."""
        if self.compute_config.use_end2end and not self._is_in_step:
            raise ValueError("an end-to-end module has no forward of its own; call train_step or infer_step")
        self._check_runs()


class Carried:
    """A plan that hooks can carry out, with the hooks' changes, computed before anything is changed."""

    def __init__(self, module: nn.Module, arguments: Mapping[str, Any], plan: Plan):
        """Raises ValueError that names the op for a plan, or a module's code, that hooks cannot carry out."""
        is_split = max(plan.mesh) > 1
        self.borders: dict[str, Border] = borders_of(plan.graph, plan) if is_split or plan.stages else {}
        self.sizes = sizes_on_parts(module, arguments, plan, self.borders) if is_split else {}


def class_of(module_class: type[nn.Module], members: Mapping[str, Any] | None = None) -> type[EagerModule]:
    """The class of eager modules made from instances of `module_class`, with the same name."""
    found = {"forward": module_class.forward, "__module__": module_class.__module__, **(members or {})}
    return type(module_class.__name__, (EagerModule, module_class), found)


def lower_eagerly(
    module: nn.Module,
    plan: Plan,
    config: ComputeConfig,
    meshes: Meshes,
    carried: Carried,
    kind: type[EagerModule] | None = None,
) -> EagerModule:
    """A copy of `module` on this process's parts, of the class `kind`; collective."""
    layouts = parameter_layouts(plan.graph, plan)
    parts: dict[int, Any] = {
        id(p): part_of(p, meshes.unit, layouts.get(name, whole(plan))) for name, p in module.named_parameters()
    }
    held: Any = copy.deepcopy(module, parts)
    held.__class__ = kind or class_of(type(module))
    held.plan, held.compute_config, held.meshes = plan, config, meshes
    held.__dict__["_steps"], held.__dict__["_is_in_step"] = Latest(), False
    held.register_forward_pre_hook(held._check_forward)
    held.joint_passes = None if meshes.unit is None else JointPasses(meshes)
    held.hooks = None if meshes.unit is None else Hooks(held, meshes.unit, carried.borders, carried.sizes)
    return held  # type: ignore[no-any-return]
