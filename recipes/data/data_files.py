"""Reading the prompts of a data set: a file, a folder or a name on the Hugging Face hub, with a column `prompt`.

JSON lines, JSON and CSV are read with Python's own modules, which know the line of what is wrong and take text for
text; all the rest is read by `datasets`.
"""

import codecs
import csv
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import Dataset, disable_progress_bars, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError

COLUMN = "prompt"
Rows = Iterator[tuple[str, Any]]
"""Where each row stands, and the row."""
BYTE_ORDER_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


def read_prompts(dataset: str) -> list[str]:
    """The texts in the column `prompt` of the data set that `--dataset` names, in their order.

    Raises:
        ValueError: nothing can be read, there is no such column or a value is not text or empty; with the line or row.
    """
    path = Path(dataset)
    try:
        is_file = path.is_file()
    except OSError as error:  # a name that is too long
        raise ValueError(f"--dataset={dataset!r} must be a file, a folder or a hub name: {error}") from error
    is_file = is_file or path.suffix in READERS
    rows = list(_read_file(dataset, path) if is_file else _rows_of(_load_table(dataset)))
    columns = sorted({str(name) for _, row in rows for name in row})
    if COLUMN not in columns:
        raise ValueError(
            f"--dataset={dataset!r} has the columns {', '.join(map(repr, columns)) or 'none'} and must have "
            f"{COLUMN!r}; rename the column that holds the prompts"
        )
    for place, row in rows:
        _check_text(dataset, place, row.get(COLUMN))
    return [row[COLUMN] for _, row in rows]


def _check_text(dataset: str, place: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"--dataset={dataset!r}: {place} has {COLUMN}={value!r}; it must be text, not empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half of a pair, which JSON can write and no tokenizer reads
        raise ValueError(f"--dataset={dataset!r}: {place} has a {COLUMN} that is no text: {error}; mend it") from error


def _read_file(dataset: str, path: Path) -> Rows:
    if not path.is_file():
        raise ValueError(f"--dataset={dataset!r} must be an existing file; check the path")
    if path.suffix not in READERS:
        raise ValueError(
            f"--dataset={dataset!r} ends in {path.suffix!r}; a file must end in {', '.join(READERS)}: convert it, or "
            f"rename it"
        )
    return READERS[path.suffix](dataset, path)


def _read_text(dataset: str, path: Path) -> str:
    """UTF-8, or what a byte order mark says; ValueError with the line of the first byte that is not."""
    data = path.read_bytes()
    encoding = next((name for mark, name in BYTE_ORDER_MARKS.items() if data.startswith(mark)), "utf-8")
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(
            f"--dataset={dataset!r}: line {line} is not {encoding.removesuffix('-sig').upper()} ({error.reason} at "
            f"byte {error.start}); save the file as UTF-8"
        ) from error


def _read_json_lines(dataset: str, path: Path) -> Rows:
    # Only a line feed ends a line: JSON may hold U+2028 and its kin as they are, at which splitlines() would cut.
    for number, line in enumerate(_read_text(dataset, path).split("\n"), start=1):
        if line.strip():
            yield f"line {number}", _parse_object(dataset, f"line {number}", line)


def _parse_object(dataset: str, place: str, text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--dataset={dataset!r}: {place} is not JSON ({error}); mend the file") from error
    return _check_object(dataset, place, row)


def _check_object(dataset: str, place: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"--dataset={dataset!r}: {place} must be a JSON object; mend the file")
    return row


def _read_json(dataset: str, path: Path) -> Rows:
    """A list of objects; many files that are called .json are JSON lines."""
    text = _read_text(dataset, path)
    if not text.lstrip().startswith("["):
        yield from _read_json_lines(dataset, path)
        return
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--dataset={dataset!r} is not JSON ({error}); mend the file") from error
    for number, entry in enumerate(entries, start=1):
        yield f"entry {number}", _check_object(dataset, f"entry {number}", entry)


def _read_csv(dataset: str, path: Path) -> Rows:
    """The first line names the columns; every value is text."""
    reader = csv.DictReader(io.StringIO(_read_text(dataset, path), newline=""), restkey="", strict=True)
    try:
        for row in reader:
            yield f"line {reader.line_num}", row
    except csv.Error as error:
        raise ValueError(
            f"--dataset={dataset!r}: line {reader.line_num} is not CSV ({error}); mend the file"
        ) from error


def _read_parquet(dataset: str, path: Path) -> Rows:
    with _explained(dataset):
        return _rows_of(Dataset.from_parquet(str(path)))


def _load_table(dataset: str) -> Dataset:
    path = Path(dataset)
    is_saved = (path / "state.json").exists() or (path / "dataset_dict.json").exists()
    with _explained(dataset):
        table = load_from_disk(dataset) if is_saved else load_dataset(dataset)
    if isinstance(table, dict):
        if "train" not in table:
            raise ValueError(
                f"--dataset={dataset!r} has the splits {', '.join(table)} and must have 'train'; rename one"
            )
        table = table["train"]
    return table


def _rows_of(table: Dataset) -> Rows:
    wanted = table.select_columns([COLUMN]) if COLUMN in table.column_names else table
    return ((f"row {number}", row) for number, row in enumerate(wanted, start=1))


@contextmanager
def _explained(dataset: str) -> Iterator[None]:
    """Turns what `datasets` raises for what it cannot read into a ValueError, and keeps its bars off the screen."""
    disable_progress_bars()
    try:
        yield
    except (OSError, ValueError, TypeError, DatasetsError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(
            f"--dataset={dataset!r} must be a file ({', '.join(READERS)}), a folder or a hub name: {reason}"
        ) from error


READERS: dict[str, Callable[[str, Path], Rows]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
