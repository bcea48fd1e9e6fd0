"""Parts of an answer in the order in which they are written: reasoning, text and calls of tools.

Anthropic's messages and OpenAI's responses both send an answer as a list of such parts, and stream each part by a
begin, what is added, and an end.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from hybrid_engine.serving.responses import Choice, Piece

Kind = Literal["reasoning", "text", "call"]
REASONING: Kind = "reasoning"
TEXT: Kind = "text"
CALL: Kind = "call"


@dataclass
class AnswerBlock:
    """One part of an answer."""

    kind: Kind
    text: str = ""
    """The text or reasoning so far; empty for a call."""
    call: dict[str, Any] | None = None
    """The call as OpenAI's object."""


class AnswerBlockEvent(NamedTuple):
    """A part begins, gets more text, or ends."""

    action: Literal["begin", "add", "end"]
    place: int
    """The number of the part in the answer."""
    block: AnswerBlock
    added: str = ""


class BlockStream:
    """The parts of one answer while it is generated."""

    def __init__(self) -> None:
        self.blocks: list[AnswerBlock] = []
        self._is_open = False

    def add(self, piece: Piece) -> Iterator[AnswerBlockEvent]:
        """The events of what a step added."""
        for kind, text in ((REASONING, piece.reasoning), (TEXT, piece.text)):
            if text:
                yield from self._write(kind, text)
        for call in piece.calls:
            yield from self.finish()
            yield self._begin(AnswerBlock(CALL, call=call))
            yield from self.finish()

    def finish(self) -> Iterator[AnswerBlockEvent]:
        """The end of the part that is open, if there is one."""
        if self._is_open:
            self._is_open = False
            yield AnswerBlockEvent("end", len(self.blocks) - 1, self.blocks[-1])

    def _write(self, kind: Kind, text: str) -> Iterator[AnswerBlockEvent]:
        if not self._is_open or self.blocks[-1].kind != kind:
            yield from self.finish()
            yield self._begin(AnswerBlock(kind))
        self.blocks[-1].text += text
        yield AnswerBlockEvent("add", len(self.blocks) - 1, self.blocks[-1], text)

    def _begin(self, block: AnswerBlock) -> AnswerBlockEvent:
        self.blocks.append(block)
        self._is_open = True
        return AnswerBlockEvent("begin", len(self.blocks) - 1, block)


def blocks_of(choice: Choice) -> list[AnswerBlock]:
    """The parts of a whole answer: reasoning, then text, then calls."""
    texts = ((REASONING, choice.reasoning), (TEXT, choice.text))
    blocks = [AnswerBlock(kind, text) for kind, text in texts if text]
    return blocks + [AnswerBlock(CALL, call=call) for call in choice.calls]


def joined_texts(content: str | list[dict[str, Any]], kinds: tuple[str, ...], place: str) -> str:
    """The text of a content that is text, or parts that have one of `kinds`.

    Raises ValueError for a part of another kind, which `place` names.
    """
    if isinstance(content, str):
        return content
    for part in content:
        if part.get("type") not in kinds or not isinstance(part.get("text"), str):
            raise ValueError(f"{place}: a part of type {part.get('type')!r} is not supported there; send text")
    return "".join(part["text"] for part in content)
