"""The tokens of one pass over the layers, the places of their keys and values, and the tokens they attend to.

Attention ops, containers and generation share these types.

N packed tokens, C tokens that they attend to, R sequences, S decoded rows, n blocks of a row, H query heads, K
key/value heads, D head dimension. M image tokens, E hidden size, F layers after which features are added.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from hybrid_engine.ops.dispatch import form_of


class Context(NamedTuple):
    """The tokens that packed sequences attend to if some were fed before; all are read from the workspace."""

    blocks: torch.Tensor  # [C] int64: the block of each token's key and value
    offsets: torch.Tensor  # [C] int64: the place in the block
    lengths: tuple[int, ...]  # of the R sequences, up to the last token that is fed; the sum is C
    starts: torch.Tensor  # [R+1] int32: where each sequence starts among them, and C


class PlacedFeatures(NamedTuple):
    """Rows that replace the embeddings of image tokens."""

    places: torch.Tensor  # [M] int64: index of each image token among the N packed tokens
    values: torch.Tensor  # [M, E (1 + F)]: columns past E are added to the hidden state after the first F layers

    def after(self, num_tokens: int) -> "PlacedFeatures":
        """Returns the same rows in a pass with `num_tokens` other tokens before them."""
        return self._replace(places=self.places + num_tokens)


class SeenSpans(NamedTuple):
    """Tokens of images that see later tokens of their image, as far as the attention's window reaches."""

    bounds: torch.Tensor  # [2, N] int64: index of the first and the last token of each token's span; 0 and -1: none
    is_local: bool  # whether they do so in layers with a window alone


@dataclass(frozen=True, kw_only=True)
class PrefillBatch:
    """Whole sequences, or continuations of sequences, packed one after the other."""

    tokens: torch.Tensor  # [N] int64
    positions: torch.Tensor  # [N] int64: index of each token in its sequence
    write_blocks: torch.Tensor  # [N] int64: the block for each token's key and value
    write_offsets: torch.Tensor  # [N] int64: the place in the block
    lengths: tuple[int, ...]  # of the R sequences; the sum is N
    starts: torch.Tensor  # [R+1] int32: where each sequence starts, and N
    wanted: torch.Tensor  # [R] int64: the tokens whose next-token logits are computed, each sequence's last
    row_lengths: torch.Tensor  # [N] int64: of each token's sequence when the token was fed: the prompt's, or up to it
    context: Context | None = None  # None: every sequence is fed from its first token on
    state_slots: torch.Tensor | None = None  # [R] int64: the slot of each sequence's states; None: layers have none
    images: PlacedFeatures | None = None  # None: all tokens are text
    axis_positions: torch.Tensor | None = None  # [3, N] int64: for rotary embedding of three axes; None: as `positions`
    spans: SeenSpans | None = None  # None: no token sees later ones

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.tokens)

    @cached_property
    def starts_anew(self) -> torch.Tensor:
        """`[R]` bool: whether a sequence is fed from its first token on, so that its states start at zero."""
        return self.positions[self.starts[:-1].long()] == 0

    @cached_property
    def form(self) -> tuple[Any, ...]:
        """The form of the tensors that attention reads, found once for all layers."""
        key_starts = None if self.context is None else self.context.starts
        return form_of(self.starts, key_starts, self.write_blocks, self.write_offsets)

    def places(self, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Block and place in it, `[N]` each, for every token's key and value."""
        return self.write_blocks, self.write_offsets


@dataclass(frozen=True, kw_only=True)
class DecodeBatch:
    """One token for each of S rows: the newest token of a sequence."""

    tokens: torch.Tensor  # [S] int64
    positions: torch.Tensor  # [S] int64: index of each token in its sequence
    block_tables: torch.Tensor  # [S, n] int64, rows padded with any valid block
    context: int  # upper bound of sequence lengths, new tokens included
    is_identity: bool  # row i owns block i and nothing else
    state_slots: torch.Tensor | None = None  # [S] int64: the slot of each row's states; None: layers have none
    shifts: torch.Tensor | None = None  # [S] int64: added to positions for rotary embedding of three axes; None: 0

    @cached_property
    def form(self) -> tuple[Any, ...]:
        """The form of the tensors that attention reads, found once for all layers."""
        return form_of(self.block_tables, self.positions)

    def places(self, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Block and place in it, `[S]` each, for every token's key and value."""
        column = self.positions // block_size
        return self.block_tables.gather(1, column[:, None]).squeeze(1), self.positions % block_size

    @property
    def wanted(self) -> None:
        """None: next-token logits are computed for every token."""
        return None

    @property
    def images(self) -> None:
        """None: a token that was drawn is text."""
        return None


@dataclass(frozen=True, kw_only=True)
class MixedBatch:
    """A decode step and a prefill in one pass over the layers: the S decoded tokens, then the packed ones.

    No sequence is in both. Only attention distinguishes the two kinds of tokens.
    """

    decode: DecodeBatch
    prefill: PrefillBatch

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.decode.tokens) + len(self.prefill.tokens)

    @property
    def tokens(self) -> torch.Tensor:
        """`[N]` int64."""
        return torch.cat((self.decode.tokens, self.prefill.tokens))

    @property
    def positions(self) -> torch.Tensor:
        """`[N]` int64: index of each token in its sequence."""
        return torch.cat((self.decode.positions, self.prefill.positions))

    @property
    def images(self) -> PlacedFeatures | None:
        """The features of image tokens among the N; None: all are text."""
        return None if self.prefill.images is None else self.prefill.images.after(len(self.decode.tokens))

    @property
    def wanted(self) -> torch.Tensor:
        """`[S+R]` int64: the tokens whose next-token logits are computed."""
        num_rows = len(self.decode.tokens)
        rows = torch.arange(num_rows, device=self.prefill.wanted.device)
        return torch.cat((rows, self.prefill.wanted + num_rows))


@dataclass(frozen=True, kw_only=True)
class EncoderBatch:
    """Whole sequences, packed one after the other, with attention to later tokens too; no keys are kept."""

    lengths: tuple[int, ...]  # of the R sequences; the sum is N
    starts: torch.Tensor  # [R+1] int32: where each sequence starts, and N

    @cached_property
    def form(self) -> tuple[Any, ...]:
        """The form of the tensor that attention reads, found once for all layers."""
        return form_of(self.starts)


Batch = PrefillBatch | DecodeBatch | MixedBatch


def over_parts(compute: Callable[[slice, Batch], torch.Tensor], num_rows: int, batch: Batch) -> torch.Tensor | None:
    """The output of an op with states, from those of the parts of a padded or mixed batch; None for any other batch.

    Args:
        compute: the op, of these rows of its inputs, which are the tokens of this batch.
        num_rows: rows of the inputs; those after the tokens of a prefill are padding, whose output is 0.
        batch: the whole batch.
    """
    if isinstance(batch, (PrefillBatch, MixedBatch)) and num_rows > batch.num_tokens:
        output = compute(slice(batch.num_tokens), batch)
        return F.pad(output, (0, 0, 0, num_rows - batch.num_tokens))
    if isinstance(batch, MixedBatch):
        first = len(batch.decode.tokens)
        return torch.cat((compute(slice(first), batch.decode), compute(slice(first, None), batch.prefill)))
    return None


class QKV(NamedTuple):
    """The results of a layer's projections of the N tokens, with any strides."""

    q: torch.Tensor  # [N, K, G, D]: the G = H / K query heads of each key/value head
    k: torch.Tensor  # [N, K, D]
    v: torch.Tensor  # [N, K, D]
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None  # cos and sin rows [N, R] in the form of `rotary_table`

    def without_padding(self, num_tokens: int) -> "QKV":
        """Drops the rows after those of the batch's tokens, which `rotary` does not have."""
        return QKV(self.q[:num_tokens], self.k[:num_tokens], self.v[:num_tokens], self.rotary)

    def split(self, num_rows: int) -> tuple["QKV", "QKV"]:
        """Splits the batch into the first `num_rows` tokens and the others."""
        parts = [[x[:num_rows], x[num_rows:]] for x in (self.q, self.k, self.v, *(self.rotary or ()))]
        first, others = ([part[place] for part in parts] for place in (0, 1))
        (q, k, v, *rotary), (other_q, other_k, other_v, *other_rotary) = first, others
        return QKV(q, k, v, _pair(rotary)), QKV(other_q, other_k, other_v, _pair(other_rotary))


def _pair(rotary: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor] | None:
    return (rotary[0], rotary[1]) if rotary else None


class KVBlocks(NamedTuple):
    """The keys and values of a layer in the KV workspace."""

    keys: torch.Tensor  # [num_blocks, K, block_size, D]
    values: torch.Tensor  # [num_blocks, K, block_size, D]; D may be another one


class HeadWeights(NamedTuple):
    """Learned or fixed parameters of attention per head; None: the model does not have them."""

    q_gamma: torch.Tensor | None = None  # [D], of the norm of queries
    k_gamma: torch.Tensor | None = None  # [D], of keys
    sinks: torch.Tensor | None = None  # [H], an additional logit of each head without a value
    alibi: torch.Tensor | None = None  # [H] fp32 slopes


def read_context(cache: KVBlocks, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[C, K, D]` each, dense."""
    _, num_kv_heads, block_size, _ = cache.keys.shape
    rows = _rows(context.blocks, context.offsets, num_kv_heads, block_size)
    return cache.keys.flatten(0, 2)[rows], cache.values.flatten(0, 2)[rows]


def read_stored(cache: KVBlocks, batch: PrefillBatch | DecodeBatch | MixedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[N, K, D]` each, dense, that a layer has stored of the batch's own tokens."""
    _, num_kv_heads, block_size, _ = cache.keys.shape
    parts = (batch.decode, batch.prefill) if isinstance(batch, MixedBatch) else (batch,)
    rows = torch.cat([write_rows(part, num_kv_heads, block_size) for part in parts])
    return cache.keys.flatten(0, 2)[rows], cache.values.flatten(0, 2)[rows]


def write_rows(batch: PrefillBatch | DecodeBatch, num_kv_heads: int, block_size: int) -> torch.Tensor:
    """Rows `[N, K]` that the tokens write, in the workspace viewed as `[num_blocks * K * block_size, D]`."""
    return _rows(*batch.places(block_size), num_kv_heads, block_size)


def _rows(blocks: torch.Tensor, offsets: torch.Tensor, num_kv_heads: int, block_size: int) -> torch.Tensor:
    heads = torch.arange(num_kv_heads, device=blocks.device)
    return (blocks[:, None] * num_kv_heads + heads) * block_size + offsets[:, None]


def recur(
    step: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    tokens: tuple[torch.Tensor, ...],
    lengths: tuple[int, ...],
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes a recurrence over packed sequences, all of which go on together, token by token.

    Args:
        step: `(*tokens [R, ...], state [R, ...]) -> (output [R, ...], next state)`; a token of zeros changes no state.
        tokens: `[N, ...]` each, of the R sequences of `lengths`.
        state: the states before them, `[R, ...]`.

    Returns:
        The outputs `[N, ...]`, and the states after the last tokens.
    """
    padded = [pad_sequence(tensor.split(lengths)) for tensor in tokens]  # [T, R, ...]
    outputs = []
    for token in zip(*padded, strict=True):
        output, state = step(*token, state)
        outputs.append(output)
    rows = torch.stack(outputs, 1)
    return torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)]), state
