"""Every op against a plain formula or a library's own, on odd sizes, with poisoned memory."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hybrid_engine.generation.core import Prefill, Prompt
from hybrid_engine.generation.step import pack_prefills
from hybrid_engine.ops import (
    QKV,
    BlockCopyOp,
    DecodeBatch,
    HeadWeights,
    KVBlocks,
    LayerNormOp,
    MLPGemmOp,
    QKVGemmOp,
    RMSNormOp,
    SampleOp,
    SamplingOptions,
    SoftmaxContextOp,
    VectorMatMulOp,
    cpu_kernels,
    token_logprobs,
)
from hybrid_engine.ops.cpu_kernels import linear_transposed, linear_transposed_reference
from hybrid_engine.ops.sample import keyed_uniform
from hybrid_engine.ops.softmax_context import apply_rotary, like_lengths, rotary_rows, rotary_table

pytestmark = pytest.mark.quick

ROWS = [1, 3, 63, 100]
HEADS = [(4, 4), (6, 2), (8, 1)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def close(actual, expected, dtype=torch.float32):
    tolerance = {torch.float32: 2e-6, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(
        actual, expected, atol=tolerance * float(expected.detach().abs().max() + 1), rtol=tolerance
    )


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [1, 7, 100])
def test_norms_equal_their_formulas(rows, width):
    x, gamma, beta = torch.randn(rows, width) * 3, torch.randn(width), torch.randn(width)
    d = x.double()
    rms = d / (d.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gamma
    layer = (d - d.mean(-1, keepdim=True)) / (d.var(-1, correction=0, keepdim=True) + 1e-5).sqrt() * gamma + beta
    close(RMSNormOp(1e-6)(x, gamma).double(), rms)
    torch.testing.assert_close(LayerNormOp(1e-5)(x, gamma, beta).double(), layer, atol=1e-4, rtol=1e-4)


def test_rms_norm_rounds_in_sixteen_bits_where_the_trainer_rounds():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(100, 1e-6).bfloat16()
    norm.weight.data = torch.randn(100).bfloat16()
    x = torch.randn(63, 100).bfloat16()
    torch.testing.assert_close(RMSNormOp(1e-6)(x, norm.weight), norm(x), atol=0, rtol=2**-7)


@pytest.mark.parametrize("bias", [True, False])
def test_vector_matmul_is_a_linear_on_the_transposed_view(bias):
    linear = torch.nn.Linear(63, 100, bias=bias)
    x = torch.randn(7, 63)
    with torch.no_grad():
        close(VectorMatMulOp()(x, linear.weight.t(), linear.bias), linear(x))
    half = VectorMatMulOp(fp32_output=True)(x.bfloat16(), linear.weight.detach().t().bfloat16(), None)
    assert half.dtype == torch.float32


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("stored", ["[out, in]", "[in, out]", "strided"])
def test_linear_on_this_machine_equals_the_reference_to_its_own_error(rows, bias, stored):
    weight = {
        "[out, in]": torch.randn(100, 63).t(),
        "[in, out]": torch.randn(63, 100),
        "strided": torch.randn(126, 200)[::2, ::2],
    }[stored]
    x, b = torch.randn(2 * rows, 63)[::2], torch.randn(100) if bias else None
    exact = x.double() @ weight.double() + (0 if b is None else b.double())
    own_error = (linear_transposed_reference(x, weight, b).double() - exact).abs().max()
    assert (linear_transposed(x, weight, b).double() - exact).abs().max() <= 4 * own_error


@pytest.mark.parametrize("is_intel", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 32, 128, 129])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_adds_bias_and_residual_on_every_maker_of_processors(rows, bias, is_intel, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "is_intel", lambda: is_intel)
    x, b = torch.randn(rows, 63), torch.randn(100) if bias else None
    for weight in (torch.randn(63, 100), torch.randn(100, 63).t()):
        expected = linear_transposed_reference(x, weight, b)
        for residual in (torch.randn(rows, 100), torch.randn(100, rows).t()):
            kept = residual.clone()
            close(linear_transposed(x, weight, b, residual), expected + residual)
            assert torch.equal(residual, kept)
        close(linear_transposed(x, weight, b), expected)


def test_qkv_gemm_is_the_same_for_three_weights_and_a_fused_one():
    sizes = (24, 8, 8)
    x, gamma, beta = torch.randn(5, 30), torch.randn(30), torch.randn(30)
    weights = [torch.randn(size, 30).t() for size in sizes]  # not contiguous
    biases = [torch.randn(size) for size in sizes]
    op = QKVGemmOp("layer", 1e-5, num_heads=6, num_kv_heads=2, head_dim=4)
    split, normed = op(x, weights, biases, gamma, beta)
    fused, _ = op(x, [torch.cat(weights, 1)], [torch.cat(biases)], gamma, beta)
    close(normed, F.layer_norm(x, (30,), gamma, beta, 1e-5))
    for a, b, weight, bias in zip(split, fused, weights, biases, strict=True):
        close(a.flatten(1), normed @ weight + bias)
        close(b, a)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ["silu", "relu", "gelu", "gelu_new"])
def test_mlp_gemm_adds_the_residual_norms_and_keeps_the_biases(activation, gated):
    from transformers.activations import ACT2FN

    def pair(n_in, n_out):
        return torch.randn(n_in, n_out), torch.randn(n_out)

    x, residual, gamma = torch.randn(7, 30), torch.randn(7, 30), torch.randn(30)
    gate, up, down = pair(30, 41) if gated else None, pair(30, 41), pair(41, 30)
    output, stream = MLPGemmOp("rms", 1e-6, activation)(x, residual, gate, up, down, gamma, None)
    normed = F.rms_norm(x + residual, (30,), gamma, 1e-6)
    inner = normed @ up[0] + up[1]
    inner = ACT2FN[activation](normed @ gate[0] + gate[1]) * inner if gated else ACT2FN[activation](inner)
    close(stream, x + residual)
    close(output, inner @ down[0] + down[1])


def angles_of(positions, width):
    return torch.outer(positions.float(), 1 / 10000 ** (torch.arange(0, width, 2) / width))


def test_rotary_equals_transformers():
    inv_freq = 1 / 10000 ** (torch.arange(0, 16, 2) / 16)
    cos, sin = rotary_table(inv_freq, 1.3, 40, torch.float32)
    positions = torch.tensor([0, 3, 39, 7, 7])
    q, k = torch.randn(5, 6, 16), torch.randn(5, 2, 16)
    angles = angles_of(positions, 16).repeat(1, 2)[None]
    expected = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], angles.cos() * 1.3, angles.sin() * 1.3
    )
    for ours, theirs in zip((q, k), expected, strict=True):
        close(apply_rotary(ours, cos[positions], sin[positions]), theirs[0].transpose(0, 1))


def test_interleaved_rotary_equals_gpt_j():
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as rotate_neighbours

    angles, x = angles_of(torch.tensor([0, 3, 39, 7, 7]), 6), torch.randn(5, 6, 16)
    rotated = rotate_neighbours(x[None, ..., :6], angles.sin()[None], angles.cos()[None])[0]
    ours = apply_rotary(x, *rotary_rows(angles, 1.0, torch.float32, is_interleaved=True), is_interleaved=True)
    close(ours, torch.cat([rotated, x[..., 6:]], -1))


def test_partial_rotary_equals_gpt_neox():
    from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as rotate_first

    angles, x = angles_of(torch.tensor([0, 3, 39, 7, 7]), 6), torch.randn(5, 6, 16)
    cos, sin = (part.repeat(1, 2)[None] for part in (angles.cos(), angles.sin()))
    expected, _ = rotate_first(*[x.transpose(0, 1)[None]] * 2, cos, sin)
    close(apply_rotary(x, *rotary_rows(angles, 1.0, torch.float32)), expected[0].transpose(0, 1))


def dense_attention(q, k, v, window, scale):
    """`q [n, H, D]`, `k`, `v` `[n, K, D]` of one sequence, causal, in fp64."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    hidden = (distance < 0) | (distance >= (window or q.shape[1]))
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def attend_in_parts(op, q, k, v, lengths, block_size, **extras):
    """The context of packed sequences: each is prefilled but for its last two tokens, in two parts, then decoded."""
    per_row = -(-max(lengths) // block_size)
    num_rows = len(lengths)
    tables = torch.randperm(num_rows * per_row + 2)[: num_rows * per_row].view(num_rows, per_row)
    # Finite garbage: a hidden place must not count whatever it holds.
    cache = torch.full((2, num_rows * per_row + 2, op.num_kv_heads, block_size, op.head_dim), 1e4).to(q.dtype)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)[:-1]])
    prefilled = torch.tensor(lengths) - 2
    edges = [(0, n // 2, n) for n in prefilled.tolist()]
    prompts = [Prompt(list(range(start, start + n))) for start, n in zip(starts.tolist(), lengths, strict=True)]
    batches = []
    for part in range(2):
        fed = [
            Prefill(prompt, prompt.tokens, blocks, *edge[part : part + 2])
            for prompt, blocks, edge in zip(prompts, tables.tolist(), edges, strict=True)
            if edge[part] < edge[part + 1]
        ]
        batches.append(pack_prefills(fed, block_size, False, q.device))
    for step in range(2):
        positions = prefilled + step
        batches.append(
            DecodeBatch(
                tokens=starts + positions,
                positions=positions,
                block_tables=tables,
                context=int(positions.max()) + 1,
                is_identity=False,
            )
        )
    context = torch.empty(len(q), op.num_heads * op.head_dim, dtype=q.dtype)
    for batch in batches:
        at = batch.tokens
        heads = q[at].unflatten(1, (op.num_kv_heads, -1))
        context[at] = op(QKV(heads, k[at], v[at]), KVBlocks(*cache), batch, HeadWeights(**extras))
    return context


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("block_size", [1, 4, 64])
def test_softmax_context_prefills_and_decodes_as_dense_attention_does(heads, window, block_size):
    (num_heads, num_kv), dim, lengths = heads, 10, [3, 17, 9]
    q, k, v = (torch.randn(sum(lengths), n, dim) for n in (num_heads, num_kv, num_kv))
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    expected = torch.cat([dense_attention(*part, window, 0.3) for part in parts])
    op = SoftmaxContextOp(num_heads, num_kv, dim, scale=0.3, window=window)
    close(attend_in_parts(op, q, k, v, lengths, block_size).double(), expected)


def causal_mask(length, window=None):
    """0 and -inf, `[length, length]`."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return torch.zeros(length, length).masked_fill((distance < 0) | (distance >= (window or length)), float("-inf"))


def by_sequence(attend, q, k, v, lengths):
    """Contexts `[N, H*D]` by a function of transformers, which takes and gives `[1, heads, n, D]`."""
    contexts = []
    for part in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        contexts.append(attend(*(x.transpose(0, 1)[None] for x in part))[0].flatten(1))
    return torch.cat(contexts)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "bloom"])
def test_softcap_sinks_and_alibi_equal_the_families_that_have_them(family, dtype, window):
    """Gemma 2's and gpt-oss's own attention functions, and Bloom's own ALiBi."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.gemma2 import modeling_gemma2
    from transformers.models.gpt_oss import modeling_gpt_oss

    lengths = [3, 17, 9]
    q, k, v = (torch.randn(sum(lengths), n, 10).to(dtype) * 2 for n in (6, 2, 2))
    sinks = torch.randn(6).to(dtype)
    alibi = build_alibi_tensor(torch.ones(1, 2), 6, torch.float32)[:, 0, 1]  # the slopes: the bias of place 1
    module = torch.nn.Module()
    module.num_key_value_groups, module.sinks = 3, sinks

    def attend(q, k, v):
        mask = causal_mask(q.shape[2], window).to(q.dtype)[None, None]
        if family == "bloom":
            mask = mask + build_alibi_tensor(torch.ones(1, q.shape[2]), 6, q.dtype)
        if family == "gpt_oss":
            return modeling_gpt_oss.eager_attention_forward(module, q, k, v, mask, scaling=0.3)[0]
        softcap = 5.0 if family == "gemma2" else None
        return modeling_gemma2.eager_attention_forward(module, q, k, v, mask, scaling=0.3, softcap=softcap)[0]

    op = SoftmaxContextOp(6, 2, 10, scale=0.3, window=window, softcap=5.0 if family == "gemma2" else None)
    extras = {"gpt_oss": {"sinks": sinks}, "bloom": {"alibi": alibi}}.get(family, {})
    ours = attend_in_parts(op, q, k, v, lengths, 4, **extras)
    theirs = by_sequence(attend, q, k, v, lengths)
    if dtype == torch.float32:
        close(ours, theirs)
    else:
        module.sinks = sinks.double()
        exact = by_sequence(attend, q.double(), k.double(), v.double(), lengths)
        assert (ours - exact).abs().max() <= 1.5 * (theirs - exact).abs().max()


@pytest.mark.parametrize("kind", ["rms", "rms_fp32", "rms_offset"])
def test_queries_and_keys_are_normed_before_they_are_rotated(kind):
    x, (q_gamma, k_gamma) = torch.randn(3, 7, 4, 10), torch.randn(2, 10)
    q, k, v = x[0], x[1, :, :2], x[2, :, :2]
    offset = 1 if kind == "rms_offset" else 0
    op = SoftmaxContextOp(4, 2, 10, scale=0.3, qk_norm=kind, qk_norm_eps=1e-6)
    ours = attend_in_parts(op, q, k, v, [7], 4, q_gamma=q_gamma, k_gamma=k_gamma)
    normed = (F.rms_norm(y, (10,), gamma + offset, 1e-6) for y, gamma in ((q, q_gamma), (k, k_gamma)))
    close(ours.double(), dense_attention(*normed, v, None, 0.3))


@pytest.mark.parametrize("lengths", [(1,), (5, 5), (2000, *[16] * 128), (1, 2, 4, 8, 16), tuple(range(1, 60))], ids=len)
def test_padding_in_prefill_at_most_doubles_the_tokens(lengths):
    groups = like_lengths(lengths)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert sum(len(group) * max(lengths[i] for i in group) for group in groups) <= 2 * sum(lengths)


def test_the_identity_block_table_gives_what_any_other_gives():
    op = SoftmaxContextOp(4, 2, 10, scale=0.3)
    q, k, v = torch.randn(3, 2, 2, 10), torch.randn(3, 2, 10), torch.randn(3, 2, 10)
    outputs = []
    for is_identity in (True, False):
        torch.manual_seed(1)
        cache = torch.randn(2, 5, 2, 16, 10)
        batch = DecodeBatch(
            tokens=torch.zeros(3, dtype=torch.int64),
            positions=torch.tensor([4, 9, 0]),
            block_tables=torch.arange(3)[:, None],
            context=10,
            is_identity=is_identity,
        )
        outputs.append(op(QKV(q, k, v), KVBlocks(*cache), batch))
    assert torch.equal(*outputs)


def test_block_copy_copies_the_asked_tokens_of_all_layers_and_nothing_else():
    workspace = torch.randn(6, 5, 2, 7, 4)
    before = workspace.clone()
    BlockCopyOp()(workspace, *torch.tensor([[4, 0], [1, 2], [3, 7]]))
    assert torch.equal(workspace[:, 1, :, :3], before[:, 4, :, :3])
    assert torch.equal(workspace[:, 2], before[:, 0])
    workspace[:, 1, :, :3] = before[:, 1, :, :3]
    workspace[:, 2] = before[:, 2]
    assert torch.equal(workspace, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_logprobs_equal_log_softmax_and_have_its_gradient(dtype):
    logits = (torch.randn(3, 5, 63) * 4).to(dtype).requires_grad_()
    tokens = torch.randint(0, 63, (3, 5))
    ours = token_logprobs(logits, tokens, 0.7)
    exact = (logits.double() / 0.7).log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    assert ours.dtype == torch.float32
    close(ours.double(), exact)
    grads = [torch.autograd.grad(x.sum(), logits)[0] for x in (ours, exact)]
    torch.testing.assert_close(*grads, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-2)


class WholeCopies(TorchDispatchMode):
    """Counts the tensors of so many elements that get memory of their own."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.count = numel, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and output.numel() == self.numel and not function.is_view:
            pointers = {x.data_ptr() for x in args if isinstance(x, torch.Tensor)}
            self.count += output.data_ptr() not in pointers
        return output


def logprobs_out_of_place(logits, tokens, temperature):
    """The same operations, each with a result of its own."""
    scaled = logits.float() / temperature
    return scaled.gather(-1, tokens[..., None]).squeeze(-1) - scaled.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_token_logprobs_copy_the_logits_once_and_keep_their_bits(dtype):
    logits = (torch.randn(3, 5, 63) * 4).to(dtype).requires_grad_()
    tokens, before = torch.randint(0, 63, (3, 5)), logits.detach().clone()
    found = [function(logits, tokens, 0.7) for function in (token_logprobs, logprobs_out_of_place)]
    assert torch.equal(*found) and torch.equal(logits, before)
    assert torch.equal(*(torch.autograd.grad(x.sum(), logits)[0] for x in found))
    with WholeCopies(logits.numel()) as copies, torch.no_grad():
        token_logprobs(logits, tokens, 0.7)
    assert copies.count == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_log_probability_has_its_gradient_in_one_copy_of_the_logits(dtype, kernels):
    logits = (torch.randn(7, 63, device=kernels) * 4).to(dtype).requires_grad_()
    tokens = torch.randint(0, 63, (7,), device=kernels)
    logprobs, weights = token_logprobs(logits, tokens, 0.7), torch.randn(7, device=kernels)
    lse = (logits.detach().float() / 0.7).logsumexp(-1)
    with WholeCopies(logits.numel()) as copies:
        (gradient,) = torch.autograd.grad(logprobs, logits, weights)
    assert copies.count == (1 if dtype == torch.float32 else 2)  # the second is the gradient in 16 bits
    probs = torch.exp(logits.detach().float() / 0.7 - lse[:, None])
    expected = (torch.nn.functional.one_hot(tokens, 63) - probs) * weights[:, None] / 0.7
    torch.testing.assert_close(gradient, expected.to(dtype), rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)


def test_keyed_noise_is_uniform_and_independent_of_company():
    keys = torch.randint(-(2**62), 2**62, (20_000,))
    for values in (
        keyed_uniform(keys, torch.zeros_like(keys)),
        keyed_uniform(keys[:1].expand(20_000), torch.arange(20_000)),
    ):
        assert values.min() >= 0 and values.max() < 1
        # Kolmogorov-Smirnov: beyond 1.95 / sqrt(n) with a chance of one in a thousand
        ordered, n = values.sort().values, len(values)
        assert (ordered - torch.arange(n) / n).abs().max() < 1.95 / n**0.5
        assert abs(torch.corrcoef(torch.stack([values[1:], values[:-1]]))[0, 1]) < 5 / n**0.5
    assert torch.equal(keyed_uniform(keys[7:8], torch.tensor([3])), keyed_uniform(keys, torch.full_like(keys, 3))[7:8])


def test_sampling_never_takes_a_token_that_a_filter_left_out():
    logits = torch.randn(2000, 63)
    keys, positions = torch.arange(2000), torch.zeros(2000, dtype=torch.int64)
    for kept, options in ((3, {"top_k": 3}), (1, {"top_p": 1e-6}), (1, {"min_p": 1.0})):
        tokens, logprobs = SampleOp(SamplingOptions(do_sample=True, **options))(logits, keys, positions)
        best = logits.topk(kept).indices
        assert (tokens[:, None] == best).any(1).all()
        close(logprobs.double(), logits.double().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1))


def test_ends_are_never_drawn_too_early_and_the_report_stays_unfiltered():
    logits, keys = torch.zeros(500, 5), torch.arange(500)
    op = SampleOp(SamplingOptions(do_sample=True, min_new_tokens=2, eos_token_ids=(0, 4)))
    for draw, drawn in ((0, {1, 2, 3}), (1, {1, 2, 3}), (2, {0, 1, 2, 3, 4})):
        tokens, logprobs = op(logits, keys, torch.full_like(keys, draw))
        assert set(tokens.tolist()) == drawn
        torch.testing.assert_close(logprobs, torch.full((500,), -torch.tensor(5.0).log().item()))


def test_the_penalty_is_for_the_tokens_of_each_rows_slot():
    from transformers.generation import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(4, 30)
    seen, slots = torch.rand(9, 30) < 0.4, torch.tensor([8, 0, 3, 3])
    tokens, _ = SampleOp(SamplingOptions(do_sample=False, repetition_penalty=3.0))(
        logits, torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64), seen, slots
    )
    for row, slot in enumerate(slots):
        penalized = RepetitionPenaltyLogitsProcessor(3.0)(seen[slot].nonzero().T, logits[row : row + 1])
        assert tokens[row] == penalized.argmax()
