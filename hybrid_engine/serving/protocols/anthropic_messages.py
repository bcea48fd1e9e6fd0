"""Anthropic's protocol of messages: `/v1/messages` and `/v1/messages/count_tokens`.

A request becomes a `TranslatedChat`: the system prompt is the first message, blocks `tool_use` and `thinking` become
calls and reasoning, and a block `tool_result` a message of the role tool. Generation, sessions and tool calls are those
of chats. `MessagesWriter` writes the answer as blocks, whole or as events. An answer that `max_tokens` would let exceed
the context ends where the context ends.

Source: https://docs.anthropic.com/en/api/messages and https://docs.anthropic.com/en/api/messages-streaming
"""

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StrictBool, StrictInt, StrictStr, model_validator

from hybrid_engine.serving.errors import RequestError, error_body
from hybrid_engine.serving.protocol import MAX_SESSION_ID, Body, Number, TranslatedChat
from hybrid_engine.serving.protocols.blocks import (
    CALL,
    REASONING,
    AnswerBlock,
    AnswerBlockEvent,
    BlockStream,
    blocks_of,
    joined_texts,
)
from hybrid_engine.serving.request_parsing import ParsedRequest, ServedModel
from hybrid_engine.serving.responses import ChatWriter, Piece

BILLING = "x-anthropic-billing-header:"
"""The beginning of a system block in which Claude Code counts its requests; the model does not see it."""


class MessageTurn(Body):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: StrictStr | list[dict[str, Any]]


class ToolDefinition(Body):
    """A tool of the client."""

    model_config = ConfigDict(extra="ignore")  # hints for Anthropic's own servers, such as cache_control
    name: Annotated[StrictStr, Field(min_length=1)]
    description: StrictStr | None = None
    input_schema: Annotated[dict[str, Any], Field(default_factory=dict)]
    type: StrictStr = "custom"

    @model_validator(mode="after")
    def _check_type(self) -> "ToolDefinition":
        if self.type != "custom":
            raise ValueError(f"a tool of type {self.type!r} runs at Anthropic; send tools of type custom")
        return self

    @property
    def function(self) -> dict[str, Any]:
        """The tool as chats have it."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.input_schema}}


class ToolSelection(Body):
    """The field `tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: StrictStr | None = None
    disable_parallel_tool_use: StrictBool = False

    @model_validator(mode="after")
    def _check_name(self) -> "ToolSelection":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name belongs to type tool; send both or neither")
        return self

    @property
    def of_chat(self) -> str | dict[str, Any]:
        """The same field of a chat."""
        named = {"type": "function", "function": {"name": self.name}}
        return named if self.type == "tool" else "required" if self.type == "any" else self.type


class Thinking(Body):
    """The field `thinking`; its budget has no effect."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Any = None
    display: Any = None


class OutputFormat(Body):
    """The format of texts."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """The field `output_config`."""

    effort: StrictStr | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Body):
    """The body of `/v1/messages/count_tokens`."""

    model: StrictStr
    messages: Annotated[list[MessageTurn], Field(min_length=1)]
    system: StrictStr | list[dict[str, Any]] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolSelection | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Further names that the chat template reads; not Anthropic's."""

    # Fields without effect on an answer.
    cache_control: Any = None
    metadata: Any = None
    service_tier: Any = None
    inference_geo: Any = None
    diagnostics: Any = None
    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None

    def to_chat(self) -> TranslatedChat:
        """The same request as a chat.

        Raises RequestError for a block that is not supported, and ValidationError for what a chat refuses.
        """
        return TranslatedChat.model_validate(self._fields())

    def _fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"model": self.model, "messages": self._chat_messages()}
        if self.messages[-1].role == "assistant":
            fields["continue_final_message"] = True
        if self.tools:
            fields["tools"] = [tool.function for tool in self.tools]
        if self.tool_choice is not None:
            fields["tool_choice"] = self.tool_choice.of_chat
            fields["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        inputs = dict(self.chat_template_kwargs)
        if self.thinking is not None:
            inputs = {"enable_thinking": self.thinking.type != "disabled"} | inputs
        output = self.output_config or OutputConfig()
        if output.format is not None:
            schema = {"name": "answer", "schema": output.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields | {"chat_template_kwargs": inputs, "reasoning_effort": output.effort}

    def _chat_messages(self) -> list[dict[str, Any]]:
        messages = [] if self.system is None else [{"role": "system", "content": _system_text(self.system)}]
        for place, turn in enumerate(self.messages):
            messages += _chat_turns(turn, f"messages.{place}")
        return messages


class MessagesRequest(CountTokensRequest):
    """The body of `/v1/messages`."""

    max_tokens: Annotated[StrictInt, Field(ge=1)]
    stream: StrictBool = False
    stop_sequences: list[StrictStr] | None = None
    temperature: Annotated[Number, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[StrictInt, Field(ge=-1)] = 0
    seed: StrictInt | None = None
    """Not Anthropic's; as in a chat."""
    session_id: Annotated[StrictStr, Field(min_length=1, max_length=MAX_SESSION_ID)] | None = None
    """Not Anthropic's; as in a chat."""

    def _fields(self) -> dict[str, Any]:
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k", "seed", "session_id")
        sampling = {name: getattr(self, name) for name in names}
        return super()._fields() | sampling | {"stop": self.stop_sequences}


def _system_text(system: str | list[dict[str, Any]]) -> str:
    if isinstance(system, str):
        return system
    parts = [_text_of([part], "system") for part in system]
    return "\n".join(part for part in parts if not part.startswith(BILLING))


def _text_of(content: str | list[dict[str, Any]], place: str) -> str:
    try:
        return joined_texts(content, ("text",), place)
    except ValueError as error:
        raise RequestError(str(error), param=place.partition(".")[0], code="invalid_value") from error


def _chat_turns(turn: MessageTurn, place: str) -> list[dict[str, Any]]:
    """The messages of a chat that say the same: one for each result of a tool, and one for everything else."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    if turn.role == "assistant":
        return [_assistant_message(turn.content, place)]
    results = [part for part in turn.content if part.get("type") == "tool_result"]
    others = [part for part in turn.content if part.get("type") != "tool_result"]
    messages = [_tool_message(part, place) for part in results]
    if others or not results:
        messages.append({"role": turn.role, "content": _text_of(others, place)})
    return messages


def _tool_message(part: dict[str, Any], place: str) -> dict[str, Any]:
    name, content = part.get("tool_use_id"), part.get("content") or ""
    if not isinstance(name, str) or not isinstance(content, (str, list)):
        raise RequestError(
            f"{place}: a tool_result needs a tool_use_id, and a content of text", param="messages", code="invalid_value"
        )
    return {"role": "tool", "tool_call_id": name, "content": _text_of(content, place)}


def _assistant_message(content: list[dict[str, Any]], place: str) -> dict[str, Any]:
    texts = [part for part in content if part.get("type") not in ("tool_use", "thinking", "redacted_thinking")]
    calls = [_call(part, place) for part in content if part.get("type") == "tool_use"]
    thoughts = [part.get("thinking") for part in content if part.get("type") == "thinking"]
    if not all(isinstance(thought, str) for thought in thoughts):
        raise RequestError(f"{place}: a block thinking needs a text", param="messages", code="invalid_value")
    message: dict[str, Any] = {"role": "assistant", "content": _text_of(texts, place) or None}
    if calls:
        message["tool_calls"] = calls
    return message | ({"reasoning_content": "".join(thoughts)} if any(thoughts) else {})  # type: ignore[arg-type]


def _call(part: dict[str, Any], place: str) -> dict[str, Any]:
    if not isinstance(part.get("name"), str) or not isinstance(part.get("input"), dict):
        raise RequestError(
            f"{place}: a tool_use needs a name and an object as input", param="messages", code="invalid_value"
        )
    arguments = json.dumps(part["input"], ensure_ascii=False)
    return {"id": part.get("id"), "type": "function", "function": {"name": part["name"], "arguments": arguments}}


class MessagesWriter(ChatWriter):
    """Writes answers as Anthropic's messages, whole or as events.

    Args:
        body: the request before its translation.
    """

    prefix, last_line = "msg", ""

    def __init__(self, body: MessagesRequest, parsed: ParsedRequest, model: ServedModel):
        super().__init__(parsed, model)
        self.id = self.id.replace("-", "_")
        self._body_of_request = body
        self._blocks = BlockStream()

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        content = [_content_block(block) for block in blocks_of(self.choices[0])]
        return self._message(content) | self._end() | {"usage": self._usage()}

    def opening(self) -> list[dict[str, Any]]:
        """The event that begins the message."""
        usage = {"input_tokens": len(self.choices[0].prompt), "output_tokens": 0}
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
        return [{"type": "message_start", "message": message}]

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """The events of a stream for `piece`."""
        return [shown for event in self._blocks.add(piece) for shown in _block_events(event)]

    def closing(self) -> list[dict[str, Any]]:
        """The events that end the last block and the message."""
        ends = [shown for event in self._blocks.finish() for shown in _block_events(event)]
        return [
            *ends,
            {"type": "message_delta", "delta": self._end(), "usage": self._usage()},
            {"type": "message_stop"},
        ]

    def failure(self, error: RequestError) -> dict[str, Any]:
        """The event of an error, after which the stream ends."""
        return error_body("/v1/messages", error)

    def event_name(self, event: dict[str, Any]) -> str | None:
        """The type of the event."""
        return str(event["type"])

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        named = {"id": self.id, "type": "message", "role": "assistant", "model": self.request.model}
        return named | {"content": content}

    def _usage(self) -> dict[str, Any]:
        (choice,) = self.choices
        return {"input_tokens": len(choice.prompt), "output_tokens": len(choice.tokens)}

    def _end(self) -> dict[str, Any]:
        (choice,) = self.choices
        stopped = choice.detokenizer.stopped
        if choice.finish_reason == "tool_calls":
            reason = "tool_use"
        elif choice.finish_reason == "stop":
            reason = "end_turn" if stopped is None else "stop_sequence"
        else:
            is_whole = len(choice.tokens) >= self._body_of_request.max_tokens
            reason = "max_tokens" if is_whole else "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": stopped}


def _content_block(block: AnswerBlock) -> dict[str, Any]:
    if block.kind == REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind != CALL:
        return {"type": "text", "text": block.text}
    assert block.call is not None
    function = block.call["function"]
    return {
        "type": "tool_use",
        "id": block.call["id"],
        "name": function["name"],
        "input": _input(function["arguments"]),
    }


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call as the object that a block must have."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = arguments
    return value if isinstance(value, dict) else {"value": value}


def _block_events(event: AnswerBlockEvent) -> list[dict[str, Any]]:
    """The events of Anthropic's stream for a part that begins, grows or ends."""
    block, place = event.block, {"index": event.place}
    if event.action == "end":
        return [{"type": "content_block_stop", **place}]
    if event.action == "add":
        name = "thinking" if block.kind == REASONING else "text"
        return [{"type": "content_block_delta", **place, "delta": {"type": f"{name}_delta", name: event.added}}]
    shown = _content_block(block)
    if block.kind != CALL:
        return [{"type": "content_block_start", **place, "content_block": shown}]
    written = {"type": "input_json_delta", "partial_json": json.dumps(shown["input"], ensure_ascii=False)}
    return [
        {"type": "content_block_start", **place, "content_block": shown | {"input": {}}},
        {"type": "content_block_delta", **place, "delta": written},
    ]
