"""Chooses rows that are held out from training, to measure on: by a hash of their prompt, the same on every machine.

A prompt is the text before an answer, in any format of rows, so that a prompt that one recipe holds out is not trained
on by another. Text is the same prompt as a conversation with it as the only turn. A system turn before others does not
count: one question with two system turns is one prompt.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeVar

from hybrid_engine.rlhf.data.rows import (
    ConversationRow,
    LabelledRow,
    LearnedRow,
    Message,
    PreferenceRow,
    PromptRow,
    TextRow,
    Turns,
)

DataRow = PromptRow | LearnedRow | PreferenceRow | LabelledRow
R = TypeVar("R", bound=DataRow)
SYSTEM_ROLES = ("system", "developer")


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
