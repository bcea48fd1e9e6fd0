"""Columns as `--columns`, `--prompt-template` and the like name them: found in rows, also inside of other columns."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MISSING = object()
_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def find_value(value: Any, path: str) -> Any:
    """The value of a row under `path`, as `reward_model.ground_truth` or `turns.0.text`; `MISSING` where there is none.

    A column that is called so as a whole, with its dots, comes first.
    """
    if isinstance(value, Mapping) and path in value:
        return value[path]
    place = path.find(".")
    while place > 0:
        inner = _entry(value, path[:place])
        found = MISSING if inner is MISSING else find_value(inner, path[place + 1 :])
        if found is not MISSING:
            return found
        place = path.find(".", place + 1)
    return _entry(value, path)


def _entry(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return value.get(name, MISSING)
    if isinstance(value, Sequence) and not isinstance(value, str) and name.isdecimal() and int(name) < len(value):
        return value[int(name)]
    return MISSING


def read_prompt_template(given: str) -> str:
    """The text of `--prompt-template`, or of the file that it names.

    Raises:
        ValueError: the file cannot be read, a brace is alone or empty, or no column is named.
    """
    template = _file_text(given)
    for match in _FIELD.finditer(template):
        if match[0] in ("{", "}") or (match[1] is not None and not match[1].strip()):
            raise ValueError(
                f"--prompt-template={given!r} has {match[0]!r}, which names no column; write a column in braces, as "
                "{prompt}, and double a brace that is text"
            )
    if not template_columns(template):
        raise ValueError(
            f"--prompt-template={given!r} names no column, so that all prompts would be the same; write a column in "
            "braces, as {prompt}"
        )
    return template


def template_columns(template: str) -> set[str]:
    """The columns that a template names, with the dots that lead inside of one."""
    return {match[1] for match in _FIELD.finditer(template) if match[1] is not None}


def _file_text(given: str) -> str:
    try:
        if Path(given).is_file():
            return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if "{" not in given:
            raise ValueError(f"--prompt-template={given!r} cannot be read: {error}") from error
    if "\\n" in given:
        raise ValueError(
            f"--prompt-template={given!r} has a backslash and an n, which a shell leaves as they are; write $'...' for "
            "a new line, or name a file with the template"
        )
    return given


def fill_template(template: str, row: Mapping[str, Any]) -> str:
    """The template with the row's values; ValueError, without the row's place, where one is missing or no text."""

    def value_of(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        value = find_value(row, match[1])
        if value is None or value is MISSING or isinstance(value, (list, dict)):
            shown = "no value" if value is None or value is MISSING else "a list or an object"
            raise ValueError(f"has {shown} in {match[1]!r}, which --prompt-template names; fix the row or the template")
        return str(value)

    return _FIELD.sub(value_of, template)
