"""Tokens in, tokens and log-probabilities out: `/inference/v1/generate`, as vLLM has it.

Training clients such as verifiers' (its package `renderers`) make the tokens of a conversation themselves and read
tokens back. A request becomes a `CompletionRequest`; a session that it names records it as it records completions.

Source: the class GenerateRequest of vLLM 0.32, and the function generate of renderers 0.1.12 (module renderers.client).
"""

from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt, StrictStr

from hybrid_engine.serving.protocol import (
    MAX_CHOICES,
    MAX_SESSION_ID,
    MAX_STOP_TOKENS,
    MAX_TOP_LOGPROBS,
    Body,
    CompletionRequest,
    Number,
    TokenId,
    Tokens,
    only,
)
from hybrid_engine.serving.request_parsing import ParsedRequest, ServedModel
from hybrid_engine.serving.responses import Choice, CompletionWriter, Piece, with_drawn

OF_COMPLETION = (
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output",
    "logit_bias",
)  # fmt: skip
"""Fields of the sampling parameters that a completion has under the same name."""


class SamplingParameters(Body):
    """The field `sampling_params`."""

    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    """None: as many as there is room for."""
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    seed: StrictInt | None = None
    stop: StrictStr | list[StrictStr] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    min_tokens: StrictInt | None = None
    ignore_eos: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    include_stop_str_in_output: StrictBool | None = None
    logit_bias: dict[str, Number] | None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """So many likeliest tokens of each position, in addition to the one that was drawn."""
    prompt_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """The same for the prompt."""

    # Fields without effect on the tokens.
    detokenize: Any = None
    flat_logprobs: Any = None
    spaces_between_special_tokens: Any = None
    output_kind: Any = None
    extra_args: Any = None


class GenerateRequest(Body):
    """The body of `/inference/v1/generate`."""

    token_ids: Tokens
    sampling_params: SamplingParameters
    model: StrictStr | None = None
    stream: StrictBool = False
    return_token_ids: StrictBool = False
    """The prompt's ids in addition to those of the answers."""
    request_id: StrictStr | None = None
    session_id: Annotated[StrictStr, Field(min_length=1, max_length=MAX_SESSION_ID)] | None = None
    """Not vLLM's; as in a completion."""

    # Fields without effect on the tokens.
    stream_options: Any = None
    cache_salt: Any = None
    priority: Any = None
    output_mode: only("tokens") = None  # type: ignore[valid-type]

    def to_completion(self, model: ServedModel) -> CompletionRequest:
        """The same request as a completion; raises ValidationError for what a completion refuses."""
        sampling = self.sampling_params
        room = max(1, model.longest - len(self.token_ids))
        scores = [count for count in (sampling.logprobs, sampling.prompt_logprobs) if count is not None]
        fields = {name: getattr(sampling, name) for name in OF_COMPLETION} | {
            "model": model.name if self.model is None else self.model,
            "prompt": self.token_ids,
            "max_tokens": room if sampling.max_tokens is None else sampling.max_tokens,
            "logprobs": max(scores) if scores else None,
            "echo": sampling.prompt_logprobs is not None,
            "stream": self.stream,
            "session_id": self.session_id,
        }
        return CompletionRequest.model_validate(fields)


class GenerateWriter(CompletionWriter):
    """Writes answers as token ids, whole or as events.

    Args:
        body: the request before its translation.
    """

    prefix = "gen"

    def __init__(self, body: GenerateRequest, parsed: ParsedRequest, model: ServedModel):
        super().__init__(parsed, model)
        self._asked = body
        self.id = body.request_id or self.id

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        return self._told_once([self._tokens_of(choice) for choice in self.choices]) | {"usage": self.usage()}

    def opening(self) -> list[dict[str, Any]]:
        """Nothing: the first piece has what is told once."""
        return []

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """The events of a stream for `piece`."""
        shown = [self._shown_piece(piece)]
        choice = self.choices[piece.index]
        if choice.prompt_was_told:
            return [{"request_id": self.id, "choices": shown}]
        choice.prompt_was_told = True
        return [self._told_once(shown)]

    def _told_once(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A body with what is said about the prompt."""
        told: dict[str, Any] = {"request_id": self.id, "choices": choices, "prompt_logprobs": self._prompt_logprobs()}
        return told | ({"prompt_token_ids": self._asked.token_ids} if self._asked.return_token_ids else {})

    def _tokens_of(self, choice: Choice) -> dict[str, Any]:
        reason = choice.finish_reason or "length"
        return self._shown_piece(Piece(choice.index, "", choice.tokens, choice.logprobs, choice.tops, reason))

    def _shown_piece(self, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self._asked.sampling_params.logprobs is not None:
            logprobs = {"content": self._content(piece)}
        shown = {"index": piece.index, "token_ids": piece.tokens, "logprobs": logprobs}
        return shown | {"finish_reason": piece.finish_reason}

    def _content(self, piece: Piece) -> list[dict[str, Any]]:
        most = self._asked.sampling_params.logprobs or 0
        likeliest = with_drawn(piece.tokens, piece.logprobs, [pairs[:most] for pairs in piece.tops])
        return [
            _scored(token, logprob) | {"top_logprobs": [_scored(*pair) for pair in pairs]}
            for token, logprob, pairs in zip(piece.tokens, piece.logprobs, likeliest, strict=True)
        ]

    def _prompt_logprobs(self) -> list[dict[str, Any] | None] | None:
        """For each token of the prompt but the first, its log-probability and the likeliest ones, by token id."""
        most = self._asked.sampling_params.prompt_logprobs
        if most is None:
            return None
        echoed = self._echo(self.choices[0])
        tops = [pairs[:most] for pairs in echoed.tops]
        places = list(
            zip(echoed.tokens, echoed.logprobs, with_drawn(echoed.tokens, echoed.logprobs, tops), strict=True)
        )
        return [None, *({str(token): {"logprob": value} for token, value in pairs} for _, _, pairs in places[1:])]


def _scored(token: int, logprob: float) -> dict[str, Any]:
    """A token with its log-probability: its id as vLLM has it, and as `renderers` reads it."""
    return {"token": f"token_id:{token}", "token_id": token, "logprob": logprob}
