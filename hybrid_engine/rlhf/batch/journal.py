"""Answers on their way to a file: written down as they come, put in order at the end.

`FILE.part` holds a line of what the answers depend on and then a line for each finished row, in the order in which rows
finish. A kill loses at most the line that was being written. The file itself appears at the end, whole and in order.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from hybrid_engine.rlhf.runs.run_folder import set_aside


class Journal:
    """The answers of one run over the rows of a file.

    Args:
        target: the file that the answers go to.
        identity: what they depend on; a journal of something else is refused.
        restart: move an earlier result and an unfinished journal aside.
        defaults: what holds for a journal that was begun before there was such an option.

    Raises:
        ValueError: there is an earlier result, or a journal of another run, or the folder cannot be written to.
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
        """By row."""
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=target.parent).close()
        except OSError as error:
            raise ValueError(f"--out={str(target)!r} cannot be written: {error.strerror}; name another file") from error
        self._identity = identity
        self._file: IO[str] | None = None

    def _read(self, identity: dict[str, Any], defaults: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """The finished rows of an earlier run; what a kill left half-written is cut off."""
        if not self.part.exists():
            return {}
        text = self.part.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            os.truncate(self.part, len(whole))
        lines = whole.split(b"\n")[:-1]  # texts may hold other ends of lines, which JSON leaves as they are
        if not lines:
            return {}
        options = json.loads(json.dumps(identity))  # tuples are lists then, as in the journal
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
        """Keeps a finished row; OSError, which says how to go on, where it cannot be written."""
        line = {"row": row} | answer
        with self._writing():
            self._write(line)
        self.finished[row] = line

    def publish(self) -> None:
        """Puts all rows into the file, in order; errors as of `add`."""
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
