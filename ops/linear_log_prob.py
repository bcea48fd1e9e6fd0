"""Log-probability and entropy of tokens straight from hidden states and the head's weights: the logits of the whole
vocabulary never exist at once.

    logit_v   = cap(scale * (h . w_v + b_v)) / temperature      cap(x) = softcap * tanh(x / softcap)
    logprob_t = logit_t - logsumexp_v(logit_v)
    entropy   = logsumexp_v(logit_v) - sum_v p_v logit_v         p = softmax(logit)

The same function of the weights as the sampler's (`ops/log_prob.py`): products in the dtype of the weights, everything
after them in fp32. The vocabulary is read in tiles with a running maximum and sum (online softmax, Milakov and
Gimelshein 2018), as Cut Cross-Entropy does (Wijmans et al. 2024, arXiv:2411.09009).

What comes from above is one number per token. Where the head is frozen, the gradient of the hidden states, the
target's row minus the expected row of the head, is made in the forward pass from the same tiles; a trained head's own
gradient needs the tiles a second time. Of these the first are kept, up to a fixed number of bytes, which saves small
problems the fourth product; all others are made again.

N tokens, E hidden size, V vocabulary.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn import functional

from hybrid_engine.ops import cpu_kernels

TILE_BYTES = 8 * 2**20  # of fp32 logits that exist at once
ROWS_AT_ONCE = 2048
LEAST_COLUMNS = 256
KEPT_BYTES = 64 * 2**20  # of tiles from a forward pass to its backward pass
FAR = 40.0  # exp(40) times the vocabulary is far from what fp32 holds, 3e38


class LogitShape(NamedTuple):
    """What a model does to the products of its head before they are logits."""

    scale: float = 1.0  # Cohere's logit_scale, the inverse of Granite's logits_scaling
    softcap: float | None = None  # Gemma's final_logit_softcapping
    temperature: float = 1.0

    def apply(self, products: torch.Tensor) -> torch.Tensor:
        """fp32 logits of the products, of any shape."""
        if self.scale != 1.0:
            products = products * self.scale
        if self.softcap is not None:
            products = torch.tanh(products / self.softcap) * self.softcap
        logits = products.float()
        return logits if self.temperature == 1.0 else logits / self.temperature

    def slope(self, logits: torch.Tensor) -> torch.Tensor | float:
        """The derivative of a logit by its product: one number, or with a softcap a tensor like `logits`."""
        slope = self.scale / self.temperature
        if self.softcap is None:
            return slope
        return slope * (1 - (logits * (self.temperature / self.softcap)).square())


PLAIN = LogitShape()


class TokenLogProbs(NamedTuple):
    """What `linear_log_prob` gives."""

    logprobs: torch.Tensor  # [N] fp32
    entropy: torch.Tensor | None  # [N] fp32, in nats; None unless asked for


def linear_log_prob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    shape: LogitShape = PLAIN,
    with_entropy: bool = False,
) -> TokenLogProbs:
    """Log-probabilities of `targets` under the softmax of a linear head, differentiable in hidden, weight and bias.

    Args:
        hidden: `[N, E]`, any float dtype.
        weight: `[V, E]`, of the same dtype.
        targets: `[N]` int64, each in `[0, V)`.
        bias: `[V]`.
        shape: temperature, scale and softcap of the logits.
        with_entropy: also the entropy of each distribution, which costs one more pass over the tiles.
    """
    logprobs, entropy = _LinearLogProb.apply(hidden, weight, bias, targets, shape, with_entropy)
    return TokenLogProbs(logprobs, entropy if with_entropy else None)


class _Head(NamedTuple):
    weight: torch.Tensor  # [V, E]
    bias: torch.Tensor | None  # [V]
    shape: LogitShape

    def tiles(self, num_rows: int) -> Iterator[tuple[slice, "_Head"]]:
        """Parts of the vocabulary and the head of each, such that the fp32 logits of so many rows fit into a tile."""
        width = max(LEAST_COLUMNS, TILE_BYTES // 4 // max(num_rows, 1))
        for first in range(0, len(self.weight), width):
            columns = slice(first, first + width)
            yield (
                columns,
                self._replace(weight=self.weight[columns], bias=None if self.bias is None else self.bias[columns]),
            )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, V]` fp32."""
        return self.shape.apply(functional.linear(hidden, self.weight, self.bias))


class _RunningSums:
    """Sums over the tiles seen so far, of exp(logit - base).

    `base` is near the largest logit of a row: the largest of the first tile, until a later one is far above it.
    """

    def __init__(self, hidden: torch.Tensor, targets: torch.Tensor, with_entropy: bool, with_rows: bool):
        self.targets = targets
        self.far = FAR if hidden.dtype == torch.float32 else 0.0  # what is multiplied in 16 bits stays below 1
        self.base = hidden.new_full(targets.shape, -torch.inf, dtype=torch.float32)
        self.total = torch.zeros_like(self.base)
        self.chosen = torch.zeros_like(self.base)  # the target's logit
        self.weighted = torch.zeros_like(self.base) if with_entropy else None  # times (logit - base)
        # [N, E]: times its slope and the row of the head
        self.rows = torch.zeros_like(hidden, dtype=torch.float32) if with_rows else None

    def add(self, columns: slice, head: _Head, hidden: torch.Tensor) -> torch.Tensor:
        """Adds a tile; its exp(logit - base), `[N, columns]` fp32, which is valid until the base is raised."""
        logits = head.logits(hidden)
        self._find_chosen(columns.start, logits)
        self._raise_base(logits.amax(1))
        slope = head.shape.slope(logits) if self.rows is not None else 1.0
        weights = logits if self.weighted is None else logits.clone()
        self.total += _exp_rows(weights, self.base)
        if self.weighted is not None:
            self.weighted += torch.linalg.vecdot(weights, logits.sub_(self.base[:, None]))
        if self.rows is not None:
            _add_product(self.rows, _times(weights, slope).to(head.weight.dtype), head.weight)
        return weights

    def _raise_base(self, largest: torch.Tensor) -> None:
        is_far = largest > self.base + self.far
        if is_far.any():
            base = torch.where(is_far, largest, self.base)
            fading = torch.where(is_far, torch.exp(self.base - base), 1.0)
            if self.weighted is not None:
                lifted = torch.where(fading > 0, (base - self.base) * self.total, 0.0)
                self.weighted.sub_(lifted).mul_(fading)
            self.base = base
            self.total *= fading
            if self.rows is not None:
                self.rows *= fading[:, None]

    def _find_chosen(self, first: int, logits: torch.Tensor) -> None:
        places, is_inside = _places_inside(self.targets, first, logits.shape[1])
        self.chosen = torch.where(is_inside, logits.gather(1, places).squeeze(1), self.chosen)

    def log_total(self) -> torch.Tensor:
        """`[N]`: logsumexp of all logits."""
        return self.base + self.total.log()


def _exp_rows(values: torch.Tensor, shift: torch.Tensor, factor: torch.Tensor | None = None) -> torch.Tensor:
    """`values [N, columns]` become factor * exp(values - shift) in place; their sums along the rows, `[N]`."""
    if cpu_kernels.can_search(values):
        return cpu_kernels.exp_rows(values, shift, factor)
    values.sub_(shift[:, None]).exp_()
    return (values if factor is None else values.mul_(factor[:, None])).sum(1)


def _add_product(sums: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """`sums`, fp32, get what `left @ right` is."""
    if left.dtype == sums.dtype:
        sums.addmm_(left, right)
    else:
        sums += left @ right


def _times(values: torch.Tensor, slope: torch.Tensor | float) -> torch.Tensor:
    return values if isinstance(slope, float) and slope == 1.0 else values.mul_(slope)


def _places_inside(targets: torch.Tensor, first: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`[N, 1]`: where the targets stand in a tile, any place if not inside; `[N]`: True where they do."""
    places = targets - first
    return places.clamp(0, width - 1)[:, None], (places >= 0) & (places < width)


class _KeptTile(NamedTuple):
    exps: torch.Tensor  # [N, columns] fp32: exp(logit - base)
    base: torch.Tensor  # [N] fp32


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, shape, with_entropy):
        head = _Head(weight, bias, shape)
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        ctx.shape, ctx.is_made = shape, of_hidden and not (of_weight or of_bias or with_entropy)
        ctx.kept, num_kept_bytes = {}, 0
        can_keep = (of_weight or of_bias) and not with_entropy and shape.softcap is None
        parts: list[_Finished] = []
        for some, their_targets in zip(hidden.split(ROWS_AT_ONCE), targets.split(ROWS_AT_ONCE), strict=True):
            sums = _RunningSums(some, their_targets, with_entropy, ctx.is_made)
            for columns, tile in head.tiles(min(len(hidden), ROWS_AT_ONCE)):  # as the backward pass cuts them
                exps = sums.add(columns, tile, some)
                num_kept_bytes += exps.nbytes
                if can_keep and num_kept_bytes <= KEPT_BYTES:
                    ctx.kept[len(parts), columns.start] = _KeptTile(exps, sums.base)
            parts.append(_finish(sums, head))
        logprobs, log_total, entropy, gradient = (
            torch.cat(part) if part[0] is not None else None for part in zip(*parts, strict=True)
        )
        ctx.save_for_backward(*([gradient] if ctx.is_made else [hidden, weight, bias, targets, log_total, entropy]))
        return logprobs, entropy

    @staticmethod
    def backward(ctx, above, above_entropy):
        if ctx.is_made:
            (gradient,) = ctx.saved_tensors
            return (gradient * above[:, None]).to(gradient.dtype), None, None, None, None, None
        return (*_gradients(ctx, above, above_entropy), None, None, None)


class _Finished(NamedTuple):
    """What the tiles gave for some rows; None: not asked for."""

    logprobs: torch.Tensor  # [N]
    log_total: torch.Tensor  # [N]
    entropy: torch.Tensor | None  # [N]
    gradient: torch.Tensor | None  # [N, E]: of the log-probability by the hidden states


def _finish(sums: _RunningSums, head: _Head) -> _Finished:
    log_total = sums.log_total()
    entropy = None if sums.weighted is None else sums.total.log() - sums.weighted / sums.total
    gradient = None
    if sums.rows is not None:
        slope = head.shape.slope(sums.chosen[:, None])
        gradient = (head.weight[sums.targets] * slope - sums.rows / sums.total[:, None]).to(head.weight.dtype)
    return _Finished(sums.chosen - log_total, log_total, entropy, gradient)


def _gradients(ctx, above: torch.Tensor, above_entropy: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Gradients of hidden states, weight and bias, the tiles made once more."""
    hidden, weight, bias, targets, log_total, entropy = ctx.saved_tensors
    head = _Head(weight, bias, ctx.shape)
    needs = ctx.needs_input_grad
    of_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs[0] else None
    of_weight, of_bias = (
        torch.empty_like(x) if needed else None for x, needed in zip((weight, bias), needs[1:3], strict=True)
    )
    for columns, tile in head.tiles(min(len(hidden), ROWS_AT_ONCE)):
        tile_of_weight = torch.zeros_like(tile.weight, dtype=torch.float32) if needs[1] else None
        tile_of_bias = torch.zeros_like(tile.bias, dtype=torch.float32) if needs[2] else None
        for part, first in enumerate(range(0, len(hidden), ROWS_AT_ONCE)):
            rows = slice(first, first + ROWS_AT_ONCE)
            of_entropy = None if above_entropy is None else (above_entropy[rows], entropy[rows])
            kept = ctx.kept.get((part, columns.start))
            of_products = _of_products(
                tile, hidden[rows], targets[rows] - columns.start, log_total[rows], above[rows], of_entropy, kept
            )
            if of_hidden is not None:
                _add_product(of_hidden[rows], of_products, tile.weight)
            if tile_of_weight is not None:
                _add_product(tile_of_weight, of_products.T, hidden[rows])
            if tile_of_bias is not None:
                tile_of_bias += of_products.sum(0, dtype=torch.float32)
        if of_weight is not None:
            of_weight[columns] = tile_of_weight
        if of_bias is not None:
            of_bias[columns] = tile_of_bias
    return [None if of_hidden is None else of_hidden.to(hidden.dtype), of_weight, of_bias]


def _of_products(
    tile: _Head,
    hidden: torch.Tensor,
    places: torch.Tensor,
    log_total: torch.Tensor,
    above: torch.Tensor,
    of_entropy: tuple[torch.Tensor, torch.Tensor] | None,
    kept: _KeptTile | None,
) -> torch.Tensor:
    """`[N, columns]`, in the dtype of the weights: the gradient of a tile's products.

        d logprob / d logit_v = [v is the target] - p_v        d entropy / d logit_v = -p_v (log p_v + entropy)

    Args:
        places: `[N]`, the targets counted from the tile's first column.
        of_entropy: what comes from above to the entropy, and the entropy.
        kept: the tile as the forward pass left it.
    """
    if kept is not None:
        slope = tile.shape.slope(kept.exps)
        gradient = kept.exps * (torch.exp(kept.base - log_total) * -above)[:, None]
    elif of_entropy is None:
        gradient = tile.logits(hidden)
        slope = tile.shape.slope(gradient)
        _exp_rows(gradient, log_total, -above)
    else:
        logits = tile.logits(hidden)
        slope = tile.shape.slope(logits)
        above_entropy, entropy = of_entropy
        logprobs = logits.sub_(log_total[:, None])
        probs = logprobs.exp()
        gradient = logprobs.add_(entropy[:, None]).mul_(above_entropy[:, None]).add_(above[:, None]).mul_(probs).neg_()
    places, is_inside = _places_inside(places, 0, gradient.shape[1])
    gradient.scatter_add_(1, places, torch.where(is_inside, above, 0.0)[:, None])
    return _times(gradient, slope).to(tile.weight.dtype)
