"""`--config file.yaml`: reads the options of a recipe from a file by name; options on the command line win."""

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hybrid_engine.cli.recipe_options import Option


def read_config_file(path: str, options: Sequence[Option]) -> dict[str, Any]:
    """The options in the file, by name; `kl-coef` and `kl_coef` are the same option.

    Raises:
        ValueError: the file cannot be read as YAML, is not a mapping, names an option twice or one that the recipe does
            not have, or gives a value of the wrong type.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"--config={path!r} must be a YAML file that can be read: {reason}") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"--config={path!r} must hold options as `name: value` lines, and holds {content!r}")
    names = [str(key.value).replace("-", "_") for key, _ in yaml.compose(text, yaml.SafeLoader).value]
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"--config={path!r} gives {name} {count} times; leave one of them")
    by_name = {option.name: option for option in options}
    return dict(_read_entry(path, str(key), value, by_name) for key, value in content.items())


def _read_entry(path: str, key: str, value: Any, by_name: Mapping[str, Option]) -> tuple[str, Any]:
    name = key.replace("-", "_")
    if name not in by_name:
        nearest = difflib.get_close_matches(name, by_name, 1)
        remedy = f"did you mean {nearest[0]}?" if nearest else f"it has {', '.join(sorted(by_name))}"
        raise ValueError(f"--config={path!r}: the recipe has no option {key!r}; {remedy}")
    option = by_name[name]
    if not option.is_list:
        return name, None if value is None and option.default is None else _read_value(path, option, value)
    given = value if isinstance(value, list) else [] if value is None else [value]
    return name, tuple(_read_value(path, option, item) for item in given)


def _read_value(path: str, option: Option, value: Any) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if option.kind is float and isinstance(value, str):
        try:
            return float(value)  # YAML 1.1 reads 1e-5, without a decimal point, as text
        except ValueError:
            pass
    if option.kind is float and is_number:
        return float(value)
    if type(value) is option.kind:
        return value
    raise ValueError(
        f"--config={path!r}: {option.name}={value!r} must be of type {option.kind.__name__}; "
        f"write it {'in quotes' if option.kind is str else 'as one'}"
    )
