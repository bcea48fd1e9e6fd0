"""Chooses the experts of each token and their weights, and sorts the tokens by expert.

    softmax_then_topk   p = softmax(logits) in fp32;  weights = p at its top_k largest   (/ their sum if normalizes)
    sigmoid_then_topk   p = sigmoid(logits) in fp32;  the same                           (DeepSeek-V3)
    topk_then_softmax   weights = softmax of the top_k largest logits                    (gpt-oss)
    sparse_mixer        two experts: the largest logit m, then that of the others;       (Phi-3.5-MoE)
                        weights = softmax of those with (m - logit) <= 2 jitter max(|logit|, m), at its largest

Mixtral, Qwen-MoE and DeepSpeed's top-1 (not normalized) and top-2 (normalized) gates are the first form; none drops
tokens over a capacity, since a token's result must not depend on its batch. Equal scores go to the lower expert. The
pairs (token, slot) are then sorted by expert, stably, by a count per expert, so that each expert's tokens are adjacent
in the grouped product.

Experts may be chosen by other numbers than those that weigh them (DeepSeek-V2 and V3):

    c = p + bias                                          a bias that balances the experts' loads, and only chooses
    g = sum of the `num_best` largest c of a group        for groups of X / num_groups adjacent experts
    experts = top_k largest c in the `num_open` groups of largest g
    weights = factor * p[experts]                         (/ their sum + 1e-20 before, if normalizes)

N tokens, X experts, M = N top_k pairs. Moves N X logits and about 8 M (X + 1) bytes of expert indices that stay
in L2, does about (top_k + num_groups num_best) N X operations. Shapes depend only on N, top_k and X, and the host reads
no values, so a CUDA graph can capture it.

The sparse mixer compares and weighs in the dtype of the logits, in torch on every device; its experts are chosen at
random in training, and here never (Liu et al. 2024, GRIN, arXiv 2409.12136).

Sources: transformers, models/{mixtral,qwen2_moe,qwen3_moe,gpt_oss,deepseek_v2,deepseek_v3,phimoe}/modeling_*.py;
DeepSpeed, deepspeed/moe/sharded_moe.py (top1gating, top2gating); DeepSeek-V2 (arXiv 2405.04434, section 2.2.2) and V3
(arXiv 2412.19437, equations 13 to 16).
"""

from typing import Any, Literal, NamedTuple

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

Scoring = Literal["softmax_then_topk", "sigmoid_then_topk", "topk_then_softmax", "sparse_mixer"]
SCORINGS = ("softmax_then_topk", "sigmoid_then_topk", "topk_then_softmax", "sparse_mixer")
# Added to a sum of weights before they are divided by it: sigmoids may all be 0.
TINY = 1e-20
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


class ExpertGroups(NamedTuple):
    """Groups of adjacent experts, some of which are open to a token."""

    num_groups: int
    num_open: int  # groups that a token may choose from
    num_best: int  # scores of a group whose sum is the group's


ONE_GROUP = ExpertGroups(1, 1, 1)


class MoEGatingOp:
    """Callable `(logits [N, X], bias=None) -> ExpertRouting`.

    Args:
        normalizes: the weights of a token are divided by their sum; softmax of the chosen logits has the sum 1 anyway.
        fp32_weights: weights stay fp32 (Mixtral) instead of being rounded to the dtype of the logits.
        groups: None: a token may choose from all experts.
        factor: multiplies the weights.
        jitter: of the sparse mixer.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        scoring: Scoring = "softmax_then_topk",
        normalizes: bool = True,
        fp32_weights: bool = False,
        groups: ExpertGroups | None = None,
        factor: float = 1.0,
        jitter: float = 0.0,
    ):
        if scoring not in SCORINGS:
            raise ValueError(f"scoring={scoring!r} must be one of {', '.join(SCORINGS)}")
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k={top_k} must be from 1 to num_experts={num_experts}")
        if groups is not None:
            _check_groups(groups, num_experts, top_k)
        if scoring == "sparse_mixer" and top_k != 2:
            raise ValueError(f"top_k={top_k} must be 2 with scoring={scoring!r}")
        self.num_experts, self.top_k, self.factor, self.jitter = num_experts, top_k, float(factor), float(jitter)
        self.scoring, self.normalizes, self.fp32_weights = scoring, normalizes, fp32_weights
        self.groups = None if groups is None or groups.num_open == groups.num_groups else groups

    def __call__(self, logits: torch.Tensor, bias: torch.Tensor | None = None) -> ExpertRouting:
        """`bias [X]` is added to the scores that choose. Raises ValueError for tensors of another shape."""
        check_tensor("router logits", logits, shape=(None, self.num_experts))
        if bias is not None:
            check_tensor("bias of the choice", bias, like=logits, dtype=bias.dtype, shape=(self.num_experts,))
        if use_triton(logits):
            if self.scoring == "sparse_mixer":
                say_once("MoEGatingOp: there is no kernel for a sparse mixer; in torch")
                return self.reference(logits, bias)
            if self.num_experts <= MAX_EXPERTS:
                return kernel_or_reference(self._launch, self.reference, logits, bias)
            say_once(f"MoEGatingOp: {self.num_experts} experts, over {MAX_EXPERTS}, run on the torch reference")
        return self.reference(logits, bias)

    def reference(self, logits: torch.Tensor, bias: torch.Tensor | None = None) -> ExpertRouting:
        """The reference: the function of the kernel in plain torch."""
        if self.scoring == "sparse_mixer":
            weights, experts = self._mix_sparsely(logits)
            return self._sorted(weights * self.factor, experts)
        scores, wide = self._score(logits), torch.promote_types(logits.dtype, torch.float32)
        choice = scores if bias is None else scores + bias.to(scores.dtype)
        if self.groups is not None:
            choice = self._close_groups(choice, self.groups)
        # A stable sort, because torch.topk does not define the order of equal scores.
        experts = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, : self.top_k].contiguous()
        weights = scores.gather(1, experts)
        if self.scoring == "topk_then_softmax":
            weights = torch.softmax(weights, dim=-1, dtype=wide)
        elif self.normalizes:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
        weights = weights if self.factor == 1.0 else weights * self.factor
        return self._sorted(weights.to(self._weights_dtype(logits)), experts)

    def _sorted(self, weights: torch.Tensor, experts: torch.Tensor) -> ExpertRouting:
        """The routing by `weights [N, top_k]` and `experts [N, top_k]`."""
        flat = experts.reshape(-1)
        bounds = torch.arange(self.num_experts + 1, device=flat.device)
        by_expert, order = torch.sort(flat, stable=True)
        offsets = torch.searchsorted(by_expert, bounds).to(torch.int32)
        return ExpertRouting(weights.contiguous(), experts, order, offsets)

    def _mix_sparsely(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and experts `[N, 2]` of a sparse mixer."""
        weights, experts, left = [], [], logits
        for _ in range(self.top_k):
            highest, expert = left.max(-1, keepdim=True)
            is_far = (highest - logits) / logits.abs().clamp(min=highest) > 2 * self.jitter
            weights.append(torch.softmax(left.masked_fill(is_far, float("-inf")), -1).gather(1, expert))
            experts.append(expert)
            left = left.scatter(1, expert, float("-inf"))
        return torch.cat(weights, 1), torch.cat(experts, 1)

    def _score(self, logits: torch.Tensor) -> torch.Tensor:
        """p, or the logits if softmax comes last."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        if self.scoring == "softmax_then_topk":
            return torch.softmax(logits, dim=-1, dtype=wide)
        return torch.sigmoid(logits.to(wide)) if self.scoring == "sigmoid_then_topk" else logits

    @staticmethod
    def _close_groups(choice: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
        """`choice [N, X]` with -inf in the groups that are closed to a token."""
        by_group = choice.unflatten(1, (groups.num_groups, -1))
        sums = by_group.topk(groups.num_best, dim=-1).values.sum(-1)
        order = torch.sort(sums, dim=-1, descending=True, stable=True).indices
        is_closed = torch.ones_like(sums, dtype=torch.bool).scatter_(1, order[:, : groups.num_open], False)
        return by_group.masked_fill(is_closed[..., None], float("-inf")).flatten(1)

    def _weights_dtype(self, logits: torch.Tensor) -> torch.dtype:
        return torch.float32 if self.fp32_weights else logits.dtype

    def _launch(self, logits: torch.Tensor, bias: torch.Tensor | None = None) -> ExpertRouting:
        num_tokens, device = len(logits), logits.device
        num_pairs = num_tokens * self.top_k
        weights = torch.empty(num_tokens, self.top_k, dtype=self._weights_dtype(logits), device=device)
        experts = torch.empty(num_tokens, self.top_k, dtype=torch.int64, device=device)
        order = torch.empty(num_pairs, dtype=torch.int64, device=device)
        offsets = torch.empty(self.num_experts + 1, dtype=torch.int32, device=device)
        groups = self.groups or ONE_GROUP
        rule = GatingRule(self.top_k, SCORINGS.index(self.scoring), self.normalizes, *groups)
        gate, sort = prepared(_prepare, rule, self.fp32_weights, logits, bias)
        if num_tokens:
            choosing = Choosing(bias, 0 if bias is None else bias.stride(0), self.factor)
            gate(logits, choosing, weights, experts, num_tokens, self.num_experts, *logits.stride())
        sort(experts, order, offsets, num_pairs, self.num_experts)
        return ExpertRouting(weights, experts, order, offsets)


def _check_groups(groups: ExpertGroups, num_experts: int, top_k: int) -> None:
    """Raises ValueError for groups that the experts do not fill, or that have too few for a token."""
    size = num_experts // max(groups.num_groups, 1)
    if groups.num_groups < 1 or size * groups.num_groups != num_experts:
        raise ValueError(f"num_groups={groups.num_groups} must divide num_experts={num_experts}")
    if not 1 <= groups.num_best <= size:
        raise ValueError(f"num_best={groups.num_best} must be from 1 to the {size} experts of a group")
    if not 1 <= groups.num_open <= groups.num_groups or groups.num_open * size < top_k:
        raise ValueError(
            f"num_open={groups.num_open} must be from 1 to num_groups={groups.num_groups}, with top_k={top_k} experts "
            f"in as many groups of {size}"
        )


class GatingRule(NamedTuple):
    """The rule of a router, constant in the kernel."""

    top_k: int
    scoring: int  # place in SCORINGS
    normalizes: bool
    num_groups: int  # 1: none
    num_open: int
    num_best: int


class Choosing(NamedTuple):
    """The numbers of a router in addition to its logits."""

    bias_ptr: Any  # [X], or None
    bias_stride: int
    factor: float


def _prepare(
    rule: GatingRule,
    fp32_weights: bool,  # an output's dtype, which is compiled for
    logits: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[Launch, Launch]:
    """Gating and sorting."""
    num_tokens, num_experts = logits.shape
    tiles = gating_tiles(rule, num_experts)
    gate = Launch(_gating_kernel, (-(-num_tokens // tiles.tokens),), logits.device, RULE=rule, TILES=tiles)
    return gate, Launch(_sort_kernel, (num_experts,), logits.device, BLOCK=SORT_BLOCK)


class GatingTiles(NamedTuple):
    """Tile sizes of gating, constant in its kernel."""

    tokens: int
    experts: int
    slots: int
    groups: int
    group_size: int


def gating_tiles(rule: GatingRule, num_experts: int) -> GatingTiles:
    """Tile sizes for the rows of one program."""
    experts = max(next_power_of_2(num_experts), 2)
    slots, groups = next_power_of_2(rule.top_k), next_power_of_2(rule.num_groups)
    return GatingTiles(max(TILE_ELEMENTS // experts, 1), experts, slots, groups, num_experts // rule.num_groups)


@triton.jit
def _ordered(value, index):
    """One integer to compare: the bits of `value` in an order that integers share with floats, then the lower index.

    It is distinct for every index of a row, even if values are equal or NaN.
    """
    value = tl.where(value == 0.0, 0.0, value)  # -0.0 equals 0.0, but its bits differ
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) * 65536 + (65535 - index).to(tl.int64)[None, :]


@triton.jit
def _close_groups(key, choice, x, RULE: tl.constexpr, TILES: tl.constexpr):
    """`key [N, X]` with that of a chosen expert in groups that are closed to a token."""
    NUM_GROUPS: tl.constexpr = RULE.num_groups
    NUM_BEST: tl.constexpr = RULE.num_best
    NUM_OPEN: tl.constexpr = RULE.num_open
    TAKEN: tl.constexpr = -(1 << 62)
    TOKENS: tl.constexpr = TILES.tokens
    EXPERTS: tl.constexpr = TILES.experts
    GROUPS: tl.constexpr = TILES.groups
    g = tl.arange(0, GROUPS)
    group = x // TILES.group_size
    sums = tl.zeros((TOKENS, GROUPS), dtype=tl.float32)
    for index in tl.static_range(NUM_GROUPS):
        others = tl.where((group == index)[None, :], key, TAKEN)
        total = tl.zeros((TOKENS,), dtype=tl.float32)
        for _ in tl.static_range(NUM_BEST):
            is_best = others == tl.max(others, axis=1)[:, None]
            total += tl.sum(tl.where(is_best, choice, 0.0), axis=1)
            others = tl.where(is_best, TAKEN, others)
        sums = tl.where((g == index)[None, :], total[:, None], sums)
    group_key = tl.where((g < NUM_GROUPS)[None, :], _ordered(sums, g), TAKEN)
    open_key = tl.full((TOKENS, EXPERTS), TAKEN, tl.int64)
    for _ in tl.static_range(NUM_OPEN):
        best = tl.max(group_key, axis=1)
        chosen = 65535 - (best & 65535)
        open_key = tl.where(group[None, :] == chosen[:, None], key, open_key)
        group_key = tl.where(group_key == best[:, None], TAKEN, group_key)
    return open_key


@triton.jit
def _gating_kernel(
    logits, choosing, weights, experts, num_tokens, num_experts, stride_n, stride_x,
    RULE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Some tokens per program: selects the largest remaining score top_k times."""
    TOP_K: tl.constexpr = RULE.top_k
    SCORING: tl.constexpr = RULE.scoring
    TAKEN: tl.constexpr = -(1 << 62)
    TOKENS: tl.constexpr = TILES.tokens
    SLOTS: tl.constexpr = TILES.slots
    rows = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    x = tl.arange(0, TILES.experts)
    k = tl.arange(0, SLOTS)
    row_mask = rows < num_tokens
    mask = row_mask[:, None] & (x < num_experts)[None, :]
    score = tl.load(logits + rows[:, None] * stride_n + x[None, :] * stride_x, mask=mask, other=0.0).to(tl.float32)
    if SCORING == 0:
        score = tl.where((x < num_experts)[None, :], score, float("-inf"))
        score = tl.exp(score - tl.max(score, axis=1)[:, None])
        score = score / tl.sum(score, axis=1)[:, None]
    elif SCORING == 1:
        score = tl.sigmoid(score)
    choice = score
    if choosing.bias_ptr is not None:
        bias = tl.load(choosing.bias_ptr + x * choosing.bias_stride, mask=x < num_experts, other=0.0).to(tl.float32)
        choice = score + bias[None, :]
    key = tl.where((x < num_experts)[None, :], _ordered(choice, x), TAKEN)
    if RULE.num_groups > 1:
        key = _close_groups(key, choice, x, RULE, TILES)
    chosen = tl.zeros((TOKENS, SLOTS), dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        best = tl.max(key, axis=1)
        expert = 65535 - (best & 65535)
        is_best = x[None, :] == expert[:, None]
        value = tl.sum(tl.where(is_best, score, 0.0), axis=1)
        chosen = tl.where((k == slot)[None, :], value[:, None], chosen)
        key = tl.where(is_best, TAKEN, key)
        tl.store(experts + rows * TOP_K + slot, expert, mask=row_mask)
    if SCORING == 2:
        chosen = tl.where((k < TOP_K)[None, :], chosen, float("-inf"))
        chosen = tl.exp(chosen - tl.max(chosen, axis=1)[:, None])
        chosen = chosen / tl.sum(chosen, axis=1)[:, None]
    elif RULE.normalizes:
        chosen = chosen / (tl.sum(chosen, axis=1)[:, None] + 1e-20)
    chosen = (chosen * choosing.factor).to(weights.dtype.element_ty)
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
