"""Finds how many rows a CPU's product should take at once, so that a row has the same bits in all places.

A library computes a few rows together, and the remaining ones by other code, which may sum in another order. The number
depends on the processor: MKL's AVX2 code takes 6 rows, so that the last two of 32 differ from the first; its AVX-512
code gives 32 rows the same bits. So products are tried.
"""

from collections.abc import Callable, Iterable, Sequence

import torch

Trial = Callable[[int, torch.Generator], Iterable[torch.Tensor]]


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
