"""Tool calls in a model's output: their forms, how they are parsed, and how they are forced.

A tokenizer's `response_template`, which transformers reads, says how a model writes calls. For tokenizers without one,
there are the three common forms. Text that looks like a call and is not one stays text (`answer_parsing.py`).
"""

import json
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from hybrid_engine.generation.guides import JSON_SPACE

AUTO, NONE, OWN = "auto", "none", "tokenizer"
MAX_DEPTH = 200
"""Most brackets in one another of a call's arguments, as in the body of a request; deeper ones stay text."""
_BRACKET = re.compile(r"[\[\]{}]")


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
WITHOUT_FORM = "llama3"
"""The form of required calls if the model shows none: a JSON object."""
PARSERS = (AUTO, NONE, OWN, *FORMS)
_SPACED = {"x-guidance": {"whitespace_pattern": JSON_SPACE}}
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")  # Mistral's later form: f[ARGS]{"x": 1}
_BETWEEN = re.compile(r"[\s;,]*(?:\[TOOL_CALLS\])?\s*")


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
    """As `_object_grammar`, but by one schema, for objects whose first characters do not tell them from other JSON.

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


# DeepSeek's templates write calls if content is null, but `apply_chat_template` drops null contents.
_ASKS_FOR_NULL = re.compile(r"content['\"]?\]?\s+is\s+(not\s+)?none")
_WITH_NULLS = (
    "{%- set given = namespace(messages=[]) -%}{%- for message in messages -%}"
    "{%- set is_call = message.tool_calls and not message.content -%}"
    "{%- set given.messages = given.messages + [dict(message, content=none) if is_call or 'content' not in message "
    "else message] -%}{%- endfor -%}{%- set messages = given.messages -%}"
)


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
