"""Attention in which several query heads share a key and value head, by a fused kernel of torch on every device.

On CUDA flash attention shares heads in 16 bits and without a mask; memory-efficient attention takes fp32 and masks, but
does not share heads (`check_batch_size_and_num_heads_dense` in PyTorch's
aten/src/ATen/native/transformers/sdp_utils_cpp.h). cuDNN's takes masks in 16 bits, on the cards and shapes that it
supports. Other cases run as plain products, which write the scores of all heads. Keys and values are repeated there
instead: G times their bytes, and no scores.
"""

import torch
import torch.nn.functional as F


def attend_grouped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """torch's `scaled_dot_product_attention` with `enable_gqa`; the result is `[R, H, n, D]`.

    Args:
        query: `[R, H, n, D]`.
        key, value: `[R, K, C, D]`; H is a multiple of K.
        mask: True, or 0, where a query attends to a key; broadcast to `[R, H, n, C]`.
        is_causal, scale, dropout: as torch's `is_causal`, `scale` and `dropout_p`.
    """
    key, value = repeat_where_not_shared(query, key, value, mask)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip


def repeat_where_not_shared(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value, repeated to the heads of `query` on CUDA in fp32 or under a mask; see `attend_grouped`."""
    group = query.shape[1] // key.shape[1]
    is_shared = mask is None and query.dtype in (torch.bfloat16, torch.float16)
    if is_shared or group == 1 or not query.is_cuda:
        return key, value
    return key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
