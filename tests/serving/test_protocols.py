"""Anthropic's messages, OpenAI's responses, vLLM's tokens: the answers of chats and completions in other words."""

import json
import time
from functools import partial

import httpx
import openai
import pytest

from hybrid_engine.serving.protocol import ChatRequest
from tests.serving.test_server import build
from tests.support.chat import build_chat_tokenizer
from tests.support.served import TEMPLATE

LONGEST = 500
ASKED = {"model": "tiny", "max_tokens": 12, "temperature": 0.7, "seed": 5}
QUESTION = [{"role": "user", "content": "hi"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["A", "B"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server():
    tokenizer = build_chat_tokenizer(TEMPLATE)
    with build(tokenizer).serving(tokenizer, model_name="tiny", longest=LONGEST, api_key="secret") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url, api_key="secret", max_retries=0)


@pytest.fixture(scope="module")
def post(server):
    with httpx.Client(base_url=server.url.removesuffix("/v1"), timeout=300) as web:
        yield lambda path, body, key="secret", **headers: web.post(
            path, json=body, headers={"x-api-key": key, **headers}
        )


def events_of(answer):
    """The names and bodies of a stream's events."""
    assert answer.status_code == 200, answer.text
    blocks = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    return [(lines[0].removeprefix("event: "), json.loads(lines[-1].removeprefix("data: "))) for lines in blocks]


def of_session(server, name):
    return [trajectory for trajectory in server.trajectories() if trajectory.session_id == name]


def test_a_message_is_the_chats_answer_whole_and_streamed(post, client):
    chat = client.chat.completions.create(**ASKED, messages=[{"role": "system", "content": "be\nkind"}, *QUESTION])
    system = [{"type": "text", "text": "be"}, {"type": "text", "text": "kind", "cache_control": {"type": "ephemeral"}}]
    body = ASKED | {"system": system, "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    whole = post("/v1/messages", body).json()
    assert whole["content"] == [{"type": "text", "text": chat.choices[0].message.content}]
    assert (whole["type"], whole["role"], whole["stop_reason"], whole["stop_sequence"]) == (
        "message", "assistant", "max_tokens", None,
    )  # fmt: skip
    assert whole["usage"] == {"input_tokens": chat.usage.prompt_tokens, "output_tokens": 12}
    counted = {name: body[name] for name in ("model", "system", "messages")}
    assert post("/v1/messages/count_tokens", counted).json() == {"input_tokens": chat.usage.prompt_tokens}
    events = events_of(post("/v1/messages", body | {"stream": True}))
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "content_block_start"] and all(name == said["type"] for name, said in events)
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(said["delta"]["text"] for name, said in events if name == "content_block_delta")
    assert text == whole["content"][0]["text"]
    assert events[-2][1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2][1]["usage"] == whole["usage"]


def test_a_message_says_why_it_ended(post):
    asked = ASKED | {"messages": QUESTION}
    text = post("/v1/messages", asked | {"max_tokens": 40}).json()["content"][0]["text"]
    stopped = post("/v1/messages", asked | {"max_tokens": 40, "stop_sequences": ["never", text[5:8]]}).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", text[5:8])
    assert stopped["content"][0]["text"] == text[: text.find(text[5:8])]
    full = post("/v1/messages", asked | {"max_tokens": 100_000, "seed": 7}).json()
    usage = full["usage"]["input_tokens"] + full["usage"]["output_tokens"]
    assert full["stop_reason"] == "end_turn" or (full["stop_reason"], usage) == (
        "model_context_window_exceeded",
        LONGEST,
    )
    long = post("/v1/messages", asked | {"messages": [{"role": "user", "content": "x" * 500}]})
    assert long.status_code == 400 and long.json()["error"]["message"].startswith("prompt is too long: 5")


def test_a_beginning_of_the_answer_is_continued(post, client):
    begun = [*QUESTION, {"role": "assistant", "content": "once"}]
    said = post("/v1/messages", ASKED | {"messages": begun}).json()
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    chat = client.chat.completions.create(**ASKED, messages=begun, extra_body=extra)
    assert said["content"][0]["text"] == chat.choices[0].message.content


TOOL = {"name": "weather", "description": "of a city", "input_schema": CITY}
CALLED = {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 250}


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_used_and_answered_and_the_session_goes_on_by_its_tokens(server, post, stream):
    pytest.importorskip("llguidance", reason="the extra 'guided' is not installed")
    session = f"tools-{stream}"
    body = ASKED | CALLED | {"messages": QUESTION, "stream": stream}
    answer = post("/v1/messages", body, key=f"secret:{session}")
    if stream:
        events = [said for _, said in events_of(answer)]
        (block,) = [said["content_block"] for said in events if said["type"] == "content_block_start"]
        written = "".join(said["delta"]["partial_json"] for said in events if said["type"] == "content_block_delta")
        assert block["input"] == {}
        content, reason = [block | {"input": json.loads(written)}], events[-2]["delta"]["stop_reason"]
    else:
        content, reason = answer.json()["content"], answer.json()["stop_reason"]
    (call,) = content
    assert reason == "tool_use" and call["name"] == "weather" and call["input"]["city"] in "AB"
    (first,) = of_session(server, session)
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "sun"}]}
    told = [*QUESTION, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    body = body | {"messages": told, "tool_choice": {"type": "none"}, "stream": False, "max_tokens": 5}
    assert post("/v1/messages", body, key=f"secret:{session}").status_code == 200
    branches = of_session(server, session)
    # Tools that may not be called are not shown, so this is another branch; the same tools continue.
    assert [branch.tokens[: len(first.tokens)] == first.tokens for branch in branches] == [True, False]
    post("/v1/messages", body | {"tool_choice": {"type": "auto"}}, key=f"secret:{session}")
    continued = of_session(server, session)[-1]
    assert continued.tokens[: len(first.tokens)] == first.tokens and len(of_session(server, session)) == 2
    assert continued.messages[2] == {"role": "tool", "tool_call_id": call["id"], "content": "sun"}


def test_reasoning_is_a_block_and_comes_back_as_reasoning(post, server, monkeypatch):
    """The guide stands for a model that thinks."""
    pytest.importorskip("llguidance", reason="the extra 'guided' is not installed")
    text = "<think>\nhm\n</think>\n\nyes"
    monkeypatch.setattr(ChatRequest, "guide", property(lambda chat: {"guided_choice": [text]}))
    body = {"model": "tiny", "max_tokens": 60, "messages": QUESTION, "session_id": "thinks"}
    content = post("/v1/messages", body).json()["content"]
    assert content == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "yes"},
    ]
    events = [said for _, said in events_of(post("/v1/messages", body | {"stream": True, "session_id": "other"}))]
    assert [said["content_block"]["type"] for said in events if said["type"] == "content_block_start"] == [
        "thinking",
        "text",
    ]
    more = [*QUESTION, {"role": "assistant", "content": content}, {"role": "user", "content": "sure?"}]
    post("/v1/messages", body | {"messages": more})
    (trajectory,) = of_session(server, "thinks")
    assert trajectory.tokens[: len(trajectory.tokens)] and sum(trajectory.written) > 2 * len("yes")
    said = post("/v1/responses", {"model": "tiny", "input": "hi", "max_output_tokens": 60}).json()["output"]
    assert [item["type"] for item in said] == ["reasoning", "message"]
    assert said[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]


def test_a_response_is_the_chats_answer_whole_and_streamed(client):
    asked = {"model": "tiny", "temperature": 0.7, "extra_body": {"seed": 5}, "max_output_tokens": 12}
    chat = client.chat.completions.create(**ASKED, messages=[{"role": "system", "content": "be kind"}, *QUESTION])
    whole = client.responses.create(**asked, instructions="be kind", input="hi")
    assert whole.output_text == chat.choices[0].message.content and whole.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
    with client.responses.stream(**asked, instructions="be kind", input=QUESTION) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text


def test_a_response_calls_a_function_and_the_next_one_continues_it(server, client):
    pytest.importorskip("llguidance", reason="the extra 'guided' is not installed")
    tool = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
    asked = {"model": "tiny", "tools": [tool], "temperature": 0, "max_output_tokens": 250}
    first = client.responses.create(
        **asked, input="hi", tool_choice="required", parallel_tool_calls=False, extra_body={"session_id": "calls"}
    )
    (call,) = first.output
    assert (call.type, call.name, first.status) == ("function_call", "weather", "completed")
    (begun,) = of_session(server, "calls")
    with client.responses.stream(**asked, input="hi", tool_choice="required", parallel_tool_calls=False) as stream:
        events = list(stream)
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds == [
        "created", "in_progress", "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert events[-1].response.output[0].arguments == events[3].delta == call.arguments
    told = [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"}]
    asked["max_output_tokens"] = 5
    client.responses.create(**asked, input=told, previous_response_id=first.id)
    (continued,) = of_session(server, "calls")
    assert continued.tokens[: len(begun.tokens)] == begun.tokens
    items = [{"role": "user", "content": "hi"}, call.model_dump(), *told]
    client.responses.create(**asked, input=items, extra_body={"session_id": "calls"})
    assert all(branch.tokens[: len(begun.tokens)] == begun.tokens for branch in of_session(server, "calls"))


def test_an_earlier_response_is_found_by_its_own_client_if_it_was_stored(client):
    asked = {"model": "tiny", "input": "hi", "max_output_tokens": 1}
    forgotten = client.responses.create(**asked, store=False).id
    for response_id in (forgotten, "resp_unknown"):
        with pytest.raises(openai.BadRequestError) as raised:
            client.responses.create(**asked, previous_response_id=response_id)
        assert (raised.value.code, raised.value.param) == ("previous_response_not_found", "previous_response_id")


def test_tokens_and_log_probabilities_are_the_completions(post, client, server):
    prompt = [5, 6, 7, 8]
    extra = {"return_token_ids": True}
    told = client.completions.create(**ASKED, prompt=prompt, logprobs=2, echo=True, extra_body=extra).choices[0]
    sampling = {"max_tokens": 12, "temperature": 0.7, "seed": 5, "logprobs": 2, "stop_token_ids": [1]}
    body = {"model": "tiny", "token_ids": prompt, "sampling_params": sampling | {"prompt_logprobs": 0}}
    said = post("/inference/v1/generate", body, **{"X-Session-ID": "tokens"}).json()
    (choice,) = said["choices"]
    assert choice["token_ids"] == told.token_ids and choice["finish_reason"] == told.finish_reason
    content = choice["logprobs"]["content"]
    assert [place["token"] for place in content] == [f"token_id:{token}" for token in told.token_ids]
    assert [place["logprob"] for place in content] == told.logprobs.token_logprobs[4:]
    assert all(len(place["top_logprobs"]) in (2, 3) for place in content)
    scored = [None, *({str(token): {"logprob": value}} for token, value in zip(
        prompt[1:], told.logprobs.token_logprobs[1:4], strict=True))]  # fmt: skip
    assert said["prompt_logprobs"] == scored
    (trajectory,) = of_session(server, "tokens")
    assert trajectory.tokens == prompt + choice["token_ids"]
    lines = post("/inference/v1/generate", body | {"stream": True}).text.strip().split("\n\n")
    pieces = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-1]]
    assert [token for piece in pieces for token in piece["token_ids"]] == choice["token_ids"]


def test_a_session_is_named_inside_the_key_and_a_stranger_has_none():
    tokenizer = build_chat_tokenizer(TEMPLATE)
    options = {"model_name": "tiny", "longest": 100, "api_key": "secret", "session_ids": ["mine"]}
    body = {"model": "tiny", "max_tokens": 1, "messages": QUESTION}
    with build(tokenizer).serving(tokenizer, **options) as server:
        web = httpx.Client(timeout=300)
        send = partial(web.post, server.url + "/messages", json=body)
        kinds = {
            "secret:mine": None,
            "secret": None,
            "secret:other": "permission_error",
            "secretmine": "authentication_error",
            "wrong:mine": "authentication_error",
            ":mine": "authentication_error",
            "": "authentication_error",
        }
        for key, kind in kinds.items():
            for headers in ({"x-api-key": key}, {"Authorization": f"Bearer {key}" if key else "Basic x"}):
                said = send(headers=headers).json()
                assert said.get("error", {}).get("type") == kind, key
        both = send(headers={"x-api-key": "secret:mine", "X-Session-Id": "another"})
        assert both.status_code == 400 and "different sessions" in both.json()["error"]["message"]
        assert [trajectory.session_id for trajectory in server.trajectories()] == ["mine"] * 2
    with build(tokenizer).serving(tokenizer, model_name="tiny", longest=100) as server:
        for key in ("none:mine", "sk-any:thing"):
            web.post(server.url + "/messages", json=body, headers={"x-api-key": key})
        assert [trajectory.session_id for trajectory in server.trajectories()] == ["mine"]


ODD = [
    {}, [], None, 5, {"model": 5}, {"model": "tiny"}, {"model": "other", "messages": QUESTION, "max_tokens": 1},
    {"model": "tiny", "messages": [], "input": [], "token_ids": [], "sampling_params": 5},
    {"model": "tiny", "messages": [{"role": "robot", "content": "x"}], "max_tokens": 1},
    {"model": "tiny", "messages": [{"role": "user"}], "max_tokens": 1},
    {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}], "max_tokens": 1},
    {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "tool_result"}]}], "max_tokens": 1},
    {"model": "tiny", "messages": [{"role": "user", "content": [{}]}], "max_tokens": 1},
    {"model": "tiny", "messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}], "max_tokens": 1},
    {"model": "tiny", "messages": [{"role": "assistant", "content": [{"type": "thinking"}]}], "max_tokens": 1},
    {"model": "tiny", "messages": QUESTION, "max_tokens": 1, "system": [{"type": "text"}]},
    {"model": "tiny", "messages": QUESTION, "max_tokens": 1, "tools": [{"type": "bash_20250124", "name": "bash"}]},
    {"model": "tiny", "messages": QUESTION, "max_tokens": 1, "tool_choice": {"type": "tool"}},
    {"model": "tiny", "messages": QUESTION, "max_tokens": 1, "tool_choice": {"type": "tool", "name": "f"}},
    {"model": "tiny", "messages": QUESTION, "max_tokens": 1, "output_config": {"format": {"type": "json_schema"}}},
    {"model": "tiny", "messages": QUESTION, "max_tokens": 1, "chat_template_kwargs": {"chat_template": "x"}},
    {"model": "tiny", "messages": QUESTION, "max_tokens": 1, "seed": 2**70},
    {"model": "tiny", "input": [{"type": "item_reference", "id": "x"}]},
    {"model": "tiny", "input": [{"role": "user", "content": [{"type": "input_image"}]}]},
    {"model": "tiny", "input": [{"type": "function_call", "name": "f"}]},
    {"model": "tiny", "input": [{"type": "function_call_output", "output": "x"}]},
    {"model": "tiny", "input": [{"type": [], "role": {}}]},
    {"model": "tiny", "input": "x", "tools": [{"type": "web_search"}]},
    {"model": "tiny", "input": "x", "tool_choice": {"type": "function", "name": "f"}},
    {"model": "tiny", "input": "x", "background": True},
    {"model": "tiny", "input": "x", "text": {"format": {"type": "json_schema", "name": "x"}}},
    {"model": "tiny", "input": "x", "previous_response_id": "x" * 10_000},
    {"token_ids": [10**9], "sampling_params": {}}, {"token_ids": [1] * 500, "sampling_params": {}},
    {"token_ids": [5], "sampling_params": {"n": 10**6}}, {"token_ids": [5], "sampling_params": {"temperature": -1}},
    {"token_ids": [5], "sampling_params": {"best_of": 3}}, {"token_ids": [5], "sampling_params": {"top_p": 5}},
    {"token_ids": [5], "sampling_params": {}, "features": {"mm_hashes": {}}},
]  # fmt: skip
PATHS = ["/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/inference/v1/generate"]


@pytest.mark.parametrize("path", PATHS)
def test_an_odd_body_is_refused_in_the_words_of_its_protocol(post, path):
    for body in ODD:
        answer = post(path, body)
        said = answer.json()
        if path == "/v1/messages/count_tokens" and answer.status_code == 200:
            continue
        assert 400 <= answer.status_code < 500, (path, body, said)
        assert said["error"]["message"] and len(said["error"]["message"]) < 2100
        kind = said["error"]["type"]
        assert said.get("type") == ("error" if path.startswith("/v1/messages") else None)
        assert kind in ("invalid_request_error", "not_found_error")
    assert post(path + "/x", {}).status_code == 404


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/inference/v1/generate"])
def test_a_client_that_leaves_ends_its_answer(server, path):
    body = {"model": "tiny", "stream": True}
    body |= {
        "/v1/messages": {"messages": QUESTION, "max_tokens": 350, "stop_sequences": None},
        "/v1/responses": {"input": "hi"},
        "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"ignore_eos": True}},
    }[path]
    url, headers = server.url.removesuffix("/v1") + path, {"x-api-key": "secret"}
    before = server.app.metrics.cancelled._value.get()
    while server.app.metrics.cancelled._value.get() == before:  # unless it ended at once
        with httpx.stream("POST", url, json=body, headers=headers, timeout=300) as answer:
            next(answer.iter_raw())
        deadline = time.monotonic() + 20
        while server.num_running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.num_running == 0
