"""The attention of a layer: projections, q/k norm, positions, softmax over the KV workspace, output projection.

N packed tokens, E hidden size, H query heads, K key/value heads, D head dimension.
"""

import math
from typing import Any

import torch
from torch import nn

from hybrid_engine.containers.linear import TransposedLinear
from hybrid_engine.containers.policy import Policy
from hybrid_engine.containers.tensor_parallel import ALONE, Heads, TensorParallel, cut
from hybrid_engine.containers.views import HeadNormsView, NormView, attribute, config_value, submodule
from hybrid_engine.ops import (
    QKV,
    Batch,
    EncoderBatch,
    HeadWeights,
    KVBlocks,
    QKVGemmOp,
    SoftmaxContextOp,
    VectorMatMulOp,
)

WINDOWED_KINDS = ("sliding_attention", "local")


def layer_kind(policy: Policy, config: Any, index: int) -> str | None:
    """Returns the config's kind of layer `index`; None if the config has one kind only."""
    kinds = getattr(config, policy.layer_kinds, None) if policy.layer_kinds else None
    return None if kinds is None else kinds[index]


def sliding_window(policy: Policy, config: Any, index: int) -> int | None:
    """Number of tokens that layer `index` attends to, including its own; None: all."""
    if policy.window is None or layer_kind(policy, config, index) not in (None, *WINDOWED_KINDS):
        return None
    return config_value(config, policy.window)


def soft_capping(policy: Policy, config: Any) -> float | None:
    """Cap of the scores in the model's own attention, or None; transformers' SDPA does not cap them."""
    if policy.softcap is None or getattr(config, "_attn_implementation", None) == "sdpa":
        return None
    return config_value(config, policy.softcap)


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """Returns the `[H]` fp32 slopes of ALiBi (Press et al. 2022, arXiv 2108.12409, section 3), with its extension.

    For a power of two they are 2^(-8/H), 2^(-16/H), ...; otherwise those of the next lower power of two, followed by
    every other one of the next higher.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(num_heads - power)]
    return torch.tensor(slopes, dtype=torch.float32)


def read_heads(policy: Policy, config: Any, parallel: TensorParallel = ALONE) -> Heads:
    """Returns the numbers of heads of a family's attention."""
    num_heads, num_kv_heads = config.num_attention_heads, policy.num_kv_heads
    if isinstance(num_kv_heads, str):
        num_kv_heads = getattr(config, num_kv_heads, None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return Heads(num_heads, num_kv_heads, head_dim, parallel)


class Attention:
    """Views and ops of one layer's attention, or of this rank's heads."""

    def __init__(self, policy: Policy, layer: nn.Module, config: Any, index: int, norm: NormView | None, heads: Heads):
        """`norm` is applied before the projections; None: no norm."""
        self.norm, self.heads, self.parallel = norm, heads, heads.parallel
        self.num_heads, self.num_kv_heads, self.head_dim = heads.local
        self.layer, self.sinks_path = layer, policy.sinks
        name, parallel = f"layer {index}", heads.parallel
        if len(policy.qkv) == 3:
            columns = [heads.queries(), heads.keys(), heads.keys()]
        else:
            columns = [heads.blocks() if policy.qkv_layout == "blocks" else heads.groups()]
        self.qkv = [
            TransposedLinear(submodule(layer, path), f"{name} {path}", parallel, columns=part)
            for path, part in zip(policy.qkv, columns, strict=True)
        ]
        output = submodule(layer, policy.attention_output)
        self.output = TransposedLinear(output, f"{name} {policy.attention_output}", parallel, rows=heads.queries())

        def head_norm(path: str | None, first: int, num_heads: int) -> NormView | HeadNormsView | None:
            if path is None:
                return None
            if policy.qk_norm_width == "each_head":
                return HeadNormsView(submodule(layer, path), first, num_heads, parallel)
            return NormView(submodule(layer, path), policy.norm, parallel)

        self.q_norm = head_norm(policy.q_norm, parallel.rank * self.num_heads, self.num_heads)
        self.k_norm = head_norm(policy.k_norm, heads.first_kv_head(parallel.rank), self.num_kv_heads)
        self.is_norm_in_op = policy.qk_norm_width == "head" and isinstance(self.q_norm, NormView)
        self.sinks: torch.Tensor | None = None
        self.alibi: torch.Tensor | None = None
        self._build_ops(policy, config, index)

    def _build_ops(self, policy: Policy, config: Any, index: int) -> None:
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        kind, eps = (self.norm.kind, self.norm.eps) if self.norm else (None, 0.0)
        self.qkv_gemm = QKVGemmOp(kind, eps, *heads, layout=policy.qkv_layout)
        scale = policy.scale
        if scale is None:
            scale = self.head_dim**-0.5
        elif isinstance(scale, str):
            scale = attribute(self.layer, scale)
        self.softmax_context = SoftmaxContextOp(
            *heads,
            scale=float(scale),
            window=sliding_window(policy, config, index),
            qk_norm=policy.norm if self.is_norm_in_op else None,
            qk_norm_eps=self.q_norm.eps if self.q_norm and self.is_norm_in_op else 0.0,
            is_interleaved=policy.is_interleaved,
            softcap=soft_capping(policy, config),
            alibi_rounds=policy.is_alibi_rounded,
        )
        if policy.alibi and getattr(config, policy.alibi, True):
            first = self.parallel.rank * self.num_heads
            slopes = alibi_slopes(self.heads.num_heads)[first : first + self.num_heads]
            self.alibi = slopes
        self.vector_matmul = VectorMatMulOp()

    @property
    def linears(self) -> list[TransposedLinear]:
        """All linears of the attention."""
        return [*self.qkv, self.output]

    @property
    def norms(self) -> list[NormView | HeadNormsView]:
        """The norms of queries and keys."""
        return [norm for norm in (self.q_norm, self.k_norm) if norm]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors other than linears and norms that a forward pass reads."""
        return [tensor for tensor in (self.sinks, self.alibi) if tensor is not None]

    def bind(self) -> None:
        """Points all views at the parameters' current memory, unfused; except `norm`, which is the layer's."""
        for part in (*self.linears, *self.norms):
            part.bind()
        if self.sinks_path:
            sinks = attribute(self.layer, self.sinks_path)
            self.sinks = self.parallel.take(sinks, cut(0, self.heads.queries(width=1)), self.sinks_path)
        if self.alibi is not None:
            self.alibi = self.alibi.to(self.output.pair[0].device)

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        cache: KVBlocks,
        batch: Batch | EncoderBatch,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`hidden [N, E]` -> the output `[N, E]`, plus `residual` if it is passed, and the normed input."""
        weights, biases = zip(*(linear.pair for linear in self.qkv), strict=True)
        gamma, beta = (self.norm.gamma, self.norm.beta) if self.norm else (None, None)
        (q, k, v), normed = self.qkv_gemm(hidden, weights, biases, gamma, beta)
        weights = HeadWeights(sinks=self.sinks, alibi=self.alibi)
        if self.q_norm and self.k_norm:
            if self.is_norm_in_op:
                weights = weights._replace(q_gamma=self.q_norm.gamma, k_gamma=self.k_norm.gamma)
            else:
                q, k = self._norm_heads(q, k)
        context = self.softmax_context(QKV(q, k, v, rotary), cache, batch, weights)
        if self.parallel.size == 1:
            return self.vector_matmul(context, *self.output.pair, residual=residual), normed
        output = self.parallel.all_reduce(self.vector_matmul(context, *self.output.pair))
        return output if residual is None else residual + output, normed

    def _norm_heads(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Applies norms that span all heads, or have weights for each head."""
        assert self.q_norm is not None and self.k_norm is not None
        if isinstance(self.q_norm, HeadNormsView):
            return self.q_norm.apply(q.flatten(1, 2)).view(q.shape), self.k_norm.apply(k)
        parallel, num_shared = self.parallel, max(1, self.parallel.size // self.heads.num_kv_heads)
        if parallel.size == 1:
            return self.q_norm.apply(q.flatten(1)).view(q.shape), self.k_norm.apply(k.flatten(1)).view(k.shape)
        # The norm needs the heads of all ranks; of ranks that hold the same key head, one counts.
        all_q = self.q_norm.apply(parallel.all_gather(q.flatten(1)))
        all_k = parallel.all_gather(k.flatten(1)).unflatten(1, (parallel.size, -1))[:, ::num_shared].flatten(1)
        all_k = self.k_norm.apply(all_k).unflatten(1, (-1, *k.shape[1:]))
        return all_q.unflatten(1, (-1, *q.shape[1:]))[:, parallel.rank], all_k[:, parallel.rank // num_shared]
