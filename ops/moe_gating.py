"""Chooses the experts of each token and their weights, and sorts the tokens by expert.

    softmax_then_topk   p = softmax(logits) in fp32;  weights = p at its top_k largest   (/ their sum if normalizes)
    topk_then_softmax   weights = softmax of the top_k largest logits                    (gpt-oss)

Mixtral, Qwen-MoE and DeepSpeed's top-1 (not normalized) and top-2 (normalized) gates are the first form; none drops
tokens over a capacity, since a token's result must not depend on its batch. Equal scores go to the lower expert. The
pairs (token, slot) are then sorted by expert, stably, by a count per expert, so that each expert's tokens are adjacent
in the grouped product.

N tokens, X experts, M = N top_k pairs. Moves N X logits and about 8 M (X + 1) bytes of expert indices that stay
in L2, does about top_k N X operations. Shapes depend only on N, top_k and X, and the host reads no values, so a CUDA
graph can capture it.

Sources: transformers, models/{mixtral,qwen2_moe,qwen3_moe,gpt_oss}/modeling_*.py (TopKRouter); DeepSpeed,
deepspeed/moe/sharded_moe.py (top1gating, top2gating).
"""

from typing import Literal, NamedTuple

import torch

from hybrid_engine.ops.dispatch import (
    Launch,
    check_tensor,
    kernel_or_reference,
    next_power_of_2,
    prepared,
    say_once,
    tl,
    triton,
    use_triton,
)

SCORINGS = ("softmax_then_topk", "topk_then_softmax")
# Number of logits that one program of the gating kernel holds in registers.
TILE_ELEMENTS = 1024
# Number of pairs that one step of the sorting kernel reads.
SORT_BLOCK = 1024
# With more experts a row of logits does not fit one program.
MAX_EXPERTS = 1024


class ExpertRouting(NamedTuple):
    """The experts of N tokens. M = N top_k pairs; pair `n * top_k + slot` is token n's expert in that slot."""

    weights: torch.Tensor  # [N, top_k]
    experts: torch.Tensor  # [N, top_k] int64, best first
    order: torch.Tensor  # [M] int64: pairs sorted by expert, and by pair within one
    offsets: torch.Tensor  # [X + 1] int32: expert x has order[offsets[x] : offsets[x + 1]]


class MoEGatingOp:
    """Callable `(logits [N, X]) -> Routing`.

    Args:
        normalizes: softmax_then_topk only: the weights of a token are divided by their sum.
        fp32_weights: weights stay fp32 (Mixtral) instead of being rounded to the dtype of the logits.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        scoring: Literal["softmax_then_topk", "topk_then_softmax"] = "softmax_then_topk",
        normalizes: bool = True,
        fp32_weights: bool = False,
    ):
        if scoring not in SCORINGS:
            raise ValueError(f"scoring={scoring!r} must be one of {', '.join(SCORINGS)}")
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k={top_k} must be from 1 to num_experts={num_experts}")
        self.num_experts, self.top_k = num_experts, top_k
        self.scoring, self.normalizes, self.fp32_weights = scoring, normalizes, fp32_weights

    def __call__(self, logits: torch.Tensor) -> ExpertRouting:
        """Raises ValueError for logits of another shape."""
        check_tensor("router logits", logits, shape=(None, self.num_experts))
        if use_triton(logits):
            if self.num_experts <= MAX_EXPERTS:
                return kernel_or_reference(self._launch, self.reference, logits)
            say_once(f"MoEGatingOp: {self.num_experts} experts, over {MAX_EXPERTS}, run on the torch reference")
        return self.reference(logits)

    def reference(self, logits: torch.Tensor) -> ExpertRouting:
        """The reference: the function of the kernel in plain torch."""
        softmax_first = self.scoring == "softmax_then_topk"
        softmax_dtype = torch.promote_types(logits.dtype, torch.float32)
        scores = torch.softmax(logits, dim=-1, dtype=softmax_dtype) if softmax_first else logits
        # A stable sort, because torch.topk does not define the order of equal scores.
        values, experts = torch.sort(scores, dim=-1, descending=True, stable=True)
        values, experts = values[:, : self.top_k], experts[:, : self.top_k].contiguous()
        if not softmax_first:
            weights = torch.softmax(values, dim=-1, dtype=softmax_dtype)
        else:
            weights = values / values.sum(dim=-1, keepdim=True) if self.normalizes else values
        flat = experts.reshape(-1)
        bounds = torch.arange(self.num_experts + 1, device=flat.device)
        by_expert, order = torch.sort(flat, stable=True)
        offsets = torch.searchsorted(by_expert, bounds).to(torch.int32)
        return ExpertRouting(weights.to(self._weights_dtype(logits)).contiguous(), experts, order, offsets)

    def _weights_dtype(self, logits: torch.Tensor) -> torch.dtype:
        return torch.float32 if self.fp32_weights else logits.dtype

    def _launch(self, logits: torch.Tensor) -> ExpertRouting:
        num_tokens, device = len(logits), logits.device
        num_pairs = num_tokens * self.top_k
        weights = torch.empty(num_tokens, self.top_k, dtype=self._weights_dtype(logits), device=device)
        experts = torch.empty(num_tokens, self.top_k, dtype=torch.int64, device=device)
        order = torch.empty(num_pairs, dtype=torch.int64, device=device)
        offsets = torch.empty(self.num_experts + 1, dtype=torch.int32, device=device)
        gate, sort = prepared(_prepare, self.top_k, self.scoring, self.normalizes, self.fp32_weights, logits)
        if num_tokens:
            gate(logits, weights, experts, num_tokens, self.num_experts, *logits.stride())
        sort(experts, order, offsets, num_pairs, self.num_experts)
        return ExpertRouting(weights, experts, order, offsets)


def _prepare(
    top_k: int,
    scoring: str,
    normalizes: bool,
    fp32_weights: bool,  # an output's dtype, which is compiled for
    logits: torch.Tensor,
) -> tuple[Launch, Launch]:
    """Gating and sorting."""
    num_tokens, num_experts = logits.shape
    block_x = max(next_power_of_2(num_experts), 2)
    block_n = max(TILE_ELEMENTS // block_x, 1)
    gate = Launch(
        _gating_kernel, (-(-num_tokens // block_n),), logits.device,
        TOP_K=top_k, BLOCK_K=next_power_of_2(top_k), BLOCK_N=block_n, BLOCK_X=block_x,
        SOFTMAX_FIRST=scoring == "softmax_then_topk", NORMALIZES=normalizes,
    )  # fmt: skip
    return gate, Launch(_sort_kernel, (num_experts,), logits.device, BLOCK=SORT_BLOCK)


@triton.jit
def _gating_kernel(
    logits, weights, experts, num_tokens, num_experts, stride_n, stride_x,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_X: tl.constexpr,
    SOFTMAX_FIRST: tl.constexpr, NORMALIZES: tl.constexpr,
):  # fmt: skip
    """BLOCK_N tokens per program: selects the largest remaining score top_k times."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.arange(0, BLOCK_X)
    k = tl.arange(0, BLOCK_K)
    row_mask = rows < num_tokens
    mask = row_mask[:, None] & (x < num_experts)[None, :]
    score = tl.load(logits + rows[:, None] * stride_n + x[None, :] * stride_x, mask=mask, other=0.0).to(tl.float32)
    if SOFTMAX_FIRST:
        score = tl.where((x < num_experts)[None, :], score, float("-inf"))
        score = tl.exp(score - tl.max(score, axis=1)[:, None])
        score = score / tl.sum(score, axis=1)[:, None]
    score = tl.where(score == 0.0, 0.0, score)  # -0.0 equals 0.0, but its bits differ
    # One integer to compare: the score's bits in an order that integers share with floats, then the expert, lower
    # first. It is distinct for every expert, even if scores are equal or NaN.
    bits = score.to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) * 65536 + (65535 - x).to(tl.int64)[None, :]
    taken = -(1 << 62)
    key = tl.where((x < num_experts)[None, :], key, taken)
    chosen = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        best = tl.max(key, axis=1)
        expert = 65535 - (best & 65535)
        is_best = x[None, :] == expert[:, None]
        value = tl.sum(tl.where(is_best, score, 0.0), axis=1)
        chosen = tl.where((k == slot)[None, :], value[:, None], chosen)
        key = tl.where(is_best, taken, key)
        tl.store(experts + rows * TOP_K + slot, expert, mask=row_mask)
    if SOFTMAX_FIRST:
        if NORMALIZES:
            chosen = chosen / tl.sum(chosen, axis=1)[:, None]
    else:
        chosen = tl.where((k < TOP_K)[None, :], chosen, float("-inf"))
        chosen = tl.exp(chosen - tl.max(chosen, axis=1)[:, None])
        chosen = chosen / tl.sum(chosen, axis=1)[:, None]
    chosen = chosen.to(weights.dtype.element_ty)
    tl.store(weights + rows[:, None] * TOP_K + k[None, :], chosen, mask=row_mask[:, None] & (k < TOP_K)[None, :])


@triton.jit
def _sort_kernel(experts, order, offsets, num_pairs, num_experts, BLOCK: tl.constexpr):
    """One expert per program: counts the pairs before its own, then writes its own in their order."""
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pairs = start + lanes
        chosen = tl.load(experts + pairs, mask=pairs < num_pairs, other=num_experts)
        before += (chosen < expert).to(tl.int32)
    place = tl.sum(before, axis=0)
    tl.store(offsets + expert, place)
    tl.store(offsets + num_experts, num_pairs, mask=expert == 0)
    for start in range(0, num_pairs, BLOCK):
        pairs = start + lanes
        chosen = tl.load(experts + pairs, mask=pairs < num_pairs, other=num_experts)
        is_mine = (chosen == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(is_mine, axis=0) - 1, pairs.to(tl.int64), mask=is_mine != 0)
        place += tl.sum(is_mine, axis=0)
