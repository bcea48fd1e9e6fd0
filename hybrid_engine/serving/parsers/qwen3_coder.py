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
from functools import partial

from hybrid_engine.serving.parsers.form import Form, read_tagged_call

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def is_cut_in_parameter(text: str) -> bool:
    """Whether `text` ends inside a value."""
    return text.rfind("<parameter=") > text.rfind("</parameter>")


QWEN3_CODER = Form(
    marks=("<tool_call>", "<function="),
    sign="<tool_call>",
    closing="</tool_call>",
    needs_closing=True,
    read=partial(read_tagged_call, call=_FUNCTION, argument=_PARAMETER),
    is_cut_in_value=is_cut_in_parameter,
    special=("<tool_call>", "</tool_call>"),
)
