"""Arithmetic with a calculator: a task of several turns, and a pupil who often guesses instead of asking it.

    user        (47+38)*6
    assistant   ?47+38         asks the calculator for one operation
    tool        0085
    assistant   ?0085*6
    tool        0510
    assistant   =0510          answers

A pupil who asks copies without mistakes, but at each turn he may guess the result, which is mostly wrong. A model that
imitates him has all the necessary skills; reinforcement learning teaches it to ask.
"""

import itertools
import operator
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybrid_engine.rlhf.data.parts import is_held_out
from hybrid_engine.rlhf.data.rows import ConversationRow, LearnedRow, Message

GUESSES = (0.6, 0.25)
"""Probability that the pupil guesses where he should ask, the first time and the second."""
ALPHABET = "0123456789+*-()?=e"
ROLES = ("user", "assistant", "tool")
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
NUM_WORKED = 20_480
"""Number of the pupil's conversations."""
NUM_HELD_OUT, HELD_OUT_SHARE = 128, 0.1
NUM_DIGITS = 4
"""Digits of every result."""
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<eos>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Two operations, the one in brackets first."""

    first: int
    inner: str
    second: int
    outer: str
    third: int

    @property
    def text(self) -> str:
        """The problem as the user writes it."""
        return f"({self.first}{self.inner}{self.second}){self.outer}{self.third}"

    @property
    def between(self) -> int:
        """The value of the brackets."""
        return OPERATIONS[self.inner](self.first, self.second)

    @property
    def answer(self) -> int:
        """The value of the whole problem."""
        return OPERATIONS[self.outer](self.between, self.third)


def calculate(request: str) -> str:
    """The calculator's answer to `47+38`; `e` for anything but one operation on two numbers."""
    match = re.fullmatch(r"(\d{1,6})([-+*])(\d{1,6})", request)
    return "e" if match is None else written(OPERATIONS[match[2]](int(match[1]), int(match[3])))


def written(result: int) -> str:
    """A result with leading zeros: numbers of equal length are easier to learn to copy."""
    return f"{result:0{NUM_DIGITS}d}"


LONGEST_RESULT = calculate("999999*999999")
"""The longest text that the calculator returns."""


def is_right(problem: Problem, answer: str) -> bool:
    """Whether an answer is the result."""
    return answer == f"={written(problem.answer)}"


class Calculator:
    """The calculator as a text game by gymnasium's contract: an action is a request, or the answer, which is scored."""

    observation_role = "tool"
    longest_observation = LONGEST_RESULT

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Begins the problem whose fields are among the options."""
        self._problem = Problem(**{field.name: options[field.name] for field in fields(Problem)})
        return self._problem.text, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The result of `?47+38`; anything else is the answer and ends the game."""
        if action.startswith("?"):
            return calculate(action[1:]), 0.0, False, False, {}
        return "", float(is_right(self._problem, action)), True, False, {}


def pupils_conversation(problem: Problem, generator: random.Random) -> list[Message]:
    """A conversation with the pupil, who may end it with a guess."""
    messages: list[Message] = [{"role": "user", "content": problem.text}]

    def says(role: str, content: str) -> None:
        messages.append({"role": role, "content": content})

    asked = (
        (f"{problem.first}{problem.inner}{problem.second}", problem.between),
        (f"{written(problem.between)}{problem.outer}{problem.third}", problem.answer),
    )
    for guesses, (request, result) in zip(GUESSES, asked, strict=True):
        if generator.random() < guesses:
            says(
                "assistant",
                f"={written(max(0, problem.answer + generator.choice((-1, 1)) * generator.randint(1, 60)))}",
            )
            return messages
        says("assistant", f"?{request}")
        says("tool", written(result))
    says("assistant", f"={written(problem.answer)}")
    return messages


def problems(is_held_out_kind: bool, seed: int) -> Iterator[Problem]:
    """An endless series of different problems; which of them are held out does not depend on the seed."""
    generator = random.Random(seed)
    seen: set[str] = set()
    while True:
        first, second = generator.randint(10, 99), generator.randint(10, 99)
        problem = Problem(
            first=first,
            inner="+" if first < second else generator.choice("+-"),  # no negative numbers
            second=second,
            outer=generator.choice("+*"),
            third=generator.randint(2, 9),
        )
        if problem.text not in seen and is_held_out(problem.text, HELD_OUT_SHARE) == is_held_out_kind:
            seen.add(problem.text)
            yield problem


def held_out_problems() -> list[Problem]:
    """The held-out problems."""
    return list(itertools.islice(problems(True, 0), NUM_HELD_OUT))


def training_rows(seed: int) -> list[LearnedRow]:
    """Conversations of the pupil about problems that are not held out."""
    generator = random.Random(seed)
    drawn = itertools.islice(problems(False, seed), NUM_WORKED)
    return [ConversationRow(messages=pupils_conversation(problem, generator)) for problem in drawn]


def held_out_work() -> list[LearnedRow]:
    """Conversations of the pupil about the held-out problems."""
    generator = random.Random(0)
    return [ConversationRow(messages=pupils_conversation(problem, generator)) for problem in held_out_problems()]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each character and role, and a chat template that marks the assistant's tokens."""
    specials = ["<pad>", "<eos>", *(f"<{role}>" for role in ROLES)]
    vocabulary = {token: index for index, token in enumerate([*specials, *ALPHABET])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    characters.add_special_tokens(specials)
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=[f"<{role}>" for role in ROLES],
        padding_side="left",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
