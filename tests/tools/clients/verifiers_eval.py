"""verifiers' evaluation client: it passes a harness's chats on, whole and streamed, and reads the answers."""

import asyncio
import json
import os
from types import SimpleNamespace

from checks import CITIES, MODEL, QUESTION, URL, WEATHER, run_checks
from openai import AsyncOpenAI
from renderers.client import generate
from verifiers.v1.clients import EvalClient, EvalClientConfig
from verifiers.v1.dialects.chat import ChatDialect, message_to_wire
from verifiers.v1.types import SamplingConfig

os.environ["SERVED_KEY"] = "none"
SAMPLING = SamplingConfig(temperature=0, max_tokens=8)
BODY = {"model": MODEL, "messages": QUESTION, "max_tokens": 8, "temperature": 0}


def ask(body: dict, session_id: str | None = None):
    async def get():
        client = EvalClient(EvalClientConfig(base_url=URL, api_key_var="SERVED_KEY"))
        return await client.get_response(ChatDialect(), body, SAMPLING, session_id)

    return asyncio.run(get())


def check_an_answer_is_read() -> None:
    response = ask(BODY)
    assert response.message.content and response.finish_reason == "length"
    assert response.usage.completion_tokens == 8


def check_null_is_a_default() -> None:
    plain = ask(BODY)
    null = dict.fromkeys(["top_p", "top_k", "min_p", "seed", "stop", "n", "logprobs", "tools", "reasoning_effort"])
    assert ask(BODY | null).message == plain.message


def check_a_rollout_of_several_turns_with_a_tool() -> None:
    body = BODY | {"max_tokens": 250, "tools": [WEATHER], "parallel_tool_calls": False, "return_token_ids": True}
    first = ask(body | {"tool_choice": "required"}, "rollout")
    (call,) = first.message.tool_calls
    assert first.finish_reason == "tool_calls" and json.loads(call.arguments)["city"] in CITIES
    told = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [*QUESTION, message_to_wire(first.message), told]
    second = ask(body | {"messages": messages}, "rollout")
    drawn = first.raw["prompt_token_ids"] + first.raw["choices"][0]["token_ids"]
    assert second.raw["prompt_token_ids"][: len(drawn)] == drawn  # the rollout's session goes on


def check_a_stream_is_passed_on_event_by_event() -> None:
    async def relay() -> None:
        client, dialect = EvalClient(EvalClientConfig(base_url=URL, api_key_var="SERVED_KEY")), ChatDialect()
        body = BODY | {"max_tokens": 250, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        reply = await client.relay(dialect, body)
        parser = dialect.stream_parser()
        async for event in reply.chunks:
            parser.feed(event)
        response = parser.finish()
        assert response.message.tool_calls[0].name == "get_weather" and response.usage.completion_tokens > 0

    asyncio.run(relay())


class PlainRenderer:
    """Reads tokens back as nothing but tokens; a model's own renderer needs its tokenizer."""

    def get_stop_token_ids(self) -> list[int]:
        return [1]

    def parse_response(self, tokens: list[int], **_) -> SimpleNamespace:
        return SimpleNamespace(content=str(tokens), reasoning_content=None, tool_calls=[], reasoning_complete=True)


def check_the_training_clients_tokens_come_back_with_log_probabilities() -> None:
    async def ask_tokens(prompt: list[int]) -> dict:
        client = AsyncOpenAI(base_url=URL, api_key="none:tokens", max_retries=0)
        sampling = {"temperature": 1.0, "max_tokens": 6, "seed": 3}
        return await generate(
            client=client,
            renderer=PlainRenderer(),
            messages=[],
            model=MODEL,
            prompt_ids=prompt,
            sampling_params=sampling,
        )

    async def talk() -> None:
        first = await ask_tokens([5, 6, 7])
        assert len(first["completion_ids"]) == len(first["completion_logprobs"]) == 6
        assert first["finish_reason"] == "length" and first["usage"]["completion_tokens"] == 6
        second = await ask_tokens([5, 6, 7, *first["completion_ids"], 8])
        assert second["completion_ids"] and max(second["completion_logprobs"]) <= 0

    asyncio.run(talk())


run_checks(globals())
