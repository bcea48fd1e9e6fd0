"""Plans a rollout: its sequences, number and size of KV blocks, and rows at once. All checks come before any work.

`count_blocks` is the one formula for the KV blocks of a rollout, also for the memory plan of a run.
"""

from collections.abc import Collection
from typing import NamedTuple

import torch

from hybrid_engine.config import HybridEngineConfig
from hybrid_engine.containers.model import InferenceModel
from hybrid_engine.generation.core import Prompt, RolloutPlan, Sequence
from hybrid_engine.generation.memory import usable_memory_bytes
from hybrid_engine.generation.options import GenerationOptions

# Host memory of a sample: the Sequence with its lists, and for each token its id and log-probability, as Python objects
# and in the results.
BYTES_PER_SEQUENCE = 1024
BYTES_PER_TOKEN = 80
# Rows decoded at once unless the config sets another number. 256 answers of 128 tokens from a 16M-parameter Llama took
# 12.4, 9.5, 8.5 and 10.6 s at 32, 64, 128 and 256 rows (two Zen 5 cores, torch 2.13): beyond 64 the KV workspace
# doubles for little. The number for a GPU is a guess.
MAX_RUNNING = {"cpu": 64, "cuda": 256}
# On a CPU an automatic block holds a whole sequence, which makes the cache contiguous; rounded up to this many tokens.
BLOCK_GRAIN = 16
# On other devices attention reads through the block table at no cost, and small blocks are shared and waste little.
BLOCK_SIZE = 64


def build_sequences(
    prompts: list[list[int]], options: list[GenerationOptions], num_samples: int, shares_equal: bool = False
) -> list[Sequence]:
    """Builds `num_samples` sequences for each prompt, with its `options`; sample g of prompt b has row `b * G + g`.

    With `shares_equal`, equal prompts that follow each other are prefilled once, because trainers repeat a row for each
    sample of its group. Noise keys are set later.
    """
    sequences: list[Sequence] = []
    prompt = None
    for tokens, of_prompt in zip(prompts, options, strict=True):
        num_tops = of_prompt.rules.prompt_logprobs
        if prompt is None or not shares_equal or (prompt.tokens, prompt.num_tops) != (tokens, num_tops):
            prompt = Prompt(tokens, num_tops=num_tops)
        sequences += [Sequence(prompt, len(sequences) + g, of_prompt) for g in range(num_samples)]
    return sequences


def check_lengths(
    prompts: list[list[int]],
    options: list[GenerationOptions],
    config: HybridEngineConfig,
    max_positions: int | None,
) -> None:
    """Raises ValueError if a prompt and its response exceed a limit other than memory.

    `options` has one entry for each prompt; `max_positions` is None for a model without such a limit.
    """
    pairs = zip(map(len, prompts), (of_prompt.max_new_tokens for of_prompt in options), strict=True)
    longest, max_new_tokens = max(pairs, key=sum, default=(0, 1))
    total = longest + max_new_tokens
    if max_positions is not None and total - 1 > max_positions:  # the last token drawn is never fed
        raise ValueError(
            f"max_new_tokens={max_new_tokens} with a prompt of {longest} tokens needs {total - 1} positions, "
            f"more than the model's max_position_embeddings={max_positions}; lower it or shorten the prompt"
        )
    if total > config.max_out_tokens:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} with a prompt of {longest} tokens makes {total}, more than "
            f"max_out_tokens={config.max_out_tokens}; lower it or raise max_out_tokens"
        )


def check_result_fits(prompts: list[list[int]], options: list[GenerationOptions]) -> None:
    """Raises ValueError if the bookkeeping and results of all samples exceed this machine's free memory."""
    num_samples = options[0].num_return_sequences if options else 1
    rows = len(prompts) * num_samples
    most_new = max((of_prompt.max_new_tokens for of_prompt in options), default=0)
    width = max(map(len, prompts), default=0) + most_new
    wanted = rows * (BYTES_PER_SEQUENCE + width * BYTES_PER_TOKEN)
    free = usable_memory_bytes(torch.device("cpu"))
    if wanted > free:
        raise ValueError(
            f"num_return_sequences={num_samples} of {len(prompts)} prompts with "
            f"max_new_tokens={most_new} makes {rows} sequences, whose tokens and log-probabilities take "
            f"about {wanted:,} bytes, and {free:,} are free; ask for fewer at a time"
        )


def plan_rollout(
    model: InferenceModel,
    sequences: list[Sequence],
    options: GenerationOptions,
    config: HybridEngineConfig,
    spare_bytes: int,
    num_reserved: int = 0,
    training_bytes: int = 0,
    own: slice = slice(None),
    is_in_step: bool = False,
) -> RolloutPlan:
    """Sizes the KV workspace from the demand of `sequences` and the memory available for it, `spare_bytes`.

    Args:
        num_reserved: blocks of the workspace that the plan may not use.
        training_bytes: memory left to training if that costs the rollout at most half of its blocks; otherwise the
            workspace is large and must be released before training.
        own: the sequences that this process returns.
        is_in_step: whether all sequences run at once.

    Raises:
        ValueError: not even one sequence fits; names the number of blocks needed and available.
    """
    distinct = len({id(sequence.prompt) for sequence in sequences})
    num_prompts = len(sequences) // options.num_return_sequences if is_in_step else distinct
    # A process without prompts passes over the layers with the others, in a workspace for one token.
    lengths = [len(sequence) for sequence in sequences] or [1]
    longest = max((sequence.most_fed for sequence in sequences), default=1)
    demand = count_blocks(lengths, longest, num_prompts, model.device.type, config, is_in_step=is_in_step)
    block_size, wanted, needed = demand.block_size, demand.wanted, demand.needed
    block_bytes = torch.Size(model.kv_shape(1, block_size)).numel() * model.dtype.itemsize
    affordable = max(0, spare_bytes - num_reserved * block_bytes) // block_bytes
    beside_training = affordable - -(-training_bytes // block_bytes)
    if 2 * beside_training >= wanted:
        affordable = beside_training
    num_blocks = min(wanted, affordable, config.max_kv_blocks or affordable)
    if num_blocks < needed:
        most_new = max((sequence.options.max_new_tokens for sequence in sequences), default=options.max_new_tokens)
        is_capped = 0 < config.max_kv_blocks < min(wanted, affordable)
        raise ValueError(
            f"max_new_tokens={most_new}: {f'{len(lengths)} sequences in step' if is_in_step else 'a sequence'} of "
            f"{longest} tokens needs {needed} KV blocks of "
            f"{block_size} tokens ({needed * block_bytes:,} bytes) and there are {num_blocks} ({spare_bytes:,} bytes "
            f"are free); lower it or {f'raise {config.prefix}max_kv_blocks' if is_capped else 'free memory'}"
        )
    return RolloutPlan(sequences, own, options, num_blocks, block_size, demand.max_running)


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
    lengths: Collection[int],
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
