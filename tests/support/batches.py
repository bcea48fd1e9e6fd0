"""Batches for ops that keep states: a step, packed pieces of sequences, and sequences fed in several ways."""

import torch
import torch.nn.functional as F

from hybrid_engine.ops import Batch, DecodeBatch, MixedBatch, PrefillBatch
from hybrid_engine.ops.batch import Context

STEPS = 6


def decode_of(positions, slots):
    """One token for each row."""
    positions = torch.tensor(positions)
    tables = torch.zeros(len(positions), 1, dtype=torch.int64)
    tokens = torch.zeros_like(positions)
    return DecodeBatch(
        tokens=tokens, positions=positions, block_tables=tables, context=64, is_identity=False, state_slots=slots
    )


def prefill_of(pieces, slots):
    """Pieces of sequences, each a pair of its first position and its end."""
    positions = torch.cat([torch.arange(*piece) for piece in pieces])
    lengths = tuple(end - start for start, end in pieces)
    ends, places = torch.tensor(lengths).cumsum(0), torch.zeros_like(positions)
    context = None
    if any(start for start, _ in pieces):
        whole = torch.tensor([end for _, end in pieces])
        blocks = torch.zeros(int(whole.sum()), dtype=torch.int64)
        context = Context(blocks, blocks, tuple(whole.tolist()), F.pad(whole.cumsum(0), (1, 0)).int())
    return PrefillBatch(
        tokens=places, positions=positions, write_blocks=places, write_offsets=places, lengths=lengths,
        starts=F.pad(ends, (1, 0)).int(), wanted=ends - 1, row_lengths=positions + 1, context=context,
        state_slots=slots,
    )  # fmt: skip


def feed(sequences, run):
    """Runs `run(rows, batch)` on `sequences`, of which the first is the longest, each time cut in another way.

    Yields the outputs of each sequence: fed whole; in chunks together with the others; the first token, then one token
    at a time; the first sequence decoding while the others are prefilled. The others have at most `STEPS` tokens.
    """
    slots = [4, 1, 3][: len(sequences)]
    for cut in (_whole, _chunks, _steps, _mixed):
        outputs = [[] for _ in sequences]
        for batch, pieces in cut([len(sequence) for sequence in sequences], slots):
            rows = torch.cat([sequences[i][start:end] for i, start, end in pieces])
            for (i, start, end), output in zip(
                pieces, run(rows, batch).split([end - start for _, start, end in pieces]), strict=True
            ):
                assert start == sum(map(len, outputs[i])) and end - start == len(output)
                outputs[i].append(output)
        yield [torch.cat(parts) for parts in outputs]


Pass = tuple[Batch, list[tuple[int, int, int]]]


def _prefill(pieces, slots) -> Pass:
    return prefill_of([piece[1:] for piece in pieces], torch.tensor([slots[piece[0]] for piece in pieces])), pieces


def _whole(lengths, slots):
    yield _prefill([(i, 0, length) for i, length in enumerate(lengths)], slots)


def _chunks(lengths, slots):
    for start, end in ((0, 3), (3, 4), (4, 6), (6, max(lengths))):
        pieces = [(i, start, min(end, length)) for i, length in enumerate(lengths) if length > start]
        yield _prefill(pieces[::-1], slots)


def _steps(lengths, slots):
    yield _prefill([(i, 0, 1) for i in range(len(lengths))], slots)
    for place in range(1, STEPS):
        rows = [i for i, length in enumerate(lengths) if length > place]
        yield _decode(rows, place, slots)
    yield _prefill([(0, STEPS, lengths[0])], slots)


def _decode(rows, place, slots) -> Pass:
    batch = decode_of([place] * len(rows), torch.tensor([slots[i] for i in rows]))
    return batch, [(i, place, place + 1) for i in rows]


def _mixed(lengths, slots):
    yield _prefill([(0, 0, 4)], slots)
    for i, length in enumerate(lengths[1:], 1):
        prefill, pieces = _prefill([(i, 0, length)], slots)
        decode, row = _decode([0], 3 + i, slots)
        yield MixedBatch(decode=decode, prefill=prefill), row + pieces
    yield _prefill([(0, 3 + len(lengths), lengths[0])], slots)
