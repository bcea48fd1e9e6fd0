"""Attention over a paged cache of latent vectors: multi-head latent attention of DeepSeek-V2 and V3.

A token keeps one latent vector c and one rotary key r, which all heads share. A head's keys and values are linear in c:

    k_jh = [rot(r_j), A_h c_j]     v_jh = B_h c_j              A_h [Dk, L], B_h [Dv, L], the halves of one linear
    score_ijh = scale (rot(qr_ih) . rot(r_j) + qk_ih . A_h c_j)                                  for j <= i
    context_ih = sum_j softmax_j(score_ijh) B_h c_j

Source: DeepSeek-V2 (arXiv 2405.04434, section 2.1, equations 9 to 19, and appendix C for what follows). There are two
ways to the same numbers:

    expanded   k and v of all tokens are computed, then attention of H heads of Dk + R and Dv
    absorbed   qk . (A c) = (A^T qk) . c  and  sum_j p_j (B c_j) = B (sum_j p_j c_j): queries are multiplied by A and
               contexts by B, and attention has H query heads of R + L and one key head, whose values are its keys

A bias of the linear adds the same number to all scores of a query, which softmax cancels, and its half to each context.

The cheaper one, in multiply-adds of a head, for n new tokens that attend to C tokens, themselves included, and to P
pairs of tokens (n (C - n) + n (n + 1) / 2):

    expanded   C L (Dk + Dv) + P (Dk + R + Dv)
    absorbed   n L (Dk + Dv) + P (2 L + R)

Absorbed is cheaper if P (2 L - Dk - Dv) < (C - n) L (Dk + Dv). So a prompt fed at once (C = n) is expanded. A decoded
token (n = 1) is absorbed, at any length. In DeepSeek-V3 (L 512, Dk and Dv 128) a chunk of a long prompt is absorbed up
to 170 tokens.

The cache holds `[rot(r), c]` of each token, `[num_blocks, 1, block_size, R + L]`: 576 numbers for DeepSeek-V3, where
keys and values of its 128 heads are 40,960. The rotary part comes first, where the attention ops rotate. A decode step
reads S C (R + L) elements for S rows of C tokens, and does 2 S C H (2 L + R) operations.

N packed tokens, S decoded rows, H heads, L latent dimension, R rotary dimension, Dk dimension of the keys' other part,
Dv of values.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from hybrid_engine.ops.batch import QKV, Batch, Context, DecodeBatch, KVBlocks, MixedBatch, PrefillBatch, write_rows
from hybrid_engine.ops.dispatch import kernel_or_reference, use_triton
from hybrid_engine.ops.latent_attention_kernels import LatentNumbers, decode_by_kernels, has_kernel
from hybrid_engine.ops.softmax_context import SoftmaxContextOp, apply_rotary


class LatentHeads(NamedTuple):
    """The results of a layer's projections of the N tokens, with any strides."""

    q: torch.Tensor  # [N, H, Dk + R], the part to be rotated last
    rotary_key: torch.Tensor  # [N, R], not rotated
    latent: torch.Tensor  # [N, L]
    rotary: tuple[torch.Tensor, torch.Tensor]  # cos and sin rows [N, R] in the form of `rotary_table`

    def split(self, num_rows: int) -> tuple["LatentHeads", "LatentHeads"]:
        """Splits the batch into the first `num_rows` tokens and the others."""
        parts = [self._rows(slice(num_rows)), self._rows(slice(num_rows, None))]
        return parts[0], parts[1]

    def without_padding(self, num_tokens: int) -> "LatentHeads":
        """Drops the rows after those of the batch's tokens, which `rotary` does not have."""
        rows = slice(num_tokens)
        return LatentHeads(self.q[rows], self.rotary_key[rows], self.latent[rows], self.rotary)

    def _rows(self, rows: slice) -> "LatentHeads":
        cos, sin = self.rotary
        return LatentHeads(self.q[rows], self.rotary_key[rows], self.latent[rows], (cos[rows], sin[rows]))


class Expansion(NamedTuple):
    """The linear from latents to keys and values."""

    weight: torch.Tensor  # [L, H (Dk + Dv)]: by head its keys, then its values
    bias: torch.Tensor | None = None  # [H (Dk + Dv)]


class LatentAttentionOp:
    """Callable `(heads, cache, batch, expansion) -> context [N, H * Dv]`.

    Args:
        num_heads, latent_dim, rotary_dim, key_dim, value_dim: H, L, R, Dk, Dv.
        scale: multiplies q.k, usually (Dk + R)^-0.5.
        is_interleaved: rotary pairs are adjacent instead of halves.
    """

    def __init__(
        self,
        num_heads: int,
        latent_dim: int,
        rotary_dim: int,
        key_dim: int,
        value_dim: int,
        scale: float,
        is_interleaved: bool = True,
    ):
        self.num_heads, self.latent_dim, self.rotary_dim = num_heads, latent_dim, rotary_dim
        self.key_dim, self.value_dim, self.is_interleaved = key_dim, value_dim, is_interleaved
        # Keys and values are padded with zeros to one width, for which torch has fused kernels.
        self.width = max(key_dim + rotary_dim, value_dim)
        self._absorbed = SoftmaxContextOp(num_heads, 1, rotary_dim + latent_dim, scale)
        self._expanded = SoftmaxContextOp(num_heads, num_heads, self.width, scale)
        self._numbers = LatentNumbers(num_heads, latent_dim, rotary_dim, scale, is_interleaved)

    def __call__(self, heads: LatentHeads, cache: torch.Tensor, batch: Batch, expansion: Expansion) -> torch.Tensor:
        """Writes the batch's latents into `cache [num_blocks, 1, block_size, R + L]` and attends.

        Rows of `heads` after those of the batch's tokens, of a prefill, are padding: their context is 0.
        """
        if isinstance(batch, MixedBatch | PrefillBatch) and len(heads.q) > batch.num_tokens:
            context = self(heads.without_padding(batch.num_tokens), cache, batch, expansion)
            return F.pad(context, (0, 0, 0, len(heads.q) - batch.num_tokens))
        if isinstance(batch, MixedBatch):
            decoded, packed = heads.split(len(batch.decode.tokens))
            contexts = self(decoded, cache, batch.decode, expansion), self(packed, cache, batch.prefill, expansion)
            return torch.cat(contexts)
        if isinstance(batch, DecodeBatch):
            return self._decode(heads, cache, batch, expansion)
        return self._prefill(heads, cache, batch, expansion)

    def _decode(
        self, heads: LatentHeads, cache: torch.Tensor, batch: DecodeBatch, expansion: Expansion
    ) -> torch.Tensor:
        absorbed, to_rotate = self._absorb(heads, expansion)
        if use_triton(absorbed) and has_kernel(self._numbers, absorbed):
            latents = kernel_or_reference(self._launch, self.reference, absorbed, to_rotate, heads, cache, batch)
        else:
            latents = self.reference(absorbed, to_rotate, heads, cache, batch)
        return self._expand_contexts(latents, expansion)

    def _absorb(self, heads: LatentHeads, expansion: Expansion) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries times the keys' half of the expansion, `[N, H, L]`, and their part to be rotated, `[N, H, R]`."""
        unrotated, to_rotate = heads.q.split((self.key_dim, self.rotary_dim), -1)
        return torch.bmm(unrotated.transpose(0, 1), self._halves(expansion)[0]).transpose(0, 1), to_rotate

    def reference(
        self,
        absorbed: torch.Tensor,
        to_rotate: torch.Tensor,
        heads: LatentHeads,
        cache: torch.Tensor,
        batch: DecodeBatch | PrefillBatch,
    ) -> torch.Tensor:
        """Absorbed attention in plain torch, or the compiled function of a CPU; of a decode step the kernel's function.

        Args:
            absorbed, to_rotate: the results of `_absorb`.

        Returns the context of latents, `[N, H, L]`.
        """
        q, rows = self._rotate(to_rotate, heads)
        rows = torch.cat((rows, heads.latent), -1)[:, None]  # [N, 1, R + L]
        q = torch.cat((q, absorbed), -1)[:, None]  # [N, 1, H, R + L]
        attend = self._absorbed.reference if use_triton(q) else self._absorbed
        context = attend(QKV(q, rows, rows), KVBlocks(cache, cache), batch)
        return context.unflatten(1, (self.num_heads, -1))[..., self.rotary_dim :]

    def _launch(
        self,
        absorbed: torch.Tensor,
        to_rotate: torch.Tensor,
        heads: LatentHeads,
        cache: torch.Tensor,
        batch: DecodeBatch,
    ) -> torch.Tensor:
        rows = (heads.rotary_key, heads.latent)
        return decode_by_kernels(self._numbers, absorbed, to_rotate, rows, heads.rotary, cache, batch)

    def _prefill(
        self, heads: LatentHeads, cache: torch.Tensor, batch: PrefillBatch, expansion: Expansion
    ) -> torch.Tensor:
        old = None if batch.context is None else batch.context.lengths
        if old is not None and not use_triton(heads.q) and self.is_absorbed(batch.lengths, old):
            latents = self.reference(*self._absorb(heads, expansion), heads, cache, batch)
            return self._expand_contexts(latents, expansion)
        unrotated, to_rotate = heads.q.split((self.key_dim, self.rotary_dim), -1)
        q, keys = self._rotate(to_rotate, heads)
        rows = torch.cat((keys, heads.latent), -1)
        places = write_rows(batch, 1, cache.shape[2])[:, 0]
        cache.view(-1, cache.shape[3]).index_put_((places,), rows)
        if batch.context is not None:
            rows = read_rows(cache, batch.context)
        return self._attend_expanded(torch.cat((q, unrotated), -1), rows, batch, expansion)

    def is_absorbed(self, lengths: tuple[int, ...], context_lengths: tuple[int, ...]) -> bool:
        """Whether absorbed is cheaper for sequences of which `lengths` tokens are new, by the rule above."""
        expansion = self.latent_dim * (self.key_dim + self.value_dim)
        difference = 2 * self.latent_dim - self.key_dim - self.value_dim
        num_old = sum(context_lengths) - sum(lengths)
        pairs = sum(n * (total - n) + n * (n + 1) // 2 for n, total in zip(lengths, context_lengths, strict=True))
        return pairs * difference < num_old * expansion

    def _attend_expanded(
        self, q: torch.Tensor, rows: torch.Tensor, batch: PrefillBatch, expansion: Expansion
    ) -> torch.Tensor:
        """Attention of `q [N, H, R + Dk]` to the tokens of `rows [C, R + L]`: `[N, H * Dv]`."""
        rotated, latents = rows.split((self.rotary_dim, self.latent_dim), -1)
        expanded = latents @ expansion.weight
        if expansion.bias is not None:
            expanded = expanded + expansion.bias
        expanded = expanded.unflatten(1, (self.num_heads, -1))
        keys, values = expanded.split((self.key_dim, self.value_dim), -1)
        keys = torch.cat((rotated[:, None].expand(-1, self.num_heads, -1), keys), -1)
        q, keys, values = (F.pad(x, (0, self.width - x.shape[-1])) for x in (q, keys, values))
        context = self._expanded.attend_packed(QKV(q[:, :, None], keys, values), batch)
        return context.unflatten(1, (self.num_heads, -1))[..., : self.value_dim].flatten(1)

    def _rotate(self, q: torch.Tensor, heads: LatentHeads) -> tuple[torch.Tensor, torch.Tensor]:
        """`q [N, H, R]` and the rotary keys `[N, R]`, rotated; both at once: half the operations."""
        both = torch.cat((q, heads.rotary_key[:, None]), 1)
        rotated = apply_rotary(both, *heads.rotary, is_interleaved=self.is_interleaved)
        return rotated[:, :-1], rotated[:, -1]

    def _halves(self, expansion: Expansion) -> tuple[torch.Tensor, torch.Tensor]:
        """Views `[H, Dk, L]` and `[H, L, Dv]` of the weight."""
        by_head = expansion.weight.t().unflatten(0, (self.num_heads, -1))
        keys, values = by_head.split((self.key_dim, self.value_dim), 1)
        return keys, values.transpose(1, 2)

    def _expand_contexts(self, latents: torch.Tensor, expansion: Expansion) -> torch.Tensor:
        """`[N, H, L]` -> `[N, H * Dv]`."""
        context = torch.bmm(latents.transpose(0, 1), self._halves(expansion)[1]).transpose(0, 1)
        if expansion.bias is not None:
            context = context + expansion.bias.unflatten(0, (self.num_heads, -1))[:, self.key_dim :]
        return context.flatten(1)


def read_rows(cache: torch.Tensor, context: Context) -> torch.Tensor:
    """The rows `[C, R + L]` of the tokens that are attended to, dense."""
    return cache.view(-1, cache.shape[3])[context.blocks * cache.shape[2] + context.offsets]
