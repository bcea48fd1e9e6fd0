"""What a turn is told to do before it decodes: prefills, copies, and the sequences that draw their next token then."""

from dataclasses import dataclass, field

from hybrid_engine.generation.batching.sequence import Prompt, Sequence


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
