"""Falcon's ALiBi biases are rounded to bf16 whatever the dtype, which only long prompts show."""

import pytest
import torch

import hybrid_engine
from tests.support.models import PAD, build_model, module_logprobs


@pytest.mark.parametrize("family", ["falcon-alibi-sequential", "bloom"])
def test_seven_hundred_tokens_give_the_models_own_tokens_and_logprobs(family):
    generator = torch.Generator().manual_seed(3)
    input_ids = torch.randint(3, 99, (2, 700), generator=generator)
    input_ids[1, :40] = PAD
    mask = (input_ids != PAD).long()
    greedy = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
    engine, *_ = hybrid_engine.initialize(
        model=build_model(family),
        config={"train_batch_size": 1, "hybrid_engine": {"enabled": True, "max_out_tokens": 1024}},
    )
    output = engine.eval().generate(input_ids, attention_mask=mask, return_dict_in_generate=True, **greedy)
    model = build_model(family)
    assert output.sequences.tolist() == model.generate(input_ids, attention_mask=mask, **greedy).tolist()
    torch.testing.assert_close(
        output.logprobs, module_logprobs(model, output.sequences, mask).float(), atol=1e-5, rtol=0
    )
