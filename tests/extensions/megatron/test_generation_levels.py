"""Three levels of generation: what each gives, what overriding each method changes, and six known defects."""

import re

import pytest
import torch
from transformers import XGLMConfig, XGLMForCausalLM

import hybrid_engine
from hybrid_engine.generation import (
    AbstractModelInferenceWrapper,
    CommonInferenceParams,
    GPTInferenceWrapper,
    NativeBackend,
    SimpleTextGenerationStrategy,
    TransformersBackend,
    choose_backend,
    common_generate,
)
from tests.support.distributed import run_distributed
from tests.support.models import VOCAB, build_model, randomised
from tests.support.paths import DOCS

END = 2
PROMPTS = ["9 8 7 6 5", "11", "40 41 42 43 44 45 46 47 48", "11", "60 61"]


class Numbers:
    """A tokenizer whose texts are their ids, with Megatron's names."""

    def __init__(self, vocab_size=VOCAB, eod=END):
        self.vocab_size, self.eod = vocab_size, eod

    def tokenize(self, text):
        return [int(word) for word in text.split()]

    def detokenize(self, ids):
        return " ".join(map(str, ids))


def build_engine(model=None, **block):
    config = {"train_batch_size": 2, "hybrid_engine": {"enabled": True, "max_out_tokens": 128, **block}}
    return hybrid_engine.initialize(model=model or build_model(), config=config)[0].eval()


@pytest.fixture(scope="module")
def engine():
    return build_engine()


def generate(
    engine, kind=SimpleTextGenerationStrategy, tokenizer=None, prompts=PROMPTS, backend=NativeBackend, **params
):
    strategy = kind(GPTInferenceWrapper(engine), tokenizer or Numbers())
    chosen = {"use_greedy": True, "num_tokens_to_generate": 8, **params}
    return common_generate(backend(strategy, 5), prompts, CommonInferenceParams(**chosen)), strategy


def ids_of(text):
    return [int(word) for word in text.split()]


def greedy_by_transformers(model, prompts=PROMPTS, num_tokens=8, end=END):
    """Each prompt alone, by the model's own greedy `generate`, without the end token."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([ids_of(prompt)])
        options = {"do_sample": False, "max_new_tokens": num_tokens, "eos_token_id": end, "pad_token_id": 0}
        row = type(model).generate(model, ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()
        new = row[ids.shape[1] :]
        texts.append(" ".join(map(str, row[: ids.shape[1]] + new[: new.index(end) if end in new else None])))
    return texts


def some_end(model):
    """A token that ends some greedy answers early and others not."""
    answers = [
        ids_of(text)[len(ids_of(prompt)) :]
        for prompt, text in zip(PROMPTS, greedy_by_transformers(model, end=10**6), strict=True)
    ]
    return answers[2][3]


def plain_log_probs(model, tokens):
    """`[b, S - 1]` by one forward pass of the model itself."""
    with torch.no_grad():
        logits = model(tokens).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


class PlainWrapper(AbstractModelInferenceWrapper):
    """A wrapped model of somebody else's: every window is a whole forward pass of a plain module."""

    def __init__(self, model):
        self.model, self.windows = model, []

    def prep_model_for_inference(self, prompts_tokens):
        self.prompts_tokens = prompts_tokens

    def get_batch_for_context_window(self, context_start_position, context_end_position):
        return [self.prompts_tokens[:, :context_end_position], context_start_position]

    def __call__(self, inference_input):
        tokens, start = inference_input
        self.windows.append((start, tokens.shape[1]))
        with torch.no_grad():
            return self.model(tokens).logits[:, start:]


def assert_log_probs_are_a_plain_forwards(model, result, prompts=PROMPTS):
    """The prompt's included; 0 beyond a row's end, where an end token counts as the row's."""
    tokens, log_probs = result["prompts_tokens_with_generations"], result["output_log_probs"]
    assert log_probs.shape == (len(prompts), tokens.shape[1] - 1)
    expected = plain_log_probs(model, tokens)
    for row, text in enumerate(result["prompts_plus_generations_detokenized"]):
        end = len(ids_of(text))
        torch.testing.assert_close(log_probs[row, : end - 1], expected[row, : end - 1], atol=2e-5, rtol=1e-5)
        assert not log_probs[row, end:].any()


@pytest.mark.parametrize("backend", [NativeBackend, TransformersBackend])
def test_greedy_tokens_are_transformers_and_log_probabilities_a_plain_forwards(engine, backend):
    end = some_end(build_model())
    result, _ = generate(engine, tokenizer=Numbers(eod=end), backend=backend, return_log_probs=True)
    assert list(result) == [
        "prompts_tokens_with_generations",
        "prompts_plus_generations_detokenized",
        "output_log_probs",
    ]
    assert result["prompts_plus_generations_detokenized"] == greedy_by_transformers(build_model(), end=end)
    assert_log_probs_are_a_plain_forwards(build_model(), result)
    for row, text in zip(
        result["prompts_tokens_with_generations"].tolist(), result["prompts_plus_generations_detokenized"], strict=True
    ):
        ids = ids_of(text)
        assert row[: len(ids)] == ids and set(row[len(ids) :]) <= {end}
    assert generate(engine, backend=backend)[0]["output_log_probs"] is None


def test_sampled_log_probabilities_are_of_the_logits_as_they_are(engine):
    result, _ = generate(engine, use_greedy=False, temperature=0.3, top_k=5, return_log_probs=True)
    assert_log_probs_are_a_plain_forwards(build_model(), result)


def test_a_wrapped_model_of_ones_own_is_generated_from_window_by_window():
    wrapper, end = PlainWrapper(build_model()), some_end(build_model())
    backend = NativeBackend(SimpleTextGenerationStrategy(wrapper, Numbers(eod=end)))
    params = CommonInferenceParams(use_greedy=True, num_tokens_to_generate=8, return_log_probs=True)
    result = backend.generate(PROMPTS, params)
    assert result["prompts_plus_generations_detokenized"] == greedy_by_transformers(build_model(), end=end)
    assert_log_probs_are_a_plain_forwards(build_model(), result)


@pytest.fixture(scope="module")
def engine_without_containers():
    sizes = {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 2, "max_position_embeddings": 64}
    return build_engine(randomised(lambda: XGLMForCausalLM(XGLMConfig(vocab_size=VOCAB, **sizes))))


def test_a_model_without_containers_goes_to_transformers_and_a_line_says_why(engine_without_containers, caplog):
    model = engine_without_containers.module
    result, strategy = generate(engine_without_containers, backend=choose_backend, return_log_probs=True)
    assert isinstance(choose_backend(strategy), TransformersBackend)
    assert "prompts go to transformers' generate(): no policy for XGLMDecoderLayer" in caplog.text
    assert result["prompts_plus_generations_detokenized"] == greedy_by_transformers(model)
    assert_log_probs_are_a_plain_forwards(model, result)


def test_an_overridden_method_is_used_also_without_containers(engine_without_containers):
    result, strategy = generate(engine_without_containers, Second, backend=choose_backend)
    assert isinstance(choose_backend(strategy), NativeBackend) and strategy.num_rows
    first = greedy_by_transformers(engine_without_containers.module)
    assert all(a != b for a, b in zip(result["prompts_plus_generations_detokenized"], first, strict=True))
    with pytest.raises(ValueError, match="Second overrides sample_from_logits, which transformers' generate"):
        TransformersBackend(strategy)


class Second(SimpleTextGenerationStrategy):
    """Takes the second-best token."""

    def sample_from_logits(self, last_token_logits, common_inference_params, vocab_size=None):
        self.num_rows = [*getattr(self, "num_rows", []), len(last_token_logits)]
        return last_token_logits.topk(2).indices[:, 1]


class EndsAfterThree(SimpleTextGenerationStrategy):
    """Ends every row after three tokens, which all count."""

    def update_generation_status(
        self, updated_prompts_tokens, generation_started, current_context_end_position, *status
    ):
        done, lengths = super().update_generation_status(
            updated_prompts_tokens, generation_started, current_context_end_position, *status
        )
        return done | (lengths >= 3), lengths


def second_by_module(model, prompt, num_tokens):
    tokens = torch.tensor([ids_of(prompt)])
    with torch.no_grad():
        for _ in range(num_tokens):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1].topk(2).indices[:, 1:]], dim=1)
    return " ".join(map(str, tokens[0].tolist()))


def test_an_overridden_sample_from_logits_chooses_every_token(engine):
    result, strategy = generate(engine, Second, num_tokens_to_generate=6, tokenizer=Numbers(eod=98))
    expected = [second_by_module(build_model(), prompt, 6) for prompt in PROMPTS]
    assert result["prompts_plus_generations_detokenized"] == expected
    assert strategy.num_rows == [5] * 6  # one call for all that run, though their lengths differ


def test_an_overridden_update_generation_status_ends_rows(engine):
    whole, _ = generate(engine, num_tokens_to_generate=3)
    result, _ = generate(engine, EndsAfterThree, num_tokens_to_generate=100)
    assert result["prompts_plus_generations_detokenized"] == whole["prompts_plus_generations_detokenized"]
    assert result["prompts_tokens_with_generations"].shape[1] == 9 + 3


def test_overriding_when_rows_end_changes_nothing_of_what_is_drawn(engine):
    drawn = {"use_greedy": False, "temperature": 1.5, "top_p": 0.9}
    whole, _ = generate(engine, **drawn, num_tokens_to_generate=3)
    result, _ = generate(engine, EndsAfterThree, **drawn, num_tokens_to_generate=50)
    assert result["prompts_plus_generations_detokenized"] == whole["prompts_plus_generations_detokenized"]


def test_an_overridden_tokenize_and_pad_gives_the_tokens(engine):
    class Begins(SimpleTextGenerationStrategy):
        def tokenize_and_pad_input_prompts(self, prompts, num_tokens_to_generate):
            return super().tokenize_and_pad_input_prompts([f"1 {text}" for text in prompts], num_tokens_to_generate)

    result, _ = generate(engine, Begins)
    expected = greedy_by_transformers(build_model(), [f"1 {text}" for text in PROMPTS])
    assert result["prompts_plus_generations_detokenized"] == expected


def test_an_overridden_detokenize_gives_the_texts(engine):
    class Counts(SimpleTextGenerationStrategy):
        def detokenize_generations(self, tokens, required_sequence_lengths):
            return [f"{length} tokens" for length in required_sequence_lengths.tolist()]

    result, _ = generate(engine, Counts)
    expected = [f"{len(ids_of(text))} tokens" for text in greedy_by_transformers(build_model())]
    assert result["prompts_plus_generations_detokenized"] == expected


def test_an_overridden_generate_output_tokens_is_the_loop(engine):
    class OneAtATime(SimpleTextGenerationStrategy):
        """Beam search would look like this: windows of a wrapped model."""

        def generate_output_tokens(self, prompts_tokens, prompts_lengths, common_inference_params):
            wrapper, most = self.inference_wrapped_model, common_inference_params.num_tokens_to_generate
            for row, length in enumerate(prompts_lengths.tolist()):
                tokens, start = prompts_tokens[row : row + 1], 0
                wrapper.prep_model_for_inference(tokens)
                with wrapper.reading():
                    for end in range(length, length + most):
                        logits = wrapper(wrapper.get_batch_for_context_window(start, end))
                        tokens[:, end] = logits[:, -1].argmax(-1)
                        start = end
            return prompts_tokens, prompts_lengths + most, None

    result, _ = generate(engine, OneAtATime, tokenizer=Numbers(eod=98))
    assert result["prompts_plus_generations_detokenized"] == greedy_by_transformers(build_model(), end=98)


def test_an_engine_with_few_blocks_of_memory_gives_overriding_strategies_the_same(engine):
    tight = build_engine(max_running=3, kv_block_size=4, max_kv_blocks=6)
    for kind in (Second, EndsAfterThree):
        expected, _ = generate(engine, kind)
        result, _ = generate(tight, kind)
        assert result["prompts_plus_generations_detokenized"] == expected["prompts_plus_generations_detokenized"]


# The six defects of the interface's first version.


def test_a_use_greedy_reaches_the_sampler(engine):
    greedy, strategy = generate(engine)
    drawn, _ = generate(engine, use_greedy=True, temperature=9.0, top_k=7)
    assert torch.equal(drawn["prompts_tokens_with_generations"], greedy["prompts_tokens_with_generations"])
    logits = torch.randn(4, VOCAB)
    params = CommonInferenceParams(use_greedy=True, temperature=9.0)
    assert torch.equal(strategy.sample_from_logits(logits, params, VOCAB), logits.argmax(-1))


@pytest.mark.parametrize("wrapper", ["containers", "one's own"])
def test_c_a_long_prompt_that_ends_early_has_its_own_length(engine, wrapper):
    end = some_end(build_model())
    wrapped = GPTInferenceWrapper(engine) if wrapper == "containers" else PlainWrapper(build_model())
    strategy = SimpleTextGenerationStrategy(wrapped, Numbers(eod=end))
    tokens, lengths = strategy.tokenize_and_pad_input_prompts(PROMPTS, 8)
    _, required, _ = strategy.generate_output_tokens(
        tokens, lengths, CommonInferenceParams(use_greedy=True, num_tokens_to_generate=8)
    )
    expected = [len(ids_of(text)) for text in greedy_by_transformers(build_model(), end=end)]
    assert required.tolist() == expected and expected[2] < 9 + 8  # the longest prompt's answer ends early


def test_d_finished_rows_are_not_sampled_again(engine):
    class Notes(SimpleTextGenerationStrategy):
        rows = ()

        def sample_from_logits(self, last_token_logits, *others):
            self.rows += (len(last_token_logits),)
            return super().sample_from_logits(last_token_logits, *others)

    end = some_end(build_model())
    texts = greedy_by_transformers(build_model(), end=end)
    for wrapped in (GPTInferenceWrapper(engine), PlainWrapper(build_model())):
        strategy = Notes(wrapped, Numbers(eod=end))
        params = CommonInferenceParams(use_greedy=True, num_tokens_to_generate=8)
        assert NativeBackend(strategy).generate(PROMPTS, params)["prompts_plus_generations_detokenized"] == texts
        new = [len(ids_of(text)) - len(ids_of(prompt)) for prompt, text in zip(PROMPTS, texts, strict=True)]
        assert sum(strategy.rows) == sum(min(length + 1, 8) for length in new) < 5 * 8


def test_e_padding_of_the_vocabulary_is_masked_and_never_clamped(engine):
    few, drawn = 7, {"use_greedy": False, "temperature": 5.0}
    prompts = ["5"] * 40
    result, strategy = generate(engine, tokenizer=Numbers(few), prompts=prompts, **drawn)
    tokens = result["prompts_tokens_with_generations"][:, 1:]
    counts = tokens[tokens != END].bincount(minlength=few)
    assert len(counts) == few and counts[few - 1] < 2 * counts[:END].max()  # clamped, it would be nearly all
    greedy, _ = generate(engine, tokenizer=Numbers(few), prompts=["5 6"])
    with torch.no_grad():
        best = int(build_model()(torch.tensor([[5, 6]])).logits[0, -1, :few].argmax())
    assert greedy["prompts_tokens_with_generations"][0, 2] == best
    logits = torch.tensor([[0.0, 1.0, 2.0, 50.0, 60.0]]).repeat(100, 1)
    before = logits.clone()
    ids = strategy.sample_from_logits(logits, CommonInferenceParams(temperature=2.0), 3)
    assert set(ids.tolist()) == {0, 1, 2} and torch.equal(logits, before)
    by_transformers, _ = generate(engine, tokenizer=Numbers(few), prompts=["5 6"], backend=TransformersBackend)
    assert torch.equal(by_transformers["prompts_tokens_with_generations"], greedy["prompts_tokens_with_generations"])


@pytest.mark.parametrize("kind", [SimpleTextGenerationStrategy, Second])
def test_f_a_short_prompt_beside_a_long_one_takes_no_steps_for_the_difference(engine, kind, monkeypatch):
    calls, model = [], engine.generator.model
    monkeypatch.setattr(model, "forward", lambda *args: calls.append(1) or type(model).forward(model, *args))
    prompts = ["5 6", " ".join(str(3 + number % 90) for number in range(100))]
    generate(engine, kind, prompts=prompts, num_tokens_to_generate=4, tokenizer=Numbers(eod=98))
    assert len(calls) == 4  # a prefill of both, which gives the first token, and three steps


def test_f_a_wrapped_model_of_ones_own_takes_none_either():
    wrapper = PlainWrapper(build_model())
    strategy = SimpleTextGenerationStrategy(wrapper, Numbers(eod=98))
    prompts = ["5 6", " ".join(str(3 + number % 90) for number in range(100))]
    NativeBackend(strategy).generate(prompts, CommonInferenceParams(use_greedy=True, num_tokens_to_generate=2))
    assert wrapper.windows == [(0, 2), (2, 3), (0, 100), (100, 101)]


# Parameters and bad input.


def test_zero_new_tokens_give_the_prompts_and_their_log_probabilities(engine, engine_without_containers):
    for each in (engine, engine_without_containers):
        result, _ = generate(each, backend=choose_backend, num_tokens_to_generate=0, return_log_probs=True)
        assert result["prompts_plus_generations_detokenized"] == PROMPTS
        assert result["prompts_tokens_with_generations"].shape == (5, 9)
        model = build_model() if each is engine else each.module
        assert_log_probs_are_a_plain_forwards(model, result)
    single, _ = generate(engine, prompts=["7"], num_tokens_to_generate=0, return_log_probs=True)
    assert single["output_log_probs"].shape == (1, 0)


@pytest.mark.parametrize("windows", [[6, 11], [1, 2, 3, 11], [5, 10, 11]])
def test_several_windows_give_the_log_probabilities_of_one(engine, engine_without_containers, windows):
    torch.manual_seed(0)
    tokens = torch.randint(3, VOCAB, (7, 11))
    for each, model in ((engine, build_model()), (engine_without_containers, engine_without_containers.module)):
        wrapper = GPTInferenceWrapper(each)
        wrapper.prep_model_for_inference(tokens)
        starts = [0, *windows[:-1]]
        parts = [wrapper(wrapper.get_batch_for_context_window(*window)) for window in zip(starts, windows, strict=True)]
        with torch.no_grad():
            expected = model(tokens).logits.log_softmax(-1)
        torch.testing.assert_close(torch.cat(parts, dim=1).log_softmax(-1), expected, atol=2e-5, rtol=1e-5)


def test_windows_leave_nothing_out_and_the_engine_trains_afterwards(engine):
    wrapper = GPTInferenceWrapper(engine)
    wrapper.prep_model_for_inference(torch.ones(2, 9, dtype=torch.int64))
    wrapper(wrapper.get_batch_for_context_window(0, 4))
    with pytest.raises(ValueError, match="the window begins at 6 and the last one ended at 4; feed all in turn"):
        wrapper(wrapper.get_batch_for_context_window(6, 7))
    with pytest.raises(ValueError, match=r"the window from 4 to 10 must lie in 0..9 and hold a token"):
        wrapper.get_batch_for_context_window(4, 10)
    with wrapper.reading(), pytest.raises(ValueError, match="called inside generate"):
        engine.train()
    engine.train()
    try:
        with pytest.raises(ValueError, match="the engine is in training mode"):
            wrapper.prep_model_for_inference(torch.ones(2, 9, dtype=torch.int64))
    finally:
        engine.eval()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"top_k": 2, "top_p": 0.4}, "Cannot have top-p and top-k both greater than zero"),
        ({"top_p": 1.4}, "top-p should be in (0,1]"),
        ({"top_p": -0.1}, "top-p should be in (0,1]"),
        ({"top_k": 12}, "top-k is larger than logit size."),
        ({"top_k": 8}, "top-k is larger than vocab size."),
    ],
)
def test_filters_that_cannot_work_are_refused_in_known_words(engine, params, message):
    _, strategy = generate(engine)
    with pytest.raises(ValueError) as error:
        strategy.sample_from_logits(torch.randn(3, 10), CommonInferenceParams(**params), 7)
    assert str(error.value) == message


def test_sampling_keeps_what_top_k_and_top_p_say(engine):
    _, strategy = generate(engine)
    logits = torch.arange(0, VOCAB).repeat(50, 1).float()
    by_k = strategy.sample_from_logits(logits, CommonInferenceParams(top_k=2), VOCAB)
    assert set(by_k.tolist()) == {VOCAB - 1, VOCAB - 2}
    by_p = strategy.sample_from_logits(logits, CommonInferenceParams(top_p=0.95, temperature=2.0), VOCAB)
    ascending = (logits[0] / 2.0).softmax(-1).cumsum(-1)
    assert by_p.min() >= int((ascending > 1 - 0.95).nonzero()[0]) and len(set(by_p.tolist())) > 1
    assert (strategy.sample_from_logits(logits, CommonInferenceParams(top_k=1), VOCAB) == VOCAB - 1).all()


def test_a_seed_gives_the_same_tokens_and_leaves_torchs_generator_alone(engine):
    before = torch.random.get_rng_state()
    drawn = {"use_greedy": False, "temperature": 2.0}
    for kind in (SimpleTextGenerationStrategy, EndsAfterThree):
        first, second = (generate(engine, kind, **drawn)[0]["prompts_tokens_with_generations"] for _ in range(2))
        assert torch.equal(first, second)
        assert first[1].tolist() != first[3].tolist()  # the same prompt, drawn twice
    assert torch.equal(torch.random.get_rng_state(), before)


def test_attributes_are_added_for_methods_of_ones_own(engine):
    params = CommonInferenceParams()
    assert (params.use_greedy, params.temperature, params.top_k, params.top_p) == (False, 1.0, 0, 0.0)
    assert (params.return_log_probs, params.num_tokens_to_generate) == (False, 30)
    params.add_attributes({"min_length": 4, "eod_id": 153, "top_k": 3})
    assert (params.min_length, params.eod_id, params.top_k) == (4, 153, 3)


@pytest.mark.parametrize(
    ("params", "prompts", "message"),
    [
        ({"num_tokens_to_generate": -1}, PROMPTS, "num_tokens_to_generate=-1 must be an integer of at least 0"),
        ({"use_greedy": False, "temperature": 0}, PROMPTS, "for greedy decoding set use_greedy=True"),
        ({"use_greedy": 1}, PROMPTS, "use_greedy=1 must be true or false"),
        ({"use_greedy": False, "top_k": 3, "top_p": 0.5}, PROMPTS, "Cannot have top-p and top-k both"),
        ({}, "9 8", "prompts is '9 8'; pass a list of at least one text"),
        ({}, [], r"prompts is \[\]; pass a list"),
        ({}, ["9", 8], r"prompts\[1\] is a int; pass texts"),
        ({}, ["9", ""], r"prompts\[1\]='' gives no token"),
        ({"num_tokens_to_generate": 500}, PROMPTS, "max_new_tokens=500 with a prompt of 9 tokens"),
    ],
)
def test_what_cannot_work_is_refused(engine, params, prompts, message):
    with pytest.raises(ValueError, match=message):
        generate(engine, prompts=prompts, **params)


def test_what_cannot_be_wrapped_or_tokenize_is_refused(engine):
    with pytest.raises(ValueError, match="model is a LlamaForCausalLM, which generates by no engine; pass what"):
        GPTInferenceWrapper(build_model())
    with pytest.raises(ValueError, match="tokenizer is a dict without encode"):
        SimpleTextGenerationStrategy(GPTInferenceWrapper(engine), {})


@pytest.mark.parametrize(
    ("method", "answer", "message"),
    [
        ("sample_from_logits", torch.tensor([VOCAB] * 5), r"must return \[5\] token ids from 0 to 98"),
        ("sample_from_logits", torch.zeros(5), "returned torch.float32"),
        ("update_generation_status", torch.zeros(5), "must return is_generation_done_tensor and generated_sequence"),
    ],
)
def test_a_method_that_returns_something_else_is_named(engine, method, answer, message):
    kind = type("Wrong", (SimpleTextGenerationStrategy,), {method: lambda self, *args: answer})
    with pytest.raises(ValueError, match=message):
        generate(engine, kind)


def test_a_tokenizer_of_transformers_serves_as_it_is():
    from hybrid_engine.rlhf.tasks.corpus import build_small_llama, train_tokenizer

    tokenizer = train_tokenizer(["some words to learn from"], 280)
    torch.manual_seed(0)
    engine = hybrid_engine.init_inference(build_small_llama(tokenizer, 64, 1).eval())
    strategy = SimpleTextGenerationStrategy(GPTInferenceWrapper(engine), tokenizer)
    params = CommonInferenceParams(use_greedy=True, num_tokens_to_generate=5)
    result = common_generate(choose_backend(strategy), ["some words", "learn"], params)
    tokens, texts = result["prompts_tokens_with_generations"], result["prompts_plus_generations_detokenized"]
    assert texts[0].startswith("some words") and texts[1].startswith("learn")
    assert texts == tokenizer.batch_decode(tokens, skip_special_tokens=True)


def test_the_examples_of_the_page_run(capsys):
    page = (DOCS / "generation.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    for example in examples:
        exec(compile(example, "docs/generation.md", "exec"), names)
    source = "\n".join(examples)
    methods = [
        name for name in vars(SimpleTextGenerationStrategy) if not name.startswith("_") and name != "is_overridden"
    ]
    assert len(methods) == 5 and all(f"def {name}(" in source for name in methods)
    assert "a few" in capsys.readouterr().out


# Two processes.


class DrawsByRank(SimpleTextGenerationStrategy):
    """Draws with torch's generator, which processes have seeded differently."""

    def sample_from_logits(self, last_token_logits, common_inference_params, vocab_size=None):
        return torch.multinomial(last_token_logits.softmax(-1), 1).flatten()


class FailsLater(SimpleTextGenerationStrategy):
    def update_generation_status(self, tokens, started, position, done, lengths):
        if int(lengths.max()) >= 2:
            raise ValueError("no more")
        return super().update_generation_status(tokens, started, position, done, lengths)


class FirstEnds(SimpleTextGenerationStrategy):
    """Only the first process ever sees that rows are done."""

    def update_generation_status(self, tokens, started, position, done, lengths):
        is_first = torch.distributed.get_rank() == 0
        return done | (started & is_first & (lengths >= 2)), lengths + started


SHARED = {"inference engine": {"tensor_parallel": {"tp_size": 2}}, "stages": {"pipeline_parallel_size": 2}}
ENGINES = {
    **SHARED,
    "tensor-parallel": (3, {"inference_tp_size": 2}),
    "sharded": (3, {}),
    "streamed": (3, {"pin_parameters": False}),
}


def build_on_two(name):
    if name in SHARED:
        return hybrid_engine.init_inference(build_model(), max_out_tokens=64, **SHARED[name])
    stage, block = ENGINES[name]
    config = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": stage},
        "hybrid_engine": {"enabled": True, "max_out_tokens": 64, **block},
    }
    return hybrid_engine.initialize(model=build_model(), config=config)[0].eval()


def levels_on(rank, world_size):
    found = {}
    for name in ENGINES:
        engine = build_on_two(name)
        prompts = PROMPTS if rank == 0 else None
        found[name] = {
            "plain": generate(engine, prompts=prompts, return_log_probs=True)[0],
            "sampled": generate(engine, prompts=prompts, use_greedy=False, temperature=1.5)[0],
            "second": generate(engine, Second, prompts=prompts)[0],
            "fewer prompts than processes": generate(engine, Second, prompts=PROMPTS[:1])[0],
            "window": window_logits(engine),
        }
        torch.manual_seed(rank)
        strategy = DrawsByRank(GPTInferenceWrapper(engine), Numbers(eod=98))
        found[name]["own noise"] = NativeBackend(strategy).generate(
            prompts, CommonInferenceParams(num_tokens_to_generate=5)
        )
        with pytest.raises(ValueError, match="no more"):
            generate(engine, FailsLater, prompts=prompts)
    wrapper = PlainWrapper(build_model())
    strategy = FirstEnds(wrapper, Numbers(eod=98))
    NativeBackend(strategy).generate(prompts, CommonInferenceParams(use_greedy=True, num_tokens_to_generate=50))
    return found, wrapper.windows


def window_logits(engine):
    wrapper = GPTInferenceWrapper(engine)
    wrapper.prep_model_for_inference(torch.arange(3, 15).view(2, 6))
    return [wrapper(wrapper.get_batch_for_context_window(*window)) for window in ((0, 4), (4, 5), (5, 6))]


def test_two_processes_give_what_one_gives_on_rank_0_and_stop_together(engine):
    (first, first_windows), (second, second_windows) = run_distributed(levels_on, 2)
    expected = {
        "plain": generate(engine, return_log_probs=True)[0],
        "sampled": generate(engine, use_greedy=False, temperature=1.5)[0],
        "second": generate(engine, Second)[0],
        "fewer prompts than processes": generate(engine, Second, prompts=PROMPTS[:1])[0],
    }
    for name in ENGINES:
        for what, one in expected.items():
            two = first[name][what]
            assert torch.equal(two["prompts_tokens_with_generations"], one["prompts_tokens_with_generations"])
            assert two["prompts_plus_generations_detokenized"] == one["prompts_plus_generations_detokenized"]
            assert second[name][what] == {}
        log_probs = first[name]["plain"]["output_log_probs"], expected["plain"]["output_log_probs"]
        torch.testing.assert_close(*log_probs, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(first[name]["window"], window_logits(engine), atol=2e-5, rtol=1e-5)
        drawn = first[name]["own noise"]["prompts_tokens_with_generations"]
        assert len(drawn) == 5 and 9 < drawn.shape[1] <= 14  # whoever draws, nobody waits for more
    # Defect b: nobody goes on to wait for those who know that all rows are done.
    assert first_windows == second_windows and max(end for _, end in first_windows) == 9 + 2
