"""Rotary angles against transformers' own modules, and rollouts that cross the trained length against `generate()`."""

from collections.abc import Callable

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import hybrid_engine
from hybrid_engine.containers.model import Rotary
from hybrid_engine.ops.softmax_context import apply_rotary
from tests.support.models import PAD, VOCAB

pytestmark = pytest.mark.quick

TRAINED = 16
_FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.5, 1.7, 2.0], "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0]}
ROPE = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED},
    "longrope": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": TRAINED, **_FACTORS},
}


def build_config(kind: str) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=80,
        vocab_size=VOCAB,
        max_position_embeddings=TRAINED if kind == "dynamic" else 4 * TRAINED,
        rope_parameters={"rope_theta": 1e4, **ROPE[kind]},
    )


def assert_angles_equal(build: Callable[[], torch.nn.Module], config: PreTrainedConfig, *kind: str) -> None:
    """For rows of several lengths in one call, where transformers takes each row alone.

    With a fresh module each: its frequencies depend on earlier calls, and transformers 5.17 fails in a second long one.
    """
    rotary = Rotary(build(), config, *(kind or (None,)), is_interleaved=False)
    lengths = [1, TRAINED, 40, 5, TRAINED + 1, 23]
    positions = torch.cat([torch.arange(n) for n in lengths])
    rows = rotary.rows(positions, torch.repeat_interleave(torch.tensor(lengths), torch.tensor(lengths)), torch.float32)
    x = torch.randn(len(positions), 1, 12)
    ours = apply_rotary(x, *rows).split(lengths)
    for part, result, length in zip(x.split(lengths), ours, lengths, strict=True):
        cos, sin = build()(x, torch.arange(length)[None], *kind)
        expected, _ = apply_rotary_pos_emb(*[part.transpose(0, 1)[None]] * 2, cos, sin)
        torch.testing.assert_close(result, expected[0].transpose(0, 1), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("kind", ROPE)
def test_angles_of_every_rope_type_equal_transformers_for_each_row_alone(kind):
    config = build_config(kind)
    assert_angles_equal(lambda: LlamaRotaryEmbedding(config), config)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_the_decode_table_holds_what_the_last_token_of_a_row_gets(kind):
    config = build_config(kind)
    rotary = Rotary(LlamaRotaryEmbedding(config), config, None, is_interleaved=False)
    table = rotary.table(40, torch.float32, torch.device("cpu"))
    for position in (0, TRAINED - 1, TRAINED, 39):
        length = torch.tensor([position + 1])
        for part, row in zip(table, rotary.rows(length - 1, length, torch.float32), strict=True):
            torch.testing.assert_close(part[position], row[0])


def gemma3_config(kind: str) -> PreTrainedConfig:
    return Gemma3TextConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=12,
        max_position_embeddings=TRAINED if kind == "dynamic" else 4 * TRAINED,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            "full_attention": {"rope_theta": 1e4, **ROPE[kind]},
        },
    )


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "longrope"])
def test_angles_of_each_kind_of_layer_equal_transformers(kind):
    config = gemma3_config(kind)
    for layer in config.layer_types:
        assert_angles_equal(lambda: Gemma3RotaryEmbedding(config), config, layer)


def build_model(kind: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(build_config(kind))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2).add_(torch.randn_like(parameter) * 0.05)
    model.generation_config.pad_token_id = PAD
    return model.eval()


@pytest.mark.parametrize("workspace", [{}, {"kv_block_size": 4, "max_kv_blocks": 18}], ids=["roomy", "preempting"])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_greedy_tokens_equal_the_models_own_across_the_trained_length(kind, workspace):
    """Prompts below, just below and beyond the trained length, together; the model takes each alone.

    transformers keeps dynamic frequencies from one call to the next, so each prompt gets a fresh model.
    """
    torch.manual_seed(1)
    prompts = [torch.randint(3, VOCAB, (1, n)) for n in (3, TRAINED - 2, TRAINED + 9)]
    greedy = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": [], "pad_token_id": PAD}
    expected = [build_model(kind).generate(prompt, **greedy)[0, prompt.shape[1] :] for prompt in prompts]
    config = {"train_batch_size": 1, "hybrid_engine": {"enabled": True, **workspace}}
    engine, *_ = hybrid_engine.initialize(model=build_model(kind), config=config)
    engine.eval()
    assert engine.generator.fallback_reason is None
    width = max(prompt.shape[1] for prompt in prompts)
    padded = torch.cat([torch.nn.functional.pad(prompt, (width - prompt.shape[1], 0), value=PAD) for prompt in prompts])
    output = engine.generate(padded, attention_mask=(padded != PAD).long(), **greedy)
    assert torch.equal(output[:, width:], torch.stack(expected))
    assert (engine.latency_stats()["preemptions"] > 0) == bool(workspace)


def test_prompts_do_not_share_keys_whose_frequencies_depend_on_the_length():
    engine, *_ = hybrid_engine.initialize(
        model=build_model("dynamic"),
        config={"train_batch_size": 1, "hybrid_engine": {"enabled": True, "kv_block_size": 4}},
    )
    assert "not shared, because rotary frequencies depend on the length" in engine.report()
    input_ids = torch.arange(3, 15).repeat(2, 1)
    engine.eval().generate(input_ids, max_new_tokens=4, do_sample=False)
    assert engine.latency_stats()["reused_tokens"] == 0
