"""Answers in OpenAI's shapes, whole or piece by piece."""

import secrets
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_engine.generation.batching.sequence import Sequence
from hybrid_engine.generation.detokenize import IncrementalDetokenizer
from hybrid_engine.generation.live import Progress
from hybrid_engine.serving.asked import Asked, ServedModel
from hybrid_engine.serving.protocol import ChatRequest, CompletionRequest
from hybrid_engine.serving.tool_calls import NONE, ToolCallParser, shown_tokens

Tops = list[list[tuple[int, float]]]
"""The likeliest tokens at each position with their log-probabilities."""


@dataclass
class Piece:
    """What some tokens added to a choice. A token whose text is held back is here before its text."""

    index: int
    text: str
    tokens: list[int]
    logprobs: list[Any]
    tops: Tops
    finish_reason: str | None
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Of tools, OpenAI's objects."""


@dataclass
class Choice:
    """One answer as far as it has come."""

    index: int
    prompt: list[int]
    detokenizer: IncrementalDetokenizer
    sequence: Sequence | None = None
    """What draws it; None where nothing is drawn or scored."""
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: Tops = field(default_factory=list)
    finish_reason: str | None = None
    tool_calls: ToolCallParser | None = None
    """Finds calls in the text; None: it is given as it is."""
    prompt_was_told: bool = False
    """An event of a stream before gave the prompt's tokens."""

    def add(self, told: Progress) -> Piece:
        """Takes in what a turn brought, up to a stop string, and says what it added."""
        text, count = "", 0
        for token in told.tokens:
            text += self.detokenizer.add(token)
            count += 1
            if self.detokenizer.stopped is not None:
                break
        self.finish_reason = told.finish_reason
        if told.finish_reason is not None:
            text += self.detokenizer.finish()
        if self.detokenizer.stopped is not None:
            self.finish_reason = "stop"
        text, calls = self._without_calls(text)
        first = len(self.tokens)
        tops = told.sequence.tops[first : first + count]
        piece = Piece(self.index, text, told.tokens[:count], told.logprobs[:count], tops, self.finish_reason, calls)
        self.text += piece.text
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.tops += piece.tops
        return piece

    def _without_calls(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """What is to be shown of `text`, and the calls that it completes."""
        if self.tool_calls is None:
            return text, []
        known = len(self.tool_calls.calls)
        text = self.tool_calls.add(text)
        if self.finish_reason is not None:
            text += self.tool_calls.finish()
            if self.tool_calls.calls and self.finish_reason == "stop":
                self.finish_reason = "tool_calls"
        return text, self.tool_calls.calls[known:]

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message."""
        if self.tool_calls is None or not self.tool_calls.calls:
            return {"role": "assistant", "content": self.text}
        return {"role": "assistant", "content": self.text or None, "tool_calls": self.tool_calls.calls}

    def keep_nothing(self, told: Progress) -> Piece:
        """Passes over what a turn brought: only the prompt was to be scored."""
        self.finish_reason = "length"
        return Piece(self.index, "", [], [], [], "length")


class Writer:
    """What completions and chats share: names, usage, the order of choices.

    Args:
        asked: the request.
    """

    prefix: str
    object_name: str
    chunk_name: str

    def __init__(self, asked: Asked, model: ServedModel):
        self.asked, self.model, self.request = asked, model, asked.request
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        drawn: list[tuple[list[int], Sequence | None]] = [(row.prompt.tokens, row) for row in asked.sequences]
        self.choices = [
            self._choice_for(index, prompt, sequence)
            for index, (prompt, sequence) in enumerate(drawn or [(prompt, None) for prompt in asked.prompts])
        ]
        self._choice_of = {choice.sequence: choice for choice in self.choices}

    def _choice_for(self, index: int, prompt: list[int], sequence: Sequence | None) -> Choice:
        detokenizer = IncrementalDetokenizer(self.model.tokenizer, self.asked.request.stops)
        return Choice(index, prompt, detokenizer, sequence)

    def add(self, told: Progress) -> Piece:
        """What `told` adds to its choice."""
        choice = self._choice_of[told.sequence]
        return choice.add(told) if self.asked.num_new else choice.keep_nothing(told)

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = [self._whole_choice(choice) for choice in self.choices]
        return self._body(self.object_name, choices) | {"usage": self.usage()}

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """One event of a stream."""
        return self._body(self.chunk_name, [self._chunk_choice(self.choices[piece.index], piece)])

    def opening(self) -> list[dict[str, Any]]:
        """The events before the first token."""
        return []

    def usage_chunk(self) -> dict[str, Any]:
        """The last event, where usage was asked for."""
        return self._body(self.chunk_name, []) | {"usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Tokens of prompts and answers; a prompt counts once, whatever `n` is."""
        prompt = sum(map(len, self.asked.prompts))
        completion = sum(len(choice.tokens) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _body(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "object": name, "created": self.model.created, "model": self.request.model}
        return head | {"choices": choices}

    def _ids(self, choice: Choice, tokens: list[int]) -> dict[str, Any]:
        """The token ids, where they were asked for, the prompt's once; vLLM's names."""
        if not self.request.return_token_ids:
            return {}
        if choice.prompt_was_told:
            return {"token_ids": tokens}
        choice.prompt_was_told = True
        return {"token_ids": tokens, "prompt_token_ids": choice.prompt}

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk_choice(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError


class CompletionWriter(Writer):
    """Writes answers as the bodies of `/v1/completions`, whole or in events."""

    prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"
    request: CompletionRequest

    def opening(self) -> list[dict[str, Any]]:
        """The prompts, where they are echoed."""
        if not self.request.echo:
            return []
        return [self._body(self.chunk_name, [self._choice(c, self._echo(c), None, 0)]) for c in self.choices]

    def _echo(self, choice: Choice) -> Piece:
        """The prompt as a piece; before its first token there is nothing that could say how likely that was."""
        text = self.model.tokenizer.decode(choice.prompt, skip_special_tokens=True)
        scores = None if choice.sequence is None else choice.sequence.prompt.scores
        if scores is None:
            return Piece(choice.index, text, [], [], [], None)
        return Piece(choice.index, text, choice.prompt, [None, *scores.logprobs], [[], *scores.tops], None)

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        answer = Piece(choice.index, choice.text, choice.tokens, choice.logprobs, choice.tops, choice.finish_reason)
        if not self.request.echo:
            return self._choice(choice, answer, choice.finish_reason or "length", 0)
        shown = self._choice(choice, self._echo(choice), choice.finish_reason or "length", 0)
        rest = self._choice(choice, answer, None, len(shown["text"]))
        shown["text"] += rest["text"]
        if shown["logprobs"] is not None:
            shown["logprobs"] = {name: part + rest["logprobs"][name] for name, part in shown["logprobs"].items()}
        return shown | self._ids(choice, choice.tokens)

    def _chunk_choice(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        echoed = len(self._echo(choice).text) if self.request.echo else 0
        return self._choice(choice, piece, piece.finish_reason, echoed + len(choice.text) - len(piece.text))

    def _choice(self, choice: Choice, piece: Piece, finish_reason: str | None, offset: int) -> dict[str, Any]:
        shown = {"index": piece.index, "text": piece.text, "logprobs": self._logprobs(piece, offset)}
        return shown | {"finish_reason": finish_reason} | self._ids(choice, piece.tokens)

    def _logprobs(self, piece: Piece, offset: int) -> dict[str, Any] | None:
        """`offset`: characters of the choice before the piece."""
        if self.request.logprobs is None:
            return None
        tokenizer = self.model.tokenizer
        names = token_texts(tokenizer, piece.tokens)
        # Tokens may have one text, such as parts of characters: the likelier comes last and stays.
        tops = [{tokenizer.decode([token]): value for token, value in reversed(found)} for found in piece.tops]
        return {
            "tokens": names,
            "token_logprobs": piece.logprobs,
            "text_offset": [offset + sum(map(len, names[:place])) for place in range(len(names))],
            "top_logprobs": [tops[place] or None for place in range(len(tops))] or [None] * len(piece.tokens),
        }


class ChatWriter(Writer):
    """Writes answers as the bodies of `/v1/chat/completions`, whole or in events."""

    prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _choice_for(self, index: int, prompt: list[int], sequence: Sequence | None) -> Choice:
        request, model = self.asked.request, self.model
        assert isinstance(request, ChatRequest)
        if not request.tools or request.tool_choice == "none" or model.tool_call_parser == NONE:
            return super()._choice_for(index, prompt, sequence)
        shown = shown_tokens(model.tool_call_parser, model.tokenizer, model.end_tokens)
        detokenizer = IncrementalDetokenizer(model.tokenizer, request.stops, shown_tokens=shown)
        parser = ToolCallParser(model.tool_call_parser, model.tokenizer, request.tools)
        return Choice(index, prompt, detokenizer, sequence, tool_calls=parser)

    def opening(self) -> list[dict[str, Any]]:
        """The events before the first token, which say who speaks."""
        delta = {"role": "assistant", "content": ""}
        first = {"delta": delta, "logprobs": None, "finish_reason": None}
        return [self._body(self.chunk_name, [{"index": index} | first]) for index in range(len(self.choices))]

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = self._logprobs(choice.tokens, choice.logprobs, choice.tops)
        shown = {"index": choice.index, "message": choice.message, "logprobs": logprobs}
        return shown | {"finish_reason": choice.finish_reason or "length"} | self._ids(choice, choice.tokens)

    def _chunk_choice(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        if piece.calls:
            known = len(choice.message["tool_calls"]) - len(piece.calls)
            delta["tool_calls"] = [{"index": known + place} | call for place, call in enumerate(piece.calls)]
        logprobs = self._logprobs(piece.tokens, piece.logprobs, piece.tops)
        shown = {"index": piece.index, "delta": delta, "logprobs": logprobs, "finish_reason": piece.finish_reason}
        return shown | self._ids(choice, piece.tokens)

    def _logprobs(self, tokens: list[int], logprobs: list[float], tops: Tops) -> dict[str, Any] | None:
        if self.request.num_top_logprobs is None:
            return None
        content = [
            self._shown(token, logprob) | {"top_logprobs": [self._shown(*pair) for pair in likeliest]}
            for token, logprob, likeliest in zip(tokens, logprobs, tops or [[]] * len(tokens), strict=True)
        ]
        return {"content": content, "refusal": None}

    def _shown(self, token: int, logprob: float) -> dict[str, Any]:
        name = self.model.tokenizer.decode([token])
        return {"token": name, "logprob": logprob, "bytes": list(name.encode())}


def token_texts(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """The text of each token by itself; part of a character becomes a replacement character."""
    return [tokenizer.decode([token]) for token in tokens]
