"""Llama 3's form: an answer that is a call is nothing but objects of JSON, with `parameters` for arguments.

Source: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1, "JSON based tool calling".
"""

from hybrid_engine.serving.parsers.form import Form

LLAMA3 = Form(
    marks=("<|python_tag|>",),
    sign="<|python_tag|>",
    is_whole=True,
    arguments="parameters",
    grammar=("call", '("; " call)*', ""),
    special=("<|python_tag|>",),
)
