"""The server against clients that mean it harm, and a model that fails: everybody is told, and nothing hangs."""

import json
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from hybrid_engine.generation import guides
from hybrid_engine.recipes.serve import told_to_end
from hybrid_engine.serving import request_parsing, sessions
from hybrid_engine.serving.protocol import ChatRequest, CompletionRequest
from hybrid_engine.serving.web import app, connections, streaming
from hybrid_engine.serving.web import server as server_module
from tests.serving.test_server import build, until
from tests.support.chat import build_chat_tokenizer

get = partial(httpx.get, timeout=300)
send = partial(httpx.post, timeout=300)

JSON = {"Content-Type": "application/json"}
HALF = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b'Content-Length: 100\r\n\r\n{"model":'
)
GOOD = {"model": "tiny", "prompt": "hi", "max_tokens": 2}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
GUIDED = GOOD | {"guided_choice": ["yes", "no"]}
TWICE = CHAT | {"session_id": "twice"}
LONG = {"model": "tiny", "prompt": "x", "max_tokens": 150, "ignore_eos": True}
NASTY = [
    None, True, 0, -1, 1, 1e-300, 1e300, 2**31, 2**63, 10**30, -(2**63), 0.5, "", "x", "1e5", "\x00", "\ud800", [],
    [None], [[]], [-1], [2**63], [""], {}, {"a": 1}, {"1": 1e308}, {"9" * 5000: 1}, [{}], [[1], "a"], ["a"] * 50,
    {"type": "json"},
]  # fmt: skip

DEEP = [f'r{rule}: "a" | "b" r{rule + 1}' for rule in range(9000)]


@pytest.fixture(scope="module")
def tokenizer():
    return build_chat_tokenizer()


@pytest.fixture(scope="module")
def server(tokenizer):
    with build(tokenizer).serving(tokenizer, model_name="tiny", longest=160, max_running=4) as server:
        yield server


@pytest.fixture
def fresh(tokenizer):
    """Opens a server of its own; `options` are those of serving()."""
    engine = build(tokenizer)
    return lambda **options: engine.serving(tokenizer, **({"model_name": "tiny", "longest": 160} | options))


def post(server, body, path="completions", **options):
    return send(f"{server.url}/{path}", json=body, **options)


def connect(server):
    place = urlsplit(server.url)
    return socket.create_connection((place.hostname, place.port), timeout=300)


def read_all(connection):
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def assert_well(server):
    answer = post(server, GOOD)
    assert answer.status_code == 200 and answer.json()["choices"], answer.text
    assert get(server.url.removesuffix("/v1") + "/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "good", "fields"),
    [
        ("completions", GOOD, CompletionRequest.model_fields),
        ("chat/completions", CHAT, set(ChatRequest.model_fields) - set(CompletionRequest.model_fields)),
    ],
)
def test_every_field_with_every_kind_of_value_is_answered_or_refused(server, path, good, fields):
    def try_one(case):
        name, value = case
        body = json.dumps(good | {name: value}).encode()
        answer = web.post(f"{server.url}/{path}", content=body)
        streams = "event-stream" in answer.headers["content-type"]
        what = f"{name}={str(value)[:40]}: {answer.status_code} {answer.text[:200]}"
        # What cannot be computed at such a temperature or penalty is the request's own failure.
        may_be_infinite = name in ("temperature", "repetition_penalty") and "generation_failed" in answer.text
        assert answer.status_code in (200, 400, 404) or may_be_infinite, what
        assert streams or "choices" in answer.json() or answer.json()["error"]["message"], what

    with httpx.Client(timeout=300, headers=JSON) as web, ThreadPoolExecutor(8) as pool:
        list(pool.map(try_one, [(name, value) for name in fields for value in NASTY]))
    assert_well(server)
    until(lambda: server.worker.num_running == server.worker.num_waiting == 0)


def test_a_client_cannot_bring_a_template_of_its_own(server):
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    answer = post(server, CHAT | {"chat_template_kwargs": {"chat_template": loops}}, "chat/completions")
    assert answer.status_code == 400 and "chat_template" in answer.json()["error"]["message"]


def test_half_of_a_pair_of_surrogates_is_no_text(server):
    for body in ({"prompt": "\ud800"}, {"stop": "\udfff"}, {"model": "\ud800"}):
        answer = send(f"{server.url}/completions", content=json.dumps(GOOD | body), headers=JSON)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"
    assert post(server, GOOD | {"prompt": "\U0001f600"}).status_code == 200


def test_an_error_of_the_servers_own_is_told_in_the_same_words(server, monkeypatch):
    monkeypatch.setattr(app, "read_completion", lambda *_: 1 / 0)
    answer = post(server, GOOD)
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"


def test_half_a_body_is_not_waited_for_without_end(server, monkeypatch):
    monkeypatch.setattr(request_parsing, "SECONDS_FOR_BODY", 0.2)
    with connect(server) as slow:
        slow.sendall(HALF)
        found = read_all(slow)  # returns when the server has closed
    assert b" 408 " in found.splitlines()[0] and b"body_timeout" in found


@pytest.mark.parametrize("start", [b"", b"GET /health HTTP/1.1\r\nX-Slow: ", b"POST /v1/completions"])
def test_a_request_that_does_not_begin_is_not_waited_for(server, monkeypatch, start):
    monkeypatch.setattr(connections, "SECONDS_FOR_HEADERS", 0.2)
    with connect(server) as slow:
        slow.sendall(start)
        assert read_all(slow) == b""


def test_a_connection_is_left_open_for_longer_than_clients_keep_it(server, monkeypatch):
    """A client may send its next request at the moment at which the server closes, and lose it."""
    monkeypatch.setattr(connections, "SECONDS_FOR_HEADERS", 0.1)
    clients_keep = httpx.Limits().keepalive_expiry
    assert min(connections.SECONDS_BETWEEN_REQUESTS, server._server.config.timeout_keep_alive) > 10 * clients_keep
    with connect(server) as connection:
        for _ in range(2):
            connection.settimeout(300)
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(4096)
            assert b"200 OK" in answer
            connection.settimeout(0.5)
            with pytest.raises(TimeoutError):
                connection.recv(1)


def test_headers_without_end_are_refused(server):
    with connect(server) as flood:
        flood.sendall(b"GET /health HTTP/1.1\r\n")
        with pytest.raises(OSError):  # closed while we write
            for number in range(100_000):
                flood.sendall(b"X-%d: %s\r\n" % (number, b"y" * 500))
    assert_well(server)


def test_more_connections_than_may_be_are_closed_and_the_others_answered(server, monkeypatch):
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 100)
    held = [connect(server) for _ in range(80)]
    assert_well(server)
    more = [connect(server) for _ in range(60)]
    closed = 0
    for connection in more[40:]:
        try:
            closed += connection.recv(1) == b""
        except ConnectionError:
            closed += 1
    assert closed == 20
    for connection in held + more:
        connection.close()
    until(lambda: len(server._server.server_state.connections) < 50)
    assert_well(server)


def test_bodies_that_together_are_too_large_are_put_off(server, monkeypatch):
    monkeypatch.setattr(request_parsing, "MAX_BODIES_BYTES", 1000)
    answer = post(server, GOOD | {"prompt": "x" * 2000})
    assert answer.status_code == 429 and answer.headers["Retry-After"] == "1"
    assert_well(server)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_goes_away_while_it_waits_leaves_the_line(fresh, is_streamed):
    with fresh(max_running=1) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, server, LONG)
        until(lambda: server.worker.num_running == 1)
        turn, may_go_on = server.worker.batch.turn, threading.Event()
        server.worker.batch.turn = lambda: may_go_on.wait(300) and turn()  # or the first one may end before
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/completions", json=LONG | {"stream": is_streamed}, timeout=0.05)
        may_go_on.set()
        assert first.result().status_code == 200
        until(lambda: server.worker.num_running == server.worker.num_waiting == 0)
        drawn = "hybrid_engine_generated_tokens_total 150"
        assert drawn in get(server.url.removesuffix("/v1") + "/metrics").text


def test_a_model_that_fails_in_a_turn_tells_everybody(fresh):
    serving = fresh(max_running=2)
    server = serving.__enter__()
    turn = server.worker.batch.turn
    fails, begun = threading.Event(), []

    def fail_later():
        begun.append(turn)
        if len(begun) > 3:
            fails.wait()
            raise RuntimeError("out of memory")
        return turn()

    server.worker.batch.turn = fail_later
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    stream = client.completions.create(**{k: v for k, v in LONG.items() if k != "ignore_eos"}, stream=True)
    next(iter(stream))
    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(post, server, LONG) for _ in range(6)]
        until(lambda: server.worker.num_running + server.worker.num_waiting == 7)
        fails.set()
        for answer in waiting:
            answer = answer.result()
            assert answer.status_code == 503 and "out of memory" in answer.json()["error"]["message"]
    with pytest.raises(openai.APIError, match="out of memory"):
        list(stream)
    health = get(server.url.removesuffix("/v1") + "/health")
    assert health.status_code == 503 and "out of memory" in health.text
    assert post(server, GOOD).json()["error"]["code"] == "model_failed"
    server.wait(threading.Event())  # returns: there is nothing to wait for
    with pytest.raises(RuntimeError, match="out of memory"):
        serving.__exit__(None, None, None)


def test_a_model_that_fails_at_a_prompt_tells_whoever_sent_it(fresh):
    serving = fresh()
    server = serving.__enter__()

    def fail(sequences):
        raise MemoryError("no room to score")

    server.worker.batch.add = fail
    answer = post(server, GOOD | {"echo": True, "logprobs": 1})
    assert answer.status_code == 503 and "no room" in answer.json()["error"]["message"]
    with pytest.raises(MemoryError):
        serving.__exit__(None, None, None)


@pytest.mark.parametrize("place", ["__call__", "is_complete", "__init__"])
def test_an_error_of_one_requests_own_rule_ends_that_request_alone(server, monkeypatch, place):
    pytest.importorskip("llguidance", reason="the extra 'guided' is not installed")

    def fail(*_):
        raise RuntimeError("the grammar has no end")

    long = LONG | {"seed": 1}
    beside = post(server, long).json()["choices"]
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(post, server, long)
        until(lambda: server.worker.num_running == 1)
        with monkeypatch.context() as patch:
            patch.setattr(guides.GuidedTokens, place, fail)
            answer = post(server, GOOD | {"guided_choice": ["yes", "no"]})
        assert answer.status_code == 500 and "the grammar has no end" in answer.json()["error"]["message"]
        assert other.result().json()["choices"] == beside
    assert_well(server)


def test_a_guide_that_is_given_up_is_the_clients_error(server):
    pytest.importorskip("llguidance", reason="the extra 'guided' is not installed")
    grammar = "start: " + " | ".join(f'"word{number}"' for number in range(3000))
    answer = post(server, GOOD | {"guided_grammar": grammar})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "guide_failed"
    assert "guided_grammar gave up" in answer.json()["error"]["message"]
    assert_well(server)


@pytest.mark.parametrize(
    ("place", "name", "path", "body"),
    [
        (request_parsing, "read_json", "completions", GOOD),
        (app, "read_completion", "completions", GOOD),
        (app, "chat_tokens", "chat/completions", CHAT),
        (app, "read_tokens", "../tokenize", {"model": "tiny", "prompt": "hi"}),
        (app, "compile_guide_of", "completions", GUIDED),
        (request_parsing, "read_options", "completions", GUIDED),
        (request_parsing, "compile_guide", "completions", GUIDED),
        (sessions, "count_bytes", "chat/completions", CHAT | {"session_id": "counted"}),
        (sessions, "_goes_on_from", "chat/completions", TWICE),
        (sessions.Sessions, "record", "chat/completions", CHAT | {"session_id": "recorded"}),
        (app.CompletionWriter, "whole", "completions", GOOD),
        (app.CompletionWriter, "opening", "completions", GOOD | {"stream": True}),
        (streaming.WholeResponse, "render", "completions", GOOD),
    ],
)
def test_others_are_answered_while_a_request_is_read_or_written(server, monkeypatch, place, name, path, body):
    if "guided_choice" in body:
        pytest.importorskip("llguidance", reason="the extra 'guided' is not installed")
    if body is TWICE:  # there is something to compare with
        assert post(server, body, path).status_code == 200
    real, begun, may_go_on = getattr(place, name), threading.Event(), threading.Event()

    def wait(*args):
        begun.set()
        assert may_go_on.wait(300)
        return real(*args)

    with ThreadPoolExecutor(1) as pool:
        try:
            with monkeypatch.context() as patch:
                patch.setattr(place, name, wait)
                asked = pool.submit(post, server, body, path)
                assert begun.wait(300)
                assert get(f"{server.url}/../health").json() == {"status": "ok"}
                assert not asked.done()
        finally:
            may_go_on.set()
        assert asked.result().status_code == 200


@pytest.mark.parametrize(("part", "status", "told"), [
    (b"[]", 400, "lists and objects"), (b"1", 400, "values"), (b'"[{,"', 400, "bad_words"),
])  # fmt: skip
def test_a_body_of_very_many_parts_is_refused_before_it_is_read(server, part, status, told):
    count = request_parsing.MAX_VALUES + 2 if part == b"1" else request_parsing.MAX_LISTS + 2
    body = b'{"model": "tiny", "prompt": "hi", "bad_words": [' + b",".join([part] * count) + b"]}"
    answer = send(f"{server.url}/completions", content=body, headers=JSON)
    assert answer.status_code == status and told in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("guide", "told"),
    [
        ({"guided_json": {"type": "integer", "multipleOf": 99999999}}, "longer than 1 s"),
        ({"guided_grammar": "\n".join(["start: r0", *DEEP, 'r9000: "c"'])}, "depth or size"),
    ],
)  # fmt: skip
def test_a_guide_whose_compilation_does_not_end_or_ends_the_process_is_refused(server, monkeypatch, guide, told):
    """The first would take hours after it has been read, the second passes the stack of the library."""
    pytest.importorskip("llguidance", reason="the extra 'guided' is not installed")
    monkeypatch.setattr(guides, "SECONDS_TO_COMPILE", 1 if "guided_json" in guide else 60)
    answer = post(server, GOOD | guide)
    assert answer.status_code == 400 and told in answer.json()["error"]["message"]
    assert_well(server)


def test_a_guide_is_compiled_once_for_all_answers_of_a_request_and_not_in_a_turn(server, monkeypatch):
    llguidance = pytest.importorskip("llguidance", reason="the extra 'guided' is not installed")
    threads, real = [], llguidance.LLMatcher

    class Counting:
        grammar_from_regex = real.grammar_from_regex

        def __new__(cls, *args, **options):
            threads.append(threading.current_thread().name)
            return real(*args, **options)

    monkeypatch.setattr(llguidance, "LLMatcher", Counting)
    answer = post(server, GOOD | {"prompt": ["hi", "hello"], "n": 3, "guided_choice": ["yes", "not so"]})
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 6
    assert len(threads) == 1 and threads[0].startswith("hybrid-engine-guide")


def test_the_tokenizer_is_read_for_guides_before_anybody_asks_and_never_again(server, monkeypatch):
    """Nothing else of Python's runs meanwhile, which takes half a second and more."""
    library = pytest.importorskip("llguidance", reason="the extra 'guided' is not installed")

    def read_again(*args, **options):
        raise AssertionError("the tokenizer is read again")

    monkeypatch.setattr(library, "LLTokenizer", read_again)
    for ends in ([], [5], [6, 7]):
        answer = post(server, GOOD | {"guided_choice": ["yes", "no"], "stop_token_ids": ends, "max_tokens": 20})
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"] in ("yes", "no")


def test_the_vocabulary_is_read_before_anybody_asks_and_never_again(fresh, monkeypatch):
    """Nothing else of Python's runs meanwhile, which takes 0.2 s for 150,000 tokens."""

    def read_again(*args, **options):
        raise AssertionError("the vocabulary is read again")

    with fresh() as server, monkeypatch.context() as patch:
        patch.setattr(type(server.app.model.tokenizer), "get_vocab", read_again)
        for path, body in (("completions", GOOD), ("chat/completions", CHAT), ("completions", GOOD | {"logprobs": 2})):
            assert post(server, body, path).status_code == 200


def test_the_end_does_not_wait_without_end(fresh, monkeypatch):
    """What takes too long is told; half a request keeps nothing."""
    monkeypatch.setattr(server_module, "SECONDS_TO_ANSWER", 1)
    with fresh(finish_seconds=0.3) as server:
        turn = server.worker.batch.turn
        server.worker.batch.turn = lambda: (time.sleep(0.05), turn())[1]
        half = connect(server)
        half.sendall(HALF)
        pool = ThreadPoolExecutor(1)
        long = pool.submit(post, server, LONG)
        until(lambda: server.worker.num_running == 1)
    assert long.result().status_code == 503 and long.result().json()["error"]["code"] == "unavailable"
    half.close()


def test_a_second_signal_of_either_kind_ends_at_once():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            ending = told_to_end()
            assert not ending.is_set()
            signal.raise_signal(number)
            assert ending.is_set()
            assert [signal.getsignal(each) for each in before] == [signal.SIG_DFL] * 2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
