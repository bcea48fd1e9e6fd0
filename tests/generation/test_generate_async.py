"""Groups as they finish, and what is unfinished when a rollout ends."""

import json
import time

import pytest
import torch

import hybrid_engine
from hybrid_engine.containers.views import TensorParallel
from hybrid_engine.generation.model.groups import TRAINING_OPTION
from hybrid_engine.generation.model.weights import ModelGroup
from tests.support.models import PAD, build_model, module_logprobs, padded_prompts

OPTIONS = {"do_sample": True, "top_k": 0, "max_new_tokens": 24, "eos_token_id": 11, "pad_token_id": PAD}


def build_engine(**options):
    config = {"train_batch_size": 6, "optimizer": {"type": "AdamW", "params": {"lr": 0.02}}}
    config["hybrid_engine"] = {"enabled": True, "max_running": 4} | options
    return hybrid_engine.initialize(model=build_model(), config=config)[0].eval()


@pytest.fixture
def engine():
    return build_engine()


def whole(engine, **options):
    """Tokens and log-probabilities of every answer by `generate()`."""
    input_ids, mask = padded_prompts()
    output = engine.generate(input_ids, attention_mask=mask, seed=7, return_dict_in_generate=True, **OPTIONS | options)
    rows = zip(output.sequences[:, input_ids.shape[1] :].tolist(), output.lengths.tolist(), strict=True)
    lengths = output.lengths.tolist()
    return [row[:n] for row, n in rows], [row[:n] for row, n in zip(output.logprobs.tolist(), lengths, strict=True)]


def begin(engine, **options):
    input_ids, mask = padded_prompts()
    return engine.generate_async(input_ids, attention_mask=mask, seed=7, **OPTIONS | options)


@pytest.mark.parametrize("num_samples", [1, 3])
def test_groups_are_those_of_generate(engine, num_samples):
    tokens, logprobs = whole(engine, num_return_sequences=num_samples)
    with begin(engine, num_return_sequences=num_samples) as rollout:
        groups = sorted(rollout, key=lambda group: group.index)
    answers = [answer for group in groups for answer in group.answers]
    assert [group.index for group in groups] == list(range(6))
    assert [answer.tokens for answer in answers] == tokens
    for answer, expected in zip(answers, logprobs, strict=True):
        torch.testing.assert_close(answer.logprobs, expected, rtol=0, atol=1e-5)
        assert answer.versions == [0] * len(answer.tokens)
        assert answer.finish_reason == ("stop" if answer.tokens[-1] == 11 else "length")
    assert rollout.carried.num_unfinished == 0


@pytest.mark.parametrize("options", [{}, {"kv_block_size": 8}])
def test_what_is_left_goes_on_where_it_was(options):
    """With the same weights nobody can tell that the rollout was interrupted, again and again."""
    engine = build_engine(**options)
    tokens, _ = whole(engine, num_return_sequences=2)
    found, carried = {}, None
    for step in range(20):
        new = begin(engine, num_return_sequences=2) if step == 0 else engine.generate_async(carried=carried)
        with new as rollout:
            for group in rollout:
                found[group.index] = [answer.tokens for answer in group.answers]
                break
        carried = rollout.carried
        if not carried.groups:
            break
    assert carried.num_unfinished == 0
    assert [answer for index in range(6) for answer in found[index]] == tokens


def test_what_generate_until_leaves_goes_on_from_its_state():
    engine = build_engine(kv_block_size=8)
    tokens, _ = whole(engine, num_return_sequences=2)
    input_ids, mask = padded_prompts()
    arguments = {"input_ids": input_ids, "attention_mask": mask, "seed": 7, "num_return_sequences": 2, **OPTIONS}
    found, versions, carried, step = {}, [], None, 0
    while carried is None or carried.groups:
        carried = engine.generate_until(bool, carried=carried, version=step, **arguments if step == 0 else {})
        groups, carried = carried.take(carried.whole)
        assert groups
        for group in groups:
            found[group.index] = [answer.tokens for answer in group.answers]
            versions += [answer.versions for answer in group.answers]
        carried = type(carried).restored(json.loads(json.dumps(carried.state())))
        step += 1
    assert step > 1
    assert [answer for index in range(6) for answer in found[index]] == tokens
    assert all(drawn == sorted(drawn) for drawn in versions) and max(map(max, versions)) == step - 1


def test_each_token_is_of_the_weights_that_its_stamp_names(engine):
    input_ids, mask = padded_prompts()
    models = [build_model()]
    with begin(engine) as rollout:
        groups = [next(iter(rollout))]
    left = {group.index: [len(s.tokens) for s in group.sequences] for group in rollout.carried.groups}
    assert any(0 < length < 24 for lengths in left.values() for length in lengths), "nothing was in the middle"
    engine.train()
    engine.backward(engine(input_ids=input_ids, attention_mask=mask, labels=input_ids).loss)
    engine.step()
    models.append(build_model())
    models[1].load_state_dict(engine.module.state_dict())
    engine.eval()
    with engine.generate_async(padded_prompts(seed=5)[0], seed=8, carried=rollout.carried, **OPTIONS) as second:
        groups += list(second)
    assert sorted(group.index for group in groups) == list(range(12))
    for group in groups:
        (answer,) = group.answers
        num_old = left.get(group.index, [len(answer.tokens) if group.index < 6 else 0])[0]
        assert answer.versions == [0] * num_old + [1] * (len(answer.tokens) - num_old)
        sequence, prompt = torch.tensor([group.prompt_ids + answer.tokens]), torch.tensor([group.prompt_ids])
        by_version = [module_logprobs(model, sequence, torch.ones_like(prompt))[0].tolist() for model in models]
        expected = [by_version[version][place] for place, version in enumerate(answer.versions)]
        torch.testing.assert_close(answer.logprobs, expected, rtol=0, atol=1e-4)


def test_others_decode_while_somebody_looks_at_a_group(engine):
    with begin(engine, max_new_tokens=200, num_return_sequences=8) as rollout:
        next(iter(rollout))

        def num_drawn():
            return sum(len(s.tokens) for group in rollout._open.values() for s in group.sequences)

        before, end = num_drawn(), time.monotonic() + 300
        while num_drawn() == before:
            assert time.monotonic() < end, "nothing was decoded meanwhile"
            time.sleep(0.005)
        for refused in (engine.train, engine.step, lambda: engine.generate(padded_prompts()[0])):
            with pytest.raises(ValueError, match="inside generate"):
                refused()
    assert rollout.carried.num_unfinished > 0
    assert engine.generate(padded_prompts()[0], max_new_tokens=2).shape == (6, 11)


def test_an_error_of_the_reader_leaves_the_engine_as_it_was(engine):
    weights = [parameter.clone() for parameter in engine.module.parameters()]
    with pytest.raises(KeyError), begin(engine) as rollout:
        for _ in rollout:
            raise KeyError("a reward failed")
    assert all(torch.equal(a, b) for a, b in zip(weights, engine.module.parameters(), strict=True))
    assert whole(engine)[0] == whole(build_engine())[0]


def test_weights_that_are_not_finite_are_an_error_that_says_so(engine):
    with torch.no_grad():
        engine.module.lm_head.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="not finite"), begin(engine) as rollout:
        list(rollout)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"num_beams": 2}, "num_beams"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_wrong_options_are_refused_before_anything_begins(engine, options, word):
    with pytest.raises(ValueError, match=word), begin(engine, **options):
        pass
    with pytest.raises(ValueError, match="input_ids"), engine.generate_async():
        pass
    alone, parallel = engine.generator.group, TensorParallel(size=2, option=TRAINING_OPTION)
    engine.generator.group = ModelGroup(parallel=parallel)
    with (
        pytest.raises(ValueError, match=r"2 processes share the model.*hybrid_engine.inference_tp_size=1"),
        begin(engine),
    ):
        pass
    engine.generator.group = alone
    engine.train()
    with pytest.raises(ValueError, match="eval"), begin(engine):
        pass


@pytest.mark.parametrize(("name", "value"), [("top_logprobs", 2), ("prompt_logprobs", 2), ("prompt_logprobs", 0)])
def test_scores_that_an_answer_has_no_place_for_are_refused(engine, name, value):
    with pytest.raises(ValueError, match=f"{name} is not part of its groups"):
        begin(engine, return_dict_in_generate=True, **{name: value}).__enter__()
    assert len(whole(engine)[0]) == 6
