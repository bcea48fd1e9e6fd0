"""The user's own functions get transformers' arguments, and what they choose is what transformers gives."""

import pytest
import torch
from transformers import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
)
from transformers.generation.streamers import BaseStreamer

import hybrid_engine
from tests.support.models import PAD, build_model, padded_prompts

GREEDY = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": [7, 13, 28], "pad_token_id": PAD}


def build_engine(family="llama", **block):
    config = {"train_batch_size": 1, "hybrid_engine": {"enabled": True, "max_out_tokens": 64, **block}}
    engine = hybrid_engine.initialize(model=build_model(family), config=config)[0].eval()
    engine.generator.own.run = None  # the model's own generate() must not run
    return engine


@pytest.fixture(scope="module")
def engine():
    return build_engine()


@pytest.fixture(scope="module")
def model():
    return build_model()


class ByHistory(LogitsProcessor):
    """Depends on all it is given, and on the row's number."""

    def __init__(self):
        self.given = []

    def __call__(self, input_ids, scores):
        self.given.append((input_ids.clone(), scores.shape))
        bias = (input_ids.sum(1, keepdim=True) * torch.arange(scores.shape[1])) % 7
        return scores + bias.float() * torch.arange(1, len(scores) + 1)[:, None] * 0.1


class Ends(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 5 == 0


class Collected(BaseStreamer):
    def __init__(self):
        self.put_values, self.has_ended = [], False

    def put(self, value):
        self.put_values.append(value.tolist())

    def end(self):
        self.has_ended = True


def allowed(batch_id, tokens):
    return [3 + (int(tokens[-1]) * (batch_id + 2) + n) % 60 for n in range(9)]


FUNCTIONS = {
    "processor": lambda: {"logits_processor": [ByHistory()]},
    "prefix": lambda: {"prefix_allowed_tokens_fn": allowed},
    "criteria": lambda: {"stopping_criteria": StoppingCriteriaList([Ends()])},
    "all": lambda: {
        "logits_processor": [ByHistory()], "prefix_allowed_tokens_fn": allowed, "stopping_criteria": [Ends()],
        "no_repeat_ngram_size": 2, "min_new_tokens": 3, "repetition_penalty": 1.2, "suppress_tokens": [5],
    },
}  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_choose_what_they_choose_in_transformers(name, family):
    engine, model = build_engine(family), build_model(family)
    input_ids, mask = padded_prompts()
    expected = model.generate(input_ids, attention_mask=mask, **GREEDY, **FUNCTIONS[name]())
    ours = engine.generate(input_ids, attention_mask=mask, return_dict_in_generate=True, **GREEDY, **FUNCTIONS[name]())
    assert torch.equal(ours.sequences, expected)
    assert torch.isfinite(ours.logprobs).all() and ours.lengths.tolist() == ours.logprobs.ne(0).sum(1).tolist()


BUILT_IN = [
    ({"repetition_penalty": 1.9}, lambda: [RepetitionPenaltyLogitsProcessor(1.2)]),
    ({"repetition_penalty": 1.9}, lambda: [ByHistory(), RepetitionPenaltyLogitsProcessor(1.0)]),
    ({}, lambda: [RepetitionPenaltyLogitsProcessor(1.5)]),
    ({"suppress_tokens": [5, 6, 9]}, lambda: [SuppressTokensLogitsProcessor([28])]),
    ({"no_repeat_ngram_size": 1}, lambda: [NoRepeatNGramLogitsProcessor(3), NoRepeatNGramLogitsProcessor(2)]),
    ({"sequence_bias": {(5,): 9.0}}, lambda: [SequenceBiasLogitsProcessor({(9,): 9.0}), ByHistory()]),
    ({"min_new_tokens": 12}, lambda: [MinNewTokensLengthLogitsProcessor(9, 2, [7, 13, 28])]),
    ({"min_length": 21}, lambda: [MinLengthLogitsProcessor(11, [7, 13, 28])]),
    ({"min_length": 21}, lambda: [MinNewTokensLengthLogitsProcessor(9, 2, [7, 13, 28])]),
]  # fmt: skip


@pytest.mark.parametrize(("options", "given"), BUILT_IN)
def test_a_processor_of_a_built_ins_type_takes_the_place_that_it_takes_in_transformers(engine, model, options, given):
    input_ids, mask = padded_prompts()
    both = GREEDY | options
    expected = model.generate(input_ids, attention_mask=mask, logits_processor=given(), **both)
    assert torch.equal(engine.generate(input_ids, attention_mask=mask, logits_processor=given(), **both), expected)


def test_a_processor_is_given_what_transformers_gives_and_finished_rows_take_no_pass():
    engine, model, ours, theirs = build_engine(), build_model(), ByHistory(), ByHistory()
    rows, forward = [], engine.generator.model.forward
    engine.generator.model.forward = lambda batch, *rest: (rows.append(len(batch.tokens)), forward(batch, *rest))[1]
    input_ids, mask = padded_prompts()
    model.generate(input_ids, attention_mask=mask, logits_processor=[theirs], **GREEDY)
    engine.generate(input_ids, attention_mask=mask, logits_processor=[ours], **GREEDY)
    assert len(ours.given) == len(theirs.given)
    for one, other in zip(ours.given, theirs.given, strict=True):
        assert torch.equal(one[0], other[0]) and one[1] == other[1]
    assert rows[-1] < len(input_ids), "a row has finished before the last"


@pytest.mark.parametrize("options", [{}, {"num_return_sequences": 2, "do_sample": True, "top_k": 1}], ids=str)
def test_a_streamer_is_put_what_transformers_puts(options):
    engine, model, ours, theirs = build_engine(), build_model(), Collected(), Collected()
    input_ids, mask = padded_prompts()
    expected = model.generate(input_ids, attention_mask=mask, streamer=theirs, **(GREEDY | options))
    assert torch.equal(
        engine.generate(input_ids, attention_mask=mask, streamer=ours, seed=1, **(GREEDY | options)), expected
    )
    assert ours.put_values == theirs.put_values and ours.has_ended


def test_samples_in_step_are_those_of_the_same_rollout_without_functions():
    engine = build_engine()
    input_ids, mask = padded_prompts()
    options = {"do_sample": True, "max_new_tokens": 8, "num_return_sequences": 3, "seed": 5, "pad_token_id": PAD}
    options |= {"eos_token_id": [7, 13, 28], "temperature": 1.3, "presence_penalty": 1.0, "attention_mask": mask}
    plain = engine.generate(input_ids, return_dict_in_generate=True, **options)
    stepped = engine.generate(
        input_ids, return_dict_in_generate=True, logits_processor=[lambda ids, scores: scores], **options
    )
    assert torch.equal(plain.sequences, stepped.sequences) and plain.finish_reason == stepped.finish_reason
    torch.testing.assert_close(plain.logprobs, stepped.logprobs, atol=1e-5, rtol=0)


def test_prompts_of_several_prefills_begin_together(monkeypatch):
    from hybrid_engine.generation import scheduler

    monkeypatch.setattr(scheduler, "MAX_PREFILL_TOKENS", 10)
    engine, model = build_engine(kv_block_size=4), build_model()
    input_ids, mask = padded_prompts()
    expected = model.generate(input_ids, attention_mask=mask, logits_processor=[ByHistory()], **GREEDY)
    ours = engine.generate(input_ids, attention_mask=mask, logits_processor=[ByHistory()], **GREEDY)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"logits_processor": [3]}, "logits_processor=[3]"),
        ({"stopping_criteria": 3}, "stopping_criteria=3"),
        ({"prefix_allowed_tokens_fn": 3}, "prefix_allowed_tokens_fn=3"),
        ({"streamer": 3}, "streamer=3 must have put() and end()"),
        ({"prefix_allowed_tokens_fn": allowed, "row_options": [{}] * 6}, "row_options cannot be combined with"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_what_is_no_function_is_refused(options, told):
    engine = build_engine()
    input_ids, mask = padded_prompts()
    with pytest.raises(ValueError) as error:
        engine.generate(input_ids, attention_mask=mask, **GREEDY, **options)
    assert told in str(error.value)


def test_more_rows_than_run_at_once_go_to_the_models_own_generate():
    config = {"train_batch_size": 1, "hybrid_engine": {"enabled": True, "max_out_tokens": 64, "max_running": 4}}
    engine = hybrid_engine.initialize(model=build_model(), config=config)[0].eval()
    input_ids, mask = padded_prompts()
    expected = build_model().generate(input_ids, attention_mask=mask, logits_processor=[ByHistory()], **GREEDY)
    assert torch.equal(
        engine.generate(input_ids, attention_mask=mask, logits_processor=[ByHistory()], **GREEDY), expected
    )
