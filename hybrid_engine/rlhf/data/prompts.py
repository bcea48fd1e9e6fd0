"""The prompts of a user's dataset: which, in which order, and how long they, their answers and rows may be.

`settle_lengths` derives the lengths that options leave open from data and model. Rows that are too long are reported
with other bad rows, or left out and counted under `--skip-too-long`.
"""

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, isnan, nan
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from hybrid_engine.distributed.processes import get_world_size
from hybrid_engine.rlhf.data.encoding import encode_answer, encode_prompt
from hybrid_engine.rlhf.data.parts import load_parts
from hybrid_engine.rlhf.data.reading import read_prompt_rows
from hybrid_engine.rlhf.data.rows import PromptRow, Row, each_good, say_what_is_gone, shown_source
from hybrid_engine.rlhf.options.answering import EvaluateConfig
from hybrid_engine.rlhf.options.columns import DataSource
from hybrid_engine.rlhf.options.distillation import template_columns
from hybrid_engine.rlhf.options.shared import AnswerOptions, DatasetOptions
from hybrid_engine.rlhf.runs.run_log import say
from hybrid_engine.rlhf.runs.stages import load_config, mix_seed, num_positions

R = TypeVar("R", bound=Row)
Value = TypeVar("Value")
LengthsT = TypeVar("LengthsT", bound=AnswerOptions | EvaluateConfig)
LONGEST_ANSWER = 256
"""Tokens of an answer in training, of which a step draws hundreds, if the data has no longer ones; TRL's default."""
WITHOUT_POSITIONS = 8192
"""Tokens of a prompt and its answer, if the model's config names no limit."""
ANSWERS = ("answer", "solution", "completion", "chosen")
"""Columns of prompts in which datasets have answers."""
SHARE = 0.99
"""Share of the data's answers that the longest answer of the run holds; the longest of all may be a mistake."""


class PromptTokens(NamedTuple):
    """Lengths of the shortest and the longest prompt that is answered, in tokens."""

    shortest: int
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], most: int) -> "PromptTokens":
        """The lengths for prompts of these lengths, of which at most the last `most` tokens are read."""
        return cls(min(most, min(lengths)), min(most, max(lengths)))


def load_prompt_rows(
    source: DataSource | str, columns: Collection[str] = ()
) -> tuple[list[PromptRow], list[PromptRow]]:
    """Training and held-out prompts of a dataset, with its other columns; no task is in both.

    Args:
        source: the dataset and how it is read; or only its name.
        columns: those that the rewards read: equal prompts that differ in them are tasks of their own, each in either
            part. Without such a difference no prompt is in both.

    Raises:
        ValueError: the dataset cannot be read, the column `prompt` is missing or a value of it is neither text nor a
            conversation, or one of the two parts would be empty.
    """
    source = DataSource.of(source)
    train, held_out = load_parts(source, read_prompt_rows, columns)
    if not held_out:
        raise ValueError(
            f"--held-out-share={source.held_out_share} holds out none of the {len(train)} prompts of {source.shown}, "
            "but a run needs at least one for evaluation; raise it"
        )
    return train, held_out


def fit_prompts(
    rows: Sequence[PromptRow], tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int, *, skips: bool
) -> list[PromptRow]:
    """The prompts of a rollout: all of `rows`, or with `skips` those of at most `max_prompt_tokens` tokens.

    Logs how many are longer: a rollout cuts off their beginning.

    Raises:
        ValueError: fewer are left than there are processes, or the tokenizer cannot encode one.
    """
    is_long = [len(encode_prompt(tokenizer, row)) > max_prompt_tokens for row in rows]
    if not any(is_long):
        return list(rows)
    found = f"{sum(is_long)} of {len(rows)} prompts have more tokens than --max-prompt-tokens={max_prompt_tokens}"
    if not skips:
        say(f"{found} and lose their beginning; raise it, or leave them out with --skip-too-long")
        return list(rows)
    left = [row for row, is_too_long in zip(rows, is_long, strict=True) if not is_too_long]
    if len(left) < get_world_size():
        raise ValueError(f"--skip-too-long: {found}, but every process needs one that fits; raise it")
    say(f"{found} and are left out")
    return left


def fill_prompt(row: PromptRow, template: str) -> PromptRow:
    """The row whose prompt is `template` with the row's columns in place of their names.

    `{prompt}` is the prompt's text, or that of a conversation's last message, which the filled template replaces.

    Raises:
        ValueError: the row lacks a column of the template, or the last message is not text.
    """
    turns = row.prompt
    text = turns if isinstance(turns, str) else turns[-1].get("content")
    if not isinstance(text, str):
        raise ValueError(
            f"{row.place}: --teacher-prompt needs text in the last message of the prompt; leave the row out"
        )
    values = {**row.columns, "prompt": text}
    for name in template_columns(template):
        if values.get(name) is None:
            raise ValueError(
                f"{row.place} has no value in the column {name!r} of --teacher-prompt; its columns are "
                f"{', '.join(['prompt', *sorted(row.columns)])}"
            )
    filled = template.format_map(values)
    return replace(row, prompt=filled if isinstance(turns, str) else [*turns[:-1], turns[-1] | {"content": filled}])


def select_prompts(num_prompts: int, first: int, count: int, seed: int) -> list[int]:
    """Indices `first` to `first + count` of an endless series of reshuffled passes over `num_prompts` prompts.

    The series depends only on the arguments, so a resumed run continues with the next prompts.
    """
    indices: list[int] = []
    for position in range(first, first + count):
        epoch, offset = divmod(position, num_prompts)
        if offset == 0 or not indices:
            order = torch.randperm(num_prompts, generator=torch.Generator().manual_seed(mix_seed(seed, epoch)))
        indices.append(int(order[offset]))
    return indices


class SelectedPrompts(NamedTuple):
    """Prompts that a `Curriculum` selected."""

    indices: list[int]
    position: int
    """The position of the series after the last prompt that was selected or skipped."""
    num_outside: int
    """Number of selected prompts that are outside the window, because too few others were left."""


@dataclass
class Curriculum:
    """Selects from the series of prompts those that are neither too hard nor too easy for the policy of the moment.

    A prompt is drawn if it has no pass rate yet, if its last one is within the window, or if it was skipped `revisit`
    times since: a pass rate grows old as the policy learns. The state is the same on every process.

    Source: Kimi k1.5, arXiv 2501.12599, section 2.3, which samples by difficulty and by the success rates seen so far;
    DAPO, arXiv 2503.14476, section 3.2, leaves out the rates 0 and 1 after the answers were sampled.
    """

    num_prompts: int
    low: float
    """The lowest pass rate of a prompt that is drawn, from 0."""
    high: float
    """The highest, up to 1."""
    revisit: int
    """Times that a prompt is skipped before it is drawn again; 0: it never is."""
    rates: torch.Tensor = field(init=False)
    """`[num_prompts]` fp64: the share of the last group's judged answers that passed; nan before the first."""
    skips: torch.Tensor = field(init=False)
    """`[num_prompts]` int64: times that a prompt was skipped since it was drawn."""

    def __post_init__(self) -> None:
        self.rates = torch.full((self.num_prompts,), nan, dtype=torch.float64)
        self.skips = torch.zeros(self.num_prompts, dtype=torch.int64)

    def select(self, first: int, count: int, seed: int) -> SelectedPrompts:
        """`count` prompts from position `first` of the series of `select_prompts` on; notes those that it skips.

        After a whole pass the prompts that are still missing are the first that it skipped.
        """
        indices: list[int] = []
        skipped: list[int] = []
        end = first + max(count, self.num_prompts)
        for index in self._series(first, end, count, seed):
            (indices if self._is_due(index) else skipped).append(index)
            if len(indices) == count:
                break
        outside = skipped[: count - len(indices)]
        for index in skipped[len(outside) :]:
            self.skips[index] += 1
        return SelectedPrompts(indices + outside, first + len(indices) + len(skipped), len(outside))

    def _series(self, first: int, end: int, at_once: int, seed: int) -> Iterator[int]:
        for position in range(first, end, at_once):
            yield from select_prompts(self.num_prompts, position, min(at_once, end - position), seed)

    def _is_due(self, index: int) -> bool:
        rate = float(self.rates[index])
        is_old = 0 < self.revisit <= int(self.skips[index])
        return isnan(rate) or self.low <= rate <= self.high or is_old

    def note(self, rates: Iterable[tuple[int, float]]) -> None:
        """Notes the pass rates of prompts that were drawn, by index; nan for a group without a judged answer."""
        for index, rate in rates:
            self.rates[index], self.skips[index] = rate, 0

    def state(self) -> dict[str, torch.Tensor]:
        """The state for a checkpoint, as `load` takes it."""
        return {"rates": self.rates.clone(), "skips": self.skips.clone()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continues from the `state` of an interrupted run over as many prompts."""
        self.rates, self.skips = state["rates"].clone(), state["skips"].clone()


class Tokens(Protocol):
    """A row as tokens."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest sequence that a model reads of the row."""


T = TypeVar("T", bound=Tokens)


class Limit(NamedTuple):
    """The largest number of tokens of a row; None: no limit."""

    tokens: int | None
    name: str
    """The origin of the limit, such as `--max-tokens=512`."""
    remedy: str
    """The remedy for a longer row, such as "raise it"."""


def limit_of(max_tokens: int | None, positions: int | None, model: str) -> Limit:
    """The limit of `--max-tokens`, or the positions of `model` if there are fewer; None is no bound."""
    if max_tokens is not None and (positions is None or max_tokens <= positions):
        return Limit(max_tokens, f"--max-tokens={max_tokens}", "raise it")
    return Limit(positions, f"the {positions} positions of {model}", "use a model with more")


def keep_fitting(
    config: DatasetOptions, rows: Sequence[R], tokens: Sequence[T], limit: Limit
) -> tuple[list[R], list[T]]:
    """The rows within `limit`, and their tokens.

    With `--skip-too-long` the others are left out, which is logged; without it they are bad rows, as `each_good` treats
    them.

    Args:
        config: options of the dataset of these rows.
        rows: as read.
        tokens: of each row.
        limit: the largest number of tokens.

    Raises:
        ValueError: with the rows that are too long, and their lengths.
    """
    is_long = [limit.tokens is not None and entry.num_tokens > limit.tokens for entry in tokens]
    pairs = list(zip(rows, tokens, strict=True))
    if any(is_long) and config.skip_too_long:
        say(f"{sum(is_long)} of {len(rows)} rows have more tokens than {limit.name} and are left out")
        kept = [pair for pair, is_left_out in zip(pairs, is_long, strict=True) if not is_left_out]
    else:
        option = "" if config.skip_bad_rows else ", or leave out longer rows with --skip-too-long"
        remedies = iter([f"; {limit.remedy}{option}"])

        def check(pair: tuple[R, T]) -> None:
            row, found = pair[0], pair[1].num_tokens
            if limit.tokens is not None and found > limit.tokens:  # gives the remedy once: it is the same for all
                raise ValueError(f"{row.place} has {found} tokens, more than {limit.name}{next(remedies, '')}")

        kept, _ = each_good(pairs, check, shown_source(config, rows), skips=config.skip_bad_rows)
    say_what_is_gone(rows, [row for row, _ in kept])
    return [row for row, _ in kept], [found for _, found in kept]


def settle_lengths(
    config: LengthsT, prompts: Sequence[int], answer: int = 0, *, most: int = LONGEST_ANSWER, is_said: bool = True
) -> LengthsT:
    """The options, with lengths of 0 replaced by those of data and model, which is logged; given lengths stay.

    The longest prompt of the data is kept whole if it leaves `most` tokens for an answer, or half of the model's
    positions. An answer has up to `most` tokens, or those that the prompt leaves.

    Args:
        config: of a recipe.
        prompts: tokens of each prompt.
        answer: tokens of the data's long answers; 0: it has none.
        most: tokens of an answer, if the data has no longer ones.
        is_said: whether the chosen lengths are logged with their origin.
    """
    given_prompt, given_new = config.max_prompt_tokens, config.max_new_tokens
    if given_prompt and given_new:
        return config
    room, longest, most = Room.of(config), max(prompts), max(most, answer)
    reserved = given_new or min(most, room.total // 2)
    num_prompt = given_prompt or max(1, min(longest, room.total - reserved))
    num_new = given_new or max(1, min(most, room.behind(num_prompt, longest)))
    if is_said:
        of_prompt = "the longest of the data" if num_prompt == longest else f"the longest of the data has {longest}"
        of_answer = "99% of the answers in the data are not longer" if most == answer else "the default"
        of_answer = of_answer if num_new == most else "what is left"
        say(
            f"prompts of up to {num_prompt} tokens ({'as given' if given_prompt else of_prompt}), answers "
            f"of up to {num_new} ({'as given' if given_new else of_answer}): {room.reason}; "
            "--max-prompt-tokens and --max-new-tokens change it"
        )
    return replace(config, max_prompt_tokens=num_prompt, max_new_tokens=num_new)


class Room(NamedTuple):
    """Tokens that a prompt and its answer may have together."""

    positions: int
    """Positions of the model; a prompt takes as many as it has tokens."""
    in_pass: int
    """Tokens of a pass, which must hold the longest allowed prompt."""
    reason: str
    """The origin of the smaller number, in words."""

    @classmethod
    def of(cls, config: AnswerOptions | EvaluateConfig) -> "Room":
        """The room for a recipe's options and its `model`."""
        found = num_positions(load_config(str(config.model)))
        positions, in_pass = found or WITHOUT_POSITIONS, config.tokens_in_pass or sys.maxsize
        if isinstance(config, AnswerOptions) and in_pass < positions:
            budget = config.tokens_per_micro_batch
            return cls(positions, in_pass, f"a pass of --tokens-per-micro-batch={budget} holds {in_pass}")
        if found is None:
            return cls(
                positions,
                in_pass,
                f"the config of --model has no position limit, so both together have at most {positions}",
            )
        return cls(positions, in_pass, f"--model has {positions} positions")

    @property
    def total(self) -> int:
        """The smaller of both numbers."""
        return min(self.positions, self.in_pass)

    def behind(self, num_prompt: int, longest: int) -> int:
        """Tokens left for an answer after prompts of up to `num_prompt` tokens; the longest prompt has `longest`."""
        return min(self.positions - min(num_prompt, longest), self.in_pass - num_prompt)


def long_answer(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> int:
    """The 99th percentile of the answers in the columns of `rows`, in tokens; ranked by their characters.

    Returns 0 if there are no answers.
    """
    values = [row.columns.get(name) for row in rows for name in ANSWERS]
    texts = sorted(filter(None, map(_text_of, values)), key=len)
    return len(encode_answer(tokenizer, long_one(texts))) if texts else 0


def _text_of(answer: Any) -> str | None:
    """The text of an answer, or of its last turn if it is a conversation; None for anything else."""
    if isinstance(answer, list) and answer and isinstance(answer[-1], dict):
        answer = answer[-1].get("content")
    return answer if isinstance(answer, str) else None


def long_one(ordered: Sequence[Value]) -> Value:
    """The entry that a share `SHARE` of `ordered`, which is not empty, does not exceed."""
    return ordered[ceil(SHARE * len(ordered)) - 1]
