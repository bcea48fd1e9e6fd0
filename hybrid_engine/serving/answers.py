"""Answers in OpenAI's shapes, whole or piece by piece."""

import secrets
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_engine.generation.batching.sequence import Sequence
from hybrid_engine.generation.detokenize import IncrementalDetokenizer
from hybrid_engine.generation.live import Progress
from hybrid_engine.serving.asked import Asked, ServedModel


@dataclass
class Piece:
    """What some tokens added to a choice. A token whose text is held back is here before its text."""

    text: str
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str | None


@dataclass
class Choice:
    """One answer as far as it has come."""

    prompt: list[int]
    detokenizer: IncrementalDetokenizer
    sequence: Sequence | None = None
    """What draws it; None where no tokens were asked for."""
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, told: Progress) -> Piece:
        """Takes in what a turn brought, and says what it added."""
        text = "".join(map(self.detokenizer.add, told.tokens))
        if told.finish_reason is not None:
            text += self.detokenizer.finish()
        self.text += text
        self.tokens += told.tokens
        self.logprobs += told.logprobs
        self.finish_reason = told.finish_reason
        return Piece(text, told.tokens, told.logprobs, told.finish_reason)


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
            Choice(prompt, IncrementalDetokenizer(model.tokenizer, asked.request.stops), sequence)
            for prompt, sequence in drawn or [(prompt, None) for prompt in asked.prompts]
        ]
        self._index = {sequence: index for index, sequence in enumerate(asked.sequences)}

    def add(self, told: Progress) -> tuple[int, Piece]:
        """The choice that `told` belongs to, and what it adds."""
        index = self._index[told.sequence]
        return index, self.choices[index].add(told)

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = [self._whole_choice(index, choice) for index, choice in enumerate(self.choices)]
        return self._body(self.object_name, choices) | {"usage": self.usage()}

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """One event of a stream."""
        return self._body(self.chunk_name, [self._chunk_choice(index, piece)])

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
        """The token ids, where they were asked for; vLLM's names."""
        return {"token_ids": tokens, "prompt_token_ids": choice.prompt} if self.request.return_token_ids else {}

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk_choice(self, index: int, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError


class CompletionWriter(Writer):
    """`/v1/completions`."""

    prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"

    def opening(self) -> list[dict[str, Any]]:
        """The prompt, where it is echoed."""
        if not self.request.echo:  # type: ignore[attr-defined]
            return []
        return [self.chunk(i, Piece(self._prompt_text(c), [], [], None)) for i, c in enumerate(self.choices)]

    def _prompt_text(self, choice: Choice) -> str:
        return self.model.tokenizer.decode(choice.prompt, skip_special_tokens=True)

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        echoed = self._prompt_text(choice) if self.request.echo else ""  # type: ignore[attr-defined]
        shown = self._choice(index, echoed + choice.text, choice.tokens, choice.logprobs, len(echoed))
        return shown | {"finish_reason": choice.finish_reason or "length"} | self._ids(choice, choice.tokens)

    def _chunk_choice(self, index: int, piece: Piece) -> dict[str, Any]:
        choice = self.choices[index]
        offset = len(choice.text) - len(piece.text)
        shown = self._choice(index, piece.text, piece.tokens, piece.logprobs, offset)
        return shown | {"finish_reason": piece.finish_reason} | self._ids(choice, piece.tokens)

    def _choice(self, index: int, text: str, tokens: list[int], logprobs: list[float], offset: int) -> dict[str, Any]:
        shown = None
        if self.request.logprobs is not None:  # type: ignore[attr-defined]
            names = token_texts(self.model.tokenizer, tokens)
            offsets = [offset + sum(map(len, names[:place])) for place in range(len(names))]
            shown = {"tokens": names, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}
        return {"index": index, "text": text, "logprobs": shown}


class ChatWriter(Writer):
    """`/v1/chat/completions`."""

    prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        """Who speaks."""
        delta = {"role": "assistant", "content": ""}
        choices = [
            {"index": i, "delta": delta, "logprobs": None, "finish_reason": None} for i in range(len(self.choices))
        ]
        return [self._body(self.chunk_name, [choice]) for choice in choices]

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text}
        shown = {"index": index, "message": message, "logprobs": self._logprobs(choice.tokens, choice.logprobs)}
        return shown | {"finish_reason": choice.finish_reason or "length"} | self._ids(choice, choice.tokens)

    def _chunk_choice(self, index: int, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        shown = {"index": index, "delta": delta, "logprobs": self._logprobs(piece.tokens, piece.logprobs)}
        return shown | {"finish_reason": piece.finish_reason} | self._ids(self.choices[index], piece.tokens)

    def _logprobs(self, tokens: list[int], logprobs: list[float]) -> dict[str, Any] | None:
        if not self.request.logprobs:  # type: ignore[attr-defined]
            return None
        names = token_texts(self.model.tokenizer, tokens)
        content = [
            {"token": name, "logprob": logprob, "bytes": list(name.encode()), "top_logprobs": []}
            for name, logprob in zip(names, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


def token_texts(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """The text of each token by itself; part of a character becomes a replacement character."""
    return [tokenizer.decode([token]) for token in tokens]
