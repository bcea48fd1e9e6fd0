"""Sampling parameters of `common_generate`, and sampling by them.

Interface: Megatron Core's `inference/common_inference_params.py`.
"""

from dataclasses import dataclass
from typing import Any

import torch

from hybrid_engine.config.checks import check_flag, check_integer, check_number
from hybrid_engine.ops import SamplingOptions
from hybrid_engine.ops.sample import filter_logits, first_largest


@dataclass
class CommonInferenceParams:
    """Options for continuing prompts, the same for all prompts."""

    use_greedy: bool = False
    """Take the likeliest token; the sampling fields below are then ignored."""
    temperature: float = 1.0
    """Divisor of the logits, applied before filtering; above 0."""
    top_k: int = 0
    """Sample from this number of likeliest tokens; 1 is greedy, 0 is off. Excludes `top_p`."""
    top_p: float = 0.0
    """Sample from the likeliest tokens that together have this probability; 0 is off. Excludes `top_k`."""
    return_log_probs: bool = False
    """Whether the result has `output_log_probs`."""
    num_tokens_to_generate: int = 30
    """Maximum number of tokens added to a prompt, including the end token; 0 returns the prompts."""

    def add_attributes(self, attribute_value_pair: dict[str, Any]) -> None:
        """Sets attributes by name: those above, or others that the user's own methods read."""
        for name, value in attribute_value_pair.items():
            setattr(self, name, value)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.use_greedy or self.top_k == 1

    def check(self) -> None:
        """Raises ValueError for the first field that is out of range."""
        check_flag("use_greedy", self.use_greedy)
        check_flag("return_log_probs", self.return_log_probs)
        check_integer("num_tokens_to_generate", self.num_tokens_to_generate, 0)
        check_integer("top_k", self.top_k, 0)
        check_filters(self)
        if not self.is_greedy:
            check_number("temperature", self.temperature, 0)
            if self.temperature == 0:
                raise ValueError("temperature=0 must be above 0; for greedy decoding set use_greedy=True")


def check_filters(params: CommonInferenceParams, num_logits: int | None = None, vocab_size: int | None = None) -> None:
    """Raises ValueError, with the messages of Megatron Core, for invalid filters.

    `num_logits` and `vocab_size` limit `top_k` if they are given.
    """
    if params.top_k > 0 and params.top_p > 0:
        raise ValueError("Cannot have top-p and top-k both greater than zero")
    if not 0 <= params.top_p <= 1:
        raise ValueError("top-p should be in (0,1]")
    if params.is_greedy:
        return
    if num_logits is not None and params.top_k > num_logits:
        raise ValueError("top-k is larger than logit size.")
    if vocab_size is not None and params.top_k > vocab_size:
        raise ValueError("top-k is larger than vocab size.")


def mask_padding(logits: torch.Tensor, vocab_size: int | None) -> torch.Tensor:
    """`logits [S, V]` with -inf for ids from `vocab_size` on, which pad the embedding; a copy if there are any."""
    if vocab_size is None or vocab_size >= logits.shape[-1]:
        return logits
    masked = logits.clone()
    masked[:, vocab_size:] = float("-inf")
    return masked


def sample(logits: torch.Tensor, params: CommonInferenceParams, vocab_size: int | None) -> torch.Tensor:
    """`[S]` int64: tokens drawn from `logits [S, V]` with torch's generator; `logits` is not changed.

    If `params` is greedy, the likeliest token; otherwise temperature, then top-k or top-p.

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
    """These parameters in the form that the engine's sampler takes."""
    return SamplingOptions(
        do_sample=not params.is_greedy,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p or 1.0,
    )
