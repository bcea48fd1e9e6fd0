"""Matrix product with a transposed linear: `y = x W (+ b)`, W stored or viewed as [in, out].

Moves in x out elements of W once for all N rows and does 2 N in out operations: below about 100 rows on a
GPU it runs at the speed of the memory. A `torch.nn.Linear` weight is [out, in]; its `.t()` is the view
this op takes, so nothing is copied.

On a CPU fp32 products go to oneDNN, by the operator that `torch.compile` emits for linears: for the
linears of a 16M-parameter Llama at 32 rows it takes 4.1 ms where `torch.mm` (MKL) takes 8.0, and is no
slower from 1 to 2048 rows, for either way the weight is stored (two Zen 5 cores, torch 2.13).
"""

import torch

_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def use_onednn(input: torch.Tensor) -> bool:
    """True where the product runs on oneDNN: fp32 on a CPU, in a torch that has it."""
    return _HAS_ONEDNN and input.dtype == torch.float32 and input.device.type == "cpu"


def linear_transposed(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`input [N, in]`, `weight [in, out]`, `bias [out]` or None -> `[N, out]`."""
    if use_onednn(input):
        return torch.ops.mkldnn._linear_pointwise(input, weight.t(), bias, "none", [], "")
    return linear_transposed_reference(input, weight, bias)


def linear_transposed_reference(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The same function in plain torch."""
    return torch.mm(input, weight) if bias is None else torch.addmm(bias, input, weight)


class VectorMatMulOp:
    """Callable `(input [N, in], weight [in, out], bias [out] or None) -> [N, out]`.

    Args:
        fp32_output: the LM head's form: the product is returned in fp32 whatever the dtype of the weights.
    """

    def __init__(self, fp32_output: bool = False):
        self.fp32_output = fp32_output

    def __call__(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        output = linear_transposed(input, weight, bias)
        return output.float() if self.fp32_output else output
