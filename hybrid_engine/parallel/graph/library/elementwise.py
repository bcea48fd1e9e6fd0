"""Ops that work on every element by itself, operands broadcast against each other, and those that are not split."""

from collections.abc import Sequence

from hybrid_engine.parallel.graph.calls import Call
from hybrid_engine.parallel.graph.library.entries import aligned, annotate, letters, of_text, op_name, whole
from hybrid_engine.parallel.graph.rules import OpRule

NOT_SPLIT = """
    arange scalar_tensor rand randn randint randperm linspace tril_indices triu_indices eye lift_fresh_copy
    nonzero unique_dim bernoulli isin type_as multinomial empty sym_size diff
"""
"""Ops of which each rank computes all: they make tensors, or look at all elements at once."""
LINEAR_IN_ALL = ("add", "sub", "rsub", "neg", "clone", "alias", "contiguous", "detach", "to_dense", "lift")
"""Sums of these are these of sums, where all operands are tensors."""
LINEAR_IN_FIRST = ("mul", "div")
"""Likewise in their first operand, when it is not smaller than the second."""
ELEMENTWISE = """
    abs exp exp2 expm1 log log1p log2 sqrt rsqrt square pow reciprocal sin cos tanh sigmoid relu relu6 gelu silu
    elu selu leaky_relu hardtanh hardswish mish hardsigmoid softplus logsigmoid log_sigmoid erf floor ceil round
    trunc sign sgn clamp clamp_min clamp_max clip maximum minimum fmod remainder floor_divide atan2 eq ne lt le
    gt ge logical_and logical_or logical_not logical_xor __and__ __or__ __xor__ bitwise_and bitwise_or
    bitwise_not bitwise_xor where masked_fill isnan isinf isfinite lerp addcmul addcdiv nan_to_num to _to_copy
    fill true_divide zeros_like ones_like full_like empty_like threshold tan asin acos atan sinh cosh
"""

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
