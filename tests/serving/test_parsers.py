"""Round trips of each family's form: a turn is rendered, read, and rendered again to the same tokens.

The templates here are short and write turns as the families' own templates do, whose sources the parsers name.
"""

import json

import pytest

from hybrid_engine.serving.parsers import FORMS, build_reader, choose_parser
from hybrid_engine.serving.parsers.deepseek import BEGIN, BEGIN_ALL, END, END_ALL, SEPARATOR
from hybrid_engine.serving.protocol import ChatRequest, TranslatedChat
from hybrid_engine.serving.request_parsing import ServedModel, chat_text, parser_for
from hybrid_engine.serving.sessions import Session, Sessions
from hybrid_engine.serving.tool_calls import for_template
from tests.serving.test_requests import answer
from tests.support.chat import build_chat_tokenizer

pytestmark = pytest.mark.quick

THOUGHT = "{% if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"
CONTENT = "{% if m.content %}{{ m.content }}{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
TAGGED = (
    "{{ '<tool_call>\\n<function=' + f.name + '>\\n' }}{% for k, v in f.arguments.items() %}"
    "{{ '<parameter=' + k + '>\\n' }}"
    "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}"
    "{{ '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}{% endfor %}"
)
PAIRS = (
    "{{ '\\n<tool_call>' + f.name }}{% for k, v in f.arguments.items() %}"
    "{{ '\\n<arg_key>' + k + '</arg_key>\\n<arg_value>' }}"
    "{{ v if v is string else v | tojson }}{{ '</arg_value>' }}{% endfor %}{{ '\\n</tool_call>' }}{% endfor %}"
)
BODIES = {
    "hermes": THOUGHT + CONTENT + CALLS + "{{ '<tool_call>\\n{\"name\": \"' + f.name + '\", \"arguments\": ' }}"
    "{{ f.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}",
    "llama3": CONTENT + "{% for c in m.tool_calls or [] %}"
    "{{ '{\"name\": \"' + c.function.name + '\", \"parameters\": ' }}"
    "{{ c.function.arguments | tojson }}{{ '}' }}{% endfor %}{# <|python_tag|> #}",
    "mistral": CONTENT + "{% if m.tool_calls %}{{ '[TOOL_CALLS]' }}{% endif %}" + CALLS
    + "{{ f.name + '[ARGS]' }}{{ f.arguments | tojson }}{% endfor %}",
    "qwen3_coder": THOUGHT + CONTENT + CALLS + TAGGED,
    "glm": THOUGHT + CONTENT + CALLS + PAIRS,
    "deepseek": CONTENT + "{% if m.tool_calls %}{{ '" + BEGIN_ALL + "' }}" + CALLS + "{{ '" + BEGIN
    + "' + f.name + '" + SEPARATOR + "' }}{{ f.arguments | tojson }}"
    "{{ '" + END + "' }}{% endfor %}{{ '" + END_ALL + "' }}{% endif %}",
    "gpt_oss": "{% if m.reasoning_content %}{{ '<|channel|>analysis<|message|>' + m.reasoning_content }}"
    "{{ '<|end|><|start|>assistant' }}{% endif %}" + CALLS
    + "{{ '<|channel|>commentary to=functions.' + f.name + ' <|constrain|>json<|message|>' }}"
    "{{ f.arguments | tojson }}{% endfor %}"
    "{% if m.content %}{{ '<|channel|>final<|message|>' + m.content }}{% endif %}",
}  # fmt: skip
"""What an assistant's turn has, between its beginning and `<eos>`."""
SPECIAL = {
    "gpt_oss": ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"],
    "deepseek": [BEGIN_ALL, END_ALL, BEGIN, END, SEPARATOR],
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
}
NAMED = {
    "town": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"},
    "parts": {"type": "array"}, "more": {"type": "object"},
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": NAMED}}}
ARGUMENTS = {"town": "5", "days": 3, "exact": True, "parts": ["a", {"b": None}], "more": {"x": 1.5}}
HARD = {"town": 'a "b"\n {c} </tool_call>\n}'}


def template_of(parser):
    begin = "<|start|>" if parser == "gpt_oss" else "<start>"
    newline = "" if parser == "gpt_oss" else "\\n"
    return (
        "{% for m in messages %}{{ '" + begin + "' + m.role + '" + newline + "' }}{% if m.role == 'assistant' %}"
        + BODIES[parser] + "{% else %}{{ m.content }}{% endif %}{{ '<eos>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '" + begin + "assistant" + newline + "' }}{% endif %}"
    )  # fmt: skip


def served(parser):
    tokenizer = build_chat_tokenizer(template_of(parser))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<start>", *SPECIAL.get(parser, [])]})
    assert choose_parser("auto", tokenizer) == parser
    return ServedModel(
        name="tiny", tokenizer=tokenizer, vocab_size=len(tokenizer), longest=2000, created=0,
        end_tokens=[tokenizer.eos_token_id], tool_call_parser=parser,
    )  # fmt: skip


def called(*calls):
    functions = [{"name": "weather", "arguments": json.dumps(arguments)} for arguments in calls]
    return [{"id": str(n), "type": "function", "function": function} for n, function in enumerate(functions)]


def said(content="", calls=(), reasoning=""):
    message = {"role": "assistant", "content": content}
    message |= {"tool_calls": called(*calls)} if calls else {}
    return message | ({"reasoning_content": reasoning} if reasoning else {})


ANSWERS = [
    ("text", said("It is warm.")), ("call", said(calls=[ARGUMENTS])), ("hard", said(calls=[HARD])),
    ("none", said(calls=[{}])), ("two", said(calls=[ARGUMENTS, HARD])), ("both", said("Well.", [ARGUMENTS])),
    ("thought", said("Yes.", reasoning="I know")), ("thought-call", said(calls=[ARGUMENTS], reasoning="I ask")),
]  # fmt: skip
LEFT_OUT = {
    "llama3": ("two", "both", "thought", "thought-call"),
    "mistral": ("thought", "thought-call"),
    "deepseek": ("thought", "thought-call"),
    "gpt_oss": ("two", "both"),
}
"""What a family's template does not write."""
CASES = [(p, n, m) for p in FORMS for n, m in ANSWERS if n not in LEFT_OUT.get(p, ())]


@pytest.mark.parametrize(("parser", "name", "message"), CASES, ids=[f"{p}-{n}" for p, n, _ in CASES])
def test_an_answer_that_is_read_is_rendered_to_the_same_tokens(parser, name, message):
    model = served(parser)
    question = [{"role": "user", "content": "Is it warm?"}]
    asked = ChatRequest(model="tiny", messages=question, tools=[TOOL])
    whole = ChatRequest(model="tiny", messages=[*question, message], tools=[TOOL], add_generation_prompt=False)
    prompt = chat_text(asked, model, asked.template_messages)
    rendered = chat_text(whole, model, whole.template_messages)
    assert rendered.startswith(prompt)
    text = rendered[len(prompt) :].removesuffix("<eos>")
    for size in (1, 3, 1000):
        reader = build_reader(parser_for(asked, model), model.tokenizer, [TOOL], model.tokenizer.encode(prompt))
        parts = [reader.add(text[place : place + size]) for place in range(0, len(text), size)] + [reader.finish()]
        again = {"role": "assistant", "content": "".join(part.text for part in parts)}
        again |= {"tool_calls": reader.calls} if reader.calls else {}
        reasoning = "".join(part.reasoning for part in parts)
        again |= {"reasoning_content": reasoning} if reasoning else {}
        assert [call["function"]["name"] for call in reader.calls] == ["weather"] * len(message.get("tool_calls", []))
        read = [json.loads(call["function"]["arguments"]) for call in reader.calls]
        assert read == [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", [])]
        assert chat_text(whole, model, [*question, for_template(again)]) == rendered


NO_CALLS = [
    ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=town>\nx"),
    ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=town>\nx\n</parameter>\n</function>"),
    ("qwen3_coder", "<tool_call>\nweather</tool_call> no"),
    ("glm", "<tool_call>weather\n<arg_key>town</arg_key>\n<arg_value>x</arg_value>"),
    ("glm", "<tool_call>my weather</tool_call>"),
    ("deepseek", BEGIN_ALL + BEGIN + "weather" + SEPARATOR + '{"town": '),
    ("deepseek", BEGIN_ALL + BEGIN + "weather" + SEPARATOR + "{}" + END + "more" + END_ALL),
    ("gpt_oss", "It is warm, says <|channel"),
]


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(("parser", "text"), NO_CALLS)
def test_what_is_cut_off_or_no_call_stays_text(parser, text, size):
    reader = build_reader(parser, build_chat_tokenizer(), [TOOL], [])
    parts = [reader.add(text[place : place + size]) for place in range(0, len(text), size)] + [reader.finish()]
    assert ("".join(part.text for part in parts), reader.calls) == (text, [])


def test_calls_of_earlier_deepseeks_and_of_gpt_oss_templates_are_read():
    block = BEGIN_ALL + BEGIN + "function" + SEPARATOR + 'weather\n```json\n{"days": 3}\n```' + END + END_ALL
    channels = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"days": 3}<|call|>'
    )
    for parser, text, shown, reasoning in (("deepseek", block, "", ""), ("gpt_oss", channels, "Wait.", "hm")):
        for size in (1, 1000):
            reader = build_reader(parser, build_chat_tokenizer(), [TOOL], [])
            parts = [reader.add(text[place : place + size]) for place in range(0, len(text), size)] + [reader.finish()]
            assert (
                "".join(part.text for part in parts) == shown and "".join(part.reasoning for part in parts) == reasoning
            )
            (call,) = reader.calls
            assert call["function"] == {"name": "weather", "arguments": '{"days": 3}'}


def test_reasoning_is_told_apart_without_tools_where_a_protocol_has_a_place_for_it():
    messages = [{"role": "user", "content": "x"}]
    chat, translated = (kind(model="tiny", messages=messages) for kind in (ChatRequest, TranslatedChat))
    assert [parser_for(request, served("hermes")) for request in (chat, translated)] == ["none", "thoughts"]
    assert [parser_for(request, served("gpt_oss")) for request in (chat, translated)] == ["gpt_oss"] * 2


@pytest.mark.parametrize("parser", ["hermes", "gpt_oss"])
def test_a_template_that_needs_the_call_before_its_result_goes_on_by_the_drawn_tokens(parser):
    picky = template_of(parser).replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('no call') }}{% endif %}", 1,
    )  # fmt: skip
    model = served(parser)
    model.tokenizer.chat_template = picky
    sessions = Sessions(model, 0, 10)
    asked = ChatRequest(model="tiny", messages=[{"role": "user", "content": "x"}], tools=[TOOL])
    node = answer(model, sessions, asked, "drawn otherwise", said=said(calls=[HARD]))
    told = {"role": "tool", "tool_call_id": "0", "content": "sun"}
    more = ChatRequest(model="tiny", messages=[asked.messages[0].model_dump(), said(calls=[HARD]), told], tools=[TOOL])
    prompt, continued = sessions.find_chat(Session("s"), more)
    assert continued is node and prompt[: len(node.tokens)] == node.tokens
    rest = model.tokenizer.decode(prompt[len(node.tokens) :])
    assert rest == chat_text(more, model, more.template_messages).partition("<eos>")[2].partition("<eos>")[2]
