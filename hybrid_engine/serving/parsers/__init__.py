"""Parsers of answers: which one a model needs, how calls are forced, and a file for each form of calls.

A tokenizer's `response_template`, which transformers reads, says how a model writes calls. For tokenizers without one,
the form is known by its marks in the chat template.
"""

import json
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_engine.generation.guides import JSON_SPACE
from hybrid_engine.serving.parsers.deepseek import DEEPSEEK
from hybrid_engine.serving.parsers.form import THINK, THOUGHT, AnswerReader, FormReader, tool_name
from hybrid_engine.serving.parsers.glm import GLM
from hybrid_engine.serving.parsers.gpt_oss import GPT_OSS, ChannelReader
from hybrid_engine.serving.parsers.hermes import HERMES
from hybrid_engine.serving.parsers.llama3 import LLAMA3
from hybrid_engine.serving.parsers.mistral import MISTRAL
from hybrid_engine.serving.parsers.qwen3_coder import QWEN3_CODER
from hybrid_engine.serving.parsers.response_template import TemplateReader

AUTO, NONE, OWN, THOUGHTS = "auto", "none", "tokenizer", "thoughts"
FORMS = {
    "hermes": HERMES,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "qwen3_coder": QWEN3_CODER,
    "gpt_oss": GPT_OSS,
    "glm": GLM,
    "deepseek": DEEPSEEK,
}
PARSERS = (AUTO, NONE, OWN, *FORMS)
"""Names that a server can be given; THOUGHTS, which reads reasoning alone, follows from requests."""
WITHOUT_FORM = "llama3"
"""The form of required calls if that of the model is unknown or cannot be required: a JSON object."""
_SPACED = {"x-guidance": {"whitespace_pattern": JSON_SPACE}}


def choose_parser(wanted: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The parser for `wanted`, one of PARSERS. "auto" takes the form that the tokenizer shows unambiguously, or "none".

    Raises ValueError for another name, and for "tokenizer" if it has no response template.
    """
    if wanted not in PARSERS:
        raise ValueError(f"tool_call_parser={wanted!r} must be one of {', '.join(PARSERS)}")
    has_own = getattr(tokenizer, "response_template", None) is not None
    if wanted == OWN and not has_own:
        raise ValueError("tool_call_parser='tokenizer': it has no response_template; name a form, or none")
    if wanted != AUTO:
        return wanted
    if has_own:
        return OWN
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    shown = {name: form for name, form in FORMS.items() if all(mark in template for mark in form.marks)}
    # Some forms have all marks of another one, and more.
    exact = [name for name, form in shown.items() if not any(set(form.marks) < set(o.marks) for o in shown.values())]
    return exact[0] if len(exact) == 1 else NONE


def shown_tokens(parser: str, tokenizer: PreTrainedTokenizerBase, end_tokens: list[int]) -> set[int]:
    """Special tokens that the answer reader must see as text."""
    if parser == OWN:
        return set(tokenizer.all_special_ids) - set(end_tokens)
    known = tokenizer.get_vocab()
    special = FORMS[parser].special if parser in FORMS else ()
    return {known[text] for text in (*special, THINK, THOUGHT) if text in known}


def forcing_parser(parser: str) -> str:
    """The parser of answers that must be calls; `parser` is that of answers that may be calls."""
    return parser if has_grammar(parser) else WITHOUT_FORM


def has_grammar(parser: str) -> bool:
    """Whether calls in the form of `parser` can be required."""
    return parser in FORMS and FORMS[parser].grammar is not None


def calls_grammar(
    parser: str,
    tools: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    is_single: bool,
    or_text: dict[str, Any] | None = None,
) -> str:
    """The grammar of answers that are calls of `tools`, in Lark's notation.

    Args:
        parser: one of FORMS that has a grammar.
        tools: tools of a request, each with a name; arguments follow its `parameters`, a JSON schema.
        tokenizer: the model's tokenizer.
        is_single: allow only one call.
        or_text: the JSON schema of answers that are not calls; None: every answer must be a call.
    """
    form = FORMS[parser]
    tags = [_terminal(tag, tokenizer) for tag in (form.sign, form.closing or "")]
    assert form.grammar is not None, f"{parser=}"
    first, more, last = (part.format(*tags) for part in form.grammar)
    write_object = _object_schema if form.is_whole and or_text is not None else _object_grammar
    objects = " | ".join(write_object(tool["function"], form.arguments) for tool in tools)
    calls = f"calls: {first} {'' if is_single else more} {last}\ncall: {objects}\n"
    return f"start: calls\n{calls}" if or_text is None else f"start: calls | %json {json.dumps(or_text)}\n{calls}"


def _object_grammar(function: dict[str, Any], arguments: str) -> str:
    begin = f'{{"name": {json.dumps(function["name"])}, "{arguments}": '
    return f'{json.dumps(begin)} %json {json.dumps(_SPACED | _arguments_schema(function))} "}}"'


def _object_schema(function: dict[str, Any], arguments: str) -> str:
    """The grammar of one tool's call as one schema, for objects that begin as other JSON may.

    The library reads ahead as far as a literal of the grammar matches, and would take `{"name` as the start of a call.
    """
    named = {"const": function["name"]}
    properties = {"name": named, arguments: _moved(_arguments_schema(function), f"#/properties/{arguments}")}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return f"%json {json.dumps(_SPACED | schema)}"


def _arguments_schema(function: dict[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    # Without this, a schema allows arguments that the tool does not have.
    return {"additionalProperties": False} | schema if "properties" in schema else schema


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references still resolve when it is at `place` in another schema."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(part, place) for name, part in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


def _terminal(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """`text` in Lark's notation; special tokens are token ids there."""
    token = tokenizer.get_vocab().get(text)
    added = tokenizer.added_tokens_decoder.get(token)
    return f"<[{token}]>" if added is not None and added.special else json.dumps(text)


def build_reader(
    parser: str, tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]], prompt: list[int]
) -> AnswerReader:
    """The reader of one answer to the tokens `prompt`; `parser` is a result of `choose_parser`, or THOUGHTS."""
    if parser == OWN:
        return TemplateReader(tokenizer, tools, prompt)
    schemas = {name: tool["function"].get("parameters") or {} for tool in tools if (name := tool_name(tool))}
    if parser == "gpt_oss":
        return ChannelReader(schemas)
    begun = tokenizer.decode(prompt[-8:]).rstrip().endswith(THINK)
    return FormReader(FORMS.get(parser), schemas, is_reasoning=begun)
