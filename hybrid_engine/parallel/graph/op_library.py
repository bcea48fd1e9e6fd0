"""The annotations of the ops that traced models are made of; whoever has another registers it (`register_op`).

Each rule is a function from a call to its annotation: sizes and arguments decide what can be split. Names of the usual
ops are those of their equations (`linear`: `* k+, n k+, n + -> * n`); of ops that work on every dimension alike they
are `a`, `b`, ... by the dimensions of the result.
"""

from collections.abc import Callable, Iterable, Sequence
from string import ascii_lowercase

import torch

from hybrid_engine.parallel.graph.annotations import Annotation, parse
from hybrid_engine.parallel.graph.calls import Call
from hybrid_engine.parallel.graph.rules import OpRule
from hybrid_engine.parallel.graph.views import view_texts

Rule = Callable[[Call], OpRule]
LIBRARY: dict[str, Rule] = {}
"""By the name of an op without its namespace and overload: `linear` for aten.linear.default."""


def rule_for(call: Call) -> OpRule:
    """How `call` can be split; ValueError for an op that nobody annotated."""
    name = op_name(call.op)
    rule = LIBRARY.get(name) or LIBRARY.get(name.split("::")[-1])
    if rule is None:
        operands = ", ".join(" ".join(_letters(len(shape), "^")) for shape in call.shapes)
        raise ValueError(
            f"op {name} has no annotation, so that nobody knows how to split it; write "
            f'register_op("{operands} -> ...")({name.replace("::", ".")}) with the names of its dimensions'
        )
    return rule(call)


def op_name(op: torch._ops.OpOverload) -> str:
    """`linear` for aten.linear.default, `namespace::name` for ops of others."""
    name = op._schema.name
    return name.removeprefix("aten::")


def of_text(call: Call, text: str, sizes: dict[str, int] | None = None, shape_argument: str | None = None) -> OpRule:
    """The rule that `text` gives for the operands of `call`; `sizes` of names that no operand has."""
    annotation = parse(text, [len(shape) for shape in call.shapes])
    known = annotation.sizes(call.shapes, sizes or {})
    return OpRule(annotation=annotation, sizes=known, shape_argument=shape_argument)


def annotate(*names: str) -> Callable[[Rule], Rule]:
    """Enters a rule for the ops of these names."""

    def enter(rule: Rule) -> Rule:
        LIBRARY.update(dict.fromkeys(names, rule))
        return rule

    return enter


def _letters(num_dims: int, mark: str = "") -> list[str]:
    return [letter + mark for letter in ascii_lowercase[:num_dims]]


def _whole(call: Call) -> OpRule:
    """An op that is not split: each rank computes all of it."""
    inputs = ["?"] * len(call.tensors)
    return of_text(call, f"{', '.join(inputs)} -> {', '.join('?' for _ in call.outputs)}")


annotate(
    *("arange", "scalar_tensor", "rand", "randn", "randint", "randperm", "linspace", "tril_indices", "triu_indices"),
    *(
        "eye",
        "lift_fresh_copy",
        "nonzero",
        "unique_dim",
        "bernoulli",
        "isin",
        "type_as",
        "multinomial",
        "empty",
        "sym_size",
    ),
    "diff",
)(_whole)


# Ops that work on every element by itself, operands broadcast against each other.
LINEAR_IN_ALL = ("add", "sub", "rsub", "neg", "clone", "alias", "contiguous", "detach", "to_dense", "lift")
"""Sums of these are these of sums, where all operands are tensors."""
LINEAR_IN_FIRST = ("mul", "div")
"""Likewise in their first operand, when it is not smaller than the second."""
ELEMENTWISE = (
    *(
        "abs",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "log2",
        "sqrt",
        "rsqrt",
        "square",
        "pow",
        "reciprocal",
        "sin",
        "cos",
    ),
    *("tanh", "sigmoid", "relu", "relu6", "gelu", "silu", "elu", "selu", "leaky_relu", "hardtanh", "hardswish", "mish"),
    *("hardsigmoid", "softplus", "logsigmoid", "log_sigmoid", "erf", "floor", "ceil", "round", "trunc", "sign", "sgn"),
    *("clamp", "clamp_min", "clamp_max", "clip", "maximum", "minimum", "fmod", "remainder", "floor_divide", "atan2"),
    *(
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "logical_and",
        "logical_or",
        "logical_not",
        "logical_xor",
        "__and__",
        "__or__",
    ),
    *("__xor__", "bitwise_and", "bitwise_or", "bitwise_not", "bitwise_xor", "where", "masked_fill", "isnan", "isinf"),
    *(
        "isfinite",
        "lerp",
        "addcmul",
        "addcdiv",
        "nan_to_num",
        "to",
        "_to_copy",
        "fill",
        "true_divide",
    ),
    *("zeros_like", "ones_like", "full_like", "empty_like", "threshold", "tan", "asin", "acos", "atan", "sinh", "cosh"),
)


@annotate(*ELEMENTWISE)
def elementwise(call: Call) -> OpRule:
    if op_name(call.op) == "to" and len(call.tensors) == 2:
        return _whole(call)
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
    names = _letters(len(shape))
    sides = [_aligned(operand, shape, names) + term for operand, term in zip(call.shapes, terms, strict=True)]
    return f"{', '.join(sides)} -> {_aligned(shape, shape, names)}{result_term}"


def _aligned(operand: Sequence[int], shape: Sequence[int], names: Sequence[str]) -> str:
    """The names of an operand that is broadcast to `shape`; a dimension that is repeated is `1`."""
    start = len(shape) - len(operand)
    return " ".join(
        names[start + i] if size == shape[start + i] and size != 1 else "1" for i, size in enumerate(operand)
    )


# Products.
@annotate("linear")
def linear(call: Call) -> OpRule:
    weight = "n k+" if call["weight"].dim() == 2 else "k+"
    result = "* n" if call["weight"].dim() == 2 else "*"
    return of_text(call, f"* k+, {weight}{', n +' if call['bias'] is not None else ''} -> {result}")


@annotate("addmm")
def addmm(call: Call) -> OpRule:
    bias = _aligned(call.shapes[0], list(call.outputs[0].shape), ["m", "n"])
    return of_text(call, f"{bias} +, m k+, k+ n -> m n")


@annotate("mm")
def mm(call: Call) -> OpRule:
    return of_text(call, "m k+, k+ n -> m n")


@annotate("bmm")
def bmm(call: Call) -> OpRule:
    return of_text(call, "b m k+, b k+ n -> b m n")


@annotate("baddbmm")
def baddbmm(call: Call) -> OpRule:
    added = _aligned(call.shapes[0], list(call.outputs[0].shape), ["b", "m", "n"])
    return of_text(call, f"{added} +, b m k+, b k+ n -> b m n")


@annotate("matmul")
def matmul(call: Call) -> OpRule:
    left, right = call.shapes
    if len(left) == 1 or len(right) == 1:
        first = "k+" if len(left) == 1 else "* k+"
        second = "k+" if len(right) == 1 else "* k+ n"
        lead = "*" if len(left) > 1 or len(right) > 1 else ""
        return of_text(call, f"{first}, {second} -> {lead}{' n' * (len(right) > 1)}")
    batch = list(call.outputs[0].shape)[:-2]
    names = _letters(len(batch))
    sides = [_aligned(shape[:-2], batch, names) for shape in (left, right)]
    return of_text(call, f"{sides[0]} m k+, {sides[1]} k+ n -> {_aligned(batch, batch, names)} m n")


@annotate("einsum")
def einsum(call: Call) -> OpRule:
    equation = call["equation"].replace(" ", "")
    if "." in equation or "->" not in equation:
        return _whole(call)
    operands, result = equation.split("->")
    summed = set(operands.replace(",", "")) - set(result)
    if any(len(set(part)) < len(part) for part in operands.split(",")):
        return _whole(call)
    sides = [" ".join(name + "+" * (name in summed) for name in part) for part in operands.split(",")]
    return of_text(call, f"{', '.join(sides)} -> {' '.join(result)}")


@annotate("scaled_dot_product_attention")
def attention(call: Call) -> OpRule:
    """Queries `* l d`, keys `* s d`, values `* s e`: samples and heads may be split, queries where it is not causal."""
    if call["dropout_p"]:
        return _whole(call)
    query, key = call["query"], call["key"]
    batch = list(query.shape)[:-2]
    names = _letters(len(batch))
    lead, keys = " ".join(names), " ".join(names)
    sizes = {}
    if call["enable_gqa"] and query.shape[-3] != key.shape[-3]:
        lead, keys = " ".join([*names[:-1], "(h g)"]), " ".join([*names[:-1], "h"])
        sizes = {"h": key.shape[-3]}
    length = "l^" if call["is_causal"] else "l"
    text = f"{lead} {length} d^, {keys} s^ d^, {keys} s^ e^"
    if call["attn_mask"] is not None:
        shape = list(call["attn_mask"].shape)
        grouped = [*batch, query.shape[-2], key.shape[-2]]
        text += ", " + _aligned(shape, grouped, [*lead_names(lead), length, "s^"])
    return of_text(call, f"{text} -> {lead} {length} e^", sizes)


def lead_names(text: str) -> list[str]:
    """The dimensions of a side of an annotation: `["b", "(h g)"]` of `"b (h g)"`."""
    return [part.replace("\0", " ") for part in text.replace("(h g)", "(h\0g)").split(" ")]


# Norms, softmax, embeddings, losses.
@annotate("layer_norm", "rms_norm")
def norm(call: Call) -> OpRule:
    shape = call["normalized_shape"]
    inner = " ".join(f"n{position}^" for position in range(len(shape)))
    return of_text(call, ", ".join([f"* {inner}"] + [inner] * (len(call.tensors) - 1)) + f" -> * {inner}")


@annotate("group_norm")
def group_norm(call: Call) -> OpRule:
    rest = " ".join(f"{letter}^" for letter in ascii_lowercase[3 : 1 + len(call.shapes[0])])
    return of_text(call, ", ".join([f"n c^ {rest}"] + ["c^"] * (len(call.tensors) - 1)) + f" -> n c^ {rest}")


@annotate("batch_norm")
def batch_norm(call: Call) -> OpRule:
    return _whole(call)


@annotate("_native_batch_norm_legit_functional")
def batch_norm_in_training(call: Call) -> OpRule:
    """Statistics are of all samples, so that channels alone can be split: result, mean, deviation, running two."""
    rest = " ".join(f"{letter}^" for letter in ascii_lowercase[3 : 1 + len(call.shapes[0])])
    results = ["c" if tensor.numel() else "?" for tensor in call.outputs[1:]]
    return of_text(call, f"n^ c {rest}{', c' * (len(call.tensors) - 1)} -> n^ c {rest}, {', '.join(results)}")


@annotate("_native_batch_norm_legit_no_training")
def batch_norm_in_evaluation(call: Call) -> OpRule:
    rest = " ".join(ascii_lowercase[3 : 1 + len(call.shapes[0])])
    return of_text(call, f"n^ c {rest}{', c' * (len(call.tensors) - 1)} -> n^ c {rest}, ?, ?")


@annotate("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "flip", "sort", "argsort", "topk", "cumprod")
@annotate("glu", "logcumsumexp", "roll", "tril", "triu")
def along_one_dim(call: Call) -> OpRule:
    """Works along one dimension (of `tril`: the last two; of `flip` and `roll`: several), the others being batch."""
    num_dims = len(call.shapes[0])
    dims = call.arguments.get("dim", call.arguments.get("dims", [-1, -2]))
    if dims == []:
        return _whole(call)
    cut = {dim % num_dims for dim in (dims if isinstance(dims, list | tuple) else [dims])} if num_dims else set()
    side = " ".join(name + "^" * (position in cut) for position, name in enumerate(_letters(num_dims)))
    return of_text(call, f"{side} -> {', '.join([side] * len(call.outputs))}")


@annotate("native_dropout", "dropout")
def dropout(call: Call) -> OpRule:
    """Not split where it draws, so that all ranks draw the same noise whatever the plan."""
    if call["train"] and call["p"]:
        return _whole(call)
    side = " ".join(_letters(len(call.shapes[0])))
    return of_text(call, f"{side} -> {', '.join([side] * len(call.outputs))}")


@annotate("embedding")
def embedding(call: Call) -> OpRule:
    if call["scale_grad_by_freq"] or call["sparse"]:
        return _whole(call)
    return of_text(call, "v^ e, * -> * e")


@annotate("cross_entropy_loss", "nll_loss_nd", "nll_loss")
def cross_entropy(call: Call) -> OpRule:
    """Samples may be split where the loss is their sum or not reduced; a mean is a sum by the time it comes here."""
    reduction = call["reduction"]
    logits, target = call.arguments[next(iter(call.arguments))], call["target"]
    weight = ", c^" if call["weight"] is not None else ""
    if reduction == 1 or logits.dim() != 2 or target.dim() != 1:
        return _whole(call)
    return of_text(call, f"m c^, m{weight} -> m" if reduction == 0 else f"m+ c^, m+{weight} ->")


@annotate("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "kl_div")
def pointwise_loss(call: Call) -> OpRule:
    names = _letters(len(call.shapes[0]), "+" if call["reduction"] == 2 else "")
    if call["reduction"] == 1 or any(shape != call.shapes[0] for shape in call.shapes):
        return _whole(call)
    side = " ".join(names)
    return of_text(call, f"{', '.join([side] * len(call.tensors))} -> {side if call['reduction'] == 0 else ''}")


# Reductions.
def _reduced(call: Call, mark: str) -> OpRule:
    """A reduction over `dim` (none: over all), along whose dimensions the op is split with `mark` alone."""
    num_dims = len(call.shapes[0])
    dims = call.arguments.get("dim")
    given = range(num_dims) if dims is None or dims == [] else dims if isinstance(dims, list | tuple) else [dims]
    cut = {dim % num_dims for dim in given} if num_dims else set()
    names = _letters(num_dims)
    operand = " ".join(name + mark * (position in cut) for position, name in enumerate(names))
    kept = ["1" if position in cut else name for position, name in enumerate(names)]
    result = " ".join(name for name in kept if name != "1" or call.arguments.get("keepdim"))
    return of_text(call, f"{operand} -> {', '.join([result] * len(call.outputs))}")


@annotate("sum")
def summed(call: Call) -> OpRule:
    return _reduced(
        call, "+" if call.outputs[0].dtype.is_floating_point or call.outputs[0].dtype == torch.int64 else "^"
    )


@annotate("mean", "amax", "amin", "max", "min", "argmax", "argmin", "prod", "logsumexp", "var", "std", "all", "any")
@annotate("norm", "linalg_vector_norm", "var_mean", "median")
def reduced(call: Call) -> OpRule:
    return elementwise(call) if len(call.tensors) == 2 else _reduced(call, "^")


# Shapes.
@annotate("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as")
def viewed(call: Call) -> OpRule:
    """The dimensions that input and result have in common, by themselves or as the outer factor of another."""
    before, after, sizes = view_texts(call.shapes[0], list(call.outputs[0].shape))
    name = op_name(call.op)
    if name == "squeeze" and not _drops_all_it_names(call):
        return _whole(call)
    argument = {"view": "size", "_unsafe_view": "size", "reshape": "shape"}.get(name)
    if (name in ("flatten", "unsqueeze", "squeeze") or argument) and "dtype" not in call.arguments:
        term = " +" if call.outputs[0].is_floating_point() else ""
        return of_text(call, f"{before}{term} -> {after}{term}", sizes, argument)
    return _whole(call)


def _drops_all_it_names(call: Call) -> bool:
    """Whether a squeeze names dimensions of size 1 alone; another may have size 1 on each rank once it is split."""
    dims = call.arguments.get("dim")
    if dims is None or not call.shapes[0]:
        return False
    return all(call.shapes[0][dim] == 1 for dim in (dims if isinstance(dims, list | tuple) else [dims]))


@annotate("transpose", "permute", "t", "numpy_T", "movedim", "swapaxes")
def permuted(call: Call) -> OpRule:
    num_dims = len(call.shapes[0])
    name = op_name(call.op)
    order = list(range(num_dims))
    if name == "permute":
        order = [dim % num_dims for dim in call["dims"]]
    elif name in ("transpose", "swapaxes"):
        first, second = (call[argument] % num_dims for argument in ("dim0", "dim1"))
        order[first], order[second] = second, first
    elif name == "t":
        order.reverse()
    else:
        return _whole(call)
    names = _letters(num_dims)
    term = " +" if call.outputs[0].is_floating_point() else ""
    return of_text(call, f"{' '.join(names)}{term} -> {' '.join(names[dim] for dim in order)}{term}")


@annotate("expand", "broadcast_to")
def expanded(call: Call) -> OpRule:
    shape = list(call.outputs[0].shape)
    names = _letters(len(shape))
    sizes = dict(zip(names, shape, strict=True))
    text = f"{_aligned(call.shapes[0], shape, names)} -> {' '.join(names)}"
    return of_text(call, text, sizes, "size")


@annotate("broadcast_tensors")
def broadcast(call: Call) -> OpRule:
    shape = list(call.outputs[0].shape)
    names = _letters(len(shape))
    sides = [_aligned(operand, shape, names) for operand in call.shapes]
    return of_text(call, f"{', '.join(sides)} -> {', '.join([_aligned(shape, shape, names)] * len(call.outputs))}")


@annotate("zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "new_empty")
def filled(call: Call) -> OpRule:
    """A tensor of one value, of which each rank can make its part; what it takes dtype and device of is not split."""
    shape = list(call.outputs[0].shape)
    names = _letters(len(shape))
    operands = ", ".join("?" for _ in call.tensors)
    return of_text(call, f"{operands} -> {' '.join(names)}", dict(zip(names, shape, strict=True)), "size")


def _cut_along(call: Call, dims: Iterable[int], drops: bool = False) -> OpRule:
    """Ops that take or join pieces along `dims`, which are not split; `drops`: results do not have them.

    Operands that are joined have a name each for the dimension along which they are, where their sizes may differ.
    """
    letters, cut = _letters(len(call.shapes[0])), set(dims)
    sides = [
        [f"{name}{number or ''}^" if position in cut else name for position, name in enumerate(letters)]
        for number in range(len(call.tensors))
    ]
    term = " +" if call.outputs[0].is_floating_point() else ""
    result = " ".join(name for name in sides[0] if not (drops and name.endswith("^")))
    operands = [" ".join(side) + term for side in sides]
    return of_text(call, f"{', '.join(operands)} -> {', '.join([result + term] * len(call.outputs))}")


@annotate(
    "slice", "split", "split_with_sizes", "chunk", "cat", "narrow", "select", "unbind", "tensor_split", "index_select"
)
def pieces(call: Call) -> OpRule:
    name = op_name(call.op)
    if name == "cat" and any(len(shape) != len(call.shapes[0]) for shape in call.shapes):
        return _whole(call)
    if name == "index_select":
        return _whole(call)
    if name == "slice" and list(call.outputs[0].shape) == call.shapes[0]:
        return elementwise(call)
    return _cut_along(call, [call.dim()], drops=name in ("select", "unbind"))


@annotate("stack")
def stacked(call: Call) -> OpRule:
    names = _letters(len(call.shapes[0]))
    position = call["dim"] % (len(names) + 1)
    result = " ".join([*names[:position], "1" if len(call.tensors) == 1 else "z^", *names[position:]])
    sides = ", ".join([" ".join(names)] * len(call.tensors))
    return of_text(call, f"{sides} -> {result}")


@annotate("select_scatter", "slice_scatter")
def written(call: Call) -> OpRule:
    cut = call.dim()
    names = [name + "^" * (position == cut) for position, name in enumerate(_letters(len(call.shapes[0])))]
    piece = names if op_name(call.op) == "slice_scatter" else [name for name in names if not name.endswith("^")]
    if op_name(call.op) == "slice_scatter":
        piece = [name if position != cut else "z^" for position, name in enumerate(names)]
    return of_text(call, f"{' '.join(names)}, {' '.join(piece)} -> {' '.join(names)}")


@annotate("gather", "scatter", "scatter_add", "take_along_dim")
def gathered(call: Call) -> OpRule:
    """Along `dim` by an index that may be shorter there, and must not be elsewhere for a split."""
    cut = call.dim()
    shapes = call.shapes
    same = all(shape[:cut] + shape[cut + 1 :] == shapes[0][:cut] + shapes[0][cut + 1 :] for shape in shapes)
    if not same:
        return _whole(call)
    names = _letters(len(shapes[0]))
    sides = [
        " ".join(f"{chr(ord('A') + number)}^" if position == cut else name for position, name in enumerate(names))
        for number in range(len(shapes))
    ]
    result = sides[1] if op_name(call.op) in ("gather", "take_along_dim") else sides[0]
    return of_text(call, f"{', '.join(sides)} -> {result}")


@annotate("one_hot")
def one_hot(call: Call) -> OpRule:
    return of_text(call, "* -> * z^")


@annotate("constant_pad_nd", "pad")
def padded(call: Call) -> OpRule:
    num_dims = len(call.shapes[0])
    count = len(call["pad"]) // 2
    names = [name + "^" * (position >= num_dims - count) for position, name in enumerate(_letters(num_dims))]
    return of_text(call, f"{' '.join(names)} -> {' '.join(names)}")


@annotate(
    "index", "index_put", "masked_scatter", "index_add", "masked_select", "repeat", "repeat_interleave", "index_copy"
)
def indexed(call: Call) -> OpRule:
    return _whole(call)


# Convolutions and pooling, over a batch.
@annotate("conv1d", "conv2d", "conv3d", "convolution")
def convolution(call: Call) -> OpRule:
    """Samples, channels out and (as a sum) channels in; images are not cut."""
    num_dims = len(call["weight"].shape)
    if call.arguments.get("transposed") or len(call.shapes[0]) != num_dims:
        return _whole(call)
    images, kernel = (" ".join(f"{letter}{position}^" for position in range(num_dims - 2)) for letter in "xy")
    channels = ("c+", "o") if call["groups"] == 1 else ("c^", "o^")
    inner = "c+" if call["groups"] == 1 else "i^"
    bias = f", {channels[1]} +" if call["bias"] is not None else ""
    return of_text(call, f"n {channels[0]} {images}, {channels[1]} {inner} {kernel}{bias} -> n {channels[1]} {images}")


@annotate("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d")
@annotate("adaptive_avg_pool2d", "adaptive_max_pool2d", "upsample_nearest2d", "upsample_bilinear2d")
def pooled(call: Call) -> OpRule:
    num_images = {"1": 1, "2": 2, "3": 3}[op_name(call.op).rstrip("d")[-1]]
    lead = len(call.shapes[0]) - num_images
    names = [name + "^" * (position >= lead) for position, name in enumerate(_letters(len(call.shapes[0])))]
    return of_text(call, f"{' '.join(names)} -> {', '.join([' '.join(names)] * len(call.outputs))}")


def annotated_by_text(text: str) -> Rule:
    """The rule of an op whose annotation is `text`, one operand per argument (`register_op`)."""
    return lambda call: _registered(call, text)


def _registered(call: Call, text: str) -> OpRule:
    sides = text.split("->")[0].split(",")
    values = list(call.arguments.items())
    if len(sides) > len(values):
        raise ValueError(f"annotation {text!r} has {len(sides)} operands, {call.op} has {len(values)} arguments")
    tensors = [value for _, value in values[: len(sides)]]
    if any(isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value) for value in tensors):
        raise ValueError(f"annotation {text!r}: an argument of {call.op} is a list of tensors; give them one by one")
    is_tensor = [isinstance(value, torch.Tensor) for value in tensors]
    whole = parse(text, [value.dim() if isinstance(value, torch.Tensor) else None for value in tensors])
    keywords = {name: value for name, value in values if isinstance(value, int) and not isinstance(value, bool)}
    used = frozenset(keywords) & frozenset(whole._names)
    sizes = whole.sizes([list(v.shape) if isinstance(v, torch.Tensor) else None for v in tensors], keywords)
    inputs = tuple(pattern for pattern, is_one in zip(whole.inputs, is_tensor, strict=True) if is_one)
    annotation = Annotation(inputs, whole.outputs, whole.summed, whole.fixed)
    return OpRule(annotation=annotation, sizes=sizes, keywords=used)
