"""litellm: its routes for servers that speak OpenAI's protocol, and for vLLM's."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # prices are fetched otherwise

import litellm
from checks import ANSWER_SCHEMA, CITIES, MODEL, QUESTION, URL, WEATHER, run_checks

ROUTES = (f"openai/{MODEL}", f"hosted_vllm/{MODEL}")
ASKED = {"messages": QUESTION, "max_tokens": 8, "temperature": 0, "api_base": URL, "api_key": "none", "num_retries": 0}


def check_whole_and_streamed_chats_agree() -> None:
    for route in ROUTES:
        whole = litellm.completion(model=route, **ASKED)
        options = {"include_usage": True}
        events = list(litellm.completion(model=route, **ASKED, stream=True, stream_options=options))
        text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
        assert text == whole.choices[0].message.content and whole.usage.completion_tokens == 8
        assert litellm.stream_chunk_builder(events, messages=QUESTION).choices[0].message.content == text


def check_fields_that_litellm_passes_on() -> None:
    for route in ROUTES:
        plain = litellm.completion(model=route, **ASKED)
        said = litellm.completion(
            model=route, **ASKED, n=1, top_p=1.0, stop=None, presence_penalty=0.0, frequency_penalty=0.0,
            logit_bias=None, user="me", seed=1, parallel_tool_calls=None, response_format=None, tools=None,
            metadata={"trace": "x"},
        )  # fmt: skip
        assert said.choices[0].message.content == plain.choices[0].message.content


def check_tools_are_called_and_answered() -> None:
    for route in ROUTES:
        messages = list(QUESTION)
        asked = ASKED | {"max_tokens": 250, "tools": [WEATHER]}
        said = litellm.completion(
            model=route, **asked | {"messages": messages}, tool_choice="required", parallel_tool_calls=False
        )
        (call,) = said.choices[0].message.tool_calls
        assert said.choices[0].finish_reason == "tool_calls"
        assert json.loads(call.function.arguments)["city"] in CITIES
        messages += [said.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        last = litellm.completion(model=route, **asked | {"messages": messages, "max_tokens": 4})
        assert last.usage.completion_tokens == 4


def check_answers_follow_a_schema() -> None:
    format = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": ANSWER_SCHEMA}}
    for route in ROUTES:
        said = litellm.completion(model=route, **ASKED | {"max_tokens": 200}, response_format=format)
        assert json.loads(said.choices[0].message.content).keys() == {"city", "warm"}


def check_log_probabilities() -> None:
    said = litellm.completion(model=ROUTES[0], **ASKED, logprobs=True, top_logprobs=2)
    assert len(said.choices[0].logprobs.content) == 8


def check_text_completions() -> None:
    asked = {name: value for name, value in ASKED.items() if name != "messages"}
    said = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="warm", logprobs=1, **asked)
    assert said.usage.completion_tokens == 8 and said.choices[0].text


def check_a_session_goes_on_by_its_tokens() -> None:
    messages = list(QUESTION)
    extra = {"session_id": "litellm", "return_token_ids": True}
    first = litellm.completion(model=ROUTES[0], **ASKED, extra_body=extra)
    messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "Sure?"}]
    second = litellm.completion(model=ROUTES[0], **ASKED | {"messages": messages}, extra_body=extra)
    drawn = first.prompt_token_ids + first.choices[0].provider_specific_fields["token_ids"]
    assert second.prompt_token_ids[: len(drawn)] == drawn


def check_errors_are_litellms_own() -> None:
    for kind, changes in (
        (litellm.NotFoundError, {"model": "openai/other"}),
        (litellm.BadRequestError, {"temperature": -1}),
    ):
        try:
            litellm.completion(**{"model": ROUTES[0]} | ASKED | changes)
        except kind:
            continue
        raise AssertionError(f"{changes} was taken")


run_checks(globals())
