"""The nouns of rewards: answers to judge, and a reward by its name, weight and function.

B: answers, T: tokens of an answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerState

from hybrid_engine.rlhf.data.rows import Turns

SHOWN_CHARACTERS = 200
LISTS = ("prompts", "responses", "prompt_ids", "response_ids", "is_cut_off")
"""The fields of `Answers` that have an entry for each answer, beside its columns."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """B answers and everything that may be known of them; each list has B entries."""

    prompts: Sequence[Turns]
    responses: Sequence[str]
    """The answers as text, without special tokens."""
    prompt_ids: Sequence[list[int]]
    response_ids: Sequence[list[int]]
    """The answers' tokens without padding, the end-of-sequence token included."""
    is_cut_off: Sequence[bool]
    """True where the answer met the longest length before it ended."""
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """The data set's other columns, a value for each answer."""
    decode: Callable[[list[int]], str] | None = None
    """The text of token ids, without special tokens; only a reward that gives numbers for steps needs it."""

    def __post_init__(self) -> None:
        for name in LISTS:
            assert len(getattr(self, name)) == len(self.prompts), f"{name}: {len(getattr(self, name))} entries"
        for name, values in self.columns.items():
            assert len(values) == len(self.prompts), f"column {name!r}: {len(values)} values, {len(self.prompts)} rows"

    def __len__(self) -> int:
        return len(self.prompts)

    def choose(self, index: Sequence[int]) -> "Answers":
        """The answers at `index`, in that order."""
        chosen = {name: [getattr(self, name)[row] for row in index] for name in LISTS}
        columns = {name: [values[row] for row in index] for name, values in self.columns.items()}
        return Answers(**chosen, columns=columns, decode=self.decode)

    @classmethod
    def join(cls, parts: "Sequence[Answers]") -> "Answers":
        """The answers of all `parts`, of which there must be one, with the columns that every part has."""
        joined = {name: [value for part in parts for value in getattr(part, name)] for name in LISTS}
        names = set.intersection(*(set(part.columns) for part in parts))
        columns = {name: [value for part in parts for value in part.columns[name]] for name in sorted(names)}
        return cls(**joined, columns=columns, decode=parts[0].decode)

    def shown_prompt(self, index: int) -> str:
        """Prompt `index` for an error's line: its end, where what differs from prompt to prompt mostly stands."""
        prompt = self.prompts[index]
        text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content")) if prompt else ""
        return repr(text if len(text) <= SHOWN_CHARACTERS else "..." + text[-SHOWN_CHARACTERS:])


@dataclass(frozen=True, kw_only=True)
class RunView:
    """The run as reward functions see it, by TRL's names: what they may read, and what they log with one call."""

    state: TrainerState = field(default_factory=lambda: TrainerState(max_steps=1))  # some divide by max_steps
    metrics: dict[str, list[float]] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        """Adds a number to the mean that the step's figures have under `logged_<name>`."""
        self.metrics.setdefault(name, []).append(float(value))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Puts a value of each answer beside the answers that an evaluation keeps."""
        plain = (value if isinstance(value, str | int | float | None) else str(value) for value in values)
        self.extra.setdefault(column, []).extend(plain)

    def clear(self) -> None:
        """Forgets what was logged."""
        self.metrics.clear()
        self.extra.clear()


Value = float | list[float] | None
"""What a reward says of one answer: a number, one for each token or step, or None: not mine."""


Judge = Callable[[Answers], Any]
"""Gives one `Value` for each answer; what it really returned is checked by who calls it."""


@dataclass(frozen=True, kw_only=True)
class Reward:
    """One reward of a run."""

    spec: str
    """As the option `--reward` gave it."""
    name: str
    """Under which its figures stand; no other reward of the run has it."""
    weight: float
    judge: Judge
    is_collective: bool = False
    """Whether all processes judge together, also those without answers."""
    columns: frozenset[str] = frozenset()
    """The columns of the data that it cannot do without."""
    optional_columns: frozenset[str] = frozenset()
    """Columns that it reads where the data has them."""
    check: Callable[[Mapping[str, Any]], None] | None = None
    """Raises ValueError, in words that follow the place of a row, for columns whose values it cannot read."""


class UnusableReference(ValueError):
    """A reward of ours cannot read the reference answer of a row; the text names the reward and the prompt."""


class RewardError(RuntimeError):
    """A reward raised an error, which is the cause of this one, or did not end; the text names the prompt."""
