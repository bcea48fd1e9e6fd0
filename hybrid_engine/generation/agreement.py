"""How far the rollout's log-probabilities are from the trainer's: measured, never assumed.

At start-up a few tokens run through the containers (prefill and decode) and through the module's own
forward. Containers that disagree by more than rounding can explain are not used.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from hybrid_engine.containers import InferenceModel, UnsupportedModelError
from hybrid_engine.containers.layer import InferenceLayer
from hybrid_engine.ops import DecodeBatch, PrefillBatch, token_logprobs

# Largest difference that is still rounding; measured ones are about 1e-6 (fp32) and 0.02 (bf16).
MAX_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.25}
NUM_PROBE_TOKENS = 12

LayerPass = Callable[[], Iterable[InferenceLayer]]
"""Called once per forward pass of the containers; yields their layers in order, with weights to read."""


@dataclass(frozen=True)
class LogprobDifference:
    """Absolute difference of log-probabilities, rollout against trainer, per token."""

    mean: float
    max: float


def compare_logprobs(
    rollout: torch.Tensor, trainer: torch.Tensor, mask: torch.Tensor, world_size: int = 1
) -> LogprobDifference:
    """Over the places where `mask` is True, of one shape with the others, and over `world_size` processes.

    Collective when there are several, so that all come to the same decision.
    """
    difference = (rollout.detach().float() - trainer.detach().float()).abs()[mask.bool()].double()
    total = torch.stack([difference.sum(), torch.tensor(float(difference.numel())).to(difference)])
    largest = torch.cat([difference, difference.new_zeros(1)]).max()
    if world_size > 1:
        dist.all_reduce(total)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return LogprobDifference((total[0] / total[1].clamp(min=1)).item(), largest.item())


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode inside; every submodule gets its own mode back."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for submodule, mode in modes:
            submodule.training = mode


@torch.no_grad()
def probe_containers(module: nn.Module, model: InferenceModel, layers: LayerPass) -> LogprobDifference:
    """Compares containers with the module's forward; weights must be gathered, or `layers` gathers each as it comes.

    Raises:
        UnsupportedModelError: they compute different functions.
    """
    limits = [limit for limit in (model.max_positions, model.trained_length) if limit is not None]
    length = min([NUM_PROBE_TOKENS, *limits])
    tokens = (torch.arange(length, device=model.device) * 7919 + 11) % model.vocab_size
    containers = _forced_logprobs(model, tokens, layers)
    with evaluating(module):
        logits = module(input_ids=tokens[None], use_cache=False).logits[0]
    if logits.shape[0] != length:
        raise UnsupportedModelError(f"the model's forward gives {logits.shape[0]} positions for {length} tokens")
    trainer = token_logprobs(logits[:-1], tokens[1:])
    difference = compare_logprobs(containers, trainer, torch.ones_like(trainer))
    if not difference.max <= MAX_ROUNDING[model.dtype]:
        raise UnsupportedModelError(
            f"containers and the model's forward disagree by {difference.max:.3g} in log-probability, more than "
            f"rounding in {model.dtype} explains ({MAX_ROUNDING[model.dtype]})"
        )
    return difference


def _forced_logprobs(model: InferenceModel, tokens: torch.Tensor, layers: LayerPass) -> torch.Tensor:
    """Log-probability of each token but the first, one token prefilled and the others decoded."""
    device, length = tokens.device, len(tokens)
    model.prepare_positions(length)
    kv = torch.zeros(model.kv_shape(1, length), dtype=model.dtype, device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    num_prefilled = max(1, length // 2)
    start = torch.arange(num_prefilled, device=device)
    prefill = PrefillBatch(
        tokens=tokens[:num_prefilled],
        positions=start,
        write_blocks=torch.zeros_like(start),
        write_offsets=start,
        lengths=(num_prefilled,),
        starts=torch.tensor([0, num_prefilled], dtype=torch.int32, device=device),
        wanted=start,
        row_lengths=torch.full_like(start, num_prefilled),
    )
    logits = [model.forward(prefill, kv, layers())]
    for position in range(num_prefilled, length - 1):
        here = torch.full_like(zero, position)
        decode = DecodeBatch(
            tokens=tokens[position : position + 1],
            positions=here,
            block_tables=zero[:, None],
            context=position + 1,
            is_identity=True,
        )
        logits.append(model.forward(decode, kv, layers()))
    return token_logprobs(torch.cat(logits)[: length - 1], tokens[1:])
