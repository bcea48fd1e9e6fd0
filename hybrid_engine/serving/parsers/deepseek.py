"""DeepSeek's form: special tokens around all calls, each call, and between name and arguments in JSON.

V3.1 writes the name, a separator and the object. V3 and R1 write `function`, a separator, the name, and the object in a
block of code.

Source: the chat templates of https://huggingface.co/deepseek-ai/DeepSeek-V3.1 and .../DeepSeek-R1.
"""

import json
import re
from typing import Any

from hybrid_engine.serving.parsers.form import Form, Tools

BAR, BLANK = "\uff5c", "\u2581"
BEGIN_ALL, END_ALL, BEGIN, END, SEPARATOR = (
    f"<{BAR}tool{BLANK}{name}{BAR}>"
    for name in (f"calls{BLANK}begin", f"calls{BLANK}end", f"call{BLANK}begin", f"call{BLANK}end", "sep")
)
_CALL = re.compile(rf"\s*{BEGIN}(.*?){SEPARATOR}(.*?){END}\s*", re.DOTALL)
_BLOCK = re.compile(r"\s*(\S+)\s*```json\s*(.*?)\s*```\s*", re.DOTALL)


def read_separated_calls(text: str, tools: Tools) -> list[tuple[str, Any]]:
    """Names and arguments of the calls in `text`; empty if it is anything else."""
    if _CALL.sub("", text).strip():
        return []
    found = []
    for name, written in _CALL.findall(text):
        block = _BLOCK.fullmatch(written)
        name, written = (block[1], block[2]) if block is not None else (name.strip(), written)
        try:
            found.append((name, json.loads(written)))
        except (ValueError, RecursionError):
            return []
    return found


def is_cut_in_call(text: str) -> bool:
    """Whether `text` ends inside a call."""
    return text.rfind(BEGIN) > text.rfind(END)


DEEPSEEK = Form(
    marks=(BEGIN_ALL,),
    sign=BEGIN_ALL,
    closing=END_ALL,
    read=read_separated_calls,
    is_cut_in_value=is_cut_in_call,
    special=(BEGIN_ALL, END_ALL, BEGIN, END, SEPARATOR),
)
