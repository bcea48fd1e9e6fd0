"""A teacher at an address: a server of OpenAI's completions that says how likely the tokens of a prompt are.

`hybrid-engine serve` and vLLM echo a prompt with its log-probabilities (`echo` with `logprobs`); vLLM also lists them
(`prompt_logprobs`). The first request finds out which of the two a server has. Prompts are sent as token ids, and the
answer must name the same ids.

K: the likeliest tokens of each position.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

import torch

from hybrid_engine.ops.linear_divergence import TopTokens
from hybrid_engine.rlhf.runs.server_requests import NoReply, OpenAIServer, RefusedRequest, ask_all

KEY_VARIABLE = "HYBRID_ENGINE_TEACHER_KEY"
"""Environment variable with the key that is sent to the address."""
NUM_TRIES = 5
ID_PREFIX = "token_id:"
"""Before the id of a token in the answers of vLLM and of `hybrid-engine serve`."""


@dataclass(frozen=True, kw_only=True)
class TeacherServer:
    """An address of which `open` found out that it scores prompts."""

    server: OpenAIServer
    model: str
    num_likeliest: int
    """K."""
    most_requests: int
    """Requests of this process that wait for their answers at one time."""
    lists_prompts: bool = False
    """Whether log-probabilities are requested as `prompt_logprobs`, not as an echo."""

    @classmethod
    def open(
        cls, address: str, num_likeliest: int, timeout: float, most_requests: int, text: str, tokens: list[int]
    ) -> "TeacherServer":
        """The server at `address`, after it scored `tokens`.

        Args:
            address: `http://host:port/v1`, with `#name` if the server has several models.
            num_likeliest: K, the likeliest tokens that it reports at each place.
            timeout: seconds.
            most_requests: of this process at one time.
            text: any text of at least two tokens.
            tokens: of `text`, by the student's tokenizer with its special tokens.

        Raises:
            ValueError: nothing answers there, it has no such model, it does not report the log-probabilities of a
                prompt, or it reads `text` as other tokens.
        """
        url, _, name = address.partition("#")
        server = OpenAIServer(url=url.rstrip("/"), key_variable=KEY_VARIABLE, seconds=timeout, num_tries=NUM_TRIES)
        try:
            model = name or server.only_model()
        except (RefusedRequest, NoReply) as error:
            raise ValueError(f"--teacher={server.url!r} {error}") from error
        found = cls(server=server, model=model, num_likeliest=num_likeliest, most_requests=most_requests)
        return found._in_its_form(text, tokens)

    def score(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[TopTokens]:
        """The likeliest tokens at each place of each answer, which follows its prompt of at least one token.

        Raises:
            ValueError: the server refuses a request, does not answer in `NUM_TRIES` tries, or scores other tokens.
        """
        return ask_all(self._score_one, list(zip(prompts, answers, strict=True)), self.most_requests)

    def _score_one(self, has_ended: Event, row: tuple[list[int], list[int]]) -> TopTokens:
        prompt, answer = row
        try:
            likeliest = self._ask(prompt + answer, has_ended)[len(prompt) :]
        except RefusedRequest as refusal:
            raise ValueError(f"{self} {refusal}") from refusal
        ids, logprobs = ([[pair[part] for pair in row] for row in likeliest] for part in (0, 1))
        return TopTokens(torch.tensor(ids), torch.tensor(logprobs))

    def __str__(self) -> str:
        return f"--teacher={self.server.url!r}"

    def _in_its_form(self, text: str, tokens: list[int]) -> "TeacherServer":
        """This server with the form of request that it understands, and that reads `text` as `tokens`."""
        problems = []
        for lists_prompts in (False, True):
            form = replace(self, lists_prompts=lists_prompts)
            try:
                form._ask(tokens)
                break
            except RefusedRequest as refusal:
                problems.append(f"{'prompt_logprobs' if lists_prompts else 'echo'}: {refusal}")
        else:
            raise ValueError(
                f"{self} gives no log-probabilities of a prompt ({'; '.join(problems)}); give an address that does, "
                "such as that of `hybrid-engine serve` or vLLM"
            )
        try:
            read = form._read_tokens(text)
        except RefusedRequest as refusal:
            raise ValueError(f"{self} does not say as which tokens it reads a text ({refusal})") from refusal
        if read != tokens:
            raise ValueError(
                f"{self} reads {text[:40]!r} as the tokens {read[:8]}, the actor's tokenizer as {tokens[:8]}; give a "
                "teacher with the actor's tokenizer"
            )
        return form

    def _read_tokens(self, text: str) -> list[int]:
        """The token ids as which the server reads a text."""
        body = self._exchange(self._fields(text) | {"return_token_ids": True})
        try:
            (choice,) = body["choices"]
            ids = choice.get("prompt_token_ids")
            if ids is None and not self.lists_prompts:
                ids = [_id_of(name) for name in choice["logprobs"]["tokens"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RefusedRequest(f"answers in another form than OpenAI's ({error!r})") from error
        if not isinstance(ids, list):
            raise RefusedRequest("answers without prompt_token_ids")
        return ids

    def _ask(self, tokens: list[int], has_ended: Event | None = None) -> list[list[tuple[int, float]]]:
        """The K likeliest tokens at each place of `tokens`, none at the first; raises RefusedRequest."""
        body = self._exchange(self._fields(tokens), has_ended)
        try:
            (choice,) = body["choices"]
            rows = self._listed(choice, tokens) if self.lists_prompts else self._echoed(choice, tokens)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RefusedRequest(f"answers in another form than OpenAI's ({error!r})") from error
        return [[], *map(self._likeliest, rows[1:])]

    def _fields(self, prompt: str | list[int]) -> dict[str, Any]:
        fields = {"model": self.model, "prompt": prompt, "temperature": 1.0}
        if self.lists_prompts:
            return fields | {"max_tokens": 1, "prompt_logprobs": self.num_likeliest}
        echo = {"echo": True, "logprobs": self.num_likeliest, "return_tokens_as_token_ids": True}
        return fields | {"max_tokens": 0} | echo

    def _echoed(self, choice: Mapping[str, Any], tokens: list[int]) -> list[dict[int, float]]:
        """Log-probabilities by token id at each place of an echoed prompt."""
        shown = choice.get("logprobs")
        if not shown or len(shown["tokens"]) < len(tokens):
            raise RefusedRequest("echoes no log-probabilities")
        read = [_id_of(name) for name in shown["tokens"][: len(tokens)]]
        if read != tokens:
            place = next(place for place, (one, other) in enumerate(zip(read, tokens, strict=True)) if one != other)
            raise RefusedRequest(f"scores other tokens: {read[place]} in place of {tokens[place]}")
        rows = shown["top_logprobs"][: len(tokens)]
        return [{_id_of(name): value for name, value in (row or {}).items()} for row in rows]

    def _listed(self, choice: Mapping[str, Any], tokens: list[int]) -> list[dict[int, float]]:
        """Log-probabilities by token id at each place, from vLLM's `prompt_logprobs`."""
        shown = choice.get("prompt_logprobs")
        if not shown or len(shown) != len(tokens):
            raise RefusedRequest("lists no log-probabilities")
        rows = [{int(token): entry["logprob"] for token, entry in (row or {}).items()} for row in shown]
        for place, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            if place and token not in row:
                raise RefusedRequest(f"scores other tokens: none at place {place} is {token}")
        return rows

    def _likeliest(self, row: Mapping[int, float]) -> list[tuple[int, float]]:
        """The K likeliest tokens of a place; the token that stands there may be an additional one."""
        if len(row) < self.num_likeliest:
            raise RefusedRequest(
                f"reports {len(row)} tokens at a place, not the {self.num_likeliest} of --teacher-top-k"
            )
        if not all(isinstance(value, (int, float)) and math.isfinite(value) and value < 1e-3 for value in row.values()):
            raise RefusedRequest("reports numbers that are not log-probabilities")
        return sorted(row.items(), key=lambda pair: -pair[1])[: self.num_likeliest]

    def _exchange(self, body: Mapping[str, Any], has_ended: Event | None = None) -> Any:
        """The answer to a request for a completion; raises RefusedRequest, or ValueError if there is none."""
        try:
            return self.server.exchange("completions", body, has_ended)
        except NoReply as error:
            raise ValueError(f"{self} {error}, or give another one") from error


def _id_of(name: str) -> int:
    if not name.startswith(ID_PREFIX):
        raise RefusedRequest(f"names a token {name!r} in place of its id")
    return int(name.removeprefix(ID_PREFIX))
