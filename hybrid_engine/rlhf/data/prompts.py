"""The prompts of a user's data set, in its column `prompt`, and the order in which a run takes them."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from hybrid_engine.distributed.processes import get_world_size
from hybrid_engine.rlhf.data.encoding import encode_prompt
from hybrid_engine.rlhf.data.parts import load_parts
from hybrid_engine.rlhf.data.reading import read_prompt_rows
from hybrid_engine.rlhf.data.rows import PromptRow
from hybrid_engine.rlhf.options.columns import DataSource
from hybrid_engine.rlhf.runs.run_log import say
from hybrid_engine.rlhf.runs.stages import mix_seed


class PromptTokens(NamedTuple):
    """Lengths of the shortest and the longest prompt that is answered, in tokens."""

    shortest: int
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], most: int) -> "PromptTokens":
        """The lengths for prompts of these lengths, of which at most the last `most` tokens are read."""
        return cls(min(most, min(lengths)), min(most, max(lengths)))


def load_prompt_rows(
    source: DataSource | str, columns: Collection[str] = ()
) -> tuple[list[PromptRow], list[PromptRow]]:
    """Training and held-out prompts of a data set, with its other columns; no task is in both.

    Args:
        source: the data set and how it is read; or only its name.
        columns: those that the rewards read: equal prompts that differ in them are tasks of their own, each in either
            part. Without such a difference no prompt is in both.

    Raises:
        ValueError: the data set cannot be read, the column `prompt` is missing or a value of it is neither text nor a
            conversation, or one of the two parts would be empty.
    """
    source = DataSource.of(source)
    train, held_out = load_parts(source, read_prompt_rows, columns)
    if not held_out:
        raise ValueError(
            f"--held-out-share={source.held_out_share} holds out none of the {len(train)} prompts of {source.shown}, "
            "and a run is evaluated on one at least; raise it"
        )
    return train, held_out


def fit_prompts(
    rows: Sequence[PromptRow], tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int, *, skips: bool
) -> list[PromptRow]:
    """The prompts of a rollout: all of `rows`, or with `skips` those of at most `max_prompt_tokens` tokens.

    Logs how many are longer: a rollout cuts off their beginning.

    Raises:
        ValueError: fewer are left than there are processes, or the tokenizer cannot encode one.
    """
    is_long = [len(encode_prompt(tokenizer, row)) > max_prompt_tokens for row in rows]
    if not any(is_long):
        return list(rows)
    found = f"{sum(is_long)} of {len(rows)} prompts have more tokens than --max-prompt-tokens={max_prompt_tokens}"
    if not skips:
        say(f"{found} and lose their beginning; raise it, or leave them out by --skip-too-long")
        return list(rows)
    left = [row for row, is_too_long in zip(rows, is_long, strict=True) if not is_too_long]
    if len(left) < get_world_size():
        raise ValueError(f"--skip-too-long: {found}, and every process needs one that has not; raise it")
    say(f"{found} and are left out")
    return left


def select_prompts(num_prompts: int, first: int, count: int, seed: int) -> list[int]:
    """Indices `first` to `first + count` of an endless series of reshuffled passes over `num_prompts` prompts.

    The series depends only on the arguments, so a resumed run continues with the next prompts.
    """
    indices: list[int] = []
    for position in range(first, first + count):
        epoch, offset = divmod(position, num_prompts)
        if offset == 0 or not indices:
            order = torch.randperm(num_prompts, generator=torch.Generator().manual_seed(mix_seed(seed, epoch)))
        indices.append(int(order[offset]))
    return indices
