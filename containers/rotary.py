"""Rotary angles as transformers computes them, by token, for each of its rope scalings.

Most scalings change the frequencies once. Two change them with the sequence's length: `dynamic` with every token beyond
the trained length, `longrope` once. transformers uses the longest row of a batch for all rows. Here a token's angles
depend on the length that its own row had when the token was fed: a prompt's tokens on the prompt's length, a response's
token on the length including it. This equals transformers' result for a row alone, whatever the batch, also after a
preemption.

P positions, R rotated dimensions. Source: transformers, modeling_rope_utils.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hybrid_engine.containers.policy import UnsupportedModelError
from hybrid_engine.ops.rotary import rotary_rows

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
LENGTH_ROPE_TYPES = ("dynamic", "longrope")
CHANGED_NUMBERS = ("max_seq_len_cached", "attention_scaling")
"""Name suffixes of numbers that a forward pass of transformers' modules changes."""


class Rotary:
    """Angles of one rotary embedding module for one kind of layer.

    Args:
        module: transformers' rotary embedding; its buffers are read when the tables are computed.
        kind: kind of layer, if the module has frequencies for each; None: it has one set.
        is_interleaved: whether rotated pairs are adjacent.

    Raises UnsupportedModelError for an unknown rope type.
    """

    def __init__(self, module: nn.Module, config: Any, kind: str | None, is_interleaved: bool):
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
