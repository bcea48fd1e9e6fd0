"""Qwen3-Coder's form, which Qwen 3.5 and later write too: a call in tags, each argument on lines of its own.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A value has no quotes: whether it is a text, the schema of the tool says.

Source: the chat template of https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct.
"""

import re
from typing import Any

from hybrid_engine.serving.parsers.form import Form, Tools, schemas_of, typed_value

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def read_tagged_calls(text: str, tools: Tools) -> list[tuple[str, Any]]:
    """The name and arguments of the call in `text`; empty if it is anything else."""
    call = _FUNCTION.fullmatch(text)
    if call is None or _PARAMETER.sub("", call[2]).strip():
        return []
    schemas = schemas_of(tools, call[1])
    return [(call[1], {key: typed_value(value, schemas.get(key)) for key, value in _PARAMETER.findall(call[2])})]


def is_cut_in_parameter(text: str) -> bool:
    """Whether `text` ends inside a value."""
    return text.rfind("<parameter=") > text.rfind("</parameter>")


QWEN3_CODER = Form(
    marks=("<tool_call>", "<function="),
    sign="<tool_call>",
    closing="</tool_call>",
    needs_closing=True,
    read=read_tagged_calls,
    is_cut_in_value=is_cut_in_parameter,
    special=("<tool_call>", "</tool_call>"),
)
