"""Preference pairs for the reward model: a summary that follows PEP 257 against one that does not.

Three kinds of pairs, all made from real summaries:

- a conforming summary against a copy with one fault put in (the six `FAULTS`);
- a mended summary (third person, missing capital or full stop put right) against its original;
- a conforming summary of this function against one of another function, or against its own words shuffled: without
  these the reward would not ask that a summary is about its function and reads as English.
"""

import random
from collections.abc import Callable

from hybrid_engine.rlhf.data.rows import PreferenceRow
from hybrid_engine.rlhf.tasks.pep257 import MAX_SUMMARY_CHARS, conforms
from hybrid_engine.rlhf.tasks.stdlib_docs import DocExample, place_of

_SIBILANTS = ("s", "sh", "ch", "x", "z", "o")


def third_person(summary: str, other: str) -> str:
    """'Return the name.' becomes 'Returns the name.'"""
    verb, space, rest = summary.partition(" ")
    if verb.endswith("y") and verb[-2:-1] not in "aeiou":
        return f"{verb[:-1]}ies{space}{rest}"
    return f"{verb}{'es' if verb.endswith(_SIBILANTS) else 's'}{space}{rest}"


def description(summary: str, other: str) -> str:
    """'Return the name.' becomes 'This returns the name.'"""
    described = third_person(summary, other)
    return f"This {described[:1].lower()}{described[1:]}"


def too_long(summary: str, other: str) -> str:
    """Joined with the other summary by 'and' until it exceeds the limit."""
    joined = summary
    while len(joined) <= MAX_SUMMARY_CHARS:
        joined = f"{joined[:-1]}, and {other[:1].lower()}{other[1:]}"
    return joined


FAULTS: dict[str, Callable[[str, str], str]] = {
    "no capital": lambda summary, other: summary[:1].lower() + summary[1:],
    "no full stop": lambda summary, other: summary[:-1],
    "third person": third_person,
    "description": description,
    "two sentences": lambda summary, other: f"{summary} {other}",
    "too long": too_long,
}
"""Each takes a conforming summary and another function's conforming summary, and breaks the first."""


def build_preferences(examples: list[DocExample], seed: int) -> list[PreferenceRow]:
    """One or two pairs for every example that conforms or can be mended; the same for the same arguments.

    The column `kind` says what is wrong with the rejected summary: a name of `FAULTS`, or "original", "other function",
    "shuffled".
    """
    rng = random.Random(seed)
    conforming = [example.summary for example in examples if conforms(example.summary)]
    if len(conforming) < 2:
        raise ValueError(f"{len(conforming)} of {len(examples)} examples conform to PEP 257, at least 2 must; use more")
    pairs = []
    for example in examples:
        if conforms(example.summary):
            pairs += _pairs_of_conforming(example, conforming, rng)
        elif mended := mend(example.summary):
            pairs.append(_pair(example, mended, example.summary, "original"))
    return pairs


def _pairs_of_conforming(example: DocExample, conforming: list[str], rng: random.Random) -> list[PreferenceRow]:
    other = rng.choice(conforming)
    words = example.summary[:-1].split()
    shuffled = " ".join(rng.sample(words, len(words))).capitalize() + "."
    fault = rng.choice(sorted(FAULTS))
    content = rng.choice([("other function", other), ("shuffled", shuffled)])
    rejected = dict([(fault, FAULTS[fault](example.summary, other)), content])
    return [_pair(example, example.summary, text, kind) for kind, text in rejected.items() if text != example.summary]


def _pair(example: DocExample, chosen: str, rejected: str, kind: str) -> PreferenceRow:
    return PreferenceRow(
        prompt=example.prompt, chosen=chosen, rejected=rejected, columns={"kind": kind}, place=place_of(example)
    )


def mend(summary: str) -> str | None:
    """`summary` with a capital, a full stop and its first verb in the imperative, if that makes it conform."""
    verb, space, rest = summary.rstrip(".").partition(" ")
    for base in (verb, verb.removesuffix("s"), verb.removesuffix("es"), verb.removesuffix("ies") + "y"):
        mended = f"{base[:1].upper()}{base[1:]}{space}{rest}."
        if conforms(mended):
            return mended
    return None
