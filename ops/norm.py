"""Layer norm and RMS norm over the last dimension, optionally after adding a residual.

    layer:       y = (x - mean(x)) / sqrt(var(x) + eps) * gamma + beta      (biased variance)
    rms:         y = round(x / sqrt(mean(x^2) + eps)) * gamma               (Zhang & Sennrich 2019; Llama)
    rms_fp32:    y = round(x / sqrt(mean(x^2) + eps) * gamma)               (OLMo-2, gpt-oss)
    rms_offset:  y = round(x / sqrt(mean(x^2) + eps) * (1 + gamma))         (Gemma)

Statistics are fp32 for any dtype. The kinds of RMS norm differ only in 16 bits, by where they round: rollouts round
where the trainer rounds. Moves 2 N E elements (4 N E with a residual), does about 5 N E operations. N rows, E width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from hybrid_engine.ops import cpu_kernels
from hybrid_engine.ops.dispatch import (
    Launch,
    check_tensor,
    kernel_or_reference,
    next_power_of_2,
    prepared,
    say_once,
    tl,
    triton,
    use_triton,
)

# A row fits one program's registers: 64 fp32 values per thread at 16 warps.
MAX_WIDTH = 32768
# Elements of a program's rows: enough that short rows (q and k norms) still fill four warps.
TILE_ELEMENTS = 2048
DENSE = torch.contiguous_format


@triton.jit
def normalize(x, mean, rstd, gamma, beta, NORM: tl.constexpr, DTYPE: tl.constexpr):
    """Normalizes fp32 values by known statistics, rounded to DTYPE like this kind's reference; beta may be None."""
    x = (x - mean) * rstd if NORM == "layer" else x * rstd
    if NORM == "rms":
        x = x.to(DTYPE).to(tl.float32)
    scale = gamma.to(tl.float32)
    x = x * (1.0 + scale) if NORM == "rms_offset" else x * scale
    if beta is not None:
        x += beta.to(tl.float32)
    return x.to(DTYPE)


class AddedRows(NamedTuple):
    """Rows `[N, E]` of two terms; without a residual, its pointer and the pointer of the sum are None."""

    input_ptr: Any
    input_row: int  # stride
    residual_ptr: Any
    residual_row: int
    sum_ptr: Any  # [N, E] dense, the output for the sum
    num_rows: int
    width: int


class NormWeights(NamedTuple):
    """Parameters of the norm; `beta_ptr` may be None."""

    gamma_ptr: Any  # [E]
    beta_ptr: Any
    eps: float


@triton.jit
def norm_kernel(
    x,
    weights,
    output_ptr,  # [N, E] dense
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS rows per program."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < x.num_rows) & (column < x.width)
    added = tl.load(x.input_ptr + row * x.input_row + column, mask=mask, other=0.0)
    if x.residual_ptr is not None:
        residual = tl.load(x.residual_ptr + row * x.residual_row + column, mask=mask, other=0.0)
        added = (added.to(tl.float32) + residual.to(tl.float32)).to(added.dtype)
        tl.store(x.sum_ptr + row * x.width + column, added, mask=mask)
    values = added.to(tl.float32)
    mean = 0.0
    if NORM == "layer":
        mean = (tl.sum(values, axis=1) / x.width)[:, None]
        centered = tl.where(mask, values - mean, 0.0)
    else:
        centered = values
    rstd = tl.rsqrt(tl.sum(centered * centered, axis=1) / x.width + weights.eps)[:, None]
    gamma = tl.load(weights.gamma_ptr + column, mask=column < x.width, other=0.0)
    beta = None
    if weights.beta_ptr is not None:
        beta = tl.load(weights.beta_ptr + column, mask=column < x.width, other=0.0)
    y = normalize(values, mean, rstd, gamma, beta, NORM, output_ptr.dtype.element_ty)
    tl.store(output_ptr + row * x.width + column, y, mask=mask)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """16-bit values in fp32, wider ones unchanged."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def layer_norm(
    input: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None = None, *, eps: float
) -> torch.Tensor:
    """Layer norm, the kind "layer"."""
    return F.layer_norm(input, (input.shape[-1],), gamma, beta, eps)


def _rms_norm(input: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None = None, *, eps: float):
    assert beta is None, "RMS norm has no beta"
    return gamma * _normed(input, eps).to(input.dtype)


def _normed(input: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps)`, not rounded to 16 bits.

    Step by step: `F.rms_norm` is not a single kernel on a CPU either and takes 77 us for 32 rows of 384 where this
    takes 57, and 64 against 34 if the rows are stored by columns (one core, torch 2.13).
    """
    wide = _wide(input)
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def _rms_norm_fp32(input: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None = None, *, eps: float):
    assert beta is None, "RMS norm has no beta"
    return (_wide(gamma) * _normed(input, eps)).to(input.dtype)


def _rms_norm_offset(input: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None = None, *, eps: float):
    return _rms_norm_fp32(input, 1.0 + _wide(gamma), beta, eps=eps)


class NormOp:
    """Callable `(input [..., E], gamma [E], beta [E] or None) -> [..., E]`; RMS kinds do not accept a beta.

    Args:
        kind: "layer", "rms", "rms_fp32" or "rms_offset".
        eps: added to the variance or the mean square.
    """

    def __init__(self, kind: str, eps: float):
        self.kind, self.eps = kind, float(eps)  # an integer would compile to a constant
        self.formula = partial(_FORMULAS[kind], eps=eps)

    def __call__(self, input: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None = None) -> torch.Tensor:
        if self._takes(input):
            return kernel_or_reference(self._launch, self._add_in_torch, input, None, gamma, beta)[0]
        if cpu_kernels.can_norm(input, None, gamma, beta):
            return cpu_kernels.norm(input, None, gamma, beta, self.kind, self.eps)[0]
        return self.reference(input, gamma, beta)

    def reference(self, input: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None = None) -> torch.Tensor:
        """The function of the kernel in plain torch."""
        return self.formula(input, gamma, beta)

    def add_and_norm(
        self, input: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`(norm(input + residual), input + residual)`, the sum rounded to the dtype before it is normed."""
        if self._takes(input):
            return kernel_or_reference(self._launch, self._add_in_torch, input, residual, gamma, beta)
        if cpu_kernels.can_norm(input, residual, gamma, beta):
            return cpu_kernels.norm(input, residual, gamma, beta, self.kind, self.eps)
        return self._add_in_torch(input, residual, gamma, beta)

    def _add_in_torch(
        self, input: torch.Tensor, residual: torch.Tensor | None, gamma: torch.Tensor, beta: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual_add = input if residual is None else input + residual
        return self.reference(residual_add, gamma, beta), residual_add

    def _takes(self, input: torch.Tensor) -> bool:
        if not use_triton(input):
            return False
        if input.shape[-1] > MAX_WIDTH:
            say_once(f"norms wider than {MAX_WIDTH} run on torch: a kernel holds a row of {input.shape[-1]} at once")
            return False
        return True

    def _launch(
        self, input: torch.Tensor, residual: torch.Tensor | None, gamma: torch.Tensor, beta: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        launch, num_rows, width = prepared(_prepare, self.kind, input, residual, gamma, beta)
        rows, output, residual_add = _dense_rows(input), torch.empty_like(input, memory_format=DENSE), input
        others: tuple[Any, int, Any] = (None, 0, None)
        if residual is not None:
            residual_rows, residual_add = _dense_rows(residual), torch.empty_like(output)
            others = (residual_rows, residual_rows.stride(0), residual_add)
        launch(AddedRows(rows, rows.stride(0), *others, num_rows, width), NormWeights(gamma, beta, self.eps), output)
        return output, residual_add


def _prepare(
    kind: str,
    input: torch.Tensor,
    residual: torch.Tensor | None,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
) -> tuple[Launch, int, int]:
    """The launch, and the number of rows and their width."""
    assert beta is None or kind == "layer", "RMS norm has no beta"
    check_norm_weights(input, gamma, beta)
    if residual is not None:
        check_tensor("residual", residual, like=input, shape=input.shape)
    width = input.shape[-1]
    num_rows = input.numel() // width
    block = next_power_of_2(width)
    tile_rows = max(1, TILE_ELEMENTS // block)
    num_warps = 4 if block <= 4096 else 8 if block <= 16384 else 16
    grid = (-(-num_rows // tile_rows),)
    launch = Launch(norm_kernel, grid, input.device, NORM=kind, ROWS=tile_rows, BLOCK=block, num_warps=num_warps)
    return launch, num_rows, width


def check_norm_weights(input: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None) -> None:
    """Raises ValueError if gamma or beta do not fit `input [..., E]`, before a kernel reads them."""
    for name, weight in (("gamma", gamma), ("beta", beta)):
        if weight is not None:
            check_tensor(name, weight, like=input, shape=(input.shape[-1],), is_dense_last=True)


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    """`[rows, E]` with E dense; a copy only if the strides do not allow a view."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


_FORMULAS: dict[str, Callable[..., torch.Tensor]] = {
    "layer": layer_norm,
    "rms": _rms_norm,
    "rms_fp32": _rms_norm_fp32,
    "rms_offset": _rms_norm_offset,
}

LayerNormOp = partial(NormOp, "layer")
RMSNormOp = partial(NormOp, "rms")
NORM_OPS: dict[str, Callable[[float], NormOp]] = {kind: partial(NormOp, kind) for kind in _FORMULAS}
