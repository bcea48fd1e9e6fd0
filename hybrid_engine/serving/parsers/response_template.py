"""The form that a tokenizer describes itself, in its `response_template`, which transformers reads."""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_engine.serving.parsers.form import Shown, as_tool_call

REASONING_FIELDS = ("thinking", "reasoning", "reasoning_content")
"""Names of the reasoning field in response templates."""


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
