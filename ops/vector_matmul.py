"""Matrix product with a transposed linear: `y = x W (+ b)`, W stored or viewed as [in, out].

Moves in x out elements of W once for all N rows and does 2 N in out operations: below about 100 rows on a
GPU it runs at the speed of the memory. A `torch.nn.Linear` weight is [out, in]; its `.t()` is the view
this op takes, so nothing is copied.
"""

import torch


def linear_transposed(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`input [N, in]`, `weight [in, out]`, `bias [out]` or None -> `[N, out]`."""
    if bias is None:
        return torch.mm(input, weight)
    return torch.addmm(bias, input, weight)


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
