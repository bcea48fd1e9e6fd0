"""Builds answers in OpenAI's format, whole or as events of a stream.

`App` makes one `Writer` per request, `Responder` feeds it; a `Choice` collects one answer.
"""

import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from hybrid_engine.generation.core import Sequence
from hybrid_engine.generation.detokenize import IncrementalDetokenizer, TextOffsets, token_bytes
from hybrid_engine.generation.live.batches import Progress
from hybrid_engine.serving.errors import RequestError
from hybrid_engine.serving.parsers import NONE, build_reader, shown_tokens
from hybrid_engine.serving.parsers.form import AnswerReader, Shown
from hybrid_engine.serving.protocol import ChatRequest, CompletionRequest
from hybrid_engine.serving.request_parsing import ParsedRequest, ServedModel, parser_for

Tops = list[list[tuple[int, float]]]
"""The likeliest tokens at each position with their log-probabilities."""


@dataclass
class Piece:
    """The tokens and text that a step added to a choice. A token can come before its text, which may be held back."""

    index: int
    text: str
    tokens: list[int]
    logprobs: list[Any]
    tops: Tops
    finish_reason: str | None
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Tool calls, as OpenAI's objects."""
    reasoning: str = ""


@dataclass
class Choice:
    """One answer, as far as it has been generated."""

    index: int
    prompt: list[int]
    detokenizer: IncrementalDetokenizer
    sequence: Sequence | None = None
    """The sequence that generates it; None if nothing is generated or scored."""
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: Tops = field(default_factory=list)
    finish_reason: str | None = None
    reader: AnswerReader | None = None
    """Finds calls and reasoning in the text; None: the text is passed on unchanged."""
    most_calls: int | None = None
    """Number of calls after which the answer ends."""
    reasoning: str = ""
    prompt_was_told: bool = False
    """Whether an earlier event of the stream had the prompt's tokens."""

    def add(self, progress: Progress) -> Piece:
        """Adds the tokens of a step, up to a stop string or the last call, and returns what they added."""
        num_known_calls, count = len(self.calls), 0
        parts: list[Shown] = []
        for token in progress.tokens:
            parts.append(self._show(self.detokenizer.add(token)))
            count += 1
            if self._is_stopped:
                break
        self.finish_reason = "stop" if self._is_stopped else progress.finish_reason
        if self.finish_reason is not None:
            parts.append(self._show_rest())
        first = len(self.tokens)
        piece = Piece(
            self.index,
            "".join(part.text for part in parts),
            progress.tokens[:count],
            progress.logprobs[:count],
            progress.sequence.tops[first : first + count],
            self.finish_reason,
            self.calls[num_known_calls:],
            "".join(part.reasoning for part in parts),
        )
        self._take(piece)
        return piece

    def _take(self, piece: Piece) -> None:
        self.text += piece.text
        self.reasoning += piece.reasoning
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.tops += piece.tops

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Tool calls so far, as OpenAI's objects."""
        return [] if self.reader is None else self.reader.calls[: self.most_calls]

    @property
    def _is_stopped(self) -> bool:
        return self.detokenizer.stopped is not None or len(self.calls) == self.most_calls

    def _show(self, text: str) -> Shown:
        if self.reader is None:
            return Shown(text)
        return Shown() if len(self.calls) == self.most_calls or not text else self.reader.add(text)

    def _show_rest(self) -> Shown:
        """Shows text that was held back, at the end of the answer."""
        shown = self._show(self.detokenizer.finish())
        if self.detokenizer.stopped is not None:  # the last characters may contain a stop string
            self.finish_reason = "stop"
        if self.reader is None:
            return shown
        if len(self.calls) != self.most_calls:
            rest = self.reader.finish()
            shown = Shown(shown.text + rest.text, shown.reasoning + rest.reasoning)
        if self.calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"
        return shown

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message."""
        reasoning = {"reasoning_content": self.reasoning} if self.reasoning else {}
        if not self.calls:
            return {"role": "assistant", "content": self.text} | reasoning
        return {"role": "assistant", "content": self.text or None, "tool_calls": self.calls} | reasoning

    def keep_nothing(self, progress: Progress) -> Piece:
        """Ignores the tokens of a step: only the prompt was to be scored."""
        self.finish_reason = "length"
        return Piece(self.index, "", [], [], [], "length")


class Writer:
    """Base of the writers for completions and chats: names, usage, the order of choices.

    Args:
        parsed: the request.
    """

    prefix: str
    object_name: str
    chunk_name: str
    last_line = "data: [DONE]\n\n"
    """The end of a stream."""

    def __init__(self, parsed: ParsedRequest, model: ServedModel):
        self.parsed, self.model, self.request = parsed, model, parsed.request
        self.id, self.created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())
        drawn: list[tuple[list[int], Sequence | None]] = [(row.prompt.tokens, row) for row in parsed.sequences]
        self.choices = [
            self._choice_for(index, prompt, sequence)
            for index, (prompt, sequence) in enumerate(drawn or [(prompt, None) for prompt in parsed.prompts])
        ]
        self._choice_of = {choice.sequence: choice for choice in self.choices}

    def _choice_for(self, index: int, prompt: list[int], sequence: Sequence | None) -> Choice:
        return Choice(index, prompt, self._detokenizer(), sequence)

    def _detokenizer(self, shown: Collection[int] = ()) -> IncrementalDetokenizer:
        """A detokenizer for one choice. `shown`: special tokens that belong to the text."""
        request = self.request
        return IncrementalDetokenizer(
            self.model.tokenizer,
            request.stops,
            skip_special_tokens=request.skip_special_tokens,
            includes_stop=request.include_stop_str_in_output,
            shown_tokens=shown,
            min_tokens=request.min_tokens,
        )

    def add(self, progress: Progress) -> Piece:
        """Adds the progress `progress` to its choice, and returns what it added."""
        choice = self._choice_of[progress.sequence]
        return choice.add(progress) if self.parsed.num_new else choice.keep_nothing(progress)

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = [self._whole_choice(choice) for choice in self.choices]
        return self._body(self.object_name, choices) | {"usage": self.usage()}

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """The events of a stream for `piece`."""
        return [self._chunk([self._chunk_choice(self.choices[piece.index], piece)])]

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """An event before the last one; its usage is null if the last event has the usage, or the usage so far."""
        options, body = self.request.usage_of_stream, self._body(self.chunk_name, choices)
        if options.continuous_usage_stats:
            return body | {"usage": self.usage()}
        return body | {"usage": None} if options.include_usage else body

    def opening(self) -> list[dict[str, Any]]:
        """The events before the first token."""
        return []

    def closing(self) -> list[dict[str, Any]]:
        """The events after the last token: the usage, if it was requested."""
        if not self.request.usage_of_stream.include_usage:
            return []
        return [self._body(self.chunk_name, []) | {"usage": self.usage()}]

    def failure(self, error: RequestError) -> dict[str, Any]:
        """The event of an error, after which the stream ends."""
        return error.body

    def event_name(self, event: dict[str, Any]) -> str | None:
        """The name of an event in the protocol of server-sent events; None if it has none."""
        return None

    def usage(self) -> dict[str, Any]:
        """Number of tokens of prompts and answers; a prompt counts once for any `n`.

        `cached_tokens` are those of the prompts whose keys and values an earlier request had left.
        """
        prompt = sum(map(len, self.parsed.prompts))
        completion = sum(len(choice.tokens) for choice in self.choices)
        cached = sum(row.prompt.num_reused for row in self.parsed.sequences[:: self.request.n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _body(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "object": name, "created": self.created, "model": self.request.model}
        return head | {"choices": choices}

    def _ids(self, choice: Choice, tokens: list[int]) -> dict[str, Any]:
        """The token ids if they were requested, with the prompt's ids once; vLLM's names."""
        if not self.request.return_token_ids:
            return {}
        if choice.prompt_was_told:
            return {"token_ids": tokens}
        choice.prompt_was_told = True
        return {"token_ids": tokens, "prompt_token_ids": choice.prompt}

    def _name(self, token: int) -> str:
        """The token's name in log-probabilities; part of a character becomes a replacement character."""
        if self.request.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return token_bytes(self.model.tokenizer, token).decode(errors="replace")

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk_choice(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError


class CompletionWriter(Writer):
    """Writes answers as the bodies of `/v1/completions`, whole or as events."""

    prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"
    request: CompletionRequest

    def __init__(self, parsed: ParsedRequest, model: ServedModel):
        super().__init__(parsed, model)
        self._offsets: dict[int, TextOffsets] = {}  # text offsets in answers, by choice

    def opening(self) -> list[dict[str, Any]]:
        """The prompts, if they are echoed."""
        if not self.request.echo:
            return []
        return [self._chunk([self._echo_choice(choice, None)]) for choice in self.choices]

    def _echo(self, choice: Choice) -> Piece:
        """The prompt as a piece; the first token has no log-probability, because nothing comes before it."""
        text = self.model.tokenizer.decode(choice.prompt, skip_special_tokens=True)
        scores = None if choice.sequence is None else choice.sequence.prompt.scores
        if scores is None:
            return Piece(choice.index, text, [], [], [], None)
        return Piece(choice.index, text, choice.prompt, [None, *scores.logprobs], [[], *scores.tops], None)

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        answer = Piece(choice.index, choice.text, choice.tokens, choice.logprobs, choice.tops, choice.finish_reason)
        if not self.request.echo:
            return self._answer_choice(choice, answer, choice.finish_reason or "length", 0)
        shown = self._echo_choice(choice, choice.finish_reason or "length")
        rest = self._answer_choice(choice, answer, None, len(shown["text"]))
        shown["text"] += rest["text"]
        if shown["logprobs"] is not None:
            shown["logprobs"] = {name: part + rest["logprobs"][name] for name, part in shown["logprobs"].items()}
        return shown | self._ids(choice, choice.tokens)

    def _chunk_choice(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        echoed = len(self._echo(choice).text) if self.request.echo else 0
        return self._answer_choice(choice, piece, piece.finish_reason, echoed)

    def _echo_choice(self, choice: Choice, finish_reason: str | None) -> dict[str, Any]:
        return self._choice(choice, self._echo(choice), finish_reason, TextOffsets(self.model.tokenizer))

    def _answer_choice(self, choice: Choice, piece: Piece, reason: str | None, num_echoed: int) -> dict[str, Any]:
        """A piece of the answer, whose text follows `num_echoed` characters of the prompt."""
        offsets = self._offsets.get(choice.index)
        if offsets is None:
            skips = self.request.skip_special_tokens
            offsets = self._offsets[choice.index] = TextOffsets(self.model.tokenizer, skips, num_echoed)
        return self._choice(choice, piece, reason, offsets)

    def _choice(self, choice: Choice, piece: Piece, finish_reason: str | None, offsets: TextOffsets) -> dict[str, Any]:
        shown = {"index": piece.index, "text": piece.text, "logprobs": self._logprobs(piece, offsets)}
        return shown | {"finish_reason": finish_reason} | self._ids(choice, piece.tokens)

    def _logprobs(self, piece: Piece, offsets: TextOffsets) -> dict[str, Any] | None:
        if self.request.logprobs is None:
            return None
        return {
            "tokens": [self._name(token) for token in piece.tokens],
            "token_logprobs": piece.logprobs,
            "text_offset": [offsets.next(token) for token in piece.tokens],
            "top_logprobs": [
                # Tokens can have the same text, such as parts of characters: the likelier one comes last and is kept.
                {self._name(token): value for token, value in reversed(likeliest)} or None
                for likeliest in with_drawn(piece.tokens, piece.logprobs, piece.tops)
            ],
        }


class ChatWriter(Writer):
    """Writes answers as the bodies of `/v1/chat/completions`, whole or as events."""

    prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"
    request: ChatRequest

    def _choice_for(self, index: int, prompt: list[int], sequence: Sequence | None) -> Choice:
        request, model = self.request, self.model
        parser = parser_for(request, model)
        if parser == NONE:
            return super()._choice_for(index, prompt, sequence)
        detokenizer = self._detokenizer(shown_tokens(parser, model.tokenizer, model.end_tokens))
        reader = build_reader(parser, model.tokenizer, request.offered_tools or [], prompt)
        most_calls = None if request.parallel_tool_calls else 1
        return Choice(index, prompt, detokenizer, sequence, reader=reader, most_calls=most_calls)

    def opening(self) -> list[dict[str, Any]]:
        """The events before the first token, which name the role."""
        delta = {"role": "assistant", "content": ""}
        first = {"delta": delta, "logprobs": None, "finish_reason": None}
        return [self._chunk([{"index": index} | first]) for index in range(len(self.choices))]

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """The events of a stream for `piece`; the finish reason follows the calls, as clients take it as their end."""
        if not (piece.calls and piece.finish_reason):
            return super().chunks(piece)
        end = Piece(piece.index, "", [], [], [], piece.finish_reason)
        return super().chunks(replace(piece, finish_reason=None)) + super().chunks(end)

    def _body(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Adds the prompt's token ids at the top level once, as vLLM does; the choices have them as in completions."""
        ids = [choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice]
        return super()._body(name, choices) | ({"prompt_token_ids": ids[0]} if ids else {})

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = self._logprobs(choice.tokens, choice.logprobs, choice.tops)
        shown = {"index": choice.index, "message": choice.message, "logprobs": logprobs}
        return shown | {"finish_reason": choice.finish_reason or "length"} | self._ids(choice, choice.tokens)

    def _chunk_choice(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.calls:
            known = len(choice.calls) - len(piece.calls)
            delta["tool_calls"] = [{"index": known + place} | call for place, call in enumerate(piece.calls)]
        logprobs = self._logprobs(piece.tokens, piece.logprobs, piece.tops)
        shown = {"index": piece.index, "delta": delta, "logprobs": logprobs, "finish_reason": piece.finish_reason}
        return shown | self._ids(choice, piece.tokens)

    def _logprobs(self, tokens: list[int], logprobs: list[float], tops: Tops) -> dict[str, Any] | None:
        if self.request.num_top_logprobs is None:
            return None
        likeliest = with_drawn(tokens, logprobs, tops) if self.request.num_top_logprobs else [[]] * len(tokens)
        content = [
            self._shown(token, logprob) | {"top_logprobs": [self._shown(*pair) for pair in pairs]}
            for token, logprob, pairs in zip(tokens, logprobs, likeliest, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _shown(self, token: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(self.model.tokenizer, token)
        return {"token": self._name(token), "logprob": logprob, "bytes": list(data)}


def with_drawn(tokens: list[int], logprobs: list[Any], tops: Tops) -> Tops:
    """`tops` with the actual token added last if it is not one of the likeliest; unchanged for an unscored token."""
    pairs = zip(tokens, logprobs, tops or [[]] * len(tokens), strict=True)
    return [likeliest if logprob is None else _with(token, logprob, likeliest) for token, logprob, likeliest in pairs]


def _with(token: int, logprob: float, likeliest: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Uses the reported log-probability of the token, so that both values are identical."""
    found = {**dict(likeliest), token: logprob}
    return list(found.items())
