"""The experts that a rollout records: those that transformers' own routers choose for the same tokens in fp32."""

import pytest
import torch

import hybrid_engine
from tests.support.models import PAD, build_model, padded_prompts

OPTIONS = {"do_sample": True, "max_new_tokens": 8, "pad_token_id": PAD, "seed": 5, "eos_token_id": [7, 13]}
OPTIONS |= {"return_dict_in_generate": True, "record_routing": True, "num_return_sequences": 2}


def build_engine(family="mixtral", **block):
    config = {"train_batch_size": 1, "hybrid_engine": {"enabled": True, "max_out_tokens": 64, **block}}
    return hybrid_engine.initialize(model=build_model(family), config=config)[0].eval()


def experts_of(model, tokens):
    """`[n, L, k]`: what the routers of a model choose in one pass over `tokens`."""
    seen = []
    hooks = [
        module.register_forward_pre_hook(lambda module, given: seen.append(given[1].sort(1).values))
        for name, module in model.named_modules()
        if name.endswith(".experts")
    ]
    model(input_ids=torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1)


def sequences_of(output, input_ids, mask):
    """The tokens of each row of an output."""
    for row, (sequence, length) in enumerate(zip(output.sequences, output.lengths.tolist(), strict=True)):
        prompt = row * len(input_ids) // len(output.sequences)
        yield input_ids[prompt][mask[prompt].bool()].tolist() + sequence[input_ids.shape[1] :][:length].tolist()


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "gpt-oss", "gemma4-experts"])
@torch.no_grad()
def test_recorded_experts_are_those_that_transformers_chooses(family):
    """For every token that was fed; also after preemptions, in mixed turns and where functions keep rows in step."""
    (input_ids, mask), model = padded_prompts(), build_model(family)
    engine, few = build_engine(family), build_engine(family, max_running=4, kv_block_size=4, max_kv_blocks=9)
    in_step = {"stopping_criteria": [lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)]}
    outputs = [
        one.generate(input_ids, attention_mask=mask, **OPTIONS, **more)
        for one, more in ((engine, {}), (few, {}), (engine, in_step))
    ]
    assert few.latency_stats()["preemptions"] > 0
    for tokens, *found in zip(
        sequences_of(outputs[0], input_ids, mask), *(output.routing for output in outputs), strict=True
    ):
        expected = experts_of(model, tokens)[:-1]  # the last token is never fed
        for routing in found:
            assert routing.dtype == torch.uint8 and torch.equal(routing.long().sort(2).values, expected)
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    plain = engine.generate(input_ids, attention_mask=mask, **(OPTIONS | {"record_routing": False}))
    assert plain.routing is None and torch.equal(plain.sequences, outputs[0].sequences)


@torch.no_grad()
def test_long_prompts_record_the_experts_of_all_their_chunks(monkeypatch):
    monkeypatch.setattr("hybrid_engine.generation.step.CHUNK_TOKENS_ON_CPU", 5)
    engine, model = build_engine(max_running=3, kv_block_size=4), build_model("mixtral")
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(3, 90, (5, 23), generator=generator)
    mask = torch.ones_like(input_ids)
    output = engine.generate(input_ids, **(OPTIONS | {"trim_stop": True, "stop_sequences": [[5], [11], [20]]}))
    for tokens, routing in zip(sequences_of(output, input_ids, mask), output.routing, strict=True):
        assert torch.equal(routing.long().sort(2).values, experts_of(model, tokens)[:-1])


def test_what_cannot_be_recorded_is_refused_by_name():
    input_ids, mask = padded_prompts()
    given = OPTIONS | {"attention_mask": mask}
    for engine, options, told in (
        (build_engine("llama"), {}, "record_routing=True needs a mixture of experts, and LlamaForCausalLM has none"),
        (build_engine(), {"return_dict_in_generate": False}, "record_routing needs return_dict_in_generate=True"),
        (build_engine(), {"record_routing": 1}, "record_routing=1 must be true or false"),
        (build_engine(), {"num_beams": 2}, "record_routing=True needs inference containers, but option num_beams"),
        (build_engine(exact=True), {}, "record_routing=True adds nothing to exact mode"),
    ):
        with pytest.raises(ValueError, match=told):
            engine.generate(input_ids, **(given | options))
