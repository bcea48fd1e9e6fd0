"""The bodies of requests: OpenAI's fields, checked, and what vLLM's clients send beside them.

Every field that changes an answer is served or refused; `user`, `metadata` and their like are accepted and say nothing.
"""

import inspect
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, field_validator, model_validator
from transformers import PreTrainedTokenizerBase

from hybrid_engine.serving.tool_calls import for_template

MAX_CHOICES = 128
"""OpenAI's bound for `n`."""
MAX_STOPS = 16
MAX_STOP_TOKENS = 256
LEAST_TEMPERATURE = 1e-6
MAX_SESSION_ID = 256
"""Characters."""
MAX_TOP_LOGPROBS = 20
"""OpenAI's bound for `top_logprobs`."""

# What `apply_chat_template` itself takes.
NOT_FOR_TEMPLATES = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
TokenId = Annotated[StrictInt, Field(ge=0)]
Texts = Annotated[list[StrictStr], Field(min_length=1)]
Tokens = Annotated[list[TokenId], Field(min_length=1)]
TokenLists = Annotated[list[Tokens], Field(min_length=1)]


class StreamOptions(BaseModel):
    """What a stream has beside its pieces."""

    model_config = ConfigDict(extra="forbid")
    include_usage: StrictBool = False


class SamplingFields(BaseModel):
    """What both kinds of request have; OpenAI's defaults, not the model's own."""

    model_config = ConfigDict(extra="forbid")

    model: StrictStr
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] = 1
    temperature: Annotated[Number, Field(ge=0, le=100)] = 1.0
    """0 takes the likeliest token."""
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    """By token id, as a string."""
    stop: StrictStr | list[StrictStr] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stream: StrictBool = False
    stream_options: StreamOptions | None = None

    # Not OpenAI's; vLLM's names.
    top_k: Annotated[StrictInt, Field(ge=-1)] = 0
    """0 and -1 keep all."""
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[Number, Field(gt=0)] = 1.0
    min_tokens: Annotated[StrictInt, Field(ge=0)] = 0
    ignore_eos: StrictBool = False
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] = []
    return_token_ids: StrictBool = False
    """The token ids of prompt and answer beside the text."""
    guided_choice: list[StrictStr] | None = None
    guided_regex: StrictStr | None = None
    guided_json: dict[str, Any] | StrictStr | None = None
    session_id: Annotated[StrictStr, Field(min_length=1, max_length=MAX_SESSION_ID)] | None = None
    """The conversation that this request belongs to; the header `X-Session-Id` says the same."""

    # Of no consequence for an answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if "" in stops:
            raise ValueError("a stop string must not be empty, since every answer would stop at once; leave it out")
        if len(stops) > MAX_STOPS:
            raise ValueError(f"{len(stops)} stop strings, and at most {MAX_STOPS} are looked for; send fewer")
        return stop

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, temperature: float) -> float:
        if 0 < temperature < LEAST_TEMPERATURE:
            raise ValueError(f"below {LEAST_TEMPERATURE:g} logits may not be finite; 0 takes the likeliest token")
        return temperature

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for token in bias or {}:
            if not (token.isascii() and token.isdigit()):
                raise ValueError(f"{token!r} is no token id; name tokens by their number")
        return bias

    @model_validator(mode="after")
    def _check_stream(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is given without stream; set stream to true or leave it out")
        return self

    @property
    def num_top_logprobs(self) -> int | None:
        """Likeliest tokens reported at each position; None: no log-probabilities at all."""
        raise NotImplementedError

    @property
    def guide(self) -> dict[str, Any]:
        """What the text of the answer must be, by the engine's names."""
        named = {name: getattr(self, name) for name in ("guided_choice", "guided_regex", "guided_json")}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def stops(self) -> list[str]:
        """The strings of `stop`."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])


class CompletionRequest(SamplingFields):
    """The body of `/v1/completions`."""

    prompt: (
        StrictStr
        | Tokens
        | Annotated[list[StrictStr], Field(min_length=1)]
        | Annotated[list[Tokens], Field(min_length=1)]
    )
    max_tokens: Annotated[StrictInt, Field(ge=0)] | None = 16
    logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """So many likeliest tokens of each position beside the one that was drawn."""
    echo: StrictBool = False
    """The prompt comes before the answer, with its log-probabilities if they are asked for."""
    best_of: StrictInt | None = None
    suffix: StrictStr | None = None

    @model_validator(mode="after")
    def _check_unserved(self) -> "CompletionRequest":
        if self.best_of not in (None, self.n):
            raise ValueError(f"best_of={self.best_of} is not served, only n of n; leave it out")
        if self.suffix:
            raise ValueError("suffix is not served: the model continues prompts; leave it out")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Texts or token ids, one for each prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt  # type: ignore[return-value, list-item]

    @property
    def num_top_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told beside each; None: no log-probabilities."""
        return self.logprobs


class Message(BaseModel):
    """One message of a conversation; the chat template reads whatever it has."""

    model_config = ConfigDict(extra="allow")
    role: Annotated[StrictStr, Field(min_length=1)]
    content: StrictStr | list[dict[str, Any]] | None = None

    @field_validator("content")
    @classmethod
    def _join_texts(cls, content: Any) -> Any:
        """Parts of text as one text: what templates of text models read."""
        if not isinstance(content, list):
            return content
        for part in content:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"a part of type {part.get('type')!r} is not served; send text")
        return "".join(part["text"] for part in content)


class JsonSchema(BaseModel):
    """A schema with its name."""

    model_config = ConfigDict(extra="allow")
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(BaseModel):
    """What an answer must look like."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to type json_schema; send both or neither")
        return self


class ChatRequest(SamplingFields):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    logprobs: StrictBool = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    """Given to the chat template."""
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Any = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] = {}
    """Further names that the chat template reads."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_template_names(cls, names: dict[str, Any]) -> dict[str, Any]:
        """Above all no template: it is a program, which is the server's to choose."""
        for name in names:
            if name in NOT_FOR_TEMPLATES:
                raise ValueError(f"{name!r} is not the client's to say; send only names that the template reads")
        return names

    @model_validator(mode="after")
    def _check_logprobs(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is given without logprobs; set logprobs to true or leave it out")
        return self

    @property
    def num_top_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told beside each; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def guide(self) -> dict[str, Any]:
        """What the text of the answer must be, by the engine's names."""
        if self.response_format is None or self.response_format.type == "text":
            return super().guide
        schema = self.response_format.json_schema
        return super().guide | {"guided_json": {"type": "object"} if schema is None else schema.schema_}

    @property
    def longest_answer(self) -> int | None:
        """Tokens; None: as many as fit."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as chat templates read them."""
        return [for_template(message.model_dump(exclude_unset=True)) for message in self.messages]
