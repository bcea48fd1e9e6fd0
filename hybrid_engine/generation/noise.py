"""Names for the noise of samples, so that a sample depends on (seed, prompt, index) and on nothing else.

The k-th sample of a prompt has index k, counted over the whole batch and over the processes in the order
of their ranks: a batch split over processes draws what it would draw in one, and equal prompts on
different rows or ranks draw different samples.
"""

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist


def prompt_digest(tokens: list[int]) -> bytes:
    """Names a prompt by its content."""
    return blake2b(torch.tensor(tokens).numpy().tobytes(), digest_size=16).digest()


def sample_keys(seed: int, digests: list[bytes], earlier: list[bytes], num_samples: int) -> list[list[int]]:
    """int64 keys, `num_samples` for each prompt; `earlier` are the digests of the ranks before this one."""
    counts = Counter(earlier)
    keys = []
    for digest in digests:
        first = counts[digest] * num_samples
        counts[digest] += 1
        keys.append([_key(seed, digest, first + index) for index in range(num_samples)])
    return keys


def _key(seed: int, digest: bytes, index: int) -> int:
    name = digest + seed.to_bytes(8, "little", signed=True) + index.to_bytes(8, "little")
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little", signed=True)


def rank_seed(seed: int, rank: int) -> int:
    """A seed of rank `rank`'s own for noise that is not drawn by keys; rank 0's is `seed` itself."""
    return seed if rank == 0 else _key(seed, b"", rank)


def agree_on_keys(
    prompts: list[list[int]],
    error: str | None,
    seed: int,
    num_samples: int,
    world_size: int,
    ranks: Sequence[int] | None = None,
) -> list[list[int]]:
    """Noise keys of this process's samples, or of those of `ranks`, by prompt; collective, one small exchange.

    The seed is rank 0's. `error`, one rank's reason not to start, is raised as ValueError on all, so that none
    waits for a rank that has left.
    """
    mine = (error, seed, [prompt_digest(prompt) for prompt in prompts])
    everyone: list[Any] = [mine]
    rank = 0
    if world_size > 1:
        everyone, rank = [None] * world_size, dist.get_rank()
        dist.all_gather_object(everyone, mine)
    for other, (message, _, _) in enumerate(everyone):
        if message is not None:
            raise ValueError(message if other == rank else f"rank {other}: {message}")
    keys = []
    for other in [rank] if ranks is None else ranks:
        earlier = [digest for _, _, digests in everyone[:other] for digest in digests]
        keys += sample_keys(everyone[0][1], everyone[other][2], earlier, num_samples)
    return keys
