"""The nouns of a rollout: a prompt, and the sequences sampled from it."""

from dataclasses import dataclass, field
from typing import Any

from hybrid_engine.generation.options import GenerationOptions

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
