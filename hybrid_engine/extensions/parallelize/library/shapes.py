"""Rules for reductions, and for ops that rearrange, cut, join and fill tensors."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from operator import mul
from string import ascii_lowercase

import torch

from hybrid_engine.extensions.parallelize.library.entries import (
    aligned,
    annotate,
    elementwise,
    letters,
    of_text,
    op_name,
    whole,
)
from hybrid_engine.extensions.parallelize.library.rules import Call, OpRule

Factors = list[list[int]]
"""For each dimension of a shape, the numbers of the common factors that it is made of, outermost first."""


def _reduced(call: Call, mark: str) -> OpRule:
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
def summed(call: Call) -> OpRule:
    return _reduced(
        call, "+" if call.outputs[0].dtype.is_floating_point or call.outputs[0].dtype == torch.int64 else "^"
    )


@annotate("mean", "amax", "amin", "max", "min", "argmax", "argmin", "prod", "logsumexp", "var", "std", "all", "any")
@annotate("norm", "linalg_vector_norm", "var_mean", "std_mean", "median", "nanmedian", "mode", "nansum", "kthvalue")
def reduced(call: Call) -> OpRule:
    return elementwise(call) if len(call.tensors) == 2 else _reduced(call, "^")


@annotate("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as")
def viewed(call: Call) -> OpRule:
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


def _drops_all_it_names(call: Call) -> bool:
    """Whether a squeeze names only dimensions of size 1; any other could get size 1 on each rank when it is split."""
    dims = call.arguments.get("dim")
    if dims is None or not call.shapes[0]:
        return False
    return all(call.shapes[0][dim] == 1 for dim in (dims if isinstance(dims, list | tuple) else [dims]))


@annotate("transpose", "permute", "t")
def permuted(call: Call) -> OpRule:
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
def expanded(call: Call) -> OpRule:
    shape = list(call.outputs[0].shape)
    names = letters(len(shape))
    sizes = dict(zip(names, shape, strict=True))
    text = f"{aligned(call.shapes[0], shape, names)} -> {' '.join(names)}"
    return of_text(call, text, sizes, "size")


@annotate("broadcast_tensors")
def broadcast(call: Call) -> OpRule:
    shape = list(call.outputs[0].shape)
    names = letters(len(shape))
    sides = [aligned(operand, shape, names) for operand in call.shapes]
    return of_text(call, f"{', '.join(sides)} -> {', '.join([aligned(shape, shape, names)] * len(call.outputs))}")


@annotate("zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "new_empty")
def filled(call: Call) -> OpRule:
    """A tensor of one value, of which each rank can make its part. An operand for dtype and device is not split."""
    shape = list(call.outputs[0].shape)
    names = letters(len(shape))
    operands = ", ".join("?" for _ in call.tensors)
    return of_text(call, f"{operands} -> {' '.join(names)}", dict(zip(names, shape, strict=True)), "size")


def _cut_along(call: Call, dims: Iterable[int], drops: bool = False) -> OpRule:
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
def pieces(call: Call) -> OpRule:
    name = op_name(call.op)
    if name == "cat" and any(len(shape) != len(call.shapes[0]) for shape in call.shapes):
        return whole(call)
    if name == "index_select":
        return whole(call)
    if name == "slice" and list(call.outputs[0].shape) == call.shapes[0]:
        return elementwise(call)
    return _cut_along(call, [call.dim()], drops=name in ("select", "unbind"))


@annotate("stack")
def stacked(call: Call) -> OpRule:
    names = letters(len(call.shapes[0]))
    position = call["dim"] % (len(names) + 1)
    result = " ".join([*names[:position], "1" if len(call.tensors) == 1 else "z^", *names[position:]])
    sides = ", ".join([" ".join(names)] * len(call.tensors))
    return of_text(call, f"{sides} -> {result}")


@annotate("select_scatter", "slice_scatter")
def written(call: Call) -> OpRule:
    cut = call.dim()
    names = [name + "^" * (position == cut) for position, name in enumerate(letters(len(call.shapes[0])))]
    piece = names if op_name(call.op) == "slice_scatter" else [name for name in names if not name.endswith("^")]
    if op_name(call.op) == "slice_scatter":
        piece = [name if position != cut else "z^" for position, name in enumerate(names)]
    return of_text(call, f"{' '.join(names)}, {' '.join(piece)} -> {' '.join(names)}")


@annotate("gather", "scatter", "scatter_add", "take_along_dim")
def gathered(call: Call) -> OpRule:
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
def one_hot(call: Call) -> OpRule:
    return of_text(call, "* -> * z^")


@annotate("constant_pad_nd", "pad")
def padded(call: Call) -> OpRule:
    num_dims = len(call.shapes[0])
    count = len(call["pad"]) // 2
    names = [name + "^" * (position >= num_dims - count) for position, name in enumerate(letters(num_dims))]
    return of_text(call, f"{' '.join(names)} -> {' '.join(names)}")


@annotate(
    "index", "index_put", "masked_scatter", "index_add", "masked_select", "repeat", "repeat_interleave", "index_copy",
    "index_fill", "index_reduce", "scatter_reduce",
)  # fmt: skip
def indexed(call: Call) -> OpRule:
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
