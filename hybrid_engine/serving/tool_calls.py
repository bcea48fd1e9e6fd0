"""Tool calls in a model's output: their forms, how they are forced, and how an answer is split into text and calls.

A tokenizer's `response_template`, which transformers reads, says how a model writes calls. For tokenizers without one,
there are the three common forms. An `AnswerReader` splits one answer into text, reasoning and calls while it is
generated; `Choice` (`responses.py`) feeds it. Text that looks like a call and is not one, or is not complete, stays
text as the model wrote it. Only white space around calls and reasoning is left out.
"""

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from hybrid_engine.generation.detokenize import longest_beginning
from hybrid_engine.generation.guides import JSON_SPACE

AUTO, NONE, OWN = "auto", "none", "tokenizer"
MAX_DEPTH = 200
"""Most brackets in one another of a call's arguments, as in the body of a request; deeper ones stay text."""
_BRACKET = re.compile(r"[\[\]{}]")
WITHOUT_FORM = "llama3"
"""The form of required calls if the model shows none: a JSON object."""
_SPACED = {"x-guidance": {"whitespace_pattern": JSON_SPACE}}
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")  # Mistral's later form: f[ARGS]{"x": 1}
_BETWEEN = re.compile(r"[\s;,]*(?:\[TOOL_CALLS\])?\s*")
# DeepSeek's templates write calls if content is null, but `apply_chat_template` drops null contents.
_ASKS_FOR_NULL = re.compile(r"content['\"]?\]?\s+is\s+(not\s+)?none")
_WITH_NULLS = (
    "{%- set given = namespace(messages=[]) -%}{%- for message in messages -%}"
    "{%- set is_call = message.tool_calls and not message.content -%}"
    "{%- set given.messages = given.messages + [dict(message, content=none) if is_call or 'content' not in message "
    "else message] -%}{%- endfor -%}{%- set messages = given.messages -%}"
)
THINK, THOUGHT = "<think>", "</think>"
REASONING_FIELDS = ("thinking", "reasoning", "reasoning_content")
"""Names of the reasoning field in response templates."""


class Form(NamedTuple):
    """The form in which a family of models writes calls."""

    sign: str
    """Text before calls. A chat template that contains it, and no other form's sign, writes this form."""
    closing: str | None = None
    """Text after a call; None: calls continue to the end of the answer."""
    is_whole: bool = False
    """Whether an answer with calls consists only of calls: they begin with a brace, and the sign is optional."""
    arguments: str = "arguments"
    """The model's name for arguments."""
    grammar: tuple[str, str, str] = ("", "", "")
    """The first call, further ones, and the end in Lark's notation; `{0}` is the sign, `{1}` the closing."""
    special: tuple[str, ...] = ()
    """Special tokens to be read as text."""


FORMS = {
    "hermes": Form(
        "<tool_call>",
        "</tool_call>",
        grammar=(r'{0} "\n" call "\n" {1}', r'("\n" {0} "\n" call "\n" {1})*', ""),
        special=("<tool_call>", "</tool_call>"),
    ),
    "llama3": Form(
        "<|python_tag|>",
        is_whole=True,
        arguments="parameters",
        grammar=("call", '("; " call)*', ""),
        special=("<|python_tag|>",),
    ),
    "mistral": Form(
        "[TOOL_CALLS]",
        grammar=('{0} "[" call', '(", " call)*', '"]"'),
        special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
}


PARSERS = (AUTO, NONE, OWN, *FORMS)


def tool_name(tool: dict[str, Any]) -> str | None:
    """The name of a tool in a request; None if it has none."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def choose_parser(wanted: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The parser for `wanted`, one of PARSERS. "auto" takes the form that the tokenizer shows unambiguously, or "none".

    Raises ValueError for another name, and for "tokenizer" if it has no response template.
    """
    if wanted not in PARSERS:
        raise ValueError(f"tool_call_parser={wanted!r} must be one of {', '.join(PARSERS)}")
    has_own = getattr(tokenizer, "response_template", None) is not None
    if wanted == OWN and not has_own:
        raise ValueError("tool_call_parser='tokenizer': it has no response_template; name a form, or none")
    if wanted != AUTO:
        return wanted
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    shown = [name for name, form in FORMS.items() if form.sign in template]
    if has_own:
        return OWN
    # Qwen 3.5 and similar models write <function=...> between Hermes' tags.
    return shown[0] if len(shown) == 1 and "<function=" not in template else NONE


def shown_tokens(parser: str, tokenizer: PreTrainedTokenizerBase, end_tokens: list[int]) -> set[int]:
    """Special tokens that the answer reader must see as text."""
    if parser == OWN:
        return set(tokenizer.all_special_ids) - set(end_tokens)
    known = tokenizer.get_vocab()
    return {known[text] for text in (*FORMS[parser].special, "<think>", "</think>") if text in known}


def forcing_parser(parser: str) -> str:
    """The parser of answers that must be calls; `parser` is that of answers that may be calls."""
    return parser if parser in FORMS else WITHOUT_FORM


def calls_grammar(
    parser: str,
    tools: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    is_single: bool,
    or_text: dict[str, Any] | None = None,
) -> str:
    """The grammar of answers that are calls of `tools`, in Lark's notation.

    Args:
        parser: one of FORMS.
        tools: tools of a request, each with a name; arguments follow its `parameters`, a JSON schema.
        tokenizer: the model's tokenizer.
        is_single: allow only one call.
        or_text: the JSON schema of answers that are not calls; None: every answer must be a call.
    """
    form = FORMS[parser]
    tags = [_terminal(tag, tokenizer) for tag in (form.sign, form.closing or "")]
    first, more, last = (part.format(*tags) for part in form.grammar)
    write_object = _object_schema if form.is_whole and or_text is not None else _object_grammar
    objects = " | ".join(write_object(tool["function"], form.arguments) for tool in tools)
    calls = f"calls: {first} {'' if is_single else more} {last}\ncall: {objects}\n"
    return f"start: calls\n{calls}" if or_text is None else f"start: calls | %json {json.dumps(or_text)}\n{calls}"


def _object_grammar(function: dict[str, Any], arguments: str) -> str:
    begin = f'{{"name": {json.dumps(function["name"])}, "{arguments}": '
    return f'{json.dumps(begin)} %json {json.dumps(_SPACED | _arguments_schema(function))} "}}"'


def _object_schema(function: dict[str, Any], arguments: str) -> str:
    """The grammar of one tool's call as one schema, for objects that begin as other JSON may.

    The library reads ahead as far as a literal of the grammar matches, and would take `{"name` as the start of a call.
    """
    named = {"const": function["name"]}
    properties = {"name": named, arguments: _moved(_arguments_schema(function), f"#/properties/{arguments}")}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return f"%json {json.dumps(_SPACED | schema)}"


def _arguments_schema(function: dict[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    # Without this, a schema allows arguments that the tool does not have.
    return {"additionalProperties": False} | schema if "properties" in schema else schema


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references still resolve when it is at `place` in another schema."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(part, place) for name, part in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


def _terminal(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """`text` in Lark's notation; special tokens are token ids there."""
    token = tokenizer.get_vocab().get(text)
    added = tokenizer.added_tokens_decoder.get(token)
    return f"<[{token}]>" if added is not None and added.special else json.dumps(text)


def parse_calls(text: str) -> list[tuple[str, Any]]:
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


def as_tool_call(name: str, arguments: Any) -> dict[str, Any]:
    """A call as OpenAI's object."""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": written},
    }


def for_template(message: dict[str, Any]) -> dict[str, Any]:
    """`message` with the arguments of its calls as objects, which templates serialize themselves."""
    if not isinstance(message.get("tool_calls"), list):
        return message
    return message | {"tool_calls": [_with_object(call) for call in message["tool_calls"]]}


def asking_template(tokenizer: PreTrainedTokenizerBase, tools: list[Any] | None) -> str:
    """The chat template of `tokenizer`, changed to see missing contents as null if it checks for null.

    Raises:
        ValueError: there is no template.
    """
    template = tokenizer.get_chat_template(None, tools)
    return _WITH_NULLS + template if _ASKS_FOR_NULL.search(template) else template


def form_for_template(messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]) -> str:
    """The text that `render`, a chat template, returns for the first form of the messages that it accepts.

    Some templates concatenate contents, including missing contents of calls. Some concatenate arguments of calls and
    need them as JSON text. Some write objects as Python does.

    Raises:
        Exception: the error of the first form, if it accepts none.
    """
    failed: Exception | None = None
    for form in _forms(messages):
        try:
            text = render(form)
        except Exception as error:  # a template is a program of the model's, and may fail in any way
            failed = failed or error
            continue
        if not any(written in text for written in _written_by_python(form)):
            return text
    raise failed or ValueError("it writes the arguments of calls of tools as Python does, not as JSON")


def _forms(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The distinct forms: contents unchanged or "" if missing, arguments as objects or as text."""
    written = [_with_text(message) for message in messages]
    found: list[list[dict[str, Any]]] = []
    for one in (messages, written):
        for form in (one, [_with_content(message) for message in one]):
            if form not in found:
                found.append(form)
                yield form


def _with_content(message: dict[str, Any]) -> dict[str, Any]:
    is_missing = message.get("content") is None and ("content" in message or message.get("tool_calls"))
    return message | {"content": ""} if is_missing else message


def _written_by_python(messages: list[dict[str, Any]]) -> Iterator[str]:
    """Arguments of calls in Python's notation, if it is not JSON."""
    for call in (call for message in messages for call in message.get("tool_calls") or []):
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(arguments, dict) and repr(arguments) != json.dumps(arguments, ensure_ascii=False):
            yield repr(arguments)


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """`message` with the arguments of its calls as JSON text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return message | {"tool_calls": [_with_written(call) for call in calls]}


def _with_written(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return call | {"function": function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = function["arguments"]
    if max(accumulate(1 if sign in "[{" else -1 for sign in _BRACKET.findall(arguments)), default=0) > MAX_DEPTH:
        return call
    try:
        return call | {"function": function | {"arguments": json.loads(arguments)}}
    except (ValueError, RecursionError):
        return call


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
