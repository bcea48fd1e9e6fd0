"""Triton kernels for the divergence of two heads: both logits stay in registers, only sums or gradients reach memory.

`totals_kernel` reads both heads once: each program processes a run of columns for some tokens and writes the sums that
`totals` combines into both logsumexps and the mean of log(q / p) without them, under the student or under the teacher.
`mixture_kernel` reads them again for the sums of a mixture, which needs both logsumexps. `gradient_kernel` computes a
tile's products again and writes their gradient, `[N, columns]` in the dtype of the student's weights. The backward pass
multiplies it with the hidden states and the head. Products are summed in fp32 and never rounded to 16 bits.

N tokens, E and F the hidden sizes of student and teacher, V columns of the heads, P runs of columns.
"""

from typing import Any, NamedTuple

import torch

from hybrid_engine.ops.dispatch import Launch, prepared, tl, triton
from hybrid_engine.ops.linear_log_prob_kernels import (
    LEAST_ROWS,
    LEAST_RUN,
    NUM_PROGRAMS,
    ProductTile,
    logits_of_tile,
    num_warps,
    shape_args,
    tile_of,
    weights_of_head,
)
from hybrid_engine.ops.linear_log_prob_tiles import HeadPair

__all__ = ["PairSums", "gradient_of_products", "merged", "mixture_sums", "partial_sums"]

FORWARD, REVERSE, MIXTURE = range(3)
"""Kinds of divergences, constants in the kernels."""
MIXTURE_VALUES = 4
"""Tiles that a mixture's sums keep in registers: with 2 they spill."""


class PairSums(NamedTuple):
    """Sums over a part of the vocabulary, fp32, `[N]` each, or `[P, N]` of its runs of columns."""

    base: Any
    """The largest logit of the student."""
    total: Any
    """The sum of exp(logit - base)."""
    taught_base: Any
    """The largest logit of the teacher."""
    taught_total: Any
    weighted: Any
    """The sum of exp(logit - base) times the difference of student's and teacher's logit.

    Logit and base in the exponent are the teacher's for FORWARD, the student's for REVERSE; 0 for MIXTURE.
    """


class HeadArgs(NamedTuple):
    """The input of one side of a kernel's products.

    Weights and `ShapeArgs` are arguments of their own: Triton 3.6 loses pointers of a tuple in a tuple.
    """

    x_ptr: Any
    """`[N, width_in]`: hidden states."""
    width_in: Any


class TotalPointers(NamedTuple):
    """Inputs of a token's gradient, `[N]` fp32 each."""

    log_total_ptr: Any
    taught_log_total_ptr: Any
    slope_ptr: Any
    """sum_u q_u g_u."""
    above_ptr: Any


@triton.jit
def totals_kernel(
    own, own_w, own_shape, taught, taught_w, taught_shape, sums, num_rows, run,
    KIND: tl.constexpr, HAS_SOFTCAP: tl.constexpr, TAUGHT_HAS_SOFTCAP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program 0 is the block of rows, program 1 the run of columns."""
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    base = tl.full([ROWS], float("-inf"), tl.float32)
    taught_base = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    taught_total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS], tl.float32)
    first = tl.program_id(1) * run
    for start in range(first, min(first + run, own_w.width), COLUMNS):
        n = start + tl.arange(0, COLUMNS)
        is_column = (n < own_w.width)[None, :]
        x = logits_of_tile(own.x_ptr, own_w, own_shape, m, n, num_rows, own.width_in, HAS_SOFTCAP, TILE)
        y = logits_of_tile(
            taught.x_ptr, taught_w, taught_shape, m, n, num_rows, taught.width_in, TAUGHT_HAS_SOFTCAP, TILE
        )
        values = tl.where(is_column, x - y, 0.0)
        x = tl.where(is_column, x, float("-inf"))
        y = tl.where(is_column, y, float("-inf"))
        raised = tl.maximum(base, tl.max(x, 1))
        fading = tl.exp(base - raised)
        exps = tl.exp(x - raised[:, None])
        taught_raised = tl.maximum(taught_base, tl.max(y, 1))
        taught_fading = tl.exp(taught_base - taught_raised)
        taught_exps = tl.exp(y - taught_raised[:, None])
        total = total * fading + tl.sum(exps, 1)
        taught_total = taught_total * taught_fading + tl.sum(taught_exps, 1)
        if KIND == 0:  # FORWARD
            weighted = weighted * taught_fading + tl.sum(taught_exps * values, 1)
        if KIND == 1:  # REVERSE
            weighted = weighted * fading + tl.sum(exps * values, 1)
        base = raised
        taught_base = taught_raised
    at = tl.program_id(1).to(tl.int64) * num_rows + m
    tl.store(sums.base + at, base, mask=m < num_rows)
    tl.store(sums.total + at, total, mask=m < num_rows)
    tl.store(sums.taught_base + at, taught_base, mask=m < num_rows)
    tl.store(sums.taught_total + at, taught_total, mask=m < num_rows)
    tl.store(sums.weighted + at, weighted, mask=m < num_rows)


@triton.jit
def log_mixture(log_q, log_p, beta):
    """log(beta p + (1 - beta) q)."""
    one = log_p + tl.log(beta)
    other = log_q + tl.log(1 - beta)
    larger = tl.maximum(one, other)
    return larger + tl.log(1 + tl.exp(tl.minimum(one, other) - larger))


@triton.jit
def mixture_kernel(
    own, own_w, own_shape, taught, taught_w, taught_shape, rows, of_teacher_ptr, of_student_ptr, beta, num_rows, run,
    HAS_SOFTCAP: tl.constexpr, TAUGHT_HAS_SOFTCAP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Writes KL(p || m) and KL(q || m) of each run of columns, `[P, N]` each.

    Program 0 is the block of rows, program 1 the run.
    """
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = m < num_rows
    log_total = tl.load(rows.log_total_ptr + m, mask=is_row, other=0.0)
    taught_log_total = tl.load(rows.taught_log_total_ptr + m, mask=is_row, other=0.0)
    of_teacher = tl.zeros([ROWS], tl.float32)
    of_student = tl.zeros([ROWS], tl.float32)
    first = tl.program_id(1) * run
    for start in range(first, min(first + run, own_w.width), COLUMNS):
        n = start + tl.arange(0, COLUMNS)
        is_column = (n < own_w.width)[None, :]
        x = logits_of_tile(own.x_ptr, own_w, own_shape, m, n, num_rows, own.width_in, HAS_SOFTCAP, TILE)
        y = logits_of_tile(
            taught.x_ptr, taught_w, taught_shape, m, n, num_rows, taught.width_in, TAUGHT_HAS_SOFTCAP, TILE
        )
        log_q = tl.where(is_column, x - log_total[:, None], -1e30)
        log_p = tl.where(is_column, y - taught_log_total[:, None], -1e30)
        mixed = log_mixture(log_q, log_p, beta)
        of_teacher += tl.sum(tl.exp(log_p) * (log_p - mixed), 1)
        of_student += tl.sum(tl.exp(log_q) * (log_q - mixed), 1)
    at = tl.program_id(1).to(tl.int64) * num_rows + m
    tl.store(of_teacher_ptr + at, of_teacher, mask=is_row)
    tl.store(of_student_ptr + at, of_student, mask=is_row)


@triton.jit
def divergence_gradient_kernel(
    own, own_w, own_shape, taught, taught_w, taught_shape, gradient_ptr, rows, beta, num_rows,
    KIND: tl.constexpr, HAS_SOFTCAP: tl.constexpr, TAUGHT_HAS_SOFTCAP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program 0 is the block of rows, program 1 the block of columns."""
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row = m < num_rows
    x = logits_of_tile(own.x_ptr, own_w, own_shape, m, n, num_rows, own.width_in, HAS_SOFTCAP, TILE)
    y = logits_of_tile(taught.x_ptr, taught_w, taught_shape, m, n, num_rows, taught.width_in, TAUGHT_HAS_SOFTCAP, TILE)
    above = tl.load(rows.above_ptr + m, mask=is_row, other=0.0)
    log_q = x - tl.load(rows.log_total_ptr + m, mask=is_row, other=0.0)[:, None]
    log_p = y - tl.load(rows.taught_log_total_ptr + m, mask=is_row, other=0.0)[:, None]
    if KIND == 0:  # FORWARD
        gradient = tl.exp(log_q) - tl.exp(log_p)
    else:
        slope = tl.load(rows.slope_ptr + m, mask=is_row, other=0.0)
        of_q = log_q - log_p if KIND == 1 else (1 - beta) * (log_q - log_mixture(log_q, log_p, beta))  # 1: REVERSE
        gradient = tl.exp(log_q) * (of_q - slope[:, None])
    gradient *= above[:, None] * (own_shape.scale * own_shape.inverse_temperature)
    if HAS_SOFTCAP:
        capped = x / (own_shape.inverse_temperature * own_shape.softcap)
        gradient *= 1 - capped * capped
    at = m.to(tl.int64)[:, None] * own_w.width + n[None, :]
    is_inside = is_row[:, None] & (n < own_w.width)[None, :]
    tl.store(gradient_ptr + at, gradient.to(gradient_ptr.dtype.element_ty), mask=is_inside)


def pair_tile(dtype: torch.dtype, num_rows: int, num_values: int = 2) -> tuple[ProductTile, int]:
    """A tile `num_values` times narrower than that of one head, whose registers as many take, and its warps."""
    tile = tile_of(dtype, num_rows)
    return tile._replace(columns=max(LEAST_ROWS, tile.columns // num_values)), num_warps(tile)


def kind_of(beta: float) -> int:
    """FORWARD, REVERSE or MIXTURE."""
    return {0.0: FORWARD, 1.0: REVERSE}.get(float(beta), MIXTURE)


def partial_sums(pair: HeadPair, beta: float) -> PairSums:
    """`PairSums` of runs of columns, `[P, N]` each."""
    own, taught, (launch, num_runs, run) = _prepared(totals_kernel, pair, kind_of(beta))
    num_rows = len(pair.hidden)
    sums = PairSums(*pair.hidden.new_empty(len(PairSums._fields), num_runs, num_rows, dtype=torch.float32))
    if num_rows:
        launch(*own, *taught, sums, num_rows, run)
    return sums


def merged(parts: PairSums, beta: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both logsumexps, and the mean of student's logit minus teacher's, `[N]` each; `parts` `[P, N]` each."""
    base, taught_base = parts.base.amax(0), parts.taught_base.amax(0)
    fading, taught_fading = torch.exp(parts.base - base), torch.exp(parts.taught_base - taught_base)
    total, taught_total = (parts.total * fading).sum(0), (parts.taught_total * taught_fading).sum(0)
    of_values = (taught_fading, taught_total) if kind_of(beta) == FORWARD else (fading, total)
    mean = (parts.weighted * of_values[0]).sum(0) / of_values[1]
    return base + total.log(), taught_base + taught_total.log(), mean


def mixture_sums(
    pair: HeadPair, log_total: torch.Tensor, taught_log_total: torch.Tensor, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(p || m) and KL(q || m), `[N]` fp32 each, from both logsumexps, `[N]` fp32 each."""
    own, taught, (launch, num_runs, run) = _prepared(mixture_kernel, pair)
    num_rows = len(pair.hidden)
    sums = pair.hidden.new_empty(2, num_runs, num_rows, dtype=torch.float32)
    if num_rows:
        launch(*own, *taught, TotalPointers(log_total, taught_log_total, None, None), *sums, float(beta), num_rows, run)
    return sums[0].sum(0), sums[1].sum(0)


def gradient_of_products(pair: HeadPair, rows: TotalPointers, beta: float) -> torch.Tensor:
    """`[N, columns]`, in the dtype of the student's weights: the gradient of a tile's products, times `rows.above`."""
    own, taught, (launch, _, _) = _prepared(divergence_gradient_kernel, pair, kind_of(beta))
    num_rows = len(pair.hidden)
    gradient = pair.hidden.new_empty(num_rows, len(pair.student.weight))
    if num_rows:
        launch(*own, *taught, gradient, rows, float(beta), num_rows)
    return gradient


def _prepared(
    kernel: Any, pair: HeadPair, kind: int | None = None
) -> tuple[tuple[HeadArgs, Any, Any], tuple[HeadArgs, Any, Any], Any]:
    """Arguments of both sides; the launch, the number of runs, and the columns of a run."""
    sides = [(pair.hidden.contiguous(), pair.student), (pair.taught.contiguous(), pair.teacher)]
    arguments = [
        (HeadArgs(hidden, hidden.shape[1]), weights_of_head(head), shape_args(head.shape)) for hidden, head in sides
    ]
    caps = [head.shape.softcap is not None for _, head in sides]
    tensors = [tensor for hidden, head in sides for tensor in (hidden, head.weight, head.bias)]
    return arguments[0], arguments[1], prepared(_prepare, kernel, kind, *caps, *tensors)


def _prepare(
    kernel: Any, kind: int | None, has_softcap: bool, taught_has_softcap: bool, *tensors: torch.Tensor | None
) -> tuple[Launch, int, int]:
    """`kind`: None for a kernel of one kind; `tensors`: hidden states, weight and bias of both sides."""
    hidden, weight = tensors[:2]
    assert hidden is not None and weight is not None
    num_values = MIXTURE_VALUES if kernel is mixture_kernel else 2
    num_columns, (tile, warps) = len(weight), pair_tile(hidden.dtype, len(hidden), num_values)
    num_blocks, run = -(-len(hidden) // tile.rows), tile.columns
    if kernel is not divergence_gradient_kernel:
        run = max(LEAST_RUN, -(-num_columns // max(1, NUM_PROGRAMS // max(num_blocks, 1))))
        run = -(-run // tile.columns) * tile.columns
    num_runs = -(-num_columns // run)
    constants = {} if kind is None else {"KIND": kind}
    launch = Launch(
        kernel, (num_blocks, num_runs), hidden.device, **constants, HAS_SOFTCAP=has_softcap,
        TAUGHT_HAS_SOFTCAP=taught_has_softcap, TILE=tile, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return launch, num_runs, run
