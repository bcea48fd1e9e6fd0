"""Parses requests: bodies into the classes of `protocol.py`, and these into sequences that the engine runs.

`App` calls this for completions, chats and `/tokenize`. A `ParsedRequest` has prompts as token ids, the engine's
options and the keys of the sampling noise.
"""

import asyncio
import functools
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import Request
from transformers import PreTrainedTokenizerBase

from hybrid_engine.generation.core import Prompt, Sequence, prompt_digest, sample_keys
from hybrid_engine.generation.guides import (
    JSON_SPACE,
    CompiledGuide,
    GuideError,
    compile_guide,
    read_guide,
)
from hybrid_engine.generation.options import GenerationOptions, read_options
from hybrid_engine.serving.errors import RequestError, rule_failed, wrong_body
from hybrid_engine.serving.parsers import (
    FORMS,
    NONE,
    OWN,
    THOUGHTS,
    calls_grammar,
    forcing_parser,
    has_grammar,
)
from hybrid_engine.serving.parsers.form import tool_name
from hybrid_engine.serving.protocol import ChatRequest, CompletionRequest, SamplingFields, TokenizeRequest
from hybrid_engine.serving.tool_calls import asking_template, form_for_template

MAX_BODY_BYTES = 4 * 2**20
MAX_BODIES_BYTES = 2**28
"""Limit for the bodies of all requests that are being read."""
SECONDS_FOR_BODY = 30.0
MAX_LISTS = 2**16
"""Maximum number of lists and objects in a body: they take a hundred times as long to read as text of their length."""
MAX_VALUES = 2**19
_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
TEXT_GUIDE = ("guided_json", "guided_whitespace_pattern")
"""Options that a `response_format` sets for an answer that is not a call."""
MAX_ANSWERS = 1024
"""Default maximum number of answers of one request."""
MAX_ECHOED = 2**18
"""Maximum number of log-probabilities of prompts in one answer, about 40 bytes each."""


class BodyReader:
    """Reads and checks the bodies of requests within the limits for one body and for all together.

    Args:
        on_thread: runs a function on a thread and returns its result; parsing would hold up the event loop.
        max_bytes: maximum size of one body.
    """

    def __init__(self, on_thread: Callable[[Callable[[], Any]], Awaitable[Any]], max_bytes: int = MAX_BODY_BYTES):
        self._on_thread, self.max_bytes = on_thread, max_bytes
        self._bytes_of_all = 0

    async def read(self, request: Request, kind: type[BaseModel]) -> Any:
        """The body as a `kind`; raises RequestError if it is too large, not JSON, or invalid."""
        try:
            raw = await asyncio.wait_for(self._receive(request), SECONDS_FOR_BODY)
        except asyncio.TimeoutError as error:
            reason = f"the body did not arrive within {SECONDS_FOR_BODY:g} s"
            raise RequestError(reason, status=408, code="body_timeout", is_last=True) from error
        try:
            return await self._on_thread(partial(_parse_body, raw, kind))
        finally:
            self._bytes_of_all -= len(raw)

    async def _receive(self, request: Request) -> bytes:
        """The bytes of the body, which count toward the limit until they are parsed.

        Raises RequestError if they, or those of all requests together, are too many.
        """
        parts: list[bytes] = []
        size = 0
        try:
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                self._bytes_of_all += len(part)
                if size > self.max_bytes:
                    reason = f"the body is larger than {self.max_bytes:,} bytes"
                    raise RequestError(reason, status=413, code="body_too_large", is_last=True)
                if self._bytes_of_all > MAX_BODIES_BYTES:
                    reason = "the bodies of all concurrent requests are too large; send the request again later"
                    raise RequestError(reason, status=429, code="overloaded", retry_after=1, is_last=True)
        except BaseException:
            self._bytes_of_all -= size
            raise
        return b"".join(parts)


def _parse_body(raw: bytes, kind: type[BaseModel]) -> Any:
    try:
        return kind.model_validate(read_json(raw))
    except ValidationError as error:
        raise wrong_body(error) from error


def read_json(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`, at most 200 levels deep.

    Raises RequestError for anything else, for text that UTF-8 cannot encode, and for too many lists or values.
    """
    _check_counts(raw)
    try:
        values = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(values, dict):
        raise RequestError(f"the body is a {type(values).__name__}; send a JSON object", code="invalid_json")
    return values


def _check_counts(raw: bytes) -> None:
    """Raises RequestError if parsing `raw` would take long, during which no other thread can run."""
    for limit, named, signs in ((MAX_LISTS, "lists and objects", (b"[", b"{")), (MAX_VALUES, "values", (b",",))):
        if sum(map(raw.count, signs)) > limit:
            count = sum(map(_STRINGS.sub(b"", raw).count, signs))  # without those in strings
            if count > limit:
                reason = f"the body has {count:,} {named}, but at most {limit:,} are allowed; send less"
                raise RequestError(reason, code="body_too_large")


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The properties of the model that requests depend on."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    longest: int
    """Maximum number of tokens of prompt and answer together."""
    end_tokens: list[int]
    created: int
    """Unix time."""
    suppressed: tuple[int, ...] = ()
    """Ids that are never drawn: padding of the vocabulary, and ids that the model's generation_config suppresses."""
    tool_call_parser: str = NONE
    """The parser that finds tool calls in its answers."""
    adapters: dict[str, str] = field(default_factory=dict)
    """Maps the names that clients use to peft's adapters; each is served as a separate model."""
    max_answers: int = MAX_ANSWERS
    """Maximum number of answers of one request."""
    record_supports: bool = False
    """Whether sampled tokens have records of what they were drawn from, and log-probabilities over that."""

    @functools.cached_property
    def longest_token(self) -> int:
        """Maximum number of UTF-8 bytes of a token; a text of n bytes has at least n / longest_token tokens."""
        return max((len(token.encode()) for token in self.tokenizer.get_vocab()), default=1)

    @property
    def names(self) -> list[str]:
        """All model names that clients may use."""
        return [self.name, *self.adapters]


@dataclass(frozen=True)
class ParsedRequest:
    """A request that can run: `n` sequences for each prompt, in the order of OpenAI's `index`."""

    request: SamplingFields
    prompts: list[list[int]]
    num_new: int
    """Maximum number of tokens of each answer."""
    sequences: list[Sequence] = field(default_factory=list)
    guide: CompiledGuide | None = None
    """The compiled guide of the sequences; holding it keeps it in the cache."""


def read_completion(request: CompletionRequest, model: ServedModel) -> ParsedRequest:
    """A runnable completion request; raises RequestError if this model cannot run it."""
    check_answers(len(request.prompts) * request.n, model)
    prompts = [_tokens(prompt, model) for prompt in request.prompts]
    longest = 16 if request.max_tokens is None else request.max_tokens
    return _parse(request, prompts, longest, model)


def read_chat(request: ChatRequest, model: ServedModel, prompt: list[int]) -> ParsedRequest:
    """A runnable chat request for the token ids `prompt`; raises RequestError if this model cannot run it."""
    check_answers(request.n, model)
    longest, room = request.longest_answer, model.longest - len(prompt)
    if request.is_shortened and room < 1:
        raise RequestError(
            f"prompt is too long: {len(prompt)} tokens > {model.longest - 1} maximum",
            param="messages",
            code="context_length_exceeded",
        )
    if longest is None:
        longest = max(1, room)
    return _parse(request, [prompt], min(longest, room) if request.is_shortened else longest, model)


def chat_tokens(request: ChatRequest, model: ServedModel) -> list[int]:
    """The token ids of the conversation, written by the chat template up to the start of the assistant's turn."""
    text = chat_text(request, model, request.template_messages)
    check_text(text, model, "messages")
    return model.tokenizer.encode(text, add_special_tokens=False)


def chat_text(request: ChatRequest, model: ServedModel, messages: list[dict[str, Any]]) -> str:
    """The text that the chat template makes of `messages`; raises RequestError if there is no template or it fails."""
    template = model.tokenizer.chat_template
    if template is None:
        raise RequestError(
            f"{model.name} has no chat template; use /v1/completions, or start the server with --chat-template",
            param="messages",
            code="no_chat_template",
        )
    if "developer" not in str(template):
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    try:
        return form_for_template(messages, lambda form: _apply_template(request, model, form))
    except Exception as error:  # a template is a program of the model's, and may fail in any way
        raise RequestError(
            f"messages: the chat template of {model.name} refuses them: {error}", param="messages", code="template"
        ) from error


def _apply_template(request: ChatRequest, model: ServedModel, messages: list[dict[str, Any]]) -> str:
    tokenizer, inputs = model.tokenizer, request.template_inputs
    inputs["add_generation_prompt"] = request.add_generation_prompt and not request.continue_final_message
    inputs["continue_final_message"] = request.continue_final_message
    template = asking_template(tokenizer, inputs.get("tools"))
    return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **inputs)


def parser_for(request: ChatRequest, model: ServedModel) -> str:
    """The parser of answers to `request`; "none" if there is nothing but text in them."""
    known = model.tool_call_parser
    if not request.offered_tools:
        is_always_read = known in FORMS and FORMS[known].is_always_read
        if is_always_read or (known == OWN and request.shows_reasoning):
            return known
        return THOUGHTS if request.shows_reasoning else NONE
    return model.tool_call_parser if request.forced_tools is None else forcing_parser(model.tool_call_parser)


def read_tokens(request: TokenizeRequest, model: ServedModel) -> list[int]:
    """The token ids of the input of `/tokenize`; raises RequestError if the chat template refuses it."""
    if request.prompt is not None:
        check_text(request.prompt, model, "prompt")
        return model.tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens is not False)
    chat = ChatRequest.model_construct(
        model=model.name,
        messages=request.messages,
        tools=request.tools,
        chat_template_kwargs=request.chat_template_kwargs,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
    )
    text = chat_text(chat, model, chat.template_messages)
    check_text(text, model, "messages")
    return model.tokenizer.encode(text, add_special_tokens=bool(request.add_special_tokens))


def _tokens(prompt: str | list[int], model: ServedModel) -> list[int]:
    if isinstance(prompt, str):
        check_text(prompt, model, "prompt")
        tokens = model.tokenizer.encode(prompt)
        if not tokens:
            raise RequestError("prompt is empty and the model has no token to begin with; send text", param="prompt")
        return tokens
    check_tokens(prompt, model, "prompt")
    return prompt


def check_answers(count: int, model: ServedModel) -> None:
    """Raises RequestError if one request asks for more answers than may wait."""
    if count > model.max_answers:
        raise RequestError(
            f"{count} answers are requested at once, but at most {model.max_answers} may wait; send fewer prompts, or "
            "lower n",
            param="n",
            code="too_many_answers",
        )


def check_text(text: str, model: ServedModel, param: str) -> None:
    """Raises RequestError for a text that is too long for any tokenization."""
    size = len(text.encode())
    if size > model.longest * model.longest_token:
        raise RequestError(
            f"{param}: {size:,} bytes make at least {size // model.longest_token:,} tokens, but this server allows "
            f"{model.longest}; shorten the text",
            param=param,
            code="context_length_exceeded",
        )


def check_echo(request: SamplingFields, prompts: list[list[int]]) -> None:
    """Raises RequestError if the log-probabilities of echoed prompts would make the answer too large."""
    entries = sum(map(len, prompts)) * request.n * (1 + (request.num_top_logprobs or 0))
    if entries > MAX_ECHOED:
        raise RequestError(
            f"echo with logprobs: {entries:,} log-probabilities of prompts are requested, but at most {MAX_ECHOED:,} "
            "are returned; send fewer prompts, or lower n or logprobs",
            param="echo",
            code="answer_too_large",
        )


def check_tokens(tokens: list[int], model: ServedModel, param: str) -> None:
    """Raises RequestError for a token id outside the vocabulary; `param` names the field."""
    beyond = [token for token in tokens if token >= model.vocab_size]
    if beyond:
        raise RequestError(
            f"{param}: token id {beyond[0]} is outside the vocabulary 0..{model.vocab_size - 1}", param=param
        )


def _parse(request: SamplingFields, prompts: list[list[int]], num_new: int, model: ServedModel) -> ParsedRequest:
    total = max(map(len, prompts)) + num_new
    if total > model.longest:
        raise RequestError(
            f"a prompt of {max(map(len, prompts))} tokens and {num_new} new ones make {total}, but this server allows "
            f"{model.longest}; shorten the prompt or lower max_tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )
    is_scored = isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None
    if is_scored:
        check_echo(request, prompts)
    if num_new == 0 and not is_scored:
        return ParsedRequest(request, prompts, 0)
    seed = secrets.randbits(62) if request.seed is None else request.seed
    keys = sample_keys(seed, [prompt_digest(prompt) for prompt in prompts], [], request.n)
    options = _options(request, max(1, num_new), model)
    sequences, salt = [], (request.cache_salt or "").encode()
    for prompt, tokens in enumerate(prompts):
        shared = Prompt(tokens, num_tops=request.num_top_logprobs if is_scored else None, salt=salt)
        places = range(prompt * request.n, (prompt + 1) * request.n)
        adapter = model.adapters.get(request.model)
        sequences += [Sequence(shared, row, options, keys[row], adapter=adapter) for row in places]
    return ParsedRequest(request, prompts, num_new, sequences, _compiled(options.rules.guide, model))


def compile_guide_of(request: SamplingFields, model: ServedModel) -> CompiledGuide | None:
    """The compiled guide of a request, after up to seconds; None if it has none, or several, which is refused later.

    Raises RequestError for a guide that cannot be read or compiled. While the result is referenced, the request finds
    it in the cache.
    """
    given = _guide_of(request, model)
    json_space = given.pop("guided_whitespace_pattern", None)
    if len(given) != 1:
        return None
    option, value = next(iter(given.items()))
    try:
        guide = read_guide(option, value, model.tokenizer, json_space)
    except ValueError as error:
        raise RequestError(str(error), code="invalid_value") from error
    return _compiled(guide, model)


def _compiled(guide: tuple[str, str] | None, model: ServedModel) -> CompiledGuide | None:
    """Raises RequestError if the guide passes the library's limits."""
    try:
        return None if guide is None else compile_guide(guide, model.tokenizer)
    except GuideError as error:
        raise rule_failed(error) from error


def _guide_of(request: SamplingFields, model: ServedModel) -> dict[str, Any]:
    """The engine's options that guide an answer: to a call if one is required, to a call or a text if both are allowed.

    Raises RequestError if a call would have a form that cannot be guided.
    """
    given = request.guide
    if not isinstance(request, ChatRequest) or not request.offered_tools:
        return given
    parser = parser_for(request, model)
    if parser == NONE:
        return given
    tools = request.forced_tools or [tool for tool in request.offered_tools or [] if tool_name(tool) is not None]
    is_single = not request.parallel_tool_calls
    if request.forced_tools is not None:
        is_single |= request.tool_choice != "required"  # a named tool is called once
        return given | {"guided_grammar": calls_grammar(parser, tools, model.tokenizer, is_single=is_single)}
    if request.text_schema is None or not tools:
        return given
    if not has_grammar(parser):
        raise RequestError(
            f"response_format: the answer may be a tool call, which {model.name} writes in its own format, and that "
            "cannot be guided; set tool_choice to none or required, or leave out response_format",
            param="response_format",
            code="invalid_value",
        )
    text = {"x-guidance": {"whitespace_pattern": given.get("guided_whitespace_pattern", JSON_SPACE)}}
    grammar = calls_grammar(parser, tools, model.tokenizer, is_single=is_single, or_text=text | request.text_schema)
    others = {name: value for name, value in given.items() if name not in TEXT_GUIDE}
    return others | {"guided_grammar": grammar}


def _options(request: SamplingFields, num_new: int, model: ServedModel) -> GenerationOptions:
    """The engine's options for all prompts of a request; raises RequestError for the first option that it refuses."""
    ends = [] if request.ignore_eos else model.end_tokens
    is_sampled = request.temperature > 0
    named: dict[str, Any] = {
        "max_new_tokens": num_new,
        "min_new_tokens": min(request.min_tokens, num_new),
        "do_sample": is_sampled,
        "repetition_penalty": request.repetition_penalty,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "logit_bias": request.logit_bias,
        "suppress_tokens": model.suppressed or None,
        "top_logprobs": request.num_top_logprobs or 0,
        "tokenizer": model.tokenizer,
        **_guide_of(request, model),
        "eos_token_id": [*ends, *request.stop_token_ids] or None,
    }
    if is_sampled:
        named |= {"temperature": request.temperature, "top_p": request.top_p, "min_p": request.min_p}
        named["top_k"] = max(0, request.top_k)
    if is_sampled and model.record_supports:
        named |= {"logprobs": "processed", "record_supports": True}
    try:
        return read_options(named, 0, model.vocab_size)  # no option of `named` counts prompts
    except ValueError as error:
        raise RequestError(str(error), code="invalid_value") from error
