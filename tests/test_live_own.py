"""Models without containers answer in live batches too, through their own generate()."""

import pytest
import torch
import transformers as hf
from models import PAD, VOCAB, build_model, randomised

import hybrid_engine
from hybrid_engine.generation.batching.sequence import Prompt, Sequence
from hybrid_engine.generation.live_opening import live_batch
from hybrid_engine.generation.options import read_options

_SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": PAD, "eos_token_id": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
_JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False}
MODELS = {
    "mamba": lambda: hf.MambaForCausalLM(hf.MambaConfig(**_SIZES, state_size=8)),
    "jamba": lambda: hf.JambaForCausalLM(hf.JambaConfig(**_SIZES, **_HEADS, **_JAMBA)),
    "rwkv": lambda: hf.RwkvForCausalLM(hf.RwkvConfig(**_SIZES)),
}
PROMPTS = ([5, 6, 7], [8, 9, 10, 11, 12])


def _engine(build):
    return hybrid_engine.init_inference(randomised(build), dtype=torch.float32)


def _answers(generator, options, prompts=PROMPTS):
    rows = [
        Sequence(Prompt(list(prompt)), row, read_options(options, 0, VOCAB), row) for row, prompt in enumerate(prompts)
    ]
    with live_batch(generator) as batch:
        batch.add(rows)
        while batch.has_work:
            batch.turn()
    return rows


@pytest.mark.parametrize("name", MODELS)
def test_greedy_answers_and_their_logprobs_are_the_models_own(name):
    rows = _answers(_engine(MODELS[name]).generator, {"max_new_tokens": 6, "eos_token_id": None, "top_logprobs": 2})
    reference = randomised(MODELS[name])
    for prompt, row in zip(PROMPTS, rows, strict=True):
        output = reference.generate(
            torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=PAD,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        assert row.tokens == output.sequences[0, len(prompt) :].tolist() and row.finish_reason == "length"
        logprobs = torch.cat(output.logits).log_softmax(-1).gather(1, torch.tensor(row.tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(row.logprobs), logprobs, atol=1e-4)
        assert [top[0][0] for top in row.tops] == row.tokens


def test_drawn_answers_are_those_of_containers():
    """A Llama with and without its containers: the same seeds, options and rules give the same tokens."""
    options = {
        "max_new_tokens": 12, "do_sample": True, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.5,
        "no_repeat_ngram_size": 2, "min_new_tokens": 3, "eos_token_id": [2, 7, 11],
    }  # fmt: skip
    expected = _answers(_engine(build_model).generator, options)
    engine = _engine(build_model)
    engine.generator.drop_containers("a test")
    found = _answers(engine.generator, options)
    assert [row.tokens for row in found] == [row.tokens for row in expected]
    assert [row.finish_reason for row in found] == [row.finish_reason for row in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=1e-4)


def test_options_of_the_models_own_config_do_not_change_what_is_drawn():
    engine = _engine(MODELS["mamba"])
    expected = _answers(engine.generator, {"max_new_tokens": 8})
    engine.module.generation_config.update(
        repetition_penalty=3.0, suppress_tokens=[expected[0].tokens[1]], do_sample=True
    )
    assert [row.tokens for row in _answers(engine.generator, {"max_new_tokens": 8})] == [row.tokens for row in expected]


def test_scores_of_prompts_are_refused_by_name():
    engine = _engine(MODELS["mamba"])
    with live_batch(engine.generator) as batch, pytest.raises(ValueError, match="prompt_logprobs needs containers"):
        batch.add([Sequence(Prompt([5], num_tops=1), 0, read_options({"max_new_tokens": 2}, 0, VOCAB))])
