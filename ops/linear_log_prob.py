"""Log-probability and entropy of tokens from hidden states and the head's weights, without all logits at once.

    logit_v   = cap(scale * (h . w_v + b_v)) / temperature      cap(x) = softcap * tanh(x / softcap)
    logprob_t = logit_t - logsumexp_v(logit_v)
    entropy   = logsumexp_v(logit_v) - sum_v p_v logit_v         p = softmax(logit)

The same function of the weights as the sampler's (`ops/sample.py`): products in the dtype of the weights, everything
after them in fp32. The vocabulary is read in tiles with a running maximum and sum (online softmax, Milakov and
Gimelshein 2018), as Cut Cross-Entropy does (Wijmans et al. 2024, arXiv:2411.09009).

The incoming gradient is one number per token. If the head is frozen, the gradient of the hidden states, the target's
row minus the expected row of the head, is computed in the forward pass from the same tiles; a trained head's own
gradient needs the tiles a second time. The first tiles are kept, up to a fixed number of bytes, which saves small
problems the fourth product; all others are computed again. Triton kernels (`linear_log_prob_kernels.py`) keep the
logits of a tile in registers; in their forward pass they compute and keep only sums.

N tokens, E hidden size, V vocabulary, or the part of it that this process holds.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from hybrid_engine.ops import linear_log_prob_kernels as kernels
from hybrid_engine.ops.cpu_kernels import mkl_leaves_half, product_over_rows
from hybrid_engine.ops.dispatch import check_tensor, kernel_or_reference, use_triton
from hybrid_engine.ops.linear_log_prob_tiles import (
    PLAIN,
    Head,
    LogitShape,
    Sums,
    Tile,
    add_product,
    gradient_of_products,
    merged,
    product_fp32,
    running_sums,
    tile_width,
)

__all__ = ["PLAIN", "LinearLogProbs", "LogitShape", "PieceBytes", "VocabularyShare", "linear_log_prob", "piece_bytes"]

ROWS_AT_ONCE = 2048
KEPT_BYTES = 64 * 2**20  # of tiles from a forward pass to its backward pass


class LinearLogProbs(NamedTuple):
    """The results of `linear_log_prob`."""

    logprobs: torch.Tensor  # [N] fp32
    entropy: torch.Tensor | None  # [N] fp32, in nats; None unless asked for


class VocabularyShare(NamedTuple):
    """The rows of the head that this process holds, and the collectives with the processes that hold the others.

    Every process passes the same hidden states and targets and gets the same results and the whole gradient of the
    hidden states. Both functions are collective.
    """

    first: int  # the token of this process's first row
    gather: Callable[[torch.Tensor], torch.Tensor]  # `[...]` of each process -> `[P, ...]`, the same everywhere
    sum: Callable[[torch.Tensor], torch.Tensor]  # `[...]` -> the sum over the processes


class PieceBytes(NamedTuple):
    """Memory of `linear_log_prob` in addition to its inputs and their gradients."""

    kept: int  # from a forward pass to its backward pass
    tile: int  # of the logits that exist at once


def piece_bytes(
    num_tokens: int, hidden_size: int, vocab_size: int, is_trained: bool, device: str, has_softcap: bool = False
) -> PieceBytes:
    """Bytes for a problem of this size; on a `device` with kernels the logits stay in registers."""
    if device != "cpu":
        return PieceBytes(kept=0 if is_trained else 2 * 4 * num_tokens * hidden_size, tile=0)
    rows = min(num_tokens, ROWS_AT_ONCE)
    width = min(tile_width(max(rows, hidden_size), is_on_gpu=False), vocab_size)
    # A frozen head's gradient is computed at once: the sum of its rows, and the result that is kept.
    kept, tile = 4 * num_tokens * hidden_size, 4 * rows * width
    if is_trained:
        num_tiles = 0 if has_softcap else KEPT_BYTES // max(1, tile)
        kept = min(num_tiles * tile, 4 * num_tokens * vocab_size)
    of_weight = 4 * width * hidden_size if is_trained and mkl_leaves_half() else 0  # before it is copied to its place
    return PieceBytes(kept=kept, tile=max(tile * (2 if has_softcap else 1), tile + of_weight))  # slopes of a softcap


def linear_log_prob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    shape: LogitShape = PLAIN,
    with_entropy: bool = False,
    share: VocabularyShare | None = None,
) -> LinearLogProbs:
    """Log-probabilities of `targets` under the softmax of a linear head.

    Differentiable in hidden, weight and bias; a second derivative is an error.

    Args:
        hidden: `[N, E]`, any float dtype.
        weight: `[V, E]`, of the same dtype.
        targets: `[N]` int64, each in `[0, V)`, or in the whole vocabulary if the head is shared.
        bias: `[V]`; a token whose bias, and so its logit, is -inf has probability 0 and must not be a target.
        shape: temperature, scale and softcap of the logits.
        with_entropy: also computes the entropy of each distribution, which costs one more pass over the tiles.
        share: set if `weight` and `bias` are a part of the head; None: they are all of it.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or, on a CPU, a target is outside of the vocabulary.
    """
    shape.check()
    _check(hidden, weight, targets, bias, is_whole=share is None)
    with _as_given(hidden):
        logprobs, entropy = _LinearLogProb.apply(hidden, weight, bias, targets, shape, with_entropy, share)
    return LinearLogProbs(logprobs, entropy)


def _as_given(tensor: torch.Tensor) -> torch.autocast:
    """Disables autocast inside, so that products have the dtypes of their operands."""
    return torch.autocast(tensor.device.type, enabled=False)


def _check(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None, is_whole: bool
) -> None:
    """Raises ValueError naming the tensor that does not fit; does not read targets on a GPU, which would wait for
    it.
    """
    if not hidden.is_floating_point():
        raise ValueError(f"hidden is {hidden.dtype}; expected a float dtype")
    check_tensor("hidden", hidden, shape=(None, None))
    check_tensor("weight", weight, like=hidden, shape=(None, hidden.shape[1]))
    check_tensor("targets", targets, like=hidden, dtype=torch.int64, shape=(len(hidden),))
    if bias is not None:
        check_tensor("bias", bias, like=hidden, shape=(len(weight),))
    if hidden.shape[1] == 0 or len(weight) == 0:
        raise ValueError(f"weight has shape {list(weight.shape)}; expected at least one row and one column")
    if is_whole and targets.is_cpu and targets.numel() and not torch.compiler.is_compiling():
        lowest, highest = (int(value) for value in targets.aminmax())
        if lowest < 0 or highest >= len(weight):
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"targets has {wrong}; expected tokens in [0, {len(weight)}); leave out what has none")


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, *arguments):
        if use_triton(hidden):
            return kernel_or_reference(_forward_in_kernels, _forward_in_torch, ctx, hidden, *arguments)
        return _forward_in_torch(ctx, hidden, *arguments)

    @staticmethod
    @once_differentiable
    def backward(ctx, above, above_entropy):
        if above is None:
            above = torch.zeros_like(above_entropy)
        if ctx.is_made:
            (gradient,) = ctx.saved_tensors
            return (gradient * above[:, None]).to(gradient.dtype), *[None] * 6
        with _as_given(above):
            return (*_gradients(ctx, above, above_entropy), *[None] * 4)


def _forward_in_kernels(ctx, *arguments):
    return _forward(ctx, True, *arguments)


def _forward_in_torch(ctx, *arguments):
    return _forward(ctx, False, *arguments)


def _forward(ctx, in_kernels, hidden, weight, bias, targets, shape, with_entropy, share):
    head = Head(weight, bias, shape)
    places = targets if share is None else targets - share.first
    of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
    ctx.shape, ctx.share, ctx.in_kernels = shape, share, in_kernels
    ctx.is_made = of_hidden and not (of_weight or of_bias or with_entropy or in_kernels)
    can_keep = (of_weight or of_bias) and not (with_entropy or in_kernels) and shape.softcap is None
    kept = _Kept(KEPT_BYTES if can_keep else 0)
    parts: list[_Finished] = []
    for some, their_places in zip(hidden.split(ROWS_AT_ONCE), places.split(ROWS_AT_ONCE), strict=True):
        if in_kernels:
            sums, rows = merged(kernels.partial_sums(some, head, their_places, with_entropy)), None
        else:
            keep = kept.of_rows(len(parts))
            tiles = head.tiles(min(len(hidden), ROWS_AT_ONCE))  # the same tiles as in the backward pass
            sums, rows = running_sums(some, tiles, their_places, with_entropy, ctx.is_made, keep)
        parts.append(_finish(head, their_places, sums, rows, share))
    logprobs, log_total, entropy, gradient = (
        torch.cat(part) if part[0] is not None else None for part in zip(*parts, strict=True)
    )
    if ctx.is_made:
        ctx.save_for_backward(gradient)
    else:
        ctx.kept = list(kept.tiles)
        tensors = (tensor for tile in kept.tiles.values() for tensor in tile)
        ctx.save_for_backward(hidden, weight, bias, places, log_total, entropy, *tensors)
    ctx.set_materialize_grads(False)  # without a gradient of the entropy, its backward pass costs nothing
    return logprobs, entropy if with_entropy else None


class _Kept:
    """The tiles that the backward pass need not compute again, by the part of the rows and the first column."""

    def __init__(self, num_bytes: int):
        self.num_bytes_left = num_bytes
        self.tiles: dict[tuple[int, int], Tile] = {}

    def of_rows(self, part: int) -> Callable[[int, Tile], None]:
        """A function that is called with the tiles of a part of the rows, in order."""

        def keep(first_column: int, tile: Tile) -> None:
            self.num_bytes_left -= tile.exps.nbytes
            if self.num_bytes_left >= 0:
                self.tiles[part, first_column] = tile

        return keep


class _Finished(NamedTuple):
    """The results for some rows; None: not requested."""

    logprobs: torch.Tensor  # [N]
    log_total: torch.Tensor  # [N]
    entropy: torch.Tensor | None  # [N]
    gradient: torch.Tensor | None  # [N, E]: of the log-probability by the hidden states


def _finish(
    head: Head, places: torch.Tensor, own: Sums, rows: torch.Tensor | None, share: VocabularyShare | None
) -> _Finished:
    """`rows`: the expected row summed up by a frozen head's forward pass, in units of its own base."""
    sums = own if share is None else merged(Sums(*share.gather(torch.stack(own)).unbind(1)))
    log_total = sums.base + sums.total.log()
    entropy = sums.total.log() - sums.weighted / sums.total
    gradient = None
    if rows is not None:
        is_inside = (places >= 0) & (places < len(head.weight))
        slope = head.shape.slope(sums.chosen[:, None]) * is_inside[:, None]
        expected = rows * (torch.exp(own.base - sums.base) / sums.total)[:, None]
        gradient = head.weight[places.clamp(0, len(head.weight) - 1)] * slope - expected
        gradient = (gradient if share is None else share.sum(gradient)).to(head.weight.dtype)
    return _Finished(sums.chosen - log_total, log_total, entropy, gradient)


def _gradients(ctx, above: torch.Tensor, above_entropy: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Gradients of hidden states, weight and bias; computes the tiles again."""
    hidden, weight, bias, places, log_total, entropy, *tensors = ctx.saved_tensors
    kept = {place: Tile(*tensors[2 * number : 2 * number + 2]) for number, place in enumerate(ctx.kept)}
    head = Head(weight, bias, ctx.shape)
    needs = ctx.needs_input_grad
    gradient_of: Callable[..., torch.Tensor] = gradient_of_products
    if ctx.in_kernels:
        gradient_of = partial(kernel_or_reference, kernels.gradient_of_products, gradient_of_products)
    of_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs[0] else None
    create = torch.empty_like if len(hidden) else torch.zeros_like
    of_weight, of_bias = (create(x) if needed else None for x, needed in zip((weight, bias), needs[1:3], strict=True))
    for columns, tile in head.tiles(min(len(hidden), ROWS_AT_ONCE)):
        tile_of_weight: torch.Tensor | None = None
        tile_of_bias: torch.Tensor | None = None
        for part, first in enumerate(range(0, len(hidden), ROWS_AT_ONCE)):
            rows = slice(first, first + ROWS_AT_ONCE)
            of_entropy = None if above_entropy is None else (above_entropy[rows], entropy[rows])
            of_products = gradient_of(
                tile,
                hidden[rows],
                places[rows] - columns.start,
                log_total[rows],
                above[rows],
                of_entropy,
                kept.get((part, columns.start)),
            )
            if of_hidden is not None:
                add_product(of_hidden[rows], of_products, tile.weight)
            if of_weight is not None:
                tile_of_weight = _plus_product(tile_of_weight, of_products, hidden[rows], of_weight[columns])
            if of_bias is not None:
                of_rows = of_products.sum(0, dtype=torch.float32)
                tile_of_bias = of_rows if tile_of_bias is None else tile_of_bias.add_(of_rows)
            del of_products  # before the next tile is computed
        if of_weight is not None and tile_of_weight is not None and of_weight.dtype != torch.float32:
            of_weight[columns] = tile_of_weight
        if of_bias is not None and tile_of_bias is not None:
            of_bias[columns] = tile_of_bias
    if of_hidden is not None:
        of_hidden = (of_hidden if ctx.share is None else ctx.share.sum(of_hidden)).to(hidden.dtype)
    return [of_hidden, of_weight, of_bias]


def _plus_product(
    sums: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor, place: torch.Tensor
) -> torch.Tensor:
    """`sums`, fp32, plus the sum over N of `left [N, columns]` times `right [N, E]`: `[columns, E]`.

    The first product, with `sums` None, is written to `place` if that is fp32.
    """
    if sums is not None:
        add_product(sums, left.t(), right)
        return sums
    if not place.dtype == left.dtype == torch.float32:
        return product_fp32(left.t(), right)
    if mkl_leaves_half():
        return place.copy_(product_over_rows(left, right))
    return torch.mm(left.t(), right, out=place)
