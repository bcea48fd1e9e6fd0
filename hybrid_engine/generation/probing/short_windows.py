"""Sliding windows shortened in a model and in its containers, so that a probe of a few tokens reaches beyond them.

A probe of a dozen tokens cannot tell a layer with a window of 4096 tokens from one without. Modules of transformers
read the window when they make their masks, from the config, so that another number there is another window.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hybrid_engine.containers import InferenceModel

SHORT_WINDOW = 4
WINDOW_NAMES = ("sliding_window", "window_size", "attention_chunk_size")
"""Names of windows in configs and modules, whether or not the policy knows that the family has one."""


def widest_window(model: InferenceModel) -> int:
    """Tokens of the widest window of containers; 0 where no layer has one."""
    return max(layer.attention.softmax_context.window or 0 for layer in model.layers)


@contextmanager
def short_windows(module: nn.Module, model: InferenceModel) -> Iterator[bool]:
    """Inside, windows wider than SHORT_WINDOW have its size; yields whether there are any, in module or containers."""
    ops = [layer.attention.softmax_context for layer in model.layers]
    wide_ops = [(op, op.window) for op in ops if op.window is not None and op.window > SHORT_WINDOW]
    holders = list(_holders(module, (*WINDOW_NAMES, *([model.policy.window] if model.policy.window else []))))
    try:
        for holder, name, _ in holders:
            setattr(holder, name, SHORT_WINDOW)
        for op, _ in wide_ops:
            op.set_window(SHORT_WINDOW)
        yield bool(holders or wide_ops)
    finally:
        for holder, name, window in holders:
            setattr(holder, name, window)
        for op, window in wide_ops:
            op.set_window(window)


def _holders(module: nn.Module, names: tuple[str, ...]) -> Iterator[tuple[Any, str, int]]:
    """Configs and modules that say how wide a window is, under which name, and how wide."""
    parts = list(module.modules())
    configs = [config for part in parts if (config := getattr(part, "config", None)) is not None]
    configs += [config.get_text_config() for config in configs if hasattr(config, "get_text_config")]
    for holder in {id(holder): holder for holder in (*parts, *configs)}.values():
        for name in dict.fromkeys(names):
            window = vars(holder).get(name)
            if isinstance(window, int) and not isinstance(window, bool) and window > SHORT_WINDOW:
                yield holder, name, window
