"""Gemma 4 and 3n: layers that share keys and values keep none, streams end where they must, exact mode, refusals."""

import pytest
import torch
import transformers as hf

import hybrid_engine
from hybrid_engine.containers import InferenceModel
from hybrid_engine.ops import token_logprobs
from tests.support.models import PAD, build_model, padded_prompts

SAMPLED = {"max_new_tokens": 6, "do_sample": True, "top_k": 0, "pad_token_id": PAD, "eos_token_id": None}


def build_engine(family, **options):
    config = {"train_batch_size": 6, "hybrid_engine": {"enabled": True, **options}}
    return hybrid_engine.initialize(model=build_model(family), config=config)[0].eval()


@pytest.mark.parametrize("family", ["gemma4", "gemma3n"])
def test_layers_that_share_keys_and_values_keep_none(family):
    model = InferenceModel(build_model(family))
    own = [spec.kv for spec in model.cache_specs]
    sources = [spec.shared_with for spec in model.cache_specs]
    width = 24 if family == "gemma4" else 16
    assert own == [((2, 16), (2, 16)), ((2, width), (2, width)), (), ()]
    assert sources == [None, None, 0, 1]
    assert model.bytes_per_block(block_size=1) == 4 * 2 * 2 * (16 + width)


@pytest.mark.parametrize("family", ["gemma4", "gemma4-experts"])
def test_exact_rollouts_have_the_bits_of_the_trainer(family):
    engine = build_engine(family, exact=True)
    input_ids, mask = padded_prompts()
    output = engine.generate(input_ids, attention_mask=mask, return_dict_in_generate=True, **SAMPLED)
    answers = output.sequences[:, input_ids.shape[1] :]
    full = torch.cat([mask, torch.ones_like(answers)], 1)
    with torch.no_grad():
        logits = engine(input_ids=output.sequences, attention_mask=full).logits[:, input_ids.shape[1] - 1 : -1]
    assert torch.equal(token_logprobs(logits, answers), output.logprobs)


def test_exact_mode_of_several_streams_is_refused_by_name():
    with pytest.raises(ValueError, match=r"hybrid_engine\.exact: a batch of products of"):
        build_engine("gemma3n", exact=True).generate(torch.tensor([[5, 6]]), **SAMPLED)


def test_attention_to_later_tokens_falls_back_by_name():
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80}
    config = hf.Gemma4TextConfig(
        **sizes, vocab_size=99, hidden_size_per_layer_input=0, use_bidirectional_attention="all"
    )
    engine = hybrid_engine.initialize(
        model=hf.Gemma4ForCausalLM(config), config={"train_batch_size": 1, "hybrid_engine": {"enabled": True}}
    )[0]
    assert "use_bidirectional_attention='all'" in engine.generator.fallback_reason
