"""Options mean what Hugging Face means by them, and bad ones are refused before any work."""

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import hybrid_engine
from hybrid_engine.ops.sample import filter_logits
from tests.support.models import PAD, VOCAB, build_model, module_logprobs, padded_prompts

GREEDY = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": [7, 11, 23], "pad_token_id": PAD}


@pytest.fixture
def engine():
    config = {"train_batch_size": 1, "hybrid_engine": {"enabled": True, "max_out_tokens": 64}}
    engine, *_ = hybrid_engine.initialize(model=build_model(), config=config)
    return engine.eval()


@pytest.mark.parametrize(
    "options",
    [
        {"min_new_tokens": 9},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6, "min_new_tokens": 3},
        {"max_new_tokens": None, "max_length": 15},
        {"max_new_tokens": None, "max_length": 20, "min_length": 17},
        {"eos_token_id": 7},
        {"eos_token_id": None},
        {"max_new_tokens": None},
        {"temperature": 0.0, "top_p": 7.0},
        {"num_beams": 3, "num_return_sequences": 2},
    ],
    ids=str,
)
def test_greedy_options_equal_the_models_own(engine, options):
    model = build_model()
    input_ids, mask = padded_prompts()
    if "repetition_penalty" in options:  # transformers penalises padding too; without it both mean the same
        input_ids, mask = input_ids[[0, 4]], mask[[0, 4]]
    merged = GREEDY | options
    expected = model.generate(input_ids, attention_mask=mask, **merged)
    assert torch.equal(engine.generate(input_ids, attention_mask=mask, **merged), expected)


def test_keywords_come_before_the_config_and_the_config_before_the_models_own(engine):
    input_ids, mask = padded_prompts()
    engine.module.generation_config.max_new_tokens = 3
    own = engine.generate(input_ids, attention_mask=mask, eos_token_id=None)
    given = GenerationConfig(max_new_tokens=5)
    configured = engine.generate(input_ids, attention_mask=mask, generation_config=given, eos_token_id=None)
    keyword = engine.generate(input_ids, attention_mask=mask, generation_config=given, max_new_tokens=4)
    assert [own.shape[1], configured.shape[1], keyword.shape[1]] == [12, 14, 13]


def test_module_generate_is_the_engines_generate(engine):
    input_ids, mask = padded_prompts()
    assert engine.module.generate == engine.generate
    assert torch.equal(
        engine.module.generate(input_ids, attention_mask=mask, **GREEDY),
        engine.generate(input_ids, attention_mask=mask, **GREEDY),
    )


def test_a_missing_mask_is_inferred_from_the_left_padding(engine):
    input_ids, mask = padded_prompts()
    assert torch.equal(engine.generate(input_ids, **GREEDY), engine.generate(input_ids, attention_mask=mask, **GREEDY))


def test_samples_of_a_seed_do_not_depend_on_slots_blocks_or_company():
    input_ids, mask = padded_prompts()
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 10, "num_return_sequences": 3, "seed": 4}
    outputs = []
    for workspace in ({}, {"max_running": 2}, {"kv_block_size": 4}, {"kv_block_size": 4, "max_kv_blocks": 8}):
        config = {"train_batch_size": 1, "hybrid_engine": {"enabled": True, **workspace}}
        engine, *_ = hybrid_engine.initialize(model=build_model(), config=config)
        outputs.append(engine.eval().generate(input_ids, attention_mask=mask, **options))
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0])
    alone = engine.generate(input_ids[2:3], attention_mask=mask[2:3], **options)
    assert torch.equal(alone, outputs[0][6:9, : alone.shape[1]])
    assert len({tuple(row) for row in outputs[0].tolist()}) > 6, "samples of a prompt differ"


def test_equal_prompts_on_several_rows_draw_what_a_group_draws(engine):
    input_ids, mask = padded_prompts(num_prompts=1)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 8, "seed": 1}
    group = engine.generate(input_ids, attention_mask=mask, num_return_sequences=4, **options)
    rows = engine.generate(input_ids.repeat(4, 1), attention_mask=mask.repeat(4, 1), **options)
    assert torch.equal(group, rows)


def test_the_seed_comes_from_torchs_generator(engine):
    input_ids, mask = padded_prompts()

    def sample():
        return engine.generate(input_ids, attention_mask=mask, do_sample=True, max_new_tokens=8)

    torch.manual_seed(3)
    first, second = sample(), sample()
    torch.manual_seed(3)
    assert torch.equal(sample(), first) and not torch.equal(first, second)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}], ids=str)
def test_logprobs_are_of_the_unfiltered_temperature_scaled_distribution(engine, options):
    input_ids, mask = padded_prompts()
    sampling = {"do_sample": True, "top_k": 0, "max_new_tokens": 8, "seed": 0} | options
    output = engine.generate(input_ids, attention_mask=mask, return_dict_in_generate=True, **sampling)
    trainer = module_logprobs(build_model(), output.sequences, mask, options.get("temperature", 1.0))
    torch.testing.assert_close(output.logprobs.double(), trainer, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("kept", "warper"),
    [
        ({"top_k": 1}, TopKLogitsWarper(1)),
        ({"top_k": 7}, TopKLogitsWarper(7)),
        ({"top_k": 1000}, TopKLogitsWarper(1000)),
        ({"top_p": 0.05}, TopPLogitsWarper(0.05)),
        ({"top_p": 0.9}, TopPLogitsWarper(0.9)),
        ({"min_p": 0.3}, MinPLogitsWarper(0.3)),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else type(value).__name__,
)
def test_filters_keep_what_transformers_keeps(kept, warper):
    logits = torch.randn(17, 63) * 3
    ours = filter_logits(logits, **({"top_k": 0, "top_p": 1.0, "min_p": 0.0} | kept))
    assert torch.equal(ours, warper(None, logits))


def test_samples_follow_the_models_distribution(engine):
    """Pearson's chi-square of 4 000 first tokens against the model's own probabilities."""
    input_ids, mask = padded_prompts(num_prompts=1)
    num = 4000
    output = engine.generate(
        input_ids, attention_mask=mask, do_sample=True, top_k=0, temperature=1.5, max_new_tokens=1, seed=2,
        num_return_sequences=num,
    )  # fmt: skip
    with torch.no_grad():
        probs = (build_model()(input_ids, attention_mask=mask).logits[0, -1].double() / 1.5).softmax(-1)
    counts = torch.bincount(output[:, -1], minlength=VOCAB).double()
    common = probs * num >= 5
    assert probs[common].sum() > 0.8
    observed, expected = counts[common], probs[common] * num
    if not common.all():  # the rare tokens together
        observed = torch.cat([observed, counts[~common].sum()[None]])
        expected = torch.cat([expected, probs[~common].sum()[None] * num])
    chi_square = ((observed - expected) ** 2 / expected).sum()
    freedom = len(observed) - 1
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_new_tokens": 0}, ["max_new_tokens=0"]),
        ({"max_new_tokens": 60}, ["max_new_tokens=60", "max_out_tokens=64", "9"]),
        ({"min_new_tokens": 13}, ["min_new_tokens=13", "12"]),
        ({"max_new_tokens": None, "max_length": 9}, ["max_length=9", "9"]),
        ({"do_sample": True, "temperature": 0.0}, ["temperature=0.0", "do_sample=False"]),
        ({"do_sample": True, "temperature": float("nan")}, ["temperature=nan"]),
        ({"do_sample": True, "top_k": -1}, ["top_k=-1"]),
        ({"do_sample": True, "top_p": 1.5}, ["top_p=1.5"]),
        ({"do_sample": True, "min_p": -0.1}, ["min_p=-0.1"]),
        ({"repetition_penalty": 0.0}, ["repetition_penalty=0.0"]),
        ({"num_return_sequences": 2}, ["num_return_sequences=2", "do_sample"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id=</s>"]),
    ],
    ids=str,
)
def test_bad_options_are_refused_by_name_value_and_rule(engine, options, told):
    input_ids, mask = padded_prompts()
    with pytest.raises(ValueError) as error:
        engine.generate(input_ids, attention_mask=mask, **(GREEDY | options))
    assert all(part in str(error.value) for part in told), error.value
    assert engine.generator.workspace.allocated_bytes == 0


@pytest.mark.parametrize(
    ("input_ids", "mask", "told"),
    [
        (torch.zeros(0, 4, dtype=torch.int64), None, "[0, 4]"),
        (torch.zeros(2, 0, dtype=torch.int64), None, "[2, 0]"),
        (torch.full((1, 3), VOCAB), None, "outside the vocabulary 0..98"),
        (torch.tensor([[5, -1, 4]]), None, "input_ids[0, 1]=-1"),
        (torch.rand(2, 3), None, "int64"),
        (torch.ones(3, dtype=torch.int64), None, "[3]"),
        (torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 4), "[2, 4]"),
        (torch.ones(2, 3, dtype=torch.int64), torch.tensor([[1, 1, 1], [0, 0, 0]]), "no token in rows [1]"),
        (torch.ones(2, 3, dtype=torch.int64), torch.tensor([[1, 1, 0], [1, 1, 1]]), "padding_side='left'"),
        (torch.ones(2, 3, dtype=torch.int64), torch.tensor([[1, 0, 1], [1, 1, 1]]), "rows [0]"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_bad_prompts_are_refused(engine, input_ids, mask, told):
    with pytest.raises(ValueError) as error:
        engine.generate(input_ids, attention_mask=mask, max_new_tokens=2)
    assert told in str(error.value)
    assert engine.generator.workspace.allocated_bytes == 0


def test_positions_beyond_the_models_are_refused():
    config = {"train_batch_size": 1, "hybrid_engine": {"enabled": True, "max_out_tokens": 4096}}
    engine, *_ = hybrid_engine.initialize(model=build_model("gpt2"), config=config)
    with pytest.raises(ValueError, match=r"max_position_embeddings=1024"):
        engine.eval().generate(torch.ones(1, 9, dtype=torch.int64), max_new_tokens=1017)


def test_a_sequence_that_fits_no_workspace_says_how_many_blocks_it_needs():
    config = {"train_batch_size": 1, "hybrid_engine": {"enabled": True, "kv_block_size": 4, "max_kv_blocks": 4}}
    engine, *_ = hybrid_engine.initialize(model=build_model(), config=config)
    engine.eval()
    input_ids, mask = padded_prompts()
    with pytest.raises(ValueError, match=r"needs 5 KV blocks of 4 tokens .* there are 4 .* raise hybrid_engine.max_kv"):
        engine.generate(input_ids, attention_mask=mask, max_new_tokens=9)
    assert engine.generate(input_ids, attention_mask=mask, max_new_tokens=8, eos_token_id=None).shape == (6, 17)


def test_where_memory_and_no_option_is_what_lacks_for_a_sequence_no_option_is_named(engine, monkeypatch):
    input_ids, mask = padded_prompts()
    monkeypatch.setattr(engine.generator.memory, "spare_bytes", lambda model: 1000)
    with pytest.raises(
        ValueError, match=r"max_new_tokens=9: .* \(1,000 bytes are free\); lower it or free memory"
    ) as told:
        engine.generate(input_ids, attention_mask=mask, max_new_tokens=9)
    assert "max_kv_blocks" not in str(told.value)


def test_modes_are_refused_where_they_make_no_sense(engine):
    input_ids, mask = padded_prompts()
    engine.train()
    with pytest.raises(ValueError, match=r"training mode; call engine.eval\(\)"):
        engine.generate(input_ids, attention_mask=mask, **GREEDY)
    engine.eval()

    def switch(*_):
        with pytest.raises(ValueError, match=r"eval\(\) was called inside"):
            engine.eval()
        engine.train()

    with pytest.raises(ValueError, match="was called inside generate"):
        engine.generate(input_ids, attention_mask=mask, logits_processor=[switch], **GREEDY)
    assert not engine.module.training
    assert torch.equal(
        engine.generate(input_ids, attention_mask=mask, **GREEDY),
        build_model().generate(input_ids, attention_mask=mask, **GREEDY),
    )


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"encoder_no_repeat_ngram_size": 2}], ids=str)
def test_what_is_not_native_goes_to_the_models_own_generate_with_one_line(engine, caplog, options):
    input_ids, mask = padded_prompts()
    merged = GREEDY | options
    expected = build_model().generate(input_ids, attention_mask=mask, **merged)
    for _ in range(2):
        assert torch.equal(engine.generate(input_ids, attention_mask=mask, **merged), expected)
    lines = [record.message for record in caplog.records if "own implementation" in record.message]
    assert len(lines) == 1 and next(iter(options)) in lines[0]


def test_the_models_own_generate_is_measured_like_a_native_one(engine):
    input_ids, mask = padded_prompts()
    native = engine.generate(input_ids, attention_mask=mask, return_dict_in_generate=True, **GREEDY)
    # A bound no 12 tokens reach: the option is foreign and changes nothing.
    own = engine.generate(
        input_ids, attention_mask=mask, return_dict_in_generate=True, encoder_no_repeat_ngram_size=500, **GREEDY
    )
    assert torch.equal(own.sequences, native.sequences) and torch.equal(own.lengths, native.lengths)
    assert own.finish_reason == native.finish_reason
    torch.testing.assert_close(own.logprobs, native.logprobs, atol=1e-5, rtol=0)


def test_none_switches_an_option_of_the_models_own_config_off(engine):
    input_ids, mask = padded_prompts()
    model = build_model()
    drawn = model.generate(input_ids, attention_mask=mask, **(GREEDY | {"eos_token_id": None}))[0, 11].item()
    for config in (model.generation_config, engine.module.generation_config):
        config.eos_token_id, config.max_new_tokens = drawn, 12
    kwargs = {"do_sample": False, "pad_token_id": PAD}
    stopped = engine.generate(input_ids, attention_mask=mask, **kwargs)
    assert torch.equal(stopped, model.generate(input_ids, attention_mask=mask, **kwargs))
    free = engine.generate(input_ids, attention_mask=mask, eos_token_id=None, **kwargs)
    assert torch.equal(free, model.generate(input_ids, attention_mask=mask, eos_token_id=None, **kwargs))
    assert not torch.equal(free[:, : stopped.shape[1]], stopped)


def test_top_k_is_fifty_by_default_and_none_switches_it_off(engine):
    input_ids, mask = padded_prompts(num_prompts=1)
    sampling = {"do_sample": True, "temperature": 50.0, "max_new_tokens": 1, "num_return_sequences": 2000}
    distinct = [
        len(engine.generate(input_ids, attention_mask=mask, seed=0, **sampling, **options)[:, -1].unique())
        for options in ({}, {"top_k": None}, {"top_k": 0})
    ]
    assert distinct[0] == 50 and distinct[1] == distinct[2] == VOCAB


def test_a_padding_id_that_ends_sequences_says_nothing_about_padding(engine):
    input_ids = torch.tensor([[7, 5, 9], [7, 7, 7]])
    merged = GREEDY | {"pad_token_id": 7}
    assert torch.equal(engine.generate(input_ids, **merged), build_model().generate(input_ids, **merged))


def test_a_misspelt_option_names_its_nearest_neighbour(engine):
    input_ids, mask = padded_prompts()
    with pytest.raises(ValueError, match=r"max_new_token=3 is not an option .* did you mean max_new_tokens"):
        engine.generate(input_ids, attention_mask=mask, max_new_token=3)


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ({"generation_config": {"max_new_tokens": 3}}, "generation_config is a dict"),
        ({"seed": 2**63}, "seed=9223372036854775808"),
        ({"seed": "a"}, "seed='a'"),
        ({"max_new_tokens": "8"}, "max_new_tokens='8'"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5"),
        ({"max_new_tokens": True}, "max_new_tokens=True"),
        ({"min_new_tokens": "3"}, "min_new_tokens='3'"),
        ({"max_length": "30"}, "max_length='30'"),
        ({"do_sample": "no"}, "do_sample='no'"),
        ({"do_sample": True, "top_k": 2.5}, "top_k=2.5"),
        ({"do_sample": True, "top_p": "x"}, "top_p='x'"),
        ({"do_sample": True, "num_return_sequences": 2.5}, "num_return_sequences=2.5"),
        ({"num_beams": "x"}, "num_beams='x'"),
        ({"pad_token_id": [0]}, r"pad_token_id=\[0\]"),
        ({"pad_token_id": -1}, "pad_token_id=-1"),
        ({"pad_token_id": 10**6}, "pad_token_id=1000000"),
        ({"attention_mask": [[1] * 9] * 6}, "attention_mask is a list"),
    ],
    ids=str,
)
def test_arguments_of_the_wrong_kind_are_refused(engine, kwargs, told):
    input_ids, mask = padded_prompts()
    with pytest.raises(ValueError, match=told):
        engine.generate(input_ids, **({"attention_mask": mask} | kwargs))
    with pytest.raises(ValueError, match="input_ids is a list"):
        engine.generate([[1, 2]])


def test_a_seed_holds_for_the_models_own_generate_too(engine):
    input_ids, mask = padded_prompts()
    own = {"do_sample": True, "max_new_tokens": 8, "encoder_no_repeat_ngram_size": 500}
    outputs = [engine.generate(input_ids, attention_mask=mask, seed=seed, **own) for seed in (5, 5, 6)]
    assert torch.equal(outputs[0], outputs[1])
    assert outputs[0].shape != outputs[2].shape or not torch.equal(outputs[0], outputs[2])


def test_rows_that_end_by_another_rule_are_returned_as_transformers_returns_them(engine):
    from transformers import StoppingCriteria

    class AfterTwo(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.arange(input_ids.shape[0]) < 3 if input_ids.shape[1] == 11 else torch.zeros(6).bool()

    input_ids, mask = padded_prompts()
    merged = GREEDY | {"return_dict_in_generate": True, "stopping_criteria": [AfterTwo()]}
    output = engine.generate(input_ids, attention_mask=mask, **merged)
    assert torch.equal(output.sequences, build_model().generate(input_ids, attention_mask=mask, **merged).sequences)
    assert output.lengths[:3].tolist() == [2, 2, 2] and output.finish_reason[0] == "stop"


def test_tokens_of_the_models_own_generate_are_counted(engine):
    input_ids, mask = padded_prompts()
    native = engine.generate(input_ids, attention_mask=mask, return_dict_in_generate=True, **GREEDY)
    engine.eval()
    engine.generate(input_ids, attention_mask=mask, encoder_no_repeat_ngram_size=500, **GREEDY)
    assert engine.latency_stats()["generated_tokens"] == int(native.lengths.sum())


def test_padding_on_the_right_is_refused_without_a_mask_too(engine):
    with pytest.raises(ValueError, match=r"rows \[1\]; prompts must be padded on the left"):
        engine.generate(torch.tensor([[PAD, 5, 9], [5, 9, PAD]]), **GREEDY)


def test_the_workspace_cannot_be_pulled_from_under_a_rollout(engine):
    input_ids, mask = padded_prompts()

    def meddle(*_):
        for method in (engine.release_inference_cache, engine.create_inference_containers, engine.step):
            with pytest.raises(ValueError, match="was called inside"):
                method()
        raise InterruptedError

    with pytest.raises(InterruptedError):
        engine.generate(input_ids, attention_mask=mask, logits_processor=[meddle], **GREEDY)


def test_without_the_models_defaults_its_own_options_say_nothing(engine):
    """transformers 4.5x had the option; special tokens stay the model's there too."""
    input_ids, mask = padded_prompts()
    engine.module.generation_config.update(repetition_penalty=1.7, eos_token_id=GREEDY["eos_token_id"])
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD}
    found = engine.generate(input_ids, attention_mask=mask, use_model_defaults=False, **options)
    expected = build_model().generate(input_ids, attention_mask=mask, eos_token_id=GREEDY["eos_token_id"], **options)
    assert torch.equal(found, expected)
    assert not torch.equal(found, engine.generate(input_ids, attention_mask=mask, **options))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"forced_eos_token_id": 9, "suppress_tokens": [9]}, r"forced_eos_token_id=9 must not be in suppress_tokens"),
        ({"forced_bos_token_id": 9, "begin_suppress_tokens": [9, 3]}, "forced_bos_token_id=9 must not be in begin_"),
        ({"use_model_defaults": "no"}, "use_model_defaults='?no'? must be"),
    ],
)
def test_rules_that_leave_no_token_are_refused(engine, options, told):
    with pytest.raises(ValueError, match=told):
        engine.generate(torch.tensor([[5]]), max_new_tokens=3, **options)


def test_one_of_several_forced_tokens_may_be_suppressed(engine):
    options = {"forced_eos_token_id": [9, 5], "suppress_tokens": [9], "max_new_tokens": 3, "do_sample": False}
    expected = build_model().generate(torch.tensor([[8, 5]]), pad_token_id=PAD, **options)
    assert engine.generate(torch.tensor([[8, 5]]), **options).tolist() == expected.tolist()


def test_inputs_is_another_name_of_the_prompts(engine):
    input_ids, mask = padded_prompts()
    expected = engine.generate(input_ids, attention_mask=mask, **GREEDY)
    assert torch.equal(engine.generate(inputs=input_ids, attention_mask=mask, **GREEDY), expected)
    with pytest.raises(ValueError, match="inputs and input_ids are both the prompts"):
        engine.generate(input_ids, inputs=input_ids)


def test_a_padding_id_below_zero_in_the_models_config_is_none():
    """As the configs of the first Llamas say it."""
    model = build_model()
    model.generation_config.pad_token_id = -1
    engine, *_ = hybrid_engine.initialize(
        model=model, config={"train_batch_size": 1, "hybrid_engine": {"enabled": True}}
    )
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    input_ids = padded_prompts(num_prompts=1)[0]
    expected = build_model().generate(input_ids, **options)
    assert torch.equal(engine.eval().generate(input_ids, **options), expected)


def test_a_head_of_fewer_tokens_than_the_embedding_leaves_generation_to_the_model():
    def build():
        model = build_model()
        model.lm_head = torch.nn.Linear(model.lm_head.in_features, VOCAB - 10, bias=False)
        torch.nn.init.normal_(model.lm_head.weight, generator=torch.Generator().manual_seed(0))
        return model

    engine, *_ = hybrid_engine.initialize(
        model=build(), config={"train_batch_size": 1, "hybrid_engine": {"enabled": True}}
    )
    input_ids, mask = padded_prompts()
    options = {**GREEDY, "repetition_penalty": 1.5, "attention_mask": mask}
    input_ids = input_ids.clamp(max=VOCAB - 11)
    assert torch.equal(engine.eval().generate(input_ids, **options), build().generate(input_ids, **options))
    assert f"an LM head of {VOCAB - 10} tokens" in engine.generator.fallback_reason


def test_what_compile_returns_is_refused_and_a_compiled_model_is_not():
    config = {"train_batch_size": 1, "hybrid_engine": {"enabled": True}}
    with pytest.raises(ValueError, match=r"what torch.compile\(\) returned.*model.compile\(\)"):
        hybrid_engine.initialize(model=torch.compile(build_model(), backend="eager"), config=config)
    model = build_model()
    model.compile(backend="eager")
    engine, *_ = hybrid_engine.initialize(model=model, config=config)
    input_ids, mask = padded_prompts()
    expected = build_model().generate(input_ids, attention_mask=mask, **GREEDY)
    assert torch.equal(engine.eval().generate(input_ids, attention_mask=mask, **GREEDY), expected)


def test_a_function_that_generates_nothing_returns_the_prompts(engine):
    input_ids, _ = padded_prompts(num_prompts=1)
    own = lambda model, input_ids, **_: input_ids  # noqa: E731
    assert torch.equal(engine.generate(input_ids, custom_generate=own, max_new_tokens=3), input_ids)
