"""Rotary position embedding, half-rotated form (Su et al. 2021, arXiv 2104.09864, as Llama lays it out).

    [x1, x2] = halves of x;  y = [x1 cos - x2 sin, x2 cos + x1 sin]

Angles are position * inv_freq in fp32; cos and sin carry the attention scaling of yarn and are rounded
to the compute dtype, as the trainer rounds them.
"""

import torch


def rotary_table(
    inv_freq: torch.Tensor, scaling: float, num_positions: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin `[num_positions, D/2]` for `inv_freq [D/2]`, times `scaling`."""
    positions = torch.arange(num_positions, device=inv_freq.device, dtype=torch.float32)
    angles = torch.outer(positions, inv_freq.float())
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`x [N, heads, D]` rotated by `cos`, `sin` `[N, 1, D/2]` of each row's position."""
    half = x.shape[-1] // 2
    x1, x2 = x[..., :half], x[..., half:]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
