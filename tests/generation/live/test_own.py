"""Models without containers answer in live batches too, through their own generate()."""

import copy
from functools import partial

import pytest
import torch
import transformers as hf

import hybrid_engine
from hybrid_engine.generation import output as rollout_output
from hybrid_engine.generation.core import GenerateCall, Prompt, Sequence
from hybrid_engine.generation.live import batches as live_own
from hybrid_engine.generation.live.asynchronous import Carried, start_async
from hybrid_engine.generation.live.opening import live_batch
from hybrid_engine.generation.options import read_options
from hybrid_engine.ops.support_log_prob import Supports
from hybrid_engine.recipes.serve import Config as ServeConfig
from hybrid_engine.rlhf.experience.answering import load_shared
from tests.support.chat import build_chat_tokenizer
from tests.support.models import PAD, VOCAB, build_model, randomised

_SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": PAD, "eos_token_id": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
_GRIFFIN = {"num_hidden_layers": 3, "attention_window_size": 8}
MODELS = {
    "mamba": lambda: hf.MambaForCausalLM(hf.MambaConfig(**_SIZES, state_size=8)),
    "recurrent_gemma": lambda: hf.RecurrentGemmaForCausalLM(
        hf.RecurrentGemmaConfig(**{**_SIZES, **_GRIFFIN}, **_HEADS)
    ),
    "rwkv": lambda: hf.RwkvForCausalLM(hf.RwkvConfig(**_SIZES)),
}
PROMPTS = ([5, 6, 7], [8, 9, 10, 11, 12])


def _engine(build):
    return hybrid_engine.init_inference(randomised(build), dtype=torch.float32)


def _answers(generator, options, prompts=PROMPTS):
    read = read_options(options, 0, VOCAB)
    rows = [
        Sequence(Prompt(list(prompt), num_tops=read.rules.prompt_logprobs), row, read, row)
        for row, prompt in enumerate(prompts)
    ]
    with live_batch(generator) as batch:
        batch.add(rows)
        while batch.has_work:
            batch.turn()
    return rows


@pytest.mark.parametrize("name", MODELS)
def test_greedy_answers_and_their_logprobs_are_the_models_own(name):
    rows = _answers(_engine(MODELS[name]).generator, {"max_new_tokens": 6, "eos_token_id": None, "top_logprobs": 2})
    reference = randomised(MODELS[name])
    for prompt, row in zip(PROMPTS, rows, strict=True):
        output = reference.generate(
            torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=PAD,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        assert row.tokens == output.sequences[0, len(prompt) :].tolist() and row.finish_reason == "length"
        logprobs = torch.cat(output.logits).log_softmax(-1).gather(1, torch.tensor(row.tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(row.logprobs), logprobs, atol=1e-4)
        assert [top[0][0] for top in row.tops] == row.tokens


def test_drawn_answers_are_those_of_containers():
    """A Llama with and without its containers: the same seeds, options and rules give the same tokens."""
    options = {
        "max_new_tokens": 12, "do_sample": True, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.5,
        "no_repeat_ngram_size": 2, "min_new_tokens": 3, "eos_token_id": [2, 7, 11],
    }  # fmt: skip
    expected = _answers(_engine(build_model).generator, options)
    engine = _engine(build_model)
    engine.generator.drop_containers("a test")
    found = _answers(engine.generator, options)
    assert [row.tokens for row in found] == [row.tokens for row in expected]
    assert [row.finish_reason for row in found] == [row.finish_reason for row in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=1e-4)


def test_options_of_the_models_own_config_do_not_change_what_is_drawn():
    engine = _engine(MODELS["mamba"])
    expected = _answers(engine.generator, {"max_new_tokens": 8})
    engine.module.generation_config.update(
        repetition_penalty=3.0, suppress_tokens=[expected[0].tokens[1]], do_sample=True
    )
    assert [row.tokens for row in _answers(engine.generator, {"max_new_tokens": 8})] == [row.tokens for row in expected]


def test_supports_are_recorded_of_the_models_own_answers():
    sampled = {"do_sample": True, "max_new_tokens": 6, "eos_token_id": None, "top_k": 3}
    recorded = sampled | {"logprobs": "processed", "record_supports": True}
    generator = _engine(MODELS["mamba"]).generator
    rows, plain = _answers(generator, recorded), _answers(generator, sampled)
    assert [row.tokens for row in rows] == [row.tokens for row in plain] and not any(row.supports for row in plain)
    for row in rows:
        kept = Supports.of([row.supports])[0].mask(VOCAB, torch.device("cpu"))
        assert kept.sum(1).tolist() == [3] * 6 and kept[torch.arange(6), row.tokens].all()


def test_an_answer_comes_in_parts_and_may_be_given_up_between_them():
    generator = _engine(MODELS["mamba"]).generator
    options = read_options({"max_new_tokens": 50, "eos_token_id": None}, 0, VOCAB)
    given_up, row = (Sequence(Prompt(list(prompt)), row, options) for row, prompt in enumerate(PROMPTS))
    parts = []
    with live_batch(generator) as batch:
        batch.add([given_up, row])
        (told,) = batch.turn()
        assert told.sequence is given_up and told.finish_reason is None and batch.num_running == batch.num_waiting == 1
        batch.cancel([given_up])
        while batch.has_work:
            parts += batch.turn()
    assert len(parts) > 1 and [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
    tokens, logprobs = _greedy(randomised(MODELS["mamba"]), PROMPTS[1], 50, eos_token_id=None)
    assert [token for part in parts for token in part.tokens] == row.tokens == tokens
    assert torch.allclose(torch.tensor(row.logprobs), logprobs, atol=1e-4)


def test_an_answer_that_was_taken_out_goes_on_in_another_batch():
    generator = _engine(MODELS["mamba"]).generator
    row = Sequence(Prompt(list(PROMPTS[0])), 0, read_options({"max_new_tokens": 50, "eos_token_id": None}, 0, VOCAB))
    with live_batch(generator) as batch:
        batch.add([row])
        batch.turn()
        assert batch.take_out() == [] and not batch.has_work and 0 < len(row.tokens) < 50
    with live_batch(generator) as batch:
        batch.add([row])
        while batch.has_work:
            batch.turn()
    assert row.tokens == _greedy(randomised(MODELS["mamba"]), PROMPTS[0], 50, eos_token_id=None)[0]


@pytest.mark.parametrize("name", MODELS)
def test_prompts_are_scored_by_the_models_forward(name, monkeypatch):
    monkeypatch.setattr(rollout_output, "MAX_LOGITS", 2 * VOCAB)  # several passes
    engine, (ids, mask) = _engine(MODELS[name]), _padded(PROMPTS)
    options = {"max_new_tokens": 2, "eos_token_id": None, "pad_token_id": PAD, "prompt_logprobs": 3}
    output = engine.generate(ids, mask, return_dict_in_generate=True, **options)
    rows = _answers(engine.generator, options)
    reference = randomised(MODELS[name])
    for row, prompt in enumerate(PROMPTS):
        given = torch.tensor([prompt])
        with torch.no_grad():
            logprobs = reference(given).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, given[0, 1:, None])[:, 0]
        own = output.prompt_logprobs[row, ids.shape[1] - len(prompt) :]
        assert own[0] == 0 and torch.allclose(own[1:], expected, atol=1e-4)
        scores = rows[row].prompt.scores
        assert torch.allclose(torch.tensor(scores.logprobs), expected, atol=1e-4)
        assert [[token for token, _ in tops] for tops in scores.tops] == logprobs.topk(3).indices.tolist()


def _greedy(reference, prompt, num_new, **options):
    """transformers' tokens and their log-probabilities."""
    output = reference.generate(
        torch.tensor([prompt]), max_new_tokens=num_new, do_sample=False, pad_token_id=PAD,
        return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip
    tokens = output.sequences[0, len(prompt) :]
    return tokens.tolist(), torch.cat(output.logits).log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def _padded(prompts):
    width = max(map(len, prompts))
    return (
        torch.tensor([[PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts]),
        torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
    )


def _check_three_and_six(name, output, width):
    """Rows of 3 and of 6 new tokens are what the model itself writes, with their log-probabilities."""
    reference = randomised(MODELS[name])
    for row, (prompt, num_new) in enumerate(zip(PROMPTS, (3, 6), strict=True)):
        tokens, logprobs = _greedy(reference, prompt, num_new, eos_token_id=None)
        assert output.sequences[row, width:].tolist() == tokens + [PAD] * (6 - num_new)
        assert torch.allclose(output.logprobs[row, :num_new], logprobs, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_generate_have_options_of_their_own(name):
    engine, (ids, mask) = _engine(MODELS[name]), _padded(PROMPTS)
    output = engine.generate(
        ids, mask, eos_token_id=None, pad_token_id=PAD, return_dict_in_generate=True,
        row_options=[{"max_new_tokens": 3}, {"max_new_tokens": 6}],
    )  # fmt: skip
    _check_three_and_six(name, output, ids.shape[1])
    assert output.lengths.tolist() == [3, 6] and output.finish_reason == ["length", "length"]


def test_drawn_rows_of_generate_are_those_of_containers():
    """A Llama with and without its containers: options of rows, penalties and seeds of the engine's own."""
    ids, mask = _padded(PROMPTS)
    options = {
        "max_new_tokens": 8, "do_sample": True, "num_return_sequences": 2, "presence_penalty": 0.7, "eos_token_id": 2,
        "pad_token_id": PAD, "return_dict_in_generate": True, "seed": 5, "top_logprobs": 2,
        "row_options": [{"temperature": 0.7}, {"top_p": 0.8, "stop_sequences": [[9], [14]]}],
    }  # fmt: skip
    expected = _engine(build_model).generate(ids, mask, **options)
    engine = _engine(build_model)
    engine.generator.drop_containers("a test")
    found = engine.generate(ids, mask, **options)
    assert torch.equal(found.sequences, expected.sequences) and torch.equal(found.lengths, expected.lengths)
    assert found.finish_reason == expected.finish_reason
    assert torch.equal(found.top_tokens, expected.top_tokens)
    assert torch.allclose(found.logprobs, expected.logprobs, atol=1e-4)


def test_stop_strings_end_rows_that_are_measured():
    tokenizer = build_chat_tokenizer()
    engine, (ids, mask) = _engine(MODELS["mamba"]), _padded(PROMPTS)
    reference = randomised(MODELS["mamba"])
    free = [_greedy(reference, prompt, 8, eos_token_id=None)[0] for prompt in PROMPTS]
    stop = tokenizer.decode(free[0][1:3])
    output = engine.generate(
        ids, mask, max_new_tokens=8, eos_token_id=None, pad_token_id=PAD, stop_strings=[stop], tokenizer=tokenizer,
        return_dict_in_generate=True,
    )  # fmt: skip
    for row, prompt in enumerate(PROMPTS):
        tokens, logprobs = _greedy(reference, prompt, 8, eos_token_id=None, stop_strings=[stop], tokenizer=tokenizer)
        length = int(output.lengths[row])
        assert output.sequences[row, ids.shape[1] : ids.shape[1] + length].tolist() == tokens
        assert torch.allclose(output.logprobs[row, :length], logprobs, atol=1e-4)
        assert output.finish_reason[row] == ("stop" if len(tokens) < 8 else "length")
    assert output.finish_reason[0] == "stop"


def test_what_is_not_served_row_by_row_is_named():
    engine = _engine(MODELS["mamba"])
    ids = torch.tensor([list(PROMPTS[0])])
    with pytest.raises(ValueError, match=r"row_options of rank 0.*option num_beams is not served row by row"):
        engine.generate(ids, num_beams=2, row_options=[{"max_new_tokens": 2}])


@pytest.mark.parametrize("name", MODELS)
def test_groups_of_answers_come_from_models_without_containers(name):
    config = {"train_batch_size": 1, "hybrid_engine": {"enabled": True, "max_out_tokens": 64}}
    engine = hybrid_engine.initialize(model=randomised(MODELS[name]), config=config)[0].eval()
    ids, mask = _padded(PROMPTS)
    options = {"max_new_tokens": 5, "eos_token_id": None, "pad_token_id": PAD}
    with engine.generate_async(ids, mask, **options) as rollout:
        first = next(iter(rollout))
    with engine.generate_async(carried=rollout.carried) as rollout:
        groups = [first, *rollout]
    reference = randomised(MODELS[name])
    assert sorted(group.index for group in groups) == [0, 1]
    for group in groups:
        tokens, logprobs = _greedy(reference, PROMPTS[group.index], 5, eos_token_id=None)
        (answer,) = group.answers
        assert answer.tokens == tokens and answer.versions == [0] * 5 and answer.finish_reason == "length"
        assert torch.allclose(torch.tensor(answer.logprobs), logprobs, atol=1e-4)


def test_drawn_groups_are_those_of_containers():
    def groups(is_native):
        config = {"train_batch_size": 1, "hybrid_engine": {"enabled": True, "max_out_tokens": 64}}
        engine = hybrid_engine.initialize(model=build_model(), config=config)[0].eval()
        if not is_native:
            engine.generator.drop_containers("a test")
        ids, mask = _padded(PROMPTS)
        options = {"max_new_tokens": 6, "do_sample": True, "num_return_sequences": 3, "pad_token_id": PAD, "seed": 3}
        with engine.generate_async(ids, mask, **options) as rollout:
            return {group.index: [answer.tokens for answer in group.answers] for group in rollout}

    assert groups(is_native=False) == groups(is_native=True)


def test_a_served_model_scores_streams_and_goes_on_after_a_client_left():
    model = hf.MambaForCausalLM(hf.MambaConfig(**_SIZES | {"vocab_size": 259, "eos_token_id": 1}, state_size=8)).eval()
    tokenizer, reference = build_chat_tokenizer(), copy.deepcopy(model)
    engine = hybrid_engine.init_inference(model, dtype=torch.float32)
    ids = tokenizer("ab").input_ids
    tokens, logprobs = _greedy(reference, ids, 24, eos_token_id=1)
    with engine.serving(tokenizer, model_name="mamba") as server, server.client() as client:
        ask = partial(client.completions.create, model="mamba", prompt="ab", temperature=0, max_tokens=24)
        (scored,) = ask(echo=True, logprobs=0).choices
        assert scored.text == "ab" + tokenizer.decode(tokens, skip_special_tokens=True)
        assert scored.logprobs.token_logprobs[2:] == pytest.approx(logprobs.tolist(), abs=1e-4)
        with torch.no_grad():
            expected = reference(torch.tensor([ids])).logits[0, 0].log_softmax(-1)[ids[1]]
        assert scored.logprobs.token_logprobs[1] == pytest.approx(float(expected), abs=1e-4)
        left = ask(max_tokens=400, stream=True)
        next(iter(left))
        left.close()
        assert "".join(part.choices[0].text for part in ask(stream=True)) == scored.text[2:]


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_an_attached_model_have_options_of_their_own(name):
    model, (ids, mask) = randomised(MODELS[name]), _padded(PROMPTS)
    attached = hybrid_engine.attach(model)
    assert attached.generator.fallback_reason is not None
    output = model.generate(
        ids, attention_mask=mask, eos_token_id=None, pad_token_id=PAD, return_dict_in_generate=True,
        row_options=[{"max_new_tokens": 3}, {"max_new_tokens": 6}],
    )  # fmt: skip
    _check_three_and_six(name, output, ids.shape[1])


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_errors_of_a_live_batch_name_what_was_called(name):
    config = {"train_batch_size": 1, "hybrid_engine": {"enabled": True, "max_out_tokens": 64}}
    build = build_model if name == "llama" else lambda: randomised(MODELS[name])
    engine = hybrid_engine.initialize(model=build(), config=config)[0].eval()
    with live_batch(engine.generator):
        options = {"max_new_tokens": 2, "pad_token_id": PAD}
        with pytest.raises(ValueError, match=r"^generate\(\): the model is being served"):
            engine.generate(torch.tensor([[5]]), **options)
        with pytest.raises(ValueError, match=r"^generate_async\(\): the model is already in use by serving"):
            start_async(engine.generator, GenerateCall(input_ids=None), Carried([], 0), 0).__enter__()
        with (
            pytest.raises(ValueError, match=r"^serving\(\): the model is already in use by serving"),
            engine.serving(build_chat_tokenizer()),
        ):
            pass


def test_errors_before_a_rollout_name_what_was_called():
    config = {"train_batch_size": 1, "hybrid_engine": {"enabled": True, "max_out_tokens": 64}}
    engine = hybrid_engine.initialize(model=build_model(), config=config)[0].train()
    ids = torch.tensor([[5, 6]])
    with pytest.raises(ValueError, match=r"^generate_async\(\): the engine is in training"), engine.generate_async(ids):
        pass
    with engine.eval().generate_async(ids, max_new_tokens=2, pad_token_id=PAD) as rollout:
        with pytest.raises(ValueError, match=r"^serving\(\) was called inside"), engine.serving(build_chat_tokenizer()):
            pass
        with pytest.raises(ValueError, match=r"^warm_up\(\) was called inside"):
            engine.warm_up(1, 2, max_new_tokens=2)
        assert len(list(rollout)) == 1


def test_processes_do_not_share_a_model_without_containers(tmp_path):
    tokenizer = build_chat_tokenizer()
    config = hf.MambaConfig(**_SIZES | {"vocab_size": len(tokenizer)}, state_size=8)
    config.architectures = ["MambaForCausalLM"]
    config.save_pretrained(tmp_path)  # and no weights
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"--tp=2 --pp=1: .* and no policy for MambaBlock.*leave both at 1"):
        load_shared(ServeConfig(model=str(tmp_path), tp=2), 2, 1, {})


def test_shares_take_turns_so_that_one_keys_requests_keep_no_others_waiting(monkeypatch):
    monkeypatch.setattr(live_own, "TOKENS_OF_A_TURN", 2)
    generator = _engine(MODELS["mamba"]).generator
    read = read_options({"max_new_tokens": 6, "eos_token_id": None}, 0, VOCAB)
    alone = _answers(generator, {"max_new_tokens": 6, "eos_token_id": None}, PROMPTS * 2)
    rows = [Sequence(Prompt(list(prompt)), row, read, row) for row, prompt in enumerate(PROMPTS * 2)]
    rows[3].share = "b"
    ended = []
    with live_batch(generator) as batch:
        batch.add(rows)
        while batch.has_work:
            ended += [told.sequence for told in batch.turn() if told.finish_reason is not None]
    assert set(ended[:2]) == {rows[0], rows[3]} and ended[2:] == rows[1:3]
    assert [row.tokens for row in rows] == [row.tokens for row in alone]
