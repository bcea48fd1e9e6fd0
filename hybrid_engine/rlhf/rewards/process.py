"""Rewards for parts of an answer: one number for each token of it, or for each step.

A step is a line of the answer that is not blank; its number stands on the token that completes its text. A function
that cuts its steps otherwise gives a number for each token, 0 where no step ends.

T: tokens of the answer.
"""

from collections.abc import Callable, Sequence


def on_tokens(
    numbers: Sequence[float], response: str, token_ids: list[int], decode: Callable[[list[int]], str] | None
) -> list[float]:
    """`[T]`: the numbers of one answer, each on its token.

    Raises:
        ValueError: there are neither as many numbers as tokens nor as many as steps, with both counts.
    """
    if len(numbers) == len(token_ids):
        return list(numbers)
    ends = step_ends(response)
    if len(numbers) != len(ends) or decode is None:
        raise ValueError(f"{len(numbers)} numbers for {len(token_ids)} tokens in {len(ends)} lines")
    on = [0.0] * len(token_ids)
    for number, end in zip(numbers, ends, strict=True):
        on[token_at(end, token_ids, decode)] += number
    return on


def on_last_token(number: float, num_tokens: int) -> list[float]:
    """`[T]`: a number for the whole answer, on its last token."""
    return [0.0] * (num_tokens - 1) + [number] if num_tokens else []


def step_ends(response: str) -> list[int]:
    """Where the text of each step ends, in characters from the beginning of `response`."""
    ends, position = [], 0
    for line in response.split("\n"):
        if line.strip():
            ends.append(position + len(line.rstrip()))
        position += len(line) + 1
    return ends


def token_at(end: int, token_ids: list[int], decode: Callable[[list[int]], str]) -> int:
    """The first token with which the text reaches `end` characters; by bisection, which decodes log2(T) beginnings."""
    low, high = 0, len(token_ids) - 1
    while low < high:
        middle = (low + high) // 2
        if len(decode(token_ids[: middle + 1])) >= end:
            high = middle
        else:
            low = middle + 1
    return low
