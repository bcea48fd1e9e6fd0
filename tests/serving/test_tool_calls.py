"""Calls of tools are found in what a model writes, however it is cut, and what is none stays text."""

import json

import openai
import pytest

from hybrid_engine.serving.errors import RequestError
from hybrid_engine.serving.parsers import FORMS, build_reader, choose_parser
from hybrid_engine.serving.protocol import ChatRequest
from hybrid_engine.serving.request_parsing import ServedModel, read_chat
from hybrid_engine.serving.sessions import Sessions
from tests.serving.test_server import build
from tests.support.chat import PLAIN_TEMPLATE, build_chat_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
ADD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
WRITTEN = [
    ("hermes", f"Let me see.\n<tool_call>\n{ADD}\n</tool_call>", "Let me see."),
    ("hermes", f"<tool_call>{ADD}</tool_call>\n<tool_call>{ADD}</tool_call>", ""),
    ("llama3", '{"name": "add", "parameters": {"a": 1, "b": 2}}', ""),
    ("llama3", f"<|python_tag|>{ADD}; {ADD}", ""),
    ("mistral", f"Well [TOOL_CALLS] [{ADD}, {ADD}]", "Well"),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]add{"a": 1, "b": 2}', ""),
    ("hermes", f"<tool_call>\n{ADD}", ""),  # the end came before the closing tag, or within it
    ("hermes", f"<tool_call>\n{ADD}\n</tool_", ""),
]
TEXTS = [
    ("hermes", "a < b, <tool> and <tool_cal"),
    ("hermes", "<tool_call>no json</tool_call> but text"),
    ("hermes", '<tool_call>{"name": "add"'),
    ("hermes", 'So:\n\n<tool_call>\n{"name": "add", "arguments": {"a": "x}\n</tool_call>\nwell'),
    ("hermes", "So:\n<tool_call>\n"),
    ("hermes", "So:\n "),
    ("hermes", "[TOOL_CALLS] []"),
    ("llama3", '{"answer": 3}'),
    ("llama3", ' <|python_tag|> {"name": "add"'),
    ("llama3", "<|python"),
    ("llama3", 'The JSON is {"name": "add", "parameters": {}}'),
    ("mistral", "[TOOL_CALLS] what"),
    ("mistral", 'So: [TOOL_CALLS][{"name": "add"'),
    ("mistral", "[TOOL"),
]


def read_all(parser, text, size, tools=TOOLS, tokenizer=None, prompt=""):
    """Text, reasoning and calls of an answer of which `size` characters come at once."""
    tokenizer = tokenizer or build_chat_tokenizer()
    reader = build_reader(parser, tokenizer, tools, tokenizer.encode(prompt))
    parts = [reader.add(text[place : place + size]) for place in range(0, len(text), size)] + [reader.finish()]
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in reader.calls]
    return "".join(part.text for part in parts), "".join(part.reasoning for part in parts), calls


def read(*args, **options):
    """The same of an answer without reasoning."""
    text, reasoning, calls = read_all(*args, **options)
    assert reasoning == ""
    return text, calls


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("parser", "text", "before"), WRITTEN)
def test_calls_are_found_however_the_text_is_cut(parser, text, before, size):
    shown, calls = read(parser, text, size)
    assert shown == before
    assert calls == [("add", {"a": 1, "b": 2})] * text.count("add")


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(("parser", "text"), TEXTS)
def test_what_is_no_call_stays_text(parser, text, size):
    assert read(parser, text, size) == (text, [])


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_closing_tag_inside_a_string_closes_nothing(size):
    call = '<tool_call>{"name": "add", "arguments": {"a": "x</tool_call>y"}}</tool_call>'
    assert read("hermes", f"{call}\n{call}", size) == ("", [("add", {"a": "x</tool_call>y"})] * 2)
    broken = '<tool_call>{"name": "add", "arguments": {"a": "x}</tool_call>'
    assert read("hermes", f"{broken}\n{broken} so", size) == (f"{broken}\n{broken} so", [])


REASONED = [
    ("<think>\nadd them\n</think>\n\nThe sum", "The sum", 0),
    (f"<think>add them</think><tool_call>{ADD}</tool_call>", "", 1),
    (f" <think>\nadd them\n</think>\n<tool_call>{ADD}</tool_call>", "", 1),
    ("<think>\nadd them", "", 0),
    ("<think>\nadd them\n</think>", "", 0),
]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("text", "shown", "num_calls"), REASONED)
def test_reasoning_is_no_text_and_holds_no_calls(text, shown, num_calls, size):
    expected = (shown, "add them", [("add", {"a": 1, "b": 2})] * num_calls)
    assert read_all("hermes", text, size) == expected
    example = f"add <tool_call>{ADD}</tool_call> them"
    assert read_all("hermes", text.replace("add them", example), size) == (shown, example, expected[2])
    begun = text.lstrip().removeprefix("<think>")
    assert read_all("hermes", begun, size, prompt="<start>assistant\n<think>\n") == expected


@pytest.mark.parametrize("size", [1, 1000])
def test_reasoning_comes_before_the_other_forms_too(size):
    for parser, call in (("llama3", ADD), ("mistral", f"[TOOL_CALLS] [{ADD}]")):
        expected = ("", "hm", [("add", {"a": 1, "b": 2})])
        assert read_all(parser, f"<think>\nhm\n</think>\n\n{call}", size) == expected
    assert read_all("llama3", "<think>hm</think>\nno", size) == ("no", "hm", [])
    assert read("hermes", "a <think>b</think>", size) == ("a <think>b</think>", [])


def test_the_tokenizers_own_words_come_first():
    tokenizer = build_chat_tokenizer("<tool_call>")
    tokenizer.response_template = {
        "start_anchor": "<start>assistant\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r"CALL (?P<name>\w+) ", "close": "END", "repeats": True, "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
            "content": {"content": "text"},
        },
    }  # fmt: skip
    assert choose_parser("auto", tokenizer) == "tokenizer"
    text = 'first CALL add {"a": 1, "b": 2}END then'
    for size in (1, 1000):
        assert read("tokenizer", text, size, tokenizer=tokenizer) == ("first  then", [("add", {"a": 1, "b": 2})])
    broken = "first CALL add nothing END then"
    for size in (1, 1000):
        assert read("tokenizer", broken, size, tokenizer=tokenizer) == (broken, [])
    reasoned = 'hm</think>CALL add {"a": 1}END'
    for prompt, text in (("<start>assistant\n<think>", reasoned), ("<start>assistant\n", f"<think>{reasoned}")):
        for size in (1, 1000):
            found = read_all("tokenizer", text, size, tokenizer=tokenizer, prompt=prompt)
            assert found == ("", "hm", [("add", {"a": 1})])


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (PLAIN_TEMPLATE, "none"),
        ("<tool_call>{}</tool_call>", "hermes"),
        ("<tool_call><function=f>", "qwen3_coder"),
        ("<tool_call><arg_key>", "glm"),
        ("<tool_call><function=f><arg_key>", "none"),
        ("<|channel|><|message|>", "gpt_oss"),
        ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "deepseek"),
        ("<|python_tag|>", "llama3"),
        ("[TOOL_CALLS]", "mistral"),
        ("[TOOL_CALLS] <tool_call>", "none"),
        (None, "none"),
    ],
)
def test_the_template_shows_the_form_where_it_is_beyond_doubt(template, found):
    assert choose_parser("auto", build_chat_tokenizer(template)) == found


@pytest.mark.parametrize("wanted", ["json", "", "tokenizer"])
def test_a_parser_that_is_not_there_is_refused(wanted):
    with pytest.raises(ValueError, match="tool_call_parser"):
        choose_parser(wanted, build_chat_tokenizer())


TEMPLATE = (
    "{% for m in messages %}{{ '<start>' + m['role'] + '\n' + (m['content'] or '') }}"
    "{% for c in m['tool_calls'] or [] %}{{ '<tool_call>' + c['function']['arguments']['a']|string + '</tool_call>' }}"
    "{% endfor %}{{ '<eos>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start>assistant\n' }}{% endif %}"
)


def test_a_client_gets_calls_whole_and_streamed_and_the_conversation_goes_on_by_its_tokens():
    pytest.importorskip("llguidance", reason="the extra 'guided' is not installed")
    tokenizer = build_chat_tokenizer(TEMPLATE)
    text = f"Hm<tool_call>{ADD}</tool_call>"
    messages = [{"role": "user", "content": "1+2?"}]
    said = {"model": "tiny", "messages": messages, "max_tokens": 200, "tools": TOOLS}
    extra = {"guided_choice": [text], "session_id": "s", "return_token_ids": True}
    with build(tokenizer).serving(tokenizer, model_name="tiny") as server:
        client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
        whole = client.chat.completions.create(**said, extra_body=extra)
        (choice,) = whole.choices
        (call,) = choice.message.tool_calls
        assert (choice.message.content, choice.finish_reason) == ("Hm", "tool_calls")
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
        assert call.type == "function" and call.id
        events = list(client.chat.completions.create(**said, extra_body=extra | {"session_id": "t"}, stream=True))
        deltas = [event.choices[0].delta for event in events]
        assert "".join(delta.content or "" for delta in deltas) == "Hm"
        (streamed,) = [call for delta in deltas for call in delta.tool_calls or []]
        assert (streamed.index, streamed.function) == (0, type(streamed.function)(**call.function.model_dump()))
        assert events[-1].choices[0].finish_reason == "tool_calls" and not events[-1].choices[0].delta.tool_calls
        plain = client.chat.completions.create(**said, tool_choice="none", extra_body=extra | {"session_id": "u"})
        assert plain.choices[0].message.content == text and plain.choices[0].message.tool_calls is None
        # What the tool says goes on from the tokens that were drawn.
        messages += [choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "3"}]
        again = client.chat.completions.create(**said, extra_body=extra)
        drawn = choice.prompt_token_ids + choice.token_ids
        assert again.choices[0].prompt_token_ids[: len(drawn)] == drawn
        rest = tokenizer.decode(again.choices[0].prompt_token_ids[len(drawn) :])
        assert rest.removeprefix("<eos>") == "\n<start>tool\n3<eos>\n<start>assistant\n"


CITY = {"$defs": {"city": {"enum": ["A", "B"]}}, "type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY | {"required": ["city"]}}}


@pytest.mark.parametrize(
    ("begin", "is_special"), [("<tool_call>", False), ("<tool_call>", True), ("[TOOL_CALLS]", True), ("{", False)]
)
def test_a_call_that_must_be_is_one_in_the_models_form(begin, is_special):
    pytest.importorskip("llguidance", reason="the extra 'guided' is not installed")
    tokenizer = build_chat_tokenizer(PLAIN_TEMPLATE + "{# " + begin.strip("{") + " #}")
    if is_special:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<start>", begin]})
    said = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 120, "tools": [WEATHER]}
    said["logit_bias"] = dict.fromkeys(map(str, tokenizer.encode(" \t\n")), -100)  # no more than must be
    named = {"type": "function", "function": {"name": "weather"}}
    with build(tokenizer).serving(tokenizer, model_name="tiny") as server:
        client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
        extra = {"return_token_ids": True}
        for choice, stream in ((named, False), ("required", True)):
            format_of_texts = {"type": "json_object"} if stream else {"type": "text"}
            answer = client.chat.completions.create(
                **said,
                tool_choice=choice,
                parallel_tool_calls=False,
                stream=stream,
                response_format=format_of_texts,
                extra_body=extra,
            )
            choices = [event.choices[0] for event in answer] if stream else answer.choices
            told = [each.delta if stream else each.message for each in choices]
            (call,) = [call for each in told for call in each.tool_calls or []]
            tokens = [token for each in choices for token in getattr(each, "token_ids", None) or []]
            assert choices[-1].finish_reason == "tool_calls" and not any(each.content for each in told)
            assert call.function.name == "weather"
            assert json.loads(call.function.arguments) in ({"city": "A"}, {"city": "B"})
            assert tokenizer.decode(tokens).startswith(begin)


@pytest.mark.parametrize("form", ["hermes", "llama3", "mistral"])
@pytest.mark.parametrize("is_special", [False, True])
def test_an_answer_may_be_a_call_where_its_text_has_a_format(form, is_special):
    """A bias on the first token that differs chooses for the model."""
    pytest.importorskip("llguidance", reason="the extra 'guided' is not installed")
    sign = FORMS[form].sign
    tokenizer = build_chat_tokenizer(PLAIN_TEMPLATE + "{# " + sign + " #}")
    if is_special:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<start>", sign]})
    named = {"type": "object", "properties": {"town": {"enum": ["A"]}, "name": {"enum": ["B"]}}, "required": ["town"]}
    schema = {"name": "x", "schema": named | {"required": ["town", "name"], "additionalProperties": False}}
    said = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 150, "tools": [WEATHER]}
    said |= {"response_format": {"type": "json_schema", "json_schema": schema}, "parallel_tool_calls": False}
    (call_first, *_), (text_first, *_) = (tokenizer.encode(text) for text in ("n" if form == "llama3" else sign, "t"))
    other = [] if form == "llama3" else tokenizer.encode("{")
    spaces = dict.fromkeys(map(str, tokenizer.encode(" \t\n")), -100)
    with build(tokenizer).serving(tokenizer, model_name="tiny") as server:
        client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
        bias = spaces | {str(call_first): 100}
        (choice,) = client.chat.completions.create(**said, logit_bias=bias).choices
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and call.function.name == "weather"
        assert json.loads(call.function.arguments) in ({"city": "A"}, {"city": "B"})
        bias = spaces | dict.fromkeys(map(str, [text_first, *other]), 100)
        (choice,) = client.chat.completions.create(**said, logit_bias=bias).choices
        assert json.loads(choice.message.content) == {"town": "A", "name": "B"} and not choice.message.tool_calls


def test_a_format_of_texts_is_refused_beside_calls_in_a_form_of_the_tokenizers_own():
    tokenizer = build_chat_tokenizer()
    model = ServedModel(
        name="tiny", tokenizer=tokenizer, vocab_size=len(tokenizer), longest=500, end_tokens=[1], created=0,
        tool_call_parser="tokenizer",
    )  # fmt: skip
    said = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}
    with pytest.raises(RequestError, match="response_format: the answer may be a tool call, which tiny writes in its"):
        read_chat(ChatRequest(**said, tools=[WEATHER]), model, [5])
    read_chat(ChatRequest(**said, tools=[WEATHER], tool_choice="none"), model, [5])


def test_a_template_that_wants_a_call_before_what_a_tool_says_begins_anew():
    picky = TEMPLATE.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('no call') }}{% endif %}",
    )
    tokenizer = build_chat_tokenizer(picky)
    model = ServedModel(
        name="tiny", tokenizer=tokenizer, vocab_size=len(tokenizer), longest=500, end_tokens=[1], created=0
    )
    sessions = Sessions(model, 0, 10)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [{"role": "user", "content": "q"}, said, {"role": "tool", "content": "3"}]
    prompt, node = sessions.find_chat("s", ChatRequest(model="tiny", messages=messages))
    assert node is None and "<tool_call>1</tool_call>" in tokenizer.decode(prompt)
