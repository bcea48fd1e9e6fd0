"""A module as one process holds it: its parts of the parameters, the processes that share it, and their passes.

`HeldModule` is the base of `ParallelModule`. `UnitPasses` raises an error inside a pass of a unit on all its processes
within seconds. If a plan changes layouts, the processes of a unit communicate in the middle of forward and backward
passes. A process with an error would not reach the next collective, and the others would wait until the time limit.
Therefore it writes its error into the store of the process group. If the others do not stop too, as they do for bad
input, which all of them have, it closes its connections in the unit. The collectives that the others wait in then fail,
and they raise its error. The unit's processes are then at different points and must be restarted. Closing connections
interrupts waiting on gloo. NCCL collectives run on the device and do not notice it: there the wait ends at the time
limit.
"""

import copy
import time
import traceback
import weakref
import zlib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import _pytree as pytree

from hybrid_engine.distributed.groups import axis_name, close_groups, default_store, with_own_group
from hybrid_engine.distributed.processes import default_device, gather_objects
from hybrid_engine.distributed.verdict import LOST, Partners
from hybrid_engine.extensions.parallelize.graph.compute_config import ComputeConfig
from hybrid_engine.extensions.parallelize.graph.graph import without_weights
from hybrid_engine.extensions.parallelize.graph.tracing import PLAIN, copy_trace_state, plain_attributes
from hybrid_engine.extensions.parallelize.planning.layouts import Layout, parameter_layouts, split_order
from hybrid_engine.extensions.parallelize.planning.plan import Plan

_numbers_of_meshes: dict[Hashable, int] = {}
"""Number of meshes made, by layout."""
_world: list[dist.ProcessGroup] = []
"""The world group to which `_free` and `_numbers` belong."""
SECONDS_FOR_OTHERS = 3.0
"""Seconds that a stopped process waits for the others to stop too."""
LONGEST_WORDS = 500
# All processes of a unit make their modules in the same order.
_numbers = count()


@dataclass(frozen=True, kw_only=True)
class Meshes:
    """The meshes that contain this process; None for a mesh of one process."""

    unit: DeviceMesh | None = None
    """The processes that hold one stage of a unit, by the axes of the plan."""
    data: DeviceMesh | None = None
    """The processes that hold the same part in all units."""
    zero: DeviceMesh | None = None
    """The processes of `data` for ZeRO. With `zero_ngroups`, the axes are the groups and the units of one group."""
    stages: DeviceMesh | None = None
    """The processes that hold the same part in all stages of this unit."""
    groups: dict[Hashable, dist.ProcessGroup] = field(default_factory=dict)
    """Other groups of these processes, keyed by their purpose."""
    lease: "Lease | None" = None
    """As long as it exists, no other module uses the groups of these meshes."""


class Lease:
    """Meshes that the owner of this object uses; they become free when the object is deleted."""

    def __init__(self, key: Hashable, number: int, meshes: Meshes):
        self._end = weakref.finalize(self, _free.setdefault(key, {}).__setitem__, number, meshes)
        self._end.atexit = False

    def drop(self) -> None:
        """Records that the groups are closed and cannot be reused."""
        self._end.detach()


_free: dict[Hashable, dict[int, Meshes]] = {}
"""Meshes that no module uses, keyed by layout and by number; all processes number them alike."""


def build_meshes(plan: Plan, config: ComputeConfig) -> Meshes:
    """The meshes of this process: those of a deleted module, or new ones; collective."""
    if config.runtime_ngpus == 1:
        return Meshes()
    if _world != [dist.group.WORLD]:
        _world[:] = [dist.group.WORLD]
        _free.clear()
        _numbers_of_meshes.clear()
    # DTensor treats equal meshes as one, so that none made before a mesh was closed is used again.
    layout = (*plan.mesh, config.plan_ngpus, config.zero_ngroups)
    key = (default_device().type, axis_name(""), layout)
    free = set.intersection(*map(set, gather_objects(list(_free.get(key, {})))))
    if free:
        number = min(free)
        meshes = _free[key].pop(number)
    else:
        number = _numbers_of_meshes[layout] = _numbers_of_meshes.get(layout, 0) + 1
        meshes = _made(plan, config)
    return replace(meshes, lease=Lease(key, number, meshes))


def _made(plan: Plan, config: ComputeConfig) -> Meshes:
    num_processes = prod(plan.mesh)
    groups = {"groups": config.zero_ngroups, "members": config.num_units // config.zero_ngroups}
    units = groups if config.zero_ngroups > 1 else {"units": config.num_units}
    parts = {axis_name(f"part{axis}"): size for axis, size in enumerate(plan.mesh)}
    sizes = {**units, "stages": config.plan_ngpus // num_processes, **parts}
    mesh = init_device_mesh(default_device().type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    zero = mesh[tuple(units)] if config.num_units > 1 else None
    return Meshes(
        unit=with_own_group(mesh[tuple(parts)]) if num_processes > 1 else None,
        data=zero if zero is None or zero.ndim == 1 else zero._flatten("units"),
        zero=zero,
        stages=mesh["stages"] if sizes["stages"] > 1 else None,
    )


class HeldModule(nn.Module):
    """This process's parameters and buffers of a module, as `plan` divides them; base of all with a plan."""

    plan: Plan
    meshes: Meshes

    def __init__(self, module: nn.Module, plan: Plan, meshes: Meshes):
        super().__init__()
        self.plan, self.meshes = plan, meshes
        layouts = parameter_layouts(plan.graph, plan)
        names = self._names_here()
        parts = {
            id(p): part_of(p, meshes.unit, layouts.get(name))
            if names is None or name in names
            else nn.Parameter(torch.empty(0))
            for name, p in module.named_parameters()
        }
        held = copy.deepcopy(module, dict(parts))  # type: ignore[arg-type]
        if names is not None:
            leave_out(held, names, self.canonical)
        # Not submodules: the original says how the module computes, and holds no weights.
        self.__dict__["_original"], self.__dict__["_with_parts"] = without_weights(module), None
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = held.__dict__[name]
        self.training = module.training
        if has_extra_state(module):
            self.__class__ = type(type(self).__name__, (_WithExtraState, type(self)), {})

    def _names_here(self) -> frozenset[str] | None:
        """Names in the graph of the parameters and buffers that this process holds; None: all."""
        return None

    @property
    def unit_size(self) -> int:
        """Number of processes that compute this module together."""
        return 1 if self.meshes.unit is None else self.meshes.unit.size()

    @property
    def split_sizes(self) -> tuple[int, ...]:
        """Sizes of the axes over which parameters are split, outermost first."""
        return () if self.meshes.unit is None else self.plan.mesh

    @property
    def split_order(self) -> tuple[int, ...]:
        """The axes of `split_sizes`, the one over which most is split first."""
        return split_order(self.plan.graph, self.plan)[: len(self.split_sizes)]

    def canonical(self, name: str) -> str:
        """The name of a parameter or buffer in the plan's graph, which is the first one for tied ones."""
        return self.plan.graph.aliases.get(name, name)

    def places(self) -> dict[str, int]:
        """The positions of all parameters in the original module by name, including those of other stages."""
        return {name: place for place, (name, _) in enumerate(self._original.named_parameters())}

    def held(self) -> dict[str, Tensor]:
        """This process's parameters and buffers by their names in the graph."""
        named = [*self.named_parameters(remove_duplicate=False), *self.named_buffers(remove_duplicate=False)]
        return {self.canonical(name): tensor for name, tensor in named}

    def adopt(self, mesh: DeviceMesh) -> None:
        """Replaces the unit's mesh by `mesh`, which has the same processes in the same order.

        Optimizers and state dicts that were made before still have the old parts.
        """
        moved: dict[int, nn.Parameter] = {}
        for part in self.modules():
            for name, parameter in part._parameters.items():
                if isinstance(parameter, DTensor):
                    moved.setdefault(id(parameter), moved_to(parameter, mesh))
                    part._parameters[name] = moved[id(parameter)]
        self.meshes = replace(self.meshes, unit=mesh)

    def original(self) -> nn.Module:
        """The original module on meta, with the parameters and buffers that this process holds (the same objects).

        Always returns the same object, which changes its mode with this module. Its submodules are other objects than
        this module's and share their parameter dicts, so that changes by FSDP2 are visible in both.
        """
        if self._with_parts is None:
            self.__dict__["_with_parts"] = copy.deepcopy(self._original)
        original: nn.Module = self._with_parts
        for path, module in original.named_modules():
            held = self.get_submodule(path)
            if all(p is None or held._parameters[name] is not None for name, p in module._parameters.items()):
                module._parameters = held._parameters
            module._buffers.update((name, buffer) for name, buffer in held._buffers.items() if buffer is not None)
        copy_trace_state(self, original)
        return original

    def train(self, mode: bool = True) -> "HeldModule":
        """Sets the mode, also of the module that `original` returned."""
        if self.__dict__.get("_with_parts") is not None:
            self._with_parts.train(mode)
        super().train(mode)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "HeldModule":
        """A module with its own parameters and buffers, under the same plan over the same processes."""
        meshes = [mesh for mesh in vars(self.meshes).values() if mesh is not None]
        shared = (self.plan, self.meshes, *meshes, self.__dict__.get("_original"))
        memo |= {id(entry): entry for entry in shared if entry is not None}
        copied: HeldModule = object.__new__(type(self))
        memo[id(self)] = copied
        remade = self._remade_state()
        for name, value in self.__dict__.items():
            copied.__dict__[name] = remade[name] if name in remade else copy.deepcopy(value, memo)
        return copied

    def _remade_state(self) -> dict[str, Any]:
        """Attributes that a copy shares, or for which it gets new values."""
        return {"_with_parts": None}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises ValueError: a pickle of one process's parts is useless in another run."""
        raise ValueError(
            f"a parallel {type(self).__name__} is not pickled; save its state_dict(), or merge_state_dicts of all "
            "processes, and load that into a module that parallelize gives"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads this rank's `state_dict()`; ValueError for whole tensors where this module has parts."""
        own = self.state_dict()
        is_whole = {n for n, t in state_dict.items() if isinstance(t, Tensor) and not isinstance(t, DTensor)}
        for name in sorted(is_whole):
            if isinstance(own.get(name), DTensor):
                raise ValueError(
                    f"{name} is whole in the state dict, and in parts here; call load_merged_state_dicts(module, "
                    "state_dict), which divides it"
                )
        return super().load_state_dict(state_dict, strict, assign)


class _WithExtraState(HeldModule):
    """A module whose original has extra state in addition to tensors, which the original reads and sets."""

    def get_extra_state(self) -> Any:
        return self.original().get_extra_state()

    def set_extra_state(self, state: Any) -> None:
        """Sets the original's extra state. If this changes its numbers or strings, another graph is traced."""
        original = self.original()
        before = plain_attributes(original)
        original.set_extra_state(state)
        after = plain_attributes(original)
        self.__dict__.update((name, value) for name, value in after.items() if before.get(name, self) != value)


def has_extra_state(module: nn.Module) -> bool:
    """Whether the module's class keeps state in addition to tensors in state dicts."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def leave_out(held: nn.Module, names: Collection[str], canonical: Callable[[str], str]) -> None:
    """Sets the parameters and buffers of a module whose names in the graph are not in `names` to None."""
    for path, owner in held.named_modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and canonical(f"{path}.{name}".lstrip(".")) not in names:
                    tensors[name] = None


def part_of(parameter: nn.Parameter, unit: DeviceMesh | None, layout: Layout | None) -> nn.Parameter:
    """This process's part of a whole parameter, as a copy; all of it if a unit is one process. Collective."""
    if unit is None:
        return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    return nn.Parameter(distribute_tensor(parameter.detach(), unit, layout), parameter.requires_grad)


def moved_to(parameter: DTensor, mesh: DeviceMesh) -> nn.Parameter:
    """The same part of the same whole over another mesh; it shares the memory."""
    whole_size = {"shape": parameter.shape, "stride": parameter.stride()}
    moved = DTensor.from_local(parameter.detach().to_local(), mesh, parameter.placements, run_check=False, **whole_size)
    return nn.Parameter(moved, parameter.requires_grad)


class UnitPasses:
    """The passes of one module over the processes of a unit."""

    def __init__(self, meshes: Meshes):
        assert meshes.unit is not None, f"{meshes=}"
        self._meshes, self._lease = [meshes.unit], meshes.lease
        self._ranks: list[int] = meshes.unit.mesh.flatten().tolist()
        self._key = f"hybrid_engine/passes/{next(_numbers)}"
        self._num_errors = 0
        self._is_inside = False
        self._is_parted = False

    def adopt(self, mesh: DeviceMesh) -> None:
        """Adds another mesh of the same processes. DTensor may still use the groups of earlier, equal meshes."""
        self._meshes.append(mesh)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context around a pass or a part of one: an error inside is raised on all processes of the unit.

        Raises:
            RuntimeError: another process stopped, which is named; or one of them did in an earlier pass.
        """
        if self._is_inside:
            yield
            return
        if self._is_parted:
            raise RuntimeError("an error of one process has parted those that compute this module; start them again")
        self._is_inside = True
        try:
            yield
        except BaseException as error:
            self._stop(error)
            raise
        finally:
            self._is_inside = False

    def _stop(self, error: BaseException) -> None:
        """Tells the other processes about the error, and closes the connections if they do not stop too."""
        lost = isinstance(error, RuntimeError) and any(words in str(error) for words in LOST)
        number, self._num_errors = self._num_errors, self._num_errors + 1
        store = dist.PrefixStore(f"{self._key}/{number}", default_store())
        me = dist.get_rank()
        store.set(f"lost {me}" if lost else str(me), f"{type(error).__name__}: {error}"[:LONGEST_WORDS])
        others = [str(rank) for rank in self._ranks if rank != me]
        end = time.monotonic() + SECONDS_FOR_OTHERS
        while not (came := [rank for rank in others if store.check([rank])]) or (len(came) < len(others) and not lost):
            if time.monotonic() > end:
                break
            time.sleep(0.02)
        if len(came) == len(others) and not lost:
            return
        self._is_parted = True
        words = [f"rank {rank}: {store.get(rank).decode()}" for rank in came]
        silent = [rank for rank in others if rank not in came and not store.check([f"lost {rank}"])]
        words += [f"rank {rank} is gone, or never came" for rank in silent]
        if self._lease is not None:
            self._lease.drop()
        traceback.clear_frames(error.__traceback__)
        for mesh in self._meshes:
            close_groups(mesh)
        if lost and words:
            raise RuntimeError(
                f"{'; '.join(words)}; the {len(self._ranks)} processes of a unit are in different places now: "
                "start them again"
            ) from error


def check_same_input(arguments: Any, module: nn.Module, groups: Sequence[dist.ProcessGroup]) -> None:
    """Raises ValueError on all processes that compute one pass of `module` unless they begin it alike; collective.

    `groups` are those along each axis of these processes. Different shapes, numbers among `arguments` or modes would
    make the processes' collectives or ops differ in the middle of the pass. The values of tensors are not compared.
    """
    partners = [Partners(size=dist.get_world_size(g), rank=dist.get_rank(g), group=g) for g in groups]
    own = _beginning(arguments, module)
    number = zlib.crc32(repr(own).encode())
    highest = [number, -number]
    for along_axis in partners:
        highest = along_axis.highest(highest)
    if highest[0] == -highest[1]:
        return
    given = [own]
    for along_axis in partners:
        given = [entry for entries in along_axis.exchange(given) for entry in entries]
    what, values = next((what, said) for what in own if len(said := dict.fromkeys(entry[what] for entry in given)) > 1)
    raise ValueError(
        f"the processes of a unit are given {what} {' and '.join(values)}; give all of a unit the same input"
    )


def _beginning(arguments: Any, module: nn.Module) -> dict[str, str]:
    leaves = pytree.tree_leaves(arguments)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    num_training, is_recorded = sum(part.training for part in module.modules()), torch.is_grad_enabled()
    return {
        "tensors of shapes": str([list(tensor.shape) for tensor in tensors]),
        "tensors of dtypes": str([str(tensor.dtype) for tensor in tensors]),
        "other arguments": str([leaf for leaf in leaves if leaf is None or type(leaf) in PLAIN]),
        "modes": f"({num_training} parts in training, gradients {'on' if is_recorded else 'off'})",
    }


def local_part(tensor: Tensor) -> Tensor:
    """This process's part, which shares the tensor's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
