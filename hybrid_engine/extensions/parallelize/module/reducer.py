"""Sums gradients over units, whose processes computed different inputs, after or during the backward pass.

`build_optimizer` makes the reducers and records by `GradientSums` which gradients are sums already; `train_step` runs
an `OverlappingReducer` around its backward passes.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybrid_engine.distributed.verdict import attempt, everyone
from hybrid_engine.extensions.parallelize.module.held_module import local_part

Hook = Callable[["GradientBucket", Tensor], None]
TRAINED = "_is_trained_by_build_optimizer"
"""Attribute that is set on parameters of an optimizer of `build_optimizer`."""


class GradientBucket:
    """Parameters whose gradients are summed together over one group of processes, and the hooks that see them.

    An error in a hook does not stop a sum, in which other processes would wait for this one. It is kept for
    `take_error`, and sums since then are not usable.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None):
        self.parameters, self.group = list(parameters), group
        self.pre_hooks: list[Hook] = []
        self.post_hooks: list[Hook] = []
        self.error: BaseException | None = None

    @property
    def may_fail(self) -> bool:
        """Whether an error can occur on this process alone."""
        return bool(self.pre_hooks or self.post_hooks)

    def run_hooks(self, hooks: Sequence[Hook], gradients: Tensor) -> None:
        """Calls the hooks with `gradients`, which they may change in place; calls none while an error is kept."""
        self.keep_error(lambda: [hook(self, gradients) for hook in hooks])

    def keep_error(self, action: Callable[[], object]) -> None:
        """Runs `action`, which must be local, and keeps its error; does nothing if an error is already kept."""
        if self.error is None:
            _, self.error = attempt(action)

    def drop(self) -> None:
        """Forgets the kept error when gradients are dropped or zeroed; sums that have begun are discarded."""
        self.error = None

    def take_error(self) -> BaseException | None:
        """Returns the kept error and clears it; the caller raises it on all processes."""
        error, self.error = self.error, None
        return error


class Reducer(GradientBucket):
    """Parameters whose gradients are summed after the backward pass by processes that all hold the same parts."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None, bucket_bytes: float = float("inf")
    ):
        """A collective takes gradients of one dtype of up to `bucket_bytes`, but at least one parameter."""
        super().__init__(parameters, group)
        self.sums = [FlatSum(bucket) for bucket in in_buckets(self.parameters, bucket_bytes)]

    @property
    def is_seen(self) -> bool:
        """Whether the flat copies of gradients are used, by other processes or hooks."""
        return self.group is not None or bool(self.pre_hooks or self.post_hooks)

    def reduce(self) -> None:
        """Sums the gradients in place; a gradient that a process lacks counts as 0.

        A gradient that all processes lack stays None: optimizers then leave the parameter unchanged. Hooks get the
        gradients of each collective as one flat tensor, before and after it. All collectives run, even if `error` is
        kept.
        """
        for flat_sum in self.sums if self.is_seen else ():
            if not flat_sum.is_begun:
                flat_sum.begin(self)
            flat_sum.end(self)


class FlatSum:
    """The sum of the gradients of some parameters of one dtype, by one collective over a flat copy of them."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self.parameters = list(parameters)
        self._given: list[Tensor] = []
        self._flat = torch.empty(0)
        self._versions: list[int] = []
        self._work: dist.Work | None = None

    @property
    def is_begun(self) -> bool:
        """Whether a sum has begun and its result was not yet used."""
        return bool(self._given)

    @torch.no_grad()
    def begin(self, reducer: Reducer, runs_hooks: bool = True) -> None:
        """Begins to sum a flat copy of the gradients over the group of `reducer`, after its pre-hooks."""
        is_there = [p.grad is not None for p in self.parameters]
        given = [gradient_of(p) for p in self.parameters]
        parts = [local_part(gradient) for gradient in given]
        flags = torch.tensor(is_there, dtype=parts[0].dtype, device=parts[0].device)
        flat = torch.cat([*(part.flatten() for part in parts), flags])
        if runs_hooks:
            reducer.run_hooks(reducer.pre_hooks, flat[: -len(parts)])
        self._given, self._flat, self._versions = given, flat, [gradient._version for gradient in given]
        if reducer.group is not None:
            self._work = dist.all_reduce(flat, group=reducer.group, async_op=True)

    def drop(self) -> None:
        """Waits for the sum, and leaves the gradients unchanged."""
        try:
            self._wait()
        finally:
            self._given, self._flat = [], torch.empty(0)

    def _wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()

    @torch.no_grad()
    def end(self, reducer: Reducer) -> None:
        """Writes the sums into the gradients that `begin` read, after the post-hooks, unless there is an error."""
        try:
            self._wait()
            reducer.run_hooks(reducer.post_hooks, self._flat[: -len(self.parameters)])
            if reducer.error is None:
                self._give()
        finally:
            self._given, self._flat = [], torch.empty(0)

    def check_unchanged(self) -> None:
        """Raises ValueError if a gradient was changed after `begin` read it."""
        for parameter, given, version in zip(self.parameters, self._given, self._versions, strict=True):
            if parameter.grad is not None and (parameter.grad is not given or given._version != version):
                raise ValueError(
                    f"use_async_reducer=True: the gradient of a parameter of shape {list(parameter.shape)} was changed "
                    "after train_step, which had begun to sum it over units; call sync_shard_grad() before it"
                )

    def _give(self) -> None:
        gradients, counts = self._flat[: -len(self.parameters)], self._flat[-len(self.parameters) :]
        parts = [local_part(gradient) for gradient in self._given]
        sums = gradients.split([part.numel() for part in parts])
        for part, summed in zip(parts, sums, strict=True):
            part.copy_(summed.view_as(part))
        for parameter, given, count in zip(self.parameters, self._given, counts.tolist(), strict=True):
            if count == 0 and parameter.grad is given:
                parameter.grad = None


def in_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: float) -> list[list[nn.Parameter]]:
    """The parameters in buckets of one dtype. The first has the last parameters, whose gradients come first."""
    buckets: list[list[nn.Parameter]] = []
    filling: dict[torch.dtype, list[nn.Parameter]] = {}
    num_bytes: dict[torch.dtype, int] = {}
    for parameter in reversed(parameters):
        dtype, size = parameter.dtype, local_part(parameter).nbytes
        if dtype not in filling or num_bytes[dtype] + size > bucket_bytes:
            filling[dtype], num_bytes[dtype] = [], 0
            buckets.append(filling[dtype])
        filling[dtype].append(parameter)
        num_bytes[dtype] += size
    return [bucket[::-1] for bucket in buckets]


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """The gradient; sets it to zeros if the backward pass made none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class OverlappingReducer(Reducer):
    """A reducer that begins to sum a bucket as soon as the last backward pass of a step has made its gradients.

    Buckets begin in the same order on all processes, regardless of the order of their gradients. Buckets with gradients
    that are missing at the end of the step begin then. Pre-hooks run inside the backward pass.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None, bucket_bytes: float):
        super().__init__(parameters, group, bucket_bytes)
        self._num_begun = 0  # buckets whose sums were not used yet
        self._passes_left: dict[int, int] = {}  # inside a step, by id of the parameter
        self._place_of = {id(p): place for place, one in enumerate(self.sums) for p in one.parameters}
        self._error: Exception | None = None  # of this step, raised at its end at the latest; nothing begins after it
        self._is_lost = False
        note = weakref.WeakMethod(self._note)
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(lambda p: None if note() is None else note()(p))  # type: ignore[misc]

    @property
    def may_fail(self) -> bool:
        """Whether an error can occur on this process alone; True, as user code may change a gradient meanwhile."""
        return True

    def check(self) -> None:
        """Raises RuntimeError if an earlier step failed on this process and not on all; local."""
        if self._is_lost:
            raise RuntimeError("an error in an earlier train_step has parted the units; start all processes again")

    @contextmanager
    def overlapping(
        self, num_passes: int, fails_on_all: bool, times: Mapping[int, int] | None = None
    ) -> Iterator[None]:
        """Context around the `num_passes` backward passes of a step, whose gradients are summed in the last one.

        `times` maps the id of a parameter to the number of times that each pass adds to its gradient, if it is not one.
        `fails_on_all`: an error inside is raised on all processes of the group, so that all can continue after it.
        Otherwise those that wait for this process wait until it ends, and it must not continue.
        """
        self.drop()
        times, self._error = times or {}, None
        self._passes_left = {id(p): num_passes * times.get(id(p), 1) for p in self.parameters}
        try:
            yield
            self._begin_rest()
            if self._error is not None:
                raise self._error
        except BaseException:
            self._is_lost = not fails_on_all and self.group is not None
            if fails_on_all:
                self._begin_rest(runs_hooks=False)
                self.drop()
            raise
        finally:
            self._passes_left = {}

    def reduce(self) -> None:
        """Sums the gradients in place, as every reducer does; waits for the sums that have begun.

        A ValueError is kept if a gradient was changed after its sum began.
        """
        self._begin_rest()
        for begun in self.sums:
            if begun.is_begun:
                self.keep_error(begun.check_unchanged)
        super().reduce()
        self._num_begun = 0

    def drop(self) -> None:
        """Waits for the sums that have begun, and leaves the gradients unchanged."""
        super().drop()
        for begun in self.sums[: self._num_begun]:
            begun.drop()
        self._num_begun = 0

    def _note(self, parameter: nn.Parameter) -> None:
        """Runs after a backward pass has added to the gradient of `parameter`.

        Within a step this raises only errors that keep a sum from beginning, such as too little memory: passes of
        several stages continue to their end together.
        """
        if self._place_of[id(parameter)] < self._num_begun:
            error = ValueError(
                "use_async_reducer=True: a backward pass adds to a gradient that is being summed over units since the "
                "last pass of train_step, in which a reentrant checkpoint may add to it twice; leave use_async_reducer "
                "out, or step before it"
            )
            if not self._passes_left:
                raise error
            self._error = self._error or error
        elif id(parameter) in self._passes_left:
            self._passes_left[id(parameter)] -= 1
            try:
                while self._num_begun < len(self.sums) and self._is_complete(self.sums[self._num_begun].parameters):
                    self._begin_next()
            except Exception as error:
                self._error = error
                raise

    def _is_complete(self, parameters: Sequence[Tensor]) -> bool:
        return self._error is None and all(self._passes_left[id(parameter)] == 0 for parameter in parameters)

    def _begin_next(self, runs_hooks: bool = True) -> None:
        if self.is_seen:
            self.sums[self._num_begun].begin(self, runs_hooks)
        self._num_begun += 1

    def _begin_rest(self, runs_hooks: bool = True) -> None:
        while self._num_begun < len(self.sums):
            self._begin_next(runs_hooks)


class GradientSums:
    """The gradients that one optimizer has summed."""

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter], summed: Iterable[nn.Parameter]):
        """`parameters` are the optimizer's; `summed` are those whose gradients a `Reducer` sums over processes."""
        self._module, self._parameters = module, parameters
        self._summed: list[weakref.ref[Tensor] | None] | None = None
        self._stepped: list[int | None] | None = None  # versions of the gradients after the step that used them
        self._sums: dict[int, weakref.ref[Tensor]] = {}
        self._terms: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # gradients to sum, and their versions
        self._is_grown = False
        self._half_summed: list[weakref.ref[Tensor] | None] = []
        for parameter in parameters:
            setattr(parameter, TRAINED, True)
        note = weakref.WeakMethod(self._note)
        for parameter in summed:
            parameter.register_post_accumulate_grad_hook(lambda p: None if note() is None else note()(p))  # type: ignore[misc]

    @property
    def are_there(self) -> bool:
        """Whether the gradients are still those that were summed last; a later backward pass makes new ones.

        A sum that is changed before the step, for example by clipping, still counts as a sum. If it is changed after
        the step, it counts as a new term.
        """
        if self._summed is None or self._is_grown or self._stepped not in (None, self._versions()):
            return False
        found = [None if ref is None else ref() for ref in self._summed]
        return all(p.grad is gradient for p, gradient in zip(self._parameters, found, strict=True))

    def must_be_made(self, are_several: bool, is_staged: bool, may_fail: bool) -> tuple[bool, bool]:
        """Whether gradients must be summed now, and whether `may_fail` holds on any process; collective.

        Processes exchange this, because a process that trains nothing has no gradients to decide by. Raises ValueError
        on all processes if one cannot sum its gradients, or if some have sums and others do not. `are_several`: units
        contribute terms. `is_staged`: a process has only the gradients of its stages.
        """
        are_there = self.are_there
        _, error = attempt(lambda: None if are_there else self._check(are_several, is_staged))
        has_sums = are_there and any(parameter.grad is not None for parameter in self._parameters)
        partners = everyone()
        is_stopped, some_have, some_lack, some_may_fail = partners.highest(
            [error is not None, has_sums, not are_there, may_fail]
        )
        if is_stopped:
            raise partners.exchange_errors(error)
        if some_have and some_lack:
            raise ValueError(
                "gradients are sums over units on some processes, and were changed or made anew on others; do on all "
                "the same, or call the optimizer's zero_grad()"
            )
        return bool(some_lack), bool(some_may_fail)

    def _check(self, are_several: bool, is_staged: bool) -> None:
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and parameter.grad is not None and not hasattr(parameter, TRAINED):
                raise ValueError(
                    f"{name!r} was not trained when build_optimizer was called, and has a gradient now, which would be "
                    "neither summed nor stepped; call build_optimizer again after requires_grad_()"
                )
        halves = [None if ref is None else ref() for ref in self._half_summed]
        if any(p.grad is not None and p.grad is half for p, half in zip(self._parameters, halves, strict=False)):
            raise ValueError(
                "an error stopped the sum of gradients over units, and some are sums while others are not; call the "
                "optimizer's zero_grad(), or train_step, before the next step"
            )
        if (are_several or is_staged) and any(self._is_changed(parameter) for parameter in self._parameters):
            raise ValueError(
                "gradients were changed before they are summed over units, as by torch's clip_grad_norm_, which clips "
                f"each {'stage' if is_staged else 'unit'}'s by themselves; take the optimizer's clip_gnorm(), and call "
                "sync_shard_grad() before it where something else changes them"
            )
        if self._is_grown and are_several:
            raise ValueError(
                "a backward pass has added to gradients that are summed over units already, which would be summed "
                "twice; call the optimizer's zero_grad() before it"
            )

    def _is_changed(self, parameter: nn.Parameter) -> bool:
        """Whether anything except backward passes has written into the gradient of `parameter`."""
        term, gradient = self._terms.get(id(parameter)), parameter.grad
        if term is None or gradient is None:
            return False
        reference, version = term
        is_same = reference() is gradient
        return is_same and version != gradient._version

    @contextmanager
    def entering(self) -> Iterator[None]:
        """Context around code that makes or changes sums; on an error records gradients that may be unsummed."""
        try:
            yield
        except BaseException:
            self._half_summed = self._gradients()
            raise
        self._summed, self._half_summed, self._stepped = self._gradients(), [], None
        self._sums = {id(p): weakref.ref(p.grad) for p in self._parameters if p.grad is not None}
        self._is_grown, self._terms = False, {}

    def _gradients(self) -> list[weakref.ref[Tensor] | None]:
        return [None if p.grad is None else weakref.ref(p.grad) for p in self._parameters]

    def _versions(self) -> list[int | None]:
        return [None if p.grad is None else p.grad._version for p in self._parameters]

    def end_step(self) -> None:
        """Records that a step has used the gradients; another step may use them again."""
        self._stepped = self._versions()

    def forget(self) -> None:
        """Records that the gradients were dropped or zeroed."""
        self._summed, self._stepped, self._sums, self._is_grown, self._half_summed = None, None, {}, False, []
        self._terms = {}

    def _note(self, parameter: nn.Parameter) -> None:
        """Runs after a backward pass has added to the gradient of `parameter`."""
        ref = self._sums.get(id(parameter))
        self._is_grown = self._is_grown or (ref is not None and ref() is parameter.grad)
        if parameter.grad is not None:
            self._terms[id(parameter)] = weakref.ref(parameter.grad), parameter.grad._version
