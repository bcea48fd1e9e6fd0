"""Parameters that get a gradient on some processes only, such as those of experts, or of branches of a model.

FSDP2 concatenates and reduces the gradients that a group of parameters has on a process. If another process has
gradients of other parameters, a parameter would get the gradient of another one. So each process reduces all trained
parameters of a group, with zeros for missing gradients. At `step()` the processes agree which parameters none of them
used: those have no gradient, as in a plain loop, and no weight decay.

A whole layer that some processes leave out changes the order in which groups are reduced. So before a backward pass
that reduces, the processes compare which layers they used. If these differ, gradients wait for the end of the pass and
are then reduced in one order. At stage 3 each process must use every layer, because it gathers it with the others.
"""

import zlib
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from hybrid_engine.distributed.processes import gather_objects, get_rank
from hybrid_engine.distributed.verdict import everyone
from hybrid_engine.zero.fsdp2_private import finish_backward, fsdp_params, reduce_all_trained, wholes
from hybrid_engine.zero.gathered_parameters import WRITTEN
from hybrid_engine.zero.sharding import TrainedParameter
from hybrid_engine.zero.unwrapping import EngineHook


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
