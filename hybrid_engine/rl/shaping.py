"""The effect of a response's length on its reward, and the removal of cut-off responses from the loss.

Source: Yu et al., "DAPO", arXiv 2503.14476, section 3.4.
"""

import torch


def overlong_penalty(lengths: torch.Tensor, max_length: int, buffer: int, factor: float = 1.0) -> torch.Tensor:
    """DAPO's soft overlong punishment, to be added to the reward; equation 13.

        0 up to max_length - buffer tokens, from there linear down to -factor at max_length

    Args:
        lengths: `[B]`, tokens of each response.
        max_length: tokens that a response may have.
        buffer: number of tokens before `max_length` at which the punishment begins.
        factor: its largest value; 1 in the paper.

    Returns:
        `[B]`, at most 0; in the dtype of `lengths` if that is a floating-point dtype, else the default dtype.
    """
    assert 0 < buffer <= max_length, f"{buffer=} {max_length=}"
    return ((max_length - buffer - lengths) / buffer).clamp(-1, 0) * factor


def without_cut_off(mask: torch.Tensor, is_cut_off: torch.Tensor) -> torch.Tensor:
    """The mask `[B, T]`, set to False in rows of responses that were cut off, `[B]` bool (overlong filtering)."""
    assert mask.dtype == is_cut_off.dtype == torch.bool, f"{mask.dtype=} {is_cut_off.dtype=}"
    return mask & ~is_cut_off[:, None]
