"""What a server keeps is counted, whoever asks: conversations in bytes, clients that do not read, the end in time."""

import gc
import tracemalloc
import weakref
from functools import partial

import httpx
import pytest
from chat import build_chat_tokenizer
from test_serving import build, until

from hybrid_engine.serving import asked, sessions

send = partial(httpx.post, timeout=300)
JUNK = {"role": "user", "content": "hi", "note": "x" * 200_000}


@pytest.fixture(scope="module")
def tokenizer():
    return build_chat_tokenizer()


@pytest.fixture(scope="module")
def opened(tokenizer):
    """Opens servers of one engine, one at a time."""
    engine = build(tokenizer)
    return lambda **options: engine.serving(tokenizer, **({"model_name": "tiny", "longest": 160} | options))


def chat(server, session, message=JUNK, **more):
    body = {"model": "tiny", "messages": [message], "max_tokens": 2, "session_id": session}
    return send(f"{server.url}/chat/completions", json=body | more)


def test_fields_that_no_template_reads_are_counted_and_the_oldest_are_forgotten(opened):
    with opened(max_session_bytes=1_000_000) as server:
        for number in range(7):
            assert chat(server, str(number)).status_code == 200
        assert [each.session_id for each in server.trajectories()] == ["3", "4", "5", "6"]
        refused = chat(server, "6", {"role": "user", "content": "a", "note": "x" * 900_000})
        assert refused.status_code == 400 and "begin another session" in refused.json()["error"]["message"]


def test_values_that_are_small_as_text_and_large_in_memory_are_counted(opened):
    with opened(max_session_bytes=3_000_000) as server:
        for kind, count in (({}, 60_000), ([], 60_000), ({"a": None}, 20_000)):
            answer = chat(server, "s", JUNK | {"note": [kind] * count})
            assert answer.status_code == 400 and answer.json()["error"]["code"] == "session_too_long", kind
        answer = chat(server, "s", JUNK | {"note": [0] * 100_000})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "too_many_values"
        assert chat(server, None, JUNK | {"note": [0] * 100_000}).status_code == 200  # nothing is remembered
        assert server.trajectories() == []


def test_what_is_counted_is_no_less_than_what_python_says_it_holds(opened):
    with opened() as server:
        asks = [{}, {"n": 8, "message": JUNK}, {"message": JUNK | {"note": [{"a": [1.5]}] * 5000}}]
        for ask in asks * 3:
            chat(server, "warm", **ask)
        tracemalloc.start()
        try:
            for place, ask in enumerate(asks):
                gc.collect()
                before, counted = tracemalloc.get_traced_memory()[0], server.sessions._size.num_bytes
                for number in range(10):
                    assert chat(server, f"{place}-{number}", **ask).status_code == 200
                until(lambda: server.worker.num_running == 0)
                gc.collect()
                held = tracemalloc.get_traced_memory()[0] - before
                assert 0 < held <= server.sessions._size.num_bytes - counted + 20_000, ask
        finally:
            tracemalloc.stop()


def test_a_finished_answer_lets_its_options_and_matcher_go(opened, monkeypatch):
    pytest.importorskip("llguidance", reason="the extra 'guided' is not installed")
    made = []

    def read_options(*given):
        options = original(*given)
        made.append(weakref.ref(options))
        return options

    original = asked.read_options
    monkeypatch.setattr(asked, "read_options", read_options)
    with opened() as server:
        more = {"guided_regex": "[a-z]{1,5}", "logit_bias": {str(place): 1 for place in range(50)}}
        for session in "ab":
            assert chat(server, session, {"role": "user", "content": "hi"}, **more).status_code == 200
        until(lambda: gc.collect() >= 0 and not any(ref() for ref in made))
        kept = server.trajectories()
        assert len(made) == 2 and all(each.sequence.processors is None for each in kept)


def test_an_answer_that_was_cut_off_keeps_no_sequence(opened):
    """A stop string ends the answer, and the batch draws on until it hears of it."""
    with opened() as server:
        body = {
            "model": "tiny",
            "prompt": "hi",
            "max_tokens": 50,
            "ignore_eos": True,
            "temperature": 0,
            "session_id": "s",
        }
        text = send(f"{server.url}/completions", json=body).json()["choices"][0]["text"]
        stopped = send(f"{server.url}/completions", json=body | {"stop": text[3:6], "session_id": "t"}).json()
        assert stopped["choices"][0]["finish_reason"] == "stop"
        whole, cut = server.trajectories()
        assert whole.sequence is not None and cut.sequence is None


def test_the_sizes_of_forgotten_conversations_are_taken_off():
    kept = sessions.Sessions(None, 0, max_sessions=2)
    for number in range(5):
        choice = sessions.Choice(0, [1, 2], None, None, "", [3], [-1.0])
        kept.record(sessions.Session(str(number)), None, choice, [])
    assert kept._size == sessions.size_of(2, 6, 0)
