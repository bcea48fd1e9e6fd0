"""Stores conversations as token ids, so that the tokens that the policy wrote stay unchanged.

A session is a tree. Every answer is a node with: the tokens up to its end, which of them the policy wrote, their
log-probabilities, and the version of the weights. A request that continues a node uses that node's token ids unchanged,
and only new text is tokenized. If text were decoded and tokenized again, it could become other tokens, with other
log-probabilities, than those that were drawn. Requests that do not continue a node begin a new branch.
"""

import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from transformers import PreTrainedTokenizerBase

from hybrid_engine.config.notices import say_once
from hybrid_engine.generation.core import Sequence as BatchSequence
from hybrid_engine.ops.support_log_prob import record_bytes
from hybrid_engine.serving.errors import RequestError
from hybrid_engine.serving.protocol import MAX_SESSION_ID, ChatRequest, SamplingFields
from hybrid_engine.serving.request_parsing import ParsedRequest, ServedModel, chat_text, chat_tokens
from hybrid_engine.serving.responses import Choice
from hybrid_engine.serving.tool_calls import for_template

Request = TypeVar("Request", bound=SamplingFields)
REASONING = "reasoning_content"
NUM_LEFT = 8
"""Number of known tokens that new text is encoded with."""
MAX_SESSION_TOKENS = 2**25
"""Default limit for the tokens of all conversations together."""
MAX_SESSION_BYTES = 2**31
"""Default limit for the memory of all conversations together."""
TOKEN_BYTES = 120
"""Bytes of a remembered token: in lists of ids, log-probabilities, records, versions, and authorship."""
LARGEST_VOCABULARY = 2**18
"""Tokens of the largest vocabularies of current models, for the memory of records."""
NODE_BYTES = 4096
"""Bytes of a remembered answer in addition to its tokens and messages."""
MAX_VALUES = 2**16
"""Maximum number of JSON values in the messages and template inputs of a remembered request."""
# Stands for an answer while a template writes the text after it: templates keep letters, and no text contains it.
_PLACEHOLDER = "ANSWERa8f31c94d07e"


class SessionSampling(NamedTuple):
    """The sampling of all answers that are recorded: a policy learns from what it draws as its trainer expects it."""

    drawing: Mapping[str, Any]
    """Fields of `protocol.SamplingFields`, such as temperature and top_p."""
    max_new_tokens: int
    """Maximum number of tokens of an answer."""
    seeds: Mapping[str, int]
    """The seed of each session by its id."""


NEUTRAL = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "min_tokens": 0,
}
"""Fields that would draw from another distribution than that of the recorded log-probabilities."""


class Session(NamedTuple):
    """A conversation. Clients with other keys cannot continue it, even under the same id."""

    id: str
    key: str = ""
    """The name of the client's key, not the key itself."""


class Size(NamedTuple):
    """The memory of answers."""

    num_tokens: int = 0
    """Number of tokens, each answer's counted from the first token of its conversation."""
    num_bytes: int = 0

    def plus(self, other: "Size") -> "Size":
        """The sum of both."""
        return Size(self.num_tokens + other.num_tokens, self.num_bytes + other.num_bytes)

    def minus(self, other: "Size") -> "Size":
        """The difference."""
        return Size(self.num_tokens - other.num_tokens, self.num_bytes - other.num_bytes)

    def is_within(self, most: "Size") -> bool:
        """Whether neither field exceeds that of `most`."""
        return self.num_tokens <= most.num_tokens and self.num_bytes <= most.num_bytes


@dataclass(eq=False)
class Trajectory:
    """One conversation from its first token to the end of an answer; lists of one length T."""

    session_id: str
    tokens: list[int]
    written: list[bool]
    """True for tokens that the policy drew; False for prompts, users and tool results."""
    logprobs: list[float]
    """As the sampler recorded them; 0 for tokens that were not drawn."""
    supports: list[bytes]
    """Records (`ops/support_log_prob.py`) of what tokens were drawn from; empty for others, or if none are recorded."""
    versions: list[int]
    """Version of the weights that drew the token; -1 for tokens that were not drawn."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The client's messages, including the answer; empty for `/v1/completions`."""
    template_inputs: dict[str, Any] = field(default_factory=dict)
    """The variables of the chat template in addition to messages, such as tools."""
    finish_reason: str | None = None
    sequence: BatchSequence | None = None
    """The sequence of the last answer; its keys and values may still be cached."""
    key: str = ""
    """The name of the key of its requests; empty if keys have no names."""
    parent: "Trajectory | None" = field(default=None, repr=False)
    """The answer that this one continues."""
    num_shared: int = 0
    """Number of its first tokens that an earlier trajectory of `trajectories()` has with the same answers, so that they
    are learned there."""


class Sessions:
    """The conversations of a server. Thread-safe.

    Args:
        version: version of the weights that answer.
        max_sessions: maximum number of sessions; beyond it the oldest is forgotten.
        max_tokens: the same limit for the tokens of all answers, each counted from the start of its conversation.
            A single conversation that would exceed it accepts no more requests.
        known_ids: ids of the only sessions that are accepted; None: any.
        max_bytes: as max_tokens, for the memory of everything that is remembered.
        sampling: how the answers of sessions are drawn, whatever requests say; None: as they say.
    """

    def __init__(
        self,
        model: ServedModel,
        version: int,
        max_sessions: int,
        max_tokens: int = MAX_SESSION_TOKENS,
        known_ids: Collection[str] | None = None,
        max_bytes: int = MAX_SESSION_BYTES,
        sampling: SessionSampling | None = None,
    ):
        self.known_ids = None if known_ids is None else frozenset(known_ids)
        self._sampling = sampling
        self.model, self.version, self.max_sessions = model, version, max_sessions
        self._most = Size(max_tokens, max_bytes)
        self._nodes: dict[Session, list[Trajectory]] = {}  # by session, in order of arrival
        self._sizes: dict[Session, Size] = {}  # size of each session's nodes
        self._size = Size()  # size of all nodes
        self._continued: set[Trajectory] = set()
        self._lock = threading.Lock()

    def check_known(self, session: Session) -> None:
        """Raises RequestError for a session id that is not in `known_ids`."""
        if self.known_ids is not None and session.id not in self.known_ids:
            raise RequestError(
                "this session_id was not handed out by the server; send the one that you were given, or none",
                status=403,
                param="session_id",
                code="unknown_session",
            )

    def as_drawn(self, session: Session, request: Request, prompt: list[int], longest: int) -> Request:
        """`request` with the sampling of the server's sessions; `longest`: tokens of prompt and answer together.

        Answers of one session to the same prompt differ, because each has a seed of its own.
        """
        if self._sampling is None:
            return request
        with self._lock:
            repeats = sum(_answers(node, prompt) for node in self._nodes.get(session, ()))
        changes = NEUTRAL | dict(self._sampling.drawing) | {"seed": self._sampling.seeds.get(session.id, 0) + repeats}
        most = self._sampling.max_new_tokens
        for name in ("max_tokens", "max_completion_tokens"):
            asked = getattr(request, name, None)
            if asked is not None:
                changes[name] = min(asked, most)
        if not any(name in changes for name in ("max_tokens", "max_completion_tokens")):
            changes["max_tokens"] = min(most, max(1, longest - len(prompt)))
        return request.model_copy(update=changes)

    def find_chat(self, session: Session, request: ChatRequest) -> tuple[list[int], Trajectory | None]:
        """The prompt's token ids, and the node that it continues; None if it begins a branch."""
        messages, inputs = request.template_messages, request.template_inputs
        node = self._longest(
            session, lambda node: node.template_inputs == inputs and _goes_on_from(messages, node.messages)
        )
        if node is not None and (rest := self._rest(request, node)) is not None:
            return node.tokens + rest, node
        return chat_tokens(request, self.model), None

    def find_tokens(self, session: Session, prompt: list[int]) -> Trajectory | None:
        """The node that `prompt` continues."""
        return self._longest(session, lambda node: _begins_with(prompt, node.tokens))

    def _longest(self, session: Session, fits: Any) -> Trajectory | None:
        with self._lock:
            nodes = [node for node in self._nodes.get(session, ()) if fits(node)]
        return max(nodes, key=lambda node: len(node.tokens), default=None)

    def _rest(self, request: ChatRequest, node: Trajectory) -> list[int] | None:
        """The tokens that follow `node`; None if the template does not show its answer unchanged."""
        messages = request.template_messages
        place = len(node.messages) - 1
        answer = {name: value for name, value in messages[place].items() if name not in ("tool_calls", REASONING)}
        shown = [*messages[:place], answer | {"content": _PLACEHOLDER}, *messages[place + 1 :]]
        try:
            text = chat_text(request, self.model, shown)
        except RequestError:  # some templates require a call before a tool's result
            return self._rest_after_turn(request, node)
        before, found, rest = text.rpartition(_PLACEHOLDER)
        if not found or _PLACEHOLDER in before:
            return None
        last = self.model.tokenizer.decode(node.tokens[-1:])
        if node.tokens[-1] in self.model.end_tokens:  # the answer includes its end token
            return encode_after(self.model.tokenizer, last, rest.removeprefix(last))
        return encode_after(self.model.tokenizer, self.model.tokenizer.decode(node.tokens[-NUM_LEFT:]), rest)

    def _rest_after_turn(self, request: ChatRequest, node: Trajectory) -> list[int] | None:
        """The tokens that follow `node`, where the template shows its answer only as it is.

        None if the answer has no end token, or the template writes it otherwise once more follows.
        """
        messages = request.template_messages
        if node.tokens[-1] not in self.model.end_tokens:
            return None
        closed = request.model_copy(update={"add_generation_prompt": False, "continue_final_message": False})
        try:
            before, whole = (
                chat_text(each, self.model, part)
                for each, part in ((closed, messages[: len(node.messages)]), (request, messages))
            )
        except RequestError:
            return None
        last = self.model.tokenizer.decode(node.tokens[-1:])
        _, found, after = before.rpartition(last)
        if not found or not whole.startswith(before):
            return None
        return encode_after(self.model.tokenizer, last, after + whole[len(before) :])

    def record(
        self,
        session: Session,
        node: Trajectory | None,
        choice: Choice,
        messages: list[dict[str, Any]],
        inputs: dict[str, Any] | None = None,
        num_bytes: int = 0,
    ) -> None:
        """Stores an answer that continues `node`, or begins a branch.

        Args:
            messages: the client's messages, including the answer.
            inputs: inputs of the chat template in addition to them.
            num_bytes: memory of `messages` and `inputs`.
        """
        tokens, num_drawn = choice.prompt + choice.tokens, len(choice.tokens)
        num_known = 0 if node is None else len(node.tokens)
        num_new = len(choice.prompt) - num_known
        recorded = [] if choice.sequence is None else choice.sequence.supports[:num_drawn]
        supports = recorded or [b""] * num_drawn
        new = Trajectory(
            session.id,
            tokens,
            ([] if node is None else node.written) + [False] * num_new + [True] * num_drawn,
            ([] if node is None else node.logprobs) + [0.0] * num_new + choice.logprobs,
            ([] if node is None else node.supports) + [b""] * num_new + supports,
            ([] if node is None else node.versions) + [-1] * num_new + [self.version] * num_drawn,
            messages,
            inputs or {},
            choice.finish_reason,
            _kept(choice.sequence, len(tokens)),
            session.key,
            node,
        )
        size = size_of(1, len(tokens), num_bytes + sum(map(sys.getsizeof, recorded)))
        with self._lock:
            self._nodes.setdefault(session, []).append(new)
            self._sizes[session] = self._sizes.get(session, Size()).plus(size)
            self._size = self._size.plus(size)
            if node is not None:
                self._continued.add(node)
            self._forget_oldest(session)

    def _forget_oldest(self, newest: Session) -> None:
        """Forgets the oldest sessions except `newest`, until the limits hold."""
        while len(self._nodes) > self.max_sessions or not self._size.is_within(self._most):
            oldest = next((other for other in self._nodes if other != newest), None)
            if oldest is None:
                return
            say_once(
                f"serving: more than max_sessions={self.max_sessions:,} conversations, or than "
                f"max_session_tokens={self._most.num_tokens:,} tokens or max_session_bytes={self._most.num_bytes:,} "
                "bytes in them: the oldest are forgotten"
            )
            self._continued -= set(self._nodes.pop(oldest))
            self._size = self._size.minus(self._sizes.pop(oldest))

    def check_room(self, session: Session, parsed: ParsedRequest, num_bytes: int = 0) -> None:
        """Raises RequestError if a conversation alone would take more memory than all may take.

        Args:
            num_bytes: memory that is added with its answers, in addition to tokens.
        """
        num_tokens = sum(len(sequence.prompt.tokens) + parsed.num_new for sequence in parsed.sequences)
        coming = size_of(len(parsed.sequences), num_tokens, num_bytes)
        size = self._sizes.get(session, Size()).plus(coming)
        if not size.is_within(self._most):
            raise RequestError(
                f"session_id {session.id!r}: its answers would have {size.num_tokens:,} tokens, each counted from the "
                f"first one of the conversation, in {size.num_bytes:,} bytes with their messages, but at most "
                f"{self._most.num_tokens:,} tokens and {self._most.num_bytes:,} bytes are stored; start another "
                "session",
                param="session_id",
                code="session_too_long",
            )

    def trajectories(self) -> list[Trajectory]:
        """The conversations that no request has continued, with sessions in the order of their first answers."""
        with self._lock:
            nodes = [node for nodes in self._nodes.values() for node in nodes]
            return _with_shared([node for node in nodes if node not in self._continued])


def _answers(node: Trajectory, prompt: list[int]) -> bool:
    """Whether `node` is an answer to `prompt`."""
    size = len(prompt)
    begins = size < len(node.tokens) and all(node.written[size:]) and not node.written[size - 1]
    return begins and node.tokens[:size] == prompt


def _with_shared(leaves: list[Trajectory]) -> list[Trajectory]:
    """The trajectories with `num_shared`, by the answers that earlier ones have."""
    seen: set[int] = set()
    found = []
    for leaf in leaves:
        node: Trajectory | None = leaf
        while node is not None and id(node) not in seen:
            seen.add(id(node))
            node = node.parent
        found.append(leaf if node is None else replace(leaf, num_shared=len(node.tokens)))
    return found


def check_session_ids(session_ids: Collection[str] | None, max_sessions: int) -> None:
    """Raises ValueError for invalid or repeated ids, and for more ids than sessions are remembered."""
    if session_ids is None:
        return
    if isinstance(session_ids, str):
        raise ValueError(f"session_ids={session_ids!r} is one string; pass a list of ids")
    for session_id in session_ids:
        if not isinstance(session_id, str) or not 0 < len(session_id) <= MAX_SESSION_ID:
            raise ValueError(
                f"session_ids: {session_id!r} is not a string of 1 to {MAX_SESSION_ID} characters; pass others"
            )
    if len(set(session_ids)) < len(session_ids):
        raise ValueError("session_ids has an id twice; give each conversation its own")
    if len(session_ids) > max_sessions:
        raise ValueError(
            f"max_sessions={max_sessions} is less than the {len(session_ids)} session_ids that are handed out, so that "
            "some would be forgotten; raise it"
        )


def size_of(num_answers: int, num_tokens: int, num_bytes: int) -> Size:
    """The memory of answers with `num_tokens` tokens together, whose messages take `num_bytes`."""
    return Size(num_tokens, num_answers * NODE_BYTES + num_tokens * TOKEN_BYTES + num_bytes)


def support_bytes(top_k: int) -> int:
    """Memory of the record of a token's support, at most; with `top_k` 0 of any support."""
    return sys.getsizeof(b"") + record_bytes(top_k or LARGEST_VOCABULARY, LARGEST_VOCABULARY)


def count_bytes(values: Any) -> int:
    """Bytes in memory of JSON `values`; raises RequestError if there are more than MAX_VALUES."""
    left, total, num_values = [values], 0, 0
    while left:
        value = left.pop()
        total += sys.getsizeof(value)
        num_values += 1
        if num_values > MAX_VALUES:
            raise RequestError(
                f"session_id: the messages and template inputs have more than {MAX_VALUES:,} JSON values, too many to "
                "store; send fewer, or no session_id",
                param="session_id",
                code="too_many_values",
            )
        if isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list):
            left += value
    return total


def _kept(sequence: BatchSequence | None, num_tokens: int) -> BatchSequence | None:
    """The sequence that drew `num_tokens` tokens, if its blocks may stay cached; None if the answer was cut off."""
    if sequence is None or sequence.finish_reason not in ("stop", "length") or len(sequence) != num_tokens:
        return None
    sequence.let_go()
    return sequence


def _begins_with(whole: list[Any], start: list[Any]) -> bool:
    return 0 < len(start) < len(whole) and whole[: len(start)] == start


def encode_after(tokenizer: PreTrainedTokenizerBase, left: str, text: str) -> list[int]:
    """The tokens of `text` after `left`, which is already tokenized.

    Encoded alone, `text` could give other tokens: special tokens strip adjacent white space, and some tokenizers add a
    token at the start. If a token spans both texts, the result is that of `text` alone.
    """
    left = left.rstrip()
    before = tokenizer.encode(left, add_special_tokens=False)
    whole = tokenizer.encode(left + text, add_special_tokens=False)
    if whole[: len(before)] == before:
        return whole[len(before) :]
    return tokenizer.encode(text, add_special_tokens=False)


def _without_empty(message: dict[str, Any]) -> dict[str, Any]:
    """The message without empty fields, which clients may send back."""
    return {name: value for name, value in message.items() if value not in (None, [], {})}


def _goes_on_from(messages: list[dict[str, Any]], known: list[dict[str, Any]]) -> bool:
    """Whether `messages` begin with all of `known`, and have more."""
    return 0 < len(known) < len(messages) and all(map(_says_the_same, messages, known))


def _says_the_same(message: dict[str, Any], known: dict[str, Any]) -> bool:
    """Whether a client's `message` equals the `known` one; the client may leave out reasoning."""
    theirs, ours = _what_it_says(message), _what_it_says(known)
    if REASONING not in theirs:
        ours.pop(REASONING, None)
    return theirs == ours


def _what_it_says(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what clients add, drop or rewrite: empty fields, and of answers all but text and calls."""
    named = {name: value for name, value in message.items() if value not in (None, [], {}, "")}
    if named.get("role") != "assistant":
        return named
    said = {name: named[name] for name in ("role", "content", REASONING) if name in named}
    return said | {"calls": [_called(call) for call in named.get("tool_calls", [])]}


def _called(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    return (function.get("name"), function.get("arguments")) if isinstance(function, dict) else call


Recorder = Callable[[Sequence[Choice]], None]
"""Stores the finished choices of a request."""


def recorder_of_chat(sessions: Sessions, session: Session, parsed: ParsedRequest, node: Trajectory | None) -> Recorder:
    """A function that records a chat that continues `node`; RequestError if the conversation has no room."""
    request = parsed.request
    assert isinstance(request, ChatRequest)
    inputs = request.template_inputs
    messages = [_without_empty(message) for message in request.template_messages]
    of_request, of_each = count_bytes([messages, inputs]), sys.getsizeof(messages)
    sessions.check_room(session, parsed, of_request + of_each * len(parsed.sequences))
    keep_context(parsed, [node])

    def record(choices: Sequence[Choice]) -> None:
        for choice in choices:
            answer = _without_empty(for_template(choice.message))
            num_bytes = of_each + sys.getsizeof(choice.text) + (of_request if choice is choices[0] else 0)
            sessions.record(session, node, choice, [*messages, answer], inputs, num_bytes)

    return record


def recorder_of_tokens(sessions: Sessions, session: Session, parsed: ParsedRequest) -> Recorder:
    """A function that records completions, each after the node that its prompt continues; RequestError if full."""
    sessions.check_room(session, parsed)
    nodes = [sessions.find_tokens(session, prompt) for prompt in parsed.prompts]
    keep_context(parsed, nodes)

    def record(choices: Sequence[Choice]) -> None:
        for place, choice in enumerate(choices):
            sessions.record(session, nodes[place * len(nodes) // len(choices)], choice, [])

    return record


def keep_context(parsed: ParsedRequest, nodes: list[Trajectory | None]) -> None:
    """Starts answers from cached keys and values of the nodes that they continue, and keeps theirs cached."""
    for place, sequence in enumerate(parsed.sequences):
        node = nodes[place * len(nodes) // len(parsed.sequences)]
        sequence.is_kept = True
        sequence.begins_from = None if node is None else node.sequence
