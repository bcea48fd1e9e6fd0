"""Forward and backward passes of a sharded module: their collectives, and how an error ends them.

All processes together gather each parameter group and reduce its gradients, in one order. `sharding.py` describes where
the parameters are between two passes.

Some parameters get a gradient on some processes only, such as those of experts, or of branches of a model. FSDP2
concatenates and reduces the gradients that a group of parameters has on a process. If another process has gradients of
other parameters, a parameter would get the gradient of another one. So each process reduces all trained parameters of a
group, with zeros for missing gradients. At `step()` the processes agree which parameters none of them used: those have
no gradient, as in a plain loop, and no weight decay.

A whole layer that some processes leave out changes the order in which groups are reduced. So before a backward pass
that reduces, the processes compare which layers they used. If these differ, gradients wait for the end of the pass and
are then reduced in one order. At stage 3 each process must use every layer, because it gathers it with the others.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from hybrid_engine.config import EngineConfig
from hybrid_engine.distributed.processes import gather_objects, get_rank
from hybrid_engine.distributed.verdict import ErrorNotice, attempt, everyone
from hybrid_engine.zero.fsdp2_private import (
    drop_unreduced_gradients,
    finish_backward,
    fsdp_params,
    has_unreduced_gradients,
    keep_reduced_gradients,
    reduce_all_trained,
    reduce_unreduced_gradients,
    wholes,
)
from hybrid_engine.zero.gathered_parameters import WRITTEN
from hybrid_engine.zero.sharding import Sharding, TrainedParameter, make_gradients_equal
from hybrid_engine.zero.split_module import num_stages_of
from hybrid_engine.zero.unwrapping import EngineHook

Result = TypeVar("Result")


class GatheringOrder:
    """The order in which forward passes gather the parts of one sharded module, as recorded by this process."""

    def __init__(self, modules: Iterable[FSDPModule]) -> None:
        """Records the passes of `modules`, the outermost first, in the same order on every process."""
        self._modules = list(modules)
        self._passed: list[int] = []
        self._expected = list(range(len(self._modules)))
        """The modules that the last whole pass gathered; before the first pass, each module once."""
        self._hooks = [
            module.register_forward_pre_hook(EngineHook(partial(self._note, number)))
            for number, module in enumerate(self._modules)
        ]

    def _note(self, number: int, *unused: object) -> None:
        """Called after FSDP2 has gathered a module for its forward pass; ignores recomputation in a backward pass."""
        if not _is_in_backward():
            self._passed.append(number)

    def begin(self) -> None:
        """Before a pass."""
        self._passed = []

    def complete(self) -> None:
        """After a whole pass."""
        self._expected, self._passed = self._passed, []

    def gather_rest(self) -> None:
        """Joins the gathers of the modules that a pass did not reach here; layers are freed at once. Collective."""
        for number in self._expected[len(self._passed) :]:
            self._modules[number].unshard()
            if number > 0:  # the outermost may stay whole until the backward pass
                self._modules[number].reshard()

    def remove(self) -> None:
        """Stops recording."""
        for hook in self._hooks:
            hook.remove()


class JointForward:
    """Forward passes of one sharded module; each process learns whether the pass failed on another one."""

    def __init__(self, modules: Iterable[FSDPModule]) -> None:
        """`modules` as in `GatheringOrder`."""
        self._order = GatheringOrder(modules)

    def run(self, forward: Callable[[], Result]) -> Result:
        """The result of `forward`, a pass of the outermost module; collective, except inside a backward pass.

        Raises:
            BaseException: the error of this process, or of another one.
        """
        if _is_in_backward():
            return forward()
        self._order.begin()
        result, error = attempt(forward)
        if error is None:
            self._order.complete()
        else:
            attempt(self._order.gather_rest)
        everyone().raise_together(error)
        return result  # type: ignore[return-value]


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class Passes:
    """The passes of the module that `sharding` describes."""

    def __init__(self, sharding: Sharding, config: EngineConfig, trains: bool) -> None:
        """Starts to record which parts of the module its passes use; `trains`: some passes go backward."""
        self.sharding = sharding
        self.has_unreduced = False
        """Whether backward passes left gradients that are not reduced."""
        self._keeps_fp32_gradients = config.accumulation_dtype == torch.float32
        """Whether reduced gradients are accumulated in fp32; otherwise in the parameters' dtype."""
        self.loss_factor = 1.0 if sharding.mesh is None else loss_factor(config, sharding.mesh)
        """Factor of the loss, so that gradients are divided before they are added up; FSDP2 divides by the rest."""
        has_others = sharding.is_sharded and sharding.world_size > 1
        is_uneven = has_others and trains and num_stages_of(sharding.root) == 1
        self._uneven = UnevenGradients(sharding.named_fsdp_modules()) if is_uneven else None
        """Handles parameters that processes use differently; None for one process, and in stages, which run one
        graph.
        """
        self._joint_forward = JointForward(sharding.fsdp_modules()) if sharding.gathers_in_forward else None
        """Set if a forward pass gathers with other processes; else None."""

    @property
    def has_partners(self) -> bool:
        """Whether other processes train the module with this one."""
        return self._uneven is not None

    def forward_together(self, forward: Callable[[], Result]) -> Result:
        """Runs a forward pass; collective at stage 3, where an error of another process also ends the pass here."""
        if self._joint_forward is None:
            return forward()
        with self.ending_on_error():
            return self._joint_forward.run(forward)

    def expect_backward(self, is_expected: bool) -> None:
        """Sets whether a backward pass follows the next forward pass.

        At stage 3 it begins with the parameters outside the layers, so they then stay gathered in between: without
        this a step of 5M parameters on two processes took 1.10 times the CPU time of plain FSDP2, with it 1.03.
        """
        if self.sharding.frees_after_forward and isinstance(self.sharding.root, FSDPModule):
            self.sharding.root.set_reshard_after_forward(not is_expected, recurse=False)

    @contextmanager
    def ending_on_error(self) -> Iterator[None]:
        """An error in a forward or backward pass inside ends that pass and is raised, even if ending it fails."""
        try:
            yield
        except BaseException:
            attempt(self.end)  # a model that was changed cannot return to its shards
            raise

    def end(self) -> None:
        """Ends a pass with an error; otherwise FSDP2 would take the next one for its continuation."""
        if self._uneven is not None:
            self._uneven.forget_path()
        self.sharding.become_shards()

    def came_alike(self, error: BaseException | None = None) -> bool:
        """Whether a backward pass now reduces the groups in the same order on every process; collective.

        Raises:
            BaseException: `error`, which keeps this process from starting the pass, or the error of another one.
        """
        if self._uneven is not None:
            return self._uneven.came_alike(error)
        if error is not None:
            raise error
        return True

    def check_layers(self, alike: bool) -> None:
        """Raises ValueError at stage 3 unless `alike`: the processes used the same layers."""
        if not alike and self.sharding.gathers_in_forward:
            raise ValueError(
                "backward(): the processes came through different layers. At stage 3 each must use every layer, which "
                "it gathers with the others; use stage 0, 1 or 2"
            )

    def expect_gradients(self, reduces: bool) -> None:
        """Before each backward pass: sets whether it reduces the gradients or accumulates them locally."""
        self._set_reduces(reduces)
        self.has_unreduced = self.sharding.is_sharded and not reduces

    def _set_reduces(self, reduces: bool) -> None:
        if isinstance(self.sharding.root, FSDPModule):
            self.sharding.root.set_requires_gradient_sync(reduces)
            if self._keeps_fp32_gradients:
                keep_reduced_gradients(self.sharding.fsdp_modules(), torch.float32)

    @contextmanager
    def agreeing(self, reduces: bool) -> Iterator[None]:
        """Wraps a backward pass; at its end all processes learn about an error on one; collective.

        If it `reduces` gradients, a process with an error first joins the remaining reductions of the others.

        Raises:
            BaseException: the error of this process, or of another one.
        """
        if self._uneven is None:
            yield
            return
        error: BaseException | None = None
        try:
            yield
        except BaseException as failure:
            error = failure
        if reduces and error is None:
            self._uneven.end_pass()
        elif reduces:
            self._finish_pass()
        everyone().raise_together(error)

    def leave(self, problem: ErrorNotice, reduces: bool) -> None:
        """After a backward pass that failed here: reports it to the others at the end of theirs; collective."""
        if self._uneven is not None:
            if reduces:
                self._finish_pass()
            everyone().tell(problem)

    def _finish_pass(self) -> None:
        if self._uneven is not None and isinstance(self.sharding.root, FSDPModule):
            attempt(partial(self._uneven.finish_pass, self.sharding.root))

    def reduce_gradients(self) -> None:
        """Reduces the gradients that backward passes accumulated locally; collective."""
        if isinstance(self.sharding.root, FSDPModule):
            self._set_reduces(True)
            reduce_unreduced_gradients(self.sharding.root)
        self.has_unreduced = False

    def has_late_gradients(self) -> bool:
        """Whether gradients came after those of their layer were reduced, in a backward pass that reduces."""
        return has_unreduced_gradients(self.sharding.fsdp_modules())

    def drop_pending_gradients(self) -> None:
        """Drops the gradients that stages 0 and 1 hold unreduced between two boundaries."""
        drop_unreduced_gradients(self.sharding.fsdp_modules())
        self.has_unreduced = False
        if self._uneven is not None:
            self._uneven.forget()

    def drop_unused_gradients(
        self, parameters: list[TrainedParameter], error: BaseException | None
    ) -> BaseException | None:
        """Removes gradients that no process has, and makes gradients of scalars equal on all; collective.

        See `UnevenGradients.drop_unused` and `make_gradients_equal`.

        Returns:
            The reason why no process can step, or None: this process's `error`, or the error of another one.
        """
        error = error if self._uneven is None else self._uneven.drop_unused(parameters, error)
        if error is None and self.sharding.is_sharded:
            make_gradients_equal(parameters)
        return error


def loss_factor(config: EngineConfig, mesh: DeviceMesh) -> float:
    """The part of the division by the number of processes that is done before the sum."""
    if not config.prescale_gradients and config.gradient_predivide_factor == 1.0:
        return 1.0
    # Without a scatter FSDP2 divides twice by a custom factor, so the factor left to it must be 1.
    if config.prescale_gradients or mesh["fsdp"].size() == 1:
        return 1.0 / mesh.size()
    return 1.0 / config.gradient_predivide_factor


class UnevenGradients:
    """The agreements of the processes at each step of one sharded module."""

    def __init__(self, named_modules: Iterable[tuple[str, FSDPModule]]) -> None:
        """Makes groups reduce all trained parameters; `named_modules` are FSDP2's, in the same order everywhere."""
        modules = dict(named_modules)
        self._names = list(modules)
        self._modules = list(modules.values())
        self._used: set[int] = set()
        self._order: list[int] = []
        self._path: list[int] = []
        self._begun_at = 0  # start of the current pass in `_order`
        self._expected: list[int] = []  # order of the current or last pass
        reduce_all_trained(self._modules, self._note)
        for number, module in enumerate(self._modules):
            module.register_forward_pre_hook(EngineHook(partial(self._pass_through, number)))

    def _note(self, group: int, used: list[Any]) -> None:
        """Called before a group is reduced, with the records of its parameters that have a gradient here."""
        self._order.append(group)
        self._used.update(map(id, used))

    def _pass_through(self, number: int, *unused: Any) -> None:
        """Called before each forward pass of a module; ignores recomputation in a backward pass."""
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self._path.append(number)

    def forget(self) -> None:
        """Resets the records after the gradients were dropped."""
        self._used, self._order = set(), []

    def forget_path(self) -> None:
        """Drops the recorded forward passes, which no backward pass follows."""
        self._path = []

    def came_alike(self, error: BaseException | None = None) -> bool:
        """Whether all processes came through the same layers since the last backward pass; collective.

        Raises:
            BaseException: `error`, which keeps this process from starting the next pass, or the error of another one.
        """
        path, self._path = self._path, []
        number = zlib.crc32(repr(path).encode())
        lowest, highest, has_failed = everyone().highest([-number, number, int(error is not None)])
        if has_failed:
            everyone().raise_together(error)
        self._begun_at = len(self._order)
        if not self._expected:
            self._expected = list(dict.fromkeys([*reversed(path), *range(len(self._modules))]))
        return -lowest == highest

    def end_pass(self) -> None:
        """Records the order of a complete backward pass, which the next one is expected to have."""
        self._expected = self._order[self._begun_at :]

    def finish_pass(self, root: FSDPModule) -> None:
        """After an error in a backward pass: joins the remaining reductions of the other processes; collective."""
        done = self._order[self._begun_at :]
        rest = [self._modules[number] for number in self._expected if number not in done]
        if rest:  # else the error came after the pass
            finish_backward(root, rest)

    @torch.no_grad()
    def drop_unused(
        self, parameters: list[TrainedParameter], error: BaseException | None = None
    ) -> BaseException | None:
        """Removes the zeros of gradients that no process has; collective, once before each step.

        Returns:
            The reason why no process can step, or None: this process's `error`, or the error of another one; or that
            they reduced their layers in different orders, so that gradients are wrong, or wrote different values.
        """
        records = list(fsdp_params(self._modules))
        order = zlib.crc32(repr(self._order).encode())
        flags = [int(id(record) in self._used) for record in records]
        written = self._take_written()
        sums = zlib.crc32(repr(written).encode())
        numbers = [*flags, -order, order, -sums, sums, int(error is not None)]
        *used, lowest, highest, least_sums, most_sums, has_failed = everyone().highest(numbers)
        if has_failed:
            return everyone().exchange_errors(error)
        if highest != -lowest:
            return ValueError(self._describe_orders(gather_objects(self._order)))
        if most_sums != -least_sums:
            return ValueError(self._describe_written(gather_objects(written)))
        unused = {id(record.sharded_param) for record, is_used in zip(records, used, strict=True) if not is_used}
        for trained in parameters:
            if id(trained.param) in unused:
                trained.param.grad = trained.master.grad = None
        self._used, self._order = set(), []
        return None

    def _take_written(self) -> dict[int, int]:
        """Parameters that this process alone has changed since the last step, with the sums of their bits."""
        marks = [{} if whole is None else vars(whole) for whole in wholes(self._modules)]
        return {number: mark.pop(WRITTEN) for number, mark in enumerate(marks) if WRITTEN in mark}

    def _describe_written(self, sums: list[dict[int, int]]) -> str:
        number = min(n for one in sums for n in one if any(other.get(n) != one[n] for other in sums))
        shape = tuple(list(fsdp_params(self._modules))[number].sharded_param.shape)
        return (
            f"step(): the processes have written different values to a parameter of shape {shape} inside "
            "GatheredParameters, and each kept its own part. Nothing was stepped; set that parameter again, with "
            "modifier_rank= where one process writes for all"
        )

    def _describe_orders(self, orders: list[list[int]]) -> str:
        own = orders[get_rank()]
        other = next(rank for rank, order in enumerate(orders) if order != own)
        names = [[self._names[group] for group in order] for order in (own, orders[other])]
        layer = next((f"{mine!r} and {its!r}" for mine, its in zip(*names, strict=False) if mine != its), "the last")
        return (
            f"step(): backward() came through the layers in another order on rank {other} than on rank {get_rank()} "
            f"({layer} at the same place), so gradients were added to others'. A process may leave a layer out, but of "
            "one that it calls its loss must depend. Nothing was stepped"
        )
