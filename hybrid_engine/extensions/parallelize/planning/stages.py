"""Which blocks form which stage of a pipeline: the least Σ stage + (micro-batches - 1) · longest stage."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

Seconds = Callable[[int, int, int], float | None]
"""The seconds of a micro-batch in segments `start` to `end` as a stage of that number; None: does not fit."""


class _Partial(NamedTuple):
    """Stages up to some segment."""

    total: float
    longest: float
    ends: tuple[int, ...]


def best_stages(num_segments: int, num_stages: int, num_micro_batches: int, seconds: Seconds) -> tuple[int, ...] | None:
    """The segment after the last of each stage, None where no division fits.

    A dynamic programme over stages and segments; it keeps of each prefix those divisions of which no other is better
    both in the sum and in the longest stage, so that it finds the optimum.
    """
    fronts: dict[int, list[_Partial]] = {0: [_Partial(0.0, 0.0, ())]}
    for stage in range(num_stages):
        following: dict[int, list[_Partial]] = {}
        for start, front in fronts.items():
            last = num_segments if stage == num_stages - 1 else start + 1
            for end in range(max(last, start + 1), num_segments - (num_stages - stage - 1) + 1):
                taken = seconds(start, end, stage)
                if taken is not None:
                    extended = [_Partial(p.total + taken, max(p.longest, taken), (*p.ends, end)) for p in front]
                    following.setdefault(end, []).extend(extended)
        fronts = {end: _front(found) for end, found in following.items()}
    complete = fronts.get(num_segments, [])
    best = min(complete, key=lambda p: pipeline_seconds([p.total, p.longest], num_micro_batches), default=None)
    return None if best is None else best.ends


def pipeline_seconds(total_and_longest: Sequence[float], num_micro_batches: int) -> float:
    """The seconds of a step: every stage once, the longest once more for each further micro-batch."""
    total, longest = total_and_longest
    return total + (num_micro_batches - 1) * longest


def _front(found: list[_Partial]) -> list[_Partial]:
    """The partial cuts that no other beats both in the total and in the longest stage."""
    kept: list[_Partial] = []
    for one in sorted(found):
        if not kept or one.longest < kept[-1].longest:
            kept.append(one)
    return kept
