"""The inference layer that all families share: norm, attention, norm, MLP on the residual stream.

A layer holds views of the parameters of one decoder layer, found through its policy, and the ops built
from that layer's numbers. N packed tokens, E hidden size, H query heads, K key/value heads, D head dimension.
"""

from typing import Any

import torch
from torch import nn

from hybrid_engine.containers.linear import TransposedLinear, whole
from hybrid_engine.containers.policy import Policy, UnsupportedModelError
from hybrid_engine.ops import NORM_OPS, Batch, MLPGemmOp, QKVGemmOp, SoftmaxContextOp, VectorMatMulOp
from hybrid_engine.ops.activation import ACTIVATIONS


def submodule(root: nn.Module, path: str) -> nn.Module:
    """The module at `path`; a policy that does not fit names both."""
    try:
        return root.get_submodule(path)
    except AttributeError as error:
        raise UnsupportedModelError(f"{type(root).__name__} has no {path!r}, which its policy names") from error


def norm_eps(norm: nn.Module) -> float:
    """eps under either of the names that transformers' norms use."""
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


def sliding_window(config: Any, index: int) -> int | None:
    """Tokens that layer `index` may look back on, its own included; None: all."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[index] == "full_attention":
        return None
    return getattr(config, "sliding_window", None)


class NormView:
    """`gamma [E]` and `beta [E]` or None of one norm, its kind and eps."""

    def __init__(self, module: nn.Module, kind: str):
        if getattr(module, "weight", None) is None:
            raise UnsupportedModelError(f"{type(module).__name__} has no weight")
        self.module, self.kind, self.eps = module, kind, norm_eps(module)
        self.gamma: torch.Tensor
        self.beta: torch.Tensor | None

    def bind(self) -> None:
        """Points at the parameters as they lie in memory now."""
        self.gamma = whole(self.module.weight, type(self.module).__name__)
        bias = getattr(self.module, "bias", None)
        self.beta = None if bias is None else bias.detach()

    def build_op(self) -> Any:
        """The op of this kind of norm."""
        return NORM_OPS[self.kind](self.eps)


class InferenceLayer:
    """One decoder layer on views. `forward` neither reads nor changes the module's mode or hooks."""

    def __init__(self, policy: Policy, layer: nn.Module, config: Any, index: int):
        self.index = index
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = getattr(config, "num_key_value_heads", None) or self.num_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.num_heads
        self._take_weights(policy, layer)
        self._build_ops(policy, layer, config)

    def _take_weights(self, policy: Policy, layer: nn.Module) -> None:
        def linear(path: str) -> TransposedLinear:
            return TransposedLinear(submodule(layer, path), f"layer {self.index} {path}")

        def norm(path: str, kind: str = policy.norm) -> NormView:
            return NormView(submodule(layer, path), kind)

        self.attention_norm, self.mlp_norm = norm(policy.attention_norm), norm(policy.mlp_norm)
        self.q_norm = norm(policy.q_norm, "rms") if policy.q_norm else None
        self.k_norm = norm(policy.k_norm, "rms") if policy.k_norm else None
        self.qkv = [linear(path) for path in policy.qkv]
        self.attention_output, self.up, self.down = map(linear, (policy.attention_output, policy.up, policy.down))
        self.gate = linear(policy.gate) if policy.gate else None
        self.norms = [n for n in (self.attention_norm, self.mlp_norm, self.q_norm, self.k_norm) if n]
        self.linears = [*self.qkv, self.attention_output, *([self.gate] if self.gate else []), self.up, self.down]

    def _build_ops(self, policy: Policy, layer: nn.Module, config: Any) -> None:
        activation = getattr(config, policy.activation)
        if activation not in ACTIVATIONS:
            raise UnsupportedModelError(f"activation {activation!r}; known are {', '.join(ACTIVATIONS)}")
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        self.qkv_gemm = QKVGemmOp(policy.norm, self.attention_norm.eps, *heads)
        self.softmax_context = SoftmaxContextOp(
            *heads,
            scale=submodule(layer, policy.attention).scaling,
            window=sliding_window(config, self.index) if policy.has_window else None,
            qk_norm="rms" if self.q_norm else None,
            qk_norm_eps=self.q_norm.eps if self.q_norm else 0.0,
        )
        self.vector_matmul = VectorMatMulOp()
        self.mlp_gemm = MLPGemmOp(policy.norm, self.mlp_norm.eps, activation)

    def bind(self) -> None:
        """Points all views at the parameters as they lie in memory now, unfused."""
        for norm in self.norms:
            norm.bind()
        for linear in self.linears:
            linear.bind()

    def fuse_lora(self) -> int:
        """Fuses every linear's active adapters; returns the bytes of the buffers."""
        return sum(linear.fuse_lora() for linear in self.linears)

    def unfuse_lora(self) -> None:
        """Back to the parameters themselves."""
        for linear in self.linears:
            linear.unfuse_lora()

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor:
        """`hidden [N, E]` -> `[N, E]`; writes the batch's keys and values into this layer's blocks.

        Raises:
            RuntimeError: the weights were gathered when they were bound and are not any more.
        """
        if self.attention_norm.gamma.untyped_storage().nbytes() == 0:
            raise RuntimeError(
                f"layer {self.index} reads weights that are not gathered; gather them around the rollout"
            )
        (q, k, v), _ = self.qkv_gemm(
            hidden,
            [linear.pair[0] for linear in self.qkv],
            [linear.pair[1] for linear in self.qkv],
            self.attention_norm.gamma,
            self.attention_norm.beta,
        )
        q_gamma = self.q_norm.gamma if self.q_norm else None
        k_gamma = self.k_norm.gamma if self.k_norm else None
        context = self.softmax_context(q, k, v, rotary, keys, values, batch, q_gamma, k_gamma)
        attention = self.vector_matmul(context, *self.attention_output.pair)
        gate = self.gate.pair if self.gate else None
        output, residual = self.mlp_gemm(
            attention, hidden, gate, self.up.pair, self.down.pair, self.mlp_norm.gamma, self.mlp_norm.beta
        )
        return output + residual
