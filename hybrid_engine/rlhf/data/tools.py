"""Tools and calls of tools as data sets hold them, on their way to a chat template.

Arrow, in which `datasets` keeps rows, gives every object the keys of all and fills them with None. A template would
write these as `null`, and a model learn them: they are dropped. Arguments that are JSON text keep their own nulls.
"""

import json
import reprlib
from typing import Any

from hybrid_engine.serving.tool_calls import for_template


def without_nones(value: Any) -> Any:
    """A value as JSON has it without the keys whose values are None, however deep; entries of lists stay."""
    if isinstance(value, dict):
        return {key: without_nones(item) for key, item in value.items() if item is not None}
    return [without_nones(item) for item in value] if isinstance(value, list) else value


def read_tools(value: Any) -> list[dict[str, Any]]:
    """A column `tools`: a list of objects, or JSON text of it or of each; empty for a row without tools.

    Raises:
        ValueError: in words that follow the row's place.
    """
    found = without_nones(_read_json(value))
    if found in (None, "", [], {}):
        return []
    tools = [_read_json(tool) for tool in found] if isinstance(found, list) else [found]
    if not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(
            f"has tools={value!r}; it must be a list of objects such as "
            '{"type": "function", "function": {"name": "..."}}, or JSON text of it: fix the row'
        )
    return tools


def with_tool_calls(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its calls as templates read them: arguments as objects, OpenAI's older forms as the newer."""
    called = message.get("function_call")
    if isinstance(called, dict):
        others = {key: value for key, value in message.items() if key != "function_call"}
        message = {**others, "tool_calls": [{"type": "function", "function": called}]}
    if message.get("role") == "function":
        message = {**message, "role": "tool"}
    return for_template(message)


def _read_json(value: Any) -> Any:
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"has tools={reprlib.repr(value)}, which is not JSON ({error}); fix the row") from error
