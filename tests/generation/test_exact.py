"""Exact mode: the log-probability of a token has the same bits in every batch, and in the trainer's forward."""

import copy
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import hybrid_engine
from hybrid_engine.generation.model import probe
from hybrid_engine.ops import SampleOp, SamplingOptions, token_logprobs
from hybrid_engine.ops.fixed_attention import AttentionParameters, attend, attend_as_usual
from hybrid_engine.ops.fixed_shapes import FixedShapes, NotExactError
from tests.support.distributed import run_distributed
from tests.support.models import build_model, padded_prompts

FAMILIES = ["llama", "qwen3-qk-norm", "gpt2", "opt", "gemma2", "mixtral"]


def build_engine(model, **generation):
    block = {"enabled": True, "print_latency": False, "exact": True, "max_out_tokens": 64, **generation}
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "hybrid_engine": block,
        "bf16": {"enabled": next(model.parameters()).dtype == torch.bfloat16},
    }
    engine, *_ = hybrid_engine.initialize(model=model, config=config)
    return engine


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model


def rollout(engine, input_ids, mask, **options):
    """Sampled responses with their log-probabilities, by a fixed seed."""
    engine.eval()
    options = {"do_sample": True, "max_new_tokens": 9, "seed": 3, "return_dict_in_generate": True, **options}
    return engine.generate(input_ids, attention_mask=mask, **options)


def trainer_logprobs(engine, output, mask):
    """Of a rollout's responses, by the engine's forward in training mode, with gradients; 0 on padding."""
    width = mask.shape[1]
    is_response = torch.arange(output.logprobs.shape[1], device=output.logprobs.device) < output.lengths[:, None]
    full = torch.cat([mask, is_response.long()], 1)
    engine.train()
    logits = engine(input_ids=output.sequences, attention_mask=full).logits[:, width - 1 : -1]
    return torch.where(is_response, token_logprobs(logits, output.sequences[:, width:]), 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_and_rollout_have_the_same_bits(family, dtype):
    engine = build_engine(without_dropout(build_model(family)).to(dtype))
    assert engine.logprob_difference.max == 0.0
    input_ids, mask = padded_prompts()
    output = rollout(engine, input_ids, mask)
    assert torch.equal(output.logprobs, trainer_logprobs(engine, output, mask))


def test_processors_with_avx2_alone_have_the_same_bits_too():
    """MKL reads at its start which instructions it may use; on processors that are not Intel's it does not ask."""
    names = "same_bits and llama-fp32 or attention_of_a_query or row_is_computed"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__, "-k", names]
    environment = os.environ | {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def by_prompt(output):
    """Each response with its log-probabilities, by the row it has in the batch."""
    rows = zip(output.sequences, output.logprobs, output.lengths.tolist(), strict=True)
    width = output.sequences.shape[1] - output.logprobs.shape[1]
    return [(tokens[width : width + n], logprobs[:n]) for tokens, logprobs, n in rows]


def assert_same_bits(found, expected):
    for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(found, expected, strict=True):
        assert torch.equal(tokens, expected_tokens)
        assert torch.equal(logprobs, expected_logprobs)


def many_prompts(num_prompts=32, width=11):
    """Of mixed lengths, padded on the left."""
    input_ids = torch.randint(3, 99, (num_prompts, width), generator=torch.Generator().manual_seed(5))
    mask = (torch.arange(width) >= torch.arange(num_prompts)[:, None] * 7 % width).long()
    return input_ids * mask, mask


def test_a_sample_does_not_depend_on_its_batch():
    engine = build_engine(build_model().bfloat16())
    input_ids, mask = many_prompts()
    expected = by_prompt(rollout(engine, input_ids, mask))
    for rows in ([3], [31, 0], list(range(4, 13)), list(range(31, -1, -1))):
        found = by_prompt(rollout(engine, input_ids[rows], mask[rows]))
        assert_same_bits(found, [expected[row] for row in rows])


def test_a_sample_does_not_depend_on_slots_preemption_and_its_group():
    model = build_model()
    input_ids, mask = many_prompts(8)
    expected = by_prompt(rollout(build_engine(model), input_ids, mask, max_new_tokens=20))
    engine = build_engine(model, max_running=3, kv_block_size=4, max_kv_blocks=13)
    output = rollout(engine, input_ids, mask, max_new_tokens=20, num_return_sequences=2)
    assert engine.latency_stats()["preemptions"] > 0
    assert_same_bits(by_prompt(output)[::2], expected)
    repeated = mask.repeat_interleave(2, 0)
    assert torch.equal(output.logprobs, trainer_logprobs(engine, output, repeated))


@pytest.mark.parametrize(
    ("family", "dtype"), [("lfm2", torch.bfloat16), ("qwen3.5", torch.bfloat16), ("granite4", torch.float32)]
)
def test_recurrences_have_the_same_bits_in_groups_that_are_preempted(compiled, monkeypatch, family, dtype):
    monkeypatch.setattr(probe, "NUM_EXACT_TOKENS", 20)  # of the engine's own comparison, which takes longest
    engine = build_engine(build_model(family).to(dtype), max_running=3, kv_block_size=4, max_kv_blocks=9)
    assert engine.logprob_difference.max == 0.0
    input_ids, mask = padded_prompts()
    output = rollout(engine, input_ids, mask, num_return_sequences=2)
    logprobs = trainer_logprobs(engine, output, mask.repeat_interleave(2, 0))
    assert engine.latency_stats()["preemptions"] > 0
    assert torch.equal(output.logprobs, logprobs)
    if dtype == torch.float32:
        loss = logprobs.mean()
        usual = engine.module(input_ids=input_ids, attention_mask=mask).logits
        exact = engine(input_ids=input_ids, attention_mask=mask).logits
        parameters = list(engine.module.parameters())
        found = [torch.autograd.grad(x[mask > 0].square().mean(), parameters) for x in (exact, usual)]
        for ours, own in zip(*found, strict=True):
            torch.testing.assert_close(ours, own, atol=1e-6 * float(own.abs().max()), rtol=1e-4)
        engine.backward(-loss)
        engine.step()
        output = rollout(engine, input_ids, mask, max_new_tokens=3)
        assert torch.equal(output.logprobs, trainer_logprobs(engine, output, mask))


def test_adapters_and_training_steps_keep_the_bits():
    torch.manual_seed(0)
    adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    engine = build_engine(get_peft_model(build_model(), adapter))
    input_ids, mask = padded_prompts()
    first = None
    for _ in range(3):
        output = rollout(engine, input_ids, mask)
        logprobs = trainer_logprobs(engine, output, mask)
        assert engine.observe_logprobs(output.logprobs, logprobs, logprobs != 0).max == 0.0
        assert first is None or not torch.equal(output.logprobs, first)  # there was a step in between
        first = output.logprobs
        with torch.no_grad():  # the head's weight is frozen and what it reads a view: torch makes a batch of it
            last, whole = (
                engine(input_ids=output.sequences, **keep).logits[:, -4:] for keep in ({"logits_to_keep": 4}, {})
            )
        assert torch.equal(last, whole)
        engine.backward(-logprobs.mean())
        engine.step()


@contextmanager
def with_threads(num_threads):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def roll_out_on(rank, world_size):
    """This rank's prompts at stage 3: samples, their log-probabilities, and those of the trainer."""
    input_ids, mask = many_prompts(6)
    mine = slice(rank * 3, rank * 3 + 3)
    config = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "hybrid_engine": {"enabled": True, "print_latency": False, "exact": True},
    }
    engine, *_ = hybrid_engine.initialize(model=build_model(), config=config)
    output = rollout(engine, input_ids[mine], mask[mine])
    is_same = torch.equal(output.logprobs, trainer_logprobs(engine, output, mask[mine]))
    with with_threads(1 + rank), pytest.raises(ValueError, match="use 1 to 2 threads"):
        engine.create_inference_containers()
    return by_prompt(output), is_same


def test_two_processes_sample_what_one_does():
    expected = by_prompt(rollout(build_engine(build_model()), *many_prompts(6)))
    results = run_distributed(roll_out_on, 2)
    assert_same_bits([row for rows, _ in results for row in rows], expected)
    assert all(is_same for _, is_same in results)


def test_gradients_are_those_of_a_plain_forward():
    plain = build_model()
    engine = build_engine(copy.deepcopy(plain))
    input_ids, mask = padded_prompts()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    weights = torch.randn(99)
    for model in (engine, plain.train()):
        logits = model(input_ids=input_ids, attention_mask=mask, position_ids=positions).logits
        (logits.log_softmax(-1) @ weights)[mask == 1].mean().backward()
    for (name, ours), theirs in zip(engine.module.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_what_cannot_be_exact_is_refused_by_name():
    with pytest.raises(ValueError, match=r"hybrid_engine\.exact: .*products"):
        build_engine(build_model("gptj"))
    with pytest.raises(ValueError, match=r"hybrid_engine\.exact: .*LatentAttention, which has no exact form"):
        build_engine(build_model("deepseek-v3"))
    with pytest.raises(ValueError, match=r"hybrid_engine\.exact.*pin_parameters=true"):
        build_engine(build_model(), pin_parameters=False)
    engine = build_engine(build_model("gpt2"))  # which has dropout
    input_ids, mask = padded_prompts()
    with pytest.raises(ValueError, match=r"num_beams.*hybrid_engine\.exact"):
        rollout(engine, input_ids, mask, num_beams=2, do_sample=False)
    engine.train()
    with pytest.raises(ValueError, match=r"hybrid_engine\.exact.*dropout"):
        engine(input_ids=input_ids, attention_mask=mask)
    engine = build_engine(build_model())
    with pytest.raises(ValueError, match="one sequence a row"):
        engine(input_ids=input_ids[:1], position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]))


def test_nothing_of_the_model_stays_changed():
    model = build_model()
    before = model.config._attn_implementation
    engine = build_engine(model)
    rollout(engine, *padded_prompts())
    assert model.config._attn_implementation == before
    with pytest.raises(ValueError):
        engine.train()(input_ids=torch.ones(1, 4, dtype=torch.long), attention_mask=torch.ones(1, 1, 4, 4))
    assert model.config._attn_implementation == before
    tokens = torch.arange(3, 12)[None]
    assert torch.allclose(model(input_ids=tokens).logits, engine(input_ids=tokens).logits, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rollout_records_the_bits_that_the_trainer_computes(dtype):
    """Over a vocabulary of several blocks; a rollout's logits are fp32 and want no gradient."""
    torch.manual_seed(0)
    logits = (torch.randn(2, 40, 3000) * 3).to(dtype).requires_grad_()
    rows, numbers = logits.detach().float().flatten(0, 1), torch.arange(80)
    op = SampleOp(SamplingOptions(do_sample=True, temperature=0.7), is_exact=True)
    tokens, logprobs = op(rows, numbers, numbers)
    assert torch.equal(token_logprobs(logits, tokens.view(2, 40), 0.7).flatten(), logprobs)
    with torch.no_grad():
        assert torch.equal(token_logprobs(rows, tokens, 0.7), logprobs)
    alone = op(rows[7:8], numbers[7:8], numbers[7:8])
    assert (int(alone[0]), float(alone[1])) == (int(tokens[7]), float(logprobs[7]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_computed_as_if_it_were_alone(dtype):
    torch.manual_seed(0)
    rows, weight, bias = torch.randn(70, 33).to(dtype), torch.randn(19, 33).to(dtype), torch.randn(19).to(dtype)
    functions = {
        "linear": lambda x: nn.functional.linear(x, weight, bias),
        "linear in three dimensions": lambda x: nn.functional.linear(x[None], weight)[0],
        "silu": nn.functional.silu,
        "gelu": lambda x: nn.functional.gelu(x, approximate="tanh"),
        "sigmoid in place": lambda x: x.clone().sigmoid_(),
        "rsqrt": lambda x: torch.rsqrt(x.abs() + 1e-3),
        "mean": lambda x: x.mean(-1, keepdim=True),
        "softmax": lambda x: x.softmax(-1),
        "layer norm": lambda x: nn.functional.layer_norm(x, (33,)),
        "a scaled sum": lambda x: torch.add(x, x.flip(1), alpha=0.3),
        "log-probability": lambda x: token_logprobs(x.float(), torch.full((len(x),), 5), 0.7),
    }
    strided = torch.randn(33, 70).to(dtype).t().copy_(rows)
    with FixedShapes():
        for name, function in functions.items():
            whole = function(rows)
            assert torch.equal(function(strided), whole), name
            for first, end in ((0, 1), (1, 3), (40, 41), (5, 38)):
                assert torch.equal(function(rows[first:end]), whole[first:end]), name
        with pytest.raises(NotExactError, match="cumsum"):
            rows.cumsum(0)


@pytest.mark.parametrize(
    "attention", [AttentionParameters(0.3), AttentionParameters(0.3, window=50), AttentionParameters(0.3, softcap=2.0)]
)
def test_attention_of_a_query_is_the_same_wherever_it_is_computed(attention):
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, 90, heads, 8, requires_grad=True) for heads in (6, 2, 2))
    sinks = torch.randn(6, requires_grad=True)
    places = torch.arange(90).expand(3, 90)
    for sink in (None, sinks):
        whole = attend(query, key, value, places, attention, sink)
        usual = attend_as_usual(query, key, value, attention, sink)
        torch.testing.assert_close(whole, usual)
        inputs = [query, key, value, *([] if sink is None else [sink])]
        for ours, theirs in zip(*(torch.autograd.grad(x.square().sum(), inputs) for x in (whole, usual)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        for row, first, end in ((1, 0, 1), (0, 63, 66), (2, 89, 90)):
            rows = slice(row, row + 1), slice(first, end)
            alone = attend(
                query[rows], key[row : row + 1, :end], value[row : row + 1, :end], places[rows], attention, sink
            )
            assert torch.equal(alone, whole[rows])
