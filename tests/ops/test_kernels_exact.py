"""Exact mode on Triton kernels: what a row gives has the same bits alone, in every batch, and in the trainer."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hybrid_engine.generation.core import Prefill, Prompt
from hybrid_engine.generation.model import probe
from hybrid_engine.generation.step import pack_prefills
from hybrid_engine.ops import DecodeBatch, PrefillBatch, SampleOp, SamplingOptions, token_logprobs
from hybrid_engine.ops.dispatch import IS_INTERPRETED
from hybrid_engine.ops.fixed_attention import (
    AttentionParameters,
    attend,
    attend_as_usual,
    attend_decode,
    attend_prefill,
)
from hybrid_engine.ops.fixed_product import fixed_product
from hybrid_engine.ops.fixed_shapes import FixedShapes, NotExactError
from tests.generation.test_exact import build_engine, rollout, trainer_logprobs

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
PARTS = ((0, 1), (69, 70), (31, 33), (5, 22), (38, 70))
PARTS_OF_FOUR = ((0, 1), (3, 4), (1, 3))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _exact_dot(monkeypatch):
    """The interpreter's `tl.dot` as a GPU's: what a row gives does not depend on its place in the tile.

    It has numpy multiply, whose AVX2 code sums the last rows of a tile in another order than the first.
    """
    if IS_INTERPRETED:
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

        def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
            total = d.data.copy()
            for column in range(a.data.shape[-1]):
                total += a.data[..., column, None].astype(total.dtype) * b.data[..., column, None, :]
            return TensorHandle(total, d.dtype.scalar)

        monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def assert_near(found, exact, dtype):
    """The interpreter cuts bf16 off where the hardware rounds."""
    size = float(exact.abs().max())
    assert float((found.double() - exact.double()).abs().max()) <= size * (2e-6 if dtype == torch.float32 else 2**-7)


@DTYPES
def test_a_row_of_a_product_is_as_if_it_were_alone(dtype, kernels):
    rows, bias = torch.randn(70, 77, device=kernels).to(dtype), torch.randn(90, device=kernels).to(dtype)
    for weight in (torch.randn(90, 77, device=kernels).to(dtype).t(), torch.randn(77, 90, device=kernels).to(dtype)):
        whole = fixed_product(rows, weight, bias)
        assert_near(whole, rows.double() @ weight.double() + bias.double(), dtype)
        for first, end in PARTS:
            assert torch.equal(fixed_product(rows[first:end], weight, bias), whole[first:end])
    assert torch.equal(fixed_product(torch.cat((rows, rows), 1)[:, :77], weight, bias), whole)  # strided


@DTYPES
def test_rows_are_the_same_in_batches_of_1_to_32(dtype, kernels):
    rows, weight = torch.randn(32, 70, device=kernels).to(dtype), torch.randn(70, 40, device=kernels).to(dtype)
    whole = fixed_product(rows, weight)
    for num_rows in range(1, 33):
        for first in {0, 32 - num_rows}:
            part = slice(first, first + num_rows)
            assert torch.equal(fixed_product(rows[part], weight), whole[part])


@DTYPES
def test_a_row_is_computed_as_if_it_were_alone(dtype, kernels):
    rows = torch.randn(4, 33, device=kernels).to(dtype)
    gamma, beta = (torch.randn(33, device=kernels).to(dtype) for _ in range(2))
    functions = {
        "silu": torch.nn.functional.silu,
        "mean": lambda x: x.mean(-1, keepdim=True),
        "mean in fp32": lambda x: x.float().pow(2).mean(-1),
        "sum": lambda x: x.sum(-1),
        "logsumexp": lambda x: x.logsumexp(-1),
        "softmax": lambda x: x.softmax(-1, dtype=torch.float32),
        "log-softmax": lambda x: x.log_softmax(-1),
        "layer norm": lambda x: torch.nn.functional.layer_norm(x, (33,), gamma.to(x.dtype), beta.to(x.dtype)),
        "rotary angles": lambda x: x[:, :, None] @ x[:, None, :5],
    }
    with FixedShapes():
        for name, function in functions.items():
            whole = function(rows)
            for first, end in PARTS_OF_FOUR:
                assert torch.equal(function(rows[first:end]), whole[first:end]), name
        with pytest.raises(NotExactError, match="var"):
            rows.var(-1)
    for function in functions.values():
        with FixedShapes():
            found = function(rows)
        assert_near(found, function(rows.float()), dtype)


@DTYPES
def test_a_log_probability_is_as_if_its_row_were_alone(dtype, kernels):
    logits, tokens = torch.randn(4, 61, device=kernels).to(dtype), torch.arange(4, device=kernels) * 20
    whole = token_logprobs(logits, tokens, 0.7)
    assert_near(whole, (logits.double() / 0.7).log_softmax(-1).gather(1, tokens[:, None])[:, 0], torch.float32)
    for first, end in PARTS_OF_FOUR:
        assert torch.equal(token_logprobs(logits[first:end], tokens[first:end], 0.7), whole[first:end])


ATTENTIONS = {
    "plain": (AttentionParameters(0.3), False),
    "window and sinks": (AttentionParameters(0.3, window=21), True),
    "softcap": (AttentionParameters(0.3, softcap=2.0), False),
}


@DTYPES
@pytest.mark.parametrize("name", ATTENTIONS)
def test_prefill_decode_and_whole_sequences_are_attended_to_the_same_bits(dtype, name, kernels):
    attention, has_sinks = ATTENTIONS[name]
    lengths, block_size = (45 if dtype == torch.float32 else 70, 9, 33), 16  # more than one chunk of keys
    longest, dim = max(lengths), 12
    query, key, value = (torch.randn(3, longest, heads, dim, device=kernels).to(dtype) for heads in (3, 1, 1))
    sinks = torch.randn(3, device=kernels).to(dtype) if has_sinks else None
    places = torch.arange(longest, device=kernels).expand(3, -1)
    whole = attend(query, key, value, places, attention, sinks)
    usual = attend_as_usual(*(x.double() for x in (query, key, value)), attention, None if sinks is None else sinks)
    assert_near(whole, usual, dtype)
    tables = torch.randperm(15, device=kernels).view(3, 5)
    caches = tuple(torch.full((15, 1, block_size, dim), float("nan"), device=kernels).to(dtype) for _ in range(2))
    positions = torch.cat([places[0, :length] for length in lengths])
    rows = torch.tensor(lengths, device=kernels)
    sequences = torch.arange(3, device=kernels).repeat_interleave(rows)
    ends = rows.cumsum(0)
    batch = PrefillBatch(
        tokens=positions,
        positions=positions,
        write_blocks=tables[sequences, positions // block_size],
        write_offsets=positions % block_size,
        lengths=lengths,
        starts=torch.nn.functional.pad(ends, (1, 0)).int(),
        wanted=ends - 1,
        row_lengths=rows[sequences],
    )
    packed = (x[sequences, positions] for x in (query, key, value))
    prefilled = attend_prefill(*packed, caches, batch, attention, sinks)
    assert torch.equal(prefilled, whole[sequences, positions])
    for first, last in ((0, 5), (5, 9), (9, longest)):  # the same in chunks, the third for those that go on
        going_on = [index for index, length in enumerate(lengths) if length > first]
        prompts = {index: Prompt(list(range(lengths[index]))) for index in going_on}
        prefills = [
            Prefill(prompt, prompt.tokens, tables[index].tolist(), first, min(last, lengths[index]))
            for index, prompt in prompts.items()
        ]
        chunk = pack_prefills(prefills, block_size, False, torch.device(kernels))
        sequences = torch.tensor(going_on, device=kernels).repeat_interleave(
            torch.tensor(chunk.lengths, device=kernels)
        )
        packed = (x[sequences, chunk.positions] for x in (query, key, value))
        found = attend_prefill(*packed, caches, chunk, attention, sinks)
        assert torch.equal(found, whole[sequences, chunk.positions])
    for chosen in ([0], [2, 1], [2, 0, 1]):
        last = rows[chosen] - 1
        step = DecodeBatch(tokens=last, positions=last, block_tables=tables[chosen], context=longest, is_identity=False)
        found = attend_decode(*(x[chosen, last] for x in (query, key, value)), caches, step, attention, sinks)
        assert torch.equal(found, whole[chosen, last])


@pytest.mark.parametrize("vocab", [61, 5000])
def test_a_drawn_token_has_the_log_probability_that_the_trainer_gives(vocab, kernels):
    logits = torch.randn(5, vocab, device=kernels).bfloat16()
    keys, draws = torch.arange(5, device=kernels), torch.zeros(5, dtype=torch.int64, device=kernels)
    for options in (SamplingOptions(do_sample=False), SamplingOptions(do_sample=True, temperature=0.7, top_k=9)):
        op = SampleOp(options, is_exact=True)
        tokens, logprobs = op(logits.float(), keys, draws)
        assert torch.equal(logprobs, token_logprobs(logits, tokens, op.temperature))
        for row in range(5):
            alone = op(logits[row : row + 1].float(), keys[row : row + 1], draws[:1])
            assert (int(alone[0]), float(alone[1])) == (int(tokens[row]), float(logprobs[row]))


def build_llama(dtype):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=40, vocab_size=61, max_position_embeddings=128))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.pad_token_id = 0
    return model.to(dtype)


@DTYPES
def test_trainer_and_rollout_have_the_same_bits_on_kernels(dtype, kernels, monkeypatch):
    monkeypatch.setattr(probe, "NUM_EXACT_TOKENS", 9)
    monkeypatch.setattr(probe, "EXACT_ROWS", (1, 5))
    engine = build_engine(build_llama(dtype).to(kernels))
    assert engine.logprob_difference.max == 0.0
    input_ids = torch.tensor([[0, 0, 5, 9, 17], [7, 7, 30, 4, 12], [0, 6, 50, 11, 3]], device=kernels)
    mask = (input_ids != 0).long()
    output = rollout(engine, input_ids, mask, max_new_tokens=4)
    logprobs = trainer_logprobs(engine, output, mask)
    assert torch.equal(output.logprobs, logprobs)
    alone = rollout(engine, input_ids[1:2], mask[1:2], max_new_tokens=4)
    num_tokens = int(alone.lengths[0])
    assert torch.equal(alone.sequences[0], output.sequences[1, : 5 + num_tokens])
    assert torch.equal(alone.logprobs[0], output.logprobs[1, :num_tokens])
    if dtype == torch.float32:
        engine.train()
        assert_gradients_are_the_usual_ones(engine, output.sequences)


def assert_gradients_are_the_usual_ones(engine, tokens):
    parameters = list(engine.module.parameters())
    found = []
    for model in (engine, engine.module):
        logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
        logprobs = token_logprobs(logits[:, :-1], tokens[:, 1:])
        found.append(torch.autograd.grad(logprobs.mean(), parameters))
    for ours, usual in zip(*found, strict=True):
        torch.testing.assert_close(ours, usual, rtol=1e-3, atol=1e-5)
