"""The rotary angles of a whole model: a table by position for each kind of its layers, and a batch's rows of them.

N packed tokens, P positions, R rotated dimensions.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from hybrid_engine.containers.layer import InferenceLayer
from hybrid_engine.containers.policy import Policy
from hybrid_engine.containers.rotary import FixedRotary, Rotary
from hybrid_engine.containers.views import config_value, submodule
from hybrid_engine.ops import Batch, MixedBatch, PrefillBatch

Rows = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each `[N, R]`."""


class RotaryAngles:
    """One set of angles, or one for each kind of layer; none where ALiBi or learned positions take their place.

    Args:
        rotaries: by kind of layer; None for all of them.
        recomputes_longrope: whether a sequence that grows past the trained length gets its keys anew.
    """

    def __init__(self, rotaries: dict[str | None, Rotary], recomputes_longrope: bool):
        self.rotaries, self._recomputes_longrope = rotaries, recomputes_longrope
        self._first_position = 0
        self.tables: dict[str | None, Rows] = {}
        """Cosines and sines by position, each `[P, R]`; `prepare` makes them."""

    @property
    def trained_length(self) -> int | None:
        """Tokens up to which positions alone decide angles; None: they always do."""
        lengths = [rotary.trained_length for rotary in self.rotaries.values() if rotary.depends_on_length]
        return min(lengths, default=None)

    @property
    def recompute_length(self) -> int | None:
        """Tokens of a sequence with which its keys are computed anew; None: they never are."""
        switches = any(rotary.rope_type == "longrope" for rotary in self.rotaries.values())
        return self.trained_length + 1 if self._recomputes_longrope and switches and self.trained_length else None

    def prepare(self, num_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        """Makes the tables reach `num_positions`; computed once and kept while they are long enough."""
        for kind, rotary in self.rotaries.items():
            if kind not in self.tables or len(self.tables[kind][0]) < num_positions:
                self.tables[kind] = rotary.table(num_positions, dtype, device, self._first_position)

    @contextmanager
    def shifted(self, first_position: int) -> Iterator[None]:
        """Inside, sequences begin at `first_position`, as if so many tokens came before that nobody attends to.

        The modules' own frequencies, which longer sequences change, are those of before again afterwards.
        """
        tables, self.tables, self._first_position = self.tables, {}, first_position
        try:
            with ExitStack() as stack:
                for rotary in self.rotaries.values():
                    stack.enter_context(rotary.keeping_module())
                yield
        finally:
            self.tables, self._first_position = tables, 0

    def rows(self, batch: Batch, dtype: torch.dtype) -> dict[str | None, Rows]:
        """The angles of each token of `batch`, by kind of layer."""
        return {kind: self._rows(kind, batch, dtype) for kind in self.rotaries}

    def _rows(self, kind: str | None, batch: Batch, dtype: torch.dtype) -> Rows:
        if isinstance(batch, MixedBatch):
            of_parts = zip(*(self._rows(kind, part, dtype) for part in (batch.decode, batch.prefill)), strict=True)
            cos, sin = map(torch.cat, of_parts)
            return cos, sin
        if isinstance(batch, PrefillBatch) and self.rotaries[kind].depends_on_length:
            first = self._first_position
            return self.rotaries[kind].rows(batch.positions + first, batch.row_lengths + first, dtype)
        cos, sin = self.tables[kind]
        return cos[batch.positions], sin[batch.positions]


def take_angles(policy: Policy, decoder: nn.Module, config: Any, layers: list[InferenceLayer]) -> RotaryAngles:
    """The angles that `decoder` gives its `layers`; each layer's `kind` becomes that of its angles."""
    if layers[0].attention.alibi is not None or not (policy.rotary or policy.rotary_dim):
        return RotaryAngles({}, policy.recomputes_longrope)
    if policy.rotary:
        module = submodule(decoder, policy.rotary)
    else:
        module = FixedRotary(config_value(config, str(policy.rotary_dim)))
    kinds = {layer.kind for layer in layers} if isinstance(module.rope_type, dict) else {None}
    rotaries = {kind: Rotary(module, config, kind, policy.is_interleaved) for kind in kinds}
    for layer in layers:
        layer.kind = layer.kind if layer.kind in rotaries else None
    return RotaryAngles(rotaries, policy.recomputes_longrope)
