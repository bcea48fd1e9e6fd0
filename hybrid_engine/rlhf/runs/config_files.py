"""`config.yaml` beside the results of a run: its options, as `--config` reads them. Needs no torch."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

CONFIG = "config.yaml"
_HEADING = "# hybrid-engine "
_HOW_IT_BEGAN = ("resume", "restart")
"""Options of one start, not of the run: a run that was resumed is the run that was never stopped."""


def flat_options(config: Any) -> dict[str, Any]:
    """The options of a recipe's `Config` by the names that they have on the command line, in its order.

    A field that is a dataclass itself gives its own fields. How a run begins, `resume` and `restart`, is left out.
    """
    options: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        options |= flat_options(value) if is_dataclass(value) else {field.name: value}
    return {name: value for name, value in options.items() if name not in _HOW_IT_BEGAN}


def write_config(folder: Path, config: Any) -> None:
    """Writes `config.yaml` into `folder`, whole or not at all; for one process. Its first line names the recipe."""
    options = {name: list(value) if isinstance(value, tuple) else value for name, value in flat_options(config).items()}
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{CONFIG}"
    heading = f"{_HEADING}{type(config).__module__.rpartition('.')[2]} --config {CONFIG}\n"
    unfinished.write_text(heading + yaml.safe_dump(options, sort_keys=False, allow_unicode=True), encoding="utf-8")
    unfinished.replace(folder / CONFIG)


def read_recipe(folder: Path) -> str | None:
    """The recipe that wrote the `config.yaml` of a run's folder; None where nothing says it."""
    path = folder / CONFIG
    first = path.read_text(encoding="utf-8").partition("\n")[0] if path.exists() else ""
    return first.removeprefix(_HEADING).split()[0] if first.startswith(_HEADING) else None


def read_config(folder: Path) -> dict[str, Any]:
    """The options in the `config.yaml` of a run's folder; empty without one.

    Raises:
        ValueError: it cannot be read.
    """
    path = folder / CONFIG
    if not path.exists():
        return {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(
            f"{str(path)!r} cannot be read: {' '.join(str(error).split())}; restore or remove it"
        ) from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{str(path)!r} must hold options as `name: value` lines; restore or remove it")
    return {str(name): value for name, value in content.items()}
