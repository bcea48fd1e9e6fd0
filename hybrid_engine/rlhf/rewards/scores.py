"""The scores of answers: checks each reward's values, and combines them into a weighted sum.

B: answers, T: tokens of an answer.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import TrainerState

from hybrid_engine.distributed.processes import gather_objects
from hybrid_engine.rlhf.data.rows import Message, Turns

SHOWN_CHARACTERS = 200
LISTS = ("prompts", "responses", "prompt_ids", "response_ids", "is_cut_off")
"""The fields of `Answers` that have an entry for each answer, in addition to its columns."""
Value = float | list[float] | None
"""The score of one answer: a number, a number for each token or step, or None if the reward does not judge it."""
LARGEST_SCORE = 1e12
"""A number whose square fp32 can hold, and sums of such squares: advantages are computed in fp32."""


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
    """The dataset's other columns, a value for each answer."""
    decode: Callable[[list[int]], str] | None = None
    """Decodes token ids to text, without special tokens; only needed by a reward that scores steps."""
    conversations: Sequence[list[Message]] | None = None
    """For episodes: all messages after the prompt; None if an answer is its text alone."""
    group_size: int | None = None
    """Answers to each prompt, which are adjacent; None: a group is as long as neighbors have the same prompt."""

    def __post_init__(self) -> None:
        assert self.group_size is None or len(self) % self.group_size == 0, f"{len(self)=} {self.group_size=}"
        for name in LISTS:
            assert len(getattr(self, name)) == len(self.prompts), f"{name}: {len(getattr(self, name))} entries"
        for name, values in self.columns.items():
            assert len(values) == len(self.prompts), f"column {name!r}: {len(values)} values, {len(self.prompts)} rows"

    def __len__(self) -> int:
        return len(self.prompts)

    def choose(self, index: Sequence[int]) -> "Answers":
        """The answers at `index`, in that order, without a size of groups."""
        chosen: dict[str, Any] = {name: [getattr(self, name)[row] for row in index] for name in LISTS}
        columns = {name: [values[row] for row in index] for name, values in self.columns.items()}
        conversations = None if self.conversations is None else [self.conversations[row] for row in index]
        return Answers(**chosen, columns=columns, decode=self.decode, conversations=conversations)

    @classmethod
    def join(cls, parts: "Sequence[Answers]") -> "Answers":
        """The answers of all `parts`, at least one, with the columns and the size of groups that every part has."""
        joined: dict[str, Any] = {name: [value for part in parts for value in getattr(part, name)] for name in LISTS}
        names = set.intersection(*(set(part.columns) for part in parts))
        columns = {name: [value for part in parts for value in part.columns[name]] for name in sorted(names)}
        sizes = {part.group_size for part in parts}
        size = sizes.pop() if len(sizes) == 1 else None
        return cls(**joined, columns=columns, decode=parts[0].decode, group_size=size)

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
    references: frozenset[str] = frozenset()
    """The columns with right answers, a part of `columns`; another right answer does not make another task."""
    check: Callable[[Mapping[str, Any]], None] | None = None
    """Raises ValueError, with a message that follows a row's place, for columns whose values it cannot read."""


class UnusableReference(ValueError):
    """A built-in reward cannot read the reference answer of a row; the message names the reward and the prompt."""


class RewardError(RuntimeError):
    """A reward raised an error, which is the cause of this one, or timed out; the message names the prompt."""


class UnreachableJudge(RewardError):
    """A judge's server does not answer, or refuses a request; the message names its address."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The rewards of B answers."""

    total: list[float]
    """`[B]`: the weighted sum of the rewards that judged the answer; nan if none did."""
    by_name: dict[str, list[float | None]]
    """`[B]` for each reward, without its weight; None if it did not judge the answer, a sum for a process reward."""
    per_token: list[list[float]] | None
    """`[B][T]`: the weighted sum on each token, which adds up to `total`. The numbers of a process reward are on their
    tokens, a number for the whole answer on its last token. None if no reward returned lists.
    """
    is_step: list[list[bool]] | None = None
    """`[B][T]`, only with `per_token`: True on the tokens that end a step, even with a number of 0; for a list with a
    number for each token, True on those whose number is not 0.
    """
    logged: Mapping[str, float] = field(default_factory=dict)
    """Means of the values that functions passed to `log_metric`."""
    extra: Mapping[str, list[Any]] = field(default_factory=dict)
    """`[B]` for each name that functions passed to `log_extra`."""


class WrongCount(ValueError):
    """A reward did not return exactly one value for each answer."""


def combine(rewards: Sequence[Reward], values: Sequence[list[Value]], answers: Answers) -> Scores:
    """The scores of `answers` from the checked values of each reward.

    Raises:
        ValueError: a weighted sum is too large; a process reward has neither a number for each token nor for each step.
    """
    sums: list[list[float | None]] = [[None if value is None else _sum(value) for value in column] for column in values]
    weights = [reward.weight for reward in rewards]
    is_process = any(isinstance(value, list) for column in values for value in column)
    total = [_weighted(weights, row) for row in zip(*sums, strict=True)]
    for index, number in enumerate(total):
        if abs(number) > LARGEST_SCORE:
            raise ValueError(
                f"--reward-weights: the weighted sum for the answer to the prompt {answers.shown_prompt(index)} is "
                f"{number}, which must be from -{LARGEST_SCORE:g} to {LARGEST_SCORE:g}; lower them"
            )
    return Scores(
        total=total,
        by_name={reward.name: column for reward, column in zip(rewards, sums, strict=True)},
        per_token=_per_token(rewards, values, answers, weights) if is_process else None,
        is_step=_is_step(rewards, values, answers) if is_process else None,
    )


def with_logged(scores: Scores, view: RunView, num_answers: int) -> Scores:
    """`scores` with the values that functions logged; ValueError unless `log_extra` got a value for each answer."""
    for column, values in view.extra.items():
        if len(values) != num_answers:
            raise ValueError(
                f"--reward: log_extra({column!r}, ...) was given {len(values)} values for {num_answers} answers; give "
                "one for each, in their order"
            )
    means = {name: statistics.fmean(values) for name, values in view.metrics.items()}
    return replace(scores, logged=means, extra=dict(view.extra))


def penalise_cut_off(scores: Scores, answers: Answers, penalty: float) -> Scores:
    """`scores` minus `penalty` for answers that were cut off, on the last token. TRL's `missing_eos_penalty`."""
    costs = [penalty if is_cut else 0.0 for is_cut in answers.is_cut_off]
    per_token = scores.per_token
    if per_token is not None:
        per_token = [[*row[:-1], row[-1] - cost] if row else row for row, cost in zip(per_token, costs, strict=True)]
    total = [number - cost for number, cost in zip(scores.total, costs, strict=True)]
    return replace(scores, total=total, per_token=per_token)


def replace_cut_off(scores: Scores, answers: Answers, score: float) -> Scores:
    """`scores` with `score` in place of the total of each answer that was cut off, on its last token."""
    cut = answers.is_cut_off
    per_token, is_step = scores.per_token, scores.is_step
    if per_token is not None:
        rows = zip(per_token, cut, strict=True)
        per_token = [on_last_token(score, len(row)) if is_cut else row for row, is_cut in rows]
    if is_step is not None:
        marks = zip(is_step, cut, strict=True)
        is_step = [list(map(bool, on_last_token(1.0, len(row)))) if is_cut else row for row, is_cut in marks]
    total = [score if is_cut else own for own, is_cut in zip(scores.total, cut, strict=True)]
    return replace(scores, total=total, per_token=per_token, is_step=is_step)


def _weighted(weights: Sequence[float], row: Sequence[float | None]) -> float:
    """The weighted sum of one answer's rewards, without those that do not judge it; nan if there are none."""
    if all(number is None for number in row):
        return math.nan
    return sum(weight * number for weight, number in zip(weights, row, strict=True) if number is not None)


def _is_step(rewards: Sequence[Reward], values: Sequence[list[Value]], answers: Answers) -> list[list[bool]]:
    lengths = [len(ids) for ids in answers.response_ids]
    marks = [[_mark(value, length) for value, length in zip(column, lengths, strict=True)] for column in values]
    return [[mark > 0 for mark in row] for row in _per_token(rewards, marks, answers, [1.0] * len(rewards))]


def _mark(value: Value, num_tokens: int) -> Value:
    """1 in place of each number of `value` that belongs to a step."""
    if not isinstance(value, list):
        return None if value is None else 1.0
    return [float(number != 0 or len(value) != num_tokens) for number in value]


def _per_token(
    rewards: Sequence[Reward], values: Sequence[list[Value]], answers: Answers, weights: Sequence[float]
) -> list[list[float]]:
    tokens = [[0.0] * len(ids) for ids in answers.response_ids]
    for reward, column, weight in zip(rewards, values, weights, strict=True):
        for index, value in enumerate(column):
            for place, number in enumerate(_placed(reward, value, answers, index)):
                tokens[index][place] += weight * number
    return tokens


def _placed(reward: Reward, value: Value, answers: Answers, index: int) -> list[float]:
    ids = answers.response_ids[index]
    if value is None:
        return []
    if not isinstance(value, list):
        return on_last_token(value, len(ids))
    try:
        return on_tokens(value, answers.responses[index], ids, answers.decode)
    except ValueError as error:
        raise ValueError(
            f"--reward={reward.spec!r} returned {error} for the answer to the prompt {answers.shown_prompt(index)}; "
            "return one number for each token, or for each line that is not blank"
        ) from error


def read_values(spec: str, returned: Any, answers: Answers) -> list[Value]:
    """The values that the reward `spec` returned, checked; local.

    Raises:
        WrongCount: the number of values is not that of the answers.
        ValueError: it is not a list, or a value is not None, a finite number or a list of them; names the prompt.
    """
    if callable(returned):
        raise ValueError(
            f"--reward={spec!r} returns a reward function, not rewards: it returned {returned!r}; call it in your own "
            f"module, such as score = {spec.partition(':')[2]}(...), and name that"
        )
    if isinstance(returned, str) or not isinstance(returned, Iterable):
        raise ValueError(f"--reward={spec!r} must return a list of numbers and returned {returned!r}; fix the function")
    given = list(returned)
    if len(given) != len(answers):
        raise WrongCount(
            f"--reward={spec!r} returned {len(given)} scores for {len(answers)} responses; return one for each, in "
            "their order"
        )
    return [_read_value(spec, value, answers, index) for index, value in enumerate(given)]


def _read_value(spec: str, value: Any, answers: Answers, index: int) -> Value:
    if value is None:
        return None
    if _is_list(value):
        return [_read_number(spec, number, answers, index) for number in value]
    return _read_number(spec, value, answers, index)


def _read_number(spec: str, value: Any, answers: Answers, index: int) -> float:
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) <= LARGEST_SCORE:
        raise ValueError(
            f"--reward={spec!r} gave the answer to the prompt {answers.shown_prompt(index)} the score {value!r}; a "
            f"score must be a number from -{LARGEST_SCORE:g} to {LARGEST_SCORE:g}, or None for an answer that it does "
            "not judge: fix it"
        )
    return number


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) > 0


def _sum(value: float | list[float]) -> float:
    return math.fsum(value) if isinstance(value, list) else value


def reward_figures(scores: Scores) -> dict[str, float]:
    """`reward_<name>` and `reward_<name>_deviation`: mean and deviation over all processes' answers; collective.

    The deviation is that of the answers themselves (divisor n). A reward that judged no answer has no figures. In
    addition `unjudged_share`, the share of answers that no reward judged, and `logged_<name>`: the mean of the values
    that functions passed to `log_metric`, over the processes where they did.
    """
    everyone = gather_objects((scores.by_name, [math.isnan(number) for number in scores.total], scores.logged))
    by_name = {name: [value for part, _, _ in everyone for value in part[name]] for name in scores.by_name}
    share = statistics.fmean(mark for _, marks, _ in everyone for mark in marks)
    return named_figures(by_name) | {"unjudged_share": share} | _means_of([logged for _, _, logged in everyone])


def _means_of(logged: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for part in logged for name in part)
    return {f"logged_{name}": statistics.fmean(part[name] for part in logged if name in part) for name in names}


def named_figures(by_name: Mapping[str, Sequence[float | None]]) -> dict[str, float]:
    """Figures of these values as in `reward_figures`, for this process alone."""
    figures = {}
    for name, all_values in by_name.items():
        values = [value for value in all_values if value is not None]
        if values:
            figures[f"reward_{name}"] = statistics.fmean(values)
            figures[f"reward_{name}_deviation"] = statistics.pstdev(values)
    return figures


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
    """The end of the text of each step, in characters from the beginning of `response`."""
    ends, position = [], 0
    for line in response.split("\n"):
        if line.strip():
            ends.append(position + len(line.rstrip()))
        position += len(line) + 1
    return ends


def token_at(end: int, token_ids: list[int], decode: Callable[[list[int]], str]) -> int:
    """The first token at which the text reaches `end` characters; by bisection, which decodes log2(T) prefixes."""
    low, high = 0, len(token_ids) - 1
    while low < high:
        middle = (low + high) // 2
        if len(decode(token_ids[: middle + 1])) >= end:
            high = middle
        else:
            low = middle + 1
    return low
