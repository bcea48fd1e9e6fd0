"""Turns that all processes take together, because each gathers every layer with the others, while any has work.

Before a turn each process reports whether it has work; those without work take the turn for the others. `JointTurns`
are turns of containers, with one pass over the layers each. `JointPasses` are the forward passes of a module that
gathers its layers itself, whatever code calls them: each pass is a turn.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from hybrid_engine.distributed.interrupts import HeldInterrupts, holding_interrupts
from hybrid_engine.distributed.verdict import Partners, attempt
from hybrid_engine.zero.passes import GatheringOrder
from hybrid_engine.zero.sharding import Sharding

LEFT, IDLE, WORKS, FAILED = range(4)
"""States of a process before a turn; the highest one decides what all processes do."""
STREAMED_STAYS = 0.02
"""Seconds after which a live batch without work checks whether other processes have some."""


class JointTurns:
    """The turns of `partners`, which include this process.

    Args:
        take_turn: takes one turn whether or not this process has work; returns its error, or None.
    """

    def __init__(self, partners: Partners, take_turn: Callable[[], BaseException | None]):
        self._partners, self._take_turn = partners, take_turn
        self.has_parted = False
        """Whether the others know of an error, or receive nothing more from this process."""

    def agree(self, state: int) -> int:
        """Returns the highest state of all processes; raises an error of one on all. Collective."""
        self.has_parted = True
        (highest,) = self._partners.highest([state])
        if highest == FAILED:
            self._partners.raise_together(None)
        self.has_parted = False
        return highest

    def meet(self, state: int) -> int:
        """Takes a turn with all if one has work; returns the highest state. Collective; errors are raised on all."""
        highest = self.agree(state)
        if highest == WORKS:
            error = self._take_turn()
            if error is not None:
                self.fail(error)
        return highest

    def fail(self, error: BaseException) -> None:
        """Raises `error` here and a matching one on the others when they meet next; collective."""
        self.has_parted = True
        self._partners.highest([FAILED])
        self._partners.raise_together(error)

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """On exit, takes part in the turns of others until all have left; raises an error inside on all."""
        try:
            yield
        except BaseException as error:
            if not self.has_parted:
                self.fail(error)
            raise
        while self.meet(LEFT) != LEFT:
            pass


class JointPasses(JointTurns):
    """The forward passes of `module`, which is sharded as `sharding` says and gathers its layers itself.

    All weights outside the layers must be gathered. A process without work passes a single token through the module.
    """

    def __init__(self, module: nn.Module, sharding: Sharding, partners: Partners):
        super().__init__(partners, self._pass_for_others)
        self._module, self._sharding = module, sharding
        base = getattr(module, "get_base_model", lambda: module)()
        self._entrances = list(dict.fromkeys([module, base]))  # peft's generate() calls the base model
        self._depth = 0
        self._held: HeldInterrupts | None = None

    @contextmanager
    def joined(self) -> Iterator["JointPasses"]:
        """Inside, each pass waits for one of every other process, and so does the exit. Raises an error on all."""
        with holding_interrupts() as self._held, ExitStack() as hooks:
            self._order = GatheringOrder(self._sharding.fsdp_modules())
            hooks.callback(self._order.remove)
            for entrance in self._entrances:
                hooks.callback(entrance.register_forward_pre_hook(self._enter, prepend=True).remove)
                hooks.callback(entrance.register_forward_hook(self._leave).remove)
            with self.leaving(), self.ending_pass():
                yield self

    @contextmanager
    def ending_pass(self) -> Iterator[None]:
        """After an error in a pass, gathers its remaining layers, because the others still gather them in theirs."""
        try:
            yield
        except BaseException:
            if self._depth > 0:
                self._depth = 0
                attempt(self._order.gather_rest)
            raise

    def _enter(self, *unused: Any) -> None:
        if self._depth == 0:
            assert self._held is not None
            self._held.pass_on()
            self.agree(WORKS)
            self._order.begin()
        self._depth += 1

    def _leave(self, *unused: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._order.complete()

    def _pass_for_others(self) -> BaseException | None:
        """A pass over one token; the hooks treat it as nested in another pass, so they do not act."""
        assert self._held is not None
        self._order.begin()
        self._depth = 1

        def take_pass() -> None:
            with self.ending_pass():
                token = torch.zeros(1, 1, dtype=torch.int64, device=next(self._module.parameters()).device)
                self._module(input_ids=token, attention_mask=torch.ones_like(token))

        _, error = attempt(take_pass)
        if error is None:
            self._order.complete()
        self._depth = 0
        return error or attempt(self._held.pass_on)[1]
