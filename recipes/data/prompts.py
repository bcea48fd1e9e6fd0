"""The prompts of a data set of the user's, in its column `prompt`, and the order in which a run takes prompts."""

import torch

from hybrid_engine.recipes.data.held_out import hold_out, prompt_text
from hybrid_engine.recipes.data.reading import read_prompt_rows
from hybrid_engine.recipes.data.rows import PromptRow
from hybrid_engine.recipes.runs.stages import mix_seed


def load_prompt_rows(dataset: str) -> tuple[list[PromptRow], list[PromptRow]]:
    """Training and held-out prompts of a data set, disjoint, with its other columns: about a tenth is held out.

    Of equal prompts the first row is kept. See `reading.read_prompt_rows` for what `dataset` may be.

    Raises:
        ValueError: the data set cannot be read, the column `prompt` is missing or a value of it is neither text nor a
            conversation, or one of the two parts would be empty.
    """
    rows = list({prompt_text(row.prompt): row for row in reversed(read_prompt_rows(dataset))}.values())[::-1]
    train, held_out = hold_out(rows)
    if not train or not held_out:
        raise ValueError(
            f"--dataset={dataset!r} has {len(rows)} distinct prompts, of which {len(held_out)} are held out by "
            "their hash (about a tenth); training and evaluation both need at least one: give more prompts"
        )
    return train, held_out


def select_prompts(num_prompts: int, first: int, count: int, seed: int) -> list[int]:
    """Indices `first` to `first + count` of an endless series of reshuffled passes over `num_prompts` prompts.

    It depends on its arguments alone, so a resumed run goes on with the prompts that come next.
    """
    indices: list[int] = []
    for position in range(first, first + count):
        epoch, offset = divmod(position, num_prompts)
        if offset == 0 or not indices:
            order = torch.randperm(num_prompts, generator=torch.Generator().manual_seed(mix_seed(seed, epoch)))
        indices.append(int(order[offset]))
    return indices
