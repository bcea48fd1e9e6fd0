"""Views of the parameters of modules that a policy names, whole or a rank's part: linears, norms and embeddings.

Inference reads a linear as an [in, out] view of its weight, or as a buffer of that shape with LoRA fused into it.
Fusing never writes to the base weight: it computes `W^T + sum_i s_i A_i^T B_i^T` in fp32 into a separate buffer,
rounded once to the weight's dtype. Unfusing drops the buffer, so the weights are bitwise the same as before. A
quantized weight (`quantised.py`) has no view: it is dequantized into such a buffer, with or without adapters, through
one more tensor of its size.

peft's layers are read by their attributes (`base_layer`, `lora_A`, `lora_B`, `scaling`, `active_adapters`,
`disable_adapters`, `merged`): https://github.com/huggingface/peft, src/peft/tuners/lora/layer.py. So are the linears
that scripts for DeepSpeed define (`weight`, `lora_right_weight` [in, r], `lora_left_weight` [r, out], `lora_scaling`,
`fuse_lora`): DeepSpeed-Chat, dschat/utils/module/lora.py.

Under tensor parallelism a rank holds a part of every weight. Projections into heads or into the MLP are split by
columns, those back to the residual stream by rows, whose partial sums are added over the ranks (Megatron-LM, Shoeybi et
al. 2019, arXiv 1909.08053, section 3); embedding and LM head are split by vocabulary. Norms, routers and positions are
whole on every rank. Containers do not use process groups: `TensorParallel` gives them functions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hybrid_engine.containers.device import LastingBuffer
from hybrid_engine.containers.policy import NormKind, UnsupportedModelError, class_name, submodule
from hybrid_engine.containers.quantised import Quantised, read_quantised, values_dtype
from hybrid_engine.ops import NORM_OPS

if TYPE_CHECKING:
    pass

Ranges = tuple[tuple[tuple[int, int], ...], ...]
"""Ascending ranges (start, stop) that each rank holds."""


@dataclass(frozen=True)
class Cut:
    """Part of a tensor that each rank holds: ranges of its dimension `dim`."""

    dim: int
    ranges: Ranges

    def of(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Returns the part of `rank`: a view if it is one range, otherwise a copy."""
        parts = [tensor.narrow(self.dim, start, stop - start) for start, stop in self.ranges[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


def whole(parameter: torch.Tensor, name: str) -> torch.Tensor:
    """Returns a detached alias of a parameter that is whole in memory.

    Raises RuntimeError for a shard or freed storage.
    """
    if isinstance(parameter, DTensor) or parameter.is_meta or parameter.untyped_storage().nbytes() == 0:
        raise RuntimeError(f"{name} is not gathered; gather the weights before binding them")
    return parameter.detach()


def read_whole(parameter: torch.Tensor, cut: Cut | None, rank: int, name: str) -> torch.Tensor:
    """Returns the part of `rank` of a parameter that is whole in memory; all of it without a cut."""
    weight = whole(parameter, name)
    return weight if cut is None else cut.of(weight, rank)


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _nothing_to_wait_for() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """One rank of a tensor-parallel group. All functions but `wait` are collective if `size` is above 1."""

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[torch.Tensor], torch.Tensor] = _unchanged
    """Returns the sum over the ranks, bitwise equal on each; may overwrite its argument."""
    all_gather: Callable[[torch.Tensor], torch.Tensor] = _unchanged
    """Concatenates the ranks' tensors of one shape along the last dimension, in the order of ranks."""
    read: Callable[[torch.Tensor, Cut | None, int, str], torch.Tensor] = read_whole
    """Returns a rank's part of a parameter; the string names it in errors. Filled once `wait` returns."""
    wait: Callable[[], None] = _nothing_to_wait_for
    """Returns once all parts that were read are filled."""
    device: torch.device | None = None
    """Device of the parts that `read` returns; None: that of the parameters."""
    option: str = "tp_size"
    """The user's option for `size`."""

    def take(self, parameter: torch.Tensor, cut: Cut | None, name: str) -> torch.Tensor:
        """Returns this rank's part of a parameter; all of it without a cut."""
        return self.read(parameter, cut, self.rank, name)

    @property
    def is_first(self) -> bool:
        """Whether this rank adds the terms that must be added once."""
        return self.rank == 0

    def even(self, length: int, offset: int = 0) -> Ranges | None:
        """Equal ranges of `[offset, offset + length)` for the ranks; None with a single rank."""
        size = length // self.size
        parts = tuple(((offset + rank * size, offset + (rank + 1) * size),) for rank in range(self.size))
        return parts if self.size > 1 else None

    def chunks(self, length: int) -> Ranges | None:
        """Ranges of `length`, of which the last ranks' may be shorter; None with a single rank."""
        size = -(-length // self.size)
        bounds = [(min(rank * size, length), min((rank + 1) * size, length)) for rank in range(self.size)]
        return tuple((bound,) for bound in bounds) if self.size > 1 else None


ALONE = TensorParallel()


def join(*parts: Ranges | None) -> Ranges | None:
    """Joins each rank's ranges of several parts of one tensor, which must follow each other."""
    present = [part for part in parts if part is not None]
    return tuple(sum(ranks, ()) for ranks in zip(*present, strict=True)) if present else None


def cut(dim: int, ranges: Ranges | None) -> Cut | None:
    """Returns a cut, or None without ranges."""
    return None if ranges is None else Cut(dim, ranges)


def norm_eps(norm: nn.Module) -> float:
    """Returns eps under either of the names in transformers' norms; raises UnsupportedModelError without one."""
    found = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if found is None:
        raise UnsupportedModelError(f"{class_name(norm)} in the place of a norm: it has no eps")
    return found


@dataclass(frozen=True)
class Ones:
    """The weight of a norm that has none: ones, in the dtype of a linear and on the device of its parts."""

    width: int
    linear: nn.Module

    def fit(self, tensor: torch.Tensor | None, parallel: TensorParallel) -> torch.Tensor:
        """Returns `tensor` if it is such a weight, otherwise a new one."""
        weight = getattr(self.linear, "base_layer", self.linear).weight
        dtype, device = values_dtype(weight), parallel.device or weight.device
        if tensor is not None and tensor.dtype == dtype and tensor.device == device:
            return tensor
        return torch.ones(self.width, dtype=dtype, device=device)


class NormView:
    """`gamma [E]` and `beta [E]` or None of one norm, its kind and eps.

    `ones` replaces a weight that the module does not have; without it such a module raises UnsupportedModelError.
    """

    def __init__(self, module: nn.Module, kind: NormKind, parallel: TensorParallel = ALONE, ones: Ones | None = None):
        self.has_weight = getattr(module, "weight", None) is not None
        if not self.has_weight and ones is None:
            raise UnsupportedModelError(f"{type(module).__name__} has no weight")
        self.module, self.kind, self.eps, self.parallel = module, kind, norm_eps(module), parallel
        self.op: Any = NORM_OPS[kind](self.eps)
        self.gamma: torch.Tensor
        self.beta: torch.Tensor | None
        self._ones = ones

    def bind(self) -> None:
        """Points the views at the parameters' current memory."""
        name, bias = type(self.module).__name__, getattr(self.module, "bias", None)
        if self.has_weight:
            self.gamma = self.parallel.take(self.module.weight, None, name)
        elif self._ones is not None:
            self.gamma = self._ones.fit(getattr(self, "gamma", None), self.parallel)
        self.beta = None if bias is None else self.parallel.take(bias, None, name)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors that a forward pass reads."""
        return [self.gamma] if self.beta is None else [self.gamma, self.beta]

    def apply(self, input: torch.Tensor) -> torch.Tensor:
        """`[N, E]` -> `[N, E]`."""
        return self.op(input, self.gamma, self.beta)


class HeadNormsView:
    """Layer norms with separate weights for each head, a list or one `[H, D]`, in a buffer that stays in place.

    Holds `num_heads` of all heads, from `first` on.
    """

    def __init__(self, module: nn.Module, first: int, num_heads: int, parallel: TensorParallel = ALONE):
        norms = [module] if getattr(module, "weight", None) is not None else submodule(module, "norms").children()
        self.norms = [NormView(norm, "layer", parallel) for norm in norms]
        self.eps, self.parallel, self.heads = self.norms[0].eps, parallel, slice(first, first + num_heads)
        self.gamma: torch.Tensor | None = None  # [H, D]

    def bind(self) -> None:
        """Copies the current weights."""
        for norm in self.norms:
            norm.bind()
            if norm.beta is not None:
                raise UnsupportedModelError("norms of single heads with a bias")
        self.parallel.wait()
        stacked = torch.cat([norm.gamma.view(-1, norm.gamma.shape[-1]) for norm in self.norms])[self.heads].clone()
        if self.gamma is None or self.gamma.device != stacked.device or self.gamma.dtype != stacked.dtype:
            self.gamma = stacked
        else:
            self.gamma.copy_(stacked)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors that a forward pass reads."""
        assert self.gamma is not None
        return [self.gamma]

    def apply(self, input: torch.Tensor) -> torch.Tensor:
        """`[N, H, D]` -> `[N, H, D]`."""
        assert self.gamma is not None
        return torch.nn.functional.layer_norm(input, input.shape[-1:], None, None, self.eps) * self.gamma


class EmbeddingView:
    """`weight [V, E]` of an embedding, or this rank's rows of it; every rank looks up the same result.

    Raises UnsupportedModelError for a module that is not an embedding.
    """

    def __init__(self, module: nn.Module, parallel: TensorParallel = ALONE, is_cut: bool = False):
        if not isinstance(module, nn.Embedding):
            raise UnsupportedModelError(f"{class_name(module)} in the place of an embedding")
        self.module, self.parallel = module, parallel
        self.ranges = parallel.chunks(module.num_embeddings) if is_cut else None
        # Gemma's embedding multiplies its result.
        self.scale: torch.Tensor | None = getattr(module, "embed_scale", None)
        self.weight: torch.Tensor = module.weight

    def bind(self) -> None:
        """Points the view at the parameter's current memory, or reads this rank's part of it."""
        self.weight = self.parallel.take(self.module.weight, cut(0, self.ranges), "the embedding")

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors that a forward pass reads."""
        return [self.weight]

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        """`[N]` -> `[N, E]`."""
        hidden = self.weight[tokens] if self.ranges is None else self._look_up_cut(tokens)
        return hidden if self.scale is None else hidden * self.scale.to(hidden.dtype)

    def _look_up_cut(self, tokens: torch.Tensor) -> torch.Tensor:
        """Looks up rows that are split over ranks: the rank that has a row returns it; the others add zeros."""
        assert self.ranges is not None
        ((start, stop),) = self.ranges[self.parallel.rank]
        is_here = (tokens >= start) & (tokens < stop)
        if stop == start:
            return self.parallel.all_reduce(self.weight.new_zeros(len(tokens), self.weight.shape[1]))
        rows = self.weight[(tokens - start).clamp(0, stop - start - 1)]
        return self.parallel.all_reduce(rows.masked_fill(~is_here[:, None], 0.0))


@dataclass(frozen=True)
class LoraAdapter:
    """One low-rank update: `scale * B A` is added to the [out, in] weight."""

    a: nn.Linear  # weight [r, in]
    b: nn.Linear  # weight [out, r]; its bias, if any, is added with the same scale
    scale: float

    # The input's dimension of `right`, and the output's of `left`.
    right_dim, left_dim = 1, 0

    @property
    def right(self) -> torch.Tensor:
        """The parameter that multiplies the input."""
        return self.a.weight

    @property
    def left(self) -> torch.Tensor:
        """The parameter that produces the output."""
        return self.b.weight

    @property
    def bias(self) -> torch.Tensor | None:
        """`[out]`, or None."""
        return self.b.bias


@dataclass(frozen=True)
class OwnAdapter:
    """The low-rank update of a linear with its own LoRA: `scale * (right left)^T` is added to the weight."""

    module: nn.Module  # with lora_right_weight [in, r] and lora_left_weight [r, out]

    @property
    def scale(self) -> float:
        """Factor of the product."""
        return float(self.module.lora_scaling)

    right_dim, left_dim, bias = 0, 1, None

    @property
    def right(self) -> torch.Tensor:
        """The parameter that multiplies the input, `[in, r]`."""
        return self.module.lora_right_weight

    @property
    def left(self) -> torch.Tensor:
        """The parameter that produces the output, `[r, out]`."""
        return self.module.lora_left_weight


def carries_lora(module: nn.Module) -> bool:
    """Whether `module` is a linear with a low-rank update of its own, as scripts for DeepSpeed define it."""
    return hasattr(module, "lora_right_weight") and hasattr(module, "lora_left_weight")


def is_adapted(module: nn.Module) -> bool:
    """Whether `module` has adapters, peft's or its own, active or not."""
    return hasattr(module, "base_layer") or carries_lora(module)


Pair = tuple[torch.Tensor, torch.Tensor | None]
"""Weight `[in, out]` and bias `[out]` or None of a linear."""


def halves(pair: Pair) -> tuple[Pair, Pair]:
    """Returns the two linears, of equal width, that are one."""
    weight, bias = pair
    size = weight.shape[1] // 2
    first, second = (
        (weight[:, part], None if bias is None else bias[part]) for part in (slice(size), slice(size, None))
    )
    return first, second


def is_linear(module: nn.Module) -> bool:
    """Whether `module` is a linear: plain, wrapped in peft's adapters, or with LoRA of its own."""
    base = getattr(module, "base_layer", module)
    return isinstance(base, nn.Linear) or _is_conv1d(base) or carries_lora(base)


def _is_conv1d(module: nn.Module) -> bool:
    """Whether `module` is transformers' GPT-2 linear, whose weight is stored as [in, out]."""
    return any(base.__name__ == "Conv1D" for base in type(module).__mro__)


def stores_transposed(module: nn.Module) -> bool:
    """Whether a linear's weight is stored as [in, out].

    A square weight with an adapter of its own that is not a Conv1D is assumed to be [out, in]; if that is wrong, the
    probe finds that containers and the model's forward disagree.
    """
    if _is_conv1d(module) or not carries_lora(module):
        return _is_conv1d(module)
    stored, sizes = tuple(module.weight.shape), (module.lora_right_weight.shape[0], module.lora_left_weight.shape[1])
    return stored == sizes and sizes[0] != sizes[1]


def active_adapters(module: nn.Module, name: str) -> list[LoraAdapter] | list[OwnAdapter]:
    """Returns the adapters that `module`'s own forward would add now; empty for a module without adapters."""
    if carries_lora(module):
        return [] if getattr(module, "fuse_lora", False) is True else [OwnAdapter(module)]
    if not hasattr(module, "base_layer"):
        return []
    if module.disable_adapters and module.merged:
        raise UnsupportedModelError(f"the adapters of {name} are merged and disabled; call unmerge_adapter() first")
    if module.disable_adapters or module.merged:
        return []
    if not hasattr(module, "lora_A"):
        raise UnsupportedModelError(f"{name} carries a {class_name(module)}, which is not LoRA on a linear")
    names = [adapter for adapter in module.active_adapters if adapter in module.lora_A]
    for adapter in names:
        parts = module.lora_A[adapter], module.lora_B[adapter]
        if not all(isinstance(part, nn.Linear) for part in parts):
            raise UnsupportedModelError(f"adapter {adapter!r} of {name} is a {type(module).__name__}, not plain LoRA")
        if adapter in getattr(module, "lora_variant", {}):
            variant = type(module.lora_variant[adapter]).__name__
            raise UnsupportedModelError(f"adapter {adapter!r} of {name} is a LoRA variant ({variant})")
    return [
        LoraAdapter(module.lora_A[adapter], module.lora_B[adapter], float(module.scaling[adapter])) for adapter in names
    ]


class TransposedLinear:
    """`weight [in, out]` and `bias [out]` or None, ready for the ops; valid from `bind` until the weights move.

    A parameter that is not gathered raises RuntimeError at `bind`. With `columns` a rank holds a part of the output;
    with `rows` a part of the input, and the first rank the bias: outputs are to be summed.

    Raises UnsupportedModelError for a module that is not a linear, with or without LoRA.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        parallel: TensorParallel = ALONE,
        columns: Ranges | None = None,
        rows: Ranges | None = None,
    ):
        self.module, self.name, self.parallel = module, name, parallel
        self.columns, self.rows = columns, rows
        self.base = getattr(module, "base_layer", module)
        if not is_linear(module):
            raise UnsupportedModelError(f"{name} is a {type(self.base).__name__}, not a linear")
        self.is_stored_transposed = stores_transposed(self.base)
        self.quantised: Quantised | None = read_quantised(self.base, name)
        is_whole = self.quantised is not None or self.base.weight.is_floating_point()
        if tuple(self._weight.shape) != self._shape() or not is_whole:
            raise UnsupportedModelError(f"{name} packs its weight as {self.base.weight.dtype} {self.base.weight.shape}")
        if self.quantised is not None and parallel.size > 1:
            raise UnsupportedModelError(f"{name} is quantised, and processes that share a model hold parts of weights")
        active_adapters(module, name)
        into, out = (0, 1) if self.is_stored_transposed else (1, 0)
        self._weight_cut, self._bias_cut = cut(into, rows) or cut(out, columns), cut(0, columns)
        self.view: tuple[torch.Tensor, torch.Tensor | None]  # views of the parameters
        self.pair: tuple[torch.Tensor, torch.Tensor | None]  # (weight, bias), input of the ops: view or fused
        self._fused_weight, self._fused_bias = LastingBuffer(), LastingBuffer()
        self._has_lent = False  # whether the fused weight is in a buffer that others use too

    @property
    def num_inputs(self) -> int:
        """Number of inputs of the whole linear; this rank may hold a part."""
        return self._shape()[0 if self.is_stored_transposed else 1]

    @property
    def num_outputs(self) -> int:
        """Number of outputs of the whole linear; this rank may hold a part."""
        return self._shape()[1 if self.is_stored_transposed else 0]

    @property
    def _weight(self) -> Any:
        """An object with the weight's shape and dtype."""
        return self.quantised or self.base.weight

    @property
    def _is_own(self) -> bool:
        """Whether rollouts need a buffer: for active adapters, or a quantized weight."""
        return self.quantised is not None or bool(active_adapters(self.module, self.name))

    def _shape(self) -> tuple[int, int]:
        """Expected shape of the weight, as the module stores it."""
        if carries_lora(self.base):
            inputs, outputs = self.base.lora_right_weight.shape[0], self.base.lora_left_weight.shape[1]
        elif self.is_stored_transposed:
            inputs, outputs = self.base.nx, self.base.nf
        else:
            inputs, outputs = self.base.in_features, self.base.out_features
        return (inputs, outputs) if self.is_stored_transposed else (outputs, inputs)

    def bind(self) -> None:
        """Points the views at the parameters' current memory, or reads this rank's part of them."""
        if self.quantised is not None:  # only `fuse_lora` reads it, so the bound weight has no values
            self.view = self.pair = (self.quantised.no_values(), self._bias(self.base.bias))
            return
        weight = self.parallel.take(self.base.weight, self._weight_cut, self.name)
        bias = self._bias(self.base.bias)
        self.view = self.pair = (weight if self.is_stored_transposed else weight.t(), bias)

    def _bias(self, parameter: torch.Tensor | None) -> torch.Tensor | None:
        if parameter is None:
            return None
        bias = self.parallel.take(parameter, self._bias_cut, self.name)
        return bias if self.rows is None or self.parallel.is_first else None

    @property
    def buffer_bytes(self) -> int:
        """Bytes that `fuse_lora` will take."""
        if not self._is_own:
            return 0
        is_cut = self.columns is not None or self.rows is not None
        size = self._weight.dtype.itemsize
        return self.num_inputs * self.num_outputs * size // (self.parallel.size if is_cut else 1)

    def fuse_lora(self, lender: "TransposedLinear | None" = None) -> int:
        """Writes the full-precision weight with active adapters added into a buffer.

        Returns the buffer's bytes, or 0 if none is needed.

        The buffer is this linear's own, or that of `lender`, a linear of the same shape that is not fused now.
        """
        if not self._is_own:
            return 0
        adapters = active_adapters(self.module, self.name)
        (weight, bias), dtype = self.view, self.view[0].dtype
        if self.quantised is not None:
            weight = self.quantised.dequantise().t()
        self._has_lent = lender is not None
        buffer = self._fused_weight if lender is None else lender._fused_weight
        # Stored as [out, in], with which products on a CPU are faster.
        fused = buffer.take(tuple(weight.t().shape), dtype, weight.device)
        summed = weight.t().float()
        for adapter in adapters:
            right = self.parallel.take(adapter.right, cut(adapter.right_dim, self.rows), self.name)
            left = self.parallel.take(adapter.left, cut(adapter.left_dim, self.columns), self.name)
            offset = self._bias(adapter.bias)
            self.parallel.wait()
            right = right if adapter.right_dim == 0 else right.t()
            left = left if adapter.left_dim == 1 else left.t()
            is_result = adapter is adapters[-1] and dtype == torch.float32
            summed = torch.addmm(
                summed, left.float().t(), right.float().t(), alpha=adapter.scale, out=fused if is_result else None
            )
            if offset is not None:
                bias = adapter.scale * offset if bias is None else bias + adapter.scale * offset
        if summed is not fused:
            fused.copy_(summed)
        if bias is not None and bias is not self.view[1]:
            bias = self._fused_bias.take(tuple(bias.shape), dtype, bias.device).copy_(bias)
        self.pair = (fused.t(), bias)
        return fused.nbytes

    def unfuse_lora(self, keeps_lent: bool = False) -> None:
        """Restores the parameters, which fusing has not changed; frees the buffer's memory.

        With `keeps_lent`, a buffer that was lent, even to the linear that owns it, stays allocated.
        """
        self.pair = self.view
        if not (keeps_lent and self._has_lent):
            self._fused_weight.release()
        self._fused_bias.release()

    def is_like(self, other: "TransposedLinear") -> bool:
        """Whether one buffer can serve both linears, one after the other."""
        return (self.num_inputs, self.num_outputs) == (other.num_inputs, other.num_outputs)

    @property
    def is_fused(self) -> bool:
        """Whether the ops read the fused weight."""
        return self.pair is not self.view
