"""The `anthropic` package, its newest release: messages, tools, streams, errors, and a session inside the key."""

import json

import anthropic
from checks import ANSWER_SCHEMA, CITIES, MODEL, QUESTION, URL, WEATHER, run_checks

BASE = URL.removesuffix("/v1")
client = anthropic.Anthropic(base_url=BASE, api_key="none", max_retries=0, timeout=300)
ASKED = {"model": MODEL, "messages": QUESTION, "max_tokens": 8, "extra_body": {"temperature": 0}}
FUNCTION = WEATHER["function"]
TOOL = {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}


def check_whole_and_streamed_messages_agree() -> None:
    whole = client.messages.create(**ASKED, system="Be brief.", metadata={"user_id": "me"})
    (block,) = whole.content
    assert block.type == "text" and whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 8
    with client.messages.stream(**ASKED, system=[{"type": "text", "text": "Be brief."}]) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == block.text == last.content[0].text and last.usage == whole.usage
    asked = {name: value for name, value in ASKED.items() if name in ("model", "messages")}
    counted = client.messages.count_tokens(**asked, system="Be brief.")
    assert counted.input_tokens == whole.usage.input_tokens


def check_tools_are_used_and_answered() -> None:
    key = "none:anthropic"
    own = anthropic.Anthropic(base_url=BASE, api_key=key, max_retries=0, timeout=300)
    asked = ASKED | {"max_tokens": 250, "tools": [TOOL]}
    messages = list(QUESTION)
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        choice = choice | {"disable_parallel_tool_use": True}
        said = own.messages.create(**asked | {"messages": messages}, tool_choice=choice)
        (call,) = said.content
        assert said.stop_reason == "tool_use" and call.input["city"] in CITIES
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": [result]}]
    last = own.messages.create(**asked | {"messages": messages, "max_tokens": 8})
    assert last.stop_reason == "max_tokens"


def check_the_stream_helper_puts_calls_together() -> None:
    asked = ASKED | {
        "max_tokens": 250,
        "tools": [TOOL],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    with client.messages.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        said = stream.get_final_message()
    assert {"input_json", "content_block_stop", "message_stop"} <= kinds
    assert said.stop_reason == "tool_use" and said.content[0].input["city"] in CITIES


def check_a_message_follows_a_schema() -> None:
    format = {"format": {"type": "json_schema", "schema": ANSWER_SCHEMA}}
    said = client.messages.create(**ASKED | {"max_tokens": 200}, output_config=format)
    assert json.loads(said.content[0].text).keys() == {"city", "warm"}


def check_errors_are_the_clients_own() -> None:
    for kind, changes in (
        (anthropic.NotFoundError, {"model": "other"}),
        (anthropic.BadRequestError, {"max_tokens": 0}),
        (anthropic.BadRequestError, {"messages": [{"role": "user", "content": "x" * 50_000}]}),
    ):
        try:
            client.messages.create(**ASKED | changes)
        except kind as error:
            assert error.body["type"] == "error" and error.body["error"]["message"]
        else:
            raise AssertionError(f"{changes} was taken")


run_checks(globals())
