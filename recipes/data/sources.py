"""Where the rows of a run come from and what is made of them, as the options of a recipe say it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hybrid_engine.recipes.runs.checks import flag


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """A data set, or several that are mixed, and how rows are read from it."""

    datasets: tuple[str, ...]
    """Files, folders, names on the Hugging Face hub, or names of `data_files.NAMED`."""
    option: str = "dataset"
    """The option that names them, for errors."""
    split: str | None = None
    """Which one is read of several; None: `train`."""
    configuration: str | None = None
    """Which one is read of a data set that has several."""
    skips_bad_rows: bool = False
    """Whether rows that cannot be used are left out and counted; else they are an error."""
    row_key: tuple[str, ...] = ()
    """Columns that make a row of its own of each that has one prompt; empty: those that the rewards read."""
    deduplicates: bool = False
    """Whether of rows that say the same only the first is kept."""
    held_out_share: float = 0.1
    """Of all prompts, about; 0 holds none out."""

    @classmethod
    def of(cls, source: "DataSource | str") -> "DataSource":
        """The source itself, or that of a data set's name with nothing else said of it."""
        return source if isinstance(source, DataSource) else cls(datasets=(source,))

    @property
    def shown(self) -> str:
        """The option as it is typed: `--dataset='data.jsonl'`."""
        return f"{flag(self.option)}={' '.join(map(repr, self.datasets))}"

    def each(self) -> Iterator["DataSource"]:
        """Every data set by itself."""
        return (replace(self, datasets=(dataset,)) for dataset in self.datasets)
