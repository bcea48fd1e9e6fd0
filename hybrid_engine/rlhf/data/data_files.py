"""Reads the rows of a dataset: a file, a folder, a name on the Hugging Face hub or one of `NAMED`.

JSON lines, JSON and CSV are read with Python's own modules, which know the line of an error and do not convert text;
everything else is read by `datasets`. A row that cannot be read becomes an error in its place, so that all bad rows can
be reported together.

`reasoning_gym:chain_sum:max_terms=2,size=4000` are questions of the library reasoning-gym. The name is followed by
options, which are the dataset's own (its difficulty) or those of `QuestionOptions`. A row has the columns `prompt`,
`answer` (None if there are several) and `metadata`, which the reward `reasoning_gym` reads. Question i is generated
from the seed `seed + i` alone, in a separate process with a fixed hash seed: some datasets of the library take their
questions from the order of a set, or from Python's global random numbers.
"""

import codecs
import csv
import importlib.util
import io
import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from datasets import Dataset, disable_progress_bars, get_dataset_config_names, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError

from hybrid_engine.config.checks import flag
from hybrid_engine.rlhf.options.columns import DataSource

SCHEME, LIBRARY = "reasoning_gym", "reasoning_gym"
TRAIN, HELD_OUT = "train", "held_out"
LARGEST_SEED = 2**32 - 1
Entry = dict[str, Any]
"""A question of the library: `question`, `answer` and `metadata`."""
MAKE_ENTRIES = """
import contextlib, difflib, os, pickle, random, sys
import numpy, reasoning_gym
from reasoning_gym.factory import DATASETS

def make(name, config, ranges):
    if name == "composite":
        return "'composite' has no questions of its own; give several --dataset, with --dataset-weights"
    if name not in DATASETS:
        names = sorted(DATASETS.keys() - {"composite"})
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.6) or names
        return "there is no dataset %r in reasoning-gym; there are %s" % (name, ", ".join(near))
    try:
        parts = []
        for first, count in ranges:
            questions = reasoning_gym.create_dataset(name, **(config | {"seed": first, "size": max(count, 1)}))
            parts.append([])
            for index in range(count):
                random.seed(first + index)
                numpy.random.seed(first + index)
                parts[-1].append(dict(questions[index]) | {"seed": first + index})
        return parts
    except (AssertionError, TypeError, ValueError, KeyError, IndexError) as error:
        options = ", ".join(DATASETS[name][1].__dataclass_fields__)
        return "reasoning-gym refuses the options (%s: %s); they are %s" % (type(error).__name__, error, options)

answer = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # some datasets print while they work
pickle.dump(make(*pickle.load(sys.stdin.buffer)), answer)
"""
RowOrError = dict[str, Any] | ValueError
"""A row's values by column, or an error whose message follows the row's place."""
Rows = Iterator[tuple[str, RowOrError]]
"""The place of each row in its file, such as "line 3", and the row."""
NamedReader = Callable[[str, str | None, str | None, str], Rows]
"""Yields the rows for a name of a dataset, a split, a configuration (None: not given) and the split's option; raises
ValueError for a name or split that does not exist.
"""
BYTE_ORDER_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


@dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """The options in a dataset's name, after its colons."""

    name: str
    """The library's name of the dataset."""
    size: int = 2000
    """Number of questions to train on; those that equal a held-out one are left out."""
    seed: int = 0
    """Seed of the first training question."""
    held_out: int = 256
    """Number of held-out questions; of equal ones only the first is kept."""
    held_out_seed: int = 1_000_000_000
    """Seed of the first held-out question: they stay the same for any training questions."""
    shots: int = 0
    """Number of solved examples before each question, from seeds of their own."""
    chat: bool = True
    """Whether a prompt is a conversation; otherwise it is text."""
    config: dict[str, Any] = field(default_factory=dict)
    """The dataset's own options."""

    @classmethod
    def read(cls, dataset: str) -> "QuestionOptions":
        """The options in `reasoning_gym:NAME:option=value,option=value`; a value is JSON, or otherwise text.

        Raises:
            ValueError: an entry is not an option, or its value has the wrong type.
        """
        _, _, rest = dataset.partition(":")
        name, _, given = rest.partition(":")
        pairs = dict(_read_pair(dataset, pair) for pair in _split_options(given))
        kinds = {one.name: type(one.default) for one in fields(cls) if one.name not in ("name", "config")}
        own = {key: value for key, value in pairs.items() if key in kinds}
        for key, value in own.items():
            if type(value) is not kinds[key]:
                kind = "true or false" if kinds[key] is bool else "a whole number"
                raise ValueError(f"--dataset={dataset!r}: {key}={value!r} must be {kind}; change it")
        options = cls(name=name, config={key: value for key, value in pairs.items() if key not in kinds}, **own)
        options.check(dataset)
        return options

    def check(self, dataset: str) -> None:
        """Raises ValueError for numbers out of range, or for seeds shared by training and held-out questions."""
        for key, least in (("size", 1), ("held_out", 1), ("seed", 0), ("held_out_seed", 0), ("shots", 0)):
            if getattr(self, key) < least:
                raise ValueError(
                    f"--dataset={dataset!r}: {key}={getattr(self, key)} must be at least {least}; raise it"
                )
        end = self.held_out_seed + self.held_out + self.shots
        if max(end, self.seed + self.size) > LARGEST_SEED:
            raise ValueError(f"--dataset={dataset!r}: seeds must stay below 2**32; lower seed or held_out_seed")
        if self.seed < end and self.held_out_seed < self.seed + self.size:
            raise ValueError(
                f"--dataset={dataset!r}: the seeds {self.seed} to {self.seed + self.size - 1} are trained on and those "
                f"from {self.held_out_seed} to {end - 1} held out; they must be disjoint: change seed or held_out_seed"
            )


def read_questions(
    dataset: str, split: str | None = None, configuration: str | None = None, split_option: str = "split"
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of one split, `train` (default) or `held_out`, each with its place.

    Raises:
        ValueError: a split or dataset does not exist, the library refuses an option or is not installed, or nothing is
            left to train on.
    """
    if configuration is not None:
        raise ValueError(
            f"--dataset-config={configuration!r}: the options of {dataset!r} are part of its name; leave it out"
        )
    if split not in (None, TRAIN, HELD_OUT):
        raise ValueError(
            f"{flag(split_option)}={split!r}: {dataset!r} has the splits 'train' and 'held_out'; choose one"
        )
    options = QuestionOptions.read(dataset)
    shots, held_out, train = _parts(dataset)
    if not train:
        raise ValueError(
            f"--dataset={dataset!r}: each of its {options.size} questions equals a held-out one, of which there are "
            f"{len(held_out)}; lower held_out or make the questions harder"
        )
    for entry in held_out if split == HELD_OUT else train:
        metadata = entry["metadata"] | {"source_dataset": options.name, "source_config": options.config}
        prompt = _build_prompt(entry["question"], shots, options.chat)
        yield f"question {entry['seed']}", {"prompt": prompt, "answer": entry["answer"], "metadata": metadata}


@lru_cache(maxsize=8)
def _parts(dataset: str) -> tuple[list[Entry], list[Entry], list[Entry]]:
    """The solved examples, the held-out questions and those to train on; no question is in two of them."""
    options = QuestionOptions.read(dataset)
    first = options.held_out_seed
    ranges = [
        (first + options.held_out, options.shots),
        (first, options.held_out),
        (options.seed, options.size),
    ]
    shots, held_out, train = make_entries(dataset, options, ranges)
    if any(entry["answer"] is None for entry in shots):
        raise ValueError(f"--dataset={dataset!r}: its questions have no single right answer to show; leave shots out")
    seen = {entry["question"] for entry in shots}
    distinct = {entry["question"]: entry for entry in reversed(held_out) if entry["question"] not in seen}
    seen |= distinct.keys()
    return shots, list(distinct.values())[::-1], [entry for entry in train if entry["question"] not in seen]


def _build_prompt(question: str, shots: list[Entry], is_chat: bool) -> str | list[dict[str, str]]:
    if not is_chat:
        return "".join(f"{shot['question']}\n{shot['answer']}\n\n" for shot in shots) + f"{question}\n"
    turns = [text for shot in shots for text in (shot["question"], shot["answer"])] + [question]
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(turns)]


def require_library(option: str) -> None:
    """Raises ValueError if reasoning-gym is not installed; `option` is the option that needs it, as it is typed."""
    if importlib.util.find_spec(LIBRARY) is None:
        raise ValueError(
            f"{option} needs the library reasoning-gym, which is not installed; install it with "
            "pip install 'hybrid-engine[real]'"
        )


def make_entries(dataset: str, options: QuestionOptions, ranges: list[tuple[int, int]]) -> list[list[Entry]]:
    """The library's questions for each range of seeds (first seed, count), with their seeds.

    Raises:
        ValueError: the library is not installed, or refuses the name or the options.
    """
    require_library(f"--dataset={dataset!r}")
    made = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MAKE_ENTRIES],
        input=pickle.dumps((options.name, options.config, ranges)),
        capture_output=True,
        env=os.environ | {"PYTHONHASHSEED": "0"},
        check=False,
    )
    if made.returncode:
        reason = made.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ValueError(f"--dataset={dataset!r}: reasoning-gym failed ({' '.join(reason)}); choose other options")
    entries = pickle.loads(made.stdout)
    if isinstance(entries, str):
        raise ValueError(f"--dataset={dataset!r}: {entries}")
    return entries


def _split_options(given: str) -> list[str]:
    """Splits `given` at its commas, except those inside brackets."""
    parts, depth = [""], 0
    for character in given:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part for part in parts if part]


def _read_pair(dataset: str, pair: str) -> tuple[str, Any]:
    key, equals, value = pair.partition("=")
    if not equals or not key:
        raise ValueError(
            f"--dataset={dataset!r}: {pair!r} is not an option; write name=value pairs, separated by commas"
        )
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


NAMED: dict[str, NamedReader] = {SCHEME: read_questions}
"""Readers of datasets that are generated and not stored, by the part of their names before the colon."""


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
