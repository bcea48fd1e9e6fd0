"""Reading blocks of a DeepSpeed-format config against the tables of `keys.py`.

A key that no table has is an error, as it is in DeepSpeed's blocks. At the top level DeepSpeed reads past it, and
large files carry notes of their own there, or options of ZeRO that were meant for its block: such a key is reported
with those that have no effect, unless it looks like a misspelt one (`MISSPELT`) or is what other programs call an
option (`CALLED_ELSEWHERE`). A key that begins with `_`, `#` or `//`, or is called "comment", is a comment everywhere.

"auto" is resolved as the integration of transformers does. There, the Trainer replaces "auto" by what its
TrainingArguments say before DeepSpeed sees the config. Here, `initialize(args=...)` takes the same object, and each
"auto" becomes, in this order:

1. what `args` says, under the name that TrainingArguments has for it (`FROM_ARGUMENTS`);
2. for a batch size, what follows from the others; for `scheduler.params.warmup_max_lr`, the optimizer's `lr`, also
   that of one which is passed to `initialize`;
3. an error, if only the user can know (the learning rate, the number of steps, the precision, the ZeRO stage);
4. the default, which is DeepSpeed's.

Source of the table: transformers, `integrations/deepspeed.py`, `HfTrainerDeepSpeedConfig`.
"""

import base64
import binascii
import dataclasses
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from hybrid_engine.config.blocks import ZeroConfig
from hybrid_engine.config.checks import find_nearest, whole_number
from hybrid_engine.config.keys import (
    CALLED_ELSEWHERE,
    MISTAKEN,
    NO_MEANING,
    NOT_SUPPORTED,
    OTHER_NAMES,
    TAKES_MEMORY,
    WRITTEN_BY_LIBRARIES,
    as_json,
)

MISSPELT = 0.8
"""How alike (difflib's ratio) an unknown key at the top level and a known one are if it is an error: "monitor" and
"csv_monitor" are two things at 0.78, "train_micro_batch_size" and the full name are one at 0.85."""
STRING = r'"(?:\\.|[^"\\\n])*"'
COMMENT = r"(?://|\#)[^\n]*|/\*.*?\*/"
_strings_and_comments = re.compile(f"({STRING})|{COMMENT}", re.DOTALL)
_strings_and_trailing_commas = re.compile(rf"({STRING})|,(?=\s*[\]}}])", re.DOTALL)
AUTO = "auto"
BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
ONLY_THE_USER_KNOWS = frozenset(
    {
        "optimizer.type",
        "optimizer.params.lr",
        "scheduler.type",
        "scheduler.params.total_num_steps",
        "fp16.enabled",
        "bf16.enabled",
        "bfloat16.enabled",
        "hybrid_engine.enabled",
        "zero_optimization.stage",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_param.device",
    }
)
BLOCKS = frozenset(
    {
        "bf16",
        "bfloat16",
        "fp16",
        "hybrid_engine",
        "optimizer",
        "optimizer.params",
        "scheduler",
        "scheduler.params",
        "zero_optimization",
        "zero_optimization.offload_optimizer",
        "zero_optimization.offload_param",
    }
)
"""Blocks that change what is computed, or where: each of their options may be "auto", the block may not."""


def join(path: str, key: str) -> str:
    """The full name of `key` inside the block `path`, as errors print it."""
    return f"{path}.{key}" if path else key


def read_block(block: dict[str, Any], path: str, fields: Collection[str], without_effect: list[str]) -> dict[str, Any]:
    """The entries of `block` that the engine reads.

    Args:
        block: the JSON object found at `path`; not changed. A key that is still "auto" has its default.
        path: its full name, empty for the whole config.
        fields: the keys that are read here.
        without_effect: receives the full names of keys that are accepted, switched on and have no meaning here, or
            are unknown to DeepSpeed too.

    Raises:
        ValueError: for an unknown key (see above), or a feature that is not supported and switched on.
    """
    refused = NOT_SUPPORTED.get(path, {})
    ignored = NO_MEANING.get(path, {})
    found = {}
    for key, value in block.items():
        name = join(path, str(key))
        if key not in fields and key not in ignored and key not in refused:
            without_effect.extend(_read_unknown(str(key), path, fields))
        elif value == AUTO:
            continue
        elif key in fields:
            found[key] = value
        elif key in ignored:
            if _is_switched_on(value):
                without_effect.append(f"{name} ({ignored[key]})" if name in TAKES_MEMORY else name)
        elif not refused[key].is_off(without_auto(value) if isinstance(value, dict) else value):
            raise ValueError(
                f"{name}={as_json(value)} is not supported: {refused[key].why}; {refused[key].remedy(name)}"
            )
    return found


def _is_switched_on(value: Any) -> bool:
    return (value.get("enabled", True) if isinstance(value, Mapping) else value) not in (False, None)


def _read_unknown(key: str, path: str, fields: Collection[str]) -> list[str]:
    """How to report a key that no table has; nothing for a comment, and for what libraries write by themselves."""
    if not path and key in WRITTEN_BY_LIBRARIES:
        return []
    if key.startswith(("_", "#", "//")) or key.lower() == "comment":
        return []
    if not path and (meant := CALLED_ELSEWHERE.get(key.lower().replace("-", "_"))):
        raise ValueError(f"{key} is not a known option; set {meant} instead, or remove it")
    if not path and _is_of_zero(key):
        return [f"{key} (belongs in zero_optimization; DeepSpeed, too, ignores it at the top level)"]
    known = [*fields, *NO_MEANING.get(path, ()), *NOT_SUPPORTED.get(path, ())]
    close = find_nearest(key, known) if path else MISTAKEN.get(key.lower(), find_nearest(key, known, MISSPELT))
    if close:
        raise ValueError(f"{join(path, key)} is not a known option; did you mean {join(path, close)}?")
    if path:
        raise ValueError(
            f"{join(path, key)} is not a known option; the options read in {path} are "
            f"{', '.join(sorted(fields)) or 'none'}"
        )
    return [f"{key} (unknown to DeepSpeed too)"]


def _is_of_zero(key: str) -> bool:
    path = "zero_optimization"
    known = {entry.name for entry in dataclasses.fields(ZeroConfig)}.union(NO_MEANING[path], NOT_SUPPORTED[path])
    return key in known or join(path, key) in OTHER_NAMES


def with_integers(values: dict[str, Any], cls: Any) -> dict[str, Any]:
    """`values` with an int for each whole float at an integer field of the dataclass `cls`; files have 1e3 and 16.0."""
    integers = {entry.name for entry in dataclasses.fields(cls) if entry.type in (int, int | None)}
    return {name: whole_number(value) if name in integers else value for name, value in values.items()}


def child_block(parent: dict[str, Any], key: str, path: str = "") -> dict[str, Any]:
    """The JSON object at `key`; an absent one or null is empty."""
    value = parent.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f'{join(path, key)}={value!r} must be a block of options; write it like {{"option": value}}')
    return dict(value)


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in the file at `path`, or in `path` itself when that is one in URL-safe base64."""
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"config={path!r} must be a dict or the path of a JSON file, not {type(path).__name__}")
    try:
        text = _decode_base64(path) or _read_text(path)
        content = json.loads(without_comments(text), object_pairs_hook=_Pairs)
    except OSError as error:
        raise ValueError(f"config={os.fspath(path)!r} cannot be read: {error.strerror}; give a JSON file") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(
            f"config={os.fspath(path)!r} is not valid JSON: {error}; correct the file there (comments and trailing "
            "commas are allowed, other Hjson syntax is not)"
        ) from error
    if not isinstance(content, _Pairs):
        raise ValueError(f"config={os.fspath(path)!r} must hold a JSON object, not {type(content).__name__}")
    try:
        result: dict[str, Any] = _without_pairs(content, "")
    except ValueError as error:
        raise ValueError(f"config={os.fspath(path)!r}: {error}") from error
    return result


def _read_text(path: str | os.PathLike[str]) -> str:
    with open(path, encoding="utf-8-sig") as file:  # some editors begin files with a byte order mark
        return file.read()


def _decode_base64(text: str | os.PathLike[str]) -> str | None:
    """DeepSpeed's launchers hand configs over like this; None for everything that is no JSON object in base64."""
    if not isinstance(text, str) or os.path.exists(text):
        return None
    try:
        decoded = base64.b64decode(text, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


class _Pairs(list[tuple[str, Any]]):
    """The entries of a JSON object in their order, some keys perhaps twice."""


def _without_pairs(content: Any, path: str) -> Any:
    """`content` with dicts for `_Pairs`; raises ValueError for a key that is given twice."""
    if isinstance(content, _Pairs):
        result: dict[str, Any] = {}
        for key, value in content:
            name = join(path, key)
            plain = _without_pairs(value, name)
            if key in result:
                raise ValueError(f"{name} is given twice, {result[key]!r} and {plain!r}; keep one of them")
            result[key] = plain
        return result
    if isinstance(content, list):
        return [_without_pairs(value, f"{path}[{index}]") for index, value in enumerate(content)]
    return content


def without_comments(text: str) -> str:
    """`text` with spaces for `// ...`, `# ...`, `/* ... */` and trailing commas, but not inside strings.

    Every other character stays where it is, so errors that a JSON parser finds have the file's line and column.
    """
    return _strings_and_trailing_commas.sub(_blank_comma, _strings_and_comments.sub(_blank_comment, text))


def _blank_comment(found: re.Match[str]) -> str:
    return found[1] or re.sub(r"[^\n]", " ", found[0])


def _blank_comma(found: re.Match[str]) -> str:
    before = found.string[: found.start()].rstrip()[-1:]
    follows_value = before.isalnum() or before in ('"', "]", "}")  # in `[,]` it does not, and is an error
    return found[1] or (" " if follows_value else ",")


def _num_steps(args: Any) -> int:
    if args.max_steps <= 0:
        raise AttributeError("max_steps is not set: the number of steps is not known yet")
    return args.max_steps


def _num_warmup_steps(args: Any) -> int:
    if args.warmup_steps >= 1:
        return int(args.warmup_steps)
    if args.warmup_steps > 0 and args.max_steps <= 0:
        raise ValueError(
            f'scheduler.params.warmup_num_steps="auto" is warmup_steps={args.warmup_steps} of the steps, whose number '
            f"is not known: max_steps={args.max_steps}; set max_steps, or write the number of steps itself"
        )
    return max(1, args.get_warmup_steps(max(0, args.max_steps)))


FROM_ARGUMENTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", lambda a: a.per_device_train_batch_size),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", lambda a: a.gradient_accumulation_steps),
    "gradient_clipping": ("max_grad_norm", lambda a: a.max_grad_norm),
    "optimizer.params.lr": ("learning_rate", lambda a: a.learning_rate),
    "optimizer.params.betas": ("adam_beta1, adam_beta2", lambda a: [a.adam_beta1, a.adam_beta2]),
    "optimizer.params.eps": ("adam_epsilon", lambda a: a.adam_epsilon),
    "optimizer.params.weight_decay": ("weight_decay", lambda a: a.weight_decay),
    "scheduler.params.warmup_min_lr": ("0, whatever they say", lambda a: 0),
    "scheduler.params.warmup_max_lr": ("learning_rate", lambda a: a.learning_rate),
    "scheduler.params.warmup_num_steps": ("warmup_steps", _num_warmup_steps),
    "scheduler.params.total_num_steps": ("max_steps", _num_steps),
    "fp16.enabled": ("fp16 or fp16_full_eval", lambda a: bool(a.fp16 or a.fp16_full_eval)),
    "bf16.enabled": ("bf16 or bf16_full_eval", lambda a: bool(a.bf16 or a.bf16_full_eval)),
    "bfloat16.enabled": ("bf16 or bf16_full_eval", lambda a: bool(a.bf16 or a.bf16_full_eval)),
}
"""The value that a key's "auto" becomes, and its name in TrainingArguments."""


def resolve_auto(config: dict[str, Any], arguments: Any = None) -> dict[str, Any]:
    """A copy of `config` with what "auto" becomes; it stays where the default counts.

    Args:
        config: as read from the file; not changed.
        arguments: TrainingArguments, or any object with some of its attributes.

    Raises:
        ValueError: for an "auto" that only the user can fill in.
    """
    resolved = _resolve_block(config, "", arguments)
    if _find(resolved, "scheduler", "params", "warmup_max_lr") == AUTO:
        rate = _find(resolved, "optimizer", "params", "lr")
        resolved["scheduler"]["params"]["warmup_max_lr"] = rate  # null is the rate of the optimizer that is passed
    sizes = [name for name in BATCH_SIZES[:2] if config.get(name) == AUTO]
    if sizes and all(resolved.get(name, AUTO) == AUTO for name in BATCH_SIZES[:2]):
        raise ValueError(_explain(sizes[0]))
    return resolved


def without_auto(block: dict[str, Any]) -> dict[str, Any]:
    """A copy of `block` without the entries that are still "auto"."""
    return {
        key: without_auto(value) if isinstance(value, dict) else value for key, value in block.items() if value != AUTO
    }


def _resolve_block(block: dict[str, Any], path: str, arguments: Any) -> dict[str, Any]:
    resolved = {}
    for key, value in block.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict):
            value = _resolve_block(value, name, arguments)
        elif value == AUTO and name in BLOCKS:
            raise ValueError(f'{name}="auto" must be a block of options; write "auto" for individual options')
        elif value == AUTO:
            value = _from_arguments(name, arguments)
            if value is None and name in ONLY_THE_USER_KNOWS:
                raise ValueError(_explain(name))
            value = AUTO if value is None else value
        resolved[key] = value
    return resolved


def _from_arguments(name: str, arguments: Any) -> Any:
    if arguments is None or name not in FROM_ARGUMENTS:
        return None
    try:
        return FROM_ARGUMENTS[name][1](arguments)
    except AttributeError:  # another parser's arguments, or a TrainingArguments that cannot know
        return None


def _explain(name: str) -> str:
    source = f" (it becomes its {FROM_ARGUMENTS[name][0]})" if name in FROM_ARGUMENTS else ""
    return (
        f'{name}="auto" cannot be resolved here; write the value itself, or pass '
        f"transformers' TrainingArguments as initialize(args=...){source}"
    )


def _find(config: Any, *keys: str) -> Any:
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config
