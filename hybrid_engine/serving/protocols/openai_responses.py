"""OpenAI's protocol of responses: `/v1/responses`.

A request becomes a `TranslatedChat`: `instructions` are its first message, the items of `input` are messages,
reasoning, calls and results of calls, and `previous_response_id` puts the conversation of an earlier response first, as
`StoredResponses` has it. Generation, sessions and tool calls are those of chats. `ResponsesWriter` writes the answer as
items, whole or as events.

Source: https://platform.openai.com/docs/api-reference/responses and .../responses-streaming
"""

import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, StrictBool, StrictInt, StrictStr, model_validator

from hybrid_engine.serving.errors import RequestError, cut
from hybrid_engine.serving.protocol import MAX_SESSION_ID, Body, Number, TranslatedChat, only
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
from hybrid_engine.serving.sessions import count_bytes

TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
MAX_STORED = 2**14
"""Maximum number of responses that later ones can continue; beyond it the oldest is forgotten."""
MAX_STORED_BYTES = 2**28
"""The same limit for the memory of their messages."""
PREFIXES = {REASONING: "rs", CALL: "fc"}
"""Beginnings of the ids of items; messages have `msg`."""


class FunctionTool(Body):
    """A tool of the client."""

    type: StrictStr
    name: StrictStr = ""
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: Any = None
    """Calls that are required always follow the schema, others never."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _check_type(self) -> "FunctionTool":
        if self.type != "function" or not self.name:
            raise ValueError(f"a tool of type {self.type!r} runs at OpenAI; send tools of type function, with a name")
        return self

    @property
    def of_chat(self) -> dict[str, Any]:
        """The tool as chats have it."""
        described = {} if self.description is None else {"description": self.description}
        parameters = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": parameters}}


class FunctionChoice(Body):
    """The tool that an answer must call."""

    type: Literal["function"]
    name: StrictStr


class TextFormat(Body):
    """The format of texts."""

    model_config = ConfigDict(extra="allow")
    type: Literal["text", "json_object", "json_schema"]
    name: StrictStr = "answer"
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    @property
    def of_chat(self) -> dict[str, Any]:
        """The same as a chat's `response_format`."""
        if self.schema_ is None:
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.schema_}}


class TextOptions(Body):
    """The field `text`."""

    format: TextFormat | None = None
    verbosity: Any = None


class ReasoningOptions(Body):
    """The field `reasoning`: the effort is given to the chat template."""

    effort: StrictStr | None = None
    summary: Any = None
    generate_summary: Any = None
    context: Any = None
    mode: Any = None


class EarlierResponse(NamedTuple):
    """A response that another one continues."""

    messages: list[dict[str, Any]]
    """The messages of its chat without instructions, and its answer."""
    session_id: str | None


class ResponsesRequest(Body):
    """The body of `/v1/responses`."""

    model: StrictStr
    input: StrictStr | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: StrictStr | None = None
    previous_response_id: StrictStr | None = None
    max_output_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    tools: Annotated[list[FunctionTool], Field(default_factory=list)]
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice = "auto"
    parallel_tool_calls: StrictBool = True
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    stream: StrictBool = False
    store: StrictBool = True
    """Whether a later response can continue this one."""
    metadata: dict[str, Any] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    """Reasoning is always sent as text."""

    # Not OpenAI's; as in a chat.
    top_k: Annotated[StrictInt, Field(ge=-1)] = 0
    seed: StrictInt | None = None
    session_id: Annotated[StrictStr, Field(min_length=1, max_length=MAX_SESSION_ID)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(default_factory=dict)]

    # Fields without effect on an answer.
    background: only(False) = None  # type: ignore[valid-type]
    truncation: only("disabled") = None  # type: ignore[valid-type]
    top_logprobs: only(0) = None  # type: ignore[valid-type]
    max_tool_calls: Any = None
    """The number of calls of OpenAI's own tools."""
    stream_options: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    user: Any = None

    def to_chat(self, earlier: EarlierResponse | None) -> TranslatedChat:
        """The same request as a chat after the messages of an `earlier` response.

        Raises RequestError for an item that is not supported, and ValidationError for what a chat refuses.
        """
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        given = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else list(_turns(self.input))
        names = ("model", "temperature", "top_p", "top_k", "seed", "stream", "parallel_tool_calls")
        fields = {name: getattr(self, name) for name in names} | {
            "messages": messages + ([] if earlier is None else earlier.messages) + given,
            "max_tokens": self.max_output_tokens,
            "session_id": self.session_id or (None if earlier is None else earlier.session_id),
            "chat_template_kwargs": self.chat_template_kwargs,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
        }
        if self.tools:
            fields["tools"] = [tool.of_chat for tool in self.tools]
        if isinstance(self.tool_choice, FunctionChoice):
            fields["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        else:
            fields["tool_choice"] = self.tool_choice
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = self.text.format.of_chat
        return TranslatedChat.model_validate(fields)


def _wrong(reason: str) -> RequestError:
    return RequestError(reason, param="input", code="invalid_value")


def _turns(items: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The messages of a chat that say what `items` say; reasoning, text and calls of one answer are one message."""
    answer: dict[str, Any] | None = None
    for place, item in enumerate(items):
        named = f"input.{place}"
        kind = item.get("type", "message")
        part = _answer_part(kind, item, named)
        if part is not None:
            if answer is not None and answer.get("content") and part.get("content"):
                yield answer
                answer = None
            answer = _joined(answer or {"role": "assistant", "content": None}, part)
            continue
        if answer is not None:
            yield answer
            answer = None
        yield _other_turn(kind, item, named)
    if answer is not None:
        yield answer


def _joined(answer: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    calls = answer.get("tool_calls", []) + part.get("tool_calls", [])
    reasoning = answer.get("reasoning_content", "") + part.get("reasoning_content", "")
    joined = {"role": "assistant", "content": answer["content"] or part.get("content")}
    return joined | ({"tool_calls": calls} if calls else {}) | ({"reasoning_content": reasoning} if reasoning else {})


def _answer_part(kind: str, item: dict[str, Any], place: str) -> dict[str, Any] | None:
    """The fields that an item adds to an answer of the assistant; None if it belongs to no answer."""
    if kind == "reasoning":
        texts = item.get("content") or item.get("summary") or []
        return {"reasoning_content": _text(texts, place)}
    if kind == "function_call":
        name, arguments = item.get("name"), item.get("arguments")
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise _wrong(f"{place}: a function_call needs a name, and arguments as JSON text")
        function = {"name": name, "arguments": arguments}
        return {"tool_calls": [{"id": item.get("call_id"), "type": "function", "function": function}]}
    if kind == "message" and item.get("role") == "assistant":
        return {"content": _text(item.get("content"), place)}
    return None


def _other_turn(kind: str, item: dict[str, Any], place: str) -> dict[str, Any]:
    if kind == "function_call_output":
        if not isinstance(item.get("call_id"), str):
            raise _wrong(f"{place}: a function_call_output needs a call_id")
        return {"role": "tool", "tool_call_id": item["call_id"], "content": _text(item.get("output"), place)}
    if kind != "message":
        raise _wrong(f"{place}: an item of type {cut(repr(kind))} is not supported; send messages and function calls")
    if item.get("role") not in ("user", "system", "developer"):
        raise _wrong(
            f"{place}: the role {cut(repr(item.get('role')))} is not known; it is user, assistant, system or developer"
        )
    return {"role": item["role"], "content": _text(item.get("content"), place)}


def _text(content: Any, place: str) -> str:
    is_list = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    if not isinstance(content, str) and not is_list:
        raise _wrong(f"{place}: a content must be a text or parts")
    try:
        return joined_texts(content, TEXTS, place)
    except ValueError as error:
        raise _wrong(str(error)) from error


class StoredResponses:
    """The responses that later ones can continue, by the name of the client's key. Thread-safe; the oldest go first."""

    def __init__(self, max_responses: int = MAX_STORED, max_bytes: int = MAX_STORED_BYTES):
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._stored: OrderedDict[tuple[str, str], tuple[EarlierResponse, int]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def find(self, key: str, response_id: str | None) -> EarlierResponse | None:
        """The response of a client; None for no id. Raises RequestError for an unknown one."""
        if response_id is None:
            return None
        with self._lock:
            found = self._stored.get((key, response_id))
        if found is None:
            raise RequestError(
                f"Previous response with id {cut(repr(response_id))} not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return found[0]

    def add(self, key: str, response_id: str, response: EarlierResponse) -> None:
        """Stores a response; forgets the oldest ones beyond the limits."""
        num_bytes = count_bytes(response.messages)
        with self._lock:
            self._stored[key, response_id] = response, num_bytes
            self._num_bytes += num_bytes
            while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
                _, (_, forgotten) = self._stored.popitem(last=False)
                self._num_bytes -= forgotten


class ResponsesWriter(ChatWriter):
    """Writes answers as OpenAI's responses, whole or as events.

    Args:
        body: the request before its translation.
        chat: its translation.
        stored: where the response is stored for later ones, under the client's `key`.
    """

    prefix, last_line = "resp", ""

    def __init__(
        self,
        body: ResponsesRequest,
        chat: TranslatedChat,
        parsed: ParsedRequest,
        *,
        stored: StoredResponses,
        key: str,
        model: ServedModel,
    ):
        super().__init__(parsed, model)
        self.id = self.id.replace("-", "_")
        self._asked, self._chat, self._stored, self._key = body, chat, stored, key
        self._blocks = BlockStream()
        self._item_ids: list[str] = []  # in the order of the items
        self._num_events = 0

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        self._store()
        return self._response(blocks_of(self.choices[0]), is_done=True)

    def opening(self) -> list[dict[str, Any]]:
        """The events before the first item."""
        begun = {"response": self._response([], is_done=False)}
        return [self._event(f"response.{name}", **begun) for name in ("created", "in_progress")]

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """The events of a stream for `piece`."""
        return [shown for event in self._blocks.add(piece) for shown in self._item_events(event)]

    def closing(self) -> list[dict[str, Any]]:
        """The events that end the last item and the response."""
        self._store()
        ends = [shown for event in self._blocks.finish() for shown in self._item_events(event)]
        response = self._response(self._blocks.blocks, is_done=True)
        return [*ends, self._event(f"response.{response['status']}", response=response)]

    def failure(self, error: RequestError) -> dict[str, Any]:
        """The event of an error, after which the stream ends."""
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def event_name(self, event: dict[str, Any]) -> str | None:
        """The type of the event."""
        return str(event["type"])

    def _store(self) -> None:
        if not self._asked.store:
            return
        given = [message.model_dump(exclude_unset=True) for message in self._chat.messages]
        given = given[1:] if self._asked.instructions is not None else given
        earlier = EarlierResponse([*given, self.choices[0].message], self._chat.session_id)
        self._stored.add(self._key, self.id, earlier)

    def _response(self, blocks: list[AnswerBlock], *, is_done: bool) -> dict[str, Any]:
        (choice,) = self.choices
        is_cut = is_done and (choice.finish_reason or "length") == "length"
        asked = self._asked.model_dump(by_alias=True, exclude_none=True, exclude_unset=True)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": "in_progress" if not is_done else "incomplete" if is_cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": self._asked.instructions,
            "max_output_tokens": self._asked.max_output_tokens,
            "metadata": self._asked.metadata or {},
            "model": self.request.model,
            "output": [self._item(place, block) for place, block in enumerate(blocks)],
            "parallel_tool_calls": self._asked.parallel_tool_calls,
            "previous_response_id": self._asked.previous_response_id,
            "reasoning": {"effort": None, "summary": None} | asked.get("reasoning", {}),
            "store": self._asked.store,
            "temperature": self._asked.temperature,
            "text": {"format": {"type": "text"}} | asked.get("text", {}),
            "tool_choice": asked.get("tool_choice", "auto"),
            "tools": asked.get("tools", []),
            "top_p": self._asked.top_p,
            "truncation": "disabled",
            "usage": self._usage() if is_done else None,
        }

    def _usage(self) -> dict[str, Any]:
        (choice,) = self.choices
        given, written = len(choice.prompt), len(choice.tokens)
        return {
            "input_tokens": given,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": given + written,
        }

    def _item(self, place: int, block: AnswerBlock, *, is_done: bool = True) -> dict[str, Any]:
        while len(self._item_ids) <= place:
            self._item_ids.append(f"{PREFIXES.get(block.kind, 'msg')}_{secrets.token_hex(12)}")
        named = {"id": self._item_ids[place], "status": "completed" if is_done else "in_progress"}
        if block.kind == CALL:
            assert block.call is not None
            function = block.call["function"]
            arguments = function["arguments"] if is_done else ""
            called = {"call_id": block.call["id"], "name": function["name"], "arguments": arguments}
            return {"type": "function_call", **named, **called}
        content = [_part(block)] if is_done else []
        if block.kind == REASONING:
            return {"type": "reasoning", **named, "summary": [], "content": content}
        return {"type": "message", **named, "role": "assistant", "content": content}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _item_events(self, event: AnswerBlockEvent) -> Iterator[dict[str, Any]]:
        """The events of a stream for an item that begins, grows or ends."""
        block, is_end = event.block, event.action == "end"
        place = {"output_index": event.place}
        item = self._item(event.place, block, is_done=is_end)
        part = place | {"item_id": item["id"], "content_index": 0}
        name = "response.reasoning_text" if block.kind == REASONING else "response.output_text"
        probabilities: dict[str, Any] = {} if block.kind == REASONING else {"logprobs": []}
        if event.action == "add":
            yield self._event(f"{name}.delta", **part, delta=event.added, **probabilities)
            return
        if not is_end:
            yield self._event("response.output_item.added", **place, item=item)
        if block.kind == CALL and is_end:
            named = place | {"item_id": item["id"]}
            yield self._event("response.function_call_arguments.delta", **named, delta=item["arguments"])
            yield self._event(
                "response.function_call_arguments.done", **named, arguments=item["arguments"], name=item["name"]
            )
        elif block.kind != CALL and is_end:
            yield self._event(f"{name}.done", **part, text=block.text, **probabilities)
            yield self._event("response.content_part.done", **part, part=_part(block))
        elif block.kind != CALL:
            yield self._event("response.content_part.added", **part, part=_part(AnswerBlock(block.kind)))
        if is_end:
            yield self._event("response.output_item.done", **place, item=item)


def _part(block: AnswerBlock) -> dict[str, Any]:
    if block.kind == REASONING:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
