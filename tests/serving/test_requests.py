"""What the server makes of requests, without a server: bodies, addresses, conversations."""

import json

import pytest
from pydantic import ValidationError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hybrid_engine.generation.detokenize import IncrementalDetokenizer
from hybrid_engine.recipes import serve
from hybrid_engine.serving.errors import RequestError, wrong_body
from hybrid_engine.serving.protocol import ChatRequest, CompletionRequest
from hybrid_engine.serving.request_parsing import ServedModel, chat_text, chat_tokens, read_chat, read_completion
from hybrid_engine.serving.responses import Choice
from hybrid_engine.serving.sessions import Session, Sessions, recorder_of_chat
from hybrid_engine.serving.tool_calls import for_template
from hybrid_engine.serving.web.access import bind, check_address, check_free
from tests.support.chat import CALL_TEMPLATES, PLAIN_TEMPLATE, build_chat_tokenizer

pytestmark = pytest.mark.quick


def served(template=PLAIN_TEMPLATE, tokenizer=None):
    tokenizer = tokenizer or build_chat_tokenizer(template)
    return ServedModel(
        name="tiny", tokenizer=tokenizer, vocab_size=len(tokenizer), longest=500,
        end_tokens=[tokenizer.eos_token_id], created=0,
    )  # fmt: skip


def chat(*contents):
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": content} for place, content in enumerate(contents)]
    return ChatRequest(model="tiny", messages=messages)


def answer(model, sessions, request, text, end="<eos>", said=None):
    """Records `text` as what the policy said to `request`; returns the node."""
    prompt, node = sessions.find_chat(Session("s"), request)
    tokens = model.tokenizer.encode(text + end, add_special_tokens=False)
    choice = Choice(0, prompt, IncrementalDetokenizer(model.tokenizer), None, text, tokens, [-1.0] * len(tokens))
    said = for_template(said or {"role": "assistant", "content": text})
    inputs = request.template_inputs
    sessions.record(Session("s"), node, choice, [*request.template_messages, said], inputs)
    return sessions.trajectories()[-1]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.0.3"])
def test_this_machines_own_addresses_need_no_key(host):
    check_address(host, has_keys=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_others_can_reach_every_other_address_so_it_needs_one(host):
    check_address(host, has_keys=True)
    with pytest.raises(ValueError, match="api_key"):
        check_address(host, has_keys=False)


def test_an_error_names_the_field_its_value_and_the_rule():
    with pytest.raises(ValidationError) as raised:
        CompletionRequest.model_validate({"model": "tiny", "prompt": "x", "temperature": -1})
    error = wrong_body(raised.value)
    assert error.param == "temperature" and error.status == 400
    assert "temperature=-1" in error.message and "greater than or equal to 0" in error.message
    with pytest.raises(ValidationError) as raised:
        CompletionRequest.model_validate({"model": "tiny"})
    error = wrong_body(raised.value)
    assert (error.param, error.code) == ("prompt", "missing_required_parameter")
    assert error.message == "prompt is missing; every request needs it"


def test_samples_of_a_prompt_share_it_and_draw_different_noise():
    request = CompletionRequest(model="tiny", prompt=["ab", "cd"], n=3, seed=1)
    asked = read_completion(request, served())
    assert len({id(sequence.prompt) for sequence in asked.sequences}) == 2
    assert len({sequence.key for sequence in asked.sequences}) == 6
    again = read_completion(request, served())
    assert [sequence.key for sequence in again.sequences] == [sequence.key for sequence in asked.sequences]


def test_what_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(RequestError, match="496 tokens and 5 new ones make 501"):
        read_completion(CompletionRequest(model="tiny", prompt=[5] * 496, max_tokens=5), served())


def test_an_address_is_one_servers_from_the_moment_that_it_binds_it():
    with bind("127.0.0.1", 0) as listener:
        for take in (bind, check_free):
            with pytest.raises(ValueError, match="in use; choose another"):
                take("127.0.0.1", listener.getsockname()[1])
    check_free("127.0.0.1", 0)


@pytest.mark.parametrize(("host", "port", "word"), [("0.0.0.0", 0, "api_key"), ("127.0.0.1", None, "in use")])
def test_an_address_that_cannot_be_is_refused_before_a_model_is_looked_for(host, port, word):
    with bind("127.0.0.1", 0) as listener, pytest.raises(ValueError, match=word):
        serve.run(serve.Config(model="nowhere", host=host, port=listener.getsockname()[1] if port is None else port))


@pytest.mark.parametrize("end", ["<eos>", ""])
def test_a_conversation_goes_on_with_the_tokens_of_the_answer_however_it_ended(end):
    model = served()
    sessions = Sessions(model, 0, 10)
    first = answer(model, sessions, chat("hi"), "there", end)
    prompt, node = sessions.find_chat(Session("s"), chat("hi", "there", "more"))
    assert node is first and prompt[: len(first.tokens)] == first.tokens
    whole = "<start>user\nhi<eos>\n<start>assistant\nthere<eos>\n<start>user\nmore<eos>\n<start>assistant\n"
    assert model.tokenizer.decode(prompt) == whole


def stripping_tokenizer(kind):
    """Its special tokens strip what follows, as Phi-3's do, or a text's first word has a mark, as Llama 2's."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    spaces = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(spaces)
    specials = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(["hello there user assistant next one two three"] * 9, trainer)
    marks = ("<start>", "<eos>")
    tokenizer.add_special_tokens(
        [AddedToken(mark, rstrip=kind == "stripping", normalized=False, special=True) for mark in marks]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", chat_template=PLAIN_TEMPLATE)


@pytest.mark.parametrize("kind", ["stripping", "marking"])
@pytest.mark.parametrize("end", ["<eos>", ""])
def test_what_is_new_is_encoded_as_in_the_whole_conversation(kind, end):
    model = served(tokenizer=stripping_tokenizer(kind))
    sessions = Sessions(model, 0, 10)
    first = answer(model, sessions, chat("hello there"), "one two" if kind == "stripping" else "", end or "<eos>")
    if not end:  # cut off before its end
        first.tokens.pop()
    told = chat("hello there", first.messages[-1]["content"], "next one")
    prompt, node = sessions.find_chat(Session("s"), told)
    assert node is first
    whole = chat_tokens(told, model)
    new = prompt[len(first.tokens) :]
    assert new == whole[-len(new) :] and model.tokenizer.decode(new).count("<start>") == 2


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
TOOL_TEMPLATE = PLAIN_TEMPLATE.replace(
    "{% for message", "{{ tools | tojson if tools else '' }}{{ reasoning_effort or '' }}{% for message", 1
)


@pytest.mark.parametrize(
    "changes",
    [
        {"tools": [TOOL, TOOL]},
        {"tools": None},
        {"tool_choice": "none"},
        {"reasoning_effort": "high"},
        {"chat_template_kwargs": {"x": 1}},
    ],
    ids=str,
)
def test_other_tools_begin_a_branch_that_has_them(changes):
    model = served(TOOL_TEMPLATE)
    sessions = Sessions(model, 0, 10)
    fields = {"tools": [TOOL]}
    request = ChatRequest.model_validate(chat("hi").model_dump(exclude_unset=True) | fields)
    prompt, _ = sessions.find_chat(Session("s"), request)
    choice = Choice(0, prompt, IncrementalDetokenizer(model.tokenizer), None, "there", [5, 1], [-1.0] * 2)
    messages = [*request.template_messages, {"role": "assistant", "content": "there"}]
    sessions.record(Session("s"), None, choice, messages, request.template_inputs)
    more = chat("hi", "there", "more").model_dump(exclude_unset=True)
    _, node = sessions.find_chat(Session("s"), ChatRequest.model_validate(more | fields))
    assert node is sessions.trajectories()[0]
    other = ChatRequest.model_validate(more | fields | changes)
    prompt, node = sessions.find_chat(Session("s"), other)
    assert node is None and prompt == chat_tokens(other, model)


SAID = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "hm",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": 2}}}],
}
CALL = {"name": "f", "arguments": '{"b": 2, "a": 1}'}


@pytest.mark.parametrize(
    "sent",
    [
        {"content": None, "tool_calls": [{"id": "2", "type": "function", "function": CALL}], "refusal": None},
        {"content": "", "reasoning_content": "hm", "tool_calls": [{"index": 0, "id": "1", "function": CALL}]},
        {"tool_calls": [{"function": CALL}], "annotations": [], "provider_specific_fields": {"refusal": None}},
    ],
    ids=str,
)
def test_an_answer_is_known_however_a_client_writes_it(sent):
    calls = "{{ message['tool_calls'] | length if message.tool_calls is defined else '' }}"
    model = served(PLAIN_TEMPLATE.replace("{{ '<start>'", calls + "{{ '<start>'"))
    sessions = Sessions(model, 0, 10)
    prompt, _ = sessions.find_chat(Session("s"), chat("hi"))
    choice = Choice(0, prompt, IncrementalDetokenizer(model.tokenizer), None, "", [5, 1], [-1.0] * 2)
    sessions.record(Session("s"), None, choice, [{"role": "user", "content": "hi"}, SAID])

    def ask(**changes):
        messages = [
            {"role": "user", "content": "hi", "name": None},
            {"role": "assistant"} | sent | changes,
            {"role": "tool", "tool_call_id": "1", "content": "3"},
        ]
        return sessions.find_chat(Session("s"), ChatRequest(model="tiny", messages=messages))[1]

    assert ask() is sessions.trajectories()[0]
    assert ask(reasoning_content="other") is None
    assert ask(content="text") is None
    other = json.loads(json.dumps(sent["tool_calls"]))
    other[0]["function"]["arguments"] = '{"a": 1, "b": 3}'
    assert ask(tool_calls=other) is None


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{{ '[' + message['content'] + ']' }}", "[]"),
        ("[{{ message['content'] }}]", "[]"),
        ("[{{ message.content | trim }}]", "[]"),
        ("{% if message['content'] is none %}call{% else %}[{{ message['content'] }}]{% endif %}", "call"),
        ("{% if message.content %}[{{ message.content }}]{% endif %}", ""),
        ("{% if message.tool_calls is defined %}{{ message.tool_calls | length }}{% endif %}", ""),
    ],
)
@pytest.mark.parametrize("message", [{"role": "assistant", "content": None, "tool_calls": None}, {"role": "assistant"}])
def test_content_that_is_null_is_nothing_unless_the_template_asks_for_null(template, shown, message):
    model = served("{% for message in messages %}" + template + "{% endfor %}")
    request = ChatRequest(model="tiny", messages=[message])
    assert chat_text(request, model, request.template_messages) == shown


@pytest.mark.parametrize("name", CALL_TEMPLATES)
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
@pytest.mark.parametrize("arguments", ['{"a": "\u00fc"}', "{}"])
def test_calls_of_an_earlier_turn_are_rendered_by_templates_of_all_families(name, content, arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    told = {"role": "tool", "content": "2", "tool_call_id": "1"}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", **content, "tool_calls": [call]}, told]
    request = ChatRequest(model="tiny", messages=messages)
    text = chat_text(request, served(CALL_TEMPLATES[name]), request.template_messages)
    turns = ("user\nx", f"assistant\nf:{arguments}", "tool\n2")
    assert text == "".join(f"<start>{turn}<eos>\n" for turn in turns) + "<start>assistant\n"


def test_a_developer_speaks_as_the_system_where_the_template_knows_no_developer():
    request = ChatRequest(model="tiny", messages=[{"role": "developer", "content": "x"}])
    for template, role in (
        ("{{ messages[0].role }}", "system"),
        ("{# developer #}{{ messages[0].role }}", "developer"),
    ):
        assert chat_text(request, served(template), request.template_messages) == role


def test_a_template_that_hides_earlier_answers_begins_anew():
    hides = PLAIN_TEMPLATE.replace("message['content']", "(message['content'] if loop.last else '...')")
    model = served(hides)
    sessions = Sessions(model, 0, 10)
    answer(model, sessions, chat("hi"), "there")
    prompt, node = sessions.find_chat(Session("s"), chat("hi", "there", "more"))
    assert node is None and "there" not in model.tokenizer.decode(prompt)


def test_the_oldest_sessions_are_forgotten_and_a_fork_has_two_ends():
    model = served()
    sessions = Sessions(model, 3, 1)
    answer(model, sessions, chat("hi"), "there")
    answer(model, sessions, chat("hi", "there", "a"), "x")
    fork = answer(model, sessions, chat("hi", "there", "b"), "y")
    assert [node.messages[-1]["content"] for node in sessions.trajectories()] == ["x", "y"]
    assert {version for version, drawn in zip(fork.versions, fork.written, strict=True) if drawn} == {3}
    prompt, _ = sessions.find_chat(Session("other"), chat("hi"))
    choice = Choice(0, prompt, IncrementalDetokenizer(model.tokenizer), None, "z", [5], [-1.0])
    sessions.record(Session("other"), None, choice, [])
    assert [node.session_id for node in sessions.trajectories()] == ["other"]


def test_tokens_of_all_conversations_are_bounded_and_a_longer_one_is_refused():
    model = served()
    first = answer(model, Sessions(model, 0, 10), chat("hi"), "there")
    sessions = Sessions(model, 0, 10, max_tokens=2 * len(first.tokens))
    for session in map(Session, "abc"):  # each as long as the first
        prompt, node = sessions.find_chat(session, chat("hi"))
        drawn = first.tokens[len(prompt) :]
        choice = Choice(0, prompt, IncrementalDetokenizer(model.tokenizer), None, "there", drawn, [-1.0] * len(drawn))
        sessions.record(session, node, choice, [])
    assert [node.session_id for node in sessions.trajectories()] == ["b", "c"]
    request = chat("hi").model_copy(update={"max_tokens": len(first.tokens)})
    asked = read_chat(request, model, first.tokens)
    sessions.check_room(Session("new"), asked)
    with pytest.raises(RequestError, match="start another session"):
        recorder_of_chat(sessions, Session("c"), asked, None)
