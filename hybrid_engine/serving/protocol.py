"""The bodies of requests: OpenAI's fields, checked, and additional fields of vLLM's clients.

Every field that changes an answer is served or refused; `user`, `metadata` and similar fields are accepted and ignored.
A field that is null has its default.
"""

import inspect
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    StrictBool,
    StrictInt,
    StrictStr,
    field_validator,
    model_validator,
)
from transformers import PreTrainedTokenizerBase

from hybrid_engine.generation.options import GUIDES
from hybrid_engine.serving.errors import cut
from hybrid_engine.serving.parsers.form import tool_name
from hybrid_engine.serving.tool_calls import for_template

MAX_CHOICES = 128
"""OpenAI's bound for `n`."""
MAX_STOPS = 16
MAX_STOP_TOKENS = 256
MAX_BIASES = 4096
MAX_GUIDED = 2**18
"""Maximum number of characters of an answer's guide, all choices together."""
MAX_GUIDED_CHOICES = 10_000
LEAST_TEMPERATURE = 1e-6
MAX_DIGITS = 10
"""Maximum number of digits of a token id."""
MAX_SESSION_ID = 256
"""Maximum number of characters of a session id."""
MAX_TOP_LOGPROBS = 20
"""OpenAI's bound for `top_logprobs`."""

# Arguments of `apply_chat_template` itself.
NOT_FOR_TEMPLATES = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
TokenId = Annotated[StrictInt, Field(ge=0)]
Texts = Annotated[list[StrictStr], Field(min_length=1)]
Tokens = Annotated[list[TokenId], Field(min_length=1)]


def only(*served: Any) -> Any:
    """The type of a field that accepts only the values `served`, which change nothing."""

    def check(value: Any) -> Any:
        if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in served):
            raise ValueError(f"only {' or '.join(map(repr, served))} is supported; send that, or leave the field out")
        return value

    return Annotated[Any, AfterValidator(check), Field(json_schema_extra={"enum": [*served, None]})]


class Body(BaseModel):
    """A JSON object with known fields, in which null stands for a field's default."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _take_defaults_for_null(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The schema, in which null is allowed for every optional field, including unknown ones."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        required = schema.get("required", [])
        fields = schema.get("properties", {})
        schema["properties"] = {name: shown if name in required else _or_null(shown) for name, shown in fields.items()}
        if schema.get("additionalProperties") is False:
            schema["additionalProperties"] = {"type": "null"}
        return schema


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a field that may be null in addition to what `schema` allows."""
    null = {"type": "null"}
    if "enum" in schema or null in schema.get("anyOf", []) or not {"type", "anyOf", "$ref"} & set(schema):
        return schema
    return {"anyOf": [schema, null]}


class StreamOptions(Body):
    """Options of a stream: what it has in addition to its pieces."""

    include_usage: StrictBool = False
    """A last event with the usage."""
    continuous_usage_stats: StrictBool = False
    """Every event has the usage so far; vLLM's name."""
    include_obfuscation: Any = None
    """Read and ignored: nothing is padded here."""


class StructuredOutputs(Body):
    """A constraint on the text of an answer, by vLLM's names; a request's own fields for it begin `guided_`.

    Its other fields name what this server does not have, so they are refused.
    """

    choice: list[StrictStr] | None = None
    regex: StrictStr | None = None
    json_: Annotated[dict[str, Any] | StrictStr | None, Field(alias="json")] = None
    json_object: only(True, False) = None  # type: ignore[valid-type]
    grammar: StrictStr | None = None
    whitespace_pattern: StrictStr | None = None

    @property
    def guide(self) -> dict[str, Any]:
        """The constraint as the engine's options."""
        schema = {"type": "object"} if self.json_object and self.json_ is None else self.json_
        named = {"choice": self.choice, "regex": self.regex, "json": schema, "grammar": self.grammar}
        named["whitespace_pattern"] = self.whitespace_pattern
        return {f"guided_{name}": value for name, value in named.items() if value is not None}


class SamplingFields(Body):
    """The fields of both kinds of request; OpenAI's defaults, not the model's own."""

    model: StrictStr
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] = 1
    temperature: Annotated[Number, Field(ge=0, le=100)] = 1.0
    """0 is greedy decoding."""
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    """Biases keyed by token id, as a string."""
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
    """The token ids of prompt and answer in addition to the text."""
    return_tokens_as_token_ids: StrictBool = False
    """Log-probabilities name a token `token_id:17` in place of its text."""
    skip_special_tokens: StrictBool = True
    include_stop_str_in_output: StrictBool = False
    guided_choice: list[StrictStr] | None = None
    guided_regex: StrictStr | None = None
    guided_json: dict[str, Any] | StrictStr | None = None
    guided_grammar: StrictStr | None = None
    """Lark's notation, as llguidance reads it."""
    guided_whitespace_pattern: StrictStr | None = None
    """Regular expression of the white space between the parts of guided JSON."""
    structured_outputs: StructuredOutputs | None = None
    session_id: Annotated[StrictStr, Field(min_length=1, max_length=MAX_SESSION_ID)] | None = None
    """The conversation that this request belongs to; the header `X-Session-Id` says the same."""

    cache_salt: Annotated[StrictStr, Field(max_length=MAX_SESSION_ID)] | None = None
    """Requests share keys and values of equal beginnings only with those of the same salt."""

    # Fields without effect on an answer: OpenAI's, then vLLM's.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None
    """Text that the answer may have; it only makes answers of others faster."""
    priority: Any = None
    request_id: Any = None
    spaces_between_special_tokens: Any = None
    length_penalty: Any = None
    """An option of beam search."""
    use_beam_search: only(False) = None  # type: ignore[valid-type]

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if "" in stops:
            raise ValueError("a stop string must not be empty, since every answer would stop at once; leave it out")
        if len(stops) > MAX_STOPS:
            raise ValueError(f"{len(stops)} stop strings, but at most {MAX_STOPS} are supported; send fewer")
        return stop

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, temperature: float) -> float:
        if 0 < temperature < LEAST_TEMPERATURE:
            raise ValueError(f"below {LEAST_TEMPERATURE:g} logits may not be finite; 0 is greedy decoding")
        return temperature

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        if bias is not None and len(bias) > MAX_BIASES:
            raise ValueError(f"{len(bias)} tokens, but at most {MAX_BIASES} are allowed; send fewer")
        for token in bias or {}:
            if not (token.isascii() and token.isdigit() and len(token) <= MAX_DIGITS):
                raise ValueError(f"{cut(token)!r} is not a token id; give the number of a token")
        return bias

    @model_validator(mode="after")
    def _check_guide(self) -> "SamplingFields":
        for name, value in self.guide.items():
            if name == "guided_choice" and len(value) > MAX_GUIDED_CHOICES:
                raise ValueError(
                    f"{name}: {len(value)} choices, but at most {MAX_GUIDED_CHOICES} are allowed; send fewer"
                )
            size = sum(map(len, value)) if isinstance(value, list) else len(str(value))
            if size > MAX_GUIDED:
                raise ValueError(f"{name}: {size:,} characters, but at most {MAX_GUIDED:,} are allowed; send less")
        return self

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of likeliest tokens reported at each position; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def guide(self) -> dict[str, Any]:
        """The engine's options that constrain the text of the answer."""
        names = (*GUIDES, "guided_whitespace_pattern")
        named = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return named if self.structured_outputs is None else named | self.structured_outputs.guide

    @property
    def usage_of_stream(self) -> StreamOptions:
        """The options of a stream's usage."""
        return self.stream_options or StreamOptions()

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
    """So many likeliest tokens of each position, and the one that was drawn."""
    echo: StrictBool = False
    """The prompt comes before the answer, with its log-probabilities if they are asked for."""
    best_of: StrictInt | None = None
    suffix: StrictStr | None = None

    @model_validator(mode="after")
    def _check_unserved(self) -> "CompletionRequest":
        if self.best_of not in (None, self.n):
            raise ValueError(f"best_of={self.best_of} is not supported unless it equals n; leave it out")
        if self.suffix:
            raise ValueError("suffix is not supported: the model continues prompts; leave it out")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Texts or token ids, one for each prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt  # type: ignore[return-value, list-item]

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of likeliest tokens reported for each position; None: no log-probabilities."""
        return self.logprobs


class Message(BaseModel):
    """One message of a conversation; the chat template reads whatever it has."""

    model_config = ConfigDict(extra="allow")
    role: Annotated[StrictStr, Field(min_length=1)]
    content: StrictStr | list[dict[str, Any]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, values: Any) -> Any:
        """Drops null fields, which clients send back and a template may take as present; content may be null."""
        if not isinstance(values, dict):
            return values
        named = {name: value for name, value in values.items() if value is not None or name == "content"}
        return {"content": None} | named if named.get("role") == "assistant" else named

    @field_validator("content")
    @classmethod
    def _join_texts(cls, content: Any) -> Any:
        """Joins text parts to one text, which templates of text models read."""
        if not isinstance(content, list):
            return content
        for part in content:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"a part of type {part.get('type')!r} is not supported; send text")
        return "".join(part["text"] for part in content)


class JsonSchema(Body):
    """A schema with its name."""

    model_config = ConfigDict(extra="allow")
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(Body):
    """The format that an answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to type json_schema; send both or neither")
        return self


class NamedFunction(Body):
    """A function by its name."""

    name: StrictStr


class NamedTool(Body):
    """The tool that an answer must call."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatRequest(SamplingFields):
    """The body of `/v1/chat/completions`."""

    shows_reasoning: ClassVar[bool] = False
    """Whether reasoning is told apart from the text, also in requests without tools."""
    is_shortened: ClassVar[bool] = False
    """Whether an answer that may be longer than there is room ends where the room ends; otherwise it is refused."""
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    logprobs: StrictBool = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    """Given to the chat template."""
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool = True
    """False: an answer ends with its first call."""
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] = {}
    """Further names that the chat template reads."""
    reasoning_effort: StrictStr | None = None
    """Given to the chat template; those that do not read it are as they were."""
    documents: list[dict[str, Any]] | None = None
    """The same."""
    add_generation_prompt: StrictBool = True
    """Whether the assistant's turn begins after the messages."""
    continue_final_message: StrictBool = False
    """The answer goes on from the last message, whose turn does not end."""

    # Fields without effect on an answer.
    verbosity: Any = None
    modalities: only(["text"]) = None  # type: ignore[valid-type]
    functions: only([]) = None  # type: ignore[valid-type]
    function_call: only("none", "auto") = None  # type: ignore[valid-type]
    echo: only(False) = None  # type: ignore[valid-type]
    best_of: only(1) = None  # type: ignore[valid-type]
    include_reasoning: only(True) = None  # type: ignore[valid-type]

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_template_names(cls, names: dict[str, Any]) -> dict[str, Any]:
        """Refuses arguments of `apply_chat_template`: a template is a program, which only the server may choose."""
        for name in names:
            if name in NOT_FOR_TEMPLATES:
                raise ValueError(f"{name!r} cannot be set by the client; send only names that the template reads")
        return names

    @model_validator(mode="after")
    def _check_logprobs(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is given without logprobs; set logprobs to true or leave it out")
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> "ChatRequest":
        if (
            self.continue_final_message
            and self.add_generation_prompt
            and "add_generation_prompt" in self.model_fields_set
        ):
            raise ValueError("continue_final_message and add_generation_prompt exclude each other; set one of them")
        if self.forced_tools is not None and not self.forced_tools:
            known = ", ".join(repr(name) for name in map(tool_name, self.tools or [])) or "none"
            raise ValueError(
                f"tool_choice={self._choice!r} is not a function in tools, which has {known}; add it there"
            )
        if self.forced_tools and super().guide:
            raise ValueError(
                f"{', '.join(super().guide)} guides the answer, and tool_choice={self._choice!r} guides it to be a "
                "call; send one of them"
            )
        return self

    @property
    def _choice(self) -> str | None:
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else self.tool_choice

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """Tools that the model is told about and may call; None: it may call none."""
        return None if self.tool_choice == "none" or not self.tools else self.tools

    @property
    def forced_tools(self) -> list[dict[str, Any]] | None:
        """Tools of which the answer must call one; None: no call is required."""
        if self.tool_choice in (None, "auto", "none"):
            return None
        named = [tool for tool in self.tools or [] if self._choice in ("required", tool_name(tool))]
        return [tool for tool in named if tool_name(tool) is not None]

    @property
    def template_inputs(self) -> dict[str, Any]:
        """The variables of the chat template in addition to messages."""
        named = {"tools": self.offered_tools, "reasoning_effort": self.reasoning_effort, "documents": self.documents}
        return {name: value for name, value in named.items() if value is not None} | self.chat_template_kwargs

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of likeliest tokens reported for each position; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def guide(self) -> dict[str, Any]:
        """The engine's options that constrain the text; `response_format` applies to texts, not to calls."""
        return super().guide if self.text_schema is None else super().guide | {"guided_json": self.text_schema}

    @property
    def text_schema(self) -> dict[str, Any] | None:
        """The JSON schema by `response_format` for an answer that is a text and not a call; None: any text."""
        if self.response_format is None or self.response_format.type == "text" or self.forced_tools:
            return None
        schema = self.response_format.json_schema
        return {"type": "object"} if schema is None else schema.schema_

    @property
    def longest_answer(self) -> int | None:
        """Maximum number of tokens; None: as many as fit."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def template_messages(self) -> list[dict[str, Any]]:
        """The messages in the form that chat templates read."""
        return [for_template(message.model_dump(exclude_unset=True)) for message in self.messages]


class TranslatedChat(ChatRequest):
    """A chat that another protocol's request (`protocols/`) was translated to."""

    shows_reasoning = True
    is_shortened = True


class TokenizeRequest(Body):
    """The body of `/tokenize`, as vLLM has it: a prompt, or the messages of a chat."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: StrictBool | None = None
    """None: those of a prompt, and none in addition to what a chat template writes."""
    return_token_strs: StrictBool = False
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _check_source(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either prompt or messages")
        return self


class DetokenizeRequest(Body):
    """The body of `/detokenize`, as vLLM has it."""

    model: StrictStr | None = None
    tokens: list[TokenId]
