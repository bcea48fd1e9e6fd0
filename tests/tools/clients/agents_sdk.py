"""openai-agents: an agent calls a tool, reads what it says and answers; another must answer by a schema."""

import asyncio
import os
from typing import Literal

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from checks import CITIES, MODEL, URL, run_checks
from openai import AsyncOpenAI
from pydantic import BaseModel

ASKED_CITIES: list[str] = []


@function_tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    ASKED_CITIES.append(city)
    return "sunny"


class Answer(BaseModel):
    city: Literal["Paris", "Rome"]
    warm: bool


def build_agent(kind=OpenAIChatCompletionsModel, **options) -> Agent:
    client = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0, timeout=300)
    return Agent(name="helper", instructions="Be brief.", model=kind(MODEL, client), **options)


def check_an_agent_answers() -> None:
    agent = build_agent(model_settings=ModelSettings(max_tokens=8, temperature=0))
    result = asyncio.run(Runner.run(agent, "Where is it warm?"))
    assert result.final_output and result.raw_responses[0].usage.output_tokens == 8


def check_an_agent_calls_its_tool_and_goes_on() -> None:
    ASKED_CITIES.clear()
    extra = {"session_id": "agents"}
    settings = ModelSettings(
        max_tokens=250, temperature=0, tool_choice="required", parallel_tool_calls=False, extra_body=extra
    )
    agent = build_agent(tools=[get_weather], model_settings=settings)
    result = asyncio.run(Runner.run(agent, "Where is it warm?", max_turns=3))
    assert len(ASKED_CITIES) == 1 and ASKED_CITIES[0] in CITIES
    assert len(result.raw_responses) == 2 and isinstance(result.final_output, str)


def check_a_streamed_agent_calls_its_tool() -> None:
    ASKED_CITIES.clear()

    async def run() -> list[str]:
        settings = ModelSettings(max_tokens=250, temperature=0, tool_choice="get_weather", include_usage=True)
        agent = build_agent(tools=[get_weather], model_settings=settings, tool_use_behavior="stop_on_first_tool")
        result = Runner.run_streamed(agent, "Where is it warm?")
        kinds = [event.type async for event in result.stream_events()]
        assert result.final_output == "sunny"
        return kinds

    assert "run_item_stream_event" in asyncio.run(run()) and len(ASKED_CITIES) == 1


def check_an_agent_calls_its_tool_through_responses_whole_and_streamed() -> None:
    ASKED_CITIES.clear()

    async def run() -> list[str]:
        settings = ModelSettings(max_tokens=250, temperature=0, tool_choice="required", parallel_tool_calls=False)
        agent = build_agent(
            OpenAIResponsesModel, tools=[get_weather], model_settings=settings, tool_use_behavior="stop_on_first_tool"
        )
        whole = await Runner.run(agent, "Where is it warm?")
        streamed = Runner.run_streamed(agent, "Where is it warm?")
        async for _ in streamed.stream_events():
            pass
        return [whole.final_output, streamed.final_output]

    assert asyncio.run(run()) == ["sunny", "sunny"] and len(ASKED_CITIES) == 2


def check_an_agent_answers_by_a_schema() -> None:
    settings = ModelSettings(max_tokens=250, temperature=0, store=True, metadata={"a": "b"}, top_logprobs=None)
    agent = build_agent(output_type=Answer, model_settings=settings)
    assert isinstance(asyncio.run(Runner.run(agent, "Where is it warm?")).final_output, Answer)


def check_a_conversation_of_two_runs() -> None:
    async def talk() -> str:
        agent = build_agent(model_settings=ModelSettings(max_tokens=8, temperature=0, reasoning={"effort": "low"}))
        first = await Runner.run(agent, "Where is it warm?")
        asked = [*first.to_input_list(), {"role": "user", "content": "Sure?"}]
        return (await Runner.run(agent, asked)).final_output

    assert asyncio.run(talk())


run_checks(globals())
