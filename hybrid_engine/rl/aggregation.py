"""From a loss per token to the loss of an optimizer step.

Each function returns this micro-batch's share of the step's loss: the caller passes the number of tokens
or sequences of the whole optimizer step, over all micro-batches and all processes, so the shares sum to
the same loss however the rows are split. Where the engine averages gradients over processes, or divides
by the number of micro-batches, the caller multiplies by that number.

B: sampled responses, T: response tokens. A mask is True on response tokens.
"""

import torch


def token_mean(loss: torch.Tensor, mask: torch.Tensor, num_tokens: int | torch.Tensor) -> torch.Tensor:
    """Every token of the step weighs the same.

    Args:
        loss: `[B, T]`.
        mask: `[B, T]` bool.
        num_tokens: True entries of the masks of the whole optimizer step.

    Returns:
        A scalar.
    """
    return _masked(loss, mask).sum() / num_tokens


def seq_mean_token_mean(loss: torch.Tensor, mask: torch.Tensor, num_sequences: int | torch.Tensor) -> torch.Tensor:
    """Every sequence of the step weighs the same, and within it every token.

    Args:
        loss: `[B, T]`.
        mask: `[B, T]` bool; a row without a token adds nothing and is not to be counted.
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


def _masked(loss: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    assert loss.ndim == 2 and loss.shape == mask.shape, f"{loss.shape=} {mask.shape=}"
    assert mask.dtype == torch.bool, f"{mask.dtype=}"
    return torch.where(mask, loss, 0.0)
