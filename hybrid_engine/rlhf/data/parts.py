"""Splits the rows of a run into two parts: to train on, and held out to measure on. No task is in both.

A prompt is one task. If its rows have several values in the columns that the rewards read, or in those of `--row-key`,
each value is a task of its own (`row_keys`), so that such a prompt may be in both parts. Held-out rows are chosen by a
hash of their prompt, the same on every machine. A prompt is the text before an answer, in any format of rows, so that a
prompt that one recipe holds out is not trained on by another. Text is the same prompt as a conversation with it as the
only turn. A system turn before others does not count: one question with two system turns is one prompt.

The module also applies the options that wrap prompts: template, system prompt and conversation.
"""

import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from hybrid_engine.rlhf.data.data_files import HELD_OUT, SCHEME, Table
from hybrid_engine.rlhf.data.rows import (
    ConversationRow,
    LabelledRow,
    LearnedRow,
    Message,
    PreferenceRow,
    PromptRow,
    TextRow,
    Turns,
    each_good,
)
from hybrid_engine.rlhf.options.columns import DataSource, fill_template
from hybrid_engine.rlhf.runs.run_log import say

DataRow = PromptRow | LearnedRow | PreferenceRow | LabelledRow
R = TypeVar("R", bound=DataRow)
SYSTEM_ROLES = ("system", "developer")
Read = Callable[[DataSource], list[R]]


def is_held_out(prompt: str, share: float = 0.1) -> bool:
    """True for a fixed `share` of all prompts, chosen by a hash of the text: the same on every machine."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def prompt_text(prompt: Turns) -> str:
    """A prompt as one text that identifies it; a conversation as JSON."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)


def prompt_key(prompt: Turns) -> str:
    """The text whose hash decides whether a prompt is held out; equal for prompts that ask the same."""
    if isinstance(prompt, str):
        return prompt
    turns = [turn for turn in prompt if turn["role"] not in SYSTEM_ROLES] or prompt
    content = turns[0].get("content")
    is_text = len(turns) == 1 and turns[0]["role"] == "user" and isinstance(content, str)
    return str(content) if is_text else prompt_text(turns)


def row_prompt_key(row: DataRow) -> str:
    """`prompt_key` of the part before the row's last answer; of plain text the whole."""
    return prompt_key(_prompt(row))


def row_keys(rows: Sequence[DataRow], columns: Collection[str] = ()) -> list[str]:
    """For each row a key of its task: rows with one key are held out, or trained on, together.

    It is the prompt's key. If rows with one prompt have several values in `columns`, such as a game with its seeds,
    each value is a task of its own. So where one prompt is one task, no column affects whether it is held out, and
    recipes that read different columns agree.
    """
    prompts = [row_prompt_key(row) for row in rows]
    values = [_values(row, columns) for row in rows]
    tasks: dict[str, set[str]] = defaultdict(set)
    for prompt, value in zip(prompts, values, strict=True):
        tasks[prompt].add(value)
    pairs = zip(prompts, values, strict=True)
    return [prompt if len(tasks[prompt]) == 1 else f"{prompt}\n{value}" for prompt, value in pairs]


def earlier_prompt_keys(row: DataRow) -> Iterator[str]:
    """`prompt_key` of the part before each answer of the row but the last: these answers may be learned too."""
    if isinstance(row, (PromptRow, TextRow)):
        return
    for turns, num_read in _conversations(row):
        answers = [index for index in range(num_read, len(turns)) if turns[index]["role"] == "assistant"]
        for index in answers[:-1]:
            if index:
                yield prompt_key(turns[:index])


def _conversations(row: ConversationRow | PreferenceRow | LabelledRow | Any) -> Iterator[tuple[list[Message], int]]:
    """The whole conversations of a row, and how many turns of each are only read."""
    if isinstance(row, ConversationRow):
        yield row.messages, 0
    elif not isinstance(row.prompt, str):
        answers = [row.chosen, row.rejected] if isinstance(row, PreferenceRow) else [row.completion]
        yield from (([*row.prompt, *answer], len(row.prompt)) for answer in answers)


def _prompt(row: DataRow) -> Turns:
    if isinstance(row, ConversationRow):
        answers = [index for index, turn in enumerate(row.messages) if turn["role"] == "assistant"]
        return row.messages[: answers[-1]] or row.messages
    return row.text if isinstance(row, TextRow) else row.prompt


def _values(row: DataRow, columns: Collection[str]) -> str:
    return json.dumps([row.columns.get(name) for name in sorted(columns)], sort_keys=True, default=str)


def load_parts(source: DataSource, read: Read[R], columns: Collection[str] = ()) -> tuple[list[R], list[R]]:
    """Training and held-out rows of a run's data; uses the dataset's own parts if it has them.

    Args:
        source: the datasets and how they are read.
        read: a function of `reading.py`, for the rows that the recipe trains on.
        columns: those that the rewards read, without reference answers; rows of one prompt with several values in them
            are tasks of their own.

    Raises:
        ValueError: the data cannot be read, or one of the parts would be empty.
    """
    columns = source.row_key or columns
    data_sets = [read_once(one, read, columns) for one in source.as_found.each()]
    if source.held_out_source is None:
        made = [read_once(one, read, columns) for one in _held_out_of_their_own(source.as_found)]
        data_sets, held_out = _hold_out_of_each(source, data_sets, columns)
        held_out += [row for rows in made for row in rows]
    else:
        held_out = read_once(source.held_out_source.as_found, read, columns)
        data_sets = _without(held_out, data_sets, source.held_out_source, columns)
    check_row_key(source, [*held_out, *(row for rows in data_sets for row in rows)])
    train = _mixed([_apart_from(held_out, rows) for rows in data_sets], source)
    check_parts(source, train, held_out)
    _say_what_is_in_both(train, held_out, columns)
    return wrap_rows(train, source), wrap_rows(held_out, source)


def read_once(source: DataSource, read: Read[R], columns: Collection[str]) -> list[R]:
    """The rows of the data; with `--deduplicate` only the first of equal rows."""
    rows = read(source)
    if not source.deduplicates:
        return rows
    different: dict[Any, R] = {}
    for row, key in zip(rows, row_keys(rows, columns), strict=True):
        different.setdefault((key, *_answers(row)), row)
    say(f"--deduplicate: {len(rows) - len(different)} of {len(rows)} rows are duplicates and are left out")
    return list(different.values())


def check_row_key(source: DataSource, rows: Sequence[DataRow]) -> None:
    """Raises ValueError if `--row-key` names a column that does not exist, or one that the recipe learns from."""
    columns = {"prompt", *(name for row in rows for name in row.columns)}
    for name in source.row_key:
        if name not in columns:
            raise ValueError(
                f"--row-key={' '.join(source.row_key)!r}: {name!r} is not a column that distinguishes rows of "
                f"{source.shown}; choose from the columns {', '.join(map(repr, sorted(columns)))}"
            )


def _say_what_is_in_both(train: Sequence[DataRow], held_out: Sequence[DataRow], columns: Collection[str]) -> None:
    asked = {row_prompt_key(row) for row in held_out}
    num_in_both = len(asked.intersection(map(row_prompt_key, train)))
    if num_in_both:
        say(
            f"{num_in_both} of {len(asked)} held-out prompts are also trained on, with other values of "
            f"{', '.join(map(repr, sorted(columns)))}; --row-key prompt keeps every prompt in one part"
        )


def _is_made(dataset: str) -> bool:
    """Whether a dataset is generated, with a held-out split of its own, and not stored."""
    return dataset.startswith(f"{SCHEME}:")


def _held_out_of_their_own(source: DataSource) -> Iterator[DataSource]:
    """The held-out parts of generated datasets."""
    return (replace(one, split=HELD_OUT) for one in source.each() if _is_made(one.datasets[0]))


def _hold_out_of_each(
    source: DataSource, data_sets: Sequence[list[R]], columns: Collection[str]
) -> tuple[list[list[R]], list[R]]:
    """The training rows of each dataset, and the held-out rows of all stored ones."""
    keys = iter(row_keys([row for rows in data_sets for row in rows], columns))
    train: list[list[R]] = []
    held_out: list[R] = []
    for dataset, rows in zip(source.datasets, data_sets, strict=True):
        share = 0 if _is_made(dataset) else source.held_out_share
        train.append([])
        for row in rows:
            (held_out if is_held_out(next(keys), share) else train[-1]).append(row)
    return train, held_out


def _without(
    held_out: Sequence[R], data_sets: Sequence[list[R]], source: DataSource, columns: Collection[str]
) -> list[list[R]]:
    """The datasets without the tasks in `held_out`; a prompt with another value in `columns` stays."""
    keys = row_keys([*held_out, *(row for rows in data_sets for row in rows)], columns)
    asked, others = set(keys[: len(held_out)]), iter(keys[len(held_out) :])
    kept = [[row for row in rows if next(others) not in asked] for rows in data_sets]
    num_left_out = sum(map(len, data_sets)) - sum(map(len, kept))
    if num_left_out:
        say(f"{num_left_out} rows have a prompt of {source.shown}, which is held out, and are left out")
    return kept


def _mixed(data_sets: Sequence[list[R]], source: DataSource) -> list[R]:
    """The training rows of all datasets, shuffled so that any prefix has rows of each.

    With weights there are as many rows as without: a dataset whose share exceeds its rows has some of them several
    times, one with a smaller share has some left out. Raises ValueError if a dataset has no rows.
    """
    if len(data_sets) == 1:
        return data_sets[0]
    _check_each(data_sets, source)
    order = random.Random(0)
    parts = list(data_sets)
    if source.weights:
        total, weight = sum(map(len, data_sets)), sum(source.weights)
        counts = [round(total * own / weight) for own in source.weights]
        parts = [_repeated(rows, count, order) for rows, count in zip(data_sets, counts, strict=True)]
        shown = zip(source.datasets, data_sets, counts, strict=True)
        said = ", ".join(f"{count} rows from the {len(rows)} of {name!r}" for name, rows, count in shown)
        say(f"--dataset-weights: an epoch has {said}")
    mixed = [row for rows in parts for row in rows]
    order.shuffle(mixed)
    return mixed


def _check_each(data_sets: Sequence[list[R]], source: DataSource) -> None:
    """Raises ValueError if a dataset of a mixture, but not all of it, has no rows to train on."""
    for name, rows in zip(source.datasets, data_sets, strict=True):
        if not rows and any(data_sets):
            raise ValueError(
                f"{source.shown}: {name!r} has no rows to train on, since all of them are held out or left out; give "
                "it more rows, change --held-out-share, or remove it and its --dataset-weights entry"
            )


def _repeated(rows: list[R], count: int, order: random.Random) -> list[R]:
    times, more = divmod(count, len(rows))
    return rows * times + order.sample(rows, more)


def check_parts(source: DataSource, train: Sequence[Any], held_out: Sequence[Any]) -> None:
    """Raises ValueError if no row is left to train on or, with a held-out share, to measure."""
    apart = source.held_out_source
    if apart is not None and not (train and held_out):
        raise ValueError(
            f"{apart.shown} holds out {len(held_out)} rows and leaves {len(train)} of {source.shown} to train on; both "
            "must have some rows: give other data"
        )
    if not train or (source.held_out_share and not held_out):
        raise ValueError(
            f"--held-out-share={source.held_out_share} of {source.shown} leaves {len(train)} rows to train on and "
            f"{len(held_out)} to evaluate on: prompts are held out by hash, with all of their rows; give more prompts, "
            "distinguish rows with the same prompt by --row-key, change the share, evaluate on other data with "
            "--held-out-dataset, or turn evaluation off with --held-out-share=0"
        )


def _apart_from(held_out: Sequence[R], train: list[R]) -> list[R]:
    """`train` without the conversations in which an earlier turn answers a held-out prompt."""
    keys = set(row_keys(held_out))
    kept = [row for row in train if keys.isdisjoint(earlier_prompt_keys(row))]
    if len(kept) < len(train):
        say(f"{len(train) - len(kept)} conversations are left out because an earlier turn answers a held-out prompt")
    return kept


def _answers(row: R) -> tuple[str, ...]:
    """A row's fields except its place and its other columns, as text."""
    fields = vars(replace(row, place="", columns={}))
    return tuple(prompt_text(value) if isinstance(value, list) else repr(value) for name, value in fields.items())


def write_prompts(table: Table, source: DataSource) -> Table:
    """The table with the column `prompt` written by `--prompt-template`, if it names only other columns."""
    template = source.prompt_template
    if template is None or source.wraps_prompts:
        return table
    return table.changed(lambda row: row | {"prompt": fill_template(template, row)})


def wrap_rows(rows: Sequence[R], source: DataSource) -> list[R]:
    """The rows with their prompts wrapped as the options say.

    Raises:
        ValueError: a row is plain text, which has no prompt, or lacks a column that the template names.
    """
    if source == source.as_found:
        return list(rows)
    return each_good(rows, partial(wrap_row, source), source.shown, skips=source.skips_bad_rows)[1]


def wrap_row(source: DataSource, row: R) -> R:
    """The row with its prompt wrapped as the options say; raises as `wrap_rows` does."""
    if isinstance(row, TextRow):
        raise ValueError(
            f"{row.place} is plain text, to which --prompt-template, --system-prompt and --as-conversation do not "
            "apply; leave them out, or give the dataset a prompt and a completion (--columns)"
        )
    if isinstance(row, ConversationRow):
        last = max(index for index, turn in enumerate(row.messages) if turn["role"] == "assistant")
        prompt = _wrapped(source, row, row.messages[:last])
        return replace(row, messages=[*prompt, *row.messages[last:]])
    prompt = _wrapped(source, row, row.prompt)
    if isinstance(row, PromptRow) or isinstance(row.prompt, str) == isinstance(prompt, str):
        return replace(row, prompt=prompt)
    if isinstance(row, PreferenceRow):
        return replace(row, prompt=prompt, chosen=_answer(row.chosen), rejected=_answer(row.rejected))
    return replace(row, prompt=prompt, completion=_answer(row.completion))


def _wrapped(source: DataSource, row: Any, prompt: Any) -> Any:
    if source.prompt_template is not None and source.wraps_prompts:
        prompt = _filled(source.prompt_template, row, prompt)
    if isinstance(prompt, str):
        if not source.is_conversation and source.system_prompt is None:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    if source.system_prompt is None or (prompt and prompt[0]["role"] in SYSTEM_ROLES):
        return prompt
    return [{"role": "system", "content": source.system_prompt}, *prompt]


def _filled(template: str, row: Any, prompt: Turns) -> Turns:
    """The template filled with a text, or with the last user turn of a conversation."""
    if isinstance(prompt, str):
        return _text(template, row, prompt)
    asked = [index for index, turn in enumerate(prompt) if turn["role"] == "user"]
    if not asked or not isinstance(prompt[asked[-1]].get("content"), str):
        raise ValueError(f"{row.place} has no user text for --prompt-template to wrap; fix the row")
    last = asked[-1]
    turn: Message = {**prompt[last], "content": _text(template, row, prompt[last]["content"])}
    return [*prompt[:last], turn, *prompt[last + 1 :]]


def _text(template: str, row: Any, prompt: str) -> str:
    try:
        return fill_template(template, {**row.columns, "prompt": prompt})
    except ValueError as error:
        raise ValueError(f"{row.place} {error}") from error


def _answer(text: Turns) -> Turns:
    return [{"role": "assistant", "content": text}] if isinstance(text, str) else text
