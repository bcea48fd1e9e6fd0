"""What stands in the place of a module's own `generate()`, as an attribute of that one module."""

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
    """A `generate` that was put on `module`; a copy or a pickle of the module has its class's."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self.module)]  # copy.deepcopy is in the middle of copying the module
        return type(copied).generate.__get__(copied)

    def __reduce__(self) -> Any:
        return getattr, (self.module, "generate")


class GeneratingEngine(Protocol):
    """An engine around a module, with a `generate()` of its own."""

    module: nn.Module

    def generate(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """As `HybridEngine.generate`."""


class ModuleGenerate(PutGenerate):
    """`engine.module.generate`: the engine's, with the positions and names of the arguments that the model's has.

    The module, once the engine is gone, generates by itself.
    """

    def __init__(self, engine: GeneratingEngine) -> None:
        super().__init__(engine.module)
        # Weak: a module that is kept must not keep optimizer state and KV workspace of an engine that nobody has.
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
    """`kwargs` with transformers' `inputs`, if any, under the name `input_ids`; ValueError where both are given."""
    if inputs is None:
        return kwargs
    if kwargs.get("input_ids") is not None:
        raise ValueError("generate(): inputs and input_ids are two names of the prompts; pass one of them")
    return {**kwargs, "input_ids": inputs}


def roll_out_what_fits(generator: Generator, request: Request, roll_out: Callable[[Request], Result]) -> Result:
    """`roll_out(request)`, begun again with half the rows at once where memory ends on one process; collective.

    Raises:
        RuntimeError: as `_with_half_the_rows` says.
    """
    while True:
        try:
            return roll_out(request)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            request = _with_half_the_rows(generator, request, error)


def _with_half_the_rows(generator: Generator, request: Request, error: RuntimeError) -> Request:
    """`request` with half the rows at once; collective, where all processes have an error of one of them.

    Processes with rows of their own halve each its own number; one that has a single row begins again with it.

    Raises:
        RuntimeError: `error`, where one row ran alone on each process, where rows must stay in step, and
            where the model's own `generate()` ran.
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
    """`plan` with nothing run yet, and as many KV blocks a row as there were, or those of one row and its prompt."""
    prompts: dict[Prompt, Prompt] = {}
    sequences = []
    for sequence in plan.sequences:
        old = sequence.prompt
        prompt = prompts.setdefault(old, old.with_own_blocks())
        sequences.append(Sequence(prompt, sequence.row, sequence.options, sequence.key))
    num_blocks = min(plan.num_blocks, max(plan.num_blocks * rows // plan.max_running, 2 * plan.num_columns))
    return replace(plan, sequences=sequences, max_running=rows, num_blocks=num_blocks)
