"""Activations of the MLP, by the names that Hugging Face configs use (`hidden_act`, `activation_function`).

`ACTIVATIONS` are the references; `activate` is the same functions inside a kernel, in fp32. There
tanh(u) is 2 sigmoid(2u) - 1, so 0.5 x (1 + tanh(u)) is x sigmoid(2u).

`GatedActivationOp`: activated gate times up, the two halves of a fused product: `up * act(gate)`.

    up, gate = chunk(activation + bias, 2);  y = up * act(gate)

The order of the halves is DeepSpeed's (`gated_activation` in csrc/transformer/inference/csrc/gelu.cu). The
activation runs in fp32 and is rounded before it is multiplied, as transformers' MLPs round. Moves 3 N I
elements, does about 10 N I operations.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from hybrid_engine.ops import cpu_kernels, dispatch
from hybrid_engine.ops.dispatch import check_tensor, kernel_or_reference, tl, triton, use_triton

# Values of one row per program: 8 per thread of 4 warps, 16 bytes of each operand in 16 bits.
BLOCK = 1024


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by the tanh approximation (Hendrycks & Gimpel 2016), the one that GPT-2 was trained with."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU by the sigmoid approximation (Hendrycks & Gimpel 2016), rounded where transformers rounds."""
    return x * torch.sigmoid(1.702 * x)


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """relu(x)^2 (So et al. 2021, arXiv 2109.08668)."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "relu2": relu_squared,
    "gelu": F.gelu,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
}


@triton.jit
def activate(x, NAME: tl.constexpr):
    """fp32 in, fp32 out; NAME is a key of ACTIVATIONS. NaN stays NaN."""
    if NAME == "silu" or NAME == "swish":
        y = x * tl.sigmoid(x)
    elif NAME == "relu":
        y = tl.where(x < 0, 0.0, x)
    elif NAME == "relu2":
        y = tl.where(x < 0, 0.0, x * x)
    elif NAME == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif NAME == "quick_gelu":
        y = x * tl.sigmoid(1.702 * x)
    else:
        tl.static_assert(NAME == "gelu_new" or NAME == "gelu_fast" or NAME == "gelu_pytorch_tanh")
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return y


@triton.jit
def gated_activation_kernel(
    gate_ptr,
    up_ptr,
    gate_bias_ptr,
    up_bias_ptr,
    y_ptr,
    gate_stride,
    up_stride,
    width,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program 0 is the row, program 1 a block of it."""
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    if gate_bias_ptr is not None:
        gate += tl.load(gate_bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(up_bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
        gate = gate.to(DTYPE).to(tl.float32)
        up = up.to(DTYPE).to(tl.float32)
    y = activate(gate, ACTIVATION).to(DTYPE).to(tl.float32) * up
    tl.store(y_ptr + row * width + column, y.to(DTYPE), mask=mask)


def gated_activation(
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    """Launches `act(gate + gate_bias) * (up + up_bias)` of two `[N, I]`; with both biases or none."""
    check_tensor("gate", gate, shape=(None, None), is_dense_last=True)
    check_tensor("up", up, like=gate, shape=gate.shape, is_dense_last=True)
    for name, bias in (("gate bias", gate_bias), ("up bias", up_bias)):
        if bias is not None:
            check_tensor(name, bias, like=gate, shape=gate.shape[1:], is_dense_last=True)
    output = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    dispatch.launch(
        gated_activation_kernel,
        (gate.shape[0], -(-gate.shape[1] // BLOCK)),
        gate,
        up,
        gate_bias,
        up_bias,
        output,
        gate.stride(0),
        up.stride(0),
        gate.shape[1],
        device=gate.device,
        ACTIVATION=activation,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return output


def gated_in_torch(
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    """`gated_activation` in plain torch."""
    if gate_bias is not None and up_bias is not None:
        gate, up = gate + gate_bias, up + up_bias
    return ACTIVATIONS[activation](gate) * up


def activate_and_multiply(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """`act(gate) * up` of two `[N, I]`, by a form that accepts them."""
    if use_triton(gate):  # on a CPU, where kernels are interpreted, products may be stored by columns
        halves = gate.contiguous(), up.contiguous()
        return kernel_or_reference(gated_activation, gated_in_torch, *halves, None, None, activation)
    # SiLU is one operation in torch too: 3 us with the product for a row of 1024, where the call takes 15, and no
    # longer for 32 rows; torch takes two to three times as long for GELU's forms (one core of a Zen 5, torch 2.13).
    if activation not in ("silu", "swish") and gate.numel() and cpu_kernels.use_compiled(gate, up):
        return cpu_kernels.gated_activation(gate, up, activation)
    return ACTIVATIONS[activation](gate) * up


class GatedActivationOp:
    """Callable `(activation [N, 2I], bias [2I] or None, type) -> [N, I]`, type a name in ACTIVATIONS."""

    def __call__(self, activation: torch.Tensor, bias: torch.Tensor | None, type: str) -> torch.Tensor:
        """The first half of the columns is up, the second is the gate. ValueError for an unknown type."""
        self._check(activation, type)
        if not use_triton(activation):
            return self.reference(activation, bias, type)
        if bias is not None:
            check_tensor("bias", bias, like=activation, shape=activation.shape[1:], is_dense_last=True)
        up, gate = activation.chunk(2, dim=1)
        up_bias, gate_bias = (None, None) if bias is None else bias.chunk(2)
        return kernel_or_reference(gated_activation, gated_in_torch, gate, up, gate_bias, up_bias, type)

    def reference(self, activation: torch.Tensor, bias: torch.Tensor | None, type: str) -> torch.Tensor:
        """The reference: the function of the kernel in plain torch."""
        self._check(activation, type)
        up, gate = (activation if bias is None else activation + bias).chunk(2, dim=1)
        return gated_in_torch(gate, up, None, None, type)

    @staticmethod
    def _check(activation: torch.Tensor, type: str) -> None:
        if type not in ACTIVATIONS:
            raise ValueError(f"type={type!r} must be one of {', '.join(ACTIVATIONS)}")
        if activation.dim() != 2 or activation.shape[1] % 2:
            raise ValueError(f"activation has shape {list(activation.shape)}; expected [any, an even number]")
