"""RMS norm of each group of D values, with a gate before or after it.

    normed = round(x / sqrt(mean(x^2) + eps)) gamma
    y      = round(normed silu(gate))                      the gate after the norm: gated delta nets
    y      = the norm of x silu(gate)                      the gate before it: Mamba-2

Statistics, and silu, are fp32 for any dtype; in 16 bits it rounds where transformers' modules do
(`Qwen3NextRMSNormGated`, `MambaRMSNormGated`). Moves 3 N E elements and does about 10 N E operations.

N rows, E width, D of a group, E / D groups.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from hybrid_engine.ops import cpu_kernels
from hybrid_engine.ops.dispatch import (
    Launch,
    check_tensor,
    kernel_or_reference,
    next_power_of_2,
    prepared,
    tl,
    triton,
    use_triton,
)


class GatedNormOp:
    """Callable `(input [N, E], gate [N, E], gamma [D] or [E]) -> [N, E]`.

    Args:
        group: D, which divides E.
        eps: added to the mean square.
        gates_first: whether the gate comes before the norm.
    """

    def __init__(self, group: int, eps: float, gates_first: bool = False):
        self.group, self.eps, self.gates_first = group, float(eps), gates_first

    def __call__(self, input: torch.Tensor, gate: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        """`gamma [D]` is of every group, `gamma [E]` of each its own. Raises ValueError for shapes that do not fit."""
        if input.shape[-1] % self.group:
            raise ValueError(f"the input is {input.shape[-1]} wide; expected a multiple of the group of {self.group}")
        check_tensor("gate", gate, like=input, shape=input.shape)
        width = self.group if len(gamma) == self.group else input.shape[-1]
        check_tensor("gamma", gamma, like=input, shape=(width,), is_dense_last=True)
        if use_triton(input):
            return kernel_or_reference(self._launch, self.reference, input, gate, gamma)
        if cpu_kernels.can_norm_gated(input, gate, gamma):
            return cpu_kernels.gated_norm(input, gate, gamma, self.group, self.eps, self.gates_first)
        return self.reference(input, gate, gamma)

    def reference(self, input: torch.Tensor, gate: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        """The function of the kernel in plain torch."""
        wide = torch.promote_types(input.dtype, torch.float32)
        factor, x = F.silu(gate.to(wide)), input.to(wide)
        x = (x * factor if self.gates_first else x).unflatten(-1, (-1, self.group))
        normed = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)).to(input.dtype)
        normed = (normed * gamma.view(-1, self.group)).flatten(-2)
        return normed if self.gates_first else (normed * factor).to(input.dtype)

    def _launch(self, input: torch.Tensor, gate: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        launch = prepared(_prepare, self.group, self.gates_first, input, gate, gamma)
        output = input.new_empty(input.shape)
        (input_row, input_column), (gate_row, gate_column) = input.stride(), gate.stride()
        rows = GatedRows(input, input_row, input_column, gate, gate_row, gate_column, output, input.shape[1])
        launch(rows, gamma, self.eps)
        return output


class GatedRows(NamedTuple):
    """Input, gate and output, with strides; the output is dense."""

    input_ptr: torch.Tensor
    input_row: int
    input_column: int
    gate_ptr: torch.Tensor
    gate_row: int
    gate_column: int
    output_ptr: torch.Tensor
    width: int


def _prepare(group: int, gates_first: bool, input: torch.Tensor, gate: torch.Tensor, gamma: torch.Tensor) -> Launch:
    num_rows, width = input.shape
    return Launch(
        gated_norm_kernel, (num_rows, width // group), input.device,
        GROUP=group, GATES_FIRST=gates_first, IS_SHARED=len(gamma) == group, BLOCK=next_power_of_2(group),
        num_warps=4 if group > 512 else 1,
    )  # fmt: skip


@triton.jit
def gated_norm_kernel(
    rows,
    gamma_ptr,
    eps,
    GROUP: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    IS_SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program norms one group of a row."""
    dtype = rows.output_ptr.dtype.element_ty
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    column, mask = tl.program_id(1) * GROUP + place, place < GROUP
    x = tl.load(rows.input_ptr + row * rows.input_row + column * rows.input_column, mask=mask, other=0.0)
    gate = tl.load(rows.gate_ptr + row * rows.gate_row + column * rows.gate_column, mask=mask, other=0.0)
    gamma = tl.load(gamma_ptr + (place if IS_SHARED else column), mask=mask, other=0.0).to(tl.float32)
    x, gate = x.to(tl.float32), gate.to(tl.float32)
    factor = gate * tl.sigmoid(gate)
    if GATES_FIRST:
        x *= factor
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / GROUP + eps)
    y = ((x * rstd).to(dtype).to(tl.float32) * gamma).to(dtype)
    if not GATES_FIRST:
        y = (y.to(tl.float32) * factor).to(dtype)
    tl.store(rows.output_ptr + row * rows.width + column, y, mask=mask)
