"""A rollout that ran out of memory begins again with half as many rows at once; its samples are the same."""

from dataclasses import replace

from hybrid_engine.config.notices import say_once
from hybrid_engine.generation.batching.plan import Plan
from hybrid_engine.generation.batching.sequence import Prompt, Sequence
from hybrid_engine.generation.generator import Generator
from hybrid_engine.generation.request import Request


def with_half_the_rows(generator: Generator, request: Request) -> Request:
    """`request` with half the rows at once; to be called where an OutOfMemoryError is handled, and raises that again.

    It does where one row ran alone, where rows must stay in step, where the model's own `generate()` ran, and where
    processes generate together: what one of them has no memory for the others would have to begin again with it.
    """
    plan = request.plan
    if plan is None or plan.max_running <= 1 or request.wishes.functions is not None or generator.partners.size > 1:
        raise
    rows = plan.max_running // 2
    say_once(
        f"generate(): out of memory with {plan.max_running} rows at once; goes on with {rows}: "
        f"hybrid_engine.max_running={rows} avoids it"
    )
    return replace(request, plan=_halved(plan, rows))


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
