"""Sampling: filter, draw one token per row, and its fp32 log-probability.

    token_s = min { t : cdf_s(t) > u_s },  u_s = uniform(key_s, position_s) in [0, 1)

The noise is one number per row, a hash of (key, position), so that a draw depends only on its own logits: not on the
batch, its order, a preemption or the number of processes. Filters apply in the order of Hugging Face's logits warpers:
temperature, top-k, top-p, min-p. The log-probability is that of the temperature-scaled, unfiltered distribution.

Moves the S x V logits once in the kernels, which are two launches (see `sample_kernels.py`); about four times in the
reference.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hybrid_engine.ops import dispatch
from hybrid_engine.ops.dispatch import check_tensor, next_power_of_2, say_once, use_triton
from hybrid_engine.ops.kernel_errors import kernel_or_reference
from hybrid_engine.ops.log_prob import sampled_logprobs, token_logprobs
from hybrid_engine.ops.sample_filters import filter_logits
from hybrid_engine.ops.sample_kernels import (
    CHUNK,
    MAX_CANDIDATES,
    MAX_CHUNKS,
    MAX_KEPT,
    TILE,
    Adjustment,
    Cut,
    Draw,
    Filters,
    Logits,
    Scanned,
    Sizes,
    draw_kernel,
    greedy_kernel,
    scan_kernel,
)
from hybrid_engine.ops.vocabulary import first_above, first_largest

# splitmix64 (Steele, Lea & Flood 2014): a bijective mix of 64 bits, in int64 arithmetic that wraps.
_GOLDEN_GAMMA = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _splitmix64(x: torch.Tensor) -> torch.Tensor:
    x = x + _GOLDEN_GAMMA
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def keyed_uniform(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Uniform fp64 numbers in [0, 1), one for each (key, position) pair of int64 tensors `[S]`."""
    bits = _splitmix64(_splitmix64(keys) ^ positions)
    return _shift_right(bits, 11).double() * 2.0**-53


def penalize_repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: float | torch.Tensor) -> torch.Tensor:
    """Logits of the tokens that `seen [S, V]` (bool) marks: divided by `penalty` when positive, else multiplied.

    `penalty` is a number, or `[S, 1]` fp32 with one for each row.
    Keskar et al. 2019, arXiv 1909.05858, section 4.1, with the sign rule of Hugging Face's processor.
    """
    penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalized, logits)


def choose_cut(vocab: int, top_k: int) -> Cut:
    """Tile sizes for rows of `vocab` logits; `top_k` is 0 if it is off."""
    chunks = next_power_of_2(-(-vocab // CHUNK))
    kept = next_power_of_2(top_k) if 0 < top_k <= MAX_KEPT else MAX_KEPT
    return Cut(CHUNK, chunks, min(kept, MAX_CANDIDATES // chunks), TILE)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options of drawing tokens, the same for every row."""

    do_sample: bool
    """False takes the likeliest token, the first of equal ones, without temperature and filters."""
    temperature: float = 1.0
    top_k: int = 0
    """Number of tokens kept, as defined in `sample_filters.py` and Hugging Face; 0 keeps all."""
    top_p: float = 1.0
    """The probability kept; 1 keeps all."""
    min_p: float = 0.0
    """The smallest probability kept, as a fraction of the largest; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Penalty of tokens seen before; 1 is off."""
    min_new_tokens: int = 0
    """Draws before which `eos_token_ids` cannot be drawn."""
    eos_token_ids: tuple[int, ...] = ()


class SampleOp:
    """Callable `(logits, keys, draws, seen, slots) -> (tokens, logprobs)`, which draws by `options`.

    Args:
        is_exact: log-probabilities have the bits of the trainer's `token_logprobs`; otherwise a compiled function may
            round differently.
    """

    def __init__(self, options: SamplingOptions, is_exact: bool = False):
        self.options, self.is_exact = options, is_exact
        # An integer would compile separate kernels.
        self.temperature = float(options.temperature) if options.do_sample else 1.0
        self._banned: torch.Tensor | None = None  # on the device of the first call

    def __call__(
        self,
        logits: torch.Tensor,
        keys: torch.Tensor,
        draws: torch.Tensor,
        seen: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws one token for each row of `logits [S, V]` fp32.

        Args:
            keys, draws: `[S]` int64, seed the noise; `draws` counts the row's tokens drawn so far.
            seen: `[C, V]` bool, tokens that are penalized, row `slots[s]` for row s; unused at penalty 1.
            slots: `[S]` int64.

        Returns:
            tokens `[S]` int64 and, under the logits as given, logprobs `[S]` fp32.
        """
        if use_triton(logits):
            if logits.shape[1] <= CHUNK * MAX_CHUNKS:
                return kernel_or_reference(self._launch, self.reference, logits, keys, draws, seen, slots)
            say_once(f"a vocabulary of {logits.shape[1]} tokens is beyond the sampling kernel's {CHUNK * MAX_CHUNKS}")
        return self.reference(logits, keys, draws, seen, slots)

    def _launch(
        self,
        logits: torch.Tensor,
        keys: torch.Tensor,
        draws: torch.Tensor,
        seen: torch.Tensor | None,
        slots: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._check(logits, keys, draws, seen, slots)
        (num_rows, vocab), device = logits.shape, logits.device
        cut = choose_cut(vocab, self.options.top_k if self.options.top_k < vocab else 0)
        sizes = Sizes(vocab, -(-vocab // cut.chunk))
        tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
        draw = Draw(keys, draws, tokens, torch.empty(num_rows, dtype=torch.float32, device=device))
        filters = self._filters(vocab)
        given = Logits(logits, logits.stride(0), self.temperature)
        scanned = self._scan(given, draws, self._adjustment(device, seen, slots), filters, sizes, cut)
        if not self.options.do_sample:
            dispatch.launch(greedy_kernel, (num_rows,), given, scanned, draw, sizes, device=device, CUT=cut)
        else:
            adjusted = scanned.adjusted_ptr
            drawn = given if adjusted is None else Logits(adjusted, vocab, 1.0)
            dispatch.launch(
                draw_kernel, (num_rows,), given, drawn, scanned, filters, draw, sizes,
                device=device, CUT=cut, num_warps=8,
            )  # fmt: skip
        if self.is_exact:
            return draw.tokens_ptr, token_logprobs(logits, draw.tokens_ptr, self.temperature)
        return draw.tokens_ptr, draw.logprobs_ptr

    def _check(
        self,
        logits: torch.Tensor,
        keys: torch.Tensor,
        draws: torch.Tensor,
        seen: torch.Tensor | None,
        slots: torch.Tensor | None,
    ) -> None:
        num_rows, vocab = logits.shape
        check_tensor("logits", logits, dtype=torch.float32, is_dense_last=True)
        for name, numbers in (("keys", keys), ("draws", draws)):
            check_tensor(name, numbers, like=logits, dtype=torch.int64, shape=(num_rows,), is_dense_last=True)
        if self.options.repetition_penalty != 1.0:
            assert seen is not None and slots is not None
            check_tensor("seen", seen, like=logits, dtype=torch.bool, shape=(None, vocab), is_dense_last=True)
            check_tensor("slots", slots, like=logits, dtype=torch.int64, shape=(num_rows,), is_dense_last=True)

    def _filters(self, vocab: int) -> Filters:
        """The filters that can exclude a token."""
        return Filters(
            top_k=float(self.options.top_k) if 0 < self.options.top_k < vocab else None,
            top_p=float(self.options.top_p) if self.options.top_p < 1.0 else None,
            log_min_p=math.log(self.options.min_p) if self.options.min_p > 0.0 else None,
        )

    def _adjustment(
        self, device: torch.device, seen: torch.Tensor | None, slots: torch.Tensor | None
    ) -> Adjustment | None:
        """The changes of the logits before drawing, or None."""
        marks, ends = (None, 0, None), (None, 0, 0)
        if self.options.repetition_penalty != 1.0 and seen is not None:
            marks = (seen.view(torch.uint8), seen.stride(0), slots)
        if self.options.min_new_tokens > 0 and self.options.eos_token_ids:
            ends = (self.banned(device), len(self.options.eos_token_ids), self.options.min_new_tokens)
        if marks[0] is None and ends[0] is None:
            return None
        return Adjustment(float(self.options.repetition_penalty), *marks, *ends)

    def _scan(
        self,
        logits: Logits,
        draws: torch.Tensor,
        adjustment: Adjustment | None,
        filters: Filters,
        sizes: Sizes,
        cut: Cut,
    ) -> Scanned:
        """Launches the scan, and allocates its outputs."""
        device, (num_rows, num_chunks) = draws.device, (len(draws), sizes.num_chunks)
        is_filtered = self.options.do_sample and any(amount is not None for amount in filters)
        raw = torch.empty(num_rows, 2, num_chunks, dtype=torch.float32, device=device)
        own, adjusted, best, candidates, numbers = raw, None, None, None, None
        if not self.options.do_sample:
            best = torch.empty(num_rows, 2, num_chunks, dtype=torch.int32, device=device)
        elif adjustment is not None:
            own = torch.empty_like(raw)
            adjusted = torch.empty(num_rows, sizes.vocab, dtype=torch.float32, device=device)
        if is_filtered:
            candidates = torch.empty(num_rows, num_chunks, cut.kept, dtype=torch.float32, device=device)
            numbers = torch.empty(num_rows, 3, num_chunks, dtype=torch.int32, device=device)
        scanned = Scanned(raw, own, adjusted, best, candidates, numbers)
        unchanged = Adjustment(1.0, None, 0, None, None, 0, 0)
        dispatch.launch(
            scan_kernel, (num_rows, num_chunks), logits, draws, adjustment or unchanged, scanned, sizes,
            device=device, CUT=cut, num_warps=8,
        )  # fmt: skip
        return scanned

    def reference(
        self,
        logits: torch.Tensor,
        keys: torch.Tensor,
        draws: torch.Tensor,
        seen: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference: the function of the kernel in plain torch."""
        with self._adjusted(logits, draws, seen, slots) as adjusted:
            tokens = self._draw(adjusted, keys, draws) if self.options.do_sample else first_largest(adjusted)
        measure = token_logprobs if self.is_exact else sampled_logprobs
        return tokens, measure(logits, tokens, self.temperature)

    @contextmanager
    def _adjusted(
        self, logits: torch.Tensor, draws: torch.Tensor, seen: torch.Tensor | None, slots: torch.Tensor | None
    ) -> Iterator[torch.Tensor]:
        """The logits that are drawn from: with the repetition penalty, and early end-of-sequence tokens banned.

        The ban is written into the logits and undone afterwards: copying them takes longer than the greedy choice.
        """
        if self.options.repetition_penalty != 1.0:
            assert seen is not None and slots is not None
            logits = penalize_repetition(logits, seen[slots], self.options.repetition_penalty)
        if self.options.min_new_tokens == 0 or not self.options.eos_token_ids:
            yield logits
            return
        banned = self.banned(logits.device)
        ends = logits[:, banned]
        is_early = (draws < self.options.min_new_tokens)[:, None]
        logits.index_copy_(1, banned, ends.masked_fill(is_early, float("-inf")))
        try:
            yield logits
        finally:
            logits.index_copy_(1, banned, ends)

    def banned(self, device: torch.device) -> torch.Tensor:
        """The end-of-sequence tokens on `device`, created once, as a graph may hold their address."""
        if self._banned is None or self._banned.device != device:
            self._banned = torch.tensor(self.options.eos_token_ids, dtype=torch.int64, device=device)
        return self._banned

    def _draw(self, adjusted: torch.Tensor, keys: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        scaled = adjusted if self.temperature == 1.0 else adjusted / self.temperature
        probs = filter_logits(scaled, self.options.top_k, self.options.top_p, self.options.min_p).softmax(-1)
        # The noise rounds to 1.0 in fp32 about once in 3e7 draws, which then takes the last token with any probability.
        return first_above(probs, keyed_uniform(keys, draws).float()[:, None]).squeeze(1)
