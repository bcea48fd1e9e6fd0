"""Writes `docs/config.md`: each key of DeepSpeed's ds_config and its status in this engine.

python -m hybrid_engine.cli.config_page > docs/config.md
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from hybrid_engine.config import SIMPLE_BLOCKS, EngineConfig, OffloadConfig, OffloadParamConfig, ZeroConfig
from hybrid_engine.config.keys import NO_MEANING, NOT_SUPPORTED, OPTIMIZERS_NOT_SUPPORTED, OTHER_NAMES, as_json
from hybrid_engine.config.optimizer import (
    MUON_RATES,
    OPTIMIZER_DEFAULTS,
    OPTIMIZER_PARAMS,
    SCHEDULER_PARAMS,
    TORCH_OPTIMIZERS,
    TORCH_SCHEDULERS,
    OptimizerConfig,
    SchedulerConfig,
)
from hybrid_engine.config.reading import FROM_ARGUMENTS, ONLY_THE_USER_KNOWS

WORKING: dict[str, Any] = {
    "": EngineConfig,
    "zero_optimization": ZeroConfig,
    "zero_optimization.offload_optimizer": OffloadConfig,
    "zero_optimization.offload_param": OffloadParamConfig,
    "optimizer": OptimizerConfig,
    "scheduler": SchedulerConfig,
    **SIMPLE_BLOCKS,
}
"""The dataclass that reads each block."""
NOT_KEYS = ("block", "given")
"""Fields that no key of the config sets: an OffloadConfig's own name, and the config as the user gave it."""
PARAMS = {"optimizer.params": OPTIMIZER_PARAMS, "scheduler.params": SCHEDULER_PARAMS}
TORCH_CLASSES = {"optimizer": TORCH_OPTIMIZERS, "scheduler": TORCH_SCHEDULERS}
BLOCKS = [*WORKING, *PARAMS, *(path for path in {**NO_MEANING, **NOT_SUPPORTED} if path not in {**WORKING, **PARAMS})]
HEADER = """# The config

Written by `python -m hybrid_engine.cli.config_page`; edit what `hybrid_engine/config/` has instead.

`initialize(config=...)` takes DeepSpeed's ds_config: a dict, the path of a JSON file, or its content in URL-safe
base64. Each key *works*, is *accepted* because what it tunes has no meaning here, or is *not supported*: an error
while it is switched on. Any other key is an error that names the nearest known one; at the top level, where DeepSpeed
reads past it, only if it looks like a misspelt one, or is what other programs call an option that has another place
here, as `learning_rate`, `batch_size` or `max_grad_norm`; and else a warning, as for keys of `zero_optimization` that
stand there. Rank 0 warns, once for the same keys.

Keys that begin with `_`, `#` or `//` and "comment" are comments. So are `// ...`, `# ...` and `/* ... */` in files, and
trailing commas are read past; the rest of Hjson, which DeepSpeed reads too, is not read.
"""


def render() -> str:
    """The text of `docs/config.md`."""
    parts = [HEADER, *(_render_block(path) for path in sorted(BLOCKS)), _render_auto()]
    return "\n".join(parts)


def _render_block(path: str) -> str:
    title = f"`{path}`" if path else "Top level"
    rows = [*_working_rows(path), *_params_rows(path)]
    rows += [_row(name, "", "works", f"another name of `{new}`") for name, new in _other_names(path)]
    rows += [_row(key, "", "accepted", f"no meaning here: {why}") for key, why in NO_MEANING.get(path, {}).items()]
    rows += [_row(key, "", "not supported", entry.why) for key, entry in NOT_SUPPORTED.get(path, {}).items()]
    return "\n".join([f"## {title}", "", "| key | default | | |", "|---|---|---|---|", *rows, ""])


def _row(key: str, default: str, status: str, text: str) -> str:
    return f"| `{key}` | {default} | {status} | {' '.join(text.split()).replace('|', chr(92) + '|')} |"


def _working_rows(path: str) -> Iterator[str]:
    if path in WORKING:
        meanings = field_meanings(WORKING[path])
        for entry in fields(WORKING[path]):
            if entry.name not in NOT_KEYS:
                text = meanings[entry.name]
                if entry.name in WORKING and not path:
                    text += " See the block below."
                yield _row(entry.name, _default(entry), "works", text)
    if not path:
        yield _row("data_types", "", "works", "See the block below.")
    if path in TORCH_CLASSES:
        yield _row("type", "", "works", f"PyTorch's {', '.join(TORCH_CLASSES[path])}: `params` are its arguments")
    if path == "optimizer":
        yield _row("type", "", "not supported", ", ".join(OPTIMIZERS_NOT_SUPPORTED) + ": pass an instance instead")


def _default(entry: "Field[Any]") -> str:
    if entry.default_factory is not MISSING or is_dataclass(entry.default) or entry.default is MISSING:
        return ""
    return f"`{as_json(entry.default)}`"


def _params_rows(path: str) -> Iterator[str]:
    kinds = PARAMS.get(path, {})
    for key in dict.fromkeys(key for keys in kinds.values() for key in keys):
        users = [kind for kind, keys in kinds.items() if key in keys]
        known = [kind for kind in users if key in _defaults(kind)]
        defaults = sorted({as_json(_defaults(kind)[key]) for kind in known})
        without = [kind for kind in users if known and kind not in known]
        says = f"of {', '.join(known or users)}" + (f"; of {', '.join(without)}, without a default" if without else "")
        yield _row(key, " or ".join(f"`{value}`" for value in defaults), "works", says)


def _defaults(kind: str) -> dict[str, Any]:
    return OPTIMIZER_DEFAULTS.get(kind, {}) | (MUON_RATES if kind == "Muon" else {})


def _other_names(path: str) -> Iterator[tuple[str, str]]:
    for old, new in OTHER_NAMES.items():
        parent, _, key = old.rpartition(".")
        if parent == path:
            yield key, new


def _render_auto() -> str:
    lines = [
        '## `"auto"`',
        "",
        'A value "auto" becomes what `initialize(args=...)` says, if `args` is a TrainingArguments of transformers or',
        "has its attributes; a batch size follows from the others; `scheduler.params.warmup_max_lr` is the optimizer's",
        "`lr`;",
        "otherwise the default counts, unless only the user can know the value, which is then an error.",
        "",
        "| key | from TrainingArguments | without |",
        "|---|---|---|",
    ]
    for key in dict.fromkeys([*FROM_ARGUMENTS, *sorted(ONLY_THE_USER_KNOWS)]):
        source = f"`{FROM_ARGUMENTS[key][0]}`" if key in FROM_ARGUMENTS else ""
        lines.append(f"| `{key}` | {source} | {'an error' if key in ONLY_THE_USER_KNOWS else 'as said above'} |")
    return "\n".join([*lines, ""])


def field_meanings(config_class: type) -> dict[str, str]:
    """The string below each field of a dataclass and of its base classes, by field name, read from the source."""
    classes = [base for base in reversed(config_class.__mro__) if is_dataclass(base)]
    return {name: text for base in classes for name, text in _own_meanings(base).items()}


def _own_meanings(config_class: type) -> dict[str, str]:
    definition = ast.parse(textwrap.dedent(inspect.getsource(config_class))).body[0]
    assert isinstance(definition, ast.ClassDef), config_class
    return {name: text for name, (_, text) in documented_fields(definition).items()}


def documented_fields(definition: ast.ClassDef) -> dict[str, tuple[ast.AnnAssign, str]]:
    """The fields of a class that have a string below them, by name, each with that string."""
    found = {}
    for node, following in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(following, ast.Expr):
            found[node.target.id] = (node, inspect.cleandoc(ast.literal_eval(following.value)))
    return found


if __name__ == "__main__":
    print(render(), end="")
