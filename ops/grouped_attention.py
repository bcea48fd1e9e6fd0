"""Attention in which several query heads share a key and value head, through a fused kernel of torch on every device.

CUDA's fused kernels take shared heads in 16 bits and without a mask alone: flash attention knows neither fp32 nor
masks, and memory-efficient attention knows no shared heads (`check_batch_size_and_num_heads_dense` in PyTorch's
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). What neither takes runs as plain products, which write the scores
of all heads. Keys and values are repeated there instead: G times their bytes, and no scores.
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
        mask: True, or 0, where a query sees a key; broadcast to `[R, H, n, C]`.
        is_causal, scale, dropout: as torch's `is_causal`, `scale` and `dropout_p`.
    """
    group = query.shape[1] // key.shape[1]
    is_fused = mask is None and query.dtype in (torch.bfloat16, torch.float16)
    if query.is_cuda and group > 1 and not is_fused:
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
