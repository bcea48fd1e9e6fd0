"""Rotary angles as transformers computes them, by token, for each of its rope scalings.

Most scalings change the frequencies once. Two change them with the sequence's length: `dynamic` with every token beyond
the trained length, `longrope` once. transformers uses the longest row of a batch for all rows. Here a token's angles
depend on the length that its own row had when the token was fed: a prompt's tokens on the prompt's length, a response's
token on the length including it. This equals transformers' result for a row alone, whatever the batch, also after a
preemption.

P positions, R rotated dimensions. Source: transformers, modeling_rope_utils.py.

`RotaryAngles` are those of a whole model: a table by position for each kind of its layers, and a batch's rows of them.
N packed tokens.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hybrid_engine.containers.layer import InferenceLayer
from hybrid_engine.containers.policy import Policy, UnsupportedModelError
from hybrid_engine.containers.views import config_value, submodule
from hybrid_engine.ops import Batch, MixedBatch, PrefillBatch
from hybrid_engine.ops.softmax_context import rotary_rows

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
LENGTH_ROPE_TYPES = ("dynamic", "longrope")
CHANGED_NUMBERS = ("max_seq_len_cached", "attention_scaling")
"""Name suffixes of numbers that a forward pass of transformers' modules changes."""
Rows = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each `[N, R]`."""


class Rotary:
    """Angles of one rotary embedding module for one kind of layer.

    Args:
        module: transformers' rotary embedding; its buffers are read when the tables are computed.
        kind: kind of layer, if the module has frequencies for each; None: it has one set.
        is_interleaved: whether rotated pairs are adjacent.

    Raises UnsupportedModelError for an unknown rope type.
    """

    def __init__(self, module: nn.Module, config: PretrainedConfig, kind: str | None, is_interleaved: bool):
        self.module, self.config, self.is_interleaved = module, config, is_interleaved
        types = getattr(module, "rope_type", None)
        self.prefix, self.kind = ("", None) if not isinstance(types, dict) else (f"{kind}_", kind)
        self.rope_type = types.get(kind) if isinstance(types, dict) else types
        known = STATIC_ROPE_TYPES + LENGTH_ROPE_TYPES
        if self.rope_type not in known:
            raise UnsupportedModelError(f"rope type {self.rope_type!r}; known are {', '.join(known)}")
        self.scaling = float(getattr(module, f"{self.prefix}attention_scaling"))

    @property
    def depends_on_length(self) -> bool:
        """Whether a token's angles depend on more than its position."""
        return self.rope_type in LENGTH_ROPE_TYPES

    @property
    def trained_length(self) -> int:
        """Number of tokens beyond which angles depend on more than the position."""
        if self.rope_type == "longrope":
            parameters = self.config.rope_parameters
            return (parameters if self.kind is None else parameters[self.kind])["original_max_position_embeddings"]
        return self.config.max_position_embeddings

    def rows(
        self, positions: torch.Tensor, lengths: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cos and sin `[N, R]` of tokens at `positions [N]`, fed when their rows had `lengths [N]` tokens."""
        angles = positions.float()[:, None] * self._frequencies(lengths)
        return rotary_rows(angles, self.scaling, dtype, self.is_interleaved)

    def table(
        self, num_positions: int, dtype: torch.dtype, device: torch.device, first: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rows `[P, R]` of tokens that are the last of their row, by position from `first` on."""
        positions = torch.arange(first, first + num_positions, device=device)
        return self.rows(positions, positions + 1, dtype)

    @contextmanager
    def keeping_module(self) -> Iterator[None]:
        """On exit, restores the module's frequencies, which forward passes of long sequences change."""
        module = self.module
        buffers = {name: (buffer, buffer.clone()) for name, buffer in module._buffers.items() if buffer is not None}
        numbers = {name: value for name, value in vars(module).items() if name.endswith(CHANGED_NUMBERS)}
        try:
            yield
        finally:
            for name, (buffer, values) in buffers.items():
                module._buffers[name] = buffer.copy_(values)
            for name, value in numbers.items():
                setattr(module, name, value)

    def _frequencies(self, lengths: torch.Tensor) -> torch.Tensor:
        """Returns the frequencies `[N, R/2]` or `[1, R/2]` fp32."""
        device = lengths.device
        if self.rope_type == "dynamic":
            return self._computed(lengths[:, None])
        if self.rope_type == "longrope":
            short = self._buffer("original_inv_freq").to(device)
            return torch.where((lengths > self.trained_length)[:, None], self._computed(self.trained_length + 1), short)
        return self._buffer("inv_freq").to(device)[None]

    def _buffer(self, name: str) -> torch.Tensor:
        return getattr(self.module, f"{self.prefix}{name}").float()

    def _computed(self, length: Any) -> torch.Tensor:
        device = self._buffer("inv_freq").device if not isinstance(length, torch.Tensor) else length.device
        compute = ROPE_INIT_FUNCTIONS[self.rope_type]
        return compute(self.config, device, seq_len=length, layer_type=self.kind)[0].to(device)


class FixedRotary(nn.Module):
    """Frequencies 10000^(-2i/R), for families without a rotary module (GPT-J)."""

    rope_type, attention_scaling = "default", 1.0

    def __init__(self, rotary_dim: int):
        super().__init__()
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        self.inv_freq = 1.0 / 10000**exponents


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


def take_angles(
    policy: Policy, decoder: nn.Module, config: PretrainedConfig, layers: list[InferenceLayer]
) -> RotaryAngles:
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
