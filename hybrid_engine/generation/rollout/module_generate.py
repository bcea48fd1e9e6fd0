"""Replaces a module's own `generate()` by an attribute of that module, and retries rollouts that run out of memory."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from transformers import GenerationConfig

from hybrid_engine.config.notices import say_once
from hybrid_engine.distributed.verdict import forget_frames, is_out_of_memory
from hybrid_engine.generation.batching.plan import Plan, Request
from hybrid_engine.generation.request.core import Prompt, Sequence
from hybrid_engine.generation.rollout.generator import Generator

Result = TypeVar("Result")


class PutGenerate:
    """A `generate` attribute of `module`; a copy or pickle of the module gets its class's method instead."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self.module)]  # copy.deepcopy is in the middle of copying the module
        return type(copied).generate.__get__(copied)

    def __reduce__(self) -> Any:
        return getattr, (self.module, "generate")


class GeneratingEngine(Protocol):
    """An engine over a module, with a `generate()` of its own."""

    module: nn.Module

    def generate(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """See `HybridEngine.generate`."""


class ModuleGenerate(PutGenerate):
    """`engine.module.generate`: the engine's, with the positions and names of the arguments of the model's.

    Once the engine is gone, the module's own `generate()` runs.
    """

    def __init__(self, engine: GeneratingEngine) -> None:
        super().__init__(engine.module)
        # A weak reference: the module must not keep an unused engine's optimizer state and KV workspace alive.
        self.engine = weakref.ref(engine)

    def __call__(
        self, inputs: torch.Tensor | None = None, generation_config: GenerationConfig | None = None, **kwargs: Any
    ) -> Any:
        engine = self.engine()
        if engine is None:
            return type(self.module).generate(self.module, inputs, generation_config, **kwargs)
        kwargs = with_one_name(inputs, kwargs)
        return engine.generate(generation_config=generation_config, **kwargs)

    def __eq__(self, other: object) -> bool:
        return other is self or other == getattr(self.engine(), "generate", None)

    __hash__ = None  # type: ignore[assignment]


def with_one_name(inputs: torch.Tensor | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns `kwargs` with transformers' `inputs`, if any, as `input_ids`; raises ValueError if both are passed."""
    if inputs is None:
        return kwargs
    if kwargs.get("input_ids") is not None:
        raise ValueError("generate(): inputs and input_ids are two names of the prompts; pass one of them")
    return {**kwargs, "input_ids": inputs}


def roll_out_what_fits(generator: Generator, request: Request, roll_out: Callable[[Request], Result]) -> Result:
    """Calls `roll_out(request)`; starts over with half the rows at once if a process runs out of memory; collective.

    Raises:
        RuntimeError: see `_with_half_the_rows`.
    """
    while True:
        try:
            return roll_out(request)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            request = _with_half_the_rows(generator, request, error)


def _with_half_the_rows(generator: Generator, request: Request, error: RuntimeError) -> Request:
    """Returns `request` with half the rows at once; collective, called on all processes after an error of one.

    Processes with rows of their own each halve their own number; one with a single row starts over with it.

    Raises:
        RuntimeError: `error`, if one row ran alone on each process, if rows must stay in step, or if the model's own
            `generate()` ran.
    """
    plan = request.plan
    is_bound = plan is None or request.wishes.functions is not None
    most, cannot = generator.partners.highest([1 if plan is None else plan.max_running, int(is_bound)])
    if plan is None or cannot or most <= 1:
        raise error
    forget_frames(error)
    say_once(
        f"generate(): out of memory with {most} rows at once; goes on with {most // 2}: "
        f"{generator.config.prefix}max_running={most // 2}, or as many prompts in a call, avoids it"
    )
    return replace(request, plan=_halved(plan, max(1, plan.max_running // 2)))


def _halved(plan: Plan, rows: int) -> Plan:
    """Returns `plan` in its initial state with as many KV blocks per row; at least those of a row and its prompt."""
    prompts: dict[Prompt, Prompt] = {}
    sequences = []
    for sequence in plan.sequences:
        old = sequence.prompt
        prompt = prompts.setdefault(old, old.with_own_blocks())
        sequences.append(Sequence(prompt, sequence.row, sequence.options, sequence.key))
    num_blocks = min(plan.num_blocks, max(plan.num_blocks * rows // plan.max_running, 2 * plan.num_columns))
    return replace(plan, sequences=sequences, max_running=rows, num_blocks=num_blocks)
