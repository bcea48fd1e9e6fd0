"""Sampling: filter, draw one token per row, and its fp32 log-probability.

    token_s = min { t : cdf_s(t) > u_s },  u_s = uniform(key_s, position_s) in [0, 1)

The noise is one number per row, a hash of (key, position), so that a draw depends only on its own logits: not on the
batch, its order, a preemption or the number of processes. Filters apply in the order of Hugging Face's logits warpers:
temperature, top-k, top-p, min-p. The log-probability is that of the temperature-scaled, unfiltered distribution.

    logprob(token) = logits[token] / temperature - logsumexp(logits / temperature)

`token_logprobs` is one function for the sampler and the trainer, in fp32 whatever the dtype of the logits. In its
kernel one program takes one row, in chunks from its start, and no argument depends on the number of rows: a row's
result has the same bits in every batch, for the trainer and for a rollout.

Moves the S x V logits once in the kernels, which are two launches (see `sample_kernels.py`); about four times in the
reference.

Each filter keeps the tokens that reach a threshold, so tokens of equal logit are kept or excluded together. top-p's
threshold is the largest value down to which the probabilities add up to `top_p`.

On a CPU numpy computes order and ranks: its vector sort takes 1.1 ms for 32 rows of 8192 and its partition 0.5, where
torch, which always sorts the indices too, takes 20.7 and 1.4 (one core with AVX-512, torch 2.13, numpy 2.4). They are
registered as torch operators, so that recorders of operators see them.

Searches along rows go in two steps, among sums or maxima of blocks, then inside one block: a running sum or an argmax
over a whole row processes one element at a time: 290 and 595 us for 32 rows of 8192 on one core, where the sums and
maxima of blocks take 82 and 57 (Xeon with AVX-512, torch 2.13).

S rows, V vocabulary, n blocks.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from hybrid_engine.ops import cpu_kernels
from hybrid_engine.ops.dispatch import (
    Launch,
    check_tensor,
    kernel_or_reference,
    next_power_of_2,
    prepared,
    say_once,
    use_triton,
)
from hybrid_engine.ops.fixed_product import aligned, chunk_of
from hybrid_engine.ops.sample_kernels import (
    CHUNK,
    MAX_CANDIDATES,
    MAX_CHUNKS,
    MAX_KEPT,
    TILE,
    Adjustment,
    DrawBuffers,
    Filters,
    Logits,
    SampleTiles,
    Scanned,
    Sizes,
    draw_kernel,
    greedy_kernel,
    logprob_kernel,
    scan_kernel,
)

# splitmix64 (Steele, Lea & Flood 2014): a bijective mix of 64 bits, in int64 arithmetic that wraps.
_GOLDEN_GAMMA = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685
BLOCK = 128
UNCHANGED = Adjustment(1.0, None, 0, None, None, 0, 0)


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


def choose_cut(vocab: int, top_k: int) -> SampleTiles:
    """Tile sizes for rows of `vocab` logits; `top_k` is 0 if it is off."""
    chunks = next_power_of_2(-(-vocab // CHUNK))
    kept = next_power_of_2(top_k) if 0 < top_k <= MAX_KEPT else MAX_KEPT
    return SampleTiles(CHUNK, chunks, min(kept, MAX_CANDIDATES // chunks), TILE)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options of drawing tokens, the same for every row."""

    do_sample: bool
    """False takes the likeliest token, the first of equal ones, without temperature and filters."""
    temperature: float = 1.0
    top_k: int = 0
    """Number of tokens kept, as defined below and in Hugging Face; 0 keeps all."""
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
        ends = (len(options.eos_token_ids), options.min_new_tokens)
        self._form = SamplingForm(
            options.do_sample, options.top_k, options.top_p < 1.0, options.min_p > 0.0,
            options.repetition_penalty != 1.0, ends if all(ends) else (0, 0),
        )  # fmt: skip
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
        sampling = prepared(_prepare, self._form, logits, keys, draws, seen, slots)
        (num_rows, vocab), device, sizes = logits.shape, logits.device, sampling.sizes
        tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
        draw = DrawBuffers(keys, draws, tokens, torch.empty(num_rows, dtype=torch.float32, device=device))
        given = Logits(logits, logits.stride(0), self.temperature)
        adjustment = self._adjustment(device, seen, slots)
        scanned = self._scanned(sampling, num_rows, device, adjustment is not None)
        sampling.scan(given, draws, adjustment or UNCHANGED, scanned, sizes)
        if not self.options.do_sample:
            sampling.choose(given, scanned, draw, sizes)
        else:
            adjusted = scanned.adjusted_ptr
            drawn = given if adjusted is None else Logits(adjusted, vocab, 1.0)
            sampling.choose(given, drawn, scanned, self._filters(vocab), draw, sizes)
        if self.is_exact:
            return draw.tokens_ptr, token_logprobs(logits, draw.tokens_ptr, self.temperature)
        return draw.tokens_ptr, draw.logprobs_ptr

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

    def _scanned(self, sampling: "Sampling", num_rows: int, device: torch.device, is_adjusted: bool) -> Scanned:
        """Memory for the outputs of the scan."""
        num_chunks = sampling.sizes.num_chunks
        raw = torch.empty(num_rows, 2, num_chunks, dtype=torch.float32, device=device)
        own, adjusted, best, candidates, numbers = raw, None, None, None, None
        if not self.options.do_sample:
            best = torch.empty(num_rows, 2, num_chunks, dtype=torch.int32, device=device)
        elif is_adjusted:
            own = torch.empty_like(raw)
            adjusted = torch.empty(num_rows, sampling.sizes.vocab, dtype=torch.float32, device=device)
        if sampling.is_filtered:
            candidates = torch.empty(num_rows, num_chunks, sampling.num_kept, dtype=torch.float32, device=device)
            numbers = torch.empty(num_rows, 3, num_chunks, dtype=torch.int32, device=device)
        return Scanned(raw, own, adjusted, best, candidates, numbers)

    def reference(
        self,
        logits: torch.Tensor,
        keys: torch.Tensor,
        draws: torch.Tensor,
        seen: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference: the function of the kernel in plain torch."""
        if self._draws_as_given and not self.is_exact and cpu_kernels.can_search(logits):
            scaled = self._scaled(logits)
            tokens, sums = cpu_kernels.draw_rows(scaled, keyed_uniform(keys, draws).float())
            return tokens, scaled.gather(1, tokens[:, None]).squeeze(1) - sums
        with self._adjusted(logits, draws, seen, slots) as adjusted:
            tokens = self._draw(adjusted, keys, draws) if self.options.do_sample else first_largest(adjusted)
        measure = token_logprobs if self.is_exact else sampled_logprobs
        return tokens, measure(logits, tokens, self.temperature)

    @property
    def _draws_as_given(self) -> bool:
        """Whether tokens are drawn from the distribution that their log-probabilities are of."""
        options = self.options
        bans = options.min_new_tokens > 0 and bool(options.eos_token_ids)
        is_filtered = options.top_k > 0 or options.top_p < 1.0 or options.min_p > 0.0
        return options.do_sample and not (bans or is_filtered) and options.repetition_penalty == 1.0

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.temperature == 1.0 else logits / self.temperature

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
        scaled = self._scaled(adjusted)
        return draw_rows(filter_logits(scaled, self.options.top_k, self.options.top_p, self.options.min_p), keys, draws)


def draw_rows(logits: torch.Tensor, keys: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """`[S]` int64: a token of each row, drawn from softmax(logits), `logits [S, V]`; `keys` and `draws` seed the noise.

    On a CPU it is compiled: two passes over a row, which the cache holds, without a copy of the logits.
    """
    # The noise rounds to 1.0 in fp32 about once in 3e7 draws, which then takes the last token with any probability.
    noise = keyed_uniform(keys, draws).float()
    if cpu_kernels.can_search(logits):
        return cpu_kernels.draw_rows(logits, noise)[0]
    return first_above(logits.softmax(-1), noise[:, None]).squeeze(1)


class SamplingForm(NamedTuple):
    """The options that kernels are compiled or launched for; not the numbers that change with each request."""

    do_sample: bool
    top_k: int
    has_top_p: bool
    has_min_p: bool
    has_penalty: bool
    ends: tuple[int, int]  # how many are banned, and in how many draws


class Sampling(NamedTuple):
    """Launches for logits of one form."""

    scan: Launch
    choose: Launch
    sizes: Sizes
    is_filtered: bool
    num_kept: int  # candidates of a chunk


def _prepare(
    form: SamplingForm,
    logits: torch.Tensor,
    keys: torch.Tensor,
    draws: torch.Tensor,
    seen: torch.Tensor | None,
    slots: torch.Tensor | None,
) -> Sampling:
    num_rows, vocab = logits.shape
    check_tensor("logits", logits, dtype=torch.float32, is_dense_last=True)
    for name, numbers in (("keys", keys), ("draws", draws)):
        check_tensor(name, numbers, like=logits, dtype=torch.int64, shape=(num_rows,), is_dense_last=True)
    if form.has_penalty:
        assert seen is not None and slots is not None
        check_tensor("seen", seen, like=logits, dtype=torch.bool, shape=(None, vocab), is_dense_last=True)
        check_tensor("slots", slots, like=logits, dtype=torch.int64, shape=(num_rows,), is_dense_last=True)
    top_k = form.top_k if form.top_k < vocab else 0
    cut = choose_cut(vocab, top_k)
    sizes = Sizes(vocab, -(-vocab // cut.chunk))
    scan = Launch(scan_kernel, (num_rows, sizes.num_chunks), logits.device, CUT=cut, num_warps=8)
    if form.do_sample:
        choose = Launch(draw_kernel, (num_rows,), logits.device, CUT=cut, num_warps=8)
    else:
        choose = Launch(greedy_kernel, (num_rows,), logits.device, CUT=cut)
    is_filtered = form.do_sample and (top_k > 0 or form.has_top_p or form.has_min_p)
    return Sampling(scan, choose, sizes, is_filtered, cut.kept)


def filter_logits(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """-inf for the tokens that top-k (0 = off), top-p (1 = off) or min-p (0 = off) exclude; `logits [S, V]`."""
    if 0 < top_k < logits.shape[-1]:
        logits = keep_from(_kth_largest(logits, top_k), logits)
    if top_p < 1.0:
        logits = keep_from(nucleus_threshold(logits, top_p), logits)
    if min_p > 0.0:
        logits = keep_from(logits.amax(-1, keepdim=True) + math.log(min_p), logits)
    return logits


def keep_from(threshold: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """-inf for values below `threshold [S, 1]`.

    By signs: `masked_fill` decides value by value and takes 1.4 ms for 32 rows of 8192 with unpredictable masks, where
    this takes 0.6.
    """
    threshold = -(0.0 - threshold)  # 0 becomes -0, so that the difference to either zero is +0
    room = torch.copysign(torch.full_like(threshold, math.inf), logits - threshold)
    return torch.minimum(logits, room)


@torch.library.custom_op("hybrid_engine::kth_largest", mutates_args=(), device_types="cpu")
def _kth_largest_on_cpu(rows: torch.Tensor, k: int) -> torch.Tensor:
    rank = rows.shape[1] - k
    return torch.from_numpy(np.partition(rows.numpy(), rank, axis=-1)[:, rank : rank + 1].copy())


@torch.library.custom_op("hybrid_engine::descending", mutates_args=(), device_types="cpu")
def _descending_on_cpu(rows: torch.Tensor) -> torch.Tensor:
    negative = torch.neg(rows).contiguous()
    negative.numpy().sort(axis=-1)
    return negative.neg_()


def _kth_largest(logits: torch.Tensor, k: int) -> torch.Tensor:
    """`[S, 1]`: the k-th largest of each row of `logits [S, V]`."""
    if logits.device.type != "cpu":
        return logits.topk(k, dim=-1).values[:, -1:]
    return _kth_largest_on_cpu(logits.detach(), k)


@torch.library.custom_op("hybrid_engine::kth_largest_by_row", mutates_args=(), device_types="cpu")
def _kth_largest_by_row_on_cpu(rows: torch.Tensor, ks: torch.Tensor) -> torch.Tensor:
    ranks = rows.shape[1] - ks.numpy()
    parted = np.partition(rows.numpy(), np.unique(ranks), axis=-1)  # each rank is at its place in every row
    return torch.from_numpy(np.take_along_axis(parted, ranks, axis=-1))


def kth_largest_by_row(logits: torch.Tensor, ks: torch.Tensor) -> torch.Tensor:
    """`[S, 1]`: for each row of `logits [S, V]` the k-th largest, with the row's k, 1 to V, in `ks [S, 1]` int64."""
    if logits.device.type != "cpu":
        return logits.sort(dim=-1, descending=True).values.gather(1, ks - 1)
    return _kth_largest_by_row_on_cpu(logits.detach(), ks)


def _descending(logits: torch.Tensor) -> torch.Tensor:
    if logits.device.type != "cpu":
        return logits.sort(dim=-1, descending=True).values
    return _descending_on_cpu(logits.detach())


def nucleus_threshold(logits: torch.Tensor, top_p: float | torch.Tensor) -> torch.Tensor:
    """`[S, 1]`: the largest value such that the probability of all tokens not below it reaches `top_p`.

    `top_p` is a number, or `[S, 1]` fp32.
    """
    values = _descending(logits)
    # The first to reach top_p is the first above the number just below it.
    wanted = torch.zeros_like(values[:, :1]) + top_p
    share = torch.nextafter(wanted, torch.zeros_like(wanted))
    return values.gather(1, first_above(values.softmax(-1), share))


def _reduce_blocks(values: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`[S, n]`: `reduce` along the last dimension of each block of `values [S, V]`."""
    num_whole, num_rest = divmod(values.shape[1], BLOCK)
    whole, rest = values.split((num_whole * BLOCK, num_rest), dim=1)
    parts = [reduce(whole.unflatten(1, (num_whole, BLOCK)))] if num_whole else []
    parts += [reduce(rest.unsqueeze(1))] if num_rest else []
    return torch.cat(parts, dim=1)


def _places(blocks: torch.Tensor, num_values: int) -> torch.Tensor:
    """`[S, BLOCK]`: the places of the values of `blocks [S, 1]`; places beyond the end are set to the last one."""
    inside = torch.arange(min(BLOCK, num_values), device=blocks.device)
    return (blocks * BLOCK + inside).clamp_(max=num_values - 1)


def first_largest(values: torch.Tensor) -> torch.Tensor:
    """`[S]`: the index of the largest of `values [S, V]`, the first of equal ones."""
    if cpu_kernels.can_search(values):
        return cpu_kernels.first_largest(values)
    block = _reduce_blocks(values, lambda part: part.amax(-1)).argmax(-1, keepdim=True)
    places = _places(block, values.shape[1])
    return places.gather(1, values.gather(1, places).argmax(-1, keepdim=True)).squeeze(1)


def first_above(weights: torch.Tensor, share: torch.Tensor | float) -> torch.Tensor:
    """`[S, 1]`: the first index up to which `weights [S, V]`, none negative, add up to more than `share` of their sum.

    Args:
        share: `[S, 1]` or a number, in [0, 1]. At 1, or if rounding has the same effect, the last weight above 0 is
            taken.
    """
    sums = _reduce_blocks(weights, lambda part: part.sum(-1))
    totals = sums.cumsum(-1)
    target = share * totals[:, -1:]
    block = _first_above(totals, target)
    before = totals.gather(1, (block - 1).clamp_(min=0)).masked_fill_(block == 0, 0.0)
    places = _places(block, weights.shape[1])
    # Places beyond the end repeat the last weight, which no target reaches.
    inside = weights.gather(1, places).cumsum(-1)
    return places.gather(1, _first_above(inside, target - before))


def _first_above(totals: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`[S, 1]`: the first index where the running sums `totals [S, n]` exceed `target [S, 1]`, or reach their end."""
    last = totals[:, -1:]
    target = torch.minimum(target, torch.nextafter(last, torch.zeros_like(last)))
    # NaN sorts beyond the end: the index stays inside, and the log-probability shows the NaN.
    return torch.searchsorted(totals, target, right=True).clamp_(max=totals.shape[1] - 1)


def sampled_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """`token_logprobs` for a rollout that need not have its bits: compiled on a CPU, with different rounding."""
    if not cpu_kernels.can_search(logits):
        return token_logprobs(logits, tokens, temperature)
    chosen = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) / temperature
    return chosen - cpu_kernels.log_sum_exp(logits, temperature)


class _KernelLogprobs(torch.autograd.Function):
    """The kernel's log-probabilities of `logits [N, V]`, which it reads in fp32; the gradient in torch.

    Between the passes the logits keep their dtype: 16 bits take half the memory of fp32.
    """

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
        logits, places, (num_rows, vocab) = aligned(given.float()), tokens.contiguous(), given.shape
        logprobs, lse = (logits.new_empty(num_rows) for _ in range(2))
        if num_rows:
            launch = prepared(_prepare_logprobs, logits, places)
            launch(logits, places, logprobs, lse, vocab, temperature)
        ctx.save_for_backward(given, tokens, lse)
        ctx.temperature = temperature
        return logprobs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        given, tokens, lse = ctx.saved_tensors
        # The gradient of the token's own logit; every logit also gets minus its probability times it.
        scaled = gradient[:, None] / ctx.temperature
        found = _divided(given, ctx.temperature).sub_(lse[:, None]).exp_().mul_(-scaled)
        return found.scatter_add_(1, tokens[:, None], scaled).to(given.dtype), None, None


def _prepare_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> Launch:
    num_rows, vocab = logits.shape
    return Launch(logprob_kernel, (num_rows,), logits.device, CHUNK=chunk_of(vocab), num_warps=4)


def _divided(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """`logits / temperature` in fp32, in new memory: one copy of the logits for any dtype."""
    copy = logits.float()
    return logits / temperature if copy is logits else copy.div_(temperature)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of `tokens` under softmax(logits / temperature).

    Args:
        logits: `[..., V]`, any float dtype.
        tokens: `[...]` int64, each in `[0, V)`.
        temperature: above 0.

    Returns:
        `[...]` fp32, differentiable in `logits`.
    """
    if use_triton(logits):
        return kernel_or_reference(_logprobs_by_kernel, _logprobs_in_torch, logits, tokens, temperature)
    return _logprobs_in_torch(logits, tokens, temperature)


def _logprobs_by_kernel(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    rows = logits.reshape(-1, logits.shape[-1])
    return _KernelLogprobs.apply(rows, tokens.reshape(-1), float(temperature)).view(tokens.shape)


def _logprobs_in_torch(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    scaled = logits.float() if temperature == 1.0 else _divided(logits, temperature)
    chosen = scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return chosen - scaled.logsumexp(-1)
