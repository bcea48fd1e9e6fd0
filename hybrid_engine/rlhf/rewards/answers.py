"""The data types of rewards: answers to judge, and a reward with its name, weight and function.

B: answers, T: tokens of an answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerState

from hybrid_engine.rlhf.data.rows import Turns

SHOWN_CHARACTERS = 200
LISTS = ("prompts", "responses", "prompt_ids", "response_ids", "is_cut_off")
"""The fields of `Answers` that have an entry for each answer, in addition to its columns."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """B answers with all data that rewards may read; each list has B entries."""

    prompts: Sequence[Turns]
    responses: Sequence[str]
    """Text of the answers, without special tokens."""
    prompt_ids: Sequence[list[int]]
    response_ids: Sequence[list[int]]
    """Tokens of the answers without padding, including the end-of-sequence token."""
    is_cut_off: Sequence[bool]
    """True if the answer reached the length limit before it ended."""
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """The data set's other columns, a value for each answer."""
    decode: Callable[[list[int]], str] | None = None
    """Decodes token ids to text, without special tokens; only needed by a reward that scores steps."""

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
        """The answers of all `parts`, at least one, with the columns that every part has."""
        joined = {name: [value for part in parts for value in getattr(part, name)] for name in LISTS}
        names = set.intersection(*(set(part.columns) for part in parts))
        columns = {name: [value for part in parts for value in part.columns[name]] for name in sorted(names)}
        return cls(**joined, columns=columns, decode=parts[0].decode)

    def shown_prompt(self, index: int) -> str:
        """Prompt `index` for an error message: its end, where prompts mostly differ."""
        prompt = self.prompts[index]
        text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content")) if prompt else ""
        return repr(text if len(text) <= SHOWN_CHARACTERS else "..." + text[-SHOWN_CHARACTERS:])


@dataclass(frozen=True, kw_only=True)
class RunView:
    """The run as reward functions see it, by TRL's names: state to read, and values that they logged in one call."""

    state: TrainerState = field(default_factory=lambda: TrainerState(max_steps=1))  # some functions divide by max_steps
    metrics: dict[str, list[float]] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        """Adds a number to the mean that is logged with the step as `logged_<name>`."""
        self.metrics.setdefault(name, []).append(float(value))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Adds a value for each answer to the answers that an evaluation stores."""
        plain = (value if isinstance(value, str | int | float | None) else str(value) for value in values)
        self.extra.setdefault(column, []).extend(plain)

    def clear(self) -> None:
        """Discards the logged values."""
        self.metrics.clear()
        self.extra.clear()


Value = float | list[float] | None
"""The score of one answer: a number, a number for each token or step, or None if the reward does not judge it."""


Judge = Callable[[Answers], Any]
"""Returns a `Value` for each answer; the caller checks what it actually returned."""


@dataclass(frozen=True, kw_only=True)
class Reward:
    """One reward of a run."""

    spec: str
    """The reward as given to `--reward`."""
    name: str
    """The name of its figures, unique among the rewards of the run."""
    weight: float
    judge: Judge
    is_collective: bool = False
    """Whether all processes judge together, including those without answers."""
    columns: frozenset[str] = frozenset()
    """The columns of the data that it requires."""
    optional_columns: frozenset[str] = frozenset()
    """Columns that it reads if the data has them."""
    check: Callable[[Mapping[str, Any]], None] | None = None
    """Raises ValueError, with a message that follows a row's place, for columns whose values it cannot read."""


class UnusableReference(ValueError):
    """A built-in reward cannot read the reference answer of a row; the message names the reward and the prompt."""


class RewardError(RuntimeError):
    """A reward raised an error, which is the cause of this one, or timed out; the message names the prompt."""
