"""The tiles of a head's logits in plain torch: sums over them, and the gradient of their products.

N tokens, E hidden size, V vocabulary; a tile is some columns of `[N, V]`.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from hybrid_engine.ops import cpu_kernels
from hybrid_engine.ops.cpu_kernels import product, use_onednn

TILE_BYTES = 8 * 2**20  # of fp32 logits that exist at once, so that they fit a CPU's cache
TILE_BYTES_ON_GPU = 64 * 2**20  # large enough for a product that fills the device
LEAST_COLUMNS = 256
LEAST_LOGIT = -1e30  # its exp is 0 next to any other logit; sums over -inf would contain exp(-inf - -inf) and 0 * -inf
FAR = 40.0  # exp(40) times the vocabulary is far below the fp32 maximum, 3e38


class LogitShape(NamedTuple):
    """The function from a head's products to logits."""

    scale: float = 1.0  # Cohere's logit_scale, the inverse of Granite's logits_scaling
    softcap: float | None = None  # Gemma's final_logit_softcapping
    temperature: float = 1.0

    def check(self) -> None:
        """Raises ValueError unless each value is finite and not 0, and softcap and temperature are positive."""
        for name, value in self._asdict().items():
            if value is None:
                continue
            if not math.isfinite(value) or value == 0 or (name != "scale" and value < 0):
                rule = "finite and not 0" if name == "scale" else "finite and above 0"
                raise ValueError(f"{name}={value!r} must be {rule}")

    def apply_(self, products: torch.Tensor) -> torch.Tensor:
        """fp32 logits of the products, of any shape; overwrites the products."""
        if self.scale != 1.0:
            products.mul_(self.scale)
        if self.softcap is not None:
            products.div_(self.softcap).tanh_().mul_(self.softcap)
        logits = products.float()
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def slope(self, logits: torch.Tensor) -> torch.Tensor | float:
        """The derivative of a logit by its product: one number, or with a softcap a tensor like `logits`."""
        slope = self.scale / self.temperature
        if self.softcap is None:
            return slope
        # Beyond the softcap there is only `LEAST_LOGIT`, which stands for no logit.
        return (logits * (self.temperature / self.softcap)).square_().neg_().add_(1).clamp_min_(0).mul_(slope)


PLAIN = LogitShape()


class Head(NamedTuple):
    """A linear head, or some rows of it."""

    weight: torch.Tensor  # [V, E]
    bias: torch.Tensor | None  # [V]
    shape: LogitShape
    kept: torch.Tensor | None = None  # [N, V] bool: False for a token that has no logit in that row; None: all have

    def tiles(self, num_rows: int) -> Iterator[tuple[slice, "Head"]]:
        """Parts of the vocabulary and the head of each, such that the fp32 logits of `num_rows` rows fit into a tile.

        The gradient of the part of the weight does too.
        """
        width = tile_width(max(num_rows, self.weight.shape[1]), self.weight.is_cuda)
        for first in range(0, len(self.weight), width):
            columns = slice(first, first + width)
            yield columns, self.part(columns)

    def part(self, columns: slice) -> "Head":
        """The head of a part of the vocabulary."""
        bias, kept = (None if self.bias is None else self.bias[columns]), self.kept
        return self._replace(weight=self.weight[columns], bias=bias, kept=None if kept is None else kept[:, columns])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, V]` fp32; -inf from a bias, and what is not kept, becomes `LEAST_LOGIT`."""
        logits = self.shape.apply_(product(hidden, self.weight.t(), self.bias))
        if self.bias is not None:
            logits.clamp_min_(LEAST_LOGIT)
        return logits if self.kept is None else logits.masked_fill_(~self.kept, LEAST_LOGIT)


class HeadPair(NamedTuple):
    """Hidden states of the same tokens in a student and a teacher, and both heads, or the same rows of both."""

    hidden: torch.Tensor  # [N, E]
    student: Head
    taught: torch.Tensor  # [N, F]: the teacher's hidden states
    teacher: Head

    def tiles(self, num_rows: int) -> Iterator[tuple[slice, "HeadPair"]]:
        """Parts of the vocabulary, half as wide as those of one head, and the pair of each."""
        widest = max(num_rows, self.student.weight.shape[1], self.teacher.weight.shape[1])
        width = tile_width(2 * widest, self.student.weight.is_cuda)
        for first in range(0, len(self.student.weight), width):
            columns = slice(first, first + width)
            yield columns, self._replace(student=self.student.part(columns), teacher=self.teacher.part(columns))

    def rows(self, rows: slice) -> "HeadPair":
        """The pair for some of the tokens."""
        return self._replace(hidden=self.hidden[rows], taught=self.taught[rows])

    def logits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The student's and the teacher's, `[N, V]` fp32 each."""
        return self.student.logits(self.hidden), self.teacher.logits(self.taught)


def tile_width(num_rows: int, is_on_gpu: bool) -> int:
    """Number of columns of a tile of `num_rows` rows."""
    return max(LEAST_COLUMNS, (TILE_BYTES_ON_GPU if is_on_gpu else TILE_BYTES) // 4 // max(num_rows, 1))


class Sums(NamedTuple):
    """Sums for each token over a part of the vocabulary, fp32, `[N]` each; `base` is near its largest logit."""

    base: torch.Tensor
    total: torch.Tensor  # of exp(logit - base)
    chosen: torch.Tensor  # the target's logit, 0 if it is in another part
    weighted: torch.Tensor  # of exp(logit - base) * (logit - base); 0 if no entropy is computed


def merged(parts: Sums) -> Sums:
    """Combines the sums of all parts of the vocabulary, `[P, N]` each."""
    base = parts.base.amax(0)
    fading = torch.exp(parts.base - base)
    weighted = torch.where(fading > 0, parts.weighted - (base - parts.base) * parts.total, 0.0)
    return Sums(base, (parts.total * fading).sum(0), parts.chosen.sum(0), (weighted * fading).sum(0))


class Tile(NamedTuple):
    """The data of a tile that a forward pass may keep."""

    exps: torch.Tensor  # [N, columns] fp32: exp(logit - base)
    base: torch.Tensor  # [N] fp32


def running_sums(
    hidden: torch.Tensor,
    tiles: Iterable[tuple[slice, Head]],
    places: torch.Tensor,
    with_entropy: bool,
    with_rows: bool,
    keep: Callable[[int, Tile], None],
) -> tuple[Sums, torch.Tensor | None]:
    """The sums over `tiles`; with rows also `[N, E]` fp32: the sum of exp(logit - base), its slope and the head's row.

    Args:
        hidden: `[N, E]`.
        places: `[N]`, the targets counted from the first row of the head; other values are in another part.
        keep: called with every tile's first column and its `Tile`.
    """
    sums = _RunningSums(hidden, places, with_entropy, with_rows)
    for columns, tile in tiles:
        exps = sums.add(columns, tile, hidden)
        keep(columns.start, Tile(exps, sums.base))
        del exps  # before the next tile is computed
    return Sums(sums.base, sums.total, sums.chosen, sums.weighted), sums.rows


def far_of(dtype: torch.dtype) -> float:
    """The distance above a base from which a logit raises it: none in 16 bits, whose operands then stay below 1."""
    return FAR if dtype == torch.float32 else 0.0


def raised_base(base: torch.Tensor, largest: torch.Tensor, far: float) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The new bases, and the factors of sums of exp(logit - base), `[N]` each; None on a CPU if they stay.

    A base becomes its row's `largest` logit of the next tile where that is more than `far` above it.
    """
    is_far = largest > base + far
    if is_far.is_cpu and not is_far.any():  # on other devices the check would wait for the device
        return None
    raised = torch.where(is_far, largest, base)
    return raised, torch.where(is_far, torch.exp(base - raised), 1.0)


class _RunningSums:
    """Sums of exp(logit - base) over the tiles so far.

    `base` is near the largest logit of a row: the largest of the first tile, until a later one is far above it.
    """

    def __init__(self, hidden: torch.Tensor, places: torch.Tensor, with_entropy: bool, with_rows: bool):
        self.places = places
        self.far = far_of(hidden.dtype)
        self.base = hidden.new_full(places.shape, -torch.inf, dtype=torch.float32)
        self.total, self.chosen, self.weighted = (torch.zeros_like(self.base) for _ in range(3))
        self.with_entropy = with_entropy
        self.rows = torch.zeros_like(hidden, dtype=torch.float32) if with_rows else None

    def add(self, columns: slice, head: Head, hidden: torch.Tensor) -> torch.Tensor:
        """Adds a tile; returns its exp(logit - base), `[N, columns]` fp32, valid until the base is raised."""
        logits = head.logits(hidden)
        self._find_chosen(columns.start, logits)
        self._raise_base(logits.amax(1))
        slope = head.shape.slope(logits) if self.rows is not None else 1.0
        weights = logits.clone() if self.with_entropy else logits
        self.total += exp_rows(weights, self.base)
        if self.with_entropy:
            self.weighted += torch.linalg.vecdot(weights, logits.sub_(self.base[:, None]))
        if self.rows is not None:
            add_product(self.rows, times(weights, slope).to(head.weight.dtype), head.weight)
        return weights

    def _raise_base(self, largest: torch.Tensor) -> None:
        raised = raised_base(self.base, largest, self.far)
        if raised is None:
            return
        base, fading = raised
        if self.with_entropy:
            lifted = torch.where((base > self.base) & (fading > 0), (base - self.base) * self.total, 0.0)
            self.weighted.sub_(lifted).mul_(fading)
        self.base = base
        self.total *= fading
        if self.rows is not None:
            self.rows *= fading[:, None]

    def _find_chosen(self, first: int, logits: torch.Tensor) -> None:
        places, is_inside = _places_inside(self.places - first, logits.shape[1])
        self.chosen = torch.where(is_inside, logits.gather(1, places).squeeze(1), self.chosen)


def gradient_of_products(
    tile: Head,
    hidden: torch.Tensor,
    places: torch.Tensor,
    log_total: torch.Tensor,
    above: torch.Tensor,
    of_entropy: tuple[torch.Tensor, torch.Tensor] | None,
    kept: Tile | None,
) -> torch.Tensor:
    """`[N, columns]`, in the dtype of the weights: the gradient of a tile's products.

        d logprob / d logit_v = [v is the target] - p_v        d entropy / d logit_v = -p_v (log p_v + entropy)

    Args:
        places: `[N]`, the targets counted from the tile's first column.
        log_total: `[N]`, logsumexp of all logits.
        above: `[N]`, the incoming gradient of the log-probabilities.
        of_entropy: the incoming gradient of the entropy, and the entropy.
        kept: the tile that the forward pass kept, or None.
    """
    if kept is not None:
        slope = tile.shape.slope(kept.exps)
        gradient = kept.exps * (torch.exp(kept.base - log_total) * -above)[:, None]
    elif of_entropy is None:
        gradient = tile.logits(hidden)
        slope = tile.shape.slope(gradient)
        exp_rows(gradient, log_total, -above)
    else:
        logits = tile.logits(hidden)
        slope = tile.shape.slope(logits)
        above_entropy, entropy = of_entropy
        logprobs = logits.sub_(log_total[:, None])
        probs = logprobs.exp()
        gradient = logprobs.add_(entropy[:, None]).mul_(above_entropy[:, None]).add_(above[:, None]).mul_(probs).neg_()
    places, is_inside = _places_inside(places, gradient.shape[1])
    gradient.scatter_add_(1, places, torch.where(is_inside, above, 0.0)[:, None])
    return times(gradient, slope).to(tile.weight.dtype)


def add_product(sums: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Adds `left @ right` to `sums`, fp32."""
    if left.dtype == sums.dtype and not use_onednn(left, right):
        sums.addmm_(left, right)
    else:
        sums += product_fp32(left, right)


def product_fp32(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`left @ right` in fp32, a term of a sum; on a CPU a 16-bit product is rounded to 16 bits first."""
    if left.is_cuda and left.dtype.itemsize == 2:
        return torch.mm(left, right, out_dtype=torch.float32)
    return product(left, right).float()


def exp_rows(values: torch.Tensor, shift: torch.Tensor, factor: torch.Tensor | None = None) -> torch.Tensor:
    """Replaces `values [N, columns]` with factor * exp(values - shift) in place; returns the sums along rows, `[N]`."""
    if cpu_kernels.can_search(values):
        return cpu_kernels.exp_rows(values, shift, factor)
    values.sub_(shift[:, None]).exp_()
    return (values if factor is None else values.mul_(factor[:, None])).sum(1)


def times(values: torch.Tensor, slope: torch.Tensor | float) -> torch.Tensor:
    """`values` times `LogitShape.slope`, in place."""
    return values if isinstance(slope, float) and slope == 1.0 else values.mul_(slope)


def _places_inside(places: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`[N, 1]`: the places in a tile, arbitrary if not inside; `[N]`: True if inside."""
    return places.clamp(0, width - 1)[:, None], (places >= 0) & (places < width)
