"""The experts that tokens took in a rollout, and passes of a transformers model in which they take the same ones again.

Rounding alone gives some tokens other experts in the trainer than in the rollout, and their log-probabilities are then
far apart. Router replay (R3: Ma et al. 2025, arXiv 2510.11370, section 4) records the experts of a rollout, and the
trainer's passes take them. Only the choice is replayed: the weights of the chosen experts are the model's own, computed
from its own logits by its own code, and so are their gradients.

transformers' routers choose with one call of `topk` over the scores of all experts, in their own forward or in that of
the block around it. Hooks on the block, which exist only inside `replaying`, answer that call with the recorded experts
and the scores that the model gives them. A router that limits the choice to groups of experts first is answered with
the groups of the recorded experts. A router that chooses in another way (PhiMoE's masked maxima) is refused by name.

N tokens, L mixtures of a model, k experts of a token, X experts of a mixture.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hybrid_engine.containers.model import find_decoder
from hybrid_engine.containers.moe import MoEMLP, unwrap
from hybrid_engine.containers.policy import UnsupportedModelError, submodule

_TOPK = (torch.topk, torch.Tensor.topk)


class RecordedExperts(NamedTuple):
    """The experts of the tokens of a pass."""

    experts: torch.Tensor  # [N, L, k] uint8 or int16
    is_recorded: torch.Tensor  # [N] bool: False for tokens whose experts the model chooses

    def to(self, device: torch.device) -> "RecordedExperts":
        """Copies tensors on the host to `device`."""
        return RecordedExperts(self.experts.to(device), self.is_recorded.to(device))


class Router(NamedTuple):
    """A router of a transformers model."""

    block: nn.Module
    """Module in whose forward the experts are chosen."""
    name: str
    num_experts: int
    top_k: int
    num_groups: int = 1
    """Groups of experts of which some are chosen first."""


def find_routers(model: nn.Module) -> list[Router]:
    """The routers of a transformers model, with or without an adapter of peft, in the order of its layers.

    Raises:
        UnsupportedModelError: containers have no policy for the model, or it has no mixture of experts.
    """
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config.get_text_config()
    _, layers, policy = find_decoder(base, config)
    routers = []
    for index, layer in enumerate(layers):
        if policy.moe is None or not MoEMLP.is_in(policy.moe, layer):
            continue
        router = unwrap(submodule(layer, policy.moe.router), "router")[0]
        parent = policy.moe.router.rpartition(".")[0]
        routers.append(
            Router(
                block=submodule(layer, parent) if parent else layer,
                name=f"layer {index} {policy.moe.router} ({type(router).__name__})",
                num_experts=int(router.weight.shape[0]),  # type: ignore[union-attr, arg-type]
                top_k=int(getattr(config, policy.moe.top_k)),
                num_groups=int(getattr(config, "n_group", None) or 1),
            )
        )
    if not routers:
        raise UnsupportedModelError(f"{type(base).__name__} has no mixture of experts")
    return routers


@contextmanager
def replaying(routers: Sequence[Router], recorded: RecordedExperts) -> Iterator[None]:
    """Inside, forward passes over N tokens take the recorded experts; on exit the model is as before.

    Backward passes that recompute activations need `recomputation_contexts`.

    Raises:
        ValueError: the experts were recorded for another number of layers or experts.
        UnsupportedModelError: in a pass: the router does not choose by one `topk` over its experts.
    """
    num_layers, top_k = recorded.experts.shape[1:]
    if num_layers != len(routers):
        raise ValueError(f"experts were recorded for {num_layers} mixtures, but the model has {len(routers)}")
    if other := next((router for router in routers if router.top_k != top_k), None):
        raise ValueError(f"{top_k} experts were recorded for each token, but {other.name} takes {other.top_k}")
    handles = []
    token = _active.set((routers, recorded))
    try:
        for layer, router in enumerate(routers):
            handles += _install(router, recorded, layer)
        yield
    finally:
        _active.reset(token)
        for handle in handles:
            handle.remove()


_active: ContextVar[tuple[Sequence[Router], RecordedExperts] | None] = ContextVar("replayed experts", default=None)


def recomputation_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a checkpointed function and its recomputation: `context_fn` of torch.utils.checkpoint.

    The recomputation, which a backward pass may run in another thread, replays what the function replayed.
    """
    active = _active.get()
    return nullcontext(), nullcontext() if active is None else replaying(*active)


def _install(router: Router, recorded: RecordedExperts, layer: int) -> list[Any]:
    """Adds the hooks of one router; returns their handles."""
    modes: list[_RecordedTopK] = []

    def before(block: nn.Module, arguments: Any) -> None:
        modes.append(_RecordedTopK(router, recorded.experts[:, layer].long(), recorded.is_recorded))
        modes[-1].__enter__()

    def after(block: nn.Module, arguments: Any, output: Any) -> None:
        mode = modes.pop()
        mode.__exit__(None, None, None)
        # There is no output if the forward raised, as a recomputation does once it has what it needs.
        if output is not None and mode.num_answered != 1:
            raise UnsupportedModelError(
                f"{router.name} cannot replay its choice: it called topk over {router.num_experts} experts "
                f"{mode.num_answered} times for the {len(recorded.experts)} tokens of the pass, not once"
            )

    return [router.block.register_forward_pre_hook(before), router.block.register_forward_hook(after, always_call=True)]


class _RecordedTopK(TorchFunctionMode):
    """Answers the choice of experts with `experts [N, k]` where `is_recorded [N]`."""

    def __init__(self, router: Router, experts: torch.Tensor, is_recorded: torch.Tensor):
        super().__init__()
        self.router, self.experts, self.is_recorded = router, experts, is_recorded[:, None]
        self.num_answered = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _TOPK:
            return func(*args, **kwargs)
        scores, rest = (args[0], args[1:]) if args else (kwargs.pop("input"), ())
        found = func(scores, *rest, **kwargs)
        router, num_chosen = self.router, found.indices.shape[-1]
        if scores.shape == (len(self.experts), router.num_experts) and num_chosen == router.top_k:
            self.num_answered += 1
            indices = torch.where(self.is_recorded, self.experts, found.indices)
            return torch.return_types.topk((scores.gather(1, indices), indices))
        if router.num_groups > 1 and scores.shape == (len(self.experts), router.num_groups):
            groups = self.experts // (router.num_experts // router.num_groups)
            taken = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, groups, True) & self.is_recorded
            indices = func(scores.masked_fill(taken, torch.inf), *rest, **kwargs).indices
            return torch.return_types.topk((scores.gather(1, indices), indices))
        return found
