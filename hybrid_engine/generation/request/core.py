"""The nouns of a rollout: a prompt, and the sequences sampled from it."""

from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch

from hybrid_engine.generation.request.options import GenerationOptions

PENDING = -1
_FINISHED = GenerationOptions(max_new_tokens=1)


@dataclass(eq=False)
class Prompt:
    """Token ids of one prompt, and its KV blocks while samples of it still wait to start."""

    tokens: list[int]
    num_waiting: int = 0  # samples that have not started
    blocks: list[int] = field(default_factory=list)  # the prefilled blocks that samples fork from; empty: none
    logits: Any = None  # [V] next-token logits after the prompt, kept beside the blocks
    num_tops: int | None = None  # likeliest tokens reported at each of its positions; None: it is not scored
    scores: Any = None  # `TokenScores` of its tokens, where they are wanted

    def with_own_blocks(self) -> "Prompt":
        """The same prompt for samples that share no blocks with those of this one."""
        return Prompt(self.tokens, num_tops=self.num_tops, scores=self.scores)


@dataclass(eq=False)
class Sequence:
    """One sample of a prompt. `tokens` and `logprobs` are of the response, end-of-sequence token included.

    A token that was drawn and has not come back from the device yet is there as `PENDING`, without a log-probability.
    """

    prompt: Prompt
    row: int  # of the output
    options: GenerationOptions
    key: int = 0  # names this sample's noise, int64
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)  # its block table, in order
    slot: int = -1  # its row in the tables of the device while it runs; -1: it does not run
    is_kept: bool = False  # its blocks stay when it finishes, as long as nobody needs them
    begins_from: "Sequence | None" = None  # a kept one, whose tokens its prompt begins with
    processors: Any = None  # of its logits, where its rules read its tokens; made when it is first drawn for
    tops: list[list[tuple[int, float]]] = field(default_factory=list)  # likeliest tokens at each position, where wanted
    share: str = ""  # of the places: that of the client's key, where clients have keys with names
    adapter: str | None = None  # peft's, in a live batch that serves several; None: the base model, or what is fused
    error: Exception | None = None  # of a rule of its own, which ends it
    finish_reason: str | None = None  # "stop": drew what ends it; "length": ran out of new tokens

    def __len__(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt.tokens) + len(self.tokens)

    def let_go(self) -> None:
        """Lets go, of one that has finished, all that only drawing and reporting needed; tokens and blocks stay."""
        self.prompt, self.options = Prompt(self.prompt.tokens), _FINISHED
        self.processors = self.begins_from = None
        self.tops = []

    @property
    def most_fed(self) -> int:
        """Tokens that the model is fed where it gets all its new tokens; the last one drawn never is."""
        return len(self.prompt.tokens) + self.options.max_new_tokens - 1

    @property
    def num_fed(self) -> int:
        """Tokens whose keys and values are there when it has finished: the last one drawn was never needed."""
        return len(self) - 1


def prompt_digest(tokens: list[int]) -> bytes:
    """Names a prompt by its content."""
    return blake2b(torch.tensor(tokens).numpy().tobytes(), digest_size=16).digest()


def sample_keys(seed: int, digests: list[bytes], earlier: list[bytes], num_samples: int) -> list[int]:
    """int64 keys, `num_samples` for each prompt in turn; `earlier` has a digest for each sample of the ranks before."""
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
    """A seed of rank `rank`'s own for noise that is not drawn by keys; rank 0's is `seed` itself."""
    return seed if rank == 0 else _key(seed, b"", rank)


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
    tokens: list[int]  # of the owner, from its first one on
    blocks: list[int]
    first: int  # those before it are in the blocks already
    last: int  # those from it on are fed in a later turn

    @property
    def prompt(self) -> Prompt:
        """The prompt whose tokens are the first of `tokens`."""
        return self.owner if isinstance(self.owner, Prompt) else self.owner.prompt

    @property
    def is_last(self) -> bool:
        """Whether the owner's next token is drawn from what this feeds."""
        return self.last == len(self.tokens)


@dataclass
class Admission:
    """What enters now. Prefills come first, then copies, then every sequence draws its next token."""

    prefills: list[Prefill] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
