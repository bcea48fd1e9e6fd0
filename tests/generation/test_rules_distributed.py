"""Rules and row options where there are two processes, each with its own, and where two share one model."""

import pytest
import torch

import hybrid_engine
from tests.support.distributed import run_distributed
from tests.support.models import PAD, build_model, padded_prompts

OPTIONS = {"max_new_tokens": 10, "pad_token_id": PAD, "eos_token_id": [7, 13, 28], "return_dict_in_generate": True}
ROWS = [
    {"bad_words_ids": [[28], [30, 28]], "no_repeat_ngram_size": 2},
    {"do_sample": True, "temperature": 1.4, "presence_penalty": 1.0, "frequency_penalty": 0.5, "min_new_tokens": 4},
    {"stop_sequences": [[1, 93], [13]], "logit_bias": {13: 3.0}},
    {"do_sample": True, "top_k": 7, "typical_p": 0.8, "suppress_tokens": [3, 4, 5]},
    {"repetition_penalty": 1.6, "max_new_tokens": 4},
    {"do_sample": True, "eta_cutoff": 0.02, "forced_eos_token_id": 7, "logprobs": "raw"},
]
SETTINGS = {"each has its own": (0, 1), "streamed": (3, 1), "shared": (0, 2)}


def rolled(rank, world_size, stage, tp):
    block = {"enabled": True, "max_out_tokens": 64, "max_running": 2, "inference_tp_size": tp}
    config = {"train_batch_size": world_size, "zero_optimization": {"stage": stage}, "hybrid_engine": block}
    engine = hybrid_engine.initialize(model=build_model(), config=config)[0].eval()
    engine.generator.own.run = None  # the model's own generate() must not run
    share = slice(3 * rank, 3 * rank + 6 // world_size)
    input_ids, mask = (given[share] for given in padded_prompts())
    output = engine.generate(input_ids, attention_mask=mask, seed=4, row_options=ROWS[share], **OPTIONS)
    return [
        (output.sequences[row, 9 : 9 + length].tolist(), output.logprobs[row, :length], output.finish_reason[row])
        for row, length in enumerate(output.lengths.tolist())
    ]


def every_setting(rank, world_size):
    return {name: rolled(rank, world_size, *setting) for name, setting in SETTINGS.items()}


@pytest.fixture(scope="module")
def two():
    return run_distributed(every_setting, 2)


@pytest.mark.parametrize("setting", SETTINGS)
def test_two_processes_draw_what_one_draws(two, setting):
    expected = rolled(0, 1, 0, 1)
    for (tokens, logprobs, reason), (wanted, of_wanted, why) in zip(
        two[0][setting] + two[1][setting], expected, strict=True
    ):
        assert tokens == wanted and reason == why
        torch.testing.assert_close(logprobs, of_wanted, atol=1e-5, rtol=0)
