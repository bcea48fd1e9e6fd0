"""Megatron-LM's GPT as a transformers model, with parameters under the names of Megatron's checkpoints.

`load_megatron_gpt` in `loading.py` builds one; containers recognize its layers by their names. The forward here is the
plain one that training and parity checks use, without dropout. A layer's MLP may be DeepSpeed's mixture of experts:
top-1 with the gate's own probability, or top-2 with normalized weights. It omits the capacity and the noise of
DeepSpeed's training, so that a token does not depend on the batch around it. Checkpoints in Llama's form (rotary
positions, RMS norms, gated MLP) become a Llama, a Qwen2 or a Qwen3 of transformers.

B rows, P tokens of a row, N = B P, V vocabulary, H heads, D head dimension, E hidden size, I MLP size, X experts.
Source: https://github.com/NVIDIA/Megatron-LM, megatron/model/{gpt_model,language_model,transformer}.py, and
deepspeed/moe/{layer,experts,sharded_moe}.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from hybrid_engine.extensions.megatron.rank_files import LAYERS, layer_of
from hybrid_engine.inference.checkpoint import Source, StoredRows
from hybrid_engine.ops.linears import ACTIVATIONS

LlamaForm: TypeAlias = LlamaConfig | Qwen2Config | Qwen3Config
NEEDED = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
    "apply_layernorm_1p": False,
    "multi_latent_attention": False,
    "num_experts": None,
    "rotary_seq_len_interpolation_factor": None,
}
"""Values that the options must have if they are present; other values describe none of these families."""
OUTSIDE = {
    "language_model.embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "language_model.encoder.final_layernorm.weight": "model.norm.weight",
    "language_model.output_layer.weight": "lm_head.weight",
}
WHOLE = {
    "self_attention.dense": "self_attn.o_proj",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "mlp.dense_4h_to_h": "mlp.down_proj",
}


class MegatronGPTConfig(PreTrainedConfig):
    """Sizes of one model.

    Args:
        num_experts: number per layer, 0 for a layer without a mixture; None: no layer has one.
        num_experts_per_tok: 1 or 2; with 2 their weights are normalized, as in DeepSpeed's gates.
        is_moe_residual: layers with experts also have a dense MLP (DeepSpeed's `use_residual`).
    """

    model_type = "megatron_gpt"

    def __init__(
        self,
        vocab_size: int = 50304,
        hidden_size: int = 1024,
        num_hidden_layers: int = 24,
        num_attention_heads: int = 16,
        intermediate_size: int | None = None,
        max_position_embeddings: int = 1024,
        hidden_act: str = "gelu",
        layer_norm_eps: float = 1e-5,
        num_experts: list[int] | None = None,
        num_experts_per_tok: int = 1,
        is_moe_residual: bool = False,
        tie_word_embeddings: bool = True,
        **kwargs: Any,
    ):
        if num_experts_per_tok not in (1, 2):
            raise ValueError(f"num_experts_per_tok={num_experts_per_tok} must be 1 or 2, which DeepSpeed's gates have")
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.intermediate_size = intermediate_size or 4 * hidden_size
        self.max_position_embeddings, self.layer_norm_eps = max_position_embeddings, layer_norm_eps
        self.hidden_act = hidden_act
        self.num_experts = num_experts or [0] * num_hidden_layers
        self.num_experts_per_tok, self.norm_topk_prob = num_experts_per_tok, num_experts_per_tok == 2
        self.is_moe_residual = is_moe_residual
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)


class MegatronAttention(nn.Module):
    """Causal self-attention; rows of the fused projection are [H, 3, D]."""

    def __init__(self, config: MegatronGPTConfig, index: int):
        super().__init__()
        self.num_heads, self.index = config.num_attention_heads, index
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: torch.Tensor, is_seen: torch.Tensor, past: Cache | None) -> torch.Tensor:
        """`hidden [B, P, E]`, `is_seen [B, 1, P, C]` with the C tokens so far -> `[B, P, E]`; extends `past`."""
        heads = self.query_key_value(hidden).unflatten(2, (self.num_heads, 3, -1)).transpose(1, 2)  # [B, H, P, 3, D]
        q, k, v = heads.unbind(3)
        if past is not None:
            k, v = past.update(k, v, self.index)
        context = F.scaled_dot_product_attention(q, k, v, attn_mask=is_seen)
        return self.dense(context.transpose(1, 2).flatten(2))


class MegatronMLP(nn.Module):
    """Up projection, activation, down projection; also used for one expert."""

    def __init__(self, config: MegatronGPTConfig):
        super().__init__()
        self.activation = ACTIVATIONS[config.hidden_act]
        self.dense_h_to_4h = nn.Linear(config.hidden_size, config.intermediate_size)
        self.dense_4h_to_h = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[..., E]` -> `[..., E]`."""
        return self.dense_4h_to_h(self.activation(self.dense_h_to_4h(hidden)))


class MegatronMoE(nn.Module):
    """A mixture of experts with DeepSpeed's parameter names: `deepspeed_moe.gate.wg`, `deepspeed_moe.experts...`."""

    def __init__(self, config: MegatronGPTConfig, num_experts: int):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        gate, experts = nn.Module(), nn.Module()
        gate.wg = nn.Linear(config.hidden_size, num_experts, bias=False)
        experts.deepspeed_experts = nn.ModuleList([MegatronMLP(config) for _ in range(num_experts)])
        self.deepspeed_moe = nn.ModuleDict({"gate": gate, "experts": experts})
        self.mlp = MegatronMLP(config) if config.is_moe_residual else None
        self.coefficient = nn.Linear(config.hidden_size, 2) if config.is_moe_residual else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[B, P, E]` -> `[B, P, E]`."""
        tokens = hidden.flatten(0, 1)  # [N, E]
        gate = self.deepspeed_moe["gate"].wg
        logits = gate(tokens.to(gate.weight.dtype))
        weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(self.top_k)  # [N, top_k]
        if self.top_k == 2:
            weights = weights / weights.sum(-1, keepdim=True)
        output = torch.zeros_like(tokens)
        for index, expert in enumerate(self.deepspeed_moe["experts"].deepspeed_experts):
            token, slot = (chosen == index).nonzero(as_tuple=True)
            output = output.index_add(0, token, expert(tokens[token]) * weights[token, slot, None].to(hidden.dtype))
        output = output.view_as(hidden)
        if self.mlp is None or self.coefficient is None:
            return output
        coefficients = self.coefficient(hidden).softmax(-1)
        return output * coefficients[..., :1] + self.mlp(hidden) * coefficients[..., 1:]


class MegatronLayer(nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: MegatronGPTConfig, index: int):
        super().__init__()
        num_experts = config.num_experts[index]
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attention = MegatronAttention(config, index)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = MegatronMoE(config, num_experts) if num_experts else MegatronMLP(config)

    def forward(self, hidden: torch.Tensor, is_seen: torch.Tensor, past: Cache | None) -> torch.Tensor:
        """`[B, P, E]` -> `[B, P, E]`."""
        hidden = hidden + self.self_attention(self.input_layernorm(hidden), is_seen, past)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class MegatronEmbedding(nn.Module):
    """Adds position embeddings to word embeddings."""

    def __init__(self, config: MegatronGPTConfig):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def forward(self, words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`words [B, P, E]` (embedded), `positions [B, P]` -> `[B, P, E]`."""
        return words + self.position_embeddings(positions)


class MegatronEncoder(nn.Module):
    """The stack of layers and the norm after it, under Megatron's name."""

    def __init__(self, config: MegatronGPTConfig):
        super().__init__()
        self.layers = nn.ModuleList([MegatronLayer(config, index) for index in range(config.num_hidden_layers)])
        self.final_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden: torch.Tensor, is_seen: torch.Tensor, past: Cache | None) -> torch.Tensor:
        """Takes and returns the same as the attention of the layers."""
        for layer in self.layers:
            hidden = layer(hidden, is_seen, past)
        return self.final_layernorm(hidden)


class MegatronLanguageModel(nn.Module):
    """Embedding, layers and the LM head, which shares the word embedding's weight unless it has its own."""

    def __init__(self, config: MegatronGPTConfig):
        super().__init__()
        self.embedding = MegatronEmbedding(config)
        self.encoder = MegatronEncoder(config)
        self.output_layer = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


class MegatronGPT(PreTrainedModel, GenerationMixin):
    """The causal language model."""

    config_class = MegatronGPTConfig
    base_model_prefix = "language_model"
    _no_split_modules = ("MegatronLayer",)
    _supports_sdpa = True
    _tied_weights_keys = {  # noqa: RUF012 - transformers reads and never writes it
        "language_model.output_layer.weight": "language_model.embedding.word_embeddings.weight"
    }

    def __init__(self, config: MegatronGPTConfig):
        super().__init__(config)
        self.language_model = MegatronLanguageModel(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The word embedding."""
        return self.language_model.embedding.word_embeddings

    def get_output_embeddings(self) -> nn.Module:
        """The LM head."""
        return self.language_model.output_layer

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits `[B, P, V]`, and with `labels [B, P]` (-100: ignored) the mean loss of the next tokens.

        `inputs_embeds [B, P, E]` are word embeddings without positions, instead of `input_ids [B, P]`. `attention_mask
        [B, C]` also covers the tokens in `past_key_values`. transformers' generate() passes `use_cache` and
        `return_dict`. Raises ValueError if attentions or hidden states are requested.
        """
        if output_attentions or output_hidden_states:
            raise ValueError("output_attentions and output_hidden_states are not built for MegatronGPT; leave them out")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        (num_rows, length, _), past, device = inputs_embeds.shape, past_key_values, inputs_embeds.device
        total = length + (0 if past is None else past.get_seq_length())
        mask = (
            torch.ones(num_rows, total, dtype=torch.int64, device=device) if attention_mask is None else attention_mask
        )
        if position_ids is None:
            position_ids = (mask.long().cumsum(1) - 1).clamp(min=0)[:, -length:]
        is_own = torch.eye(total, dtype=torch.bool, device=device)
        # Padding attends to itself, because a softmax row must not be empty.
        is_seen = (torch.ones_like(is_own).tril() & mask.bool()[:, None] | is_own)[:, None, -length:]
        hidden = self.language_model.embedding(inputs_embeds, position_ids)
        logits = self.language_model.output_layer(self.language_model.encoder(hidden, is_seen, past))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past)


def is_llama_like(arguments: Mapping[str, Any]) -> bool:
    """Whether the options describe a model in Llama's form."""
    return bool(arguments.get("swiglu")) or arguments.get("normalization") == "RMSNorm"


def read_llama_config(
    arguments: Mapping[str, Any], sources: Mapping[str, Source], num_layers: int, folder: Path
) -> LlamaForm:
    """The model's config: sizes from the shapes, the rest from the options. ValueError for an unsupported form."""
    for name, wanted in NEEDED.items():
        value = arguments.get(name, wanted)
        if value != wanted and not (wanted in (False, None) and not value):
            raise ValueError(
                f"checkpoint={folder}: its args have {name}={value!r}, and of models with gated MLPs or RMS norms only "
                f"those with {name}={wanted!r} are read; convert it to safetensors with Megatron's tools"
            )
    vocab_size, hidden_size = sources["language_model.embedding.word_embeddings.weight"].shape
    num_heads = arguments["num_attention_heads"]
    num_kv_heads = arguments["num_query_groups"] if arguments.get("group_query_attention") else num_heads
    rope = {"rope_type": "default", "rope_theta": float(arguments.get("rotary_base") or 10000)}
    if arguments.get("use_rope_scaling"):  # Llama 3.1
        factor = float(arguments.get("rope_scaling_factor") or 8.0)
        rope |= {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = 8192
    kind: type[LlamaForm] = LlamaConfig
    has_bias = f"{LAYERS}0.self_attention.dense.bias" in sources
    options: dict[str, Any] = {"attention_bias": has_bias, "mlp_bias": has_bias}
    if f"{LAYERS}0.self_attention.q_layernorm.weight" in sources:
        kind, options = Qwen3Config, {"attention_bias": has_bias}
    elif not has_bias and f"{LAYERS}0.self_attention.query_key_value.bias" in sources:
        kind, options = Qwen2Config, {}
    return kind(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=arguments.get("kv_channels") or hidden_size // num_heads,
        intermediate_size=sources[f"{LAYERS}0.mlp.dense_4h_to_h.weight"].shape[1],
        max_position_embeddings=arguments["max_position_embeddings"],
        rms_norm_eps=arguments.get("norm_epsilon") or arguments.get("layernorm_epsilon") or 1e-5,
        rope_parameters=rope,
        tie_word_embeddings="language_model.output_layer.weight" not in sources,
        **options,
    )


def llama_sources(sources: Mapping[str, Source], config: LlamaForm) -> dict[str, Source]:
    """The weights under transformers' names; fused projections are split."""
    result: dict[str, Source] = {}
    for name, source in sources.items():
        layer = layer_of(name)
        if layer is None:
            result[OUTSIDE[name]] = source
            continue
        path, _, kind = name.removeprefix(f"{LAYERS}{layer}.").rpartition(".")
        prefix = f"model.layers.{layer}."
        if path == "self_attention.query_key_value":
            parts = zip("qkv", _head_rows(config), strict=True)
            result |= {f"{prefix}self_attn.{part}_proj.{kind}": StoredRows(source, rows) for part, rows in parts}
        elif path == "mlp.dense_h_to_4h":
            size = config.intermediate_size
            result[f"{prefix}mlp.gate_proj.{kind}"] = StoredRows(source, ((0, size),))
            result[f"{prefix}mlp.up_proj.{kind}"] = StoredRows(source, ((size, 2 * size),))
        else:
            result[f"{prefix}{WHOLE.get(path, path)}.{kind}"] = source
    return result


def _head_rows(config: LlamaForm) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Rows of the queries, keys and values of all heads in the fused projection `[K * (Q / K + 2) * D, E]`."""
    dim, num_queries = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    starts = [group * (num_queries + 2) * dim for group in range(config.num_key_value_heads)]
    bounds = ((0, num_queries), (num_queries, num_queries + 1), (num_queries + 1, num_queries + 2))
    return tuple(tuple((at + first * dim, at + last * dim) for at in starts) for first, last in bounds)
