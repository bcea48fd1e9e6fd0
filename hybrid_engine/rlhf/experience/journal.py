"""Writes answers to a file: each is journaled when it finishes, and all are put in order at the end.

`FILE.part` holds a line with what the answers depend on and then a line per finished row, in the order in which rows
finish. A killed run loses at most the line that was being written. The file itself appears at the end, complete and in
order. The functions below the class read prompts from the terminal and write answers to it.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from transformers import PreTrainedTokenizerBase

from hybrid_engine.generation.core import Sequence
from hybrid_engine.generation.detokenize import IncrementalDetokenizer
from hybrid_engine.generation.live.batches import LiveBatch
from hybrid_engine.rlhf.data.parts import wrap_row
from hybrid_engine.rlhf.data.rows import PromptRow
from hybrid_engine.rlhf.options.columns import DataSource
from hybrid_engine.rlhf.options.generate import TERMINAL
from hybrid_engine.rlhf.runs.run_folder import set_aside


class Journal:
    """The answers of one run over the rows of a file.

    Args:
        target: the file for the answers.
        identity: what the answers depend on; a journal with another identity is refused.
        restart: move an earlier result and an unfinished journal aside.
        defaults: values for a journal that was begun before an option existed.

    Raises:
        ValueError: there is an earlier result or a journal of another run, or the folder cannot be written to.
    """

    def __init__(
        self, target: Path, identity: dict[str, Any], restart: bool, defaults: Mapping[str, Any] | None = None
    ):
        self.target, self.part = target, target.with_name(f"{target.name}.part")
        if restart:
            set_aside(target.parent, (target.name, self.part.name))
        if target.is_dir():
            raise ValueError(f"--out={str(target)!r} is a folder; name the file that the answers go to")
        if target.exists():
            raise ValueError(f"--out={str(target)!r} is there already; --restart moves it aside, or name another file")
        self.finished: dict[int, dict[str, Any]] = self._read(identity, defaults or {})
        """Answers by row."""
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=target.parent).close()
        except OSError as error:
            raise ValueError(f"--out={str(target)!r} cannot be written: {error.strerror}; name another file") from error
        self._identity = identity
        self._file: IO[str] | None = None

    def _read(self, identity: dict[str, Any], defaults: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """The finished rows of an earlier run; a line that a kill left half-written is cut off."""
        if not self.part.exists():
            return {}
        text = self.part.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            os.truncate(self.part, len(whole))
        lines = whole.split(b"\n")[:-1]  # texts may contain other line breaks, which JSON leaves as they are
        if not lines:
            return {}
        options = json.loads(json.dumps(identity))  # turns tuples into lists, as in the journal
        begun = json.loads(json.dumps({name: defaults[name] for name in identity if name in defaults}))
        begun |= json.loads(lines[0])
        if begun != options:
            differing = [name for name in options if begun.get(name) != options[name]]
            raise ValueError(
                f"{self.part} holds answers of a run that differs in {', '.join(differing) or 'its options'}; give the "
                "same options to go on with it, or --restart"
            )
        return {line["row"]: line for line in map(json.loads, lines[1:])}

    def add(self, row: int, answer: dict[str, Any]) -> None:
        """Stores a finished row; where it cannot be written, raises an OSError that says how to continue."""
        line = {"row": row} | answer
        with self._writing():
            self._write(line)
        self.finished[row] = line

    def publish(self) -> None:
        """Writes all rows to the file, in order; raises the same errors as `add`."""
        unfinished = self.target.with_name(f".{self.target.name}.writing")
        with self._writing():
            if self._file is not None:
                self._file.close()
            with unfinished.open("w", encoding="utf-8") as file:
                for row in sorted(self.finished):
                    line = {name: value for name, value in self.finished[row].items() if name != "row"}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(self.target)
        self.part.unlink(missing_ok=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = (
                f"{error.strerror}; {len(self.finished)} finished rows stay: make room, and the same command goes on"
            )
            raise OSError(error.errno, reason, str(self.part)) from error

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            self._file = self.part.open("a", encoding="utf-8")
            if self._file.tell() == 0:
                self._write(self._identity)
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()


def read_lines(source: DataSource) -> Iterator[PromptRow]:
    """The terminal's lines as they are written, wrapped as the options say; empty lines are skipped."""
    for number, line in enumerate(sys.stdin, 1):
        if line.strip():
            yield wrap_row(source, PromptRow(prompt=line.rstrip("\n"), place=f"line {number}"))


@contextmanager
def opened(out: str) -> Iterator[IO[str]]:
    """The terminal, or a new file; ValueError if the file exists already or cannot be written."""
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
    """Runs one sequence and writes its text as it is decoded, without its end token, then a line break."""
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
