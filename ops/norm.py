"""Layer norm and RMS norm over the last dimension.

    layer:       y = (x - mean(x)) / sqrt(var(x) + eps) * gamma + beta      (biased variance)
    rms:         y = x / sqrt(mean(x^2) + eps) * gamma                      (Zhang & Sennrich 2019)
    rms_fp32:    the same function
    rms_offset:  y = x / sqrt(mean(x^2) + eps) * (1 + gamma)                (Gemma)

Statistics are fp32 whatever the dtype. The kinds of RMS norm also differ in where 16 bits are rounded, so
that rollouts round where the trainer rounds: `rms` rounds the normalised x before it multiplies by gamma
(Llama), the other two multiply in fp32 and round once (OLMo-2 and gpt-oss; Gemma).
Moves 2 N E elements, does about 5 N E operations.
"""

import torch
import torch.nn.functional as F


class LayerNormOp:
    """Callable `(input [N, E], gamma [E], beta [E] or None) -> [N, E]`."""

    def __init__(self, eps: float):
        self.eps = eps

    def __call__(self, input: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None = None) -> torch.Tensor:
        return F.layer_norm(input, (input.shape[-1],), gamma, beta, self.eps)


class RMSNormOp:
    """Callable `(input [..., E], gamma [E], beta=None) -> [..., E]`; `beta` keeps the layer-norm signature."""

    def __init__(self, eps: float):
        self.eps = eps

    def __call__(self, input: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None = None) -> torch.Tensor:
        assert beta is None, "RMS norm has no beta"
        if input.dtype == torch.float32:  # one fused call; the same function, since the cast below is the identity
            return F.rms_norm(input, (input.shape[-1],), gamma, self.eps)
        normed = F.rms_norm(input.float(), (input.shape[-1],), None, self.eps)
        return gamma * normed.to(input.dtype)


class RMSNormFp32Op(RMSNormOp):
    """RMS norm that multiplies by gamma in fp32."""

    def __call__(self, input: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None = None) -> torch.Tensor:
        assert beta is None, "RMS norm has no beta"
        return F.rms_norm(input.float(), (input.shape[-1],), gamma.float(), self.eps).to(input.dtype)


class RMSNormOffsetOp(RMSNormOp):
    """RMS norm whose weight is 1 + gamma, multiplied in fp32."""

    def __call__(self, input: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None = None) -> torch.Tensor:
        assert beta is None, "RMS norm has no beta"
        return F.rms_norm(input.float(), (input.shape[-1],), 1.0 + gamma.float(), self.eps).to(input.dtype)


NORM_OPS: dict[str, type[LayerNormOp] | type[RMSNormOp]] = {
    "layer": LayerNormOp,
    "rms": RMSNormOp,
    "rms_fp32": RMSNormFp32Op,
    "rms_offset": RMSNormOffsetOp,
}
