"""Prefills of one pass as the tensors that a model takes.

N packed tokens.
"""

import torch

from hybrid_engine.containers.streams import send_to_device
from hybrid_engine.generation.batching.admission import Prefill
from hybrid_engine.ops import Context, PrefillBatch


def pack_prefills(
    prefills: list[Prefill], block_size: int, is_recomputed_whole: bool, device: torch.device
) -> PrefillBatch:
    """The tokens of `prefills`, one after the other; logits are wanted of the last of each.

    `is_recomputed_whole`: a response that is prefilled anew has been fed together with its prompt before, too; else
    token by token after it.
    """
    parts = [torch.arange(prefill.first, prefill.last) for prefill in prefills]
    lengths = tuple(map(len, parts))
    positions = torch.cat(parts)
    # What was prefilled anew was fed as it would have been had it never left.
    fed = torch.tensor([len(p.tokens) if is_recomputed_whole else len(p.prompt.tokens) for p in prefills])
    fed = fed.repeat_interleave(torch.tensor(lengths), output_size=len(positions))
    tokens = torch.tensor([token for prefill in prefills for token in prefill.tokens[prefill.first : prefill.last]])
    blocks = _blocks_of(prefills, parts, block_size)
    by_token = (tokens, positions, blocks, positions % block_size, torch.maximum(positions + 1, fed))
    tokens, positions, write_blocks, write_offsets, row_lengths = send_to_device(torch.stack(by_token), device)
    starts = _starts(lengths, device)
    return PrefillBatch(
        tokens=tokens,
        positions=positions,
        write_blocks=write_blocks,
        write_offsets=write_offsets,
        lengths=lengths,
        starts=starts.int(),
        wanted=starts[1:] - 1,
        row_lengths=row_lengths,
        context=_context(prefills, block_size, device) if any(prefill.first for prefill in prefills) else None,
    )


def _context(prefills: list[Prefill], block_size: int, device: torch.device) -> Context:
    """All tokens of the owners up to the last ones that are fed."""
    parts = [torch.arange(prefill.last) for prefill in prefills]
    lengths = tuple(map(len, parts))
    places = torch.stack((_blocks_of(prefills, parts, block_size), torch.cat(parts) % block_size))
    blocks, offsets = send_to_device(places, device)
    return Context(blocks, offsets, lengths, _starts(lengths, device).int())


def _blocks_of(prefills: list[Prefill], positions: list[torch.Tensor], block_size: int) -> torch.Tensor:
    """The blocks in which the tokens at `positions` of each prefill lie, all in one row."""
    pairs = zip(prefills, positions, strict=True)
    return torch.cat([torch.tensor(prefill.blocks)[places // block_size] for prefill, places in pairs])


def _starts(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return send_to_device(torch.tensor((0, *lengths)).cumsum(0), device)
