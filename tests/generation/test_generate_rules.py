"""Rules on tokens, natively: what transformers' own generate() returns, with rows that leave and enter."""

import random
import re
import string
import sys

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

import hybrid_engine
from tests.support.chat import build_chat_tokenizer
from tests.support.models import PAD, VOCAB, build_model, padded_prompts

GREEDY = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": [7, 13, 28], "pad_token_id": PAD}


def build_engine(family="llama", **block):
    config = {"train_batch_size": 1, "hybrid_engine": {"enabled": True, "max_out_tokens": 64, **block}}
    return hybrid_engine.initialize(model=build_model(family), config=config)[0].eval()


@pytest.fixture(scope="module")
def engine():
    engine = build_engine(max_running=3)
    engine.generator.own.run = None  # the model's own generate() must not run
    return engine


@pytest.fixture(scope="module")
def model():
    return build_model()


def drawn(model, count=6):
    """Tokens that greedy decoding draws first, so that rules on them matter."""
    input_ids, mask = padded_prompts()
    return model.generate(input_ids, attention_mask=mask, **(GREEDY | {"eos_token_id": None}))[:, 9 : 9 + count]


def rules_of(tokens):
    """Each option with values that change what is drawn."""
    first, second = tokens[:, 0].tolist(), tokens[:, 1].tolist()
    pairs = [[a, b] for a, b in zip(first, second, strict=True)]
    return {
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [pairs[0], pairs[1], [first[2]], [7]],
        "suppress_tokens": second[:3] + first[3:],
        "begin_suppress_tokens": first,
        "forced_eos_token_id": 11,
        "sequence_bias": {(first[0],): -20.0, tuple(pairs[1]): -20.0, (5, 6): 4.0},
        "exponential_decay_length_penalty": (3, 1.8),
        "repetition_penalty": 1.7,
        "min_new_tokens": 8,
        "renormalize_logits": True,
        "remove_invalid_values": True,
    }


RULES = list(rules_of(torch.zeros(6, 2, dtype=torch.int64)))


@pytest.mark.parametrize("name", RULES)
def test_a_rule_gives_what_transformers_gives(engine, model, name):
    input_ids, mask = padded_prompts()
    options = GREEDY | {name: rules_of(drawn(model))[name]}
    expected = model.generate(input_ids, attention_mask=mask, **options)
    assert torch.equal(engine.generate(input_ids, attention_mask=mask, **options), expected)
    if name not in ("renormalize_logits", "remove_invalid_values", "forced_eos_token_id"):
        plain = engine.generate(input_ids, attention_mask=mask, **GREEDY)
        assert plain.shape != expected.shape or not torch.equal(plain, expected), "the rule must matter"


@pytest.mark.parametrize("family", ["qwen2-biases", "opt"])
def test_other_families_follow_the_rules_as_well(family):
    engine, model = build_engine(family, max_running=3), build_model(family)
    engine.generator.own.run = None
    input_ids, mask = padded_prompts()
    rules = rules_of(drawn(model))
    for name, value in rules.items():
        options = GREEDY | {name: value}
        expected = model.generate(input_ids, attention_mask=mask, **options)
        assert torch.equal(engine.generate(input_ids, attention_mask=mask, **options), expected), name


@pytest.mark.parametrize("seed", range(8))
def test_rules_together_give_what_transformers_gives(engine, model, seed):
    rng = random.Random(seed)
    rules = rules_of(drawn(model))
    chosen = {name: rules[name] for name in rng.sample(RULES, rng.randint(2, 6))}
    input_ids, mask = padded_prompts(seed=1)
    options = GREEDY | chosen
    expected = model.generate(input_ids, attention_mask=mask, **options)
    assert torch.equal(engine.generate(input_ids, attention_mask=mask, **options), expected)


SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 1, "pad_token_id": PAD, "eos_token_id": None}


@pytest.mark.parametrize(
    "options",
    [
        {"typical_p": 0.4},
        {"epsilon_cutoff": 0.02},
        {"eta_cutoff": 0.05},
        {"temperature": 0.7, "top_k": 9, "typical_p": 0.6, "eta_cutoff": 0.01},
        {"no_repeat_ngram_size": 2, "top_p": 0.8, "temperature": 1.5, "bad_words_ids": [[5], [9]]},
        {"repetition_penalty": 1.3, "min_p": 0.05, "epsilon_cutoff": 0.01, "suppress_tokens": [3, 4]},
    ],
    ids=str,
)
def test_what_is_drawn_from_is_what_transformers_draws_from(engine, model, options):
    input_ids, mask = padded_prompts()
    output = engine.generate(
        input_ids, attention_mask=mask, logprobs="processed", top_logprobs=VOCAB, return_dict_in_generate=True,
        **(SAMPLED | options),
    )  # fmt: skip
    theirs = model.generate(
        input_ids, attention_mask=mask, output_scores=True, return_dict_in_generate=True, **(SAMPLED | options)
    ).scores[0].log_softmax(-1)  # fmt: skip
    ours = torch.empty_like(theirs).scatter_(1, output.top_tokens[:, 0], output.top_logprobs[:, 0])
    assert torch.equal(ours.isinf(), theirs.isinf()) and theirs.isinf().any()
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output.logprobs, ours.gather(1, output.sequences[:, 9:]), atol=1e-6, rtol=0)


FILTERS = [
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.6, "top_k": 0},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.8},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
@torch.no_grad()
def test_recorded_supports_are_the_tokens_that_transformers_leaves(engine, model, options):
    """Also after preemption, and where functions of the user keep rows in step."""
    input_ids, mask = padded_prompts()
    given = {"do_sample": True, "max_new_tokens": 8, "pad_token_id": PAD, "seed": 5, "eos_token_id": [7, 13]} | options
    given |= {"attention_mask": mask, "return_dict_in_generate": True}
    recorded = {"logprobs": "processed", "record_supports": True}
    output = engine.generate(input_ids, **given, **recorded)
    full = torch.cat([mask, torch.ones(6, output.logprobs.shape[1], dtype=mask.dtype)], 1)
    logits = model(output.sequences, attention_mask=full, position_ids=(full.cumsum(1) - 1).clamp(min=0)).logits
    warpers = model._get_logits_processor(GenerationConfig(**{"do_sample": True, "top_k": 0} | options))
    is_drawn = torch.arange(output.logprobs.shape[1]) < output.lengths[:, None]
    left = warpers(torch.empty(0), logits[:, 8:-1][is_drawn])
    found = output.supports[is_drawn.numpy()]
    assert torch.equal(found.mask(VOCAB, left.device), left.isfinite()) and not left.isfinite().all()
    assert (output.supports.lengths > 0).tolist() == is_drawn.tolist()
    chosen = left.log_softmax(-1).gather(1, output.sequences[:, 9:][is_drawn][:, None]).squeeze(1)
    torch.testing.assert_close(output.logprobs[is_drawn], chosen, atol=1e-4, rtol=1e-4)
    assert engine.generate(input_ids, **given).supports is None
    few = build_engine(max_running=4, kv_block_size=4, max_kv_blocks=9)
    in_step = {"stopping_criteria": [lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)]}
    for other, more in ((few, {}), (build_engine(), in_step)):
        again = other.generate(input_ids, **given, **recorded, **more)
        assert torch.equal(again.sequences, output.sequences)
        assert again.supports.sizes.tolist() == output.supports.sizes.tolist()
    assert few.latency_stats()["preemptions"] > 0


def penalised(model, options, steps=8):
    """The same by a loop over single rows, without cache: OpenAI's formula, then the likeliest token."""
    input_ids, mask = padded_prompts()
    answers = []
    for row, kept in zip(input_ids, mask, strict=True):
        tokens, length = row[kept.bool()].tolist(), int(kept.sum())
        for _ in range(steps):
            logits = model(torch.tensor([tokens])).logits[0, -1].float()
            counts = torch.bincount(torch.tensor(tokens[length:], dtype=torch.int64), minlength=VOCAB)
            logits = logits - options.get("frequency_penalty", 0) * counts
            logits = logits - options.get("presence_penalty", 0) * (counts > 0)
            for token, bias in options.get("logit_bias", {}).items():
                logits[int(token)] += bias
            tokens.append(int(logits.argmax()))
        answers.append(tokens[length:])
    return answers


@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": 1.9},
        {"frequency_penalty": 1.7},
        {"frequency_penalty": -1.0, "presence_penalty": -2.0},
        {"logit_bias": {"13": -100, 28: 2.5}},
        {"presence_penalty": 1.5, "frequency_penalty": 0.4, "logit_bias": {13: 1.5}},
    ],
    ids=str,
)
@torch.no_grad()
def test_openais_penalties_and_bias_equal_their_formula(engine, model, options):
    input_ids, mask = padded_prompts()
    kwargs = GREEDY | {"eos_token_id": None, "max_new_tokens": 8}
    ours = engine.generate(input_ids, attention_mask=mask, **(kwargs | options))[:, 9:].tolist()
    assert ours == penalised(model, options) and ours != penalised(model, {})
    few = build_engine(max_running=4, kv_block_size=4, max_kv_blocks=9)  # rows are preempted, and counted anew
    assert few.generate(input_ids, attention_mask=mask, **(kwargs | options))[:, 9:].tolist() == ours
    assert few.latency_stats()["preemptions"] > 0


def test_three_kinds_of_log_probabilities(engine, model):
    input_ids, mask = padded_prompts()
    options = {"do_sample": True, "temperature": 0.6, "top_k": 4, "max_new_tokens": 5, "pad_token_id": PAD, "seed": 3}
    rows = [{"logprobs": kind} for kind in ("raw", "scaled", "processed", "raw", "scaled", "processed")]
    options |= {"return_dict_in_generate": True, "eos_token_id": None, "attention_mask": mask}
    default = engine.generate(input_ids, **options)
    mixed = engine.generate(input_ids, row_options=rows, top_logprobs=2, **options)
    assert torch.equal(default.sequences, mixed.sequences)
    full = torch.cat([mask, torch.ones(6, 5, dtype=mask.dtype)], 1)
    with torch.no_grad():
        logits = model(default.sequences, attention_mask=full, position_ids=(full.cumsum(1) - 1).clamp(min=0)).logits
    logits = logits[:, 8:-1]
    kept = torch.where(logits >= logits.topk(4).values[..., -1:], logits / 0.6, float("-inf"))
    expected = {"raw": logits, "scaled": logits / 0.6, "processed": kept}
    for row, options in enumerate(rows):
        logprobs = expected[options["logprobs"]][row].log_softmax(-1)
        chosen = logprobs.gather(-1, default.sequences[row, 9:, None]).squeeze(-1)
        torch.testing.assert_close(mixed.logprobs[row], chosen, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mixed.top_logprobs[row], logprobs.topk(2).values, atol=1e-4, rtol=1e-4)
        assert torch.equal(mixed.top_tokens[row], logprobs.topk(2).indices)
    scaled = torch.stack([default.logprobs[1], default.logprobs[4]])
    torch.testing.assert_close(torch.stack([mixed.logprobs[1], mixed.logprobs[4]]), scaled, atol=1e-5, rtol=0)


@pytest.mark.parametrize("is_in_step", [False, True])
def test_prompts_are_scored_as_the_model_scores_them(engine, model, is_in_step):
    input_ids, mask = (given[: 3 if is_in_step else None] for given in padded_prompts())
    options = GREEDY | {"prompt_logprobs": 3, "return_dict_in_generate": True}
    if is_in_step:
        options["logits_processor"] = [lambda ids, scores: scores]
    output = engine.generate(input_ids, attention_mask=mask, **options)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logprobs = model(input_ids, attention_mask=mask, position_ids=positions).logits.log_softmax(-1)[:, :-1]
    expected = torch.zeros(input_ids.shape)
    expected[:, 1:] = logprobs.gather(2, input_ids[:, 1:, None]).squeeze(2)
    is_scored = mask.bool().clone()
    is_scored[torch.arange(len(mask)), mask.int().argmax(1)] = False  # nothing comes before the first token
    torch.testing.assert_close(output.prompt_logprobs, expected.masked_fill(~is_scored, 0), rtol=0, atol=1e-4)
    best = logprobs.topk(3)
    scored = is_scored[:, 1:]
    assert torch.equal(output.prompt_top_tokens[:, 1:][scored], best.indices[scored])
    torch.testing.assert_close(output.prompt_top_logprobs[:, 1:][scored], best.values[scored], rtol=0, atol=1e-4)
    without = engine.generate(input_ids, attention_mask=mask, **GREEDY)
    assert torch.equal(output.sequences, without)


def test_single_prompts_are_scored_and_all_samples_share_it(engine):
    input_ids, mask = padded_prompts()
    rows = [{"prompt_logprobs": 0} if row == 1 else {} for row in range(len(input_ids))]
    options = GREEDY | {"do_sample": True, "num_return_sequences": 2, "return_dict_in_generate": True}
    output = engine.generate(input_ids, attention_mask=mask, row_options=rows, **options)
    assert output.prompt_logprobs.shape == input_ids.shape and output.prompt_top_tokens.shape[2] == 0
    assert (output.prompt_logprobs != 0).sum(1).tolist() == [
        int(mask[row].sum()) - 1 if row == 1 else 0 for row in range(len(mask))
    ]
    assert engine.generate(input_ids, attention_mask=mask, **options).prompt_logprobs is None


def test_stop_sequences_end_rows_over_tokens_and_are_trimmed_on_demand(engine):
    input_ids, mask = padded_prompts()
    options = GREEDY | {"eos_token_id": None, "return_dict_in_generate": True, "attention_mask": mask}
    free = engine.generate(input_ids, **options).sequences[:, 9:].tolist()
    stops = [free[0][3:6], free[4][1:2], [97, 98], free[0][5:6]]
    kept = engine.generate(input_ids, stop_sequences=stops, **options)
    cut = engine.generate(input_ids, stop_sequences=stops, trim_stop=True, top_logprobs=1, **options)
    for row, tokens in enumerate(free):
        ends = [(n, len(s)) for n in range(1, 13) for s in stops if tokens[:n][-len(s) :] == s and n >= len(s)]
        length, trimmed = (min(ends)[0], max(s for n, s in ends if n == min(ends)[0])) if ends else (12, 0)
        assert kept.lengths[row] == length and kept.finish_reason[row] == ("stop" if ends else "length")
        assert cut.lengths[row] == length - trimmed and cut.finish_reason == kept.finish_reason
        assert kept.sequences[row, 9 : 9 + length].tolist() == tokens[:length]
        assert cut.sequences[row, 9:].tolist()[: length - trimmed] == tokens[: length - trimmed]
        assert (
            cut.logprobs[row, length - trimmed :].eq(0).all() and cut.top_logprobs[row, length - trimmed :].eq(0).all()
        )
    assert "stop" in kept.finish_reason and kept.lengths.min() < 12


@pytest.fixture(scope="module")
def tokenizer():
    """One of the model's size: byte-level, with tokens of one to three characters."""
    pieces = ["ab", "bc", "abc", "de", "aa", *(chr(code) for code in range(33, 33 + VOCAB - 5 - 5))]
    tokens = ["<pad>", "<a>", "<b>", "<c>", "<d>", *pieces]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [("a", "b"), ("b", "c"), ("a", "bc"), ("d", "e"), ("a", "a")]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<a>")


def test_stop_strings_end_rows_where_transformers_ends_them(engine, model, tokenizer):
    input_ids, mask = padded_prompts()
    options = GREEDY | {"eos_token_id": 1, "attention_mask": mask, "tokenizer": tokenizer}
    free = engine.generate(input_ids, **options)[:, 9:]
    texts = [tokenizer.decode(row) for row in free]
    stops = [texts[0][2:5], texts[4][1:2], texts[2][0] + "never"]
    whole = engine.generate(input_ids, stop_strings=stops, return_dict_in_generate=True, **options)
    assert torch.equal(whole.sequences, model.generate(input_ids, stop_strings=stops, **options))
    one = model.generate(input_ids, stop_strings=stops[0], **options)
    assert torch.equal(engine.generate(input_ids, stop_strings=stops[0], **options), one)
    cut = engine.generate(input_ids, stop_strings=stops, trim_stop=True, return_dict_in_generate=True, **options)
    assert whole.finish_reason[0] == "stop" and not torch.equal(cut.lengths, whole.lengths)
    for row, reason in enumerate(whole.finish_reason):
        text = tokenizer.decode(cut.sequences[row, 9 : 9 + cut.lengths[row]])
        assert (
            whole.sequences[row, 9 : 9 + cut.lengths[row]].tolist()
            == cut.sequences[row, 9:][: cut.lengths[row]].tolist()
        )
        assert reason == "length" or not any(stop in text for stop in stops)


@pytest.fixture
def guided(engine):
    pytest.importorskip("llguidance", reason="guided choice needs pip install 'hybrid-engine[guided]'")
    return engine


def test_guided_text_is_one_of_the_strings_or_follows_the_pattern(guided, tokenizer):
    input_ids, mask = padded_prompts()
    rows = [
        {"guided_choice": ["abcde", "abx", "Q"]},
        {"guided_choice": ["abcde", "abx", "Q"], "do_sample": True, "seed": 1},
        {"guided_regex": "[a-c]{3}[0-9]+x"},
        {"guided_regex": "ab?c(de)*", "do_sample": True},
        {"guided_json": {"type": "integer", "minimum": 10, "maximum": 99}},
        {},
    ]
    for row in rows:
        row.pop("seed", None)
    output = guided.generate(
        input_ids, attention_mask=mask, row_options=rows, tokenizer=tokenizer, return_dict_in_generate=True, seed=0,
        **(GREEDY | {"eos_token_id": 1}),
    )  # fmt: skip
    texts = [
        tokenizer.decode(row[:length], skip_special_tokens=True)
        for row, length in zip(output.sequences[:, 9:], output.lengths, strict=True)
    ]
    assert texts[0] in rows[0]["guided_choice"] and texts[1] in rows[0]["guided_choice"]
    assert re.fullmatch("[a-c]{3}[0-9]*x?", texts[2]) and re.fullmatch("a(b(c(d(e(de)*d?)?)?)?)?|ac(de)*d?", texts[3])
    assert 10 <= int(texts[4]) <= 99
    free = guided.generate(input_ids, attention_mask=mask, **(GREEDY | {"eos_token_id": 1}))
    assert output.sequences[5, 9 : 9 + output.lengths[5]].tolist() == free[5, 9:].tolist()[: output.lengths[5]]


ONE_ITEM = {"type": "array", "items": {"enum": [1]}, "minItems": 1, "maxItems": 1}


@pytest.mark.parametrize("space", [None, "", " {0,3}"])
def test_white_space_of_guided_json_is_bounded_however_likely_it_is(guided, space):
    from hybrid_engine.generation.guides import JSON_SPACE, GuidedTokens, read_guide

    tokenizer = build_chat_tokenizer()
    guide = GuidedTokens(read_guide("guided_json", ONE_ITEM, tokenizer, space), tokenizer, (tokenizer.eos_token_id,), 0)
    scores = torch.zeros(1, len(tokenizer))
    scores[0, tokenizer.encode(" \n\t")] = 100.0
    tokens = []
    while len(tokens) < 60 and not guide.is_complete(tokens):
        tokens.append(int(guide(torch.tensor([tokens], dtype=torch.long), scores).argmax()))
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    assert re.fullmatch((JSON_SPACE if space is None else space).join([r"\[", "1", r"\]"]), text), text
    assert bool(re.search(r"\s", text)) == (space != "")


def test_a_choice_is_followed_whatever_letters_it_has_and_however_many_begin_alike(guided):
    from hybrid_engine.generation.guides import GuidedTokens, read_guide

    tokenizer = build_chat_tokenizer()
    choices = [*(f"word{number}" for number in range(3000)), string.printable, "é😀.*", *string.punctuation]
    for choice in [*choices[2990:], "word0"]:
        guide = GuidedTokens(read_guide("guided_choice", choices, tokenizer), tokenizer, (tokenizer.eos_token_id,), 0)
        tokens = tokenizer.encode(choice, add_special_tokens=False)
        for place, token in enumerate([*tokens, tokenizer.eos_token_id]):
            scores = guide(torch.tensor([tokens[:place]], dtype=torch.long), torch.zeros(1, len(tokenizer)))
            assert torch.isfinite(scores[0, token]), (choice, place)
    assert not torch.isfinite(guide(torch.tensor([tokenizer.encode("word")]), torch.zeros(1, len(tokenizer)))).all()


@pytest.mark.parametrize("ends", [(), ("<eos>",), ("<start>",), ("<eos>", "<start>"), ("z", "<eos>"), ("b",)])
def test_a_rows_own_ends_come_where_its_text_is_complete(guided, ends):
    """A token that ends the row may also be text of the guide: the row ends there, complete or not."""
    from hybrid_engine.generation.guides import GuidedTokens, read_guide

    tokenizer = build_chat_tokenizer()
    ids = tuple(tokenizer.convert_tokens_to_ids(list(ends)))
    guide = GuidedTokens(read_guide("guided_regex", "ab{1,2}", tokenizer), tokenizer, ids, 0)
    a, b = (tokenizer.convert_tokens_to_ids(letter) for letter in "ab")

    def allowed(*tokens):
        scores = guide(torch.tensor([tokens], dtype=torch.long), torch.zeros(1, len(tokenizer)))
        return set(torch.isfinite(scores[0]).nonzero().flatten().tolist())

    own = set(ids) or {tokenizer.eos_token_id}
    assert allowed() == {a} and allowed(a) == {b}
    if b not in ids:
        assert allowed(a, b) == {b} | own and not guide.is_complete([a, b])
        assert allowed(a, b, b) == own
    assert guide.is_complete([a, b, b])


def test_a_guide_that_is_given_up_is_an_error_and_no_end_of_the_text(guided, tokenizer):
    input_ids, mask = padded_prompts()
    grammar = "start: " + " | ".join(f'"a{number}"' for number in range(3000))
    rows = [{}] * (len(input_ids) - 1) + [{"guided_grammar": grammar}]
    with pytest.raises(ValueError, match="guided_grammar gave up after 0 tokens"):
        guided.generate(
            input_ids, attention_mask=mask, row_options=rows, tokenizer=tokenizer, **(GREEDY | {"eos_token_id": 1})
        )


@pytest.mark.parametrize(
    ("guide", "told"),
    [
        (
            {"guided_json": {"type": "integer", "multipleOf": 99999999}},
            "guided_json cannot be used as a guide: .* longer than 1 s",
        ),
        (
            {
                "guided_grammar": "\n".join(
                    ["start: r0", *(f'r{n}: "a" | "b" r{n + 1}' for n in range(9000)), 'r9000: "c"']
                )
            },
            "guided_grammar cannot be used as a guide: llguidance fails at its depth",
        ),
    ],
)
def test_a_guide_whose_compilation_does_not_end_or_would_end_the_process_is_an_error(guided, monkeypatch, guide, told):
    from hybrid_engine.generation import guides

    monkeypatch.setattr(guides, "SECONDS_TO_COMPILE", 1 if "guided_json" in guide else 60)
    input_ids, mask = padded_prompts()
    with pytest.raises(ValueError, match=told):
        guided.generate(input_ids, attention_mask=mask, tokenizer=build_chat_tokenizer(), **guide, **GREEDY)


def test_processes_that_try_guides_serve_several_and_end_with_their_tokenizer(guided):
    import llguidance

    from hybrid_engine.generation.guides import GuideTrials

    tokenizer = build_chat_tokenizer()
    trials = GuideTrials(tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id)
    grammars = [llguidance.LLMatcher.grammar_from_regex(pattern) for pattern in ("a+", "(", "b")]
    assert [bool(trials.compile(grammar).problem) for grammar in grammars] == [False, True, False]
    (process,) = trials._idle
    process.kill()  # as the system does where memory runs out: no guide's fault
    process.wait()
    assert trials.compile(grammars[0]) == ("", "")
    (process,) = trials._idle
    del trials
    assert process.poll() is not None


def test_a_guide_may_also_be_given_up_in_the_middle(guided):
    from hybrid_engine.generation.guides import GuidedTokens, GuideError, read_guide

    tokenizer = build_chat_tokenizer()
    grammar = 'start: "x" rest\nrest: ' + " | ".join(f'"a{number}"' for number in range(3000))
    guide = GuidedTokens(read_guide("guided_grammar", grammar, tokenizer), tokenizer, (tokenizer.eos_token_id,), 0)
    scores, tokens = torch.zeros(1, len(tokenizer)), tokenizer.encode("x", add_special_tokens=False)
    assert torch.isfinite(guide(torch.zeros(1, 0, dtype=torch.long), scores)[0, tokens]).all()
    with pytest.raises(GuideError, match=r"guided_grammar gave up after [01] tokens"):
        guide.is_complete(tokens) or guide(torch.tensor([tokens]), scores)


def test_guided_text_follows_a_grammar(guided, tokenizer):
    input_ids, mask = padded_prompts()
    output = guided.generate(
        input_ids, attention_mask=mask, guided_grammar='start: ("ab" | "c")~3 "."', tokenizer=tokenizer,
        **(GREEDY | {"eos_token_id": 1}),
    )  # fmt: skip
    for row in output[:, 9:]:
        assert re.fullmatch(r"(ab|c){3}\.", tokenizer.decode(row, skip_special_tokens=True))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"presence_penalty": 2.5}, ["presence_penalty=2.5", "-2"]),
        ({"frequency_penalty": "1"}, ["frequency_penalty='1'"]),
        ({"logit_bias": {VOCAB: 1.0}}, ["logit_bias", f"{VOCAB}", f"{VOCAB - 1}"]),
        ({"logit_bias": {3: 101}}, ["logit_bias[3]=101"]),
        ({"logit_bias": [3]}, ["logit_bias=[3]", "dict"]),
        ({"sequence_bias": {(): 1.0}}, ["sequence_bias", "tuples"]),
        ({"sequence_bias": {(5,): float("nan")}}, ["sequence_bias[(5,)]=nan"]),
        ({"bad_words_ids": [5]}, ["bad_words_ids=[5]"]),
        ({"bad_words_ids": [[5, VOCAB]]}, [f"bad_words_ids={VOCAB}"]),
        ({"no_repeat_ngram_size": -1}, ["no_repeat_ngram_size=-1"]),
        ({"suppress_tokens": [VOCAB]}, [f"suppress_tokens={VOCAB}"]),
        ({"forced_eos_token_id": "x"}, ["forced_eos_token_id='x'"]),
        ({"exponential_decay_length_penalty": (1,)}, ["exponential_decay_length_penalty=(1,)"]),
        ({"typical_p": 1.5}, ["typical_p=1.5"]),
        ({"epsilon_cutoff": -0.5}, ["epsilon_cutoff=-0.5"]),
        ({"stop_sequences": [[]]}, ["stop_sequences=[[]]"]),
        ({"stop_strings": ["a"]}, ["stop_strings", "tokenizer="]),
        ({"stop_strings": ["a", ""], "tokenizer": 1}, ["stop_strings=['a', '']", "empty"]),
        ({"stop_strings": 3, "tokenizer": 1}, ["stop_strings=3"]),
        ({"stop_sequences": [[3]], "trim_stop": 1.5}, ["trim_stop=1.5"]),
        ({"logprobs": "all"}, ["logprobs: 'all'", "raw", "processed"]),
        ({"top_logprobs": 101}, ["top_logprobs=101", "100"]),
        ({"prompt_logprobs": -1}, ["prompt_logprobs=-1"]),
        ({"prompt_logprobs": 1}, ["prompt_logprobs", "return_dict_in_generate=True"]),
        ({"record_supports": True}, ["record_supports=True must have do_sample=True"]),
        ({"record_supports": True, "do_sample": True}, ["record_supports", "return_dict_in_generate=True"]),
        ({"record_supports": 1}, ["record_supports=1 must be true or false"]),
        ({"guided_choice": [""]}, ["guided_choice=['']"]),
        ({"guided_regex": "a", "guided_json": {}}, ["guided_regex", "one of them"]),
        ({"row_options": [{}] * 5 + [{"presence_penalty": 3}]}, ["row_options[5]: presence_penalty=3"]),
        ({"presence_penalty": 1.0, "num_beams": 2}, ["presence_penalty of rank 0", "num_beams"]),
    ],
    ids=str,
)
def test_bad_rules_are_refused_by_name_value_and_rule(engine, options, told):
    input_ids, mask = padded_prompts()
    with pytest.raises(ValueError) as error:
        engine.generate(input_ids, attention_mask=mask, **(GREEDY | options))
    assert all(part in str(error.value) for part in told), error.value


def test_a_guide_that_cannot_be_read_says_why(guided, tokenizer):
    input_ids, mask = padded_prompts()
    for option, value in (
        ("guided_regex", "(a"),
        ("guided_json", {"type": 3}),
        ("guided_json", "{"),
        ("guided_regex", 3),
        ("guided_grammar", 3),
        ("guided_grammar", "start: ("),
    ):
        with pytest.raises(ValueError, match=option):
            guided.generate(input_ids, attention_mask=mask, tokenizer=tokenizer, **{option: value}, **GREEDY)


def test_white_space_that_shapes_no_json_is_refused(guided, tokenizer):
    input_ids, mask = padded_prompts()
    for options in ({}, {"guided_regex": "a"}, {"guided_json": {}, "guided_whitespace_pattern": "("}):
        with pytest.raises(ValueError, match="guided_whitespace_pattern='"):
            rules = {"guided_whitespace_pattern": " ?"} | options
            guided.generate(input_ids, attention_mask=mask, tokenizer=tokenizer, **rules, **GREEDY)


def test_without_the_library_a_guide_says_how_to_install_it(engine, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    input_ids, mask = padded_prompts()
    with pytest.raises(ValueError, match=r"guided_regex needs the library llguidance.*hybrid-engine\[guided\]"):
        engine.generate(input_ids, attention_mask=mask, tokenizer=tokenizer, guided_regex="a", **GREEDY)
