"""Exact mode: rollouts run the module's own forward and, like the trainer, every operation in fixed shapes.

The log-probability that a rollout records for a token is then bitwise equal to the trainer's, whatever other rows a
batch has. Inside `training()` and `forward()`, and nowhere else, the module's attention is that of
`fixed_attention.py`, its convolutions and recurrences are those of `fixed_states.py`, its experts run one by one, and
`FixedShapes` is in force; no part of the module is replaced. Adapters are not fused: the rollout adds them as the
trainer does.

transformers lets attention be exchanged by a name in the config. It looks functions of recurrences up in the file of
the model, where `_exchange` puts ones that call the original outside of exact passes.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface

from hybrid_engine.containers import InferenceModel, UnsupportedModelError
from hybrid_engine.containers.cache import LayerCache, ModelCache
from hybrid_engine.containers.gated_delta import GatedDeltaNet
from hybrid_engine.containers.layer import Attention, InferenceLayer
from hybrid_engine.containers.short_conv import ShortConv
from hybrid_engine.containers.state_space import StateSpace
from hybrid_engine.ops import Batch, DecodeBatch, MixedBatch, PrefillBatch, fixed_states
from hybrid_engine.ops.dispatch import SWITCH, need_kernels, replaced_kernels, use_triton
from hybrid_engine.ops.fixed_attention import AttentionParameters, attend, attend_decode, attend_prefill
from hybrid_engine.ops.fixed_shapes import FixedShapes, NotExactError

OPTION = "hybrid_engine.exact"
DTYPES = (torch.float32, torch.bfloat16)
ATTENTION = "hybrid_engine_exact"
# Config entries that exact mode sets while a forward runs: names of implementations in transformers.
IMPLEMENTATIONS = {"_attn_implementation_internal": ATTENTION, "_experts_implementation_internal": "eager"}


class RolloutPass(NamedTuple):
    """A pass over packed or decoded tokens, whose keys and values are in KV blocks."""

    batch: Batch
    caches: tuple[LayerCache, ...]  # of each layer
    states: Iterator[torch.Tensor]  # of all layers, in the order in which their functions are called


class TrainerPass(NamedTuple):
    """A pass over padded sequences."""

    order: torch.Tensor | None  # [B, T]: each row's tokens first, then its padding; None: no padding


_pass: ContextVar[RolloutPass | TrainerPass | None] = ContextVar("hybrid_engine_exact_pass", default=None)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: `query [B, H, T, D]`, `key`, `value` `[B, K, T, D]` -> `[B, T, H, D]`."""
    now = _pass.get()
    if now is None or attention_mask is not None or dropout:
        raise NotExactError(f"{type(module).__name__}: exact attention takes no dropout and no mask of its own")
    attention = AttentionParameters(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if isinstance(now, TrainerPass):
        return _over_padded(query, key, value, now.order, attention, s_aux), None
    caches = now.caches[int(module.layer_idx)].kv  # type: ignore[arg-type]
    if not isinstance(now.batch, MixedBatch):
        return _over_blocks(query[0], key[0], value[0], caches, now.batch, attention, s_aux)[None], None
    num_rows = len(now.batch.decode.tokens)
    contexts = [
        _over_blocks(query[0, part], key[0, part], value[0, part], caches, batch, attention, s_aux)
        for part, batch in ((slice(num_rows), now.batch.decode), (slice(num_rows, None), now.batch.prefill))
    ]
    return torch.cat(contexts)[None], None


def _over_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    batch: PrefillBatch | DecodeBatch,
    attention: AttentionParameters,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of packed or decoded tokens, `query [N, H, D]`, `key`, `value` `[N, K, D]` -> `[N, H, D]`."""
    if isinstance(batch, PrefillBatch):
        return attend_prefill(query, key, value, caches, batch, attention, sinks)
    return attend_decode(query, key, value, caches, batch, attention, sinks)


def _over_padded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    order: torch.Tensor | None,
    attention: AttentionParameters,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of sequences `[B, T, ...]` as if each had its tokens first; the values at padding are never read."""
    positions = torch.arange(query.shape[1], device=query.device).expand(query.shape[:2])
    if order is None:
        return attend(query, key, value, positions, attention, sinks)
    rows = torch.arange(len(order), device=order.device)[:, None]
    context = attend(query[rows, order], key[rows, order], value[rows, order], positions, attention, sinks)
    return context[rows, order.argsort(1)]


AttentionInterface.register(ATTENTION, _attention)


def _over_states(
    now: RolloutPass | TrainerPass,
    run: Callable[..., torch.Tensor],
    original: Callable[..., torch.Tensor],
    tensors: tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor | None, ...] = (),
) -> torch.Tensor:
    """`run` of the packed tokens of `tensors [B, T, ...]`, with gradients as `original` has them: `[B, T, ...]`.

    Args:
        run: takes packed tensors, the weights, states or None, and a batch.
        original: takes `tensors` and the weights.
    """
    num_sequences, length = tensors[0].shape[:2]
    order: torch.Tensor | None = None
    states: torch.Tensor | None = None
    batch: Batch
    if isinstance(now, TrainerPass):
        batch, order = fixed_states.whole_sequences(num_sequences, length), now.order
    else:
        batch, states = now.batch, next(now.states)
    if order is not None:
        rows = torch.arange(num_sequences)[:, None]
        tensors = tuple(x[rows, order] for x in tensors)

    def packed(*given: torch.Tensor | None) -> torch.Tensor:
        parts = (x.flatten(0, 1) for x in given[: len(tensors)] if x is not None)
        return run(*parts, *given[len(tensors) :], states, batch).unflatten(0, (num_sequences, length))

    output = fixed_states.by_reference(packed, original, *tensors, *weights)
    return output if order is None else output[rows, order.argsort(1)]


def _convolve(
    original: Callable[..., torch.Tensor],
    now: RolloutPass | TrainerPass,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """transformers' `causal_conv1d_fn`: `hidden_states [B, C, T]` -> `[B, C, T]`."""

    def run(input, weight, bias, states, batch):
        return fixed_states.convolve(input, weight, bias, activation, states, batch)

    def reference(input, weight, bias):
        return original(input.transpose(1, 2), weight, bias, activation).transpose(1, 2)

    return _over_states(now, run, reference, (hidden_states.transpose(1, 2),), (weight, bias)).transpose(1, 2)


def _delta_rule(
    original: Callable[..., Any],
    now: RolloutPass | TrainerPass,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' `torch_chunk_gated_delta_rule`: `query`, `key` `[B, T, K, Dk]`, `value [B, T, V, Dv]`."""

    def reference(query, key, value, g, beta):
        return original(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    return _over_states(now, fixed_states.delta_rule, reference, (query, key, value, g, beta)), None


def _scan(
    original: Callable[..., torch.Tensor],
    now: RolloutPass | TrainerPass,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    *,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float],
    **kwargs: Any,
) -> torch.Tensor:
    """transformers' `mamba2_chunk_scan`: `hidden_states [B, T, H, P]`, `B`, `C` `[B, T, G, S]` -> `[B, T, H, P]`."""
    limits = (float(dt_limit[0]), float(dt_limit[1]))

    def run(x, dt, b, c, a, skip, bias, states, batch):
        return fixed_states.state_space(x, dt, a, b, c, skip, bias, limits, states, batch)

    def reference(x, dt, b, c, a, skip, bias):
        options = {"D": skip, "dt_bias": bias, "dt_softplus": True, "dt_limit": limits}
        return original(x, dt, a, b, c, chunk_size, **options)

    return _over_states(now, run, reference, (hidden_states, dt, B, C), (A, D, dt_bias))


STATE_FUNCTIONS: dict[type, dict[str, Callable[..., Any]]] = {
    ShortConv: {"causal_conv1d_fn": _convolve},
    GatedDeltaNet: {"causal_conv1d_fn": _convolve, "torch_chunk_gated_delta_rule": _delta_rule},
    StateSpace: {"causal_conv1d_fn": _convolve, "mamba2_chunk_scan": _scan},
}
"""Functions of transformers that the module of a mixer calls, in this order, and what takes their place."""


def _exchange(layer: InferenceLayer) -> None:
    """Lets the functions of the layer's recurrence be exact in exact passes; they stay as they are in all others.

    Raises UnsupportedModelError if this release of transformers has other functions.
    """
    namespace = sys.modules[type(layer.module).__module__]
    for name, exact in STATE_FUNCTIONS[type(layer.mixer)].items():
        original = getattr(namespace, name, None)
        if original is None:
            raise UnsupportedModelError(f"{namespace.__name__} has no {name}() in this release of transformers")
        if not hasattr(original, "is_exact"):
            setattr(namespace, name, _exact_inside_passes(original, exact))


def _exact_inside_passes(original: Callable[..., Any], exact: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        now = _pass.get()
        return original(*args, **kwargs) if now is None else exact(original, now, *args, **kwargs)

    function.is_exact = True  # type: ignore[attr-defined]
    return function


class ExactModel(InferenceModel):
    """The module itself in place of containers, which only provide the layout of its keys and values.

    Raises UnsupportedModelError for a model or device that cannot be exact.
    """

    runs_module = True

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.module = module
        if self.dtype not in DTYPES:
            raise UnsupportedModelError(f"the weights are {self.dtype}; it takes float32 or bfloat16")
        if self.device.type != "cpu" and not use_triton(self.embedding.weight):
            raise UnsupportedModelError(
                f"without kernels a sum on {self.device.type} depends on how many rows there are; it takes a CPU, or "
                f"CUDA with Triton installed and {SWITCH} not set"
            )
        if self.device.type != "cpu":
            for text in replaced_kernels():
                raise UnsupportedModelError(text)
            need_kernels(self)
        for layer in self.layers:
            self._check_mixer(layer)
        if any(rotary.depends_on_length for rotary in self.angles.rotaries.values()):
            raise UnsupportedModelError("its rotary angles depend on the final length of a sequence")
        if "logits_to_keep" not in inspect.signature(self.base.forward).parameters:
            raise UnsupportedModelError(f"{type(self.base).__name__}.forward() has no logits_to_keep")
        configs = [getattr(part, "config", None) for part in module.modules()]
        self._configs = {id(config): config for config in configs if hasattr(config, "_attn_implementation_internal")}

    def _check_mixer(self, layer: InferenceLayer) -> None:
        """Raises UnsupportedModelError for a layer that cannot be exact."""
        kind = type(layer.mixer)
        if isinstance(layer.mixer, Attention) and not layer.mixer.cache_spec.state:
            if layer.mixer.softmax_context.chunk is not None:
                raise UnsupportedModelError("its layers attend in chunks, which has no exact form")
            return
        if kind not in STATE_FUNCTIONS:
            raise UnsupportedModelError(f"its layers have a {kind.__name__}, which has no exact form")
        if not fixed_states.has_fixed_states(self.embedding.weight):
            raise UnsupportedModelError(
                f"its layers keep a state per sequence ({kind.__name__}), which a kernel rounds otherwise in a prompt "
                f"than in a step; it takes a CPU, a C compiler, and {SWITCH} not set"
            )
        _exchange(layer)

    def bind(self, layers_at_once: int = 1) -> None:
        """Does nothing: the module reads its own parameters."""

    def bind_rest(self) -> None:
        """Does nothing: the module reads its own embedding, norm and head."""

    def fuse_lora(self) -> int:
        """Does nothing: the module adds its adapters itself."""
        return 0

    def fuse_rest(self) -> int:
        """Does nothing: the module adds the adapters of its head itself."""
        return 0

    def buffer_bytes(self, is_streamed: bool = False) -> int:
        """Returns 0: nothing is fused."""
        return 0

    def unfuse_lora(self) -> None:
        """Does nothing: no adapter was fused."""

    def prepare_positions(self, num_positions: int) -> None:
        """Does nothing: the module computes its own angles."""

    def forward(self, batch: Batch, cache: ModelCache, layers: Iterable[InferenceLayer]) -> torch.Tensor:
        """Returns the logits of `batch` from the module's own forward with exact functions; `layers` are not read."""
        wanted = 0 if batch.wanted is None else batch.wanted  # 0: all
        states = iter([state for layer in cache.layers for state in layer.states])
        with self._installed(RolloutPass(batch, cache.layers, states)):
            output = self.module(
                input_ids=batch.tokens[None],
                attention_mask=torch.ones_like(batch.tokens)[None],  # for OPT, which would count positions in floats
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=wanted,
            )
        return output.logits[0].float()

    def run_trainer(self, **kwargs: Any) -> Any:
        """Runs the module's forward in exact mode, as the trainer does."""
        with self.training((), kwargs) as arguments:
            return self.module(**arguments)

    @contextmanager
    def training(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Inside, the trainer's forward is exact; yields the keywords to call it with.

        A padded batch without `position_ids` gets positions that count its tokens, as in a rollout.

        Raises:
            ValueError: the arguments would compute something other than a rollout.
        """
        given = inspect.signature(self.module.forward).bind_partial(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        _check_training(self.module, given)
        order = None
        if mask is None:  # as a rollout passes it
            tokens = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"][..., 0]
            given["attention_mask"] = torch.ones_like(tokens, dtype=torch.int64)
        elif not bool(mask.all()):
            order = (mask == 0).int().argsort(dim=1, stable=True)
            if positions is None:
                given["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)
        if positions is not None:
            _check_positions(positions, mask)
        with self._installed(TrainerPass(order)):
            yield {**given, "use_cache": False}

    @contextmanager
    def _installed(self, now: RolloutPass | TrainerPass) -> Iterator[None]:
        before = [(c, name, getattr(c, name, None)) for c in self._configs.values() for name in IMPLEMENTATIONS]
        token = _pass.set(now)
        try:
            for config, name, _ in before:
                setattr(config, name, IMPLEMENTATIONS[name])
            with FixedShapes():
                yield
        finally:
            for config, name, value in before:
                setattr(config, name, value)
            _pass.reset(token)


def _check_training(module: nn.Module, given: dict[str, Any]) -> None:
    mask = given.get("attention_mask")
    if mask is not None and mask.dim() != 2:
        raise ValueError(f"{OPTION}: attention_mask has shape {list(mask.shape)}; pass [B, T], 1 on tokens")
    if given.get("past_key_values") is not None:
        raise ValueError(f"{OPTION}: past_key_values is given; pass whole sequences, or call engine.generate()")
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        raise ValueError(f"{OPTION}: the forward runs under autocast, rollouts do not; set the dtype in the config")
    if module.training and any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules()):
        raise ValueError(f"{OPTION}: the model drops activations at random while it trains; set its dropout to 0")
    if module.training and any(getattr(part, "gradient_checkpointing", False) for part in module.modules()):
        raise ValueError(
            f"{OPTION}: gradient checkpointing computes layers anew outside of exact mode; call "
            "gradient_checkpointing_disable()"
        )


def _check_positions(positions: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Raises ValueError unless positions count the tokens of a row; several sequences in one row need another mask."""
    steps = positions.diff(dim=-1) == 1
    if mask is not None:
        steps = steps | (mask[:, 1:] == 0) | (mask[:, :-1] == 0)
    if not bool(steps.all()):
        raise ValueError(f"{OPTION}: position_ids must grow by one from token to token of a row, one sequence a row")
