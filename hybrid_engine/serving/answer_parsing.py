"""Splits one answer into text, reasoning and tool calls while it is generated.

Text that is not a complete call stays text as the model wrote it. Only white space around calls and reasoning is left
out. `Choice` (`responses.py`) feeds a reader with the text of each answer.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from hybrid_engine.generation.detokenize import longest_beginning
from hybrid_engine.serving.tool_calls import FORMS, OWN, Form, as_tool_call, is_cut_in_string, parse_calls, tool_name

THINK, THOUGHT = "<think>", "</think>"
REASONING_FIELDS = ("thinking", "reasoning", "reasoning_content")
"""Names of the reasoning field in response templates."""


class Shown(NamedTuple):
    """The part of an answer that can be shown."""

    text: str = ""
    reasoning: str = ""


class AnswerReader(Protocol):
    """Splits the text of one answer as it is generated."""

    calls: list[dict[str, Any]]
    """Complete calls, as OpenAI's objects."""

    def add(self, text: str) -> Shown:
        """Adds text; returns the part of it, and of text held back before, that can be shown."""

    def finish(self) -> Shown:
        """Returns the rest, at the end of the answer."""


def build_reader(
    parser: str, tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]], prompt: list[int]
) -> AnswerReader:
    """The reader of one answer to the tokens `prompt`; `parser` is a result of `choose_parser` other than "none"."""
    if parser == OWN:
        return TemplateReader(tokenizer, tools, prompt)
    begun = tokenizer.decode(prompt[-8:]).rstrip().endswith(THINK)
    return FormReader(FORMS[parser], {tool_name(tool) for tool in tools}, is_reasoning=begun)


class FormReader:
    """Reads calls of one form, and reasoning before everything else.

    Args:
        form: the form of the model's calls.
        names: names of the tools that may be called.
        is_reasoning: the prompt ends with the beginning of reasoning.
    """

    def __init__(self, form: Form, names: Collection[str | None], *, is_reasoning: bool = False):
        self.form = form
        self._names = names
        self.calls: list[dict[str, Any]] = []
        self._buffer = ""  # unread text, or text of an incomplete call
        self._body = 0  # start of the call's body in the buffer, after the sign
        self._after_space: Callable[[bool], Shown] = self._read_reasoning
        self._read: Callable[[bool], Shown] = self._skip_space if is_reasoning else self._read_beginning

    def add(self, text: str) -> Shown:
        """Adds text; returns the part of it, and of text held back before, that can be shown."""
        self._buffer += text
        return self._advance(False)

    def finish(self) -> Shown:
        """Returns the rest, at the end of the answer."""
        return self._advance(True)

    def _advance(self, is_end: bool) -> Shown:
        parts: list[Shown] = []
        before = None
        while before != (self._read, len(self._buffer)):
            before = self._read, len(self._buffer)
            parts.append(self._read(is_end))
        return Shown("".join(part.text for part in parts), "".join(part.reasoning for part in parts))

    def _read_beginning(self, is_end: bool) -> Shown:
        visible = self._buffer.lstrip()
        if visible.startswith(THINK):
            self._buffer = visible[len(THINK) :]
            self._read, self._after_space = self._skip_space, self._read_reasoning
        elif is_end or not THINK.startswith(visible):
            self._read = self._read_whole if self.form.is_whole else self._read_text
        return Shown()

    def _skip_space(self, is_end: bool) -> Shown:
        self._buffer = self._buffer.lstrip()
        if self._buffer or is_end:
            self._read = self._after_space
        return Shown()

    def _read_reasoning(self, is_end: bool) -> Shown:
        text, found, rest = self._buffer.partition(THOUGHT)
        if found:
            self._buffer, self._read = rest, self._skip_space
            self._after_space = self._read_whole if self.form.is_whole else self._read_text
            return Shown(reasoning=text.rstrip())
        return Shown(reasoning=self._take_before(THOUGHT, is_end).rstrip() if is_end else self._take_before(THOUGHT))

    def _take_before(self, tag: str, is_end: bool = False) -> str:
        """Removes and returns the buffer, except white space and a prefix of `tag` at its end; at the end all of it."""
        end = len(self._buffer)
        if not is_end:
            end = len(self._buffer[: end - longest_beginning(self._buffer, [tag])].rstrip())
        taken, self._buffer = self._buffer[:end], self._buffer[end:]
        return taken

    def _read_text(self, is_end: bool) -> Shown:
        text, found, _ = self._buffer.partition(self.form.sign)
        if not found:
            return Shown(self._take_before(self.form.sign, is_end))
        shown = text.rstrip()
        self._body = len(text) + len(found) - len(shown)
        self._buffer, self._read = self._buffer[len(shown) :], self._read_call
        return Shown(shown)

    def _read_whole(self, is_end: bool) -> Shown:
        """Decides at the beginning of an answer whether it consists of calls only, or has none."""
        visible = self._buffer.lstrip()
        rest = visible.removeprefix(self.form.sign).lstrip()
        if rest.startswith("{"):
            self._body, self._read = len(self._buffer) - len(rest), self._read_call
        elif is_end or (rest and not self.form.sign.startswith(visible)):
            self._read = self._pass_on
        return Shown()

    def _pass_on(self, is_end: bool) -> Shown:
        text, self._buffer = self._buffer, ""
        return Shown(text)

    def _read_call(self, is_end: bool) -> Shown:
        if self.form.closing is not None and (end := self._find_end(self.form.closing)) is not None:
            return self._close(end - len(self.form.closing), end)
        if not is_end:
            return Shown()
        if self.form.closing is not None and self.form.closing in self._buffer[self._body :]:
            end = self._buffer.index(self.form.closing, self._body)  # its string never ended
            return self._close(end, end + len(self.form.closing))
        open_end = longest_beginning(self._buffer, [self.form.closing]) if self.form.closing else 0
        return self._close(len(self._buffer) - open_end, len(self._buffer))

    def _find_end(self, closing: str) -> int | None:
        """End of the `closing` of the call in the buffer, ignoring one inside a JSON string; None if there is none."""
        place = self._buffer.find(closing, self._body)
        while place >= 0 and is_cut_in_string(self._buffer[self._body : place]):
            place = self._buffer.find(closing, place + 1)
        return None if place < 0 else place + len(closing)

    def _close(self, body_end: int, end: int) -> Shown:
        """Reads the calls in the buffer up to `end`; if there are none, that part is text."""
        written, self._read = self._buffer[:end], self._read_text
        found = parse_calls(self._buffer[self._body : body_end])
        if self.form.is_whole and not all(name in self._names for name, _ in found):
            found = []  # JSON with the name of something else
        self._buffer = self._buffer[end:]
        self.calls += [as_tool_call(name, arguments) for name, arguments in found]
        return Shown() if found else Shown(written)


class TemplateReader:
    """Reads answers by the tokenizer's `response_template`, as transformers does.

    Args:
        prompt: the prompt of the answer; it may contain the beginning of a part of the answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]], prompt: list[int]):
        self.calls: list[dict[str, Any]] = []
        self._reader: Any = tokenizer.get_response_parser(prefix=prompt, tools=tools)
        self._pending = ""  # text that was neither shown nor read as part of a field

    def add(self, text: str) -> Shown:
        """Adds text; returns the part of it, and of text held back before, that can be shown."""
        self._pending += text
        if self._reader is None:
            return self._give_up()
        return self._attempt(lambda: self._reader.feed(text))

    def finish(self) -> Shown:
        """Returns the rest, at the end of the answer."""
        return Shown() if self._reader is None else self._attempt(lambda: self._reader.finalize()[1])

    def _attempt(self, read: Callable[[], list[dict[str, Any]]]) -> Shown:
        try:
            parts = [self._show(event) for event in read()]
        except (ValueError, KeyError, TypeError, AttributeError):
            return self._give_up()
        return Shown("".join(part.text for part in parts), "".join(part.reasoning for part in parts))

    def _give_up(self) -> Shown:
        """Shows the text that the template cannot read, and everything after it, as text."""
        self._reader = None
        text, self._pending = self._pending, ""
        return Shown(text)

    def _show(self, event: dict[str, Any]) -> Shown:
        kind, field, is_reasoning = event["type"], event["field"], event["field"] in REASONING_FIELDS
        if kind == "region_chunk" and (field == "content" or is_reasoning):
            self._pending = self._pending.partition(event["text"])[2]
            return Shown(reasoning=event["text"]) if is_reasoning else Shown(event["text"])
        if kind != "region_close" or field == "content" or is_reasoning:
            return Shown()
        if field == "tool_calls":
            self.calls += _own_calls(event["value"])
        self._pending = ""
        return Shown(event["value"]) if field != "tool_calls" and isinstance(event["value"], str) else Shown()


def _own_calls(value: Any) -> list[dict[str, Any]]:
    functions = [item["function"] for item in (value if isinstance(value, list) else [value])]
    return [as_tool_call(function["name"], function.get("arguments", {})) for function in functions]
