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
    """One set of angles, or one for each kind of layer; none if ALiBi or learned positions replace them.

    Args:
        rotaries: rotary embedding of each kind of layer; key None: of all layers.
        recomputes_longrope: whether the keys of a sequence that grows past the trained length are recomputed.
    """

    def __init__(self, rotaries: dict[str | None, Rotary], recomputes_longrope: bool):
        self.rotaries, self._recomputes_longrope = rotaries, recomputes_longrope
        self._first_position = 0
        self.tables: dict[str | None, Rows] = {}
        """Cosines and sines by position, each `[P, R]`, computed by `prepare`."""

    @property
    def trained_length(self) -> int | None:
        """Number of tokens up to which angles depend on positions alone; None: they always do."""
        lengths = [rotary.trained_length for rotary in self.rotaries.values() if rotary.depends_on_length]
        return min(lengths, default=None)

    @property
    def recompute_length(self) -> int | None:
        """Length of a sequence at which all its keys are recomputed; None: they never are."""
        switches = any(rotary.rope_type == "longrope" for rotary in self.rotaries.values())
        return self.trained_length + 1 if self._recomputes_longrope and switches and self.trained_length else None

    def prepare(self, num_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        """Extends the tables to `num_positions`; they are computed again only if they are too short."""
        for kind, rotary in self.rotaries.items():
            if kind not in self.tables or len(self.tables[kind][0]) < num_positions:
                self.tables[kind] = rotary.table(num_positions, dtype, device, self._first_position)

    @contextmanager
    def shifted(self, first_position: int) -> Iterator[None]:
        """Inside, sequences begin at `first_position`, as if that many tokens came before without being attended to.

        On exit, the modules' own frequencies, which longer sequences change, are restored.
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
        """Returns the angles of each token of `batch`, by kind of layer."""
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
    """Builds the angles that `decoder` gives its `layers`; sets each layer's `kind` to that of its angles."""
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
