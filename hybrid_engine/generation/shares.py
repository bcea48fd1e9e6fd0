"""What processes that share one model tell each other before a rollout, so that all run it in the same turns."""

from dataclasses import dataclass

from hybrid_engine.generation.options import GenerationOptions


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one process brings: its prompts, how it wants them continued, and the memory it can give."""

    error: str | None
    """Why it cannot start."""
    seed: int
    prompts: list[list[int]]
    options: GenerationOptions | None
    """None where there is an error."""
    is_native: bool
    """Whether containers run the rollout."""
    spare_bytes: int
    """Free memory for the KV workspace."""
    training_bytes: int
    """What training will take of it."""


def find_disagreement(shares: list[Share], has_same_prompts: bool) -> str | None:
    """Why these processes cannot run one rollout together; None where they can, or where one says so itself."""
    first = shares[0]
    if any(share.error is not None for share in shares):
        return None
    for rank, share in enumerate(shares):
        if share.options != first.options or share.is_native != first.is_native:
            return (
                f"generate(): rank {rank} of a tensor-parallel group has other options than its first rank, "
                f"{share.options} and {first.options}; pass the same options on every process"
            )
        if has_same_prompts and share.prompts != first.prompts:
            return (
                f"generate(): rank {rank} of a tensor-parallel group has other prompts than its first rank; pass "
                "the same input_ids and attention_mask on every process"
            )
    return None
