"""Models without containers at every level: windows are those of one forward pass, rows those of each alone."""

import copy

import pytest
import torch
import transformers as hf

import hybrid_engine
from hybrid_engine.extensions.megatron.backends import SimpleTextGenerationStrategy, choose_backend, common_generate
from hybrid_engine.extensions.megatron.continuation import CommonInferenceParams
from hybrid_engine.extensions.megatron.wrapped_model import GPTInferenceWrapper
from tests.support.chat import build_chat_tokenizer
from tests.support.models import randomised

TOKENIZER = build_chat_tokenizer()
_SIZES = {"vocab_size": len(TOKENIZER), "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": 1}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
_JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}
_STATES = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
_STATES_2 = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "expand": 2, "chunk_size": 16}
_GRIFFIN = {"num_hidden_layers": 3, "attention_window_size": 8}
MODELS = {
    "mamba": lambda: hf.MambaForCausalLM(hf.MambaConfig(**_SIZES, state_size=8)),
    "mamba2": lambda: hf.Mamba2ForCausalLM(hf.Mamba2Config(**_SIZES, **_STATES_2)),
    "rwkv": lambda: hf.RwkvForCausalLM(hf.RwkvConfig(**_SIZES)),
    "jamba": lambda: hf.JambaForCausalLM(hf.JambaConfig(**_SIZES, **_HEADS, **_JAMBA)),
    "bamba": lambda: hf.BambaForCausalLM(
        hf.BambaConfig(**_SIZES, **_HEADS, **_STATES, attn_layer_indices=[1], mamba_expand=2)
    ),
    "recurrent_gemma": lambda: hf.RecurrentGemmaForCausalLM(
        hf.RecurrentGemmaConfig(**{**_SIZES, **_GRIFFIN}, **_HEADS)
    ),
}


class Argmax(SimpleTextGenerationStrategy):
    """A strategy of one's own."""

    def sample_from_logits(self, last_token_logits, common_inference_params, vocab_size=None):
        return last_token_logits.argmax(-1)


@pytest.mark.parametrize("name", MODELS)
def test_windows_go_on_from_those_before(name):
    model = randomised(MODELS[name])
    reference = copy.deepcopy(model)
    wrapper = GPTInferenceWrapper(hybrid_engine.init_inference(model, dtype=torch.float32))
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12], [12, 3, 9, 4, 4, 30, 8, 7]])
    with torch.no_grad():
        expected = reference(tokens, use_cache=False).logits
    wrapper.prep_model_for_inference(tokens)
    for start, end in ((0, 3), (3, 4), (4, 5), (5, 7), (7, 8)):
        logits = wrapper(wrapper.get_batch_for_context_window(start, end))
        assert torch.allclose(logits, expected[:, start:end], atol=1e-4)


@pytest.mark.parametrize("kind", [Argmax, SimpleTextGenerationStrategy])
@pytest.mark.parametrize("name", MODELS)
def test_strategies_draw_transformers_greedy_tokens(name, kind):
    model, texts = randomised(MODELS[name]), ["the cat", "two dogs ran", "a bird ran"]
    reference = copy.deepcopy(model)
    strategy = kind(GPTInferenceWrapper(hybrid_engine.init_inference(model, dtype=torch.float32)), TOKENIZER)
    answer = common_generate(
        choose_backend(strategy), texts, CommonInferenceParams(use_greedy=True, num_tokens_to_generate=6)
    )
    for row, text in enumerate(texts):
        given = torch.tensor([TOKENIZER(text).input_ids])
        mask = torch.ones_like(given)
        greedy = reference.generate(given, attention_mask=mask, max_new_tokens=6, do_sample=False)[0].tolist()
        assert answer["prompts_tokens_with_generations"][row, : len(greedy)].tolist() == greedy


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("prompts", [([5, 6, 7], [12, 3, 9, 4, 4, 8]), ([5, 6, 7], [12, 3, 9])])
def test_rows_of_a_batch_get_what_each_gets_alone(name, prompts):
    model, width = randomised(MODELS[name]), max(map(len, prompts))
    reference = copy.deepcopy(model)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    engine = hybrid_engine.init_inference(model, dtype=torch.float32)
    rows = engine.generate(ids, (ids != 0).long(), **options)
    for row, prompt in enumerate(prompts):
        given = torch.tensor([prompt])
        alone = reference.generate(given, attention_mask=torch.ones_like(given), **options)[0, len(prompt) :]
        assert rows[row, width:].tolist() == alone.tolist()


def test_batches_that_would_be_mixed_up_are_refused():
    engine = hybrid_engine.init_inference(randomised(MODELS["rwkv"]), dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7], [12, 3, 9]])
    options = {"max_new_tokens": 2, "eos_token_id": None, "guidance_scale": 1.5}
    with pytest.raises(ValueError, match=r"RwkvForCausalLM mixes up the rows of a batch.*option guidance_scale"):
        engine.generate(ids, **options)
    assert engine.generate(ids[:1], **options).shape == (1, 5)
