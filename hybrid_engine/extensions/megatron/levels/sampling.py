"""The token after each row, drawn from its logits on the host's order. S rows, V logits."""

import torch

from hybrid_engine.extensions.megatron.levels.parameters import CommonInferenceParams, check_filters
from hybrid_engine.ops import SamplingOptions
from hybrid_engine.ops.sample_filters import filter_logits
from hybrid_engine.ops.vocabulary import first_largest


def mask_padding(logits: torch.Tensor, vocab_size: int | None) -> torch.Tensor:
    """`logits [S, V]` with -inf for ids from `vocab_size` on, which pad the embedding and are no text; a copy."""
    if vocab_size is None or vocab_size >= logits.shape[-1]:
        return logits
    masked = logits.clone()
    masked[:, vocab_size:] = float("-inf")
    return masked


def sample(logits: torch.Tensor, params: CommonInferenceParams, vocab_size: int | None) -> torch.Tensor:
    """`[S]` int64: drawn from `logits [S, V]` with torch's generator; they stay as they are.

    The likeliest token where `params` are greedy; else temperature, then top-k or top-p.

    Raises:
        ValueError: filters that exclude each other or are out of range.
    """
    check_filters(params)
    if not params.is_greedy:
        check_filters(params, logits.shape[-1], vocab_size)
    logits = mask_padding(logits, vocab_size)
    if params.is_greedy:
        return first_largest(logits)
    scaled = logits.float() / params.temperature
    probabilities = filter_logits(scaled, params.top_k, params.top_p or 1.0, 0.0).softmax(-1)
    return torch.multinomial(probabilities, num_samples=1).flatten()


def sampling_options(params: CommonInferenceParams) -> SamplingOptions:
    """These parameters as the engine's sampler takes them."""
    return SamplingOptions(
        do_sample=not params.is_greedy,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p or 1.0,
    )
