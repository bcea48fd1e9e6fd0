"""Calls of tools in what a model writes: found while it comes, and handed out as OpenAI's `tool_calls`.

How a model writes them is said by its tokenizer's `response_template`, which transformers reads; for tokenizers that
have none, there are the three common forms. What looks like a call and is none stays text.
"""

import json
import re
import secrets
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

AUTO, NONE, OWN = "auto", "none", "tokenizer"


class Form(NamedTuple):
    """How a family of models writes calls."""

    sign: str
    """A template that has it, and no other form's, writes this form."""
    opening: str
    """Regular expression of what begins a call, or several."""
    kept: str = ""
    """The part of the opening that belongs to the call."""
    closing: str | None = None
    """None: the end of the answer."""
    special: tuple[str, ...] = ()
    """Special tokens to be read as text."""


FORMS = {
    "hermes": Form("<tool_call>", r"\s*<tool_call>", closing="</tool_call>", special=("<tool_call>", "</tool_call>")),
    "llama3": Form("<|python_tag|>", r"\A\s*(?:<\|python_tag\|>\s*)?\{", "{", special=("<|python_tag|>",)),
    "mistral": Form("[TOOL_CALLS]", r"\s*\[TOOL_CALLS\]", special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
}
PARSERS = (AUTO, NONE, OWN, *FORMS)
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")  # Mistral's later form: f[ARGS]{"x": 1}
_BETWEEN = re.compile(r"[\s;,]*(?:\[TOOL_CALLS\])?\s*")


def choose_parser(wanted: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The parser for `wanted`, which is one of PARSERS: "auto" takes what the tokenizer shows beyond doubt, or "none".

    Raises ValueError for another name, and for "tokenizer" where it says nothing.
    """
    if wanted not in PARSERS:
        raise ValueError(f"tool_call_parser={wanted!r} must be one of {', '.join(PARSERS)}")
    has_own = getattr(tokenizer, "response_template", None) is not None
    if wanted == OWN and not has_own:
        raise ValueError("tool_call_parser='tokenizer': it has no response_template; name a form, or none")
    if wanted != NONE and not hasattr(tokenizer, "get_response_parser"):
        if wanted == AUTO:
            return NONE
        raise ValueError(f"tool_call_parser={wanted!r} needs a newer transformers; upgrade it, or pass none")
    if wanted != AUTO:
        return wanted
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    shown = [name for name, form in FORMS.items() if form.sign in template]
    if has_own:
        return OWN
    # Qwen 3.5 and its like write <function=...> between Hermes' tags.
    return shown[0] if len(shown) == 1 and "<function=" not in template else NONE


def shown_tokens(parser: str, tokenizer: PreTrainedTokenizerBase, end_tokens: list[int]) -> set[int]:
    """Special tokens that the parser must see as text."""
    if parser == OWN:
        return set(tokenizer.all_special_ids) - set(end_tokens)
    known = tokenizer.get_vocab()
    return {known[text] for text in FORMS[parser].special if text in known}


class ToolCallParser:
    """Reads one answer; `calls` has those found so far, as OpenAI's objects.

    Args:
        parser: as `choose_parser` found it, not "none".
        tools: of the request.
    """

    def __init__(self, parser: str, tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]]):
        self.calls: list[dict[str, Any]] = []
        self._form = FORMS.get(parser)
        template = tokenizer.response_template if self._form is None else _response_template(self._form)
        self._reader: Any = tokenizer.get_response_parser(template, prefix="", tools=tools)
        self._region = ""  # what came of the region that is open

    def add(self, text: str) -> str:
        """Takes in what came; returns what of it, and of what came before, is no call."""
        if self._reader is None:
            return text
        try:
            return "".join(self._read(event) for event in self._reader.feed(text))
        except (ValueError, KeyError):
            return self._give_up(text)

    def finish(self) -> str:
        """At the end of the answer: returns what of the text that was held back is no call."""
        if self._reader is None:
            return ""
        try:
            return "".join(self._read(event) for event in self._reader.finalize()[1])
        except (ValueError, KeyError):
            return self._give_up("")

    def _give_up(self, text: str) -> str:
        """What the tokenizer's template cannot read is text to its end."""
        self._reader = None
        return self._region + text

    def _read(self, event: dict[str, Any]) -> str:
        kind, field = event["type"], event["field"]
        if kind == "region_open":
            self._region = ""
        elif kind == "region_chunk" and field == "content":
            return event["text"]
        elif kind == "region_chunk":
            self._region += event["text"]
        elif field == "tool_calls":
            region, self._region = self._region, ""
            found = _own_calls(event["value"]) if self._form is None else parse_calls(self._form.kept + region)
            if not found and self._form is not None:
                return self._as_written(region)
            self.calls += [_call(name, arguments) for name, arguments in found]
        elif field != "content" and isinstance(event["value"], str):
            return event["value"]  # reasoning and the like
        return ""

    def _as_written(self, region: str) -> str:
        assert self._form is not None
        sign = self._form.sign if self._form.kept == "" else ""
        return sign + self._form.kept + region + (self._form.closing or "")


def _response_template(form: Form) -> dict[str, Any]:
    calls = {"open_pattern": form.opening, "repeats": True, "content": "text", "content_args": {"strip": False}}
    if form.closing is not None:
        calls["close"] = form.closing
    return {"start_anchor": "\0", "fields": {"tool_calls": calls, "content": {"content": "text"}}}


def _own_calls(value: Any) -> list[tuple[str, Any]]:
    functions = [item.get("function", {}) for item in (value if isinstance(value, list) else [value])]
    return [(function["name"], function.get("arguments", {})) for function in functions]


def parse_calls(text: str) -> list[tuple[str, Any]]:
    """Names and arguments of the calls that `text` is, one JSON object after another or a list; empty: it is none."""
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


def _call(name: str, arguments: Any) -> dict[str, Any]:
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": written},
    }


def for_template(message: dict[str, Any]) -> dict[str, Any]:
    """`message` with the arguments of its calls as objects, which templates write themselves."""
    if not isinstance(message.get("tool_calls"), list):
        return message
    return message | {"tool_calls": [_with_object(call) for call in message["tool_calls"]]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return call | {"function": function | {"arguments": json.loads(function["arguments"])}}
    except ValueError:
        return call
