"""How many rows a CPU's product takes at once, so that a row has the same bits in all places.

A library computes a few rows together, and those that are left over by other code, which may sum in another order. How
many depends on the processor: MKL's AVX2 code takes 6 rows, so that the last two of 32 differ from the first; its
AVX-512 code gives 32 rows the same bits. So products are tried.
"""

from collections.abc import Callable, Iterable, Sequence

import torch

Trial = Callable[[int, torch.Generator], Iterable[torch.Tensor]]


def place_free_rows(choices: Sequence[int], trial: Trial) -> int:
    """The first choice for which `trial` has equal rows only; where there is none, the first of all.

    `trial(num_rows, generator)` gives products `[..., num_rows, n]` of rows that are all the same. An engine compares
    bits when it is built, and refuses where they differ: what a trial overlooks does no harm.
    """
    for num_rows in choices:
        products = trial(num_rows, torch.Generator().manual_seed(0))
        if all(torch.equal(product, product[..., :1, :].expand_as(product)) for product in products):
            return num_rows
    return choices[0]
