"""Number and size of the KV blocks that a rollout needs: the one formula, for plans of rollouts and of memory."""

from collections.abc import Sequence
from typing import NamedTuple

from hybrid_engine.config import HybridEngineConfig

# Rows decoded at once unless the config sets another number. 256 answers of 128 tokens from a 16M-parameter Llama took
# 12.4, 9.5, 8.5 and 10.6 s at 32, 64, 128 and 256 rows (two Zen 5 cores, torch 2.13): beyond 64 the KV workspace
# doubles for little. The number for a GPU is a guess.
MAX_RUNNING = {"cpu": 64, "cuda": 256}
# On a CPU an automatic block holds a whole sequence, which makes the cache contiguous; rounded up to this many tokens.
BLOCK_GRAIN = 16
# On other devices attention reads through the block table at no cost, and small blocks are shared and waste little.
BLOCK_SIZE = 64


class Demand(NamedTuple):
    """The KV blocks that a rollout asks for."""

    block_size: int
    """Number of tokens of a block."""
    max_running: int
    """Number of sequences that decode at once."""
    wanted: int
    """Number of blocks with which no sequence waits for blocks."""
    needed: int
    """Number of blocks without which the rollout cannot run."""


def count_blocks(
    lengths: Sequence[int],
    longest: int,
    num_prompts: int,
    device_type: str,
    config: HybridEngineConfig,
    *,
    is_in_step: bool = False,
) -> Demand:
    """Counts the blocks of the sequences of `num_prompts` prompts.

    Args:
        lengths: number of tokens of each sequence before its first draw; not empty.
        longest: number of tokens that are fed of the longest sequence.
        num_prompts: a prompt shared by several samples counts once.
        device_type: device that the model computes on.
        config: the user's settings.
        is_in_step: whether all sequences run at once.
    """
    automatic = -(-longest // BLOCK_GRAIN) * BLOCK_GRAIN if device_type == "cpu" else BLOCK_SIZE
    block_size = config.kv_block_size or automatic
    most_running = len(lengths) if is_in_step else config.max_running or MAX_RUNNING.get(device_type, 256)
    max_running = min(most_running, len(lengths))
    per_sequence = -(-longest // block_size)
    kept = 0
    if num_prompts < len(lengths):  # prompts stay until their last sample has started
        kept_prompts = min(num_prompts, -(-max_running * num_prompts // len(lengths)) + 1)
        kept = kept_prompts * -(-max(lengths) // block_size)
    wanted = max_running * per_sequence + kept
    return Demand(block_size, max_running, wanted, wanted if is_in_step else per_sequence + (1 if kept else 0))
