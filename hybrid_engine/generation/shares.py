"""What processes tell each other before a rollout.

All of them: whether they can start, who generates, and what names the noise of their samples. Those that share one
model, so that all run it in the same turns: their prompts and options.
"""

from dataclasses import dataclass

from hybrid_engine.distributed.verdict import Problem
from hybrid_engine.generation.batching.noise import sample_keys
from hybrid_engine.generation.options import GenerationOptions


@dataclass(frozen=True, kw_only=True)
class Bid:
    """What one process brings to a rollout of all."""

    problem: Problem | None
    """Why it cannot start."""
    fallback: str | None
    """Why only the model's own `generate()` can run there."""
    seed: int | None
    """The seed of the noise; None where this process draws none."""
    digests: list[bytes]
    """Names of its prompts."""
    num_samples: int
    """Samples of each prompt."""
    only_native: str | None
    """An option that only containers serve; None where this process has none."""


def check_prompts_somewhere(bids: list[Bid]) -> None:
    """Raises ValueError where no process has a prompt."""
    if not any(bid.digests for bid in bids):
        raise ValueError("generate(): input_ids is empty on every process; pass at least one prompt to one of them")


def reason_to_fall_back(bids: list[Bid], rank: int) -> str | None:
    """Why the model's own `generate()` runs on every process; None where the containers do. `rank` is this one's."""
    reasons = {other: bid.fallback for other, bid in enumerate(bids) if bid.fallback is not None}
    if not reasons or rank in reasons:
        return reasons.get(rank)
    other, reason = next(iter(reasons.items()))
    return f"rank {other}: {reason}"


def check_only_native(bids: list[Bid], fallback: str) -> None:
    """Raises ValueError where a process wants what the model's own `generate()`, which has to run, does not serve."""
    for rank, bid in enumerate(bids):
        if bid.only_native is not None:
            raise ValueError(
                f"{bid.only_native} of rank {rank} is served by inference containers only, and the model's own "
                f"generate() has to run: {fallback}; leave one of them out"
            )


def choose_seed(bids: list[Bid]) -> int:
    """The seed of the first process that draws noise; 0 where none does."""
    return next((bid.seed for bid in bids if bid.seed is not None), 0)


def keys_of(bids: list[Bid], rank: int) -> list[int]:
    """Noise keys of the samples of process `rank`, prompt by prompt."""
    earlier = [digest for bid in bids[:rank] for digest in bid.digests for _ in range(bid.num_samples)]
    return sample_keys(choose_seed(bids), bids[rank].digests, earlier, bids[rank].num_samples)


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one process brings to a model that several share: how it wants its prompts continued, and with what."""

    can_start: bool
    prompts: list[list[int]]
    options: GenerationOptions | None
    """The options that this process asks for; None where it cannot start."""
    of_prompts: list[GenerationOptions]
    """Those of each of its prompts."""
    is_native: bool
    """Whether containers run the rollout."""
    spare_bytes: int
    """Free memory for the KV workspace."""
    training_bytes: int
    """What training will take of it."""


def check_agreement(shares: list[Share], has_same_prompts: bool) -> None:
    """Raises ValueError where these processes, which can all start, cannot run one rollout together."""
    first = shares[0]
    for rank, share in enumerate(shares):
        if share.options != first.options:
            raise ValueError(
                f"generate(): rank {rank} of a tensor-parallel group has other options than its first rank, "
                f"{share.options} and {first.options}; pass the same options on every process"
            )
        if has_same_prompts and share.of_prompts != first.of_prompts:
            raise ValueError(
                f"generate(): rank {rank} of a tensor-parallel group has other row_options than its first rank; pass "
                "the same on every process"
            )
        if has_same_prompts and share.prompts != first.prompts:
            raise ValueError(
                f"generate(): rank {rank} of a tensor-parallel group has other prompts than its first rank; pass "
                "the same input_ids and attention_mask on every process"
            )
