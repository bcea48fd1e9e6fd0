"""Mistral's form: `[TOOL_CALLS]` before a list of JSON, or before each `name[ARGS]{...}` in later models.

Source: https://docs.mistral.ai/guides/tokenization (tokenizers v3 and v11).
"""

from hybrid_engine.serving.parsers.form import Form

MISTRAL = Form(
    marks=("[TOOL_CALLS]",),
    sign="[TOOL_CALLS]",
    grammar=('{0} "[" call', '(", " call)*', '"]"'),
    special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
)
