"""`LIBRARY`, the rules of ops by name, with the helpers that rules are written with and the elementwise rules.

Each rule is a function from a call to its annotation, because sizes and arguments decide what can be split. Dimensions
of common ops have the names of their equations (`linear`: `* k+, n k+, n + -> * n`). Dimensions of ops that treat every
dimension alike are `a`, `b`, ... by the dimensions of the result.
"""

from collections.abc import Callable, Mapping, Sequence
from string import ascii_lowercase

import torch

from hybrid_engine.extensions.parallelize.library.annotations import parse
from hybrid_engine.extensions.parallelize.library.rules import Call, OnPart, OpRule

Rule = Callable[[Call], OpRule]
LIBRARY: dict[str, Rule] = {}
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


def rule_for(call: Call) -> OpRule:
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


def _entry(op: torch._ops.OpOverload) -> Rule | None:
    name = op_name(op)
    return LIBRARY.get(name) or LIBRARY.get(name.split("::")[-1])


def op_name(op: torch._ops.OpOverload) -> str:
    """`linear` for aten.linear.default, `namespace::name` for ops of other namespaces."""
    name = op._schema.name
    return name.removeprefix("aten::")


def of_text(
    call: Call,
    text: str,
    sizes: dict[str, int] | None = None,
    shape_argument: str | None = None,
    on_part: Mapping[str, OnPart] | None = None,
) -> OpRule:
    """The rule that `text` gives for the operands of `call`; `sizes` holds the sizes of names that no operand has."""
    annotation = parse(text, [len(shape) for shape in call.shapes])
    known = annotation.sizes(call.shapes, sizes or {})
    return OpRule(annotation=annotation, sizes=known, shape_argument=shape_argument, on_part=on_part or {})


def annotate(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for the ops of these names."""

    def enter(rule: Rule) -> Rule:
        LIBRARY.update(dict.fromkeys(names, rule))
        return rule

    return enter


def letters(num_dims: int, mark: str = "") -> list[str]:
    """Names for the dimensions of an op without an equation: a, b, ..., each with `mark`."""
    return [letter + mark for letter in ascii_lowercase[:num_dims]]


def whole(call: Call) -> OpRule:
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
def elementwise(call: Call) -> OpRule:
    if op_name(call.op) == "to" and len(call.tensors) == 2:
        return whole(call)
    return of_text(call, _broadcast_text(call, [""] * len(call.tensors), ""))


@annotate(*LINEAR_IN_ALL)
def linear_in_all(call: Call) -> OpRule:
    takes_numbers = any(isinstance(call.arguments.get(name), int | float) for name in ("other",))
    term = "" if takes_numbers or not call.outputs[0].is_floating_point() else " +"
    return of_text(call, _broadcast_text(call, [term] * len(call.tensors), term))


@annotate(*LINEAR_IN_FIRST)
def linear_in_first(call: Call) -> OpRule:
    is_linear = call.outputs[0].is_floating_point() and call.arguments.get("rounding_mode") is None
    terms = [" +" if is_linear and position == 0 else "" for position in range(len(call.tensors))]
    return of_text(call, _broadcast_text(call, terms, terms[0]))


def _broadcast_text(call: Call, terms: Sequence[str], result_term: str) -> str:
    shape = list(call.outputs[0].shape)
    names = letters(len(shape))
    sides = [aligned(operand, shape, names) + term for operand, term in zip(call.shapes, terms, strict=True)]
    return f"{', '.join(sides)} -> {aligned(shape, shape, names)}{result_term}"
