"""Reading blocks of a DeepSpeed-format config against the tables of `config_keys.py`."""

import json
import os
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from hybrid_engine.config_keys import NOT_BUILT, WITHOUT_EFFECT, as_json


def join(path: str, key: str) -> str:
    """The full name of `key` inside the block `path`, as errors print it."""
    return f"{path}.{key}" if path else key


def read_block(block: dict[str, Any], path: str, fields: Collection[str], without_effect: list[str]) -> dict[str, Any]:
    """The entries of `block` that the engine reads.

    Args:
        block: the JSON object found at `path`; not changed.
        path: its full name, empty for the whole config.
        fields: the keys that are read here.
        without_effect: receives the full names of keys that are accepted, switched on and do nothing here.

    Raises:
        ValueError: for an unknown key, a feature that is not built and switched on, and a value "auto".
    """
    refused = NOT_BUILT.get(path, {})
    ignored = WITHOUT_EFFECT.get(path, frozenset())
    found = {}
    for key, value in block.items():
        name = join(path, str(key))
        if key in fields:
            _refuse_auto(name, value)
            found[key] = value
        elif key in ignored:
            if value not in (False, None):
                without_effect.append(name)
        elif key not in refused:
            raise ValueError(f"{name} is not a known option; {_advise(str(key), path, fields)}")
        elif not refused[key].is_off(value):
            _refuse_auto(name, value)
            raise ValueError(
                f"{name}={as_json(value)} is known to DeepSpeed, not built yet here; {refused[key].remedy(name)}"
            )
    return found


def find_nearest(word: str, known: Collection[str]) -> str | None:
    """The entry of `known` that looks most like `word`, whatever its letter case; None when none is close."""
    by_lower_case = {name.lower(): name for name in known}
    close = get_close_matches(word.lower(), list(by_lower_case), n=1)
    return by_lower_case[close[0]] if close else None


def _advise(key: str, path: str, fields: Collection[str]) -> str:
    """What a user who wrote `key` in the block `path` probably meant."""
    close = find_nearest(key, [*fields, *WITHOUT_EFFECT.get(path, ()), *NOT_BUILT.get(path, ())])
    if close:
        return f"did you mean {join(path, close)}?"
    return f"the options read in {path or 'the config'} are {', '.join(sorted(fields)) or 'none'}"


def _refuse_auto(name: str, value: Any) -> None:
    if value == "auto":
        raise ValueError(
            f'{name}="auto" is filled in by the Trainer of transformers and never reaches DeepSpeed; '
            f"write the value itself or remove {name}"
        )


def child_block(parent: dict[str, Any], key: str, path: str = "") -> dict[str, Any]:
    """The JSON object at `key`; an absent one or null is empty."""
    value = parent.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f'{join(path, key)}={value!r} must be a block of options; write it like {{"option": value}}')
    return dict(value)


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"config={path!r} must be a dict or the path of a JSON file, not {type(path).__name__}")
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file, object_pairs_hook=_refuse_duplicates)
    except OSError as error:
        raise ValueError(f"config={os.fspath(path)!r} cannot be read: {error.strerror}; give a JSON file") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"config={os.fspath(path)!r} is not valid JSON: {error}; correct the file there") from error
    if not isinstance(content, dict):
        raise ValueError(f"config={os.fspath(path)!r} must hold a JSON object, not {type(content).__name__}")
    return content


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(
                f"{key} is given twice in one JSON object, {result[key]!r} and {value!r}; keep one of them"
            )
        result[key] = value
    return result
