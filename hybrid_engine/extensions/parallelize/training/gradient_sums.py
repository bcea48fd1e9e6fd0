"""Records which gradients are already sums over units, so that the optimizer sums each gradient exactly once."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from hybrid_engine.distributed.verdict import attempt, everyone

TRAINED = "_is_trained_by_build_optimizer"
"""Attribute that is set on parameters of an optimizer of `build_optimizer`."""


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
