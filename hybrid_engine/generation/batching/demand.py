"""How many KV blocks of what size a rollout wants: the one formula, of plans of rollouts and of memory."""

from collections.abc import Sequence
from typing import NamedTuple

from hybrid_engine.config import HybridEngineConfig

# Rows decoded at once unless the config says otherwise. 256 answers of 128 tokens from a 16M-parameter Llama
# took 12.4, 9.5, 8.5 and 10.6 s at 32, 64, 128 and 256 rows (two Zen 5 cores, torch 2.13): beyond 64 the
# KV workspace doubles for little. The number for a GPU is a guess.
MAX_RUNNING = {"cpu": 64, "cuda": 256}
# On a CPU automatic blocks hold a whole sequence, which makes the cache contiguous; rounded up to this many tokens.
BLOCK_GRAIN = 16
# Elsewhere attention reads through the block table for nothing, and small blocks are shared and waste little.
BLOCK_SIZE = 64


class Demand(NamedTuple):
    """What a rollout asks of a KV workspace."""

    block_size: int
    """Tokens of a block."""
    max_running: int
    """Sequences that decode at once."""
    wanted: int
    """Blocks with which nothing waits for blocks."""
    needed: int
    """Blocks without which it cannot run."""


def count_blocks(
    lengths: Sequence[int],
    longest: int,
    num_prompts: int,
    device_type: str,
    config: HybridEngineConfig,
    *,
    is_in_step: bool = False,
) -> Demand:
    """The blocks of sequences of `num_prompts` prompts.

    Args:
        lengths: tokens of each sequence before anything is drawn, of which there is one.
        longest: tokens that are fed of the longest one.
        num_prompts: those that samples share count once.
        device_type: where the model computes.
        config: what a user has set.
        is_in_step: whether all run at once.
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
