"""Rewrites the engine's messages for a command's user: `--exact` in place of the config's `hybrid_engine.exact`."""

import logging
import re
from collections.abc import Iterable

OPTIONS = {
    "hybrid_engine.exact": "exact",
    "hybrid_engine.max_running": "max_running",
    "max_running": "max_running",
    "num_return_sequences": "num_samples",
    "pipeline_parallel_size": "pp",
    "tensor_parallel.tp_size": "tp",
    "zero_optimization.stage": "zero_stage",
}
"""The option of a command, by the name of a key of the engine's config or of an argument of `generate()`."""


def in_options(text: str, names: Iterable[str]) -> str:
    """Returns `text` with names of the engine's options replaced by a command's flags for the options `names`.

    A key of the config is replaced wherever it occurs, any other name only where a value follows: `max_new_tokens=8`.
    """
    flags = {name: f"--{name.replace('_', '-')}" for name in names}
    keys = {key: flags[name] for key, name in OPTIONS.items() if name in flags}
    texts = sorted((*map(re.escape, keys), *(f"{name}(?==)" for name in flags)), key=len, reverse=True)
    pattern = rf"(?<![-\w.:'\"`])(?:{'|'.join(texts)})(?![\w.]\w)"
    return re.sub(pattern, lambda found: keys.get(found[0]) or flags[found[0]], text)


class InOptions(logging.Filter):
    """Rewrites the lines of a logger with the flags of a command that has the options `names`."""

    def __init__(self, names: Iterable[str]):
        super().__init__()
        self.names = tuple(names)

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = in_options(record.getMessage(), self.names), None
        return True
