"""Hermes' form, which Qwen 2.5 and 3 write too: `<tool_call>` and `</tool_call>` around an object of JSON.

Source: https://github.com/NousResearch/Hermes-Function-Calling, "Prompt Format for Function Calling".
"""

from hybrid_engine.serving.parsers.form import Form

HERMES = Form(
    marks=("<tool_call>",),
    sign="<tool_call>",
    closing="</tool_call>",
    grammar=(r'{0} "\n" call "\n" {1}', r'("\n" {0} "\n" call "\n" {1})*', ""),
    special=("<tool_call>", "</tool_call>"),
)
