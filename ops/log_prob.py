"""The log-probability of given tokens: one function for the sampler and the trainer.

    logprob(token) = logits[token] / temperature - logsumexp(logits / temperature)

computed in fp32 whatever the dtype of the logits, over the whole vocabulary: top-k and top-p affect which token is
drawn, not the probability that is reported for it.

In the kernel one program takes one row, in chunks from its start, and no argument depends on the number of rows: a
row's result has the same bits in every batch, for the trainer and for a rollout.
"""

from typing import Any

import torch

from hybrid_engine.ops.dispatch import kernel_or_reference, launch, tl, triton, use_triton
from hybrid_engine.ops.fixed_product import aligned, chunk_of, top_and_sum_of_row


@triton.jit
def logprob_kernel(logits_ptr, tokens_ptr, logprobs_ptr, lse_ptr, vocab, temperature, CHUNK: tl.constexpr):
    """For one row of dense logits: its token's log-probability, and logsumexp(logits / temperature)."""
    row = tl.program_id(0).to(tl.int64)
    top, total = top_and_sum_of_row(logits_ptr + row * vocab, vocab, temperature, CHUNK)
    lse = top + tl.log(total)
    chosen = tl.load(logits_ptr + row * vocab + tl.load(tokens_ptr + row))
    tl.store(logprobs_ptr + row, tl.div_rn(chosen, temperature) - lse)
    tl.store(lse_ptr + row, lse)


class _KernelLogprobs(torch.autograd.Function):
    """The kernel's log-probabilities of `logits [N, V]`, which it reads in fp32; the gradient in torch.

    Between the passes the logits keep their dtype: 16 bits take half the memory of fp32.
    """

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
        logits, (num_rows, vocab) = aligned(given.float()), given.shape
        logprobs, lse = (logits.new_empty(num_rows) for _ in range(2))
        if num_rows:
            launch(
                logprob_kernel, (num_rows,), logits, tokens.contiguous(), logprobs, lse, vocab, temperature,
                device=logits.device, CHUNK=chunk_of(vocab), num_warps=4,
            )  # fmt: skip
        ctx.save_for_backward(given, tokens, lse)
        ctx.temperature = temperature
        return logprobs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        given, tokens, lse = ctx.saved_tensors
        # The gradient of the token's own logit; every logit also gets minus its probability times it.
        scaled = gradient[:, None] / ctx.temperature
        found = _divided(given, ctx.temperature).sub_(lse[:, None]).exp_().mul_(-scaled)
        return found.scatter_add_(1, tokens[:, None], scaled).to(given.dtype), None, None


def _divided(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """`logits / temperature` in fp32, in new memory: one copy of the logits for any dtype."""
    copy = logits.float()
    return logits / temperature if copy is logits else copy.div_(temperature)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of `tokens` under softmax(logits / temperature).

    Args:
        logits: `[..., V]`, any float dtype.
        tokens: `[...]` int64, each in `[0, V)`.
        temperature: above 0.

    Returns:
        `[...]` fp32, differentiable in `logits`.
    """
    if use_triton(logits):
        return kernel_or_reference(_logprobs_by_kernel, _logprobs_in_torch, logits, tokens, temperature)
    return _logprobs_in_torch(logits, tokens, temperature)


def _logprobs_by_kernel(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    rows = logits.reshape(-1, logits.shape[-1])
    return _KernelLogprobs.apply(rows, tokens.reshape(-1), float(temperature)).view(tokens.shape)


def _logprobs_in_torch(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    scaled = logits.float() if temperature == 1.0 else _divided(logits, temperature)
    chosen = scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return chosen - scaled.logsumexp(-1)
