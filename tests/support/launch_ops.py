"""Every op in the forms that models use, for `tests/tools/launches.py`: called, with nothing compared.

The shapes are small, and outputs mean nothing where kernels do not run. N rows, E width, I of an MLP, V vocabulary.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from hybrid_engine.ops import (
    NORM_OPS,
    QKV,
    DecodeBatch,
    Expansion,
    GatedActivationOp,
    GatedDeltaOp,
    GatedNormOp,
    GELUGemmOp,
    HeadWeights,
    KVBlocks,
    LatentAttentionOp,
    LatentHeads,
    MLPGemmOp,
    PrefillBatch,
    QKVGemmOp,
    ResidualAddOp,
    SampleOp,
    SamplingOptions,
    ShortConvOp,
    SoftmaxContextOp,
    VectorMatMulOp,
    token_logprobs,
)
from hybrid_engine.ops.expert_gemm import CLAMPED_SWIGLU, ExpertGemmOp
from hybrid_engine.ops.expert_sum import ExpertSumOp
from hybrid_engine.ops.fixed_attention import AttentionParameters, attend
from hybrid_engine.ops.fixed_product import REDUCTIONS, SOFTMAXES, fixed_product, norm_rows, reduce_rows, softmax_rows
from hybrid_engine.ops.gated_delta import DecayWeights, DeltaInputs
from hybrid_engine.ops.linear_divergence import HeadStates, linear_divergence
from hybrid_engine.ops.linear_log_prob import linear_log_prob
from hybrid_engine.ops.linear_log_prob_tiles import PLAIN, LogitShape
from hybrid_engine.ops.linears import ACTIVATIONS
from hybrid_engine.ops.moe_gating import ExpertGroups, MoEGatingOp
from hybrid_engine.ops.moe_res_matmul import MoEResMatmulOp
from hybrid_engine.ops.softmax_context import rotary_table
from hybrid_engine.ops.state_space import SpaceWeights, StateSpaceOp
from hybrid_engine.ops.xielu import XIELUOp
from tests.support.batches import decode_of, prefill_of

Check = tuple[str, Callable[[], object]]
N, E, I, V = 5, 256, 512, 4099  # noqa: E741
ROWS = (1, 16, 64, 128, 256)
"""The last of each count of rows for which products are cut alike."""
EPS = 1e-6
ENDS = {"min_new_tokens": 3, "eos_token_ids": (1, 2)}
SAMPLINGS = {
    "greedy": {"do_sample": False},
    "greedy, ends banned": {"do_sample": False, **ENDS},
    "plain": {"do_sample": True, "temperature": 0.7},
    "top-k": {"do_sample": True, "top_k": 50},
    "top-p": {"do_sample": True, "top_p": 0.9},
    "min-p": {"do_sample": True, "min_p": 0.1},
    "all filters": {"do_sample": True, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    "repetition penalty": {"do_sample": True, "repetition_penalty": 1.2},
    "all": {"do_sample": True, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2, **ENDS},
}
HEADS = {
    "heads of 64": (64, {}, ()),
    "heads of 80": (80, {}, ()),
    "heads of 128, norms": (128, {"qk_norm": "rms", "qk_norm_eps": EPS}, ("q_gamma", "k_gamma")),
    "heads of 256, window, soft-capping": (256, {"window": 64, "softcap": 30.0}, ()),
    "sinks, window": (64, {"window": 128}, ("sinks",)),
    "ALiBi": (64, {}, ("alibi",)),
    "rotary of neighbors": (64, {"is_interleaved": True}, ("rotary",)),
    "rotary of halves": (128, {}, ("rotary",)),
}
"""By name the head size, options of the op, and what it reads per head or position."""


def op_checks(dtype: torch.dtype) -> Iterator[Check]:
    """Names and calls, for tensors of `dtype`."""
    families = (products, norms, activations, attentions, latent_attentions, states, experts, log_probs, exact_mode)
    for checks in families:
        yield from checks(dtype)
    if dtype == torch.float32:  # of logits, whatever the weights are
        yield from samplings()


def products(dtype: torch.dtype) -> Iterator[Check]:
    """Linears with a bias, weights stored [in, out], queries, keys and values in one weight and in three, MLPs."""
    gamma, beta = torch.ones(E, dtype=dtype), torch.zeros(E, dtype=dtype)
    up, gate, down = randn(dtype, I, E).t(), randn(dtype, I, E).t(), randn(dtype, E, I).t()
    biased_up, biased_down = (randn(dtype, E, I), randn(dtype, I)), (randn(dtype, I, E), randn(dtype, E))
    for rows in ROWS:
        x = randn(dtype, rows, E)
        yield f"linear, {rows} rows", partial(VectorMatMulOp(), x, up, randn(dtype, I))
        yield f"linear to fp32, {rows} rows", partial(VectorMatMulOp(fp32_output=True), x, up)
        yield f"linear [in, out], {rows} rows", partial(VectorMatMulOp(), x, *biased_up)
        fused, norm = QKVGemmOp("layer", EPS, 4, 2, 64, "grouped"), (gamma, beta)
        yield f"norm and fused qkv, {rows} rows", partial(fused, x, [randn(dtype, E, 512)], [randn(dtype, 512)], *norm)
        gated = MLPGemmOp("rms", EPS, "silu", adds_residual=True)
        yield f"gated MLP, {rows} rows", partial(gated, x, x, (gate, None), (up, None), (down, None), gamma)
        plain = MLPGemmOp("layer", EPS, "gelu_new")
        yield f"MLP, {rows} rows", partial(plain, x, None, None, biased_up, biased_down, gamma, beta)
    yield "GELU MLP", partial(GELUGemmOp(), randn(dtype, N, E), *biased_up, biased_down[0])


def norms(dtype: torch.dtype) -> Iterator[Check]:
    """Each kind, with and without a residual, on narrow and on wide rows."""
    for kind in NORM_OPS:
        for width in (E, 6000):
            op, x, gamma = NORM_OPS[kind](EPS), randn(dtype, N, width), torch.ones(width, dtype=dtype)
            weights = (gamma, torch.zeros_like(gamma)) if kind == "layer" else (gamma,)
            yield f"{kind} norm of {width}", partial(op, x, *weights)
            yield f"{kind} norm of {width} and a sum", partial(op.add_and_norm, x, x, *weights)
    residual = ResidualAddOp(2)
    x, bias = randn(dtype, N, E), randn(dtype, E)
    yield "residual", partial(residual, x, x, attention_output=x, attention_bias=bias, final_bias=bias)
    yield "residual of parallel blocks", partial(ResidualAddOp(2, mlp_after_attention=False), x, x, attention_output=x)


def activations(dtype: torch.dtype) -> Iterator[Check]:
    """Each function: alone, and in an MLP."""
    x, up, down = randn(dtype, N, E), (randn(dtype, I, E).t(), None), (randn(dtype, E, I).t(), None)
    for name in ACTIVATIONS:
        yield f"gated {name}", partial(GatedActivationOp(), randn(dtype, N, 2 * I), randn(dtype, 2 * I), name)
        yield f"MLP of {name}", partial(MLPGemmOp(None, EPS, name), x, None, None, up, down)
    yield "xIELU", partial(XIELUOp(), x, *torch.ones(2, 1, dtype=dtype))


def attentions(dtype: torch.dtype) -> Iterator[Check]:
    """Decode of one row and of many, short and long contexts, and prefill."""
    for name, (dim, options, reads) in HEADS.items():
        op, weights = SoftmaxContextOp(4, 2, dim, dim**-0.5, **options), head_weights(dtype, dim, reads)
        for rows, context in ((1, 64), (3, 2048), (64, 128)):
            batch = decode_batch(rows, context)
            call = partial(attend_with, op, dtype, dim, weights, batch, "rotary" in reads)
            yield f"decode attention, {name}, {rows} x {context}", call
        prefill = partial(attend_with, op, dtype, dim, weights, prefill_batch((17, 48)), "rotary" in reads)
        yield f"prefill attention, {name}", prefill


def latent_attentions(dtype: torch.dtype) -> Iterator[Check]:
    """Decode of few heads and of many, short and long contexts, and prefill."""
    for heads, latent, rotary, key, value in ((4, 128, 32, 64, 64), (20, 256, 64, 48, 80)):
        op, sizes = LatentAttentionOp(heads, latent, rotary, key, value, 0.1), f"{heads} heads, {latent}"
        for rows, context in ((1, 64), (3, 2048)):
            call = partial(attend_latents, op, dtype, decode_batch(rows, context))
            yield f"decode of latents, {sizes}, {rows} x {context}", call
        yield f"prefill of latents, {sizes}", partial(attend_latents, op, dtype, prefill_batch((17, 48)))


def attend_latents(op: LatentAttentionOp, dtype: torch.dtype, batch: DecodeBatch | PrefillBatch) -> torch.Tensor:
    """One call on blocks of 64 tokens."""
    rows, width = len(batch.tokens), op.key_dim + op.value_dim
    blocks = batch.block_tables.numel() if isinstance(batch, DecodeBatch) else rows // 64 + 1
    rotary = rotary_table(torch.rand(op.rotary_dim // 2), 1.0, rows, dtype, is_interleaved=True)
    q, keys = randn(dtype, rows, op.num_heads, op.key_dim + op.rotary_dim), randn(dtype, rows, op.rotary_dim)
    cache = torch.zeros(blocks, 1, 64, op.rotary_dim + op.latent_dim, dtype=dtype)
    expansion = Expansion(randn(dtype, op.num_heads * width, op.latent_dim).t())
    return op(LatentHeads(q, keys, randn(dtype, rows, op.latent_dim), rotary), cache, batch, expansion)


def head_weights(dtype: torch.dtype, dim: int, reads: tuple[str, ...]) -> HeadWeights:
    """What `reads` names, for four heads."""
    tensors = {
        "q_gamma": torch.ones(dim, dtype=dtype), "k_gamma": torch.ones(dim, dtype=dtype),
        "sinks": randn(dtype, 4), "alibi": torch.rand(4),
    }  # fmt: skip
    return HeadWeights(**{name: tensor for name, tensor in tensors.items() if name in reads})


def decode_batch(rows: int, context: int, block_size: int = 64) -> DecodeBatch:
    """Rows at the end of their contexts."""
    tables = torch.arange(rows * context // block_size).view(rows, -1)
    tokens, positions = torch.zeros(rows, dtype=torch.int64), torch.full((rows,), context - 1)
    return DecodeBatch(tokens=tokens, positions=positions, block_tables=tables, context=context, is_identity=False)


def prefill_batch(lengths: tuple[int, ...], block_size: int = 64) -> PrefillBatch:
    """Packed sequences that fill one block after the other."""
    places, ends = torch.arange(sum(lengths)), torch.tensor(lengths).cumsum(0)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return PrefillBatch(
        tokens=places, positions=positions, write_blocks=places // block_size, write_offsets=places % block_size,
        lengths=lengths, starts=torch.nn.functional.pad(ends, (1, 0)).int(), wanted=ends - 1, row_lengths=positions + 1,
    )  # fmt: skip


def attend_with(
    op: SoftmaxContextOp,
    dtype: torch.dtype,
    dim: int,
    weights: HeadWeights,
    batch: DecodeBatch | PrefillBatch,
    has_rotary: bool,
) -> torch.Tensor:
    """One call of attention on blocks of 64 tokens."""
    rows = len(batch.tokens)
    blocks = batch.block_tables.numel() if isinstance(batch, DecodeBatch) else rows // 64 + 1
    rotary = rotary_table(torch.rand(dim // 2), 1.0, rows, dtype) if has_rotary else None
    qkv = QKV(randn(dtype, rows, 2, 2, dim), randn(dtype, rows, 2, dim), randn(dtype, rows, 2, dim), rotary)
    return op(qkv, KVBlocks(*torch.zeros(2, blocks, 2, 64, dim, dtype=dtype)), batch, weights)


def states(dtype: torch.dtype) -> Iterator[Check]:
    """Layers that keep a state: a step of some rows, and a prefill in which one sequence goes on."""
    slots = torch.arange(2)
    for kind, batch in (("step", decode_of([3, 5], slots)), ("prefill", prefill_of([(0, 70), (3, 5)], slots))):
        for dim in (64, 128):
            yield f"{kind} of states, heads of {dim}", partial(run_states, dtype, dim, batch)


def run_states(dtype: torch.dtype, dim: int, batch: DecodeBatch | PrefillBatch) -> None:
    """The short convolution, the gated delta rule, the gated norm and the state space."""
    delta, rows = GatedDeltaOp(2, 4, dim, dim), len(batch.tokens)
    mixed, weights = randn(dtype, rows, 8 * dim), DecayWeights(randn(dtype, 4), randn(dtype, 4))
    mixed = ShortConvOp("silu")(mixed, randn(dtype, 8 * dim, 4), None, randn(dtype, 2, 3, 8 * dim), batch)
    inputs = DeltaInputs(mixed, randn(dtype, rows, 4), randn(dtype, rows, 4))
    context = delta(inputs, weights, torch.zeros(2, *delta.state_shape), batch)
    GatedNormOp(dim, EPS)(context, randn(dtype, rows, 4 * dim), randn(dtype, dim))
    space = StateSpaceOp(4, dim, 2, dim)
    heads = SpaceWeights(*(randn(dtype, 4) for _ in range(3)))
    space(mixed, randn(dtype, rows, 4), heads, torch.zeros(2, *space.state_shape), batch)


def experts(dtype: torch.dtype) -> Iterator[Check]:
    """Gating, both products for few and many rows, the sum with a shared expert, residual experts."""
    num_experts = 8
    forms = (  # the scorings that the kernel has
        ("silu", "halves", 2, "softmax_then_topk"),
        (CLAMPED_SWIGLU, "interleaved", 4, "sigmoid_then_topk"),
        ("gelu", "plain", 1, "topk_then_softmax"),
    )
    for rows in (1, 33, 256):
        for activation, layout, top_k, scoring in forms:
            columns = I if layout == "plain" else 2 * I
            weights = (randn(dtype, num_experts, E, columns), randn(dtype, num_experts, I, E))
            biases = (randn(dtype, num_experts, columns), randn(dtype, num_experts, E))
            given = (*weights, *(biases if layout != "halves" else (None, None)))
            run = partial(run_experts, MoEGatingOp(num_experts, top_k, scoring), ExpertGemmOp(activation, layout))
            yield f"experts, {activation}, {layout}, {rows} rows", partial(run, randn(dtype, rows, E), *given)
    gating = MoEGatingOp(160, 6, "sigmoid_then_topk", groups=ExpertGroups(8, 3, 2), factor=16.0)
    yield "gating by groups and a bias", partial(gating, randn(dtype, 33, 160), torch.rand(160))
    x, outputs = randn(dtype, N, E), randn(dtype, N, 2, E)
    yield "sum of experts", partial(ExpertSumOp(), outputs, dtype)
    yield "sum with a shared expert", partial(ExpertSumOp(), outputs, dtype, x, randn(dtype, N, 1), x)
    yield "residual experts", partial(MoEResMatmulOp(), x, randn(dtype, N, 2), x)


def run_experts(gating: MoEGatingOp, product: ExpertGemmOp, x: torch.Tensor, up, down, up_bias, down_bias):
    """Gating and both products."""
    routing = gating(torch.rand(len(x), gating.num_experts).to(x.dtype))
    return product(x, routing, up, up_bias, down, down_bias)


def log_probs(dtype: torch.dtype) -> Iterator[Check]:
    """Of logits and of a head, and divergences of two heads, forward and backward."""
    logits = randn(dtype, N, V).requires_grad_()
    yield "log-probabilities", partial(train_logits, logits)
    shape = LogitShape(temperature=0.7, softcap=30.0)
    for rows in (N, 2100):
        hidden, weight = (randn(dtype, *sizes).requires_grad_() for sizes in ((rows, E), (V, E)))
        bias = randn(dtype, V).requires_grad_()
        for name, given in (("plain", (None, PLAIN, False)), ("bias, soft-capping, entropy", (bias, shape, True))):
            yield f"log-probabilities of a head, {name}, {rows} rows", partial(train_head, hidden, weight, *given)
        teacher = HeadStates(randn(dtype, rows, 2 * E), randn(dtype, V, 2 * E), shape=shape)
        for beta in (0.0, 0.5, 1.0):
            pair = partial(train_pair, hidden, weight, teacher, beta)
            yield f"divergence of heads, beta {beta:g}, {rows} rows", pair


def train_logits(logits: torch.Tensor) -> None:
    """Log-probabilities, forward and backward."""
    token_logprobs(logits, torch.arange(len(logits)), 0.7).sum().backward()


def train_head(hidden, weight, bias, shape: LogitShape, with_entropy: bool) -> None:
    """Log-probabilities without logits, forward and backward."""
    targets = torch.arange(len(hidden)) % V
    logprobs, entropy = linear_log_prob(hidden, weight, targets, bias, shape, with_entropy)
    (logprobs.sum() if entropy is None else logprobs.sum() + entropy.sum()).backward()


def train_pair(hidden, weight, teacher: HeadStates, beta: float) -> None:
    """The divergence of two heads, forward and backward."""
    linear_divergence(hidden, weight, teacher, beta).sum().backward()


def samplings() -> Iterator[Check]:
    """Each way to draw, from a small and from a large vocabulary, for one row and for many."""
    for name, options in SAMPLINGS.items():
        for rows, vocab in ((1, 128_256), (33, V)):
            numbers = torch.arange(rows)
            seen = torch.zeros(rows, vocab, dtype=torch.bool)
            given = (torch.randn(rows, vocab), numbers, numbers, seen, numbers)
            yield f"sampling, {name}, {rows} rows", partial(SampleOp(SamplingOptions(**options)), *given)


def exact_mode(dtype: torch.dtype) -> Iterator[Check]:
    """The kernels that do the same for a row in every batch."""
    x, gamma = randn(dtype, 70, E), torch.ones(E, dtype=dtype)
    for name, bias in (("product", None), ("product with a bias", randn(dtype, I))):
        yield f"exact {name}", partial(fixed_product, x, randn(dtype, I, E).t(), bias)
    for kind in REDUCTIONS:
        yield f"exact {kind}", partial(reduce_rows, kind, x, True, dtype)
    for kind in SOFTMAXES:
        yield f"exact {kind}", partial(softmax_rows, kind, x, torch.float32)
    yield "exact layer norm", partial(norm_rows, "layer", x, gamma, torch.zeros_like(gamma), EPS)
    yield "exact RMS norm", partial(norm_rows, "rms", x, gamma, None, EPS)
    for dim, window, softcap, sinks in (
        (64, None, None, None),
        (256, 64, 30.0, None),
        (64, 128, None, randn(dtype, 4)),
    ):
        tensors = [randn(dtype, 2, 70, heads, dim) for heads in (4, 2, 2)]
        positions = torch.arange(70).expand(2, 70)
        call = partial(attend, *tensors, positions, AttentionParameters(dim**-0.5, window, softcap), sinks)
        yield f"exact attention of {dim}, window {window}, {'sinks' if sinks is not None else 'no sinks'}", call


def randn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random numbers, small enough for sums."""
    return (torch.randn(*shape) / shape[-1] ** 0.5).to(dtype)
