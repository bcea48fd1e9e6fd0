"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), of the first R of D dimensions.

    halves (Llama):      pairs are (x_i, x_{i + R/2});   y = x [cos, cos] + [x2, x1] [-sin, sin]
    interleaved (GPT-J): pairs are (x_2i, x_{2i+1});     y = x [c0, c0, c1, c1, ...] + swapped [-s0, s0, -s1, s1, ...]

Angles are position * inv_freq in fp32; cos and sin include the attention scaling of yarn and longrope and are rounded
to the compute dtype, as in the trainer. The tables hold the right-hand form, which takes three kernels (multiply, and a
multiply-add for each half) where the plain form takes seven.
"""

import torch


def rotary_rows(
    angles: torch.Tensor, scaling: float, dtype: torch.dtype, is_interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin for `apply_rotary`, `[N, R]` each, from `angles [N, R/2]` fp32, times `scaling`."""
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    if is_interleaved:
        pair = torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)
    else:
        pair = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return pair[0].to(dtype), pair[1].to(dtype)


def rotary_table(
    inv_freq: torch.Tensor, scaling: float, num_positions: int, dtype: torch.dtype, is_interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows for the positions 0 to `num_positions` - 1, from `inv_freq [R/2]`."""
    positions = torch.arange(num_positions, device=inv_freq.device, dtype=torch.float32)
    return rotary_rows(torch.outer(positions, inv_freq.float()), scaling, dtype, is_interleaved)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool = False) -> torch.Tensor:
    """`x [N, heads, D]` with its first R dimensions rotated by rows `[N, R]`."""
    rest = x.shape[-1] - cos.shape[-1]
    x, *others = x.split((cos.shape[-1], rest), -1) if rest else (x,)
    rotate = _rotate_neighbours if is_interleaved else _rotate_halves
    rotated = rotate(x, cos.unsqueeze(1), sin.unsqueeze(1))
    return torch.cat((rotated, *others), -1) if others else rotated


def _rotate_neighbours(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(x * cos, partner, sin)


def _rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The halves are not moved: swapping them in a copy, as `roll` does, takes 71 us where this takes 41."""
    rotated = x * cos
    (first, second), (low, high), (sin_low, sin_high) = (part.chunk(2, -1) for part in (rotated, x, sin))
    first.addcmul_(high, sin_low)
    second.addcmul_(low, sin_high)
    return rotated
