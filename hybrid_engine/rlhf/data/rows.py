"""The rows of a data set, one small class for each thing that a recipe trains on, and which columns make which.

The columns are the field's (TRL's "dataset formats"): a value is text, or a conversation: a list of messages, each with
a `role` and a `content`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
Turns = str | list[Message]
"""Text, or the messages of a conversation."""

FORMATS: dict[str, frozenset[str]] = {
    "labelled answers": frozenset({"prompt", "completion", "label"}),
    "preference pairs": frozenset({"chosen", "rejected"}),
    "conversations": frozenset({"messages"}),
    "prompts with answers": frozenset({"prompt", "completion"}),
    "prompts": frozenset({"prompt"}),
    "plain text": frozenset({"text"}),
}
"""What a data set is, by the columns that it has: the first that has all of its columns there."""


def detect_format(columns: Collection[str]) -> str | None:
    """The entry of `FORMATS` that a data set with these columns is; None where it is none of them."""
    return next((name for name, needed in FORMATS.items() if needed <= set(columns)), None)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What every kind of row has."""

    place: str = "this row"
    """Where it stands, for errors: `--dataset='data.jsonl': line 3`."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The data set's other columns by name: what a reward compares with, and `tools` for a chat template."""


@dataclass(frozen=True, kw_only=True)
class PromptRow(Row):
    """What a model is to answer."""

    prompt: Turns


@dataclass(frozen=True, kw_only=True)
class CompletionRow(Row):
    """A prompt and the answer to be learned; both are text or both conversations."""

    prompt: Turns
    completion: Turns


@dataclass(frozen=True, kw_only=True)
class ConversationRow(Row):
    """A whole conversation, of which the assistant's turns are to be learned."""

    messages: list[Message]


@dataclass(frozen=True, kw_only=True)
class TextRow(Row):
    """Text of which every token is to be learned."""

    text: str


@dataclass(frozen=True, kw_only=True)
class PreferenceRow(Row):
    """Two different answers to one prompt; all three are text or all three conversations."""

    prompt: Turns
    chosen: Turns
    rejected: Turns
    margin: float | None = None
    """By how much `chosen` is better, in units of the reward; None where the data set has no such column."""


@dataclass(frozen=True, kw_only=True)
class LabelledRow(Row):
    """One answer to a prompt and whether it is a good one; both are text or both conversations."""

    prompt: Turns
    completion: Turns
    label: bool


LearnedRow = CompletionRow | ConversationRow | TextRow
"""What supervised training learns from."""


def texts_of(row: LearnedRow) -> list[str]:
    """All text in `row`, in its order: what a tokenizer can be trained on."""
    if isinstance(row, TextRow):
        return [row.text]
    parts: list[Turns] = [row.messages] if isinstance(row, ConversationRow) else [row.prompt, row.completion]
    texts = [part if isinstance(part, str) else [turn.get("content") for turn in part] for part in parts]
    flat = [text for part in texts for text in ([part] if isinstance(part, str) else part)]
    return [text for text in flat if isinstance(text, str)]
