"""The prompts of a run: the standard library's signatures, or a dataset of the user's with a column `prompt`."""

import json
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset, load_from_disk

from hybrid_engine.recipes.stages import mix_seed
from hybrid_engine.recipes.stdlib_docs import is_held_out, split, stdlib_examples

COLUMN = "prompt"


def load_prompts(dataset: str | None) -> tuple[list[str], list[str]]:
    """Training and held-out prompts, disjoint: a tenth is held out, chosen by a hash of the text.

    Args:
        dataset: a `.jsonl` file, a folder (saved with `save_to_disk`, or of data files) or a name on the Hugging Face
            hub, of which the split `train` is read; None reads the standard library's signatures.

    Raises:
        ValueError: the column `prompt` is missing or not text, or one of the two parts would be empty.
    """
    if dataset is None:
        train_examples, held_out_examples = split(stdlib_examples())
        return [example.prompt for example in train_examples], [example.prompt for example in held_out_examples]
    prompts = list(dict.fromkeys(_read_prompts(dataset)))
    train = [prompt for prompt in prompts if not is_held_out(prompt)]
    held_out = [prompt for prompt in prompts if is_held_out(prompt)]
    if not train or not held_out:
        raise ValueError(
            f"dataset={dataset!r} has {len(prompts)} distinct prompts, of which {len(held_out)} are held out by their "
            "hash (about a tenth); training and evaluation both need at least one: give more prompts"
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


def _read_prompts(dataset: str) -> list[str]:
    path = Path(dataset)
    if path.suffix == ".jsonl":
        rows = _read_jsonl(path)
        columns = sorted({name for row in rows for name in row})
        _check_column(dataset, columns)
        values: list[Any] = [row.get(COLUMN) for row in rows]
    else:
        is_saved = (path / "state.json").exists() or (path / "dataset_dict.json").exists()
        try:
            table = load_from_disk(dataset) if is_saved else load_dataset(dataset)
        except (FileNotFoundError, ConnectionError, ValueError) as error:
            raise ValueError(f"dataset={dataset!r} must be a .jsonl file, a folder or a hub name: {error}") from error
        if isinstance(table, dict):
            if "train" not in table:
                raise ValueError(
                    f"dataset={dataset!r} has the splits {', '.join(table)} and must have 'train'; rename one"
                )
            table = table["train"]
        _check_column(dataset, list(table.column_names))
        values = list(table[COLUMN])
    wrong = next((index for index, value in enumerate(values) if not isinstance(value, str) or not value), None)
    if wrong is not None:
        raise ValueError(f"dataset={dataset!r}: row {wrong} has {COLUMN}={values[wrong]!r}; it must be text, not empty")
    return values


def _read_jsonl(path: Path) -> list[dict]:
    if not path.is_file():
        raise ValueError(f"dataset={str(path)!r} must be an existing file; check the path")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line) if line.strip() else None
        except json.JSONDecodeError as error:
            raise ValueError(f"dataset={str(path)!r}: line {number} is not JSON ({error}); mend the file") from error
        if row is not None and not isinstance(row, dict):
            raise ValueError(
                f"dataset={str(path)!r}: line {number} must be a JSON object with {COLUMN!r}; mend the file"
            )
        if row is not None:
            rows.append(row)
    return rows


def _check_column(dataset: str, columns: list[str]) -> None:
    if COLUMN not in columns:
        raise ValueError(
            f"dataset={dataset!r} has the columns {', '.join(map(repr, columns)) or 'none'} and must have {COLUMN!r}; "
            "rename the column that holds the prompts"
        )
