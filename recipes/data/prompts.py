"""The prompts of a run: the standard library's signatures, or a dataset of the user's with a column `prompt`."""

import torch

from hybrid_engine.recipes.data.data_files import read_prompts
from hybrid_engine.recipes.runs.stages import mix_seed
from hybrid_engine.recipes.tasks.stdlib_docs import is_held_out, split, stdlib_examples


def load_prompts(dataset: str | None) -> tuple[list[str], list[str]]:
    """Training and held-out prompts, disjoint: a tenth is held out, chosen by a hash of the text.

    Args:
        dataset: a `.jsonl`, `.json`, `.csv` or `.parquet` file, a folder (saved with `save_to_disk`, or of data files)
            or a name on the Hugging Face hub, of which the split `train` is read; None: the
            standard library's signatures.

    Raises:
        ValueError: the column `prompt` is missing or not text, or one of the two parts would be empty.
    """
    if dataset is None:
        train_examples, held_out_examples = split(stdlib_examples())
        return [example.prompt for example in train_examples], [example.prompt for example in held_out_examples]
    prompts = list(dict.fromkeys(read_prompts(dataset)))
    train = [prompt for prompt in prompts if not is_held_out(prompt)]
    held_out = [prompt for prompt in prompts if is_held_out(prompt)]
    if not train or not held_out:
        raise ValueError(
            f"--dataset={dataset!r} has {len(prompts)} distinct prompts, of which {len(held_out)} are held out by "
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
