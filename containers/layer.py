"""The inference layer that all families share: a mixer and an MLP on the residual stream, with norms around them.

`InferenceModel` and `InferenceEncoder` build one for each decoder layer. A layer holds views of that layer's
parameters, found through its policy, and the ops built from the layer's numbers. In its mixer the tokens of a sequence
meet, most often by `Attention`: projections, q/k norm, positions, softmax over the KV workspace, output projection.
`DenseMLP`: up, or gate and up, activation, down; `MoEMLP`: a mixture of experts, whose block is in `moe.py`.

N packed tokens, E hidden size, I MLP size, H query heads, K key/value heads, D head dimension.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig

from hybrid_engine.containers.cache import LayerCache, LayerCacheSpec
from hybrid_engine.containers.moe import ExpertList, MoEMLP, ParameterView
from hybrid_engine.containers.policy import (
    Policy,
    TemperaturePolicy,
    UnsupportedModelError,
    attribute,
    config_value,
    submodule,
)
from hybrid_engine.containers.views import (
    ALONE,
    HeadNormsView,
    NormView,
    Ones,
    Ranges,
    TensorParallel,
    TransposedLinear,
    cut,
    halves,
    join,
)
from hybrid_engine.ops import (
    QKV,
    Batch,
    EncoderBatch,
    HeadWeights,
    MLPGemmOp,
    QKVGemmOp,
    SoftmaxContextOp,
    VectorMatMulOp,
)
from hybrid_engine.ops.linears import ACTIVATIONS
from hybrid_engine.ops.softmax_context import apply_rotary
from hybrid_engine.ops.xielu import XIELUOp

RotaryRows = tuple[torch.Tensor, torch.Tensor]
WINDOWED_KINDS = ("sliding_attention", "local")
CHUNKED_KIND = "chunked_attention"
KINDS = (*WINDOWED_KINDS, "full_attention", "global")
"""Kinds of layers with attention, by the names that configs use."""


class LayerMLP(Protocol):
    """The MLP of a layer on views, with the norm before it: dense, or a mixture of experts."""

    sizes: list[int]
    """Widths that the ranks must be able to share equally."""

    @property
    def linears(self) -> list[TransposedLinear]:
        """All linears; stacked experts are parameters, not linears."""

    @property
    def adaptable(self) -> Sequence[TransposedLinear | ParameterView | ExpertList]:
        """Parts that adapters may be on."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors other than linears and norms that a forward pass reads."""

    def bind(self) -> None:
        """Points all views at the parameters' current memory, unfused; except the norm, which is the layer's."""

    def forward(self, input: torch.Tensor, is_added: bool) -> torch.Tensor:
        """`input [N, E]` -> the output `[N, E]`, added to `input` if `is_added`."""


class LayerMixer(Protocol):
    """The part of a layer in which the tokens of a sequence meet, on views, with the norm before it."""

    cache_spec: LayerCacheSpec
    """Tensors that it keeps of the tokens that were fed."""
    sizes: list[int]
    """Widths that the ranks must be able to share equally."""

    @property
    def heads(self) -> "Heads | None":
        """Heads of attention that the ranks must be able to share equally; None: it has none."""

    @property
    def linears(self) -> list[TransposedLinear]:
        """All linears, which adapters may be on."""

    @property
    def norms(self) -> list[NormView | HeadNormsView]:
        """Norms other than the one before it, which is the layer's."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors other than linears and norms that a forward pass reads."""

    def bind(self) -> None:
        """Points all views at the parameters' current memory, unfused; except the norm before it."""

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: RotaryRows | None,
        cache: LayerCache,
        batch: Batch | EncoderBatch,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`hidden [N, E]` -> the output `[N, E]`, plus `residual` if it is passed, and the normed input.

        Reads and writes `cache`. Rows of `hidden` after those of the batch's tokens are padding.
        """


class NoMixer:
    """The LayerMixer of a layer that is an MLP alone: its output is 0."""

    cache_spec = LayerCacheSpec()
    heads: "Heads | None" = None

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.linears: list[TransposedLinear] = []
        self.norms: list[NormView | HeadNormsView] = []
        self.tensors: list[torch.Tensor] = []

    def bind(self) -> None:
        """See LayerMixer."""

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: RotaryRows | None,
        cache: LayerCache,
        batch: Batch | EncoderBatch,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See LayerMixer."""
        return torch.zeros_like(hidden) if residual is None else residual, hidden


class NoMLP:
    """The LayerMLP of a layer that is a mixer alone: its output is 0."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.linears: list[TransposedLinear] = []
        self.adaptable: list[TransposedLinear] = []
        self.tensors: list[torch.Tensor] = []

    def bind(self) -> None:
        """See LayerMLP."""

    def forward(self, input: torch.Tensor, is_added: bool) -> torch.Tensor:
        """See LayerMLP."""
        return input if is_added else torch.zeros_like(input)


class LayerPart:
    """A part of a family's own layer in addition to mixer and MLP, on views."""

    linears: list[TransposedLinear]
    """Linears, which adapters may be on."""
    norms: list[NormView]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors other than linears and norms that a forward pass reads."""
        return []

    def bind(self) -> None:
        """Points all views at the parameters' current memory, unfused; except the norms, which the layer binds."""
        for linear in self.linears:
            linear.bind()


class InferenceLayer:
    """One decoder layer on views. `forward` neither reads nor changes the module's mode or hooks.

    A family with a block of its own has a subclass, which its policy names: it sets `parts` and overrides `run`.
    """

    parts: Sequence[LayerPart] = ()
    """Parts in addition to mixer and MLP."""

    def __init__(
        self, policy: Policy, layer: nn.Module, config: PretrainedConfig, index: int, parallel: TensorParallel = ALONE
    ):
        """Raises ValueError if the ranks cannot share heads or MLP equally."""
        self.index, self.policy, self.module = index, policy, layer
        self.kind = layer_kind(policy, config, index)
        self.has_rope = has_rope(policy, config, index)

        def norm(path: str | None) -> NormView | None:
            if path is None:
                return None
            module = submodule(layer, path)
            return NormView(module, policy.norm, parallel, ones_of(module, config.hidden_size, layer, policy))

        is_mlp_alone = self.kind is not None and self.kind in (policy.mlp_kinds or ())
        is_mixer_alone = policy.mlp_kinds is not None and not is_mlp_alone
        self.attention_norm = None if is_mlp_alone else norm(policy.attention_norm)
        self.mlp_norm = None if is_mixer_alone else norm(policy.mlp_norm)
        self.attention_post_norm, self.mlp_post_norm = norm(policy.attention_post_norm), norm(policy.mlp_post_norm)
        # Post-norm blocks apply their norms after the sum, not before the projections.
        in_front = policy.block != "post_norm"
        mixer_norm, mlp_norm = (self.attention_norm, self.mlp_norm) if in_front else (None, None)
        self.mixer = NoMixer() if is_mlp_alone else self.build_mixer(config, mixer_norm, parallel)
        self.mlp = NoMLP() if is_mixer_alone else self.build_mlp(config, mlp_norm, parallel)
        check_divides(self.mixer.heads, [*self.mixer.sizes, *self.mlp.sizes], parallel)

        scale = config_value(config, policy.residual_scale) if policy.residual_scale else None
        self.residual_scale = 1.0 if scale is None else float(scale)
        # Otherwise outputs are normed or scaled before they are added, so their products do not add them.
        self.adds_attention = self.attention_post_norm is None and scale is None
        self.adds_mlp = self.mlp_post_norm is None and scale is None
        # A norm is never fused into a buffer of its own, as a linear may be, so its storage shows whether it is
        # gathered.
        norms = (self.attention_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm)
        self._first_norm = next((norm for norm in norms if norm and norm.has_weight), None)

    def build_mixer(self, config: PretrainedConfig, norm: NormView | None, parallel: TensorParallel) -> LayerMixer:
        """Builds the mixer of the layer's kind; `norm` is applied before it."""
        policy, kind = self.policy, self.kind
        mixer = policy.mixers.get(kind, policy.mixers.get(None))
        if mixer is not None:
            return mixer.build(policy, self.module, config, self.index, norm, parallel)
        kinds = (*KINDS, CHUNKED_KIND) if policy.chunk else KINDS
        if kind is not None and kind not in kinds:
            known = ", ".join(str(known) for known in (*kinds, *policy.mixers, *(policy.mlp_kinds or ())))
            raise UnsupportedModelError(f"layer {self.index} is of kind {kind!r}; known are {known}")
        heads = read_heads(policy, config, parallel)
        return Attention(policy, self.module, config, self.index, norm, heads)

    def build_mlp(self, config: PretrainedConfig, norm: NormView | None, parallel: TensorParallel) -> LayerMLP:
        """Builds the MLP; `norm` is applied before it."""
        policy = self.policy
        if policy.moe and MoEMLP.is_in(policy.moe, self.module):
            return MoEMLP(policy.moe, self.module, config, self.index, norm, parallel)
        return DenseMLP(policy, self.module, config, self.index, norm, parallel)

    @property
    def norms(self) -> list[NormView | HeadNormsView]:
        """All norms of the layer."""
        own = (self.attention_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm)
        others = [norm for part in self.parts for norm in part.norms]
        return [*(norm for norm in own if norm), *self.mixer.norms, *others]

    @property
    def linears(self) -> list[TransposedLinear]:
        """All linears of the layer, including those of experts."""
        return [*self.mixer.linears, *self.mlp.linears, *(linear for part in self.parts for linear in part.linears)]

    @property
    def adaptable(self) -> list[TransposedLinear | ParameterView | ExpertList]:
        """All parts of the layer that adapters may be on."""
        others = [linear for part in self.parts for linear in part.linears]
        return [*self.mixer.linears, *self.mlp.adaptable, *others]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors that a forward pass reads, as they are bound now."""
        linears = [tensor for linear in self.linears for tensor in linear.pair if tensor is not None]
        norms = [tensor for norm in self.norms for tensor in norm.tensors]
        others = [tensor for part in self.parts for tensor in part.tensors]
        return [*linears, *norms, *self.mixer.tensors, *self.mlp.tensors, *others]

    def bind(self) -> None:
        """Points all views at the parameters' current memory, unfused."""
        for norm in self.norms:
            norm.bind()
        self.mixer.bind()
        self.mlp.bind()
        for part in self.parts:
            part.bind()

    @property
    def buffer_bytes(self) -> int:
        """Bytes that `fuse_lora` will take."""
        return sum(part.buffer_bytes for part in self.adaptable)

    def fuse_lora(self, lender: "InferenceLayer | None" = None) -> int:
        """Dequantizes and fuses the weights that need it; returns the bytes of the buffers.

        With a `lender`, which may be this layer, linears use the buffers of its linears of the same shape and leave the
        memory allocated: no other layer may be fused in them meanwhile.
        """
        parts = self.adaptable
        if lender is None:
            return sum(part.fuse_lora() for part in parts)
        others = lender.adaptable[: len(parts)]
        num_bytes = 0
        for part, other in zip_longest(parts, others):
            if isinstance(part, TransposedLinear) and isinstance(other, TransposedLinear) and part.is_like(other):
                num_bytes += part.fuse_lora(other)
            else:
                num_bytes += part.fuse_lora()
        return num_bytes

    def unfuse_lora(self, keeps_lent: bool = False) -> None:
        """Restores the parameters themselves; with `keeps_lent`, the lender's buffers stay allocated."""
        for part in self.adaptable:
            if isinstance(part, TransposedLinear):
                part.unfuse_lora(keeps_lent)
            else:
                part.unfuse_lora()

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: RotaryRows | None,
        cache: LayerCache,
        batch: Batch | EncoderBatch,
    ) -> torch.Tensor:
        """`hidden [N, E]` -> `[N, E]`; writes what this layer keeps into `cache`, except for an encoder.

        Raises:
            RuntimeError: the weights were gathered when they were bound and no longer are.
        """
        if self._first_norm and self._first_norm.gamma.untyped_storage().nbytes() == 0:
            raise RuntimeError(
                f"layer {self.index} reads weights that are not gathered; gather them around the rollout"
            )
        return self.run(hidden, rotary, cache, batch)

    def run(
        self,
        hidden: torch.Tensor,
        rotary: RotaryRows | None,
        cache: LayerCache,
        batch: Batch | EncoderBatch,
    ) -> torch.Tensor:
        """The block of `forward`, on weights that are there."""
        added = hidden if self.adds_attention else None
        attention, normed = self.mixer.forward(hidden, rotary, cache, batch, residual=added)
        if self.policy.block == "parallel":
            return attention + self.mlp.forward(hidden if self.mlp_norm else normed, is_added=False)
        if self.policy.block == "post_norm":
            assert self.attention_norm and self.mlp_norm
            stream = self.attention_norm.apply(attention)
            return self.mlp_norm.apply(self.mlp.forward(stream, is_added=True))
        stream = attention if self.adds_attention else self._add(hidden, attention, self.attention_post_norm)
        if self.adds_mlp:
            return self.mlp.forward(stream, is_added=True)
        return self._add(stream, self.mlp.forward(stream, is_added=False), self.mlp_post_norm)

    def _add(self, stream: torch.Tensor, output: torch.Tensor, norm: NormView | None) -> torch.Tensor:
        """`stream [N, E]` plus the output `[N, E]` of attention or MLP, normed and scaled."""
        return torch.add(stream, norm.apply(output) if norm else output, alpha=self.residual_scale)


def ones_of(norm: nn.Module, width: int, layer: nn.Module, policy: Policy) -> Ones | None:
    """Returns the ones that replace the weight of a layer's norm; None if it has a weight."""
    is_plain = getattr(norm, "weight", None) is None
    return Ones(width, submodule(layer, policy.attention_output)) if is_plain else None


def has_rope(policy: Policy, config: PretrainedConfig, index: int) -> bool:
    """Whether layer `index` rotates queries and keys, in a family with rotary embedding."""
    if policy.is_rope_local and policy.window and config_value(config, policy.window) is not None:
        return sliding_window(policy, config, index) is not None
    return policy.rope_layers is None or bool(config_value(config, policy.rope_layers)[index])


def layer_kind(policy: Policy, config: PretrainedConfig, index: int) -> str | None:
    """Returns the config's kind of layer `index`; None if the config has one kind only."""
    kinds = getattr(config, policy.layer_kinds, None) if policy.layer_kinds else None
    return None if kinds is None else kinds[index]


def sliding_window(policy: Policy, config: PretrainedConfig, index: int) -> int | None:
    """Number of tokens that layer `index` attends to, including its own; None: all."""
    if policy.window is None or layer_kind(policy, config, index) not in (None, *WINDOWED_KINDS):
        return None
    return config_value(config, policy.window)


def attention_chunk(policy: Policy, config: PretrainedConfig, index: int) -> int | None:
    """Number of tokens of the chunks in which layer `index` attends; None: it attends to all."""
    is_chunked = policy.chunk is not None and layer_kind(policy, config, index) == CHUNKED_KIND
    return config_value(config, str(policy.chunk)) if is_chunked else None


def soft_capping(policy: Policy, config: PretrainedConfig) -> float | None:
    """Cap of the scores in the model's own attention, or None; transformers' SDPA does not cap them."""
    if policy.softcap is None or getattr(config, "_attn_implementation", None) == "sdpa":
        return None
    return config_value(config, policy.softcap)


class Temperature:
    """Factors of the queries by position, see TemperaturePolicy."""

    def __init__(self, policy: TemperaturePolicy, config: PretrainedConfig):
        self.strength, self.length = (config_value(config, name) for name in (policy.strength, policy.length))
        self.offset = policy.offset

    def apply(self, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`q [N, K, G, D]` of tokens at `positions`; rows after theirs are padding and become 0."""
        steps = torch.floor((positions.float() + self.offset) / self.length)
        factors = functional.pad(1 + self.strength * torch.log1p(steps), (0, len(q) - len(positions)))
        return (q * factors[:, None, None, None]).to(q.dtype)


def take_temperature(policy: Policy, config: PretrainedConfig, index: int) -> Temperature | None:
    """Returns the temperature of layer `index`, or None."""
    part = policy.temperature
    if part is None or part.has_rope != has_rope(policy, config, index):
        return None
    is_on = part.switch is None or config_value(config, part.switch)
    return Temperature(part, config) if is_on else None


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """Returns the `[H]` fp32 slopes of ALiBi (Press et al. 2022, arXiv 2108.12409, section 3), with its extension.

    For a power of two they are 2^(-8/H), 2^(-16/H), ...; otherwise those of the next lower power of two, followed by
    every other one of the next higher.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(num_heads - power)]
    return torch.tensor(slopes, dtype=torch.float32)


@dataclass(frozen=True)
class Heads:
    """Query and key/value heads of a whole attention and of this rank's part of it.

    With fewer key/value heads than ranks, each is held by `size / K` of them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    parallel: TensorParallel = ALONE

    @property
    def local(self) -> tuple[int, int, int]:
        """H, K and D of this rank."""
        size = self.parallel.size
        return self.num_heads // size, max(1, self.num_kv_heads // size), self.head_dim

    def first_kv_head(self, rank: int) -> int:
        """Index of the first key/value head of `rank`."""
        return rank * self.num_kv_heads // self.parallel.size

    def queries(self, width: int = 0, offset: int = 0) -> Ranges | None:
        """Each rank's rows of the query heads, `width` (default D) for each head; width 1 for one number per head."""
        width = width or self.head_dim
        return self.parallel.even(self.num_heads * width, offset)

    def keys(self, offset: int = 0, width: int = 0) -> Ranges | None:
        """Each rank's rows of the key heads, or of the value heads at `offset`."""
        if self.parallel.size == 1:
            return None
        width, num_local = width or self.head_dim, self.local[1]
        firsts = [self.first_kv_head(rank) for rank in range(self.parallel.size)]
        return tuple(((offset + first * width, offset + (first + num_local) * width),) for first in firsts)

    def blocks(self) -> Ranges | None:
        """Each rank's rows of one projection [q | k | v]."""
        first_key, first_value = self.num_heads * self.head_dim, (self.num_heads + self.num_kv_heads) * self.head_dim
        return join(self.queries(), self.keys(first_key), self.keys(first_value))

    def groups(self) -> Ranges | None:
        """Each rank's rows of one projection in which queries, key and value of each key/value head are adjacent."""
        size, dim = self.parallel.size, self.head_dim
        if size == 1:
            return None
        num_queries, num_local = self.num_heads // self.num_kv_heads, self.local[0]
        if self.num_kv_heads >= size:
            return self.parallel.even(self.num_kv_heads * (num_queries + 2) * dim)
        ranges = []
        for rank in range(size):
            head = self.first_kv_head(rank)
            start, first = head * (num_queries + 2), rank * num_local - head * num_queries
            queries = ((start + first) * dim, (start + first + num_local) * dim)
            ranges.append((queries, ((start + num_queries) * dim, (start + num_queries + 2) * dim)))
        return tuple(ranges)


def check_divides(heads: Heads | None, sizes: Sequence[int], parallel: TensorParallel) -> None:
    """Raises ValueError, which lists the valid numbers of ranks, if they cannot share heads and `sizes` equally."""

    def works(size: int) -> bool:
        if heads is not None and (heads.num_heads % size or (heads.num_kv_heads % size and size % heads.num_kv_heads)):
            return False
        return all(length % size == 0 for length in sizes)

    if works(parallel.size):
        return
    lengths = " and ".join(map(str, sorted(set(sizes))))
    text, most = f"the sizes {lengths}", max(sizes, default=1)
    if heads is not None:
        text, most = f"num_attention_heads={heads.num_heads}", heads.num_heads
        text += f" and the MLP size {lengths}" if lengths else ""
        text += f", and divide num_key_value_heads={heads.num_kv_heads} or be a multiple of it"
    choices = ", ".join(str(size) for size in range(1, most + 1) if works(size))
    raise ValueError(f"{parallel.option}={parallel.size} must divide {text}; use one of {choices}")


def read_heads(policy: Policy, config: PretrainedConfig, parallel: TensorParallel = ALONE) -> Heads:
    """Returns the numbers of heads of a family's attention."""
    num_heads, num_kv_heads = config.num_attention_heads, policy.num_kv_heads
    if isinstance(num_kv_heads, str):
        num_kv_heads = getattr(config, num_kv_heads, None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return Heads(num_heads, num_kv_heads, head_dim, parallel)


class Attention:
    """A LayerMixer: attention over keys and values, or over those of this rank's heads."""

    def __init__(
        self,
        policy: Policy,
        layer: nn.Module,
        config: PretrainedConfig,
        index: int,
        norm: NormView | None,
        heads: Heads,
    ):
        """`norm` is applied before the projections; None: no norm."""
        self.norm, self.heads, self.parallel = norm, heads, heads.parallel
        self.num_heads, self.num_kv_heads, self.head_dim = heads.local
        self.sizes: list[int] = []  # the heads say all
        self.cache_spec = LayerCacheSpec(kv=((self.num_kv_heads, self.head_dim),) * 2)
        self.layer, self.sinks_path = layer, policy.sinks
        name, parallel = f"layer {index}", heads.parallel
        if len(policy.qkv) == 3:
            columns = [heads.queries(heads.head_dim * (1 + policy.gates_context)), heads.keys(), heads.keys()]
        else:
            columns = [heads.blocks() if policy.qkv_layout == "blocks" else heads.groups()]
        self.qkv = [
            TransposedLinear(submodule(layer, path), f"{name} {path}", parallel, columns=part)
            for path, part in zip(policy.qkv, columns, strict=True)
        ]
        width = heads.num_heads * heads.head_dim * (1 + policy.gates_context)
        if len(policy.qkv) == 3 and self.qkv[0].num_outputs != width:
            found = f"{name} {policy.qkv[0]} has {self.qkv[0].num_outputs} outputs"
            raise UnsupportedModelError(f"{found}; its {heads.num_heads} heads take {width}")
        output = submodule(layer, policy.attention_output)
        self.output = TransposedLinear(output, f"{name} {policy.attention_output}", parallel, rows=heads.queries())

        def head_norm(path: str | None, first: int, num_heads: int) -> NormView | HeadNormsView | None:
            if path is None or (policy.norms_rotated_heads and not has_rope(policy, config, index)):
                return None
            if policy.qk_norm_width == "each_head":
                return HeadNormsView(submodule(layer, path), first, num_heads, parallel)
            module = submodule(layer, path)
            return NormView(module, policy.norm, parallel, ones_of(module, self.head_dim, layer, policy))

        self.q_norm = head_norm(policy.q_norm, parallel.rank * self.num_heads, self.num_heads)
        self.k_norm = head_norm(policy.k_norm, heads.first_kv_head(parallel.rank), self.num_kv_heads)
        self.is_norm_last = policy.is_qk_norm_last
        is_in_head = policy.qk_norm_width == "head" and isinstance(self.q_norm, NormView)
        self.is_norm_in_op, self.norms_heads_alike = is_in_head and not self.is_norm_last, is_in_head
        self.temperature = take_temperature(policy, config, index)
        self.sinks: torch.Tensor | None = None
        self.alibi: torch.Tensor | None = None
        self._build_ops(policy, config, index)

    def _build_ops(self, policy: Policy, config: PretrainedConfig, index: int) -> None:
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        kind, eps = (self.norm.kind, self.norm.eps) if self.norm else (None, 0.0)
        # A gate stands after its query as a query head of its own.
        self.gates_context, num_projected = policy.gates_context, self.num_heads * (1 + policy.gates_context)
        self.qkv_gemm = QKVGemmOp(kind, eps, num_projected, *heads[1:], layout=policy.qkv_layout)
        scale = policy.scale
        if scale is None:
            scale = self.head_dim**-0.5
        elif isinstance(scale, str):
            scale = attribute(self.layer, scale)
        self.softmax_context = SoftmaxContextOp(
            *heads,
            scale=float(scale),
            window=sliding_window(policy, config, index),
            chunk=attention_chunk(policy, config, index),
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
        """See LayerMixer."""
        return [*self.qkv, self.output]

    @property
    def norms(self) -> list[NormView | HeadNormsView]:
        """See LayerMixer."""
        return [norm for norm in (self.q_norm, self.k_norm) if norm]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """See LayerMixer."""
        return [tensor for tensor in (self.sinks, self.alibi) if tensor is not None]

    def bind(self) -> None:
        """See LayerMixer."""
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
        rotary: RotaryRows | None,
        cache: LayerCache,
        batch: Batch | EncoderBatch,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See LayerMixer."""
        weights, biases = zip(*(linear.pair for linear in self.qkv), strict=True)
        gamma, beta = (self.norm.gamma, self.norm.beta) if self.norm else (None, None)
        (q, k, v), normed = self.qkv_gemm(hidden, weights, biases, gamma, beta)
        gate = None
        if self.gates_context:
            q, gate = q[:, :, ::2], q[:, :, 1::2]
        weights = HeadWeights(sinks=self.sinks, alibi=self.alibi)
        if self.temperature and not isinstance(batch, EncoderBatch):
            q = self.temperature.apply(q, batch.positions)
        if self.is_norm_last and rotary is not None:
            (q, k), rotary = self._rotate(q, k, rotary), None
        if self.q_norm and self.k_norm:
            if self.is_norm_in_op:
                weights = weights._replace(q_gamma=self.q_norm.gamma, k_gamma=self.k_norm.gamma)
            else:
                q, k = self._norm_heads(q, k)
        context = self.softmax_context(QKV(q, k, v, rotary), cache.kv, batch, weights)
        if gate is not None:
            context = context * torch.sigmoid(gate.flatten(1))
        if self.parallel.size == 1:
            return self.vector_matmul(context, *self.output.pair, residual=residual), normed
        output = self.parallel.all_reduce(self.vector_matmul(context, *self.output.pair))
        return output if residual is None else residual + output, normed

    def _rotate(self, q: torch.Tensor, k: torch.Tensor, rotary: RotaryRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotates queries and keys before they are normed; rows after those of the batch's tokens become 0."""
        cos, sin = (functional.pad(rows, (0, 0, 0, len(q) - len(rows))) for rows in rotary)
        both = apply_rotary(torch.cat((q.flatten(1, 2), k), 1), cos, sin, self.softmax_context.is_interleaved)
        q_rows, k_rows = both.split((self.num_heads, self.num_kv_heads), 1)
        return q_rows.view(q.shape), k_rows

    def _norm_heads(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Applies norms that the op does not: after rotary embedding, over all heads, or with weights for each head."""
        assert self.q_norm is not None and self.k_norm is not None
        if self.norms_heads_alike:
            return self.q_norm.apply(q.contiguous()), self.k_norm.apply(k.contiguous())
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


class LearnedXIELU:
    """The activation xIELU with views of its learned numbers."""

    def __init__(self, module: nn.Module, parallel: TensorParallel):
        self.module, self.parallel = module, parallel
        self.op = XIELUOp(float(module.beta), float(module.eps))  # type: ignore[arg-type]
        self.tensors: list[torch.Tensor] = []

    def bind(self) -> None:
        """Points the views at the parameters' current memory."""
        alphas = (self.module.alpha_p, self.module.alpha_n)
        self.tensors = [self.parallel.take(alpha, None, "xIELU") for alpha in alphas]  # type: ignore[arg-type]

    def apply(self, input: torch.Tensor) -> torch.Tensor:
        """`[N, I]` -> `[N, I]`."""
        return self.op(input, *self.tensors)


class DenseMLP:
    """A LayerMLP of two or three linears."""

    def __init__(
        self,
        policy: Policy,
        layer: nn.Module,
        config: PretrainedConfig,
        index: int,
        norm: NormView | None,
        parallel: TensorParallel = ALONE,
    ):
        """`norm` is applied before the MLP; None: no norm."""

        def linear(path: str, columns: Ranges | None = None, rows: Ranges | None = None) -> TransposedLinear:
            return TransposedLinear(submodule(layer, path), f"layer {index} {path}", parallel, columns, rows)

        self.norm, self.parallel = norm, parallel
        self.is_fused_gate = policy.gate == policy.up
        size = linear(policy.down).num_inputs
        part = parallel.even(size)
        self.sizes = [size]
        self.up = linear(policy.up, columns=join(part, parallel.even(size, size)) if self.is_fused_gate else part)
        self.down = linear(policy.down, rows=part)
        self.gate = linear(policy.gate, columns=part) if policy.gate and not self.is_fused_gate else None
        activation = getattr(config, policy.activation, policy.activation)
        self.xielu: LearnedXIELU | None = None
        if policy.xielu and activation == "xielu":
            self.xielu, self.product = LearnedXIELU(submodule(layer, policy.xielu), parallel), VectorMatMulOp()
            return
        if activation not in ACTIVATIONS:
            raise UnsupportedModelError(f"activation {activation!r}; known are {', '.join(ACTIVATIONS)}")
        kind, eps = (norm.kind, norm.eps) if norm else (None, 0.0)
        self.mlp_gemm = MLPGemmOp(kind, eps, activation)
        self.mlp_gemm_adding = MLPGemmOp(kind, eps, activation, adds_residual=True)

    @property
    def linears(self) -> list[TransposedLinear]:
        """See LayerMLP."""
        return [*([self.gate] if self.gate else []), self.up, self.down]

    @property
    def adaptable(self) -> list[TransposedLinear]:
        """See LayerMLP."""
        return self.linears

    @property
    def tensors(self) -> list[torch.Tensor]:
        """See LayerMLP."""
        return self.xielu.tensors if self.xielu else []

    def bind(self) -> None:
        """See LayerMLP."""
        for linear in self.linears:
            linear.bind()
        if self.xielu:
            self.xielu.bind()

    def forward(self, input: torch.Tensor, is_added: bool) -> torch.Tensor:
        """See LayerMLP."""
        gate, up = (self.gate.pair if self.gate else None), self.up.pair
        if self.is_fused_gate:
            gate, up = halves(up)
        adds_here = is_added and self.parallel.size == 1
        if self.xielu:
            inner = self.xielu.apply(self.product(self.norm.apply(input) if self.norm else input, *up))
            output = self.product(inner, *self.down.pair, residual=input if adds_here else None)
        else:
            gamma, beta = (self.norm.gamma, self.norm.beta) if self.norm else (None, None)
            op = self.mlp_gemm_adding if adds_here else self.mlp_gemm
            output = op(input, None, gate, up, self.down.pair, gamma, beta)[0]
        if self.parallel.size == 1:
            return output
        output = self.parallel.all_reduce(output)
        return input + output if is_added else output
