"""GLM's form (4.5 and later): the name, then a tag for each key and each value. 4.7 leaves out the line feeds.

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

A text is written as it is, everything else as JSON.

Source: the chat template of https://huggingface.co/zai-org/GLM-4.6.
"""

import re
from functools import partial

from hybrid_engine.serving.parsers.form import Form, read_tagged_call

_CALL = re.compile(r"\s*([^\s<]+)\s*((?:<arg_key>.*</arg_value>)?)\s*", re.DOTALL)
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def is_cut_in_argument(text: str) -> bool:
    """Whether `text` ends inside a value."""
    return text.rfind("<arg_value>") > text.rfind("</arg_value>")


GLM = Form(
    marks=("<tool_call>", "<arg_key>"),
    sign="<tool_call>",
    closing="</tool_call>",
    needs_closing=True,
    read=partial(read_tagged_call, call=_CALL, argument=_PAIR),
    is_cut_in_value=is_cut_in_argument,
    special=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
