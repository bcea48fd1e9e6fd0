"""Which rows are kept from training, to measure on: chosen by a hash of their prompt, alike on every machine."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, TypeVar

from hybrid_engine.recipes.data.rows import (
    ConversationRow,
    LabelledRow,
    LearnedRow,
    PreferenceRow,
    PromptRow,
    TextRow,
    Turns,
)

R = TypeVar("R", bound=PromptRow | LearnedRow | PreferenceRow | LabelledRow)


def is_held_out(prompt: str, share: float = 0.1) -> bool:
    """True for a fixed `share` of all prompts, chosen by a hash of the text: the same on every machine."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def prompt_text(prompt: Turns) -> str:
    """A prompt as one text that tells it from all others; a conversation as JSON."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)


def hold_out(rows: Sequence[R], share: float = 0.1) -> tuple[list[R], list[R]]:
    """Training and held-out rows, each in their order; rows with one prompt stay together.

    Args:
        rows: of a data set. Of a conversation all turns are taken for its prompt, of plain text the whole.
        share: of all prompts that are held out, about; 0 holds none.
    """
    is_kept = [not is_held_out(prompt_text(_prompt(row)), share) for row in rows]
    train = [row for row, kept in zip(rows, is_kept, strict=True) if kept]
    return train, [row for row, kept in zip(rows, is_kept, strict=True) if not kept]


def hold_out_of(dataset: str, rows: Sequence[R], share: float) -> tuple[list[R], list[R]]:
    """`hold_out` of the rows of `--dataset`; ValueError where none is left to train on or, with a share, to measure."""
    train, held_out = hold_out(rows, share)
    check_parts(dataset, train, held_out, share)
    return train, held_out


def check_parts(dataset: str, train: Sequence[Any], held_out: Sequence[Any], share: float) -> None:
    """ValueError where nothing of `--dataset` is left to train on or, with a share, to measure."""
    if not train or (share and not held_out):
        raise ValueError(
            f"--held-out-share={share} of --dataset={dataset!r} leaves {len(train)} rows to train on and "
            f"{len(held_out)} to measure; give more rows, or --held-out-share 0"
        )


def _prompt(row: PromptRow | LearnedRow | PreferenceRow | LabelledRow) -> Turns:
    if isinstance(row, ConversationRow):
        return row.messages
    return row.text if isinstance(row, TextRow) else row.prompt
