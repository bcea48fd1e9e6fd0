"""What a rollout is to do: one process's wishes, and the request that all processes have agreed on."""

from dataclasses import dataclass, field
from typing import Any

import torch

from hybrid_engine.generation.batching.plan import Plan
from hybrid_engine.generation.batching.sequence import Sequence
from hybrid_engine.generation.options import GenerationOptions
from hybrid_engine.generation.sampling.in_step import UserFunctions


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """A request of this process, checked."""

    input_ids: torch.Tensor
    """`[B, P]` int64."""
    mask: torch.Tensor
    """`[B, P]` bool, True for tokens."""
    prompts: list[list[int]]
    """The tokens of each row that its mask marks."""
    options: GenerationOptions
    """What holds for the whole rollout."""
    of_prompts: list[GenerationOptions]
    """What holds for each prompt."""
    only_native: str | None
    """An option that only containers serve."""
    functions: UserFunctions | None
    """The user's, for which rows stay in step."""
    fallback: str | None
    """Why the model's own `generate()` would run; None where containers do."""
    kwargs: dict[str, Any]
    """What that `generate()` takes."""
    is_drawn: bool = False
    """Whether that `generate()` answers row by row, each token drawn by the row's own options."""

    @property
    def is_native(self) -> bool:
        """Whether containers can serve what this process asks for."""
        return self.fallback is None

    @property
    def is_sampled(self) -> bool:
        """Whether any token is drawn at random."""
        return any(options.do_sample for options in (self.options, *self.of_prompts))


@dataclass(frozen=True, kw_only=True)
class Request:
    """A rollout that passed every check on all processes."""

    wishes: Wishes
    plan: Plan | None
    """None where the model's own `generate()` runs."""
    seed: int | None
    """Of that `generate()`; None leaves torch's generator as it is."""
    sequences: list[Sequence] = field(default_factory=list)
    """The rows that the model answers one by one; empty: it takes all of them at once."""
