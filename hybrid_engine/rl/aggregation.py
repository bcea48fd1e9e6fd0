"""From a loss per token to the loss of an optimizer step.

Each function returns this micro-batch's share of the step's loss: the caller passes the number of tokens
or sequences of the whole optimizer step, over all micro-batches and all processes, so the shares sum to
the same loss however the rows are split. Where the engine averages gradients over processes, or divides
by the number of micro-batches, the caller multiplies by that number.

B: sampled responses, T: response tokens. A mask is True on response tokens.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from hybrid_engine.rl.advantages import sum_over_processes


class StepCounts(NamedTuple):
    """The counts of one optimizer step, over all of its micro-batches and all processes."""

    num_tokens: int
    """True entries of the masks"""
    num_sequences: int
    """rows with a token"""
    max_length: int
    """tokens that a response may have, a constant of the run"""


@torch.no_grad()
def count_step(mask: torch.Tensor, max_length: int, group: dist.ProcessGroup | None = None) -> StepCounts:
    """The counts of an optimizer step from this process's rows of it, `[B, T]` bool; collective over `group`.

    At least 1 each, so that a step whose responses are all masked has the loss 0.
    """
    local = torch.stack([mask.sum(), mask.any(dim=1).sum()])
    num_tokens, num_sequences = sum_over_processes(local, group).clamp(min=1).tolist()
    return StepCounts(num_tokens, num_sequences, max_length)


def token_mean(loss: torch.Tensor, mask: torch.Tensor, num_tokens: int | torch.Tensor) -> torch.Tensor:
    """The mean over all tokens of the step: every token has the same weight.

    Args:
        loss: `[B, T]`.
        mask: `[B, T]` bool.
        num_tokens: True entries of the masks of the whole optimizer step.

    Returns:
        A scalar.
    """
    return _masked(loss, mask).sum() / num_tokens


def seq_mean_token_mean(loss: torch.Tensor, mask: torch.Tensor, num_sequences: int | torch.Tensor) -> torch.Tensor:
    """Every sequence of the step has the same weight, and within it every token.

    Args:
        loss: `[B, T]`.
        mask: `[B, T]` bool; a row without a token adds nothing and must not be counted.
        num_sequences: rows with a token in the whole optimizer step.

    Returns:
        A scalar.
    """
    token_counts = mask.sum(dim=1).clamp(min=1)  # [B]
    return (_masked(loss, mask).sum(dim=1) / token_counts).sum() / num_sequences


def seq_mean_token_sum(loss: torch.Tensor, mask: torch.Tensor, num_sequences: int | torch.Tensor) -> torch.Tensor:
    """The mean over the step's sequences of the sum over their tokens: longer sequences weigh more.

    Args:
        loss: `[B, T]`.
        mask: `[B, T]` bool.
        num_sequences: rows with a token in the whole optimizer step.

    Returns:
        A scalar.
    """
    return _masked(loss, mask).sum() / num_sequences


def token_sum_by_length(loss: torch.Tensor, mask: torch.Tensor, max_length: int) -> torch.Tensor:
    """The sum over all tokens of the step, divided by a constant; it grows with the number of sequences.

    Args:
        loss: `[B, T]`.
        mask: `[B, T]` bool.
        max_length: the constant, the number of tokens that a response may have.

    Returns:
        A scalar. Source: verl, `core_algos.py`, "seq-mean-token-sum-norm".
    """
    return _masked(loss, mask).sum() / max_length


def seq_mean_token_sum_by_length(
    loss: torch.Tensor, mask: torch.Tensor, num_sequences: int | torch.Tensor, max_length: int
) -> torch.Tensor:
    """The mean over the step's sequences of the sum over their tokens, divided by a constant: no bias towards a length.

    Args:
        loss: `[B, T]`.
        mask: `[B, T]` bool.
        num_sequences: rows with a token in the whole optimizer step.
        max_length: the constant, the number of tokens that a response may have.

    Returns:
        A scalar. Source: Liu et al., "Dr. GRPO", arXiv 2503.20783; TRL, loss_type="dr_grpo".
    """
    return _masked(loss, mask).sum() / (num_sequences * max_length)


def _masked(loss: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    assert loss.ndim == 2 and loss.shape == mask.shape, f"{loss.shape=} {mask.shape=}"
    assert mask.dtype == torch.bool, f"{mask.dtype=}"
    return torch.where(mask, loss, 0.0)
