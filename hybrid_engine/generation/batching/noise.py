"""Names for the noise of samples, so that a sample depends on (seed, prompt, index) and on nothing else.

The k-th sample of a prompt has index k, counted over the whole batch and over the processes in the order
of their ranks: a batch split over processes draws what it would draw in one, and equal prompts on
different rows or ranks draw different samples.
"""

from collections import Counter
from hashlib import blake2b

import torch


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
