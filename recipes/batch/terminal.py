"""Prompts and answers of the terminal: one prompt a line, text as it comes."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from transformers import PreTrainedTokenizerBase

from hybrid_engine.generation.batching.sequence import Sequence
from hybrid_engine.generation.detokenize import IncrementalDetokenizer
from hybrid_engine.generation.live import LiveBatch
from hybrid_engine.recipes.data.reading import read_prompt_rows
from hybrid_engine.recipes.data.rows import PromptRow
from hybrid_engine.recipes.data.sources import DataSource

TERMINAL = "-"
"""What stands for the terminal in place of a file."""


def read_rows(source: DataSource) -> Iterator[PromptRow]:
    """The rows of a file, or of the terminal's lines as they are written; empty lines are passed over."""
    if source.datasets != (TERMINAL,):
        yield from read_prompt_rows(source)
        return
    for number, line in enumerate(sys.stdin, 1):
        if line.strip():
            yield PromptRow(prompt=line.rstrip("\n"), place=f"line {number}")


@contextmanager
def opened(out: str) -> Iterator[IO[str]]:
    """The terminal, or a new file; ValueError where that is there already or cannot be written."""
    if out == TERMINAL:
        yield sys.stdout
        return
    try:
        file = Path(out).open("x", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise ValueError(f"--out={out!r} cannot be written: {error.strerror}; name another file") from error
    with file:
        yield file


def write_answer(batch: LiveBatch, sequence: Sequence, tokenizer: PreTrainedTokenizerBase, out: IO[str]) -> None:
    """Runs one sequence and writes its text as it comes, without its end, then a new line."""
    detokenizer, ends = IncrementalDetokenizer(tokenizer), sequence.options.eos_token_ids
    batch.add([sequence])
    while batch.has_work:
        for told in batch.turn():
            if told.finish_reason == "error":
                raise RuntimeError("the model's logits are not finite; check the weights for NaN or inf")
            out.write("".join(detokenizer.add(token) for token in told.tokens if token not in ends))
            out.flush()
    out.write(detokenizer.finish() + "\n")
    out.flush()
