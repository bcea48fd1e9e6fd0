"""Whole rollouts on Triton kernels: the tokens of the references, recorded or not, in few launches."""

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import hybrid_engine
from hybrid_engine.ops import DecodeBatch
from tests.support.models import PAD
from tests.support.tape import TapeRecorder, count_launches

pytestmark = pytest.mark.long

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 61}
GQA = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 40}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GQA)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GQA, head_dim=16)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=61, eos_token_id=2)),
    "opt": lambda: OPTForCausalLM(OPTConfig(**SIZES, ffn_dim=40, word_embed_proj_dim=32)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**GQA, head_dim=16, sliding_window=4, attn_implementation="eager")
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**GQA, num_local_experts=3, num_experts_per_tok=2)),
}


def build_engine(name, device, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3).add_(torch.randn_like(parameter) * 0.05)
    model.generation_config.pad_token_id = PAD
    precision = {"bf16": {"enabled": True}} if dtype == torch.bfloat16 else {}
    hybrid = {"enabled": True, "kv_block_size": 4, "max_out_tokens": 32, **options}
    config = {"train_batch_size": 1, "hybrid_engine": hybrid, **precision}
    engine, *_ = hybrid_engine.initialize(model=model.to(device), config=config)
    assert engine.generator.fallback_reason is None
    return engine.eval()


def rollout(engine, **options):
    input_ids = torch.tensor([[PAD, PAD, 5, 9, 17], [7, 7, 30, 4, 12], [PAD, 6, 50, 11, 3]])
    return engine.generate(
        input_ids.to(engine.device),
        attention_mask=(input_ids != PAD).long().to(engine.device),
        max_new_tokens=5,
        return_dict_in_generate=True,
        seed=3,
        **options,
    )


@pytest.mark.parametrize("name", MODELS)
def test_kernels_give_the_tokens_of_the_references(name, kernels, monkeypatch):
    outputs = []
    for switch in ("1", "0"):
        monkeypatch.setenv("HYBRID_ENGINE_FALLBACK", switch)
        outputs.append(rollout(build_engine(name, kernels), do_sample=False))
    reference, ours = outputs
    assert ours.sequences.tolist() == reference.sequences.tolist()
    torch.testing.assert_close(ours.logprobs, reference.logprobs, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU real graphs are recorded, see test_decode_graph.py")
def test_recorded_kernels_give_what_kernels_give(kernels):
    engine = build_engine("llama", kernels)
    ways = {"do_sample": False}, {"do_sample": True, "top_k": 9, "repetition_penalty": 1.4}
    plain = [rollout(engine, **options) for options in ways]
    engine.generator.native.steps.recorder, engine.generator.native.lag = TapeRecorder(), 1
    captures = 0
    for options, expected in zip(ways, plain, strict=True):
        recorded = rollout(engine, **options)
        assert engine.latency_stats()["graph_captures"] > captures
        captures = engine.latency_stats()["graph_captures"]
        assert recorded.sequences.tolist() == expected.sequences.tolist()
        torch.testing.assert_close(recorded.logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_dense_layer_of_a_decode_step_is_eight_launches(name, kernels):
    """The merge of split attention among them."""
    engine = build_engine(name, kernels, torch.bfloat16)
    model = engine.generator.model
    model.bind()
    model.prepare_positions(512)
    cache = model.new_cache(256, 512).layers[0]
    for num_rows in (1, 16, 17, 64, 65, 128, 129, 256):
        slots = torch.arange(num_rows, device=kernels)
        batch = DecodeBatch(
            tokens=slots % 61, positions=slots % 32, block_tables=slots[:, None], context=512, is_identity=False
        )
        hidden = torch.randn(num_rows, 32, device=kernels).to(model.dtype)
        rotary = tuple(rows[batch.positions] for rows in model.angles.tables[None])
        launches = count_launches(
            lambda hidden=hidden, rotary=rotary, batch=batch: model.layers[0].forward(hidden, rotary, cache, batch),
            are_run=False,
        )
        assert launches == ["kernel"] * 8
