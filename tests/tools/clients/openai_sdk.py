"""The `openai` package, its newest release: what its helpers send and read."""

import inspect
import json
from typing import Literal

import openai
from checks import ANSWER_SCHEMA, CITIES, MODEL, QUESTION, URL, WEATHER, run_checks
from pydantic import BaseModel

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=300)
ASKED = {"model": MODEL, "messages": QUESTION, "max_tokens": 8, "temperature": 0}


class Answer(BaseModel):
    city: Literal["Paris", "Rome"]
    warm: bool


def check_whole_and_streamed_chats_agree() -> None:
    whole = client.chat.completions.create(**ASKED, n=1, seed=1)
    events = list(client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True}))
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text == whole.choices[0].message.content
    assert events[-1].usage == whole.usage and whole.usage.completion_tokens == 8


def check_every_field_of_a_chat_that_means_its_default() -> None:
    plain = client.chat.completions.create(**ASKED)
    send = client.chat.completions.create
    names = [name for name in inspect.signature(send).parameters if not name.startswith("extra_")]
    fields = dict.fromkeys(name for name in names if name not in (*ASKED, "timeout"))
    assert len(fields) > 25
    said = send(**ASKED, extra_body=fields)
    assert said.choices[0].message == plain.choices[0].message


def check_fields_that_change_nothing() -> None:
    plain = client.chat.completions.create(**ASKED)
    said = client.chat.completions.create(
        **ASKED, metadata={"a": "b"}, modalities=["text"], prompt_cache_key="x", reasoning_effort="low",
        verbosity="low", safety_identifier="x", service_tier="auto", store=True, user="me", parallel_tool_calls=True,
        prediction={"type": "content", "content": "warm"}, prompt_cache_options={"mode": "explicit"},
        function_call="none",
    )  # fmt: skip
    assert said.choices[0].message == plain.choices[0].message


def check_log_probabilities_have_the_drawn_token() -> None:
    said = client.chat.completions.create(**ASKED | {"temperature": 2}, logprobs=True, top_logprobs=2)
    for place in said.choices[0].logprobs.content:
        assert (place.token, place.logprob) in [(top.token, top.logprob) for top in place.top_logprobs]
    told = client.completions.create(model=MODEL, prompt="warm", max_tokens=4, logprobs=1, echo=True).choices[0]
    assert told.text.startswith("warm") and len(told.logprobs.tokens) == len(told.logprobs.top_logprobs) == 8


def check_structured_answers_parse() -> None:
    asked = ASKED | {"max_tokens": 200}
    parsed = client.chat.completions.parse(**asked, response_format=Answer).choices[0].message.parsed
    assert isinstance(parsed, Answer)
    format = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": ANSWER_SCHEMA}}
    said = client.chat.completions.create(**asked, response_format=format)
    assert json.loads(said.choices[0].message.content).keys() == {"city", "warm"}


def check_tools_are_called_and_answered() -> None:
    messages = list(QUESTION)
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        asked = ASKED | {"messages": messages, "max_tokens": 250, "tools": [WEATHER], "tool_choice": choice}
        said = client.chat.completions.create(**asked, parallel_tool_calls=False).choices[0]
        (call,) = said.message.tool_calls
        assert said.finish_reason == "tool_calls" and said.message.content is None
        assert call.function.name == "get_weather" and json.loads(call.function.arguments)["city"] in CITIES
        messages += [said.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    last = client.chat.completions.create(**ASKED | {"messages": messages, "tools": [WEATHER], "tool_choice": "none"})
    assert last.choices[0].message.tool_calls is None and last.choices[0].finish_reason == "length"


def check_the_stream_helper_puts_calls_together() -> None:
    asked = ASKED | {"max_tokens": 250, "tools": [WEATHER | {"function": WEATHER["function"] | {"strict": True}}]}
    with client.chat.completions.stream(**asked, tool_choice="required", parallel_tool_calls=False) as stream:
        kinds = {event.type for event in stream}
        said = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds
    assert said.tool_calls[0].function.parsed_arguments["city"] in CITIES


def check_responses_stream_call_functions_and_continue() -> None:
    asked = {"model": MODEL, "temperature": 0, "max_output_tokens": 8}
    whole = client.responses.create(**asked, input=QUESTION, instructions="Be brief.", store=True)
    with client.responses.stream(**asked, input=QUESTION, instructions="Be brief.") as stream:
        events = list(stream)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1].response
    assert text == whole.output_text == last.output_text and last.usage == whole.usage
    tool = {"type": "function", **WEATHER["function"], "strict": True}
    asked |= {"tools": [tool], "max_output_tokens": 250}
    said = client.responses.create(**asked, input="Where?", tool_choice="required", parallel_tool_calls=False)
    (call,) = said.output
    assert call.name == "get_weather" and json.loads(call.arguments)["city"] in CITIES
    told = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    asked |= {"max_output_tokens": 8, "previous_response_id": said.id, "tool_choice": "none"}
    assert client.responses.create(**asked, input=told).usage.output_tokens == 8
    parsed = client.responses.parse(model=MODEL, temperature=0, input="Where?", text_format=Answer).output_parsed
    assert isinstance(parsed, Answer)


def check_errors_are_the_clients_own() -> None:
    for kind, changes in (
        (openai.NotFoundError, {"model": "other"}),
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"max_tokens": 10**6}),
    ):
        try:
            client.chat.completions.create(**ASKED | changes)
        except kind as error:
            assert error.code and error.body["message"]
        else:
            raise AssertionError(f"{changes} was taken")


def check_models_and_a_session_of_two_turns() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    extra = {"session_id": "openai", "return_token_ids": True}
    first = client.chat.completions.create(**ASKED, extra_body=extra)
    messages = [*QUESTION, first.choices[0].message, {"role": "user", "content": "Sure?"}]
    second = client.chat.completions.create(**ASKED | {"messages": messages}, extra_body=extra)
    drawn = first.prompt_token_ids + first.choices[0].token_ids
    assert second.prompt_token_ids[: len(drawn)] == drawn


run_checks(globals())
