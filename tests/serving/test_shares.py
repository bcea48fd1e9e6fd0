"""Clients with keys of their own share rows and the line: one that sends much keeps no other one waiting."""

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from hybrid_engine.serving.web import app
from tests.serving.test_server import build, until
from tests.support.chat import build_chat_tokenizer

LONG = {"model": "tiny", "prompt": "hi", "max_tokens": 6, "ignore_eos": True, "seed": 3, "return_token_ids": True}
SHORT = {"model": "tiny", "prompt": "ho", "max_tokens": 3, "ignore_eos": True, "seed": 4, "return_token_ids": True}


@pytest.fixture
def opened(tmp_path):
    """Opens a server with the keys of a, b and c, in which four answers run at once."""
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_text("a key-a\nb key-b\nc key-c\n")
    tokenizer = build_chat_tokenizer()
    engine = build(tokenizer)
    return lambda **options: engine.serving(
        tokenizer, model_name="tiny", longest=160, max_running=4, api_key_file=file, **options
    )


def send(server, key, body, timeout=300):
    headers = {"Authorization": f"Bearer key-{key}"}
    return httpx.post(f"{server.url}/completions", json=body, headers=headers, timeout=timeout)


def tokens_of(answer):
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


def test_the_one_request_of_a_key_starts_before_the_rest_of_anothers_64_and_no_answer_changes(opened):
    with opened() as server, ThreadPoolExecutor(2) as pool:
        alone = [tokens_of(send(server, "c", body)) for body in (LONG | {"n": 64}, SHORT)]
        turn, tell, may_go_on, begun = server.worker.batch.turn, server.worker._listener, threading.Event(), {}
        server.worker._listener = lambda progress: (
            begun.update((each.sequence, None) for each in progress) or tell(progress)
        )
        server.worker.batch.turn = lambda: (not begun or may_go_on.wait(300)) and turn()
        many = pool.submit(send, server, "a", LONG | {"n": 64})
        until(lambda: len(begun) == 4)
        one = pool.submit(send, server, "b", SHORT)
        until(lambda: server.worker.num_waiting == 61)
        may_go_on.set()
        assert [tokens_of(many.result(300)), tokens_of(one.result(300))] == alone
    assert [sequence.share for sequence in begun] == ["a"] * 4 + ["b"] + ["a"] * 60


def test_a_full_line_has_room_for_the_part_of_another_key(opened):
    with opened(max_waiting=40) as server, ThreadPoolExecutor(4) as pool:
        turn, may_go_on = server.worker.batch.turn, threading.Event()
        server.worker.batch.turn = lambda: may_go_on.wait(300) and turn()
        held = [pool.submit(send, server, "a", SHORT | {"n": 40})]
        until(lambda: server.worker.num_waiting == 40)
        assert send(server, "a", SHORT).status_code == 429
        assert send(server, "b", SHORT | {"n": 21}).status_code == 429
        held.append(pool.submit(send, server, "b", SHORT | {"n": 20}))
        until(lambda: server.worker.num_waiting == 60)
        assert send(server, "b", SHORT).status_code == 429
        held.append(pool.submit(send, server, "c", SHORT | {"n": 13}))
        until(lambda: server.worker.num_waiting == 73)
        may_go_on.set()
        assert [len(tokens_of(each.result(300))) for each in held] == [40, 20, 13]
        until(lambda: server.worker.num_waiting == 0)


def test_the_guide_of_a_key_does_not_wait_for_those_of_another(opened, monkeypatch):
    pytest.importorskip("llguidance", reason="the extra 'guided' is not installed")
    real, begun, may_go_on = app.compile_guide_of, [], threading.Event()

    def compile_slowly(body, model):
        begun.append(body.guided_choice[0])
        if body.guided_choice[0] != "quick":
            assert may_go_on.wait(300)
        return real(body, model)

    monkeypatch.setattr(app, "compile_guide_of", compile_slowly)
    with opened(max_waiting=3) as server, ThreadPoolExecutor(4) as pool:
        slow = [pool.submit(send, server, "a", SHORT | {"guided_choice": [f"slow {n}"]}) for n in range(3)]
        until(lambda: begun and server.app._guides._num_waiting["a"] == 3)
        assert send(server, "a", SHORT | {"guided_choice": ["one more"]}).status_code == 429
        assert tokens_of(send(server, "b", SHORT | {"guided_choice": ["quick"], "max_tokens": 20}))
        assert tokens_of(send(server, "a", SHORT))
        assert len(begun) == 2  # one of a key at a time
        may_go_on.set()
        assert all(tokens_of(each.result(300)) for each in slow)
        assert server.app._guides._num_waiting.total() == 0


def test_a_guide_of_a_client_that_left_has_no_turn(opened, monkeypatch):
    pytest.importorskip("llguidance", reason="the extra 'guided' is not installed")
    real, begun, may_go_on = app.compile_guide_of, [], threading.Event()

    def compile_slowly(body, model):
        begun.append(body.prompt)
        assert may_go_on.wait(300)
        return real(body, model)

    monkeypatch.setattr(app, "compile_guide_of", compile_slowly)
    guided = SHORT | {"guided_choice": ["yes"], "max_tokens": 20}
    with opened() as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(send, server, "a", guided)
        until(lambda: begun)
        with pytest.raises(httpx.ReadTimeout):
            send(server, "a", guided | {"prompt": "left"}, timeout=1)
        until(lambda: server.app._guides._num_waiting["a"] == 1)
        may_go_on.set()
        assert tokens_of(first.result(300)) and begun == ["ho"]
