"""The OpenAPI document of the server: valid, closed to strangers, and as wide as what official clients send."""

import json
from functools import partial

import httpx
import openai
import pytest

from hybrid_engine.serving.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from hybrid_engine.serving.protocols.anthropic_messages import CountTokensRequest, MessagesRequest
from hybrid_engine.serving.protocols.openai_responses import ResponsesRequest
from hybrid_engine.serving.protocols.token_generation import GenerateRequest
from tests.serving.test_server import build
from tests.support.chat import build_chat_tokenizer
from tests.support.paths import DATA

OFFICIAL = DATA / "openapi-3.1-schema.json"
"""https://spec.openapis.org/oas/3.1/schema/2022-10-07"""
BODIES = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/inference/v1/generate": GenerateRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
MESSAGES = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "content": "1", "tool_call_id": "1"},
]
ASKS = [
    {"messages": MESSAGES},
    {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False},
    {"messages": MESSAGES, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}, "n": 2, "seed": 1},
    {"messages": MESSAGES, "max_completion_tokens": 5, "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 1}},
    {"messages": MESSAGES, "stop": ["a"], "temperature": 0, "top_p": 1, "user": "me", "metadata": {"a": "b"}},
    {
        "messages": MESSAGES,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    },
    {"messages": MESSAGES, "response_format": {"type": "json_object"}, "extra_body": {"top_k": 5, "session_id": "a"}},
    {"prompt": "hi", "max_tokens": 5, "echo": True, "logprobs": 1, "suffix": None, "best_of": 1},
    {"prompt": ["a", "b"], "n": 2, "stop": "x", "presence_penalty": 1.0, "frequency_penalty": -1.0},
    {"prompt": [1, 2, 3], "stream": True, "extra_body": {"guided_regex": "a+", "structured_outputs": {"regex": "a"}}},
    {"prompt": [[1], [2]], "extra_body": {"min_p": 0.1, "stop_token_ids": [3], "repetition_penalty": 1.1}},
]


@pytest.fixture(scope="module")
def jsonschema():
    return pytest.importorskip("jsonschema", reason="the extra 'dev' is not installed whole")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server with keys, and its document."""
    tokenizer = build_chat_tokenizer()
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.touch(0o600)
    file.write_text("alice one\nmonitor two metrics\n")
    with build(tokenizer).serving(tokenizer, model_name="tiny", longest=160, api_key_file=file) as server:
        yield server, get(server, "one").json()


def get(server, key=None):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.get(server.url.removesuffix("v1") + "openapi.json", headers=headers, timeout=300)


def body_validator(jsonschema, document, path):
    operation = document["paths"][path]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    return jsonschema.Draft202012Validator(schema | {"components": document["components"]})


def test_only_holders_of_a_key_get_it_and_a_server_without_keys_has_none(served):
    server, document = served
    assert document["openapi"].startswith("3.1")
    assert [get(server, key).status_code for key in (None, "wrong", "two")] == [401] * 3
    tokenizer = build_chat_tokenizer()
    with build(tokenizer).serving(tokenizer, model_name="tiny", longest=160) as keyless:
        answer = get(keyless)
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "unknown_url"


def test_it_is_valid_openapi(jsonschema, served):
    _, document = served
    jsonschema.Draft202012Validator(json.loads(OFFICIAL.read_text())).validate(document)
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for path in BODIES:  # every reference leads somewhere
        assert not body_validator(jsonschema, document, path).is_valid({"model": 5})


def test_it_has_every_path_and_every_field_that_is_read(served):
    server, document = served
    routes = {route.path.replace(":path", "") for route in server.app._routes()}
    assert set(document["paths"]) == routes
    for path, kind in BODIES.items():
        schema = document["components"]["schemas"][kind.__name__]
        assert document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"] == {
            "$ref": f"#/components/schemas/{kind.__name__}"
        }
        assert set(schema["properties"]) == {field.alias or name for name, field in kind.model_fields.items()}


@pytest.mark.parametrize("ask", ASKS, ids=map(str, range(len(ASKS))))
def test_what_the_official_client_sends_fits_it(jsonschema, served, ask):
    _, document = served
    sent = []
    web = httpx.Client(transport=httpx.MockTransport(lambda request: sent.append(request) or httpx.Response(400)))
    client = openai.OpenAI(base_url="http://server/v1", api_key="none", max_retries=0, http_client=web)
    create = client.chat.completions.create if "messages" in ask else client.completions.create
    with pytest.raises(openai.BadRequestError):
        create(model="tiny", **ask)
    (request,) = sent
    body_validator(jsonschema, document, request.url.path).validate(json.loads(request.content))


@pytest.mark.parametrize(
    ("path", "change", "is_served"),
    [
        ("/v1/completions", {"n": None, "unknown": None}, True),
        ("/v1/completions", {"unknown": 1}, False),
        ("/v1/completions", {"use_beam_search": False}, True),
        ("/v1/completions", {"use_beam_search": 0}, False),
        ("/v1/completions", {"n": 0}, False),
        ("/v1/completions", {"temperature": "1"}, False),
        ("/v1/completions", {"prompt": []}, False),
        ("/v1/completions", {"structured_outputs": {"regex": "a", "other": 1}}, False),
        ("/v1/chat/completions", {"best_of": 1}, True),
        ("/v1/chat/completions", {"best_of": True}, False),
        ("/v1/chat/completions", {"modalities": ["audio"]}, False),
        ("/v1/chat/completions", {"messages": [{"content": "no role"}]}, False),
        ("/tokenize", {"add_special_tokens": 1}, False),
        ("/detokenize", {"tokens": [-1]}, False),
    ],
)
def test_what_it_does_not_allow_is_refused_and_the_other_way_round(jsonschema, served, path, change, is_served):
    server, document = served
    good = {
        "/v1/completions": {"model": "tiny", "prompt": "hi", "max_tokens": 1},
        "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
        "/tokenize": {"prompt": "hi"},
        "/detokenize": {"tokens": [3]},
    }[path]
    assert body_validator(jsonschema, document, path).is_valid(good | change) == is_served
    send = partial(httpx.post, headers={"Authorization": "Bearer one"}, timeout=300)
    answer = send(server.url.removesuffix("/v1") + path, json=good | change)
    assert answer.status_code == (200 if is_served else 400), answer.text
