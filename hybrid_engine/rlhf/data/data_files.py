"""Reads the rows of a dataset: a file, a folder, a name on the Hugging Face hub or one of `NAMED`.

JSON lines, JSON and CSV are read with Python's own modules, which know the line of an error and do not convert text;
everything else is read by `datasets`. A row that cannot be read becomes an error in its place, so that all bad rows can
be reported together.
"""

import codecs
import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, disable_progress_bars, get_dataset_config_names, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError

from hybrid_engine.config.checks import flag
from hybrid_engine.rlhf.data.reasoning_gym_rows import SCHEME, read_questions
from hybrid_engine.rlhf.options.columns import DataSource

RowOrError = dict[str, Any] | ValueError
"""A row's values by column, or an error whose message follows the row's place."""
Rows = Iterator[tuple[str, RowOrError]]
"""The place of each row in its file, such as "line 3", and the row."""
NamedReader = Callable[[str, str | None, str | None, str], Rows]
"""Yields the rows for a name of a dataset, a split, a configuration (None: not given) and the split's option; raises
ValueError for a name or split that does not exist.
"""
NAMED: dict[str, NamedReader] = {SCHEME: read_questions}
"""Readers of datasets that are generated and not stored, by the part of their names before the colon."""
BYTE_ORDER_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


@dataclass(frozen=True, kw_only=True)
class Table:
    """The rows of a dataset, before any check."""

    source: str
    """The option as it is typed: `--dataset='data.jsonl'`."""
    rows: list[tuple[str, RowOrError]]
    """The place of each row, such as `--dataset='data.jsonl': line 3`, and the row."""
    columns: list[str]
    """Every column that any row has, sorted."""

    @classmethod
    def of(cls, source: str, rows: list[tuple[str, RowOrError]]) -> "Table":
        """A table with the columns that the rows have."""
        names = {str(name) for _, row in rows if not isinstance(row, ValueError) for name in row}
        return cls(source=source, rows=rows, columns=sorted(names))

    def changed(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> "Table":
        """The table with `change` applied to every row; a ValueError that it raises takes the place of the row."""

        def after(row: RowOrError) -> RowOrError:
            if isinstance(row, ValueError):
                return row
            try:
                return change(row)
            except ValueError as error:
                return error

        return Table.of(self.source, [(place, after(row)) for place, row in self.rows])


def read_table(source: DataSource) -> Table:
    """The rows of one dataset, in order. All datasets that a recipe reads come from here.

    Reads `--split`, or `train`, of several splits, and `--dataset-config` of several configurations, which datasets of
    the hub may have.

    Raises:
        ValueError: nothing can be read; a split or configuration does not exist, or one of several must be chosen, with
            a list of those that exist.
    """
    (dataset,), shown = source.datasets, source.shown
    rows = list(_rows_of_dataset(source, dataset))
    if not rows:
        raise ValueError(f"{shown} has no rows; give a dataset that has some")
    return Table.of(shown, [(f"{shown}: {place}", row) for place, row in rows])


def _rows_of_dataset(source: DataSource, dataset: str) -> Rows:
    path, scheme, shown = Path(dataset), dataset.partition(":")[0], source.shown
    if scheme in NAMED and scheme != dataset:
        return NAMED[scheme](dataset, source.split, source.configuration, source.split_option)
    try:
        is_file = path.is_file()
    except OSError as error:  # a name that is too long
        raise ValueError(f"{shown} must be a file, a folder or a hub name: {error}") from error
    if not is_file and path.suffix.lower() not in READERS:
        return _rows_of(_load_table(source, dataset))
    if source.split is not None:
        raise ValueError(f"{source.split_shown}: {shown} is a file, which has no splits; leave the option out")
    if source.configuration is not None:
        raise ValueError(
            f"--dataset-config={source.configuration!r}: {shown} is a file, which has no configurations; leave the "
            "option out"
        )
    return _read_file(shown, path)


def _read_file(source: str, path: Path) -> Rows:
    if not path.is_file():
        raise ValueError(f"{source} must be an existing file; check the path")
    if path.suffix.lower() not in READERS:
        raise ValueError(
            f"{source} ends in {path.suffix!r}; a file must end in {', '.join(READERS)}: convert or rename it"
        )
    return READERS[path.suffix.lower()](source, path)


def _read_text(source: str, path: Path) -> str:
    """Text in UTF-8, or in the encoding of a byte order mark; ValueError with the line of the first invalid byte."""
    data = path.read_bytes()
    encoding = next((name for mark, name in BYTE_ORDER_MARKS.items() if data.startswith(mark)), "utf-8")
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{source}: line {line} is not {encoding.removesuffix('-sig').upper()} ({error.reason} at "
            f"byte {error.start}); save the file as UTF-8"
        ) from error


def _read_json_lines(source: str, path: Path) -> Rows:
    # Only a line feed ends a line: JSON may contain U+2028 and similar as they are, at which splitlines() would split.
    for number, line in enumerate(_read_text(source, path).split("\n"), start=1):
        if line.strip():
            yield f"line {number}", _parse_object(line)


def _parse_object(text: str) -> RowOrError:
    try:
        return _check_object(json.loads(text, object_pairs_hook=_named_once))
    except (ValueError, RecursionError) as error:
        return ValueError(f"is not JSON ({error}); fix the file")


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ValueError if it has a duplicate name, of which Python would keep the last value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        name, count = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"an object names {name!r} {count} times")
    return found


def _check_object(row: Any) -> RowOrError:
    return row if isinstance(row, dict) else ValueError("must be a JSON object; fix the file")


def _read_json(source: str, path: Path) -> Rows:
    """Reads a list of objects, or JSON lines, which many files named .json contain."""
    text = _read_text(source, path)
    if not text.lstrip().startswith("["):
        yield from _read_json_lines(source, path)
        return
    try:
        entries = json.loads(text, object_pairs_hook=_named_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is not JSON ({error}); fix the file") from error
    for number, entry in enumerate(entries, start=1):
        yield f"entry {number}", _check_object(entry)


def _read_csv(source: str, path: Path) -> Rows:
    """Reads CSV: the first line names the columns; every value is text."""
    reader = csv.reader(io.StringIO(_read_text(source, path), newline=""), strict=True)
    try:
        names = next(reader, [])
        for name, count in Counter(names).items():
            if count > 1:
                raise ValueError(f"{source}: line 1 names the column {name!r} {count} times; rename the others")
        for values in filter(None, reader):
            yield f"line {reader.line_num}", _name_values(names, values)
    except csv.Error as error:
        raise ValueError(f"{source}: line {reader.line_num} is not CSV ({error}); fix the file") from error


def _name_values(names: list[str], values: list[str]) -> RowOrError:
    if len(values) == len(names):
        return dict(zip(names, values, strict=True))
    return ValueError(
        f"has {len(values)} values for {len(names)} columns; fix it, with double quotes around values that contain a "
        "comma"
    )


def _read_parquet(source: str, path: Path) -> Rows:
    with _explained(source):
        return _rows_of(Dataset.from_parquet(str(path)))


def _load_table(source: DataSource, dataset: str) -> Dataset:
    path, shown, configuration = Path(dataset), source.shown, source.configuration
    is_saved = (path / "state.json").exists() or (path / "dataset_dict.json").exists()
    if is_saved and configuration is not None:
        raise ValueError(
            f"--dataset-config={configuration!r}: {shown} was saved without configurations; leave the option out"
        )
    with _explained(shown):
        table = load_from_disk(dataset) if is_saved else _load_configuration(shown, dataset, configuration)
    if not isinstance(table, dict):
        if source.split is not None:
            raise ValueError(f"{source.split_shown}: {shown} has no splits; leave the option out")
        return table
    if (source.split or "train") not in table:
        given = f"{source.split_shown}: {shown}" if source.split else shown
        splits = ", ".join(map(repr, table))
        raise ValueError(f"{given} has the splits {splits}; choose one with {flag(source.split_option)}")
    return table[source.split or "train"]


def _load_configuration(source: str, dataset: str, configuration: str | None) -> Any:
    try:
        return load_dataset(dataset, configuration)
    except ValueError as error:
        names = get_dataset_config_names(dataset)
        if configuration in names or (configuration is None and len(names) == 1):
            raise
        given = f"--dataset-config={configuration!r}: {source}" if configuration else source
        raise _NoSuchConfiguration(
            f"{given} has the configurations {', '.join(map(repr, names))}; choose one with --dataset-config"
        ) from error


def _rows_of(table: Dataset) -> Rows:
    return ((f"row {number}", row) for number, row in enumerate(table, start=1))


class _NoSuchConfiguration(Exception):
    """One of several configurations must be chosen; the message names them."""


@contextmanager
def _explained(source: str) -> Iterator[None]:
    """Converts errors of `datasets` for unreadable data into a ValueError, and hides its progress bars."""
    disable_progress_bars()
    try:
        yield
    except _NoSuchConfiguration as error:
        raise ValueError(str(error)) from error.__cause__
    except (OSError, ValueError, TypeError, IndexError, RuntimeError, DatasetsError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"{source} must be a file ({', '.join(READERS)}), a folder or a hub name: {reason}") from error


READERS: dict[str, Callable[[str, Path], Rows]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
