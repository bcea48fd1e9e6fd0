"""The whole causal language model on containers: embedding, layers, final norm, LM head in fp32.

Under tensor parallelism each rank has its part of the model, and all return the same logits.

It reads the parameters of an unmodified Hugging Face model through views and never calls its forward. N packed tokens,
R rows whose next token is wanted, E hidden size, V vocabulary.

`RotaryAngles` are the rotary angles as transformers computes them, a table by position for each kind of layer, for each
of its rope scalings. Most scalings change the frequencies once. Two change them with the sequence's length: `dynamic`
with every token beyond the trained length, `longrope` once. transformers uses the longest row of a batch for all rows.
Here a token's angles depend on the length that its own row had when the token was fed: a prompt's tokens on the
prompt's length, a response's token on the length including it. This equals transformers' result for a row alone,
whatever the batch, also after a preemption. P positions, R rotated dimensions. Source: transformers,
modeling_rope_utils.py.
"""

import importlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hybrid_engine.containers import FAMILIES
from hybrid_engine.containers.cache import CacheShape, LayerCacheSpec, ModelCache
from hybrid_engine.containers.layer import Attention, InferenceLayer
from hybrid_engine.containers.moe import MoEBlock, MoEMLP, routing_dtype
from hybrid_engine.containers.policy import (
    POLICIES,
    POLICIES_BY_NAMES,
    Policy,
    UnsupportedModelError,
    config_value,
    find_policy,
    has_module,
    submodule,
)
from hybrid_engine.containers.quantised import keep_as_loaded
from hybrid_engine.containers.towers import find_tower, has_rope_index
from hybrid_engine.containers.views import ALONE, EmbeddingView, NormView, Ones, TensorParallel, TransposedLinear
from hybrid_engine.ops import (
    Batch,
    DecodeBatch,
    MixedBatch,
    PlacedFeatures,
    PrefillBatch,
    SoftmaxContextOp,
    VectorMatMulOp,
)
from hybrid_engine.ops.cpu_kernels import rows_of_pass
from hybrid_engine.ops.expert_gemm import ExpertGemmOp
from hybrid_engine.ops.softmax_context import rotary_rows

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional", "ntk_alpha")
LENGTH_ROPE_TYPES = ("dynamic", "longrope")
CHANGED_NUMBERS = ("max_seq_len_cached", "attention_scaling")
"""Name suffixes of numbers that a forward pass of transformers' modules changes."""
Rows = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each `[N, R]`."""


for family in FAMILIES:  # each registers its policies
    importlib.import_module(f"hybrid_engine.containers.{family}")


def layer_class_name(layer: nn.Module) -> str:
    """Class name of a decoder layer, without the prefix FSDP that `fully_shard` adds."""
    return type(layer).__name__.removeprefix("FSDP")


def find_decoder(model: nn.Module, config: PretrainedConfig) -> tuple[nn.Module, nn.ModuleList, Policy]:
    """Returns the module that holds the decoder layers, the layers and their policy.

    Layers of several classes may have a policy each; the first one's is returned, for the modules outside the layers.

    Raises UnsupportedModelError if no list of layers has a policy.
    """
    lists = [
        (name, child, decoder)
        for name, decoder in model.named_modules()
        for child in decoder.children()
        if isinstance(child, nn.ModuleList) and len(child) > 0
    ]
    for _, layers, decoder in lists:
        policies = [find_policy(name, config) for name in dict.fromkeys(map(layer_class_name, layers))]
        if (policy := policies[0]) is not None and all(other is not None for other in policies):
            return decoder, layers, policy
    for _, layers, decoder in lists:
        for policy in POLICIES_BY_NAMES:
            if all(has_names(policy, layer) for layer in layers):
                return decoder, layers, policy
    found = sorted({layer_class_name(layers[0]) for _, layers, _ in lists}) or ["no list of layers"]
    indexers = sorted({type(part).__name__ for part in model.modules() if type(part).__name__.endswith("Indexer")})
    reason = f", whose attention chooses its keys by {', '.join(indexers)}" if indexers else ""
    raise UnsupportedModelError(
        f"no policy for {', '.join(found)}{reason}; {len(POLICIES)} layer classes have one, such as LlamaDecoderLayer "
        "(docs/models.md)"
    )


def layer_policy(policy: Policy, layer: nn.Module, config: PretrainedConfig) -> Policy:
    """Returns the policy of one layer of a model whose first layer has `policy`."""
    return policy if policy.layer_class is None else find_policy(layer_class_name(layer), config) or policy


def has_names(policy: Policy, layer: nn.Module) -> bool:
    """Whether `layer` has every module that `policy` names, and norms of the policy's kind."""
    norms = [path for path in (policy.attention_norm, policy.mlp_norm) if path]
    is_moe = policy.moe is not None and MoEMLP.is_in(policy.moe, layer)
    paths = [*norms, *policy.qkv, policy.attention_output, *(() if is_moe else (policy.up, policy.down))]
    if not all(has_module(layer, path) for path in paths):
        return False
    # Families with RMS norms share these names but compute another function.
    return policy.norm != "layer" or all(getattr(layer.get_submodule(path), "bias", None) is not None for path in norms)


class LayerStream(Protocol):
    """The stream of layers that pass on more than one hidden state, and the parts of the model that make it.

    It is one tensor `[N, W]`, whose columns the family's own layers read and write.
    """

    width: int
    """W."""

    def __init__(self, policy: Policy, base: Any, decoder: nn.Module, parallel: TensorParallel):
        """`base` is the whole model, with its config."""

    @property
    def linears(self) -> list[TransposedLinear]:
        """Linears, which adapters may be on."""

    @property
    def views(self) -> list[NormView | EmbeddingView]:
        """All that it reads except linears."""

    @staticmethod
    def is_in(config: PretrainedConfig) -> bool:
        """Whether a model has it; otherwise its layers pass on the hidden state alone."""

    def enter(self, tokens: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """`tokens [N]` and their embeddings `[N, E]` -> the first layer's input `[N, W]`, which layers may change."""

    def leave(self, stream: torch.Tensor) -> torch.Tensor:
        """The last layer's output `[R, W]` -> the hidden state `[R, E]` before the final norm."""


class InferenceModel:
    """A causal language model on containers, or this rank's part of it.

    Raises UnsupportedModelError if containers cannot run the model, ValueError if the ranks cannot share it equally.
    """

    runs_module = False
    """Whether `forward` runs the module's own forward, for which its parameters must be gathered."""

    def __init__(self, model: nn.Module, parallel: TensorParallel = ALONE):
        self.parallel = parallel
        self.base = model.get_base_model() if hasattr(model, "get_base_model") else model
        keep_as_loaded(self.base)
        if not hasattr(type(self.base), "get_input_embeddings"):
            raise UnsupportedModelError(f"{type(self.base).__name__} is no model of transformers but wraps one")
        config = self.base.config.get_text_config()
        decoder, layers, policy = find_decoder(self.base, config)
        if policy.is_encoder:
            raise UnsupportedModelError(f"{policy.layer_class} is an encoder's layer: there is nothing to generate")
        self.policy, self.layer_class = policy, layer_class_name(layers[0])
        policies = [layer_policy(policy, layer, config) for layer in layers]
        self.layers = [
            (own.layer or InferenceLayer)(own, layer, config, index, parallel)
            for index, (own, layer) in enumerate(zip(policies, layers, strict=True))
        ]
        self._take_ends(policy, decoder, config)
        self.angles = take_angles(policy, decoder, config, self.layers)
        self.tower = find_tower(self.base, self.angles.has_axes)
        """How the model takes images; None: it has no tower, or one that containers do not know."""
        self.has_axes = self.tower is not None and has_rope_index(self.base)
        """Whether tokens of an image have a position on each of three axes."""
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        # A position table has an end; length-dependent frequencies serve sequences longer than the config's maximum.
        has_end = not any(rotary.rope_type == "dynamic" for rotary in self.angles.rotaries.values())
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None) if has_end else None

    @property
    def recompute_length(self) -> int | None:
        """Length of a sequence at which all its keys are recomputed; None: they never are."""
        return self.angles.recompute_length

    def _take_ends(self, policy: Policy, decoder: nn.Module, config: PretrainedConfig) -> None:
        """Takes the modules before the first layer and after the last."""

        def linear(path: str | None) -> TransposedLinear | None:
            module = getattr(decoder, path, None) if path else None
            return None if module is None else TransposedLinear(module, str(path), self.parallel)

        def norm(path: str | None) -> NormView | None:
            if path is None:
                return None
            module = submodule(decoder, path)
            is_plain = getattr(module, "weight", None) is None
            ones = Ones(config.hidden_size, self.base.get_output_embeddings()) if is_plain else None
            return NormView(module, policy.norm, self.parallel, ones)

        def number(name: str | None) -> float | None:
            return config_value(config, name) if name else None

        self.embedding = EmbeddingView(self.base.get_input_embeddings(), self.parallel, is_cut=True)
        self.embedding_norm, self.final_norm = norm(policy.embedding_norm), norm(policy.final_norm)
        self.project_in, self.project_out = linear(policy.project_in), linear(policy.project_out)
        self.position_embedding = (
            EmbeddingView(self._position_module(policy.position_embedding, decoder), self.parallel)
            if policy.position_embedding
            else None
        )
        self.position_offset = policy.position_offset
        has_stream = policy.stream is not None and policy.stream.is_in(config)
        self.stream = policy.stream(policy, self.base, decoder, self.parallel) if policy.stream and has_stream else None
        own = self.base.config  # of a class that has more than text
        tokens = [] if own is config else [getattr(own, name, None) for name in policy.padded_tokens]
        self.padded_tokens = [token for token in tokens if token is not None]
        self.padding = getattr(config, "pad_token_id", None)
        head = self.base.get_output_embeddings()
        if head is None:
            raise UnsupportedModelError(f"{type(self.base).__name__} has no LM head")
        num_outputs = TransposedLinear(head, "lm_head").num_outputs
        if num_outputs < config.vocab_size:
            raise UnsupportedModelError(f"an LM head of {num_outputs} tokens for a vocabulary of {config.vocab_size}")
        columns = self.parallel.chunks(num_outputs)
        self.lm_head = TransposedLinear(head, "lm_head", self.parallel, columns=columns)
        self.lm_head_op, self.project = VectorMatMulOp(fp32_output=True), VectorMatMulOp()
        self.logit_softcap, self.embedding_scale = number(policy.logit_softcap), number(policy.embedding_scale)
        self.logit_scale = (number(policy.logit_scale) or 1.0) / (number(policy.logit_divisor) or 1.0)

    def _position_module(self, path: str, decoder: nn.Module) -> nn.Module:
        return submodule(decoder if has_module(decoder, path) else self.base, path)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the weights, in which the layers compute."""
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.weight.device

    @property
    def weight(self) -> torch.Tensor:
        """One of the weights; all have its dtype and device."""
        return self.embedding.weight

    @property
    def has_experts(self) -> bool:
        """Whether a layer has a mixture of experts."""
        return any(isinstance(layer.mlp, MoEMLP) for layer in self.layers)

    @property
    def attentions(self) -> list[SoftmaxContextOp]:
        """Attention of each layer that has keys and values."""
        return [layer.mixer.softmax_context for layer in self.layers if isinstance(layer.mixer, Attention)]

    @property
    def can_be_recorded(self) -> bool:
        """Whether a graph can hold a forward pass: the host reads none of its values, as it may if a module runs.

        The experts' reference reads the number of tokens of each expert, even as the fallback for a kernel.
        """
        return not self.runs_module and not (self.has_experts and ExpertGemmOp.reads_host(self.weight))

    @property
    def cache_specs(self) -> tuple[LayerCacheSpec, ...]:
        """Tensors that each of `layers` keeps of the tokens that were fed."""
        return tuple(layer.mixer.cache_spec for layer in self.layers)

    def cache_shape(self, num_blocks: int, block_size: int, num_slots: int = 0) -> CacheShape:
        """Shape of a cache of so many blocks and, if layers keep states, slots."""
        specs = self.cache_specs
        return CacheShape(specs, num_blocks, block_size, num_slots if any(spec.state for spec in specs) else 0)

    def new_cache(self, num_blocks: int, block_size: int, num_slots: int = 0) -> ModelCache:
        """Returns a cache of zeros with memory of its own."""
        return ModelCache.zeros(self.cache_shape(num_blocks, block_size, num_slots), self.dtype, self.device)

    def bytes_per_block(self, block_size: int, dtype: torch.dtype | None = None) -> int:
        """Bytes of a block of the cache; `dtype`: that of the weights once they are loaded, None: they are."""
        return self.cache_shape(1, block_size).num_bytes(dtype or self.dtype)

    def bytes_per_slot(self, dtype: torch.dtype | None = None) -> int:
        """Bytes of a slot of the cache, 0 if no layer keeps a state; `dtype` as in `bytes_per_block`."""
        return self.cache_shape(0, 1, 1).num_bytes(dtype or self.dtype)

    def addresses(self) -> tuple[int, ...]:
        """Addresses of all tensors that a forward pass reads, as they are bound now."""
        tensors = [tensor for layer in self.layers for tensor in layer.tensors]
        tensors += [tensor for linear in self._linears for tensor in linear.pair if tensor is not None]
        tensors += [tensor for norm in self._norms for tensor in norm.tensors]
        tensors += [tensor for table in self.angles.tables.values() for tensor in table]
        tensors += [table.weight for table in (self.embedding, self.position_embedding) if table is not None]
        tensors += [tensor for view in (self.stream.views if self.stream else ()) for tensor in view.tensors]
        return tuple(tensor.data_ptr() for tensor in tensors)

    @property
    def _linears(self) -> list[TransposedLinear]:
        """The linears outside the layers."""
        others = self.stream.linears if self.stream else ()
        return [linear for linear in (self.project_in, self.project_out, self.lm_head, *others) if linear]

    @property
    def _norms(self) -> list[NormView]:
        return [norm for norm in (self.embedding_norm, self.final_norm) if norm]

    def bind_rest(self) -> None:
        """Points the views outside the layers at the parameters' current memory."""
        views = self.stream.views if self.stream else ()
        for part in (self.embedding, self.position_embedding, *self._norms, *self._linears, *views):
            if part is not None:
                part.bind()
        self.parallel.wait()

    def fuse_rest(self) -> int:
        """Fuses the active adapters outside the layers; returns the bytes of the buffers."""
        return sum(linear.fuse_lora() for linear in self._linears)

    def bind(self, layers_at_once: int = 1) -> None:
        """Points all views at the parameters' current memory, unfused.

        If parts come from other ranks, those of `layers_at_once` layers are in flight together.
        """
        self.bind_rest()
        for layer in self.layers:
            if layer.index % layers_at_once == 0:
                self.parallel.wait()
            layer.bind()
        self.parallel.wait()

    def buffer_bytes(self, is_streamed: bool = False) -> int:
        """Bytes that fusing the active adapters will take; of streamed layers, one is fused at a time."""
        layers = [layer.buffer_bytes for layer in self.layers]
        return sum(linear.buffer_bytes for linear in self._linears) + (max(layers) if is_streamed else sum(layers))

    def fuse_lora(self) -> int:
        """Fuses the active adapters of every linear; returns the bytes of the buffers."""
        return self.fuse_rest() + sum(layer.fuse_lora() for layer in self.layers)

    def unfuse_lora(self) -> None:
        """Restores the parameters themselves, which were never written to."""
        for linear in self._linears:
            linear.unfuse_lora()
        for layer in self.layers:
            layer.unfuse_lora()

    def prepare_positions(self, num_positions: int) -> None:
        """Extends the rotary tables to `num_positions`; they are computed again only if they are too short."""
        self.angles.prepare(num_positions, self.dtype, self.device)

    def forward(self, batch: Batch, cache: ModelCache, layers: Iterable[InferenceLayer]) -> torch.Tensor:
        """Returns next-token logits `[R, V]` fp32 of each sequence's last token (prefill), each row (decode), or both.

        `layers` yields `self.layers` in order; if weights are streamed, each is gathered when it is requested. Writes
        what the layers keep of the batch's tokens into `cache`.
        """
        return self._head(self._run_layers(self._embed(batch), batch, cache, layers), batch)

    def _run_layers(
        self, hidden: torch.Tensor, batch: Batch, cache: ModelCache, layers: Iterable[InferenceLayer]
    ) -> torch.Tensor:
        """Passes `hidden [N, E]` through `layers`."""
        rotary, num_tokens = self.angles.rows(batch, self.dtype), len(hidden)
        if not isinstance(batch, DecodeBatch) and (num_added := rows_of_pass(hidden) - num_tokens):
            hidden = functional.pad(hidden, (0, 0, 0, num_added))  # copies even where it adds nothing
        images = batch.images
        for layer in layers:
            angles = rotary.get(layer.kind) if layer.has_rope else None
            hidden = layer.forward(hidden, angles, cache.layers[layer.index], batch)
            if images is not None:
                hidden = add_features(hidden, images, layer.index, self.hidden_size)
        return hidden[:num_tokens]

    @property
    def mixtures(self) -> list[MoEBlock]:
        """The mixtures of experts of all layers, in their order."""
        return [layer.mlp.block for layer in self.layers if isinstance(layer.mlp, MoEMLP)]

    def taken_experts(self, num_tokens: int) -> torch.Tensor:
        """`[N, L, k]` uint8 or int16: the experts that the first `num_tokens` tokens of the last pass took."""
        blocks = self.mixtures
        taken = [block.taken[:num_tokens] for block in blocks if block.taken is not None]
        return torch.stack(taken, dim=1).to(routing_dtype(max(block.num_experts for block in blocks)))

    def _head(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Returns logits `[R, V]` fp32 from the last layer's output `[N, E]`."""
        if batch.wanted is not None:
            hidden = hidden[batch.wanted]
        if self.stream:
            hidden = self.stream.leave(hidden)
        if self.final_norm:
            hidden = self.final_norm.apply(hidden)
        if self.project_out:
            hidden = self.project(hidden, *self.project_out.pair)
        # An fp32 head on a 16-bit model takes fp32 inputs, by a hook of the module.
        hidden = hidden.to(self.lm_head.pair[0].dtype)
        logits = self._gather_vocabulary(self.lm_head_op(hidden, *self.lm_head.pair))
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_softcap is not None:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits

    def _embed(self, batch: Batch) -> torch.Tensor:
        """Returns the first layer's input `[N, E]`."""
        tokens = batch.tokens
        for token in self.padded_tokens:
            tokens = tokens.masked_fill(tokens == token, self.padding)
        hidden, images = self.embedding.look_up(tokens), batch.images
        if images is not None:
            hidden = hidden.index_copy(0, images.places, images.values[:, : self.hidden_size])
        if self.embedding_scale is not None:
            hidden = hidden * self.embedding_scale
        if self.project_in:
            hidden = self.project(hidden, *self.project_in.pair)
        if self.position_embedding is not None:
            hidden = hidden + self.position_embedding.look_up(batch.positions + self.position_offset)
        hidden = self.embedding_norm.apply(hidden) if self.embedding_norm else hidden
        return self.stream.enter(tokens, hidden) if self.stream else hidden

    def _gather_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Gathers the logits `[R, V]` from the ranks' parts of the vocabulary.

        Every rank gets the same bits, so that all draw the same tokens and take the same turns.
        """
        if self.lm_head.columns is None:
            return logits
        first, *_, last = (ranges[0] for ranges in self.lm_head.columns)
        missing = first[1] - logits.shape[1]
        return self.parallel.all_gather(functional.pad(logits, (0, missing)))[:, : last[1]]


def add_features(hidden: torch.Tensor, images: PlacedFeatures, index: int, size: int) -> torch.Tensor:
    """Adds the features that belong after layer `index`, if any, to `hidden [N, E]`; `size` is E."""
    first = (index + 1) * size
    if first >= images.values.shape[1]:
        return hidden
    return hidden.index_add(0, images.places, images.values[:, first : first + size])


class Rotary:
    """Angles of one rotary embedding module for one kind of layer.

    Args:
        module: transformers' rotary embedding; its buffers are read when the tables are computed.
        kind: kind of layer, if the module has frequencies for each; None: it has one set.
        is_interleaved: whether rotated pairs are adjacent.
        is_backwards: whether they are rotated by the negative angle.
        factors: see `Policy.rope_factors`.

    Raises UnsupportedModelError for an unknown rope type, or factors that change with the length.
    """

    def __init__(
        self,
        module: nn.Module,
        config: PretrainedConfig,
        kind: str | None,
        is_interleaved: bool,
        is_backwards: bool = False,
        factors: tuple[str, str] | None = None,
    ):
        self.module, self.config, self.is_interleaved = module, config, is_interleaved
        self.sign = -1.0 if is_backwards else 1.0
        types = getattr(module, "rope_type", None)
        self.prefix, self.kind = ("", None) if not isinstance(types, dict) else (f"{kind}_", kind)
        self.rope_type = types.get(kind) if isinstance(types, dict) else types
        known = STATIC_ROPE_TYPES + LENGTH_ROPE_TYPES
        if self.rope_type not in known:
            raise UnsupportedModelError(f"rope type {self.rope_type!r}; known are {', '.join(known)}")
        self.scaling = float(getattr(module, f"{self.prefix}attention_scaling"))
        self.has_own_factors = factors is not None and self.rope_type != "default"
        if factors is not None and self.has_own_factors:
            within, beyond = (config.rope_parameters[name] for name in factors)
            if within != beyond:
                raise UnsupportedModelError(f"rope with {factors[0]}={within} and {factors[1]}={beyond}, not equal")
            self.scaling = float(within)
        self.axes = _axes(module)
        """`[R]` int64: the axis, 0 to 2, whose position each dimension is rotated by; None: there is one axis."""

    @property
    def depends_on_length(self) -> bool:
        """Whether a token's angles depend on more than its position."""
        return self.rope_type in LENGTH_ROPE_TYPES and not self.has_own_factors

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
        angles = self.sign * positions.float()[:, None] * self._frequencies(lengths)
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
        if self.has_own_factors:
            return self._buffer("original_inv_freq").to(device)[None]
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


def _axes(module: nn.Module) -> torch.Tensor | None:
    """Finds the axis of each rotated dimension by the module's own choice among the frequencies of three axes."""
    if not hasattr(module, "recomposition_frequencies"):
        return None
    axes = torch.arange(3.0).view(3, 1, 1, 1).expand(-1, 1, 1, len(module.inv_freq))
    return module.recomposition_frequencies(axes.clone()).flatten().long()


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
    def has_axes(self) -> bool:
        """Whether an image's tokens may have a position on each of three axes."""
        rotaries = self.rotaries.values()
        return bool(rotaries) and all(rotary.axes is not None and not rotary.depends_on_length for rotary in rotaries)

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
        if isinstance(batch, DecodeBatch):
            positions = batch.positions if batch.shifts is None else batch.positions + batch.shifts
            return cos[positions], sin[positions]
        if batch.axis_positions is None:
            return cos[batch.positions], sin[batch.positions]
        axes = self.rotaries[kind].axes
        assert axes is not None
        rows = batch.axis_positions[axes.to(cos.device)].t()  # [N, R]
        columns = torch.arange(cos.shape[1], device=cos.device)
        return cos[rows, columns], sin[rows, columns]


def take_angles(
    policy: Policy, decoder: nn.Module, config: PretrainedConfig, layers: list[InferenceLayer]
) -> RotaryAngles:
    """Builds the angles that `decoder` gives its `layers`; sets each layer's `kind` to that of its angles."""
    has_alibi = any(isinstance(layer.mixer, Attention) and layer.mixer.alibi is not None for layer in layers)
    has_rotary = policy.rotary is not None and getattr(decoder, policy.rotary, decoder) is not None
    if has_alibi or not (has_rotary or policy.rotary_dim):
        return RotaryAngles({}, policy.recomputes_longrope)
    if policy.rotary:
        module = submodule(decoder, policy.rotary)
    else:
        module = FixedRotary(config_value(config, str(policy.rotary_dim)))
    kinds = {layer.kind for layer in layers} if isinstance(module.rope_type, dict) else {None}
    forms = policy.is_interleaved, policy.is_backwards, policy.rope_factors
    rotaries = {kind: Rotary(module, config, kind, *forms) for kind in kinds}
    for layer in layers:
        layer.kind = layer.kind if layer.kind in rotaries else None
    return RotaryAngles(rotaries, policy.recomputes_longrope)
