"""A rollout that ran out of memory begins again with half as many rows at once; its samples are the same."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from hybrid_engine.config.notices import say_once
from hybrid_engine.distributed.verdict import forget_frames, is_out_of_memory
from hybrid_engine.generation.batching.plan import Plan
from hybrid_engine.generation.batching.sequence import Prompt, Sequence
from hybrid_engine.generation.generator import Generator
from hybrid_engine.generation.request import Request

Result = TypeVar("Result")


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
