"""Operations whose result for a row depends only on that row, bit for bit: the basis of exact mode.

Inside `FixedShapes` every operation that reaches PyTorch's kernels is of one of these kinds:

    products      in pieces of `piece_rows` rows, the last one padded: the order in which a library sums then does not
                  depend on the number of rows. Without pieces fp32 differs between 1, 2 and 33 rows, bf16 at 1024
                  inputs.
    functions     exp, silu, gelu, ...: on contiguous pieces of a fixed number of elements, the last one padded. The
                  vectorized loop rounds differently from the scalar one, which computes the remaining elements of a
                  tensor, or of a thread's part of it, and strided ones.
    reductions    along the last dimension of contiguous rows, never with one row split over threads
    the others    sums, products and quotients of elements, comparisons, copies, views: one rounding or none

This describes a CPU. On devices with kernels, `fixed_product.py` computes products and operations along
rows; functions of elements are torch's there, in which a thread computes one element after the other.

Any other operation is refused by name, which is better than a result that is almost the same. A dispatch mode is below
autograd, which therefore derives the gradients of the operations as they were called; they are the usual ones.

The sizes of pieces were found by trial with 1 and 2 threads on a Xeon (torch 2.13): the bits of a row do not depend on
its place or the other rows. The number of rows of a product is tried on each processor (`place_free_rows`). With
another number of threads a product of many inputs is summed in another order, so that number must be the same wherever
bits are compared.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_engine.ops.dispatch import use_triton
from hybrid_engine.ops.fixed_product import REDUCTIONS as REDUCTION_KERNELS
from hybrid_engine.ops.fixed_product import SOFTMAXES as SOFTMAX_KERNELS
from hybrid_engine.ops.fixed_product import fixed_product, norm_rows, reduce_rows, softmax_rows

aten = torch.ops.aten
PIECES_OF_ROWS = (32, 24)
TRIED_SHAPES = ((16, 16), (77, 90), (300, 40), (384, 16), (1024, 1000))
# Below the size from which PyTorch splits an operation over threads (32768), and a multiple of every vector width.
PIECE_ELEMENTS = 16384
VECTOR_ELEMENTS = 64
# From this many elements on, a single row is summed by several threads.
CUT_ELEMENTS = 32768
FUNCTIONS = (
    "cos cosh elu erf exp exp2 expm1 gelu hardsigmoid hardswish leaky_relu log log1p log2 mish pow reciprocal "
    "relu6 rsqrt selu sigmoid silu sin softplus sqrt tan tanh"
)
REDUCTIONS = "_log_softmax _softmax logsumexp mean std sum var"
# One rounding per element, or none; and a loss, which does not belong to a row.
PLAIN = (
    "_local_scalar_dense _reshape_alias _to_copy _unsafe_view abs alias amax amin any arange argmax argmin argsort "
    "as_strided bitwise_and bitwise_not bitwise_or cat ceil chunk clamp clamp_max clamp_min clone "
    "constant_pad_nd contiguous copy detach diagonal div embedding empty empty_like empty_permuted empty_strided eq "
    "expand fill flip floor full full_like gather ge gt index index_add index_copy index_put index_select "
    "is_same_size isinf isnan le lift_fresh lt masked_fill masked_scatter max maximum min minimum mul narrow "
    "ne neg new_empty new_empty_strided new_full new_ones new_zeros nll_loss_forward nonzero ones ones_like permute "
    "relu remainder repeat resize roll scalar_tensor scatter select sign slice slice_scatter sort split "
    "split_with_sizes squeeze stack t threshold topk transpose tril triu unbind unfold unsqueeze view where zero "
    "zeros zeros_like"
)
Trial = Callable[[int, torch.Generator], Iterable[torch.Tensor]]


class NotExactError(RuntimeError):
    """An operation that is not known to compute the same bits for a row in every batch."""


def product(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`input [N, in]`, `weight [in, out]`, `bias [out]` or None -> `[N, out]`, in pieces of `piece_rows` rows."""
    if use_triton(input):
        return fixed_product(input, weight, bias)
    num_rows, width = input.shape
    num_together = piece_rows(input.dtype, torch.get_num_threads())
    num_padded = -(-num_rows // num_together) * num_together
    rows = input
    if num_padded != num_rows or not input.is_contiguous():
        rows = input.new_zeros(num_padded, width)
        rows[:num_rows] = input
    output = input.new_empty(num_padded, weight.shape[1])
    for piece, into in zip(rows.split(num_together), output.split(num_together), strict=True):
        if bias is None:
            torch.mm(piece, weight, out=into)
        else:
            torch.addmm(bias, piece, weight, out=into)
    return output[:num_rows]


@cache
def piece_rows(dtype: torch.dtype, num_threads: int) -> int:
    """Number of rows that a product on a CPU takes at once."""

    def products(num_rows: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
        for width, num_outputs in TRIED_SHAPES:
            shapes = (1, width), (width, num_outputs), (num_outputs,)
            row, weight, bias = (torch.randn(*shape, generator=generator, device="cpu").to(dtype) for shape in shapes)
            rows = row.expand(num_rows, -1).contiguous()
            for laid_out in (weight, weight.t().contiguous().t()):
                yield torch.mm(rows, laid_out)
                yield torch.addmm(bias, rows, laid_out)

    return place_free_rows(PIECES_OF_ROWS, products)


def _mm(function: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return product(input, weight)


def _addmm(
    function: Any, bias: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    if beta != 1 or alpha != 1 or bias.dim() != 1:
        raise NotExactError(f"addmm with {beta=}, {alpha=} and a bias of {list(bias.shape)} is not known to be exact")
    return product(input, weight, bias)


def _bmm(function: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """One term per sum has no order; one matrix, or the same one for the whole batch, is a plain product.

    torch uses the latter for a linear whose weight is frozen and whose input is not contiguous.
    """
    if left.shape[2] == 1:
        return left * right
    if left.shape[0] == 1 or right.stride(0) == 0:
        return product(left.reshape(-1, left.shape[2]), right[0]).unflatten(0, left.shape[:2])
    shapes = f"{list(left.shape)} and {list(right.shape)}"
    raise NotExactError(f"a batch of products of {shapes} is not known to be exact; attention is in fixed_attention.py")


def _function(function: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A function of single elements, on contiguous pieces of at most PIECE_ELEMENTS."""
    if not isinstance(input, torch.Tensor) or any(isinstance(arg, torch.Tensor) for arg in args):
        raise NotExactError(f"{function} of two tensors is not known to be exact")
    if not input.is_floating_point():
        input = input.to(torch.get_default_dtype())
    if input.is_cuda:
        return function(input.contiguous(), *args, **kwargs)
    flat = input.reshape(-1)
    missing = -len(flat) % VECTOR_ELEMENTS
    # A view of a larger tensor may start anywhere, but the last piece must end at a full vector.
    flat = torch.nn.functional.pad(flat, (0, missing)) if missing else flat
    if len(flat) <= PIECE_ELEMENTS:
        result = function(flat, *args, **kwargs)
    else:
        result = torch.cat([function(piece, *args, **kwargs) for piece in flat.split(PIECE_ELEMENTS)])
    return result[: input.numel()].view(input.shape)


def _function_in_place(function: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    plain = getattr(aten, function.overloadpacket.__name__.removesuffix("_"))
    return input.copy_(_function(plain, input, *args, **kwargs))


def _along_rows(function: Any, input: torch.Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A reduction over the last dimension, or a softmax along it."""
    if not input.is_floating_point():
        return function(input, *(() if dim is None else (dim,)), *args, **kwargs)
    dims = [dim] if isinstance(dim, int) else list(dim or [])
    if [d % input.dim() for d in dims] != [input.dim() - 1]:
        raise NotExactError(f"{function} over dimensions {dims} of {list(input.shape)} is not known to be exact")
    if input.is_cuda or use_triton(input):
        return _rows_by_kernel(function, input, *args, **kwargs)
    last = -1 if isinstance(dim, int) else [-1]
    input = input.contiguous()
    if input.numel() == input.shape[-1] >= CUT_ELEMENTS:  # two equal rows, one of which is kept
        return function(torch.stack((input, input)), last, *args, **kwargs)[0]
    return function(input, last, *args, **kwargs)


def _rows_by_kernel(
    function: Any,
    input: torch.Tensor,
    *flags: bool,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    **others: Any,
) -> torch.Tensor:
    """`flags`: for a reduction, whether it keeps the dimension; for a softmax, whether 16-bit inputs become fp32."""
    name = function.overloadpacket.__name__
    if not use_triton(input) or others or name not in (*REDUCTION_KERNELS, *SOFTMAX_KERNELS):
        raise NotExactError(f"{function} of {input.dtype} on {input.device.type} is not known to be exact")
    if name in REDUCTION_KERNELS:
        return reduce_rows(name, input, any(flags) or keepdim, dtype or input.dtype)
    return softmax_rows(name, input, torch.float32 if any(flags) else input.dtype)


def _layer_norm(function: Any, input: torch.Tensor, shape: list[int], *weights_and_eps: Any) -> Any:
    """Layer norm, with its means and rstds, or RMS norm with only its rstds."""
    *weights, eps = weights_and_eps
    if not input.is_cuda and not use_triton(input):
        return function(input.contiguous(), shape, *weights, eps)
    if not use_triton(input) or len(shape) != 1:
        raise NotExactError(f"{function} of {input.dtype} over {list(shape)} is not known to be exact")
    if function.overloadpacket.__name__ == "native_layer_norm":
        return norm_rows("layer", input, weights[0], weights[1], eps)
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    output, _, rstd = norm_rows("rms", input, weights[0], None, eps)
    return output, rstd


def _scaled_sum(function: Any, input: torch.Tensor, other: Any, *, alpha: float = 1) -> torch.Tensor:
    """`input +- alpha * other`: torch's loops with alpha round once or twice."""
    return function(input, other) if alpha == 1 else function(input, other * alpha)


def _plain(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _rules() -> dict[str, Callable[..., Any]]:
    """The rule of each operation of `aten` by name; in-place operations have their own names."""
    rules: dict[str, Callable[..., Any]] = {"mm": _mm, "addmm": _addmm, "bmm": _bmm, "native_layer_norm": _layer_norm}
    rules |= dict.fromkeys(("add", "add_", "sub", "sub_", "rsub"), _scaled_sum) | {"_fused_rms_norm": _layer_norm}
    rules |= dict.fromkeys(REDUCTIONS.split(), _along_rows)
    for name in FUNCTIONS.split():
        rules |= {name: _function, f"{name}_": _function_in_place}
    for name in PLAIN.split():
        rules |= {name: _plain, f"{name}_": _plain}
    return rules


RULES = _rules()


class FixedShapes(TorchDispatchMode):
    """Inside, operations compute each row as if it were alone; raises NotExactError for others.

    Gradients are the usual ones: a backward pass outside is not changed.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation by its rule."""
        kwargs = kwargs or {}
        if func.namespace != "aten":
            return func(*args, **kwargs)  # collectives and copies of sharded parameters
        rule = RULES.get(func.overloadpacket.__name__)
        if rule is not None:
            return rule(func, *args, **kwargs)
        result = func(*args, **kwargs)
        outputs = result if isinstance(result, tuple | list) else (result,)
        if not any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in outputs):
            return result  # integers and flags are exact
        raise NotExactError(f"{func} is not known to give a row the same bits in every batch")


def place_free_rows(choices: Sequence[int], trial: Trial) -> int:
    """The first choice for which all rows of `trial` are equal; if there is none, the first choice.

    `trial(num_rows, generator)` yields products `[..., num_rows, n]` of identical rows. An engine compares bits when it
    is built, and refuses if they differ, so a difference that a trial misses is still found.
    """
    for num_rows in choices:
        products = trial(num_rows, torch.Generator().manual_seed(0))
        if all(torch.equal(product, product[..., :1, :].expand_as(product)) for product in products):
            return num_rows
    return choices[0]
