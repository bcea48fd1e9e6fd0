"""`LIBRARY`, the rules of ops by name: those of elementwise ops, reductions and reshapes, and helpers to write rules.

Each rule is a function from a call to its annotation, because sizes and arguments decide what can be split. Dimensions
of common ops have the names of their equations (`linear`: `* k+, n k+, n + -> * n`). Dimensions of ops that treat every
dimension alike are `a`, `b`, ... by the dimensions of the result. `layers.py` has the rules of layers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import mul
from string import ascii_lowercase

import torch

from hybrid_engine.extensions.parallelize.graph.annotations import OnPart, OpCall, OpRule, parse

MakeRule = Callable[[OpCall], OpRule]
LIBRARY: dict[str, MakeRule] = {}
"""Rules keyed by the name of an op without its namespace and overload: `linear` for aten.linear.default."""
NOT_SPLIT = """
    arange scalar_tensor rand randn randint randperm linspace tril_indices triu_indices eye lift_fresh_copy
    nonzero unique_dim bernoulli isin type_as multinomial empty sym_size diff
    rand_like randn_like randint_like normal normal_functional uniform exponential log_normal cauchy geometric random
    bucketize searchsorted histc bincount count_nonzero renorm _ctc_loss vander
    diagonal diag_embed unfold im2col col2im pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle rot90
    view_as_complex view_as_real complex polar real imag angle conj _conj _conj_physical resolve_conj
    _fft_r2c _fft_c2r _fft_c2c
    dot vdot mv addmv addbmm addr _cdist_forward _euclidean_dist _pdist_forward _trilinear dist block_diag
    cartesian_prod _weight_norm_interface inverse linalg_inv linalg_cholesky linalg_solve linalg_svd linalg_eigh
    linalg_cross linalg_qr linalg_cholesky_ex linalg_inv_ex linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_eig
    linalg_eigvals linalg_householder_product linalg_matrix_exp linalg_solve_triangular linalg_lstsq linalg_ldl_solve
    _linalg_svd _linalg_eigh _linalg_det _linalg_slogdet _linalg_solve_ex linalg_pinv triangular_solve cholesky_solve
    cholesky_inverse _embedding_bag embedding_renorm
    multi_margin_loss multilabel_margin_loss_forward rrelu_with_noise rrelu_with_noise_functional
    grid_sampler_2d grid_sampler_3d affine_grid_generator upsample_trilinear3d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_bicubic2d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d
    max_pool2d_with_indices max_pool3d_with_indices max_unpool2d max_unpool3d reflection_pad1d reflection_pad2d
    reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
"""
"""Ops that each rank computes whole: they create tensors, or use all elements at once.

The list also has ops with dimensions that could be split, for which there is no rule yet.
"""
LINEAR_IN_ALL = ("add", "sub", "rsub", "neg", "positive", "clone", "alias", "contiguous", "detach", "to_dense", "lift")
"""Ops that are linear in all operands together if all are tensors: the result for sums is the sum of the results."""
LINEAR_IN_FIRST = ("mul", "div")
"""Ops that are linear in their first operand, if it is not smaller than the second."""
ELEMENTWISE = """
    abs exp exp2 expm1 log log1p log2 sqrt rsqrt square pow reciprocal sin cos tanh sigmoid relu relu6 gelu silu
    elu selu leaky_relu hardtanh hardswish mish hardsigmoid softplus logsigmoid log_sigmoid erf floor ceil round
    trunc sign sgn clamp clamp_min clamp_max clip maximum minimum fmod remainder floor_divide atan2 eq ne lt le
    gt ge logical_and logical_or logical_not logical_xor __and__ __or__ __xor__ bitwise_and bitwise_or
    bitwise_not bitwise_xor where masked_fill isnan isinf isfinite lerp addcmul addcdiv nan_to_num to _to_copy
    fill zero true_divide zeros_like ones_like full_like empty_like threshold tan asin acos atan sinh cosh
    celu log10
    fmax fmin hypot logaddexp logaddexp2 copysign copy xlogy special_xlog1py heaviside logit erfc erfinv asinh acosh
    atanh lgamma digamma frac sinc hardshrink softshrink __lshift__ __rshift__ bitwise_left_shift
    bitwise_right_shift deg2rad rad2deg signbit isposinf isneginf special_i0 i0 special_i0e special_i1 special_i1e
    special_ndtri special_log_ndtr special_erfcx special_entr gcd lcm nextafter
"""
Factors = list[list[int]]
"""For each dimension of a shape, the numbers of the common factors that it is made of, outermost first."""


def rule_for(call: OpCall) -> OpRule:
    """The rule of `call`; ValueError for an op without annotation."""
    rule = _entry(call.op)
    if rule is None:
        operands = ", ".join(" ".join(letters(len(shape), "^")) for shape in call.shapes)
        raise ValueError(
            f"op {op_name(call.op)} has no annotation, so that nobody knows how to split it; write "
            f'register_op("{operands} -> ...")(torch.ops.{call.op}) with the names of its dimensions'
        )
    # Not all collectives support complex numbers: each rank computes these ops whole.
    return whole(call) if any(t.is_complex() for t in (*call.tensors, *call.outputs)) else rule(call)


def is_annotated(op: torch._ops.OpOverload) -> bool:
    """Whether `op` has an annotation."""
    return _entry(op) is not None


def _entry(op: torch._ops.OpOverload) -> MakeRule | None:
    name = op_name(op)
    return LIBRARY.get(name) or LIBRARY.get(name.split("::")[-1])


def op_name(op: torch._ops.OpOverload) -> str:
    """`linear` for aten.linear.default, `namespace::name` for ops of other namespaces."""
    name = op._schema.name
    return name.removeprefix("aten::")


def of_text(
    call: OpCall,
    text: str,
    sizes: dict[str, int] | None = None,
    shape_argument: str | None = None,
    on_part: Mapping[str, OnPart] | None = None,
) -> OpRule:
    """The rule that `text` gives for the operands of `call`; `sizes` holds the sizes of names that no operand has."""
    annotation = parse(text, [len(shape) for shape in call.shapes])
    known = annotation.sizes(call.shapes, sizes or {})
    return OpRule(annotation=annotation, sizes=known, shape_argument=shape_argument, on_part=on_part or {})


def annotate(*names: str) -> Callable[[MakeRule], MakeRule]:
    """Registers a rule for the ops of these names."""

    def enter(rule: MakeRule) -> MakeRule:
        LIBRARY.update(dict.fromkeys(names, rule))
        return rule

    return enter


def letters(num_dims: int, mark: str = "") -> list[str]:
    """Names for the dimensions of an op without an equation: a, b, ..., each with `mark`."""
    return [letter + mark for letter in ascii_lowercase[:num_dims]]


def whole(call: OpCall) -> OpRule:
    """The rule of an op that is not split: each rank computes all of it."""
    inputs = ["?"] * len(call.tensors)
    return of_text(call, f"{', '.join(inputs)} -> {', '.join('?' for _ in call.outputs)}")


def aligned(operand: Sequence[int], shape: Sequence[int], names: Sequence[str]) -> str:
    """The names of an operand that is broadcast to `shape`; a broadcast dimension is `1`."""
    start = len(shape) - len(operand)
    return " ".join(
        names[start + i] if size == shape[start + i] and size != 1 else "1" for i, size in enumerate(operand)
    )


annotate(*NOT_SPLIT.split())(whole)


@annotate(*ELEMENTWISE.split())
def elementwise(call: OpCall) -> OpRule:
    if op_name(call.op) == "to" and len(call.tensors) == 2:
        return whole(call)
    return of_text(call, _broadcast_text(call, [""] * len(call.tensors), ""))


@annotate(*LINEAR_IN_ALL)
def linear_in_all(call: OpCall) -> OpRule:
    takes_numbers = any(isinstance(call.arguments.get(name), int | float) for name in ("other",))
    term = "" if takes_numbers or not call.outputs[0].is_floating_point() else " +"
    return of_text(call, _broadcast_text(call, [term] * len(call.tensors), term))


@annotate(*LINEAR_IN_FIRST)
def linear_in_first(call: OpCall) -> OpRule:
    is_linear = call.outputs[0].is_floating_point() and call.arguments.get("rounding_mode") is None
    terms = [" +" if is_linear and position == 0 else "" for position in range(len(call.tensors))]
    return of_text(call, _broadcast_text(call, terms, terms[0]))


def _broadcast_text(call: OpCall, terms: Sequence[str], result_term: str) -> str:
    shape = list(call.outputs[0].shape)
    names = letters(len(shape))
    sides = [aligned(operand, shape, names) + term for operand, term in zip(call.shapes, terms, strict=True)]
    return f"{', '.join(sides)} -> {aligned(shape, shape, names)}{result_term}"


def _reduced(call: OpCall, mark: str) -> OpRule:
    """The rule of a reduction over `dim` (none: over all); reduced dimensions get `mark`."""
    num_dims = len(call.shapes[0])
    dims = call.arguments.get("dim")
    given = range(num_dims) if dims is None or dims == [] else dims if isinstance(dims, list | tuple) else [dims]
    cut = {dim % num_dims for dim in given} if num_dims else set()
    names = letters(num_dims)
    operand = " ".join(name + mark * (position in cut) for position, name in enumerate(names))
    kept = ["1" if position in cut else name for position, name in enumerate(names)]
    result = " ".join(name for name in kept if name != "1" or call.arguments.get("keepdim"))
    return of_text(call, f"{operand} -> {', '.join([result] * len(call.outputs))}")


@annotate("sum")
def summed(call: OpCall) -> OpRule:
    return _reduced(
        call, "+" if call.outputs[0].dtype.is_floating_point or call.outputs[0].dtype == torch.int64 else "^"
    )


@annotate("mean", "amax", "amin", "max", "min", "argmax", "argmin", "prod", "logsumexp", "var", "std", "all", "any")
@annotate("norm", "linalg_vector_norm", "var_mean", "std_mean", "median", "nanmedian", "mode", "nansum", "kthvalue")
def reduced(call: OpCall) -> OpRule:
    return elementwise(call) if len(call.tensors) == 2 else _reduced(call, "^")


@annotate("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as")
def viewed(call: OpCall) -> OpRule:
    """Can be split along dimensions of both input and result, also as the outer factor of another dimension."""
    before, after, sizes = view_texts(call.shapes[0], list(call.outputs[0].shape))
    name = op_name(call.op)
    if name == "squeeze" and not _drops_all_it_names(call):
        return whole(call)
    argument = {"view": "size", "_unsafe_view": "size", "reshape": "shape"}.get(name)
    if (name in ("flatten", "unsqueeze", "squeeze") or argument) and "dtype" not in call.arguments:
        term = " +" if call.outputs[0].is_floating_point() else ""
        return of_text(call, f"{before}{term} -> {after}{term}", sizes, argument)
    return whole(call)


def _drops_all_it_names(call: OpCall) -> bool:
    """Whether a squeeze names only dimensions of size 1; any other could get size 1 on each rank when it is split."""
    dims = call.arguments.get("dim")
    if dims is None or not call.shapes[0]:
        return False
    return all(call.shapes[0][dim] == 1 for dim in (dims if isinstance(dims, list | tuple) else [dims]))


@annotate("transpose", "permute", "t")
def permuted(call: OpCall) -> OpRule:
    num_dims = len(call.shapes[0])
    name = op_name(call.op)
    order = list(range(num_dims))
    if name == "permute":
        order = [dim % num_dims for dim in call["dims"]]
    elif name == "transpose":
        first, second = (call[argument] % num_dims for argument in ("dim0", "dim1"))
        order[first], order[second] = second, first
    else:
        order.reverse()
    names = letters(num_dims)
    term = " +" if call.outputs[0].is_floating_point() else ""
    return of_text(call, f"{' '.join(names)}{term} -> {' '.join(names[dim] for dim in order)}{term}")


@annotate("expand", "broadcast_to")
def expanded(call: OpCall) -> OpRule:
    shape = list(call.outputs[0].shape)
    names = letters(len(shape))
    sizes = dict(zip(names, shape, strict=True))
    text = f"{aligned(call.shapes[0], shape, names)} -> {' '.join(names)}"
    return of_text(call, text, sizes, "size")


@annotate("broadcast_tensors")
def broadcast(call: OpCall) -> OpRule:
    shape = list(call.outputs[0].shape)
    names = letters(len(shape))
    sides = [aligned(operand, shape, names) for operand in call.shapes]
    return of_text(call, f"{', '.join(sides)} -> {', '.join([aligned(shape, shape, names)] * len(call.outputs))}")


@annotate("zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "new_empty")
def filled(call: OpCall) -> OpRule:
    """A tensor of one value, of which each rank can make its part. An operand for dtype and device is not split."""
    shape = list(call.outputs[0].shape)
    names = letters(len(shape))
    operands = ", ".join("?" for _ in call.tensors)
    return of_text(call, f"{operands} -> {' '.join(names)}", dict(zip(names, shape, strict=True)), "size")


def _cut_along(call: OpCall, dims: Iterable[int], drops: bool = False) -> OpRule:
    """The rule of ops that take or join pieces along `dims`, which are not split; `drops`: results do not have them.

    Joined operands each have their own name for the joined dimension, because its sizes may differ.
    """
    dim_names, cut = letters(len(call.shapes[0])), set(dims)
    sides = [
        [f"{name}{number or ''}^" if position in cut else name for position, name in enumerate(dim_names)]
        for number in range(len(call.tensors))
    ]
    term = " +" if call.outputs[0].is_floating_point() else ""
    result = " ".join(name for name in sides[0] if not (drops and name.endswith("^")))
    operands = [" ".join(side) + term for side in sides]
    return of_text(call, f"{', '.join(operands)} -> {', '.join([result + term] * len(call.outputs))}")


@annotate(
    "slice", "split", "split_with_sizes", "chunk", "cat", "narrow", "select", "unbind", "tensor_split", "index_select",
    "unsafe_split", "unsafe_chunk",
)  # fmt: skip
def pieces(call: OpCall) -> OpRule:
    name = op_name(call.op)
    if name == "cat" and any(len(shape) != len(call.shapes[0]) for shape in call.shapes):
        return whole(call)
    if name == "index_select":
        return whole(call)
    if name == "slice" and list(call.outputs[0].shape) == call.shapes[0]:
        return elementwise(call)
    return _cut_along(call, [call.dim()], drops=name in ("select", "unbind"))


@annotate("stack")
def stacked(call: OpCall) -> OpRule:
    names = letters(len(call.shapes[0]))
    position = call["dim"] % (len(names) + 1)
    result = " ".join([*names[:position], "1" if len(call.tensors) == 1 else "z^", *names[position:]])
    sides = ", ".join([" ".join(names)] * len(call.tensors))
    return of_text(call, f"{sides} -> {result}")


@annotate("select_scatter", "slice_scatter")
def written(call: OpCall) -> OpRule:
    cut = call.dim()
    names = [name + "^" * (position == cut) for position, name in enumerate(letters(len(call.shapes[0])))]
    piece = names if op_name(call.op) == "slice_scatter" else [name for name in names if not name.endswith("^")]
    if op_name(call.op) == "slice_scatter":
        piece = [name if position != cut else "z^" for position, name in enumerate(names)]
    return of_text(call, f"{' '.join(names)}, {' '.join(piece)} -> {' '.join(names)}")


@annotate("gather", "scatter", "scatter_add", "take_along_dim")
def gathered(call: OpCall) -> OpRule:
    """Indexes along `dim`. Can be split only if all shapes are equal in the other dimensions."""
    cut = call.dim()
    shapes = call.shapes
    same = all(shape[:cut] + shape[cut + 1 :] == shapes[0][:cut] + shapes[0][cut + 1 :] for shape in shapes)
    if not same:
        return whole(call)
    names = letters(len(shapes[0]))
    sides = [
        " ".join(f"{chr(ord('A') + number)}^" if position == cut else name for position, name in enumerate(names))
        for number in range(len(shapes))
    ]
    result = sides[1] if op_name(call.op) in ("gather", "take_along_dim") else sides[0]
    return of_text(call, f"{', '.join(sides)} -> {result}")


@annotate("one_hot")
def one_hot(call: OpCall) -> OpRule:
    return of_text(call, "* -> * z^")


@annotate("constant_pad_nd", "pad")
def padded(call: OpCall) -> OpRule:
    num_dims = len(call.shapes[0])
    count = len(call["pad"]) // 2
    names = [name + "^" * (position >= num_dims - count) for position, name in enumerate(letters(num_dims))]
    return of_text(call, f"{' '.join(names)} -> {' '.join(names)}")


@annotate(
    "index", "index_put", "masked_scatter", "index_add", "masked_select", "repeat", "repeat_interleave", "index_copy",
    "index_fill", "index_reduce", "scatter_reduce",
)  # fmt: skip
def indexed(call: OpCall) -> OpRule:
    return whole(call)


def view_texts(before: Sequence[int], after: Sequence[int]) -> tuple[str, str, dict[str, int]]:
    """Both sides of the annotation of a view from shape `before` to `after`, and the sizes of its names.

    Both shapes are cut into common factors, outermost first: [2, 12] viewed as [2, 3, 4] is `a (b c) -> a b c`. A
    dimension that has only a part of a factor is not split: [4, 6] viewed as [6, 4] has no dimension that can be split.
    """
    if 0 in before:
        return " ".join(f"in{i}^" for i in range(len(before))), " ".join(f"out{i}^" for i in range(len(after))), {}
    cuts = sorted(set(accumulate(before, mul)) | set(accumulate(after, mul)) | {1})
    divides = [end % start == 0 for start, end in pairwise(cuts)]
    sides = [_factors(shape, cuts) for shape in (before, after)]
    fixed = {number for number, is_whole in enumerate(divides) if not is_whole}
    fixed = _spread(sides, fixed)
    names = {
        number: ascii_lowercase[number % 26] + str(number // 26) * (number >= 26) for number in range(len(divides))
    }
    sizes = {name: cuts[number + 1] // cuts[number] for number, name in names.items() if number not in fixed}
    texts = [_text(side, names, fixed, prefix) for side, prefix in zip(sides, ("in", "out"), strict=True)]
    return texts[0], texts[1], sizes


def _factors(shape: Sequence[int], cuts: list[int]) -> Factors:
    found, start = [], 1
    for size in shape:
        end = start * size
        found.append([number for number, cut in enumerate(cuts[:-1]) if start <= cut < end])
        start = end
    return found


def _spread(sides: list[Factors], fixed: set[int]) -> set[int]:
    """All factors that share a dimension, of either shape, with a fixed factor."""
    while True:
        more = {number for side in sides for dim in side if fixed & set(dim) for number in dim}
        if more <= fixed:
            return fixed
        fixed = fixed | more


def _text(side: Factors, names: dict[int, str], fixed: set[int], prefix: str) -> str:
    words = []
    for position, dim in enumerate(side):
        if fixed & set(dim):
            words.append(f"{prefix}{position}^")
        else:
            parts = [names[number] for number in dim]
            words.append(f"({' '.join(parts)})" if len(parts) > 1 else parts[0] if parts else "1")
    return " ".join(words)
