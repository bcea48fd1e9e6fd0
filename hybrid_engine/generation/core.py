"""The nouns of generation: prompt, sequence, what a step admits and draws, plan, request and result of a rollout.

Every file of this room uses them. This one imports no other room.
M image tokens of a prompt, E hidden size.
"""

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from hybrid_engine.containers.towers import ImageInputs
from hybrid_engine.generation.options import GenerationOptions
from hybrid_engine.ops import SamplingOptions

PENDING = -1
_FINISHED = GenerationOptions(max_new_tokens=1)


@dataclass(eq=False)
class Routes:
    """Recorded experts of consecutive tokens, in parts `[n, L, k]` on the host."""

    parts: list[torch.Tensor] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, first: int, part: torch.Tensor) -> None:
        """Adds the experts of the tokens from `first` on; those of tokens that were fed before stay."""
        assert first <= self.num_tokens, f"{first=} {self.num_tokens=}"
        new = part[self.num_tokens - first :]
        if len(new):
            self.parts.append(new)
            self.num_tokens += len(new)


@dataclass(eq=False)
class Prompt:
    """Token ids of one prompt, and its KV blocks while some of its samples have not started."""

    tokens: list[int]
    num_waiting: int = 0  # samples that have not started
    blocks: list[int] = field(default_factory=list)  # prefilled blocks that samples fork from; may be empty
    state_slot: int = -1  # slot of its states, kept with the blocks; -1: none
    logits: Any = None  # [V] next-token logits after the prompt, kept with the blocks
    num_tops: int | None = None  # number of likeliest tokens reported at each position; None: the prompt is not scored
    scores: Any = None  # `TokenScores` of its tokens, if requested
    routes: Routes = field(default_factory=Routes)  # experts of its tokens, if requested
    salt: bytes = b""  # prompts share keys and values only with those of the same salt
    block_keys: list[bytes] | None = None  # `block_keys` of tokens and salt, if prefixes are cached
    num_reused: int = 0  # tokens whose keys and values existed before its prefill
    images: ImageInputs | None = None  # the images that its image tokens stand for
    features: Any = None  # [M, E (1 + F)] of its image tokens, while the weights are gathered

    def is_like(self, other: "Prompt") -> bool:
        """Whether both have the same tokens and images, and as many scores."""
        pixels, of_other = (prompt.images and prompt.images.digest for prompt in (self, other))
        return (self.tokens, self.num_tops, pixels) == (other.tokens, other.num_tops, of_other)

    @property
    def is_unscored(self) -> bool:
        """Whether scores of its tokens are requested and it does not have them."""
        return self.num_tops is not None and self.scores is None

    def with_own_blocks(self) -> "Prompt":
        """Returns a copy of the prompt for samples that do not share blocks with the samples of this one."""
        return replace(self, num_waiting=0, blocks=[], state_slot=-1, logits=None)


@dataclass(eq=False)
class Sequence:
    """One sample of a prompt. `tokens` and `logprobs` hold the response, end-of-sequence token included.

    A token that was drawn and has not reached the host yet is `PENDING` in `tokens` and has no entry in `logprobs`.
    """

    prompt: Prompt
    row: int  # row of the output
    options: GenerationOptions
    key: int = 0  # int64 key of this sample's noise
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)  # its block table, in order
    state_slot: int = -1  # slot of its states in the KV workspace; -1: none
    slot: int = -1  # row in the device's tables; -1: not running
    is_kept: bool = False  # its blocks are kept after it finishes, until others need them
    num_late: int = 0  # tokens that were fed after its end was drawn, before the host had read it; the first is the end
    begins_from: "Sequence | None" = None  # kept sequence whose tokens are a prefix of the prompt
    processors: Any = None  # logits processors, if its rules read its tokens; built at its first draw
    tops: list[list[tuple[int, float]]] = field(default_factory=list)  # likeliest tokens at each position, if requested
    supports: list[bytes] = field(default_factory=list)  # records of `ops/support_log_prob.py`, if requested
    routes: Routes = field(default_factory=Routes)  # experts of the tokens of the response, if requested
    share: str = ""  # name of the client's share of the places, if client keys have names
    adapter: str | None = None  # peft adapter in a live batch that serves several; None: base model, or fused adapter
    error: Exception | None = None  # error of one of its own rules, which ended it
    finish_reason: str | None = None  # "stop": it drew an end; "length": it has all its new tokens

    def __len__(self) -> int:
        """Number of tokens of prompt and response."""
        return len(self.prompt.tokens) + len(self.tokens)

    def let_go(self) -> None:
        """Drops everything of a finished sequence that only drawing and reporting needed; tokens and blocks stay."""
        self.prompt, self.options = Prompt(self.prompt.tokens, num_reused=self.prompt.num_reused), _FINISHED
        self.processors = self.begins_from = None
        self.tops, self.supports = [], []

    @property
    def most_fed(self) -> int:
        """Number of tokens that the model is fed if the sequence gets all its new tokens; the last one is never fed."""
        return len(self.prompt.tokens) + self.options.max_new_tokens - 1

    @property
    def num_fed(self) -> int:
        """Number of tokens whose keys and values exist when the sequence has finished: all but the last one drawn."""
        return len(self) - 1


@dataclass(frozen=True)
class Copy:
    """A copy of the first `num_tokens` keys and values of block `source` to block `target`."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True)
class Prefill:
    """Tokens to run through the model into `blocks`, for a prompt that samples fork from or for one sequence."""

    owner: Prompt | Sequence
    tokens: list[int]  # the owner's tokens from its first one on
    blocks: list[int]
    first: int  # tokens before this index are in the blocks already
    last: int  # tokens from this index on are fed in a later turn
    state_slot: int = -1  # slot of the owner's states; -1: the model's layers have none

    @property
    def prompt(self) -> Prompt:
        """The prompt whose tokens `tokens` begins with."""
        return self.owner if isinstance(self.owner, Prompt) else self.owner.prompt

    def note_routes(self, experts: torch.Tensor) -> None:
        """Stores the experts `[n, L, k]` that its tokens took, unless they are known from an earlier computation."""
        prompt, num_prompt = self.prompt, len(self.prompt.tokens)
        num_before = max(0, num_prompt - self.first)
        prompt.routes.add(min(self.first, num_prompt), experts[:num_before])
        if isinstance(self.owner, Sequence):
            self.owner.routes.add(max(0, self.first - num_prompt), experts[num_before:])

    @property
    def is_last(self) -> bool:
        """Whether this prefill ends with the owner's last token, so that its next token can be drawn."""
        return self.last == len(self.tokens)


@dataclass
class Admission:
    """Work admitted in one turn: prefills run first, then copies, then each sequence draws its next token."""

    prefills: list[Prefill] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    state_copies: list[tuple[int, int]] = field(default_factory=list)
    """Source and target slot of the states of each fork."""
    sequences: list[Sequence] = field(default_factory=list)


class Drawn(NamedTuple):
    """The tokens drawn for the rows of a turn."""

    tokens: list[int]
    logprobs: list[float]
    ends: list[int]  # the rows whose token ends their sequence
    tops: list[list[tuple[int, float]]] | None = None  # likeliest tokens of each row; None if no row requests them
    supports: list[bytes] | None = None  # record of each row; None if no row requests them
    routes: torch.Tensor | None = None  # [S, L, k]: experts of the token fed before the draw; None: not recorded


@dataclass(frozen=True)
class Draw:
    """Drawn tokens on their way to the host; `read()` waits for them."""

    read: Callable[[], Drawn]


@dataclass(frozen=True, kw_only=True)
class UserFunctions:
    """The user's functions, in the form that transformers takes."""

    logits_processor: LogitsProcessorList
    prefix_allowed_tokens_fn: Any
    stopping_criteria: StoppingCriteriaList
    streamer: Any
    is_min_new: bool = False
    """Whether `min_new_tokens` was passed."""


@dataclass(frozen=True, kw_only=True)
class GenerateCall:
    """The arguments of one call of `generate()` on this process, as the caller passed them; nothing is checked yet."""

    input_ids: torch.Tensor | None
    """`[B, P]`, padded on the left."""
    attention_mask: torch.Tensor | None = None
    """`[B, P]`, 1 for tokens; None: the padding id tells."""
    generation_config: GenerationConfig | None = None
    seed: int | None = None
    """Seed of the sampling noise; None draws one."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword options, of transformers and ours; they override `generation_config`."""
    in_sequences: bool = False
    """Whether each row must be a sequence of its own, even if the model's own `generate()` runs: `generate_async()`."""

    @property
    def caller(self) -> str:
        """The method that was called, for errors."""
        return "generate_async()" if self.in_sequences else "generate()"


@dataclass(frozen=True, kw_only=True)
class LocalRequest:
    """A checked `GenerateCall` of this process; the local requests of all processes make a `Request`."""

    input_ids: torch.Tensor
    """`[B, P]` int64."""
    mask: torch.Tensor
    """`[B, P]` bool, True for tokens."""
    prompts: list[list[int]]
    """The tokens of each row that its mask selects."""
    images: list[ImageInputs | None]
    """The images of each row."""
    options: GenerationOptions
    """Options of the whole rollout."""
    of_prompts: list[GenerationOptions]
    """Options of each prompt."""
    only_native: str | None
    """Name of an option that only containers serve, or None."""
    functions: UserFunctions | None
    """Functions of the user that require rows to stay in step, or None."""
    fallback: str | None
    """Why the model's own `generate()` would run; None if containers serve the request."""
    kwargs: dict[str, Any]
    """Keyword arguments of the model's own `generate()`."""
    is_drawn: bool = False
    """Whether the model's own `generate()` answers row by row, with each token drawn by the row's own options."""

    @property
    def is_native(self) -> bool:
        """Whether containers can serve this request."""
        return self.fallback is None

    @property
    def is_sampled(self) -> bool:
        """Whether any token is drawn at random."""
        return any(options.do_sample for options in (self.options, *self.of_prompts))


@dataclass(frozen=True)
class RolloutPlan:
    """A rollout that fits into the available memory."""

    sequences: list[Sequence]
    own: slice  # this process's part of `sequences`; the rest are of processes that share the model
    options: GenerationOptions
    """Options of the whole rollout: samples of each prompt, padding, the result. Each sequence has options, too."""
    num_blocks: int
    block_size: int
    max_running: int
    num_state_slots: int = 0
    """Slots for the states of sequences; 0: the model's layers have none."""
    longest_later: int = 1
    """Number of tokens that are fed of the longest sequence added later."""
    caches_prefixes: bool = False
    """Whether prompts that begin alike share the blocks of their beginning, at any time of the rollout."""
    max_prefill_tokens: int | None = None
    """Tokens of prompts that enter in one pass, unless one prompt alone has more; None: MAX_PREFILL_TOKENS."""

    @property
    def longest(self) -> int:
        """Number of tokens that are fed of the longest sequence."""
        return max((sequence.most_fed for sequence in self.sequences), default=self.longest_later)

    @property
    def sampling(self) -> SamplingOptions:
        """Sampling options of the decode steps; sequences with other options are drawn after the steps."""
        return self.sequences[0].options.sampling if self.sequences else self.options.sampling

    @property
    def records_routing(self) -> bool:
        """Whether the experts that tokens take are recorded."""
        return any(options.rules.record_routing for options in (self.options, *(s.options for s in self.sequences)))

    @property
    def num_columns(self) -> int:
        """Number of blocks of the longest sequence: the columns of block tables."""
        return -(-self.longest // self.block_size)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A rollout that passed every check on all processes."""

    local: LocalRequest
    plan: RolloutPlan | None
    """The plan on containers; None if the model's own `generate()` runs."""
    seed: int | None
    """Seed of the model's own `generate()`; None leaves torch's generator unchanged."""
    sequences: list[Sequence] = field(default_factory=list)
    """Rows that the model's own `generate()` answers one by one; empty: it answers all of them at once."""


@dataclass
class CaptureStats:
    """Time and results of recording."""

    captures: int = 0
    seconds: float = 0.0
    played: int = 0
    """Number of steps played from a tape; graphs are not counted."""


@dataclass
class RolloutResult:
    """The output of a rollout and its costs."""

    output: Any
    num_samples: int
    generated_tokens: int = 0
    preemptions: int = 0
    reused_tokens: int = 0
    """Tokens of prompts whose keys and values an earlier prompt had computed."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    captures: CaptureStats = field(default_factory=CaptureStats)

    def figures(self) -> dict[str, float]:
        """The costs by the names of `latency_stats()`."""
        return {
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "graph_captures": self.captures.captures,
            "graph_capture_seconds": self.captures.seconds,
            "num_samples": self.num_samples,
            "generated_tokens": self.generated_tokens,
            "preemptions": self.preemptions,
            "reused_tokens": self.reused_tokens,
        }


def prompt_digest(tokens: list[int], images: ImageInputs | None = None) -> bytes:
    """Returns a digest that identifies a prompt by its tokens and the pixels of its images."""
    pixels = b"" if images is None else images.digest
    return blake2b(torch.tensor(tokens).numpy().tobytes() + pixels, digest_size=16).digest()


def block_keys(tokens: list[int], block_size: int, salt: bytes) -> list[bytes]:
    """Returns a digest for each full block of `tokens`, of its tokens, all before them and `salt`."""
    keys, key = [], salt
    for end in range(block_size, len(tokens) + 1, block_size):
        key = blake2b(key + array("q", tokens[end - block_size : end]).tobytes(), digest_size=16).digest()
        keys.append(key)
    return keys


def sample_keys(seed: int, digests: list[bytes], earlier: list[bytes], num_samples: int) -> list[int]:
    """Returns int64 noise keys, `num_samples` for each prompt in turn.

    `earlier` has one digest for each sample of the lower ranks.
    """
    counts = Counter(earlier)
    keys = []
    for digest in digests:
        keys += [_key(seed, digest, counts[digest] + index) for index in range(num_samples)]
        counts[digest] += num_samples
    return keys


def _key(seed: int, digest: bytes, index: int) -> int:
    name = digest + seed.to_bytes(8, "little", signed=True) + index.to_bytes(8, "little")
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little", signed=True)


def rank_seed(seed: int, rank: int) -> int:
    """Returns rank `rank`'s seed for noise that is not drawn by keys; rank 0's is `seed` itself."""
    return seed if rank == 0 else _key(seed, b"", rank)
