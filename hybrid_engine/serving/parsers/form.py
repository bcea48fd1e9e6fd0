"""The form in which a family of models writes calls of tools, and the reader of answers in such a form.

Each form has a file in this folder. A `FormReader` splits one answer into text, reasoning and calls while it is
generated; `Choice` (`responses.py`) feeds it. Text that looks like a call and is not one, or is not complete, stays
text as the model wrote it. Only white space around calls and reasoning is left out.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from hybrid_engine.generation.detokenize import longest_beginning

Tools = Mapping[str, Mapping[str, Any]]
"""The tools that may be called: JSON schemas of their arguments by name."""
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")  # Mistral's later form: f[ARGS]{"x": 1}
_BETWEEN = re.compile(r"[\s;,]*(?:\[TOOL_CALLS\])?\s*")
THINK, THOUGHT = "<think>", "</think>"


def tool_name(tool: dict[str, Any]) -> str | None:
    """The name of a tool in a request; None if it has none."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def as_tool_call(name: str, arguments: Any) -> dict[str, Any]:
    """A call as OpenAI's object."""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": written},
    }


def read_json_calls(text: str, tools: Tools) -> list[tuple[str, Any]]:
    """Names and arguments of the calls in `text`, JSON objects in sequence or a list; empty if it is anything else."""
    found: list[tuple[str, Any]] = []
    place = _BETWEEN.match(text).end()  # type: ignore[union-attr]
    while place < len(text):
        named = _NAMED.match(text, place)
        try:
            value, place = json.JSONDecoder().raw_decode(text, place if named is None else named.end())
        except (ValueError, RecursionError):
            return []
        place = _BETWEEN.match(text, place).end()  # type: ignore[union-attr]
        if named is not None:
            found.append((named[1], value))
            continue
        for call in value if isinstance(value, list) else [value]:
            if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                return []
            found.append((call["name"], call.get("arguments", call.get("parameters", {}))))
    return found


def is_cut_in_string(text: str) -> bool:
    """Whether `text` is JSON that ends inside a string, which may contain anything."""
    try:
        json.JSONDecoder().raw_decode(text.lstrip())
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except RecursionError:
        pass
    return False


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


class Form(NamedTuple):
    """The form in which a family of models writes calls."""

    marks: tuple[str, ...]
    """Texts that a chat template of this form contains."""
    sign: str
    """Text before calls."""
    closing: str | None = None
    """Text after a call; None: calls continue to the end of the answer."""
    needs_closing: bool = False
    """Whether a call without the text after it is not complete; calls in JSON show that themselves."""
    is_whole: bool = False
    """Whether an answer with calls consists only of calls: they begin with a brace, and the sign is optional."""
    read: Callable[[str, Tools], list[tuple[str, Any]]] = read_json_calls
    """Names and arguments of the calls in a text between sign and closing; empty if it is anything else."""
    is_cut_in_value: Callable[[str], bool] = is_cut_in_string
    """Whether a text ends inside a value, which may contain the closing."""
    arguments: str = "arguments"
    """The name of arguments in calls of JSON."""
    grammar: tuple[str, str, str] | None = None
    """The first call, further ones, and the end in Lark's notation; `{0}` is the sign, `{1}` the closing. None: calls
    of this form cannot be required."""
    special: tuple[str, ...] = ()
    """Special tokens to be read as text."""
    is_always_read: bool = False
    """Whether answers to requests without tools have this form too."""


def typed_value(text: str, schema: Mapping[str, Any] | None) -> Any:
    """The value of an argument that is written without its type: a text as it is, others as JSON or as Python.

    Args:
        schema: the argument's JSON schema; None if it is not known.
    """
    if schema is not None and schema.get("type") == "string":
        return text
    words = {"True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def read_json_arguments(text: str) -> dict[str, Any] | None:
    """The object of JSON that `text` is; None if it is anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_tagged_call(
    text: str, tools: Tools, *, call: re.Pattern[str], argument: re.Pattern[str]
) -> list[tuple[str, Any]]:
    """The name and arguments of the call in `text`, whose arguments are in tags; empty if it is anything else.

    Args:
        text: one call without its own tags.
        tools: their schemas say which arguments are texts.
        call: matches the whole; its groups are the name and all arguments.
        argument: matches one; its groups are key and value.
    """
    found = call.fullmatch(text)
    if found is None or argument.sub("", found[2]).strip():
        return []
    properties = tools.get(found[1], {}).get("properties")
    schemas: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
    return [(found[1], {key: typed_value(value, schemas.get(key)) for key, value in argument.findall(found[2])})]


class FormReader:
    """Reads calls of one form, and reasoning before everything else.

    Args:
        form: the form of the model's calls; None: there are no calls, only reasoning.
        tools: the tools that may be called.
        is_reasoning: the prompt ends with the beginning of reasoning.
    """

    def __init__(self, form: Form | None, tools: Tools, *, is_reasoning: bool = False):
        self._tools = tools
        self.calls: list[dict[str, Any]] = []
        self._buffer = ""  # unread text, or text of an incomplete call
        self._body = 0  # start of the call's body in the buffer, after the sign
        self._after_space: Callable[[bool], Shown] = self._read_reasoning
        self._read: Callable[[bool], Shown] = self._skip_space if is_reasoning else self._read_beginning
        self._after_reasoning: Callable[[bool], Shown] = self._pass_on
        if form is not None:
            self.form = form
            self._after_reasoning = self._read_whole if form.is_whole else self._read_text

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
            self._read = self._after_reasoning
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
            self._after_space = self._after_reasoning
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
        if self.form.needs_closing:
            text, self._buffer = self._buffer, ""
            return Shown(text)
        if self.form.closing is not None and self.form.closing in self._buffer[self._body :]:
            end = self._buffer.index(self.form.closing, self._body)  # its string never ended
            return self._close(end, end + len(self.form.closing))
        open_end = longest_beginning(self._buffer, [self.form.closing]) if self.form.closing else 0
        return self._close(len(self._buffer) - open_end, len(self._buffer))

    def _find_end(self, closing: str) -> int | None:
        """End of the `closing` of the call in the buffer, ignoring one inside a value; None if there is none."""
        place = self._buffer.find(closing, self._body)
        while place >= 0 and self.form.is_cut_in_value(self._buffer[self._body : place]):
            place = self._buffer.find(closing, place + 1)
        return None if place < 0 else place + len(closing)

    def _close(self, body_end: int, end: int) -> Shown:
        """Reads the calls in the buffer up to `end`; if there are none, that part is text."""
        written, self._read = self._buffer[:end], self._read_text
        found = self.form.read(self._buffer[self._body : body_end], self._tools)
        if self.form.is_whole and not all(name in self._tools for name, _ in found):
            found = []  # JSON with the name of something else
        self._buffer = self._buffer[end:]
        self.calls += [as_tool_call(name, arguments) for name, arguments in found]
        return Shown() if found else Shown(written)
