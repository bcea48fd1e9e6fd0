"""Every row by its own options: it gets what it would get if all rows had them."""

import random

import pytest
import torch

import hybrid_engine
from hybrid_engine.generation.core import Prompt, Sequence
from hybrid_engine.generation.options import GenerationOptions
from hybrid_engine.generation.sampling import MixedRows, RowState
from hybrid_engine.ops import SampleOp
from tests.support.models import PAD, VOCAB, build_model, padded_prompts

COMMON = {"do_sample": True, "top_k": 0, "max_new_tokens": 6, "pad_token_id": PAD, "return_dict_in_generate": True}
ROWS = [
    {},
    {"do_sample": False, "max_new_tokens": 2},
    {"temperature": 0.6, "top_k": 5, "eos_token_id": [7, 11, 23, 30, 31, 32]},
    {"temperature": 1.4, "top_p": 0.6, "repetition_penalty": 1.8, "max_new_tokens": 9},
    {"min_p": 0.2, "min_new_tokens": 4, "eos_token_id": list(range(40))},
    {"do_sample": False, "repetition_penalty": 0.5, "top_p": 0.9},
]


def build_engine(**block):
    config = {"train_batch_size": 1, "hybrid_engine": {"enabled": True, "max_out_tokens": 64, **block}}
    return hybrid_engine.initialize(model=build_model(), config=config)[0].eval()


def random_options(rng: random.Random) -> GenerationOptions:
    def either(value, off):
        return value if rng.random() < 0.5 else off

    return GenerationOptions(
        max_new_tokens=9,
        do_sample=rng.random() < 0.7,
        temperature=either(rng.uniform(0.3, 2.0), 1.0),
        top_k=either(rng.choice([1, 2, 17, VOCAB, 5 * VOCAB]), 0),
        top_p=either(rng.uniform(0.05, 0.99), 1.0),
        min_p=either(rng.uniform(0.01, 0.9), 0.0),
        repetition_penalty=either(rng.uniform(0.5, 2.0), 1.0),
        min_new_tokens=either(rng.randint(1, 9), 0),
        eos_token_ids=tuple(rng.sample(range(VOCAB), rng.randint(0, 3))),
    )


@pytest.mark.parametrize("seed", range(12))
def test_a_rows_draw_has_the_bits_it_has_where_all_rows_share_its_options(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    options = [random_options(rng) for _ in range(rng.randint(1, 9))]
    vocab = rng.choice([VOCAB, 1000])
    logits = (torch.randn(len(options), vocab) * rng.choice([0.5, 3.0])).round(decimals=rng.choice([1, 6]))
    keys, draws = torch.randint(-(2**62), 2**62, (len(options),)), torch.randint(0, 9, (len(options),))
    seen = torch.rand(len(options), vocab) < 0.3
    rows = [Sequence(Prompt([1]), row, of_row) for row, of_row in enumerate(options)]
    before = logits.clone()
    drawn = MixedRows(rows, vocab, logits.device).draw(logits, RowState(keys, draws, seen, None))
    assert torch.equal(logits, before)
    for row, of_row in enumerate(options):
        tokens, logprobs = SampleOp(of_row.sampling)(logits, keys, draws, seen, torch.arange(len(options)))
        assert drawn.tokens[row] == tokens[row] and drawn.logprobs[row] == logprobs[row]
        assert bool(drawn.ends[row]) == (int(tokens[row]) in of_row.eos_token_ids)


@pytest.mark.parametrize("block", [{}, {"max_running": 2}, {"exact": True, "max_running": 3}], ids=str)
def test_a_rollout_of_mixed_rows_gives_each_what_it_gets_alone(block):
    engine = build_engine(**block)
    input_ids, mask = padded_prompts()
    mixed = engine.generate(input_ids, attention_mask=mask, seed=3, row_options=ROWS, **COMMON)
    assert torch.equal(mixed.lengths, mixed.logprobs.ne(0).sum(1)) and mixed.lengths.unique().numel() > 2
    for row, options in enumerate(ROWS):
        alike = engine.generate(input_ids, attention_mask=mask, seed=3, **(COMMON | options))
        length = int(alike.lengths[row])
        assert mixed.lengths[row] == length and mixed.finish_reason[row] == alike.finish_reason[row]
        assert mixed.sequences[row, 9 : 9 + length].tolist() == alike.sequences[row, 9 : 9 + length].tolist()
        assert mixed.sequences[row, 9 + length :].eq(PAD).all()
        one, other = mixed.logprobs[row, :length], alike.logprobs[row, :length]
        assert torch.equal(one, other) if "exact" in block else torch.allclose(one, other, atol=1e-5)


def test_rows_of_several_samples_share_their_prompts_options():
    engine = build_engine(max_running=3)
    input_ids, mask = padded_prompts()
    rows = [{"max_new_tokens": n} for n in range(1, 7)]
    output = engine.generate(
        input_ids, attention_mask=mask, seed=3, row_options=rows, eos_token_id=None, num_return_sequences=2, **COMMON
    )
    assert output.lengths.tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]


@pytest.mark.parametrize(
    ("row_options", "told"),
    [
        ([{}] * 5, ["row_options (5 entries)", "6 prompts"]),
        ({"top_k": 1}, ["row_options (dict)"]),
        ([{}, {}, 3, {}, {}, {}], ["row_options[2] is a int"]),
        ([{}, {"top_p": 1.5}, {}, {}, {}, {}], ["row_options[1]: top_p=1.5"]),
        ([{}, {}, {}, {}, {}, {"tempratur": 1.5}], ["row_options[5]: tempratur", "did you mean temperature?"]),
        ([{"num_return_sequences": 2}] * 6, ["row_options[0]: num_return_sequences", "for all rows"]),
        ([{"max_new_tokens": 60}, {}, {}, {}, {}, {}], ["max_new_tokens=60", "max_out_tokens=64"]),
    ],
    ids=str,
)
def test_bad_row_options_are_refused_by_row(row_options, told):
    engine = build_engine()
    input_ids, mask = padded_prompts()
    with pytest.raises(ValueError) as error:
        engine.generate(input_ids, attention_mask=mask, row_options=row_options, **COMMON)
    assert all(part in str(error.value) for part in told), error.value
    assert engine.generator.workspace.allocated_bytes == 0


def test_row_options_beside_what_only_the_models_own_generate_serves_are_refused():
    engine = build_engine()
    input_ids, mask = padded_prompts()
    with pytest.raises(ValueError, match=r"row_options of rank 0 .* num_beams"):
        engine.generate(input_ids, attention_mask=mask, row_options=[{"top_k": 3}] * 6, num_beams=2)
