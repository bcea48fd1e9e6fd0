"""Prompts and answers of the terminal: one prompt a line, text as it comes."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from transformers import PreTrainedTokenizerBase

from hybrid_engine.generation.batching.sequence import Sequence
from hybrid_engine.generation.detokenize import IncrementalDetokenizer
from hybrid_engine.generation.live.batch import LiveBatch
from hybrid_engine.rlhf.data.columns import template_columns
from hybrid_engine.rlhf.data.rows import PromptRow
from hybrid_engine.rlhf.data.sources import DataSource
from hybrid_engine.rlhf.data.wrapping import wrap_row
from hybrid_engine.rlhf.runs.checks import flag
from hybrid_engine.rlhf.runs.options import RowOptions

TERMINAL = "-"
"""What stands for the terminal in place of a file."""


FOR_FILES = ("split", "dataset_config", "columns")
"""Options that say nothing of lines that are typed."""


def check_row_options(options: RowOptions) -> None:
    """ValueError for an option that needs columns, where the prompts are lines of the terminal."""
    for name in FOR_FILES:
        if value := getattr(options, name):
            shown = " ".join(value) if isinstance(value, tuple) else value
            raise ValueError(
                f"{flag(name)}={shown!r} is for a data set, and --prompts={TERMINAL!r} reads a prompt a line; leave it "
                "out, or name a file"
            )
    template = options.source_of(TERMINAL, option="prompts").prompt_template
    if template is not None and template_columns(template) != {"prompt"}:
        raise ValueError(
            f"--prompt-template={options.prompt_template!r} must name {{prompt}} and no other column: a line that "
            f"--prompts={TERMINAL!r} reads is a prompt alone; change it, or name a file"
        )


def read_lines(source: DataSource) -> Iterator[PromptRow]:
    """The terminal's lines as they are written, with what the options put around them; empty ones are passed over."""
    for number, line in enumerate(sys.stdin, 1):
        if line.strip():
            yield wrap_row(source, PromptRow(prompt=line.rstrip("\n"), place=f"line {number}"))


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
