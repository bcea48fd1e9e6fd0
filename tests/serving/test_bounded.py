"""What a server keeps is counted, whoever asks: conversations in bytes, clients that do not read, the end in time."""

import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import httpx
import pytest

from hybrid_engine.recipes import serve
from hybrid_engine.serving import request_parsing, sessions
from hybrid_engine.serving.web import connections
from hybrid_engine.serving.web import server as server_module
from tests.serving.test_hostile import GOOD, HALF, LONG, assert_well, connect, read_all
from tests.serving.test_server import build, until
from tests.support.chat import build_chat_tokenizer

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
        assert refused.status_code == 400 and "start another session" in refused.json()["error"]["message"]


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

    original = request_parsing.read_options
    monkeypatch.setattr(request_parsing, "read_options", read_options)
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


def test_a_client_that_does_not_read_is_dropped_and_its_answer_with_it(opened):
    with opened(stall_seconds=0.2) as server:
        body = {"prompt": list(range(3, 153)), "n": 60, "max_tokens": 1, "echo": True, "logprobs": 20, "model": "tiny"}
        body = json.dumps(body).encode()
        held = [socket.socket() for _ in range(2)]
        for client in held:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", server.port))
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        # Both are answered: the first may be dropped before the server has even accepted the other one.
        answered = b'requests_total{path="/v1/completions",status="200"} 2.0'
        until(lambda: answered in httpx.get(f"http://127.0.0.1:{server.port}/metrics", timeout=300).content)
        until(lambda: not server._server.server_state.connections)
        for client in held:
            begin = client.recv(12)
            with pytest.raises(ConnectionResetError):  # what was left was thrown away, the system's part too
                read_all(client)
            assert begin == b"HTTP/1.1 200"
            client.close()
        assert_well(server)


class Transport:
    """A transport with `left` bytes that the client has not taken."""

    left, is_dropped = 0, False

    def get_write_buffer_size(self):
        return self.left

    def abort(self):
        self.is_dropped = True

    def get_extra_info(self, name):
        return SimpleNamespace(setsockopt=lambda *option: None)


@pytest.mark.parametrize(
    ("is_paused", "is_complete", "steps", "is_dropped"),
    [
        (True, False, [100_000, 100_000], True),
        (True, False, [100_000, 99_000], True),  # less than MIN_TAKEN
        (True, False, [100_000, 90_000, 80_000, 70_000], False),
        (True, False, [100_000, "resumed", 100_000, 90_000], False),  # it took all, and more was written
        (True, False, [100_000, "resumed", 100_000, 100_000, 100_000], True),
        (True, False, [100_000, "next", 100_000], False),  # of another request
        (False, False, [1000, 2000, 3000], False),  # a stream to which something is still written
        (False, True, [1000, 1000], True),  # the end of an answer, with room for more
        (False, True, [1000, 0, 1000, 0], False),
    ],
)
def test_a_client_that_takes_some_of_its_answer_is_waited_for(is_paused, is_complete, steps, is_dropped):
    connection = object.__new__(connections.BoundedConnection)
    connection.transport, connection.loop = Transport(), SimpleNamespace(call_later=lambda *call: call)
    connection.flow = SimpleNamespace(write_paused=is_paused, resume_writing=lambda: None)
    connection.cycle = SimpleNamespace(response_complete=is_complete)
    connection._watch_reader(None, float("inf"))
    for step in steps:
        if step == "resumed":
            connection.resume_writing()
        elif step == "next":
            connection.cycle = SimpleNamespace(response_complete=is_complete)
        else:
            connection.transport.left = step
            _, check, *given = connection._reader_timer
            check(*given)
    assert connection.transport.is_dropped == is_dropped


def test_connections_leave_descriptors_for_the_rest_and_the_log_says_so(opened, monkeypatch, caplog):
    with opened() as server:
        assert_well(server)
        monkeypatch.setattr(connections, "SPARE_DESCRIPTORS", 8)
        monkeypatch.setattr(connections._CROWD, "last_line", -float("inf"))
        free = os.dup(0)
        os.close(free)
        monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (free + 8 + 40, free + 8 + 40))
        with caplog.at_level(logging.WARNING):
            held = [connect(server) for _ in range(40)]  # two descriptors each, the client's is in this process too
            until(lambda: "which is the limit" in caplog.text)
        assert caplog.text.count("which is the limit") == 1
        until(lambda: 0 < len(server._server.server_state.connections) < 40)
        for client in held:
            client.close()
        until(lambda: not server._server.server_state.connections)
        assert_well(server)


def test_the_end_tells_everybody_in_the_middle_of_a_turn(opened, monkeypatch):
    """Also whoever has sent half a request, in the protocol's words, while the model is still busy."""
    monkeypatch.setattr(server_module, "SECONDS_TO_ANSWER", 1)
    with opened(finish_seconds=0.2) as server, ThreadPoolExecutor(4) as pool:
        turn, may_go_on = server.worker.batch.turn, threading.Event()
        begun = threading.Event()
        server.worker.batch.turn = lambda: begun.set() or (may_go_on.wait(300) and turn())
        asks = [LONG, LONG | {"stream": True}, GOOD | {"n": 3}]
        answers = [pool.submit(send, f"{server.url}/completions", json=ask) for ask in asks]
        until(lambda: begun.is_set() and server.worker.num_waiting + server.worker.num_running >= 1)
        until(lambda: len(server.router._inboxes) == 5)
        with connect(server) as half:
            half.sendall(HALF)
            until(lambda: len(server._server.server_state.connections) == 4)
            closing = pool.submit(server.close)
            told = [answer.result(200) for answer in answers]
            rest = read_all(half)
        assert not closing.done()  # the turn has not ended
        may_go_on.set()
        closing.result(200)
    for answer in told:
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "unavailable"
    assert b" 503 " in rest.splitlines()[0] and json.loads(rest.splitlines()[-1])["error"]["code"] == "unavailable"


def test_the_process_ends_though_a_pass_of_the_model_does_not(monkeypatch):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    codes, ended = [], threading.Event()
    monkeypatch.setattr(serve.os, "_exit", lambda code: (codes.append(code), ended.set()))
    try:
        ending = serve.told_to_end(0.01)
        assert not ended.wait(0.1)
        signal.raise_signal(signal.SIGTERM)
        assert ending.is_set() and ended.wait(200) and codes == [0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("error", [BrokenPipeError(32, "closed"), OSError(28, "no space left")])
def test_a_log_that_cannot_be_written_ends_nothing(monkeypatch, error):
    def write(_):
        raise error

    closed = os.open(os.devnull, os.O_WRONLY)
    told = {"flush": lambda: None, "isatty": lambda: False, "encoding": "utf-8", "fileno": lambda: closed}
    broken = SimpleNamespace(write=write, **told)
    monkeypatch.setattr(sys, "stdout", broken)
    serve.tell("a line")
    os.close(closed)
