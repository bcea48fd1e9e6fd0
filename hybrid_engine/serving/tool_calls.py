"""Calls of tools in messages: as OpenAI's objects, and in the form that a chat template accepts.

How models write calls is in `parsers/`.
"""

import json
import re
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

MAX_DEPTH = 200
"""Most brackets in one another of a call's arguments, as in the body of a request; deeper ones stay text."""
_BRACKET = re.compile(r"[\[\]{}]")
# DeepSeek's templates write calls if content is null, but `apply_chat_template` drops null contents.
_ASKS_FOR_NULL = re.compile(r"content['\"]?\]?\s+is\s+(not\s+)?none")
_WITH_NULLS = (
    "{%- set given = namespace(messages=[]) -%}{%- for message in messages -%}"
    "{%- set is_call = message.tool_calls and not message.content -%}"
    "{%- set given.messages = given.messages + [dict(message, content=none) if is_call or 'content' not in message "
    "else message] -%}{%- endfor -%}{%- set messages = given.messages -%}"
)


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
