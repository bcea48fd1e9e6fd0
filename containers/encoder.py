"""The layers of an encoder on containers, inside the model's own forward.

Embeddings, pooler and heads stay the model's modules: they are a small part of the work, differ between the many
classes of one family, and create its output objects. Only the list of layers is replaced, by one module for the time of
a forward pass. Padding is packed away: the layers see the real tokens of all rows one after the other, and no row's
result depends on the others.

B rows, P their padded length, N real tokens, E hidden size.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hybrid_engine.containers.cache import LayerCache
from hybrid_engine.containers.layer import Attention, InferenceLayer
from hybrid_engine.containers.model import find_decoder
from hybrid_engine.containers.policy import UnsupportedModelError
from hybrid_engine.containers.views import ALONE, TensorParallel
from hybrid_engine.ops import EncoderBatch, KVBlocks
from hybrid_engine.ops.dispatch import say_once

INNER_OUTPUTS = ("output_attentions", "output_hidden_states")


class PackedLayers(nn.Module):
    """Replaces the list of layers during one forward pass."""

    def __init__(self, layers: list[InferenceLayer], mask: torch.Tensor | None):
        super().__init__()
        self.layers, self.mask = layers, mask

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`hidden [B, P, E]` -> `[B, P, E]`, zero at padding. Other arguments of the model's layers are ignored."""
        rows, length, _ = hidden.shape
        mask = self.mask if self.mask is not None else hidden.new_ones(rows, length, dtype=torch.bool)
        if mask.shape != (rows, length):
            raise ValueError(f"attention_mask is {list(mask.shape)}; expected {[rows, length]}, 1 for every real token")
        places = mask.flatten().nonzero().squeeze(1)
        packed = run_packed(self.layers, hidden.flatten(0, 1)[places], mask.sum(1))
        return hidden.new_zeros(rows * length, hidden.shape[2]).index_copy_(0, places, packed).view_as(hidden)


def run_packed(layers: list[InferenceLayer], hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Passes `hidden [N, E]` of concatenated sequences of `lengths` through all layers; lengths may be 0."""
    lengths = lengths[lengths > 0]
    batch = EncoderBatch(
        lengths=tuple(lengths.tolist()), starts=nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    )
    if not batch.lengths:
        return hidden
    attention = layers[0].mixer
    assert isinstance(attention, Attention)
    no_blocks = hidden.new_empty(0, attention.num_kv_heads, 1, attention.head_dim)
    for layer in layers:
        hidden = layer.forward(hidden, None, LayerCache(KVBlocks(no_blocks, no_blocks)), batch)
    return hidden


class InferenceEncoder:
    """An encoder whose layers run on containers, or this rank's part of them.

    Raises UnsupportedModelError if containers cannot run the model, ValueError if the ranks cannot share it equally.
    """

    def __init__(self, model: nn.Module, parallel: TensorParallel = ALONE):
        self.module = model
        self.base = model.get_base_model() if hasattr(model, "get_base_model") else model
        config = self.base.config
        decoder, layers, policy = find_decoder(self.base, config)
        if not policy.is_encoder:
            raise UnsupportedModelError(f"{policy.layer_class} is no encoder's layer")
        self.policy, self.owner, self.own_layers = policy, decoder, layers
        self.name = next(name for name, child in decoder.named_children() if child is layers)
        self.layers = [InferenceLayer(policy, layer, config, i, parallel) for i, layer in enumerate(layers)]

    def bind(self) -> None:
        """Points all views at the parameters' current memory, unfused."""
        for layer in self.layers:
            layer.bind()

    def fuse_lora(self) -> int:
        """Fuses the active adapters of every layer; returns the bytes of the buffers."""
        return sum(layer.fuse_lora() for layer in self.layers)

    def unfuse_lora(self) -> None:
        """Restores the parameters themselves, which were never written to."""
        for layer in self.layers:
            layer.unfuse_lora()

    @contextmanager
    def _in_place(self, mask: torch.Tensor | None) -> Iterator[None]:
        """Inside, the model runs on containers; the exit restores its layers."""
        setattr(self.owner, self.name, nn.ModuleList([PackedLayers(self.layers, mask)]))
        try:
            yield
        finally:
            setattr(self.owner, self.name, self.own_layers)

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of the model's own forward for these arguments, of its own type, without gradients.

        Hidden states are zero at padding (`attention_mask [B, P]` 0), where the model's own have meaningless values; so
        a pooler or head that reads a row's first place requires padding on the right. If inner states or attentions are
        requested, or the mask is not `[B, P]`, the model's own layers run, and a notice says so once.
        """
        kwargs.update(zip(inspect.signature(self.base.forward).parameters, args, strict=False))
        reason = self._reason_to_fall_back(kwargs)
        if reason is not None:
            if any(parameter.is_meta for parameter in self.own_layers.parameters()):
                raise ValueError(
                    f"forward(): {reason}, and this process holds only its part of the layers; use tp_size=1"
                )
            say_once(f"the encoder's own layers run: {reason}")
            return self.module(**kwargs)
        mask = kwargs.get("attention_mask")
        self.fuse_lora()
        try:
            with self._in_place(None if mask is None else mask.bool()):
                return self.module(**kwargs)
        finally:
            self.unfuse_lora()

    def _reason_to_fall_back(self, kwargs: dict[str, Any]) -> str | None:
        """Returns why the containers cannot serve these arguments, or None if they can."""
        if self.module.training:
            return "the model is in training mode, and containers have no dropout"
        for name in INNER_OUTPUTS:
            if kwargs.get(name) or getattr(self.base.config, name, False):
                return f"{name}=True, and containers keep only the last output"
        mask = kwargs.get("attention_mask")
        return None if mask is None or mask.dim() == 2 else f"attention_mask has {mask.dim()} dimensions, not 2"
