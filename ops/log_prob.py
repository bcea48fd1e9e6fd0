"""The log-probability of given tokens: the one function that the sampler and the trainer share.

    logprob(token) = logits[token] / temperature - logsumexp(logits / temperature)

computed in fp32 whatever the dtype of the logits, over the whole vocabulary: top-k and top-p shape
which token is drawn, never the probability that is reported for it.
"""

import torch

from hybrid_engine.ops import cpu_kernels


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of `tokens` under softmax(logits / temperature).

    Args:
        logits: `[..., V]`, any float dtype.
        tokens: `[...]` int64, each in `[0, V)`.
        temperature: above 0.

    Returns:
        `[...]` fp32, differentiable in `logits`.
    """
    if cpu_kernels.can_search(logits):
        chosen = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) / temperature
        return chosen - cpu_kernels.log_sum_exp(logits, temperature)
    scaled = logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    chosen = scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return chosen - scaled.logsumexp(-1)
