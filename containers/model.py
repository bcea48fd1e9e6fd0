"""The whole causal language model on containers: embed, layers, final norm, LM head in fp32.

It reads the parameters of an unmodified Hugging Face model through views and never calls its forward.
N packed tokens, R rows whose next token is wanted, E hidden size, V vocabulary.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hybrid_engine.containers.layer import InferenceLayer, NormView, submodule
from hybrid_engine.containers.linear import TransposedLinear
from hybrid_engine.containers.policy import POLICIES, Policy, UnsupportedModelError
from hybrid_engine.ops import Batch, PrefillBatch, VectorMatMulOp
from hybrid_engine.ops.rotary import rotary_table

# Rotary embeddings whose frequencies do not depend on the sequence's length.
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def layer_class_name(layer: nn.Module) -> str:
    """Class name of a decoder layer; `fully_shard` puts FSDP in front of it."""
    return type(layer).__name__.removeprefix("FSDP")


def find_decoder(model: nn.Module) -> tuple[nn.Module, nn.ModuleList, Policy]:
    """The module that holds the decoder layers, the layers and their policy.

    Raises UnsupportedModelError where no list of layers has a policy.
    """
    lists = [
        (name, child, decoder)
        for name, decoder in model.named_modules()
        for child in decoder.children()
        if isinstance(child, nn.ModuleList) and len(child) > 0
    ]
    for _, layers, decoder in lists:
        names = {layer_class_name(layer) for layer in layers}
        if len(names) == 1 and (policy := POLICIES.get(names.pop())):
            return decoder, layers, policy
    found = sorted({layer_class_name(layers[0]) for _, layers, _ in lists}) or ["no list of layers"]
    raise UnsupportedModelError(
        f"no policy for {', '.join(found)}; layer classes with one are {', '.join(sorted(POLICIES))}"
    )


def check_policy(policy: Policy, decoder: nn.Module, config: Any) -> None:
    """Raises UnsupportedModelError where the config asks for another layer than the policy describes."""
    for option, value in policy.required.items():
        if getattr(config, option, value) != value:
            raise UnsupportedModelError(f"{option}={getattr(config, option)}; the policy covers {option}={value}")
    for name in policy.absent:
        if getattr(decoder, name, None) is not None:
            raise UnsupportedModelError(f"{type(decoder).__name__}.{name} is set, which the policy does not cover")


class InferenceModel:
    """A causal language model on containers. Raises UnsupportedModelError when the model cannot be one."""

    def __init__(self, model: nn.Module):
        self.base = model.get_base_model() if hasattr(model, "get_base_model") else model
        decoder, layers, policy = find_decoder(self.base)
        config = self.base.config.get_text_config()
        check_policy(policy, decoder, config)
        self.layers = [InferenceLayer(policy, layer, config, index) for index, layer in enumerate(layers)]
        self.final_norm = NormView(submodule(decoder, policy.final_norm), policy.norm)
        self.final_norm_op = self.final_norm.build_op()
        self.embedding = self._embedding(self.base.get_input_embeddings())
        self.position_embedding = (
            self._embedding(submodule(decoder, policy.position_embedding)) if policy.position_embedding else None
        )
        self.position_offset = policy.position_offset
        self.rotary = self._rotary(submodule(decoder, policy.rotary)) if policy.rotary else None
        self.rotary_table: tuple[torch.Tensor, torch.Tensor] | None = None
        head = self.base.get_output_embeddings()
        if head is None:
            raise UnsupportedModelError(f"{type(self.base).__name__} has no LM head")
        self.lm_head = TransposedLinear(head, "lm_head")
        self.lm_head_op = VectorMatMulOp(fp32_output=True)
        self.layer_class = policy.layer_class
        self.vocab_size, self.max_positions = config.vocab_size, config.max_position_embeddings

    @staticmethod
    def _embedding(module: nn.Module) -> nn.Module:
        if not isinstance(module, nn.Embedding):
            raise UnsupportedModelError(f"{type(module).__name__} in the place of an embedding")
        return module

    @staticmethod
    def _rotary(module: nn.Module) -> nn.Module:
        rope_type = getattr(module, "rope_type", None)
        if rope_type not in STATIC_ROPE_TYPES:
            raise UnsupportedModelError(f"rope type {rope_type!r}; known are {', '.join(STATIC_ROPE_TYPES)}")
        return module

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the weights, in which the layers compute."""
        return self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.weight.device

    def kv_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Shape of the KV workspace: `[L, 2, num_blocks, K, block_size, D]`."""
        layer = self.layers[0]
        return (len(self.layers), 2, num_blocks, layer.num_kv_heads, block_size, layer.head_dim)

    def addresses(self) -> tuple[int, ...]:
        """Where everything lies that a forward pass reads, as it is bound now."""
        linears = [self.lm_head, *(linear for layer in self.layers for linear in layer.linears)]
        norms = [self.final_norm, *(norm for layer in self.layers for norm in layer.norms)]
        tensors = [t for linear in linears for t in linear.pair] + [t for n in norms for t in (n.gamma, n.beta)]
        tensors += [self.embedding.weight, *(self.rotary_table or ())]
        if self.position_embedding is not None:
            tensors.append(self.position_embedding.weight)
        return tuple(tensor.data_ptr() for tensor in tensors if tensor is not None)

    def bind_rest(self) -> None:
        """Points what is outside the layers at the parameters as they lie in memory now."""
        self.final_norm.bind()
        self.lm_head.bind()

    def bind(self) -> None:
        """Points everything at the parameters as they lie in memory now, unfused."""
        self.bind_rest()
        for layer in self.layers:
            layer.bind()

    def fuse_lora(self) -> int:
        """Fuses the active adapters of every linear; returns the bytes of the buffers."""
        return self.lm_head.fuse_lora() + sum(layer.fuse_lora() for layer in self.layers)

    def unfuse_lora(self) -> None:
        """Back to the parameters themselves; they were never written to."""
        self.lm_head.unfuse_lora()
        for layer in self.layers:
            layer.unfuse_lora()

    def prepare_positions(self, num_positions: int) -> None:
        """Makes the rotary table reach `num_positions`; computed once and kept while it is long enough."""
        if self.rotary is None or (self.rotary_table is not None and len(self.rotary_table[0]) >= num_positions):
            return
        scaling = self.rotary.attention_scaling
        self.rotary_table = rotary_table(self.rotary.inv_freq.to(self.device), scaling, num_positions, self.dtype)

    def forward(self, batch: Batch, kv: torch.Tensor, layers: Iterable[InferenceLayer]) -> torch.Tensor:
        """Next-token logits `[R, V]` fp32: of each sequence's last token (prefill) or of each row (decode).

        `layers` yields `self.layers` in order; whoever streams weights gathers each as it is asked for.
        Writes the batch's keys and values into `kv`.
        """
        hidden = self.embedding.weight.detach()[batch.tokens]
        if self.position_embedding is not None:
            hidden = hidden + self.position_embedding.weight.detach()[batch.positions + self.position_offset]
        rotary = None
        if self.rotary_table is not None:
            cos, sin = self.rotary_table
            rotary = cos[batch.positions], sin[batch.positions]
        for layer in layers:
            keys, values = kv[layer.index]
            hidden = layer.forward(hidden, rotary, keys, values, batch)
        if isinstance(batch, PrefillBatch):
            hidden = hidden[batch.wanted]
        hidden = self.final_norm_op(hidden, self.final_norm.gamma, self.final_norm.beta)
        return self.lm_head_op(hidden, *self.lm_head.pair)
