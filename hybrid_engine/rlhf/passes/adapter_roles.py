"""Several adapters of peft on one base, which plays another role with each of them."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def playing(module: nn.Module, adapter: str | None) -> Iterator[None]:
    """Inside, `module` computes with this adapter alone; with None as its base does.

    Which parameters require a gradient stays as it is: peft's own `set_adapter` and `disable_adapter` freeze the others
    (peft 0.21, src/peft/tuners/tuners_utils.py, `BaseTunerLayer`), which an engine that trains several would take for
    parameters that are no longer trained. A backward pass that computes activations again belongs inside too.
    """
    layers = [layer for layer in module.modules() if hasattr(layer, "_disable_adapters")]
    before = [(layer._active_adapter, layer._disable_adapters) for layer in layers]
    for layer in layers:
        layer._disable_adapters = adapter is None  # type: ignore[assignment]
        if adapter is not None:
            layer._active_adapter = [adapter]  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer, (active, is_disabled) in zip(layers, before, strict=True):
            layer._active_adapter, layer._disable_adapters = active, is_disabled
