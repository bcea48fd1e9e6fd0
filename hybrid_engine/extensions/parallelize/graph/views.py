"""Which dimensions a view keeps, merges and splits, as the two sides of an annotation."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul
from string import ascii_lowercase

Factors = list[list[int]]
"""For each dimension of a shape, the numbers of the common factors that it is made of, outermost first."""


def view_texts(before: Sequence[int], after: Sequence[int]) -> tuple[str, str, dict[str, int]]:
    """Both sides of the annotation of a view from shape `before` to `after`, and the sizes of its names.

    Both shapes are cut into common factors, outermost first: [2, 12] viewed as [2, 3, 4] is `a (b c) -> a b c`. A
    dimension that has a part of a factor alone is not split: in [4, 6] viewed as [6, 4], none is.
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
    """All factors that share a dimension, of either shape, with one that is fixed."""
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
