"""Rollouts on containers equal the model's own `generate()` and forward, for every family."""

import pytest
import torch

import hybrid_engine
from tests.support.models import BUILDERS, PAD, build_model, module_logprobs, padded_prompts

EOS = [7, 11, 23]
EXPERTS = ("mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss", "deepseek-v3")
NEW_TOKENS = 16
WORKSPACES = {
    "one slot": {"max_running": 1},
    "three slots": {"max_running": 3},
    "all slots": {},
    "small blocks": {"kv_block_size": 4},
    "small blocks and preemption": {"kv_block_size": 4, "max_kv_blocks": 7},
}


def build_engine(model, **hybrid_config):
    config = {"train_batch_size": 1, "hybrid_engine": {"enabled": True, **hybrid_config}}
    engine, *_ = hybrid_engine.initialize(model=model, config=config)
    return engine.eval()


@pytest.fixture(scope="module", params=BUILDERS)
def reference(request):
    """A family's model, prompts, and the model's own greedy answer."""
    model = build_model(request.param)
    input_ids, mask = padded_prompts()
    greedy = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": EOS, "pad_token_id": PAD}
    expected = model.generate(input_ids, attention_mask=mask, **greedy)
    return request.param, input_ids, mask, greedy, expected


def own_workspaces():
    """A family and a workspace: with preemption every family, with every other one each fourth family."""
    *others, preempting = WORKSPACES
    for number, family in enumerate(BUILDERS):
        yield from ((family, workspace) for workspace in (preempting, others[number % len(others)]))


@pytest.mark.parametrize(("reference", "workspace"), own_workspaces(), indirect=["reference"])
def test_greedy_tokens_and_logprobs_equal_the_models_own(reference, workspace):
    family, input_ids, mask, greedy, expected = reference
    engine = build_engine(build_model(family), **WORKSPACES[workspace])
    assert engine.generator.fallback_reason is None
    output = engine.generate(input_ids, attention_mask=mask, return_dict_in_generate=True, **greedy)
    assert torch.equal(output.sequences, expected)
    trainer = module_logprobs(build_model(family), output.sequences, mask)
    is_response = torch.arange(output.logprobs.shape[1]) < output.lengths[:, None]
    assert output.logprobs.dtype == torch.float32
    torch.testing.assert_close(output.logprobs[is_response], trainer[is_response].float(), atol=1e-5, rtol=0)
    assert torch.all(output.logprobs[~is_response] == 0)
    assert (engine.latency_stats()["preemptions"] > 0) == ("preemption" in workspace)


def test_lengths_and_finish_reasons_describe_the_rows(reference):
    family, input_ids, mask, greedy, expected = reference
    output = build_engine(build_model(family)).generate(
        input_ids, attention_mask=mask, return_dict_in_generate=True, **greedy
    )
    for row, length, reason in zip(
        expected[:, 9:].tolist(), output.lengths.tolist(), output.finish_reason, strict=True
    ):
        ended = [i for i, token in enumerate(row) if token in EOS]
        assert length == (ended[0] + 1 if ended else NEW_TOKENS)
        assert reason == ("stop" if ended else "length")


def test_a_row_equals_the_same_row_alone_and_in_any_order(reference):
    family, input_ids, mask, greedy, expected = reference
    engine = build_engine(build_model(family), max_running=4)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    shuffled = engine.generate(input_ids[order], attention_mask=mask[order], **greedy)
    assert torch.equal(shuffled, expected[order])
    for row in range(len(input_ids)):
        alone = engine.generate(input_ids[row : row + 1], attention_mask=mask[row : row + 1], **greedy)
        assert torch.equal(alone[0], expected[row, : alone.shape[1]])
        assert torch.all(expected[row, alone.shape[1] :] == PAD)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", BUILDERS)
def test_half_precision_is_no_further_from_fp32_than_the_model_itself(family, dtype):
    key = "bf16" if dtype == torch.bfloat16 else "fp16"
    model = build_model(family)
    config = {"train_batch_size": 1, key: {"enabled": True}, "hybrid_engine": {"enabled": True}}
    engine, *_ = hybrid_engine.initialize(model=model, config=config)
    input_ids, mask = padded_prompts()
    output = engine.eval().generate(
        input_ids, attention_mask=mask, max_new_tokens=8, do_sample=True, top_k=0, seed=0, return_dict_in_generate=True
    )
    exact = module_logprobs(build_model(family), output.sequences, mask)
    is_response = torch.arange(output.logprobs.shape[1]) < output.lengths[:, None]
    own_error = (module_logprobs(model, output.sequences, mask) - exact).abs()[is_response]
    error = (output.logprobs - exact).abs()[is_response]
    if family in EXPERTS:  # rounding may send a token to another expert, here or there, and then it is far off
        assert error.median() <= 2 * own_error.median()
        return
    assert error.mean() <= 1.5 * own_error.mean()
    assert error.quantile(0.95) <= 2 * own_error.quantile(0.95)


def test_an_unknown_family_falls_back_and_says_so(caplog):
    from transformers import CodeGenConfig, CodeGenForCausalLM

    torch.manual_seed(0)
    config = CodeGenConfig(n_embd=32, n_layer=1, n_head=4, rotary_dim=4, vocab_size=99, bos_token_id=1, eos_token_id=2)
    model = CodeGenForCausalLM(config).eval()
    input_ids, mask = padded_prompts()
    expected = model.generate(input_ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=PAD)
    engine = build_engine(model)
    output = engine.generate(
        input_ids,
        attention_mask=mask,
        max_new_tokens=5,
        do_sample=False,
        pad_token_id=PAD,
        return_dict_in_generate=True,
    )
    assert torch.equal(output.sequences, expected)
    trainer = module_logprobs(model, output.sequences, mask).float()
    torch.testing.assert_close(output.logprobs, trainer, atol=1e-4, rtol=0)
    lines = [record.message for record in caplog.records if "CodeGenBlock" in record.message]
    assert len(lines) == 1 and "LlamaDecoderLayer" in lines[0]
    assert "CodeGenBlock" in engine.report()


def test_models_without_a_position_limit_fall_back():
    from transformers import MptConfig, MptForCausalLM

    torch.manual_seed(0)
    model = MptForCausalLM(MptConfig(d_model=32, n_layers=1, n_heads=2, vocab_size=99)).eval()
    input_ids, mask = padded_prompts()
    greedy = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": PAD}
    expected = model.generate(input_ids, attention_mask=mask, **greedy)
    engine = build_engine(model)
    assert "MptBlock" in engine.generator.fallback_reason
    assert torch.equal(engine.generate(input_ids, attention_mask=mask, **greedy), expected)


def test_an_encoder_decoder_is_refused():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=99)
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is not a decoder-only language model"):
        build_engine(T5ForConditionalGeneration(config))


def test_a_window_in_the_config_of_a_family_without_one_is_ignored_as_the_model_ignores_it():
    engine, plain = build_engine(build_model("llama")), build_model("llama")
    engine.module.config.sliding_window = 4
    engine.create_inference_containers()
    input_ids, mask = padded_prompts()
    greedy = {"max_new_tokens": 12, "do_sample": False}
    assert engine.generator.fallback_reason is None
    assert torch.equal(
        engine.generate(input_ids, attention_mask=mask, **greedy),
        plain.generate(input_ids, attention_mask=mask, **greedy),
    )


def test_containers_that_compute_another_function_are_not_used(monkeypatch):
    from dataclasses import replace

    from hybrid_engine.containers import POLICIES

    # A policy that swaps gate and up fits every shape and is wrong.
    wrong = replace(POLICIES["LlamaDecoderLayer"][0], gate="mlp.up_proj", up="mlp.gate_proj")
    monkeypatch.setitem(POLICIES, "LlamaDecoderLayer", [wrong])
    engine = build_engine(build_model("llama"))
    assert "disagree" in engine.generator.fallback_reason
