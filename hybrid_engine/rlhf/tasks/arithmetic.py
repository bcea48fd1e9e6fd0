"""Addition with written-out columns: a task whose answers can be checked, and a pupil's work that is often wrong.

    384+697=                      the prompt
    4+7=11,8+9+1=18,3+6+1=10;1081  a response: each column from the right with its carry, then the sum

The pupil's format is right, but he mostly forgets the carry. A model that imitates him learns the format, the tables
and his mistake. Reinforcement learning then teaches it to carry, which is content: before, its likeliest answer was
wrong.
"""

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybrid_engine.rlhf.data.parts import is_held_out
from hybrid_engine.rlhf.data.rows import CompletionRow, LearnedRow, PromptRow

FORGETS_CARRY = 0.52
"""Probability that the pupil leaves a carry out of its column."""
CARRIES = 0.8
"""Share of the columns whose digits add up to ten or more."""
ALPHABET = "0123456789+=,;"
"""Every character of problems and of written-out sums."""
NUM_DIGITS = 3
NUM_WORKED, NUM_PROMPTS = 64_000, 4096
"""Problems that the pupil solves, and problems for reinforcement learning."""
NUM_HELD_OUT, HELD_OUT_SHARE = 512, 0.1
REWARD = "exact:after=;"
"""Whether the text after the semicolon is the sum, which the rows have in their column `answer`."""


@dataclass(frozen=True, kw_only=True)
class Addition:
    """Two numbers with the same number of digits to be added."""

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
        return right_sum(self).split(";")[-1]


def written_sum(problem: Addition, forgets: Sequence[bool]) -> str:
    """The columns from the right and the sum; `forgets` is True for each column whose carry is left out."""
    first, second = (f"{number:0{problem.num_digits}d}"[::-1] for number in (problem.first, problem.second))
    carry, columns, digits = 0, [], []
    for top, bottom, is_forgotten in zip(first, second, forgets, strict=True):
        carried = 0 if is_forgotten else carry
        total = int(top) + int(bottom) + carried
        columns.append(f"{top}+{bottom}" + (f"+{carried}" if carried else "") + f"={total}")
        digits.append(str(total % 10))
        carry = total // 10
    return ",".join(columns) + ";" + (str(carry) if carry else "") + "".join(reversed(digits))


def right_sum(problem: Addition) -> str:
    """The columns and the sum without a mistake."""
    return written_sum(problem, [False] * problem.num_digits)


def pupils_work(problem: Addition, generator: random.Random) -> str:
    """A response with the pupil's mistakes."""
    return written_sum(problem, [generator.random() < FORGETS_CARRY for _ in range(problem.num_digits)])


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each character of the task, and a pad token of its own."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *ALPHABET])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def training_rows(seed: int) -> list[LearnedRow]:
    """Problems with the pupil's work, none of them held out."""
    return _worked(itertools.islice(problems(False, seed), NUM_WORKED), seed)


def held_out_work() -> list[LearnedRow]:
    """The held-out problems with the pupil's work."""
    return _worked(itertools.islice(problems(True, 0), NUM_HELD_OUT), 0)


def _worked(drawn: Iterable[Addition], seed: int) -> list[LearnedRow]:
    generator = random.Random(seed)
    return [CompletionRow(prompt=problem.prompt, completion=pupils_work(problem, generator)) for problem in drawn]


def prompt_rows(seed: int) -> tuple[list[PromptRow], list[PromptRow]]:
    """Problems to answer, with the sum in the column `answer`: those to train on, and the held-out ones."""
    drawn = itertools.islice(problems(False, seed), NUM_PROMPTS), itertools.islice(problems(True, 0), NUM_HELD_OUT)
    train, held_out = (
        [PromptRow(prompt=problem.prompt, columns={"answer": problem.answer}) for problem in part] for part in drawn
    )
    return train, held_out


_PAIRS = {
    has_carry: [(str(a), str(b)) for a in range(10) for b in range(10) if (a + b >= 10) == has_carry]
    for has_carry in (False, True)
}
"""The digits of a column, by whether they add up to ten or more."""


def problems(is_held_out_kind: bool, seed: int) -> Iterator[Addition]:
    """An endless series of different problems; which of them are held out does not depend on the seed."""
    generator = random.Random(seed)
    seen: set[str] = set()
    while True:
        columns = [generator.choice(_PAIRS[generator.random() < CARRIES]) for _ in range(NUM_DIGITS)]
        first, second = (int("".join(digits)) for digits in zip(*columns, strict=True))
        problem = Addition(first=first, second=second, num_digits=NUM_DIGITS)
        if problem.prompt not in seen and is_held_out(problem.prompt, HELD_OUT_SHARE) == is_held_out_kind:
            seen.add(problem.prompt)
            yield problem
