"""Columns as `--columns` and `--prompt-template` name them, also inside of other columns, and sources of data."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybrid_engine.config.checks import flag

MISSING = object()
_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def find_value(value: Any, path: str) -> Any:
    """The value of a row under `path`, such as `reward_model.ground_truth` or `turns.0.text`; `MISSING` if absent.

    A column whose full name contains the dots comes first.
    """
    if isinstance(value, Mapping) and path in value:
        return value[path]
    place = path.find(".")
    while place > 0:
        inner = _entry(value, path[:place])
        found = MISSING if inner is MISSING else find_value(inner, path[place + 1 :])
        if found is not MISSING:
            return found
        place = path.find(".", place + 1)
    return _entry(value, path)


def _entry(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return value.get(name, MISSING)
    if isinstance(value, Sequence) and not isinstance(value, str) and name.isdecimal() and int(name) < len(value):
        return value[int(name)]
    return MISSING


def read_prompt_template(given: str) -> str:
    """The text of `--prompt-template`, or of the file that it names.

    Raises:
        ValueError: the file cannot be read, a brace is unpaired or empty, or no column is named.
    """
    template = _file_text(given)
    for match in _FIELD.finditer(template):
        if match[0] in ("{", "}") or (match[1] is not None and not match[1].strip()):
            raise ValueError(
                f"--prompt-template={given!r} has {match[0]!r}, which names no column; write a column in braces, such "
                "as {prompt}, and double a literal brace"
            )
    if not template_columns(template):
        raise ValueError(
            f"--prompt-template={given!r} names no column, so all prompts would be the same; write a column in braces, "
            "such as {prompt}"
        )
    return template


def template_columns(template: str) -> set[str]:
    """The columns that a template names; dots lead inside of a column."""
    return {match[1] for match in _FIELD.finditer(template) if match[1] is not None}


def _file_text(given: str) -> str:
    try:
        if Path(given).is_file():
            return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if "{" not in given:
            raise ValueError(f"--prompt-template={given!r} cannot be read: {error}") from error
    if "\\n" in given:
        raise ValueError(
            f"--prompt-template={given!r} contains a backslash and an n, which the shell does not convert; use $'...' "
            "for a line break, or give a file with the template"
        )
    return given


def fill_template(template: str, row: Mapping[str, Any]) -> str:
    """The template with the row's values; ValueError, without the row's place, if one is missing or not text."""

    def value_of(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        value = find_value(row, match[1])
        if value is None or value is MISSING or isinstance(value, (list, dict)):
            shown = "no value" if value is None or value is MISSING else "a list or an object"
            raise ValueError(f"has {shown} in {match[1]!r}, which --prompt-template names; fix the row or the template")
        return str(value)

    return _FIELD.sub(value_of, template)


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """A dataset, or several that are mixed, and how rows are read from them."""

    datasets: tuple[str, ...]
    """Files, folders, names on the Hugging Face hub, or names of `data_files.NAMED`."""
    option: str = "dataset"
    """The option that names them, for errors."""
    split: str | None = None
    """The split to read if there are several; None: `train`."""
    split_option: str = "split"
    """The option that names the split, for errors."""
    configuration: str | None = None
    """The configuration to read of a dataset that has several."""
    columns: tuple[str, ...] = ()
    """Names of columns, each as THEIRS=OURS; theirs may be inside of another, with dots between."""
    prompt_template: str | None = None
    """Text around each prompt, with columns in braces."""
    system_prompt: str | None = None
    """The system turn for conversations that have none of their own."""
    is_conversation: bool = False
    """Whether a prompt that is text becomes the user turn of a conversation."""
    skips_bad_rows: bool = False
    """Whether rows that cannot be used are left out and counted; otherwise they are an error."""
    row_key: tuple[str, ...] = ()
    """Columns that make rows of one prompt distinct tasks; empty: those that the rewards read."""
    deduplicates: bool = False
    """Whether only the first of equal rows is kept."""
    held_out_share: float = 0.1
    """Approximate share of all prompts that is held out; 0 holds none out."""
    held_out_dataset: str | None = None
    """The dataset of the held-out rows, which are then not a share of the others."""
    held_out_split: str | None = None
    """The split for held-out rows of that dataset, or of the dataset itself if there is none."""
    weights: tuple[float, ...] = ()
    """A weight for each dataset, which sets its share of the training rows; empty: as many as it has."""
    is_one_of_several: bool = False
    """Whether others are mixed with it, so that a column may be missing here."""

    @classmethod
    def of(cls, source: "DataSource | str") -> "DataSource":
        """The source itself, or a source for a dataset's name with default options."""
        return source if isinstance(source, DataSource) else cls(datasets=(source,))

    @property
    def shown(self) -> str:
        """The option as it is typed: `--dataset='data.jsonl'`."""
        return f"{flag(self.option)}={' '.join(map(repr, self.datasets))}"

    @property
    def split_shown(self) -> str:
        """The option that names the split as it is typed: `--split='test'`."""
        return f"{flag(self.split_option)}={self.split!r}"

    def each(self) -> Iterator["DataSource"]:
        """Each dataset by itself."""
        is_mixed = self.is_one_of_several or len(self.datasets) > 1
        return (replace(self, datasets=(dataset,), is_one_of_several=is_mixed) for dataset in self.datasets)

    @property
    def held_out_source(self) -> "DataSource | None":
        """The source of the held-out rows; None: they are a share of the others."""
        if self.held_out_dataset is None and self.held_out_split is None:
            return None
        given = replace(self, held_out_dataset=None, held_out_split=None, weights=())
        given = replace(given, split=self.held_out_split, split_option="held_out_split")
        if self.held_out_dataset is None:
            return given
        return replace(given, datasets=(self.held_out_dataset,), option="held_out_dataset", configuration=None)

    @property
    def as_found(self) -> "DataSource":
        """The source without wrapped prompts: the dataset's own prompts determine what is held out."""
        template = None if self.wraps_prompts else self.prompt_template
        return replace(self, prompt_template=template, system_prompt=None, is_conversation=False)

    @property
    def wraps_prompts(self) -> bool:
        """Whether the template wraps an existing prompt, and does not write one from other columns."""
        return self.prompt_template is not None and "prompt" in template_columns(self.prompt_template)


def read_names(columns: Sequence[str]) -> dict[str, str]:
    """Our names of columns by theirs, from `--columns`; ValueError if one is not THEIRS=OURS, or is named twice."""
    names: dict[str, str] = {}
    for given in columns:
        theirs, equals, ours = given.rpartition("=")
        if not (theirs and equals and ours):
            raise ValueError(f"--columns={given!r} must have the form THEIRS=OURS, such as question=prompt; change it")
        if theirs in names or ours in names.values():
            raise ValueError(f"--columns={' '.join(columns)!r} names a column of {given!r} twice; leave one out")
        names[theirs] = ours
    return names
