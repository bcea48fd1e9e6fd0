"""Two processes that share a model give what one process gives, and neither ever holds the whole."""

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

import hybrid_engine
from hybrid_engine.containers.layer import Heads, check_divides
from hybrid_engine.containers.views import TensorParallel
from tests.support.distributed import run_distributed
from tests.support.models import PAD, VOCAB, build_model, padded_prompts

pytestmark = pytest.mark.long

GREEDY = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": PAD, "eos_token_id": [7, 11, 23]}
SAMPLED = {**GREEDY, "do_sample": True, "top_k": 0, "num_return_sequences": 2, "seed": 5}
_SIZES = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB,
    "num_key_value_heads": 2, "intermediate_size": 80, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": PAD,
}  # fmt: skip
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True)),
    "one key/value head for two ranks": lambda: LlamaForCausalLM(LlamaConfig(**{**_SIZES, "num_key_value_heads": 1})),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=True)),
    "gpt2": None,
    "opt": None,
    "qwen3-qk-norm": None,
    "lfm2": None,
    "qwen3.5": None,
    "olmo-hybrid": None,
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**{**_SIZES, "hidden_size": 64, "num_key_value_heads": 4})),
    "bloom": lambda: BloomForCausalLM(BloomConfig(hidden_size=48, n_layer=2, n_head=4, vocab_size=VOCAB)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**_SIZES)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**_SIZES, head_dim=16, sliding_window=4)),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**_SIZES)),
    "olmo2, one key/value head": lambda: Olmo2ForCausalLM(Olmo2Config(**{**_SIZES, "num_key_value_heads": 1})),
    "stablelm": lambda: StableLmForCausalLM(
        StableLmConfig(**{**_SIZES, "hidden_size": 64}, qk_layernorm=True, use_qkv_bias=True)
    ),
    "qwen2-moe": lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(**_SIZES, **_MOE)),
    "gpt-oss": lambda: GptOssForCausalLM(GptOssConfig(**_SIZES, head_dim=16, num_local_experts=4, sliding_window=4)),
    "deepseek-v3": None,
}


def build_family(family, seed=0):
    """Small weights, for greedy ties not to occur and for no product to explode."""
    if FAMILIES[family] is None:
        return build_model(family)
    torch.manual_seed(seed)
    model = FAMILIES[family]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2).add_(torch.randn_like(parameter) * 0.05)
    model.generation_config.pad_token_id = PAD
    return model.eval()


def build_engine(model, tp_size, stage=3, **options):
    config = {
        "train_batch_size": 6,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "hybrid_engine": {"enabled": True, "inference_tp_size": tp_size, "max_running": 3, **options},
    }
    return hybrid_engine.initialize(model=model, config=config)[0].eval()


def own_prompts(rank, world_size):
    """Four prompts and two."""
    input_ids, mask = padded_prompts()
    if world_size == 1:
        return input_ids, mask
    return (input_ids[:4], mask[:4]) if rank == 0 else (input_ids[4:], mask[4:])


def rollouts(engine, input_ids, mask):
    greedy = engine.generate(input_ids, attention_mask=mask, return_dict_in_generate=True, **GREEDY)
    return greedy.sequences, greedy.logprobs, engine.generate(input_ids, attention_mask=mask, **SAMPLED)


def family_rollouts(rank, world_size):
    results = {}
    for family in FAMILIES:
        engine = build_engine(build_family(family), world_size)
        assert engine.generator.fallback_reason is None, engine.generator.fallback_reason
        results[family] = *rollouts(engine, *own_prompts(rank, world_size)), engine.logprob_difference.max
    return results


def adapted_rollouts(rank, world_size):
    """LoRA on everything that can carry it, before and after a training step."""
    from tests.containers.test_lora import adapt

    results = {}
    for family, targets in (
        ("llama", "all-linear"),
        ("gpt2", ["c_attn", "c_proj", "c_fc"]),
        ("gpt-neox", "all-linear"),
    ):
        engine = build_engine(adapt(build_family(family), targets, lora_bias=family == "llama"), world_size)
        input_ids, mask = own_prompts(rank, world_size)
        before = {name: tensor.clone() for name, tensor in local_weights(engine).items()}
        answers = rollouts(engine, input_ids, mask)
        same = all(torch.equal(tensor, before[name]) for name, tensor in local_weights(engine).items())
        results[family] = *answers, same
    return results


def local_weights(engine):
    from hybrid_engine.zero.sharding import local_tensor

    return {name: local_tensor(parameter) for name, parameter in engine.module.named_parameters()}


def staged_rollouts(rank, world_size):
    """Every stage, before and after a step, and by the model's own generate()."""
    results = {}
    input_ids, mask = own_prompts(rank, world_size)
    for stage in (0, 1, 2, 3):
        engine = build_engine(build_family("llama"), world_size, stage)
        first = rollouts(engine, input_ids, mask)
        held = engine.generator.model.layers[0].mixer.output.pair[0].untyped_storage().nbytes()
        engine.train()
        share = slice(3 * rank, 3 * rank + 6 // world_size)
        ids = padded_prompts()[0][share]
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        engine.eval()
        after = rollouts(engine, input_ids, mask)
        own = engine.generate(input_ids, attention_mask=mask, encoder_no_repeat_ngram_size=500, **GREEDY)
        results[stage] = first, after, own, held
    return results


def measured_rollout(rank, world_size):
    """Bytes of the largest tensor read, of all of them, and of the model."""
    from hybrid_engine.zero.slicing import SliceReader

    engine = build_engine(build_family("llama"), world_size, tp_gather_partition_size=1)
    held, peaks = [], []
    read = SliceReader._exchange

    def counted(self, output, counts, pieces, group):
        read(self, output, counts, pieces, group)
        under_way = sum(sent.nbytes for _, sent in self._under_way)
        held.append(output.nbytes)
        peaks.append(sum(tensor.nbytes for tensor in self._slices) + under_way)

    SliceReader._exchange = counted
    try:
        engine.generate(*own_prompts(rank, world_size), **GREEDY)
    finally:
        SliceReader._exchange = read
    whole = sum(parameter.numel() * 4 for parameter in engine.module.parameters())
    left = sum(tensor.untyped_storage().nbytes() for tensor in engine.generator.group.slices._slices)
    return max(peaks), sum(held), whole, engine.latency_stats()["gathered_bytes"], left


def refusals(rank, world_size):
    messages = []

    def message(action):
        try:
            action()
        except ValueError as error:
            messages.append(str(error))
        else:
            messages.append("")

    engine = build_engine(build_family("llama"), 2)
    prompts = own_prompts(rank, world_size)
    message(lambda: engine.generate(*prompts, **{**GREEDY, "max_new_tokens": 8 + rank}))
    message(lambda: engine.generate(torch.full((1, 2), 1000) if rank else prompts[0], **GREEDY))
    message(lambda: build_engine(build_family("llama"), 3))
    odd = LlamaConfig(**{**_SIZES, "num_attention_heads": 3, "num_key_value_heads": 3})
    message(lambda: build_engine(LlamaForCausalLM(odd), 2))
    answer = engine.generate(*prompts, **GREEDY)
    return messages, answer


def everything(rank, world_size):
    parts = [family_rollouts, adapted_rollouts, staged_rollouts]
    results = [part(rank, world_size) for part in parts]
    if world_size > 1:
        results += [measured_rollout(rank, world_size), refusals(rank, world_size)]
    return results


@pytest.fixture(scope="module")
def alone():
    return everything(0, 1)


@pytest.fixture(scope="module")
def shared():
    return run_distributed(everything, 2)


def joined(parts):
    """Rows of both processes, padded on the right to one width."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])


@pytest.mark.parametrize("family", FAMILIES)
def test_processes_that_share_a_model_answer_as_one_that_has_it_whole(alone, shared, family):
    greedy, logprobs, sampled, _ = alone[0][family]
    assert torch.equal(joined([part[0][family][0] for part in shared]), greedy)
    torch.testing.assert_close(joined([part[0][family][1] for part in shared]), logprobs, atol=1e-5, rtol=0)
    assert torch.equal(joined([part[0][family][2] for part in shared]), sampled)
    assert all(part[0][family][3] < 1e-5 for part in shared)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt-neox"])
def test_lora_is_fused_into_the_parts_and_the_weights_stay_as_they_were(alone, shared, family):
    for index in (0, 2):
        assert torch.equal(joined([part[1][family][index] for part in shared]), alone[1][family][index])
    assert all(part[1][family][3] for part in shared)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_shares_its_weights_before_and_after_a_step(alone, shared, stage):
    for moment in (0, 1):
        for index in (0, 2):
            ours = joined([part[2][stage][moment][index] for part in shared])
            assert torch.equal(ours, alone[2][stage][moment][index])
    assert not torch.equal(alone[2][stage][0][1], alone[2][stage][1][1])
    assert torch.equal(joined([part[2][stage][2] for part in shared]), alone[2][stage][1][0])


def test_parts_are_freed_after_a_rollout_where_weights_do_not_stay_whole(shared):
    assert all(part[2][3][3] == 0 for part in shared)


def test_no_process_ever_holds_the_whole_model(shared):
    for part in shared:
        peak, read, whole, gathered, left = part[3]
        assert peak < 0.75 * whole
        assert read == gathered < 0.55 * whole
        assert left == 0


def test_what_processes_cannot_share_is_an_error_on_all(shared):
    for rank, part in enumerate(shared):
        options, outside, processes, heads = part[4][0]
        assert "rank 1 of a tensor-parallel group has different options" in options
        assert "input_ids[0, 0]=1000" in outside
        assert "hybrid_engine.inference_tp_size=3 must divide the number of processes 2; use one of 1, 2" in processes
        assert "num_attention_heads=3" in heads and "use one of 1" in heads
        assert part[4][1].shape[0] == (4, 2)[rank]


def test_sizes_that_work_are_listed():
    parallel = TensorParallel(size=5)
    with pytest.raises(ValueError, match=r"24.*use one of 1, 2, 4, 12$"):
        check_divides(Heads(12, 4, 8, parallel), [24], parallel)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_parts_of_fused_projections_are_those_of_their_heads(num_kv_heads):
    """Against a loop over heads, with a weight whose rows name their head."""
    rows = torch.arange((8 + 2 * num_kv_heads) * 3).view(-1, 3)
    q, k, v = rows.split([8, num_kv_heads, num_kv_heads])
    group = 8 // num_kv_heads
    grouped = torch.cat(
        [torch.cat([q[h * group : (h + 1) * group], k[h : h + 1], v[h : h + 1]]) for h in range(num_kv_heads)]
    )
    for size in (2, 4):
        heads = Heads(8, num_kv_heads, 3, TensorParallel(size=size))
        for rank in range(size):
            mine = range(rank * 8 // size, (rank + 1) * 8 // size)
            kv = sorted({head // group for head in mine})
            blocks = torch.cat([q[mine.start : mine.stop], k[kv], v[kv]]).flatten()
            flat = rows.flatten()
            assert torch.equal(torch.cat([flat[a:b] for a, b in heads.blocks()[rank]]), blocks)
            groups = [torch.cat([q[[h for h in mine if h // group == head]], k[[head]], v[[head]]]) for head in kv]
            flat = grouped.flatten()
            assert torch.equal(torch.cat([flat[a:b] for a, b in heads.groups()[rank]]), torch.cat(groups).flatten())
