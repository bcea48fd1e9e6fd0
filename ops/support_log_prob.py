"""Log-probabilities among the tokens that filters left: recorded supports, and the linear head over them.

    logprob_t = logit_t - logsumexp_{s in S} logit_s          S: the support, the tokens that could be drawn

A sampler with top-k, top-p or min-p draws from a support S, renormalised. A policy that is later trained has its own
logits, so that its filters would leave another support, and the ratio of the two policies would compare distributions
over different tokens. DeepSeek-V3.2 therefore keeps the sampler's mask for training (DeepSeek-AI 2025, arXiv
2512.02556, section 3.1, "Keep Sampling Mask"). A threshold does not survive a change of weights, so the sets are kept.

Neither `[N, V]` logits nor a mask of that size exist: the tokens are computed in parts of a few rows, each over the
union of their supports, in tiles of at most `tile_width` columns, whose rows of the head are gathered. The backward
pass computes the tiles again.

N tokens, E hidden size, V vocabulary, U tokens of a union, B = ceil(V / 8).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from hybrid_engine.ops.dispatch import check_tensor
from hybrid_engine.ops.linear_log_prob import LinearLogProbs, PieceBytes
from hybrid_engine.ops.linear_log_prob_tiles import (
    LEAST_LOGIT,
    PLAIN,
    TILE_BYTES,
    TILE_BYTES_ON_GPU,
    Head,
    LogitShape,
    add_product,
    gradient_of_products,
    product_fp32,
    running_sums,
    tile_width,
)

__all__ = ["Supports", "pack_support", "read_records", "record_bytes", "support_log_prob", "support_piece_bytes"]

ROWS_AT_ONCE = 2048
ID_BYTES = 4
OF_IDS, OF_BITS = b"\0", b"\1"
"""First byte of a record: what follows."""
_NUM_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1, dtype=np.uint8)


def pack_support(scores: torch.Tensor) -> torch.Tensor:
    """`[N, B]` uint8: the tokens of `scores [N, V]` that are not -inf as bits, the lowest bit first."""
    kept = torch.nn.functional.pad(scores != -torch.inf, (0, -scores.shape[1] % 8)).view(torch.uint8)
    packed = kept[:, ::8].clone()
    for bit in range(1, 8):
        packed |= kept[:, bit::8] << bit
    return packed


def read_records(packed: np.ndarray) -> list[bytes]:
    """A record of each row of `packed [N, B]`, the array of `pack_support`: see `Supports`."""
    counts = _NUM_BITS[packed].sum(1, dtype=np.int64)
    is_short = ID_BYTES * counts < packed.shape[1]
    rows, places = packed[is_short].nonzero()
    bits = np.unpackbits(packed[is_short][rows, places][:, None], axis=1, bitorder="little")
    cells, inside = bits.nonzero()
    ids = (8 * places[cells] + inside).astype("<i4")
    short = iter(np.split(ids, counts[is_short].cumsum()[:-1]))
    return [
        OF_IDS + next(short).tobytes() if has_ids else OF_BITS + row.tobytes()
        for row, has_ids in zip(packed, is_short, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class Supports:
    """The supports of drawn tokens, on the host.

    A record is a byte that tells its form, then the shorter one of two: the ids of its tokens, 4 bytes each, or the
    bits of the vocabulary. A token without a record, whose length is 0, was not drawn.
    """

    records: np.ndarray
    """`[n]` uint8: all records, one after the other."""
    starts: np.ndarray
    """`[...]` int64: where the record of each token begins."""
    lengths: np.ndarray
    """`[...]` int64: bytes of each record."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[bytes]]) -> "Supports":
        """`[R, T]`: the records of R rows, the shorter ones without records at their end."""
        width = max(map(len, rows), default=0)
        records = [record for row in rows for record in (*row, *[b""] * (width - len(row)))]
        lengths = np.array([len(record) for record in records], dtype=np.int64)
        starts = lengths.cumsum() - lengths
        shape = len(rows), width
        joined = np.frombuffer(b"".join(records), dtype=np.uint8)
        return cls(joined, starts.reshape(shape), lengths.reshape(shape))

    @classmethod
    def join(cls, parts: Sequence["Supports"]) -> "Supports":
        """The rows of several `[R, T]` supports, as wide as the widest; parts with the same records share them."""
        width = max(part.lengths.shape[1] for part in parts)
        records, first = {id(part.records): part.records for part in parts}, 0
        firsts = dict[int, int]()
        for name, each in records.items():
            firsts[name], first = first, first + len(each)

        def joined(numbers: Sequence[np.ndarray]) -> np.ndarray:
            return np.concatenate([np.pad(each, ((0, 0), (0, width - each.shape[1]))) for each in numbers])

        starts = joined([part.starts + firsts[id(part.records)] for part in parts])
        return cls(np.concatenate([*records.values()]), starts, joined([part.lengths for part in parts]))

    def __getitem__(self, index: Any) -> "Supports":
        """The supports of some tokens, by numpy's indices; the records stay where they are."""
        return Supports(self.records, self.starts[index], self.lengths[index])

    def texts(self) -> list[str]:
        """The records of `[T]` tokens in hexadecimal, as checkpoints keep them."""
        ends = self.starts + self.lengths
        return [self.records[start:end].tobytes().hex() for start, end in zip(self.starts, ends, strict=True)]

    @classmethod
    def of_texts(cls, rows: Sequence[Sequence[str]]) -> "Supports":
        """The inverse of `texts` for several rows, as `of`."""
        return cls.of([[bytes.fromhex(text) for text in row] for row in rows])

    @property
    def sizes(self) -> np.ndarray:
        """`[...]` int64: the number of tokens of each support; 0 without a record."""
        sizes: np.ndarray = self.lengths // ID_BYTES
        for place in np.argwhere(self._has_bits):
            cell = tuple(place)
            sizes[cell] = _NUM_BITS[self._content(cell)].sum(dtype=np.int64)
        return sizes

    @property
    def _has_bits(self) -> np.ndarray:
        firsts = self.records[np.where(self.lengths > 0, self.starts, 0)] if len(self.records) else self.lengths
        return (self.lengths > 0) & (firsts == ord(OF_BITS))

    def _content(self, cell: Any) -> np.ndarray:
        return self.records[self.starts[cell] + 1 : self.starts[cell] + self.lengths[cell]]

    def cells(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and the ids of their supports, `[M]` int64 each, of `[N]` supports; in no particular order."""
        has_bits = self._has_bits
        counts = np.where(has_bits | (self.lengths == 0), 0, self.lengths - 1)
        before = counts.cumsum() - counts
        places = np.arange(counts.sum()) + (self.starts + 1 - before).repeat(counts)
        rows = [np.arange(len(counts)).repeat(counts // ID_BYTES)]
        ids = [self.records[places].view("<i4").astype(np.int64)]
        for row in has_bits.nonzero()[0]:
            bits = np.unpackbits(self._content(row), bitorder="little").nonzero()[0]
            rows.append(np.full(len(bits), row))
            ids.append(bits)
        return np.concatenate(rows), np.concatenate(ids)

    def mask(self, vocab_size: int, device: torch.device) -> torch.Tensor:
        """`[N, V]` bool on `device`, of `[N]` supports: True for their tokens."""
        rows, ids = (torch.from_numpy(part).to(device) for part in self.cells())
        kept = torch.zeros(len(self.lengths), vocab_size, dtype=torch.bool, device=device)
        kept[rows, ids] = True
        return kept


def support_log_prob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    supports: Supports,
    bias: torch.Tensor | None = None,
    shape: LogitShape = PLAIN,
    with_entropy: bool = False,
) -> LinearLogProbs:
    """Log-probabilities of `targets` under the softmax of a linear head over the support of each token.

    Differentiable in hidden, weight and bias; a second derivative is an error. Computed in torch on every device.

    Args:
        hidden: `[N, E]`, any float dtype.
        weight: `[V, E]`, of the same dtype.
        targets: `[N]` int64, each in its support.
        supports: of the N tokens.
        bias: `[V]`. A target whose bias, and so its logit, is -inf has the log-probability `LEAST_LOGIT`, -1e30, also
            if its whole support has no probability: the result stays finite.
        shape: temperature, scale and softcap of the logits.
        with_entropy: also computes the entropy of each distribution, over its support.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, a support has a token outside of the vocabulary, a token has
            no record, or, on a CPU, a target is not in its support.
    """
    shape.check()
    if not hidden.is_floating_point():
        raise ValueError(f"hidden is {hidden.dtype}; expected a float dtype")
    check_tensor("hidden", hidden, shape=(None, None))
    check_tensor("weight", weight, like=hidden, shape=(None, hidden.shape[1]))
    check_tensor("targets", targets, like=hidden, dtype=torch.int64, shape=(len(hidden),))
    if bias is not None:
        check_tensor("bias", bias, like=hidden, shape=(len(weight),))
    if supports.lengths.shape != targets.shape:
        raise ValueError(f"supports has shape {list(supports.lengths.shape)}; expected {list(targets.shape)}")
    if len(hidden) and not supports.lengths.all():
        raise ValueError("supports lacks the record of a token; ask only for tokens that were drawn")
    with torch.autocast(hidden.device.type, enabled=False):
        logprobs, entropy = _SupportLogProb.apply(hidden, weight, bias, targets, supports, shape, with_entropy)
    return LinearLogProbs(logprobs, entropy)


def record_bytes(num_tokens: int, vocab_size: int) -> int:
    """Bytes of the record of a support of `num_tokens` tokens, at most."""
    return 1 + min(ID_BYTES * num_tokens, -(-vocab_size // 8))


def support_piece_bytes(
    num_tokens: int, hidden_size: int, vocab_size: int, is_trained: bool, weight_bytes: int, device: str
) -> PieceBytes:
    """Bytes of `support_log_prob` as `linear_log_prob.piece_bytes`, at most; `weight_bytes` are those of a weight."""
    tile = TILE_BYTES if device == "cpu" else TILE_BYTES_ON_GPU
    logits = min(tile, 4 * num_tokens * vocab_size)
    gathered = min(tile, weight_bytes * vocab_size * hidden_size)
    sums = 0 if weight_bytes == 4 else 4 * hidden_size * (num_tokens + (vocab_size if is_trained else 0))
    return PieceBytes(kept=4 * num_tokens, tile=logits + logits // 4 + (2 if is_trained else 1) * gathered + sums)


class _Part(NamedTuple):
    """Some rows, and the union of their supports."""

    rows: slice
    ids: torch.Tensor
    """`[U]` int64: the union, in ascending order."""
    kept: torch.Tensor
    """`[n, U]` bool: the support of each row."""

    def tiles(self, head: Head) -> Iterator[tuple[slice, Head]]:
        """Columns of the union, and the head of each part of it, as `Head.tiles`."""
        width = tile_width(max(len(self.kept), head.weight.shape[1]), head.weight.is_cuda)
        for first in range(0, len(self.ids), width):
            columns = slice(first, first + width)
            ids = self.ids[columns]
            bias = None if head.bias is None else head.bias[ids]
            yield columns, Head(head.weight[ids], bias, head.shape, self.kept[:, columns])

    def places(self, targets: torch.Tensor) -> torch.Tensor:
        """`[n]` int64: where the rows' targets stand in the union."""
        places = torch.searchsorted(self.ids, targets[self.rows]).clamp_(max=len(self.ids) - 1)
        if targets.is_cpu:
            wrong = (self.ids[places] != targets[self.rows]) | ~self.kept.gather(1, places[:, None]).squeeze(1)
            if wrong.any():
                token = targets[self.rows][wrong][0].item()
                raise ValueError(f"targets has {token}, which is not in its support; a drawn token always is")
        return places


def _parts(supports: Supports, vocab_size: int, device: torch.device) -> Iterator[_Part]:
    """The rows in parts, whose logits over the union of their supports fit into a tile, or of one row."""
    most = (TILE_BYTES_ON_GPU if device.type == "cuda" else TILE_BYTES) // 4
    sizes, first = supports.sizes, 0
    while first < len(sizes):
        ahead = sizes[first : first + ROWS_AT_ONCE].cumsum()
        logits = np.minimum(ahead, vocab_size) * np.arange(1, len(ahead) + 1)  # an upper bound, ascending
        last = first + max(1, int(np.searchsorted(logits, most, side="right")))
        rows, ids = supports[first:last].cells()
        if ids.max() >= vocab_size:
            raise ValueError(f"supports has token {ids.max()}; expected tokens in [0, {vocab_size})")
        is_used: np.ndarray = np.zeros(vocab_size, dtype=bool)
        is_used[ids] = True
        columns = is_used.cumsum()[ids] - 1
        union, of_rows, of_columns = (torch.from_numpy(x).to(device) for x in (is_used.nonzero()[0], rows, columns))
        kept = torch.zeros(last - first, len(union), dtype=torch.bool, device=device)
        kept[of_rows, of_columns] = True
        yield _Part(slice(first, last), union, kept)
        first = last


class _SupportLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, supports, shape, with_entropy):
        head = Head(weight, bias, shape)
        logprobs, log_total = (hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(2))
        entropy = torch.zeros_like(logprobs) if with_entropy else None
        for part in _parts(supports, len(weight), hidden.device):
            places = part.places(targets)
            sums, _ = running_sums(hidden[part.rows], part.tiles(head), places, with_entropy, False, _keep_nothing)
            # Of a support without any probability the total is that of its padding.
            has_mass = sums.base > LEAST_LOGIT / 2
            log_total[part.rows] = torch.where(has_mass, sums.base + sums.total.log(), 0.0)
            logprobs[part.rows] = sums.chosen - log_total[part.rows]
            if entropy is not None:
                entropy[part.rows] = torch.where(has_mass, sums.total.log() - sums.weighted / sums.total, 0.0)
        ctx.supports, ctx.shape = supports, shape
        ctx.save_for_backward(hidden, weight, bias, targets, log_total, entropy)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, above, above_entropy):
        hidden, weight, bias, targets, log_total, entropy = ctx.saved_tensors
        head, needs = Head(weight, bias, ctx.shape), ctx.needs_input_grad
        if above is None:
            above = torch.zeros_like(log_total)
        of_hidden, of_weight, of_bias = (
            torch.zeros_like(x, dtype=torch.float32) if needed else None
            for x, needed in zip((hidden, weight, bias), needs[:3], strict=True)
        )
        with torch.autocast(hidden.device.type, enabled=False):
            for part in _parts(ctx.supports, len(weight), hidden.device):
                rows, places = part.rows, part.places(targets)
                of_entropy = None if above_entropy is None else (above_entropy[rows], entropy[rows])
                for columns, tile in part.tiles(head):
                    of_products = gradient_of_products(
                        tile, hidden[rows], places - columns.start, log_total[rows], above[rows], of_entropy, None
                    )
                    if of_hidden is not None:
                        add_product(of_hidden[rows], of_products, tile.weight)
                    if of_weight is not None:
                        of_weight.index_add_(0, part.ids[columns], product_fp32(of_products.t(), hidden[rows]))
                    if of_bias is not None:
                        of_bias.index_add_(0, part.ids[columns], of_products.sum(0, dtype=torch.float32))
        gradients = zip((of_hidden, of_weight, of_bias), (hidden, weight, bias), strict=True)
        return (*(None if made is None else made.to(x.dtype) for made, x in gradients), None, None, None, None)


def _keep_nothing(first_column: int, tile: Any) -> None:
    pass
