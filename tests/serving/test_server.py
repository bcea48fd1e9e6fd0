"""The server: answers are those of `generate()`, whatever else it does at the same time."""

import copy
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import httpx
import openai
import pytest
import torch
from transformers import LlamaForCausalLM

import hybrid_engine
from tests.support.chat import build_chat_tokenizer
from tests.support.distributed import run_distributed
from tests.support.served import build_llama

get = partial(httpx.get, timeout=300)
post = partial(httpx.post, timeout=300)

LONGEST = 160
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def tokenizer():
    return build_chat_tokenizer()


def build(tokenizer):
    return hybrid_engine.init_inference(build_llama(tokenizer))


@pytest.fixture(scope="module")
def engine(tokenizer):
    """What the server's answers are compared with; another of the same weights is served."""
    return build(tokenizer)


@pytest.fixture
def served(tokenizer):
    return build(tokenizer)


@pytest.fixture(scope="module")
def server(tokenizer):
    with build(tokenizer).serving(
        tokenizer, model_name="tiny", longest=LONGEST, max_running=8, max_waiting=200
    ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)


def generated(engine, tokenizer, prompt, **options):
    """Token ids and log-probabilities of each answer, by the engine itself."""
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    output = engine.generate(
        torch.tensor([ids]), return_dict_in_generate=True, **({"top_k": 0, "do_sample": True} | options)
    )
    rows = zip(output.sequences[:, len(ids) :].tolist(), output.logprobs.tolist(), output.lengths.tolist(), strict=True)
    return [(tokens[:length], logprobs[:length]) for tokens, logprobs, length in rows]


def ask(client, **fields):
    return client.completions.create(
        **{"model": "tiny", "prompt": "hello", "max_tokens": 12, "seed": 3, "extra_body": {"return_token_ids": True}}
        | fields
    )


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"temperature": 0}, {"do_sample": False}),
        ({"temperature": 0.7, "top_p": 0.8}, {"temperature": 0.7, "top_p": 0.8}),
        ({"n": 3}, {"num_return_sequences": 3}),
        ({"prompt": [5, 6, 7, 8]}, {}),
    ],
)
def test_answers_are_those_of_generate_for_the_same_seed(client, engine, tokenizer, fields, options):
    answer = ask(client, logprobs=0, **fields)
    expected = generated(engine, tokenizer, fields.get("prompt", "hello"), max_new_tokens=12, seed=3, **options)
    assert len(answer.choices) == len(expected)
    for choice, (tokens, logprobs) in zip(answer.choices, expected, strict=True):
        assert choice.token_ids == tokens
        assert choice.text == tokenizer.decode(tokens, skip_special_tokens=True)
        assert choice.finish_reason == ("stop" if tokens[-1] == tokenizer.eos_token_id else "length")
        torch.testing.assert_close(choice.logprobs.token_logprobs, logprobs, rtol=0, atol=1e-5)
    assert answer.usage.completion_tokens == sum(len(tokens) for tokens, _ in expected)


def test_a_stream_brings_what_a_whole_answer_has(client):
    whole = ask(client, n=2, logprobs=0, max_tokens=20)
    texts, tokens, ends = ["", ""], [[], []], [None, None]
    for event in ask(client, n=2, logprobs=0, max_tokens=20, stream=True, stream_options={"include_usage": True}):
        for choice in event.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.token_ids
            ends[choice.index] = choice.finish_reason or ends[choice.index]
        usage = event.usage
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.token_ids for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_is_left_out(client, tokenizer, stream):
    whole = ask(client, max_tokens=30).choices[0]
    text = whole.text
    assert len(text) > 12
    stop = text[6:9]
    answer = ask(client, max_tokens=30, stop=[stop, "never in it"], stream=stream)
    if stream:
        choices = [event.choices[0] for event in answer]
        found, tokens = "".join(c.text for c in choices), [t for c in choices for t in c.token_ids]
        reason = choices[-1].finish_reason
    else:
        (choice,) = answer.choices
        found, tokens, reason = choice.text, choice.token_ids, choice.finish_reason
    assert found == text[: text.find(stop)] and reason == "stop"
    assert tokens == whole.token_ids[: len(tokens)] and tokenizer.decode(tokens).endswith(stop)


def test_penalties_and_biases_are_those_of_generate(client, engine, tokenizer):
    fields = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {"40": 3.0, "41": -100.0}}
    answer = ask(client, max_tokens=40, **fields)
    ((expected, _),) = generated(engine, tokenizer, "hello", max_new_tokens=40, seed=3, **fields)
    assert answer.choices[0].token_ids == expected != ask(client, max_tokens=40).choices[0].token_ids


def test_ids_that_the_models_config_suppresses_are_never_drawn(served, tokenizer):
    """Megatron pads vocabularies, and its loader names the padding there."""
    padding = list(range(60, len(tokenizer)))
    served.module.generation_config.suppress_tokens = padding
    with served.serving(tokenizer, model_name="tiny", longest=LONGEST) as server:
        client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
        answer = ask(client, n=4, max_tokens=20)
    drawn = [choice.token_ids for choice in answer.choices]
    assert max(map(max, drawn)) < 60
    assert drawn == [
        tokens for tokens, _ in generated(served, tokenizer, "hello", max_new_tokens=20, seed=3, num_return_sequences=4)
    ]


def test_an_answer_ends_where_model_or_tokenizer_say(served, tokenizer, engine):
    """Some models have no end of their own, others one for each kind of turn."""
    ((tokens, _),) = generated(engine, tokenizer, "hello", max_new_tokens=30, seed=3, eos_token_id=None)
    first, later = tokens[3], tokens[9]
    assert later not in tokens[:9] and first not in tokens[:3] and first != later
    for own, of_tokenizer, expected in ((None, later, tokens[:10]), ([later, first], later, tokens[:4])):
        served.module.generation_config.eos_token_id = own
        ending = copy.deepcopy(tokenizer)
        ending.eos_token = tokenizer.convert_ids_to_tokens(of_tokenizer)
        with served.serving(ending, model_name="tiny", longest=LONGEST) as server:
            client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
            assert ask(client, max_tokens=30).choices[0].token_ids == expected


def test_samples_of_a_long_prompt_fit_where_one_answer_runs_at_a_time(served, tokenizer):
    """They fork from the prompt, for which there must be a block; otherwise nobody behind them would be answered."""
    with served.serving(tokenizer, model_name="tiny", longest=LONGEST, max_running=1) as server:
        client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60)
        answer = ask(client, prompt=[5] * 150, n=3, max_tokens=5)
    assert len(answer.choices) == 3


def test_likeliest_tokens_are_reported(client, tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    for place in answer.choices[0].logprobs.content:
        assert len(place.top_logprobs) == 3
        assert place.top_logprobs[0].token == place.token
        assert place.top_logprobs[0].logprob == pytest.approx(place.logprob, abs=1e-5)
    tops = ask(client, max_tokens=6, temperature=0, logprobs=2).choices[0].logprobs
    for logprob, likeliest in zip(tops.token_logprobs, tops.top_logprobs, strict=True):
        assert max(likeliest.values()) == pytest.approx(logprob, abs=1e-5)


def test_an_answer_is_one_of_the_texts_or_fits_the_schema_that_it_must(client, tokenizer):
    pytest.importorskip("llguidance", reason="the extra 'guided' is not installed")
    answer = ask(client, max_tokens=12, n=4, extra_body={"guided_choice": ["yes", "no"]})
    assert {choice.text for choice in answer.choices} <= {"yes", "no"}
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    messages = [{"role": "user", "content": "hi"}]
    spaces = dict.fromkeys(map(str, tokenizer.encode(" \t\n\r")), 100)  # as many as may be
    said = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=120, response_format=format, logit_bias=spaces
    )
    assert json.loads(said.choices[0].message.content)["a"] in (1, 2)
    for extra, expected in (
        ({"structured_outputs": {"json": schema, "whitespace_pattern": ""}}, ['{"a":1}', '{"a":2}']),
        ({"structured_outputs": {"choice": ["yes"]}}, ["yes"]),
        ({"guided_grammar": 'start: "a"~3'}, ["aaa"]),
    ):
        assert ask(client, max_tokens=12, extra_body=extra).choices[0].text in expected


def test_the_drawn_token_is_among_the_likeliest(client, tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    said = {"model": "tiny", "messages": messages, "max_tokens": 20, "temperature": 3, "seed": 1, "logprobs": True}
    places = client.chat.completions.create(top_logprobs=2, **said).choices[0].logprobs.content
    for place in places:
        shown = [(top.token, top.logprob) for top in place.top_logprobs]
        assert (place.token, place.logprob) in shown and len(shown) in (2, 3)
        assert shown == sorted(shown, key=lambda top: -top[1])
    assert any(len(place.top_logprobs) == 3 for place in places)  # some were none of the likeliest two
    assert all(p.top_logprobs == [] for p in client.chat.completions.create(**said).choices[0].logprobs.content)
    for number in (0, 2):
        told = ask(client, logprobs=number, temperature=3, max_tokens=20).choices[0].logprobs
        for token, logprob, tops in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
            assert token in tops and len(tops) <= number + 1
            assert token == "\ufffd" or tops[token] == logprob  # parts of characters have one name
    extra = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    told = ask(client, logprobs=1, extra_body=extra).choices[0]
    assert told.logprobs.tokens == [f"token_id:{token}" for token in told.token_ids]
    assert all(token in tops for token, tops in zip(told.logprobs.tokens, told.logprobs.top_logprobs, strict=True))


NULL = [
    "n",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop",
    "stream",
    "logprobs",
]
NULL += ["stream_options", "top_k", "min_p", "min_tokens", "stop_token_ids", "ignore_eos", "guided_choice", "user"]
OF_NO_CONSEQUENCE = {
    "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "x",
    "prompt_cache_key": "x", "prompt_cache_options": {"mode": "explicit"}, "priority": 0, "cache_salt": "x",
    "stream_options": {"include_usage": True},
    "use_beam_search": False, "length_penalty": 1.0, "spaces_between_special_tokens": True,
}  # fmt: skip
FOR_CHATS = {
    "reasoning_effort": "low", "verbosity": "low", "modalities": ["text"], "functions": [], "function_call": "none",
    "prediction": None, "tool_choice": "auto", "tools": [], "parallel_tool_calls": False, "documents": [],
    "echo": False, "top_logprobs": 0, "add_generation_prompt": True, "continue_final_message": False,
}  # fmt: skip


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("name", ["null", "of no consequence"])
def test_null_is_a_fields_default_and_what_changes_nothing_changes_nothing(server, path, name):
    is_chat = path.startswith("chat")
    body = (CHAT if is_chat else GOOD) | {"max_tokens": 9, "seed": 4}
    names = [*NULL, *(["response_format", "tools", "tool_choice", "max_completion_tokens"] * is_chat)]
    fields = dict.fromkeys(names) if name == "null" else OF_NO_CONSEQUENCE | (FOR_CHATS if is_chat else {})
    plain, same = post(f"{server.url}/{path}", json=body), post(f"{server.url}/{path}", json=body | fields)
    assert (plain.status_code, same.status_code) == (200, 200), same.text
    assert same.json()["choices"] == plain.json()["choices"]
    counts = [answer.json()["usage"] | {"prompt_tokens_details": None} for answer in (plain, same)]
    assert counts[0] == counts[1]  # but for those that the second one shares with the first


def test_an_answer_is_as_new_as_it_is(client, server):
    begin = int(time.time())
    assert begin <= ask(client, max_tokens=1).created <= time.time()
    server.app.model = replace(server.app.model, created=begin - 1000)  # the server is older than its answers
    events = list(ask(client, max_tokens=3, stream=True))
    assert {event.created for event in events} == {events[0].created} and events[0].created >= begin
    assert client.models.retrieve("tiny").created == begin - 1000


def test_a_stop_string_ends_no_answer_before_its_least_tokens(client, tokenizer):
    no_parts = {str(token): -100 for token in range(len(tokenizer)) if not tokenizer.decode([token]).isascii()}
    fields = {"max_tokens": 30, "logit_bias": no_parts, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    text = ask(client, **fields).choices[0].text  # a token is a character
    stop = text[4]
    for least, begin in ((0, 0), (5, 5), (len(text), len(text))):
        fields["extra_body"]["min_tokens"] = least
        expected = text[:begin] + text[begin:].partition(stop)[0]
        for stream in (False, True):
            answer = ask(client, stop=[stop], stream=stream, **fields)
            choices = [event.choices[0] for event in answer] if stream else answer.choices
            assert "".join(choice.text for choice in choices) == expected
            assert sum(len(choice.token_ids) for choice in choices) >= least
    shown = ask(client, stop=[stop], **(fields | {"extra_body": {"include_stop_str_in_output": True}}))
    assert shown.choices[0].text == text[:5]


def test_a_stream_tells_usage_as_it_is_asked_to(client):
    def usages(**options):
        return [event.usage for event in ask(client, stream=True, max_tokens=5, stream_options=options)]

    *before, last = usages(include_usage=True, include_obfuscation=False)
    assert before and before == [None] * len(before) and last.completion_tokens == 5
    counts = [usage.completion_tokens for usage in usages(include_usage=True, continuous_usage_stats=True)]
    assert counts == sorted(counts) and counts[-1] == 5 and counts[0] < 5


def test_a_chat_tells_the_prompts_tokens_where_vllm_does(client, tokenizer):
    said = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
    extra = {"return_token_ids": True}
    whole = client.chat.completions.create(n=2, **said, extra_body=extra)
    expected = tokenizer.apply_chat_template(said["messages"], add_generation_prompt=True, return_dict=False)
    assert whole.prompt_token_ids == expected
    events = list(client.chat.completions.create(stream=True, **said, extra_body=extra))
    assert [event.prompt_token_ids for event in events if hasattr(event, "prompt_token_ids")] == [expected]


def test_tokenize_and_detokenize_are_those_of_the_tokenizer(server, tokenizer):
    base = server.url.removesuffix("/v1")
    messages = [{"role": "user", "content": "hi"}]
    told = post(f"{base}/tokenize", json={"model": "tiny", "prompt": "hello", "return_token_strs": True}).json()
    ids = tokenizer.encode("hello")
    assert told == {"count": 5, "max_model_len": LONGEST, "tokens": ids, "token_strs": list("hello")}
    for begins in (True, False):
        told = post(f"{base}/tokenize", json={"messages": messages, "add_generation_prompt": begins}).json()
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=begins, return_dict=False)
        assert told["tokens"] == expected and told["token_strs"] is None
    info = get(f"{base}/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"], info["chat_template"]) == ("<eos>", None, tokenizer.chat_template)
    text = post(f"{base}/detokenize", json={"model": "tiny", "tokens": expected}).json()
    assert text == {"prompt": tokenizer.decode(expected)}
    for path, body in (
        ("tokenize", {}), ("tokenize", {"prompt": "a", "messages": messages}), ("tokenize", {"prompt": 1}),
        ("detokenize", {"tokens": [10**6]}), ("detokenize", {"tokens": [-1]}), ("detokenize", {"tokens": "a"}),
    ):  # fmt: skip
        answer = post(f"{base}/{path}", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["message"]
    assert post(f"{base}/tokenize", json={"model": "other", "prompt": "a"}).status_code == 404


def test_an_answer_may_go_on_from_the_last_message(client, tokenizer):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Bon"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True}
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=3, extra_body=extra)
    assert tokenizer.decode(answer.prompt_token_ids) == "<start>user\nhi<eos>\n<start>assistant\nBon"


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_an_echo_says_how_likely_the_prompt_was(client, engine, tokenizer, max_tokens):
    answer = ask(client, max_tokens=max_tokens, echo=True, logprobs=1, temperature=0)
    (choice,) = answer.choices
    ids = torch.tensor([tokenizer.encode("hello") + choice.token_ids])
    with torch.no_grad():
        logprobs = engine.module(ids).logits[0].double().log_softmax(-1)
    expected = logprobs[:-1].gather(1, ids[0, 1:, None]).squeeze(1).tolist()
    assert choice.logprobs.token_logprobs[0] is None and len(choice.token_ids) == max_tokens
    torch.testing.assert_close(choice.logprobs.token_logprobs[1:], expected, rtol=0, atol=1e-4)
    for place, likeliest in enumerate(choice.logprobs.top_logprobs[1:]):
        best, score = max(likeliest.values()), choice.logprobs.token_logprobs[place + 1]
        assert best == pytest.approx(float(logprobs[place].max()), abs=1e-4)
        # Harnesses compare the two to the last bit: whether the token is what would have been drawn.
        assert (best == score) == (int(logprobs[place].argmax()) == int(ids[0, place + 1]))
    assert choice.text.startswith("hello") and choice.logprobs.text_offset[:5] == [0, 1, 2, 3, 4]
    events = list(ask(client, max_tokens=max_tokens, echo=True, logprobs=1, temperature=0, stream=True))
    told = [event.choices[0].logprobs for event in events if event.choices and event.choices[0].logprobs]
    assert [offset for part in told for offset in part.text_offset] == choice.logprobs.text_offset
    plain = ask(client, max_tokens=3, echo=True).choices[0]
    assert plain.text == "hello" + ask(client, max_tokens=3).choices[0].text


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_tells_the_tokens_of_a_prompt_once_for_each_answer(client, tokenizer, echo):
    events = [event.choices[0] for event in ask(client, n=2, stream=True, echo=echo)]
    for index in range(2):
        first, *rest = [event for event in events if event.index == index]
        assert first.prompt_token_ids == tokenizer("hello")["input_ids"]
        assert rest and not any(hasattr(event, "prompt_token_ids") for event in rest)


def test_a_chat_is_what_its_template_writes(client, engine, tokenizer):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say hi"}]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=15, seed=1, logprobs=True,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    ((tokens, logprobs),) = generated(engine, tokenizer, prompt, max_new_tokens=15, seed=1)
    (choice,) = answer.choices
    assert (choice.token_ids, choice.prompt_token_ids) == (tokens, prompt)
    assert choice.message.content == tokenizer.decode(tokens, skip_special_tokens=True)
    torch.testing.assert_close([t.logprob for t in choice.logprobs.content], logprobs, rtol=0, atol=1e-5)
    pieces = client.chat.completions.create(model="tiny", messages=messages, max_tokens=15, seed=1, stream=True)
    deltas = [event.choices[0].delta for event in pieces]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content


def test_many_clients_at_once_get_what_each_gets_alone(client, engine, tokenizer):
    def one(number):
        fields = {"prompt": "x" * (1 + number % 7), "max_tokens": 3 + number % 40, "seed": number}
        fields |= {"temperature": 0 if number % 3 == 0 else 1, "stream": number % 2 == 0}
        answer = ask(client, **fields)
        if not fields["stream"]:
            return answer.choices[0].token_ids
        return [token for event in answer for token in event.choices[0].token_ids]

    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(one, range(64)))
    for number, tokens in enumerate(answers):
        options = {"do_sample": number % 3 != 0, "max_new_tokens": 3 + number % 40, "seed": number}
        ((expected, _),) = generated(engine, tokenizer, "x" * (1 + number % 7), **options)
        assert tokens == expected, number


def until(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


def test_clients_that_vanish_free_their_rows_and_harm_nobody(server, client, engine, tokenizer):
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 120, "ignore_eos": True, "stream": True, "n": 4}
    with httpx.Client(timeout=300) as web, web.stream("POST", f"{server.url}/completions", json=body) as response:
        next(response.iter_lines())
        kept = threading.Thread(target=lambda: answers.append(ask(client, max_tokens=40)))
        answers = []
        kept.start()
    with pytest.raises(httpx.ReadTimeout), httpx.Client(timeout=0.05) as web:
        web.post(f"{server.url}/completions", json=body | {"stream": False})
    kept.join()
    until(lambda: server.worker.num_running == 0 and server.worker.num_waiting == 0)
    assert server.worker.batch.scheduler.pool.num_free == server.worker.batch.scheduler.pool.num_blocks
    ((tokens, _),) = generated(engine, tokenizer, "hello", max_new_tokens=40, seed=3)
    assert answers[0].choices[0].token_ids == tokens


GOOD = {"model": "tiny", "prompt": "hi", "max_tokens": 2}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "changes", "status", "word"),
    [
        ("completions", {"model": "other"}, 404, "tiny"),
        ("completions", {"prompt": None}, 400, "prompt"),
        ("completions", {"prompt": []}, 400, "prompt"),
        ("completions", {"prompt": [1.5]}, 400, "prompt"),
        ("completions", {"prompt": [10**6]}, 400, "vocabulary"),
        ("completions", {"prompt": {"a": 1}}, 400, "prompt"),
        ("completions", {"prompt": ""}, 400, "empty"),
        ("completions", {"prompt": "x" * 500}, 400, "max_tokens"),
        ("completions", {"max_tokens": 10**9}, 400, "max_tokens"),
        ("completions", {"max_tokens": -1}, 400, "max_tokens"),
        ("completions", {"max_tokens": "two"}, 400, "max_tokens"),
        ("completions", {"max_tokens": True}, 400, "max_tokens"),
        ("completions", {"temperature": -1}, 400, "temperature"),
        ("completions", {"temperature": "hot"}, 400, "temperature"),
        ("completions", {"top_p": 0}, 400, "top_p"),
        ("completions", {"top_p": 1.5}, 400, "top_p"),
        ("completions", {"n": 0}, 400, "n"),
        ("completions", {"n": 10**6}, 400, "n"),
        ("completions", {"prompt": ["a"] * 20, "n": 100}, 400, "2000 answers"),
        ("completions", {"stop": ""}, 400, "stop"),
        ("completions", {"stop": ["a", ""]}, 400, "stop"),
        ("completions", {"stop": [1]}, 400, "stop"),
        ("completions", {"logprobs": 99}, 400, "logprobs"),
        ("completions", {"best_of": 4}, 400, "best_of"),
        ("completions", {"suffix": "end"}, 400, "suffix"),
        ("completions", {"seed": 2**70}, 400, "seed"),
        ("completions", {"presence_penalty": 3}, 400, "presence_penalty"),
        ("completions", {"logit_bias": {"x": 1}}, 400, "logit_bias"),
        ("completions", {"logit_bias": {"5": 101}}, 400, "logit_bias"),
        ("completions", {"temprature": 1}, 400, "temprature"),
        ("completions", {"n": None, "stop": 5}, 400, "stop"),
        ("completions", {"use_beam_search": True}, 400, "use_beam_search"),
        ("completions", {"structured_outputs": {"xml": "a"}}, 400, "structured_outputs.xml"),
        ("completions", {"guided_whitespace_pattern": " "}, 400, "guided_json"),
        ("chat/completions", {"modalities": ["audio"]}, 400, "modalities"),
        ("chat/completions", {"tool_choice": "required"}, 400, "tool_choice='required'"),
        ("chat/completions", {"tool_choice": {"type": "function", "function": {"name": "f"}}}, 400, "tool_choice='f'"),
        ("chat/completions", {"tool_choice": "sometimes"}, 400, "tool_choice"),
        (
            "chat/completions",
            {"tool_choice": "required", "tools": [{"function": {"name": "f"}}], "guided_regex": "a"},
            400,
            "guided_regex guides",
        ),
        ("chat/completions", {"function_call": {"name": "f"}}, 400, "function_call"),
        ("chat/completions", {"continue_final_message": True, "add_generation_prompt": True}, 400, "exclude"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": "hi"}, 400, "messages"),
        ("chat/completions", {"messages": [{"content": "hi"}]}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
        ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, "template"),
        ("chat/completions", {"top_logprobs": 3}, 400, "logprobs"),
        ("chat/completions", {"response_format": {"type": "tune"}}, 400, "response_format"),
        ("chat/completions", {"response_format": {"type": "json_schema"}}, 400, "json_schema"),
        ("completions", {"guided_choice": []}, 400, "guided_choice"),
        ("completions", {"guided_regex": "("}, 400, "guided_regex"),
        ("completions", {"logit_bias": {"99999": 1}}, 400, "logit_bias"),
    ],
)
def test_a_wrong_field_is_answered_with_its_name_and_the_server_goes_on(server, client, path, changes, status, word):
    body = (GOOD if path == "completions" else CHAT) | changes
    answer = post(f"{server.url}/{path}", json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert word in error["message"] and error["type"] and "code" in error and "param" in error
    assert ask(client, max_tokens=1).choices


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'"text"', b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000, b'{"model": "tiny"}']
)
def test_a_body_that_is_no_request_is_refused(server, content):
    for path in ("completions", "chat/completions"):
        answer = post(f"{server.url}/{path}", content=content, headers=JSON)
        assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_paths_and_methods_that_are_not_there(server):
    assert get(f"{server.url}/nothing").status_code == 404
    assert get(f"{server.url}/completions").status_code == 405
    assert post(f"{server.url}/completions", content=b"x" * (5 * 2**20), headers=JSON).status_code == 413


def test_models_health_and_metrics(server, client):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == ("tiny", LONGEST)
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    base = server.url.removesuffix("/v1")
    assert get(f"{base}/health").json() == {"status": "ok"}
    before = get(f"{base}/metrics").text
    ask(client, max_tokens=5, extra_body={"ignore_eos": True})
    after = get(f"{base}/metrics").text

    def value(text, name):
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} "))

    name = "hybrid_engine_generated_tokens_total"
    assert value(after, name) == value(before, name) + 5
    assert value(after, "hybrid_engine_running_sequences") == 0


def test_metrics_say_what_the_kv_blocks_are_for(tokenizer, engine):
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    config["hybrid_engine"] = {"enabled": True, "max_running": 2, "kv_block_size": 16}
    policy, *_ = hybrid_engine.initialize(model=copy.deepcopy(engine.module), config=config)
    with policy.eval().serving(tokenizer, model_name="tiny") as server:

        def blocks():
            text = get(f"{server.url.removesuffix('/v1')}/metrics").text
            values = dict(line.split() for line in text.splitlines() if line.startswith("hybrid_engine_kv_"))
            used, kept, free = (
                int(float(values[f"hybrid_engine_kv_blocks_{name}"])) for name in ("used", "kept", "free")
            )
            assert used + kept + free == server.worker.batch.scheduler.pool.num_blocks
            assert float(values["hybrid_engine_kv_cache_usage_perc"]) == pytest.approx(used / (used + kept + free))
            return used, kept

        client = server.client()
        assert blocks() == (0, 0)
        long = {"max_tokens": 400, "stream": True, "extra_body": {"ignore_eos": True}}
        with ask(client, prompt="a" * 40, **long) as stream:
            next(iter(stream))
            used, kept = blocks()
            assert used >= 3 and kept == 0
        until(lambda: blocks() == (0, 2))  # the full blocks of the prompt, for one that begins alike
        messages = [{"role": "user", "content": "begin" * 9}]
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=3, extra_body={"session_id": "s"})
        until(lambda: blocks()[0] == 0 and blocks()[1] >= 3)


def test_a_conversation_goes_on_by_its_tokens(server, client, tokenizer):
    session = {"session_id": "talk", "return_token_ids": True}
    messages = [{"role": "user", "content": "begin"}]
    written = []
    for turn in range(3):
        answer = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=9, seed=turn, extra_body=session
        )
        (choice,) = answer.choices
        written.append((choice.prompt_token_ids, choice.token_ids))
        messages += [choice.message.model_dump(), {"role": "user", "content": f"and {turn}"}]
    (trajectory,) = [t for t in server.trajectories() if t.session_id == "talk"]
    assert trajectory.tokens == written[-1][0] + written[-1][1]
    for prompt, tokens in written:  # each answer stands where it was drawn, as it was drawn
        assert trajectory.tokens[: len(prompt) + len(tokens)] == prompt + tokens
        assert trajectory.written[len(prompt) : len(prompt) + len(tokens)] == [True] * len(tokens)
    assert sum(trajectory.written) == sum(len(tokens) for _, tokens in written)
    assert all(lp < 0 for lp, is_drawn in zip(trajectory.logprobs, trajectory.written, strict=True) if is_drawn)
    assert {version for version, drawn in zip(trajectory.versions, trajectory.written, strict=True) if drawn} == {0}
    # What the policy did not write is what the template writes around it.
    text = tokenizer.decode(trajectory.tokens)
    assert text.startswith("<start>user\nbegin<eos>\n<start>assistant\n")
    assert "<eos>\n<start>user\nand 1<eos>\n<start>assistant\n" in text


@pytest.mark.parametrize("options", [{"kv_block_size": 16}, {"max_out_tokens": 512}], ids=["small blocks", "default"])
def test_a_conversation_feeds_only_what_is_new(tokenizer, engine, monkeypatch, options):
    """Where there is room: what was fed in earlier turns is in the workspace; answers are those of a new prefill."""
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    config["hybrid_engine"] = {"enabled": True, "max_running": 2} | options
    policy, *_ = hybrid_engine.initialize(model=copy.deepcopy(engine.module), config=config)
    fed, forward = [], type(policy.generator.model).forward

    def counted(model, batch, *args):
        fed.append((type(batch).__name__, len(batch.tokens)))
        return forward(model, batch, *args)

    monkeypatch.setattr(type(policy.generator.model), "forward", counted)
    with policy.eval().serving(tokenizer, model_name="tiny") as server:
        client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)

        def turns(session, count):
            messages = [{"role": "user", "content": "begin"}]
            for turn in range(count):
                fed.clear()
                answer = client.chat.completions.create(
                    model="tiny", messages=messages, max_tokens=20, seed=turn,
                    extra_body={"session_id": session, "return_token_ids": True},
                )  # fmt: skip
                (choice,) = answer.choices
                messages += [choice.message.model_dump(), {"role": "user", "content": f"and {turn}" + "x" * 70 * turn}]
                yield choice.prompt_token_ids, choice.token_ids, choice.logprobs

        spoken, prefilled, new = [], [], []
        for prompt, tokens, _ in turns("long", 4):
            spoken.append((prompt, tokens))
            prefilled.append(sum(size for kind, size in fed if kind == "PrefillBatch"))
            if len(spoken) > 1:
                num_known = sum(map(len, spoken[-2])) - 1  # the last token was drawn and not fed
                assert sum(size for _, size in fed) == len(prompt) - num_known + len(tokens) - 1
                new.append(len(prompt) - num_known)
        assert prefilled == [len(spoken[0][0]), *new]
        for number in range(12):  # others take the room: the oldest contexts go, nobody waits
            list(turns(f"other {number}", 1))
        assert len(server.worker.batch.scheduler.kept.sequences) > 1
    for turn, (prompt, tokens) in enumerate(spoken):
        ((expected, _),) = generated(engine, tokenizer, prompt, max_new_tokens=20, seed=turn)
        assert tokens == expected


def test_a_conversation_that_was_changed_begins_a_branch(server, client):
    def say(*contents):
        messages = [{"role": "user", "content": "q"}]
        for content in contents:
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "more"}]
        extra = {"session_id": "branches"}
        answer = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=4, seed=len(contents), extra_body=extra
        )
        return answer.choices[0].message.content

    first = say()
    say(first)
    say("something that the policy never said")
    branches = [t for t in server.trajectories() if t.session_id == "branches"]
    assert len(branches) == 2
    assert sum(branches[0].written) > sum(branches[1].written) > 0


def test_a_key_guards_everything_but_health(served, tokenizer):
    with served.serving(tokenizer, model_name="tiny", api_key="secret", max_running=2) as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            answer = post(f"{server.url}/completions", json=GOOD, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        base = server.url.removesuffix("/v1")
        assert get(f"{base}/health").status_code == 200
        assert get(f"{base}/metrics").status_code == 401
        assert openai.OpenAI(base_url=server.url, api_key="secret").models.list().data[0].id == "tiny"


def test_too_many_that_wait_are_told_to_come_again(served, tokenizer):
    with served.serving(tokenizer, model_name="tiny", max_running=1, max_waiting=2, longest=LONGEST) as server:
        long = {"model": "tiny", "prompt": "x", "max_tokens": 150, "ignore_eos": True}
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda _: post(f"{server.url}/completions", json=long), range(12)))
        codes = {answer.status_code for answer in answers}
        assert codes == {200, 429}
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert int(refused.headers["Retry-After"]) >= 1 and refused.json()["error"]["code"] == "overloaded"


def test_the_end_of_serving_waits_for_what_runs(served, tokenizer):
    answers = []
    with served.serving(tokenizer, model_name="tiny", max_running=2, longest=LONGEST) as server:
        long = {"model": "tiny", "prompt": "x", "max_tokens": 150, "ignore_eos": True}
        thread = threading.Thread(target=lambda: answers.append(post(f"{server.url}/completions", json=long)))
        thread.start()
        until(lambda: server.worker.num_running == 1)
    thread.join()
    assert json.loads(answers[0].text)["usage"]["completion_tokens"] == 150
    with pytest.raises(httpx.ConnectError):
        get(f"{server.url}/models")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"host": "0.0.0.0"}, "api_key"),
        ({"api_key": " "}, "api_key"),
        ({"port": -1}, "port"),
        ({"port": 99999}, "port"),
        ({"longest": 10**9}, "longest"),
        ({"longest": 1}, "longest"),
        ({"max_running": 0}, "max_running"),
        ({"max_waiting": 0}, "max_waiting"),
        ({"host": "256.1.1.1", "api_key": "k"}, "host"),
    ],
)
def test_wrong_options_are_refused_before_anything_listens(served, tokenizer, options, word):
    with pytest.raises(ValueError, match=word), served.serving(tokenizer, **options):
        pass
    assert served.generate(torch.tensor([[5, 6]]), max_new_tokens=2).shape == (1, 4)


def test_a_model_without_tokenizer_says_what_to_pass(served):
    with pytest.raises(ValueError, match="tokenizer"), served.serving():
        pass


def test_the_policy_is_served_between_training_steps_and_stays_as_it_was(tokenizer, engine):
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    policy, *_ = hybrid_engine.initialize(
        model=LlamaForCausalLM(engine.module.config), config=config | {"hybrid_engine": {"enabled": True}}
    )
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    stamps = []
    for step in range(2):
        policy.eval()
        before = [parameter.clone() for parameter in policy.module.parameters()]
        with policy.serving(tokenizer, model_name="tiny") as server:
            for refused in (policy.train, policy.step, lambda: policy.generate(ids)):
                with pytest.raises(ValueError, match="serving"):
                    refused()
            client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
            answer = ask(client, extra_body={"return_token_ids": True, "session_id": str(step)})
        (trajectory,) = server.trajectories()
        stamps.append(trajectory.versions[-1])
        assert all(torch.equal(a, b) for a, b in zip(before, policy.module.parameters(), strict=True))
        ((expected, _),) = generated(policy, tokenizer, "hello", max_new_tokens=12, seed=3)
        assert answer.choices[0].token_ids == expected
        policy.train()
        policy.backward(policy(input_ids=ids, labels=ids).loss)
        policy.step()
    assert stamps == [0, 1]


def serve_own_policy(rank, world_size):
    """Each process serves the sharded policy at a port of its own, trains together, and serves again."""
    tokenizer = build_chat_tokenizer()
    config = {"train_batch_size": world_size, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    config |= {"zero_optimization": {"stage": 3}, "hybrid_engine": {"enabled": True}}
    policy, *_ = hybrid_engine.initialize(model=build(tokenizer).module, config=config)
    answers = []
    for step in range(2):
        with policy.eval().serving(tokenizer, model_name="tiny") as server:
            client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
            # One has nothing to do while the other answers.
            for _ in range(3 * rank + 1):
                extra = {"return_token_ids": True, "session_id": str(step)}
                answers.append(ask(client, extra_body=extra).choices[0].token_ids)
            assert server.trajectories()[-1].versions[-1] == step
        options = {"max_new_tokens": 4 + 9 * rank, "do_sample": False}
        with policy.generate_async(torch.tensor([[5, 6 + rank]]), **options) as found:
            answers.append(next(iter(found)).answers[0].tokens)
        policy.train()
        ids = torch.tensor([[5, 6, 7]])
        policy.backward(policy(input_ids=ids, labels=ids).loss)
        policy.step()
    answer_from_streamed_layers(policy, tokenizer, rank)
    return answers


def answer_from_streamed_layers(policy, tokenizer, rank):
    """Layers are gathered one by one; only one process is asked, and the other leaves at once."""
    from hybrid_engine.generation import output as rollout_output

    with policy.eval().serving(tokenizer, model_name="tiny") as server:
        expected = ask(server.client()).choices[0].token_ids
        echoed = ask(server.client(), echo=True, logprobs=1, max_tokens=0).choices[0].logprobs.token_logprobs[1:]
    rollout_output.MAX_LOGITS = 2 * len(tokenizer)
    policy.generator.gatherer.is_crowded = lambda usable_bytes: True  # as where the whole weights do not fit
    with policy.serving(tokenizer, model_name="tiny", longest=60) as server:
        assert policy.generator.gatherer.is_streamed
        if rank == 1:
            return
        client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
        for max_tokens in (0, 3):  # over several passes, and beside answers
            with ThreadPoolExecutor(3) as pool:
                beside = pool.submit(ask, client)
                scored = list(pool.map(lambda n: ask(client, echo=True, logprobs=1, max_tokens=n), [max_tokens] * 2))
                assert beside.result().choices[0].token_ids == expected
            for choice in (answer.choices[0] for answer in scored):
                assert choice.text.startswith("hello") and choice.token_ids == expected[:max_tokens]
                torch.testing.assert_close(choice.logprobs.token_logprobs[1:5], echoed, rtol=0, atol=1e-4)
        assert ask(client, prompt="h", echo=True, logprobs=0, max_tokens=0).choices[0].logprobs.token_logprobs == [None]
        with ThreadPoolExecutor(3) as pool:
            answers = [answer.choices[0].token_ids for answer in pool.map(lambda _: ask(client), range(3))]
        assert answers == [expected] * 3


def test_two_processes_serve_the_policy_that_they_share(tokenizer, engine):
    first, second = run_distributed(serve_own_policy, world_size=2)
    ((expected, _),) = generated(engine, tokenizer, "hello", max_new_tokens=12, seed=3)
    assert first[0] == expected and second[:4] == [expected] * 4
    assert first[2] != expected and second[5:9] == [first[2]] * 4  # after a step, the same on both
    assert len(first[1]) == 4 < len(second[4])  # of prompts and lengths of their own
