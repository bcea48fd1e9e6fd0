"""Addition with written-out columns: a task whose answers can be checked, and a pupil's work that is often wrong.

    3847+2596=            the prompt
    7+6=13 4+9=13 ...     a response: each column from the right with its carry, then the sum

A pupil has the form right from the start and forgets the carry in two columns of three. A model that imitates his work
learns the form, the tables and his mistake; what reinforcement learning then adds is to carry, which is content.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

FORGETS_CARRY = 0.6
"""How often the pupil leaves a carry out of the column that it belongs to."""
ALPHABET = "0123456789+=, "
"""Every character of prompts and responses."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Two numbers of the same number of digits to be added."""

    first: int
    second: int
    num_digits: int

    @property
    def prompt(self) -> str:
        """The task as text; numbers keep their leading zeros."""
        return f"{self.first:0{self.num_digits}d}+{self.second:0{self.num_digits}d}="

    @property
    def answer(self) -> str:
        """The sum, with as many digits as its columns have."""
        return written_sum(self, [False] * self.num_digits).split(" ")[-1]


def written_sum(problem: Problem, forgets: list[bool]) -> str:
    """The columns from the right and the sum; `forgets` says of each column whether its carry is left out."""
    first, second = (f"{number:0{problem.num_digits}d}"[::-1] for number in (problem.first, problem.second))
    carry, columns, digits = 0, [], []
    for top, bottom, is_forgotten in zip(first, second, forgets, strict=True):
        carried = 0 if is_forgotten else carry
        total = int(top) + int(bottom) + carried
        columns.append(f"{top}+{bottom}" + (f"+{carried}" if carried else "") + f"={total}")
        digits.append(str(total % 10))
        carry = total // 10
    return ",".join(columns) + " " + (str(carry) if carry else "") + "".join(reversed(digits))


def pupils_work(problem: Problem, generator: random.Random) -> str:
    """A response with the pupil's mistakes."""
    return written_sum(problem, [generator.random() < FORGETS_CARRY for _ in range(problem.num_digits)])


def final_answer(response: str) -> str:
    """What stands behind the last space of a response."""
    return response.rsplit(" ", 1)[-1]


def problems(num_digits: int, is_held_out: bool, seed: int) -> Iterator[Problem]:
    """An endless series of problems; those with held-out numbers are told from the others by a hash, for ever."""
    generator = random.Random(seed)
    while True:
        first, second = (generator.randrange(10**num_digits) for _ in range(2))
        problem = Problem(first=first, second=second, num_digits=num_digits)
        if _hash(problem) == is_held_out:
            yield problem


def _hash(problem: Problem) -> bool:
    return hashlib.sha256(problem.prompt.encode()).digest()[0] < 26
