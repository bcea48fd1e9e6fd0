"""Teachers at an address: the project's own server, and a stub that answers as vLLM does or misbehaves."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

import hybrid_engine
from hybrid_engine.rlhf.experience import teacher_server
from hybrid_engine.rlhf.experience.teacher_server import TeacherServer
from hybrid_engine.rlhf.options.distillation import is_address
from hybrid_engine.rlhf.runs import server_requests
from tests.support.chat import build_chat_tokenizer
from tests.support.served import build_llama

TEXT, TOKENS = "abc", [5, 6, 7]
PROMPTS, ANSWERS = [[5, 6], [7], [8, 9, 10]], [[11, 12], [13, 14, 15], [16]]


class Stub:
    """Answers that a test prescribes, and the requests that came."""

    def __init__(self, form="echo"):
        self.form, self.failures, self.requests = form, [], []
        self.models, self.pause, self.num_waiting, self.most_waiting = ["m"], 0.0, 0, 0
        self.shift, self.num_likeliest, self.read = 0, None, TOKENS
        self.lock = threading.Lock()

    def answer(self, body):
        tokens = self.read if isinstance(body["prompt"], str) else [token + self.shift for token in body["prompt"]]
        size = self.num_likeliest or body.get("logprobs") or body.get("prompt_logprobs")
        # The token that stands there is an additional, less likely one.
        rows = [{(token + step) % 50: -0.5 - step for step in range(1, size + 1)} | {token: -9.0} for token in tokens]
        choice = {"text": "", "prompt_token_ids": tokens}
        if self.form == "echo" and body.get("echo"):
            named = [None, *({f"token_id:{token}": value for token, value in row.items()} for row in rows[1:])]
            choice["logprobs"] = {"tokens": [f"token_id:{token}" for token in tokens], "top_logprobs": named}
        if self.form == "list" and "prompt_logprobs" in body:
            named = [{str(token): {"logprob": value, "rank": 1} for token, value in row.items()} for row in rows[1:]]
            choice["prompt_logprobs"] = [None, *named]
        return {"choices": [choice]}


@contextmanager
def served(stub):
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            self.reply(200, {"data": [{"id": name} for name in stub.models]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with stub.lock:
                stub.requests.append((body, dict(self.headers)))
                stub.num_waiting += 1
                stub.most_waiting = max(stub.most_waiting, stub.num_waiting)
                failure = stub.failures.pop(0) if stub.failures else None
            time.sleep(stub.pause)
            with stub.lock:
                stub.num_waiting -= 1
            if failure is not None:
                self.reply(failure, {"error": "stub says no"})
            else:
                self.reply(200, stub.answer(body))

        def reply(self, status, body):
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(server_requests, "FIRST_PAUSE", 0.001)


def opened(address, **options):
    given = {"num_likeliest": 2, "timeout": 10.0, "most_requests": 3, "text": TEXT, "tokens": TOKENS} | options
    return TeacherServer.open(address, **given)


@pytest.mark.parametrize("form", ["echo", "list"])
def test_both_forms_give_the_likeliest_tokens_of_each_place_of_an_answer(form):
    with served(Stub(form)) as address:
        teacher = opened(address)
        scored = teacher.score(PROMPTS, ANSWERS)
    assert teacher.lists_prompts == (form == "list") and teacher.model == "m"
    for answer, found in zip(ANSWERS, scored, strict=True):
        assert found.ids.tolist() == [[token + 1, token + 2] for token in answer]
        assert found.logprobs.tolist() == [[-1.5, -2.5]] * len(answer)


def test_our_own_server_says_what_the_model_says():
    tokenizer = build_chat_tokenizer()
    model = build_llama(tokenizer)
    text = "hello, 12"
    with hybrid_engine.init_inference(build_llama(tokenizer)).serving(tokenizer, model_name="tiny") as server:
        teacher = opened(server.url, num_likeliest=4, text=text, tokens=tokenizer(text)["input_ids"])
        with pytest.raises(ValueError, match=r"to 20|less than or equal to 20"):
            opened(server.url, num_likeliest=21, text=text, tokens=tokenizer(text)["input_ids"])
        scored = teacher.score(PROMPTS, ANSWERS)
    for prompt, answer, found in zip(PROMPTS, ANSWERS, scored, strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt + answer])).logits[0].double().log_softmax(-1)
        expected = logprobs[len(prompt) - 1 : -1].topk(4)
        assert torch.equal(found.ids, expected.indices)
        torch.testing.assert_close(found.logprobs.double(), expected.values, rtol=0, atol=1e-4)


def test_a_busy_server_is_asked_again_and_an_error_is_not():
    stub = Stub()
    with served(stub) as address:
        teacher = opened(address)
        stub.failures = [503, 429, 500]
        assert len(teacher.score(PROMPTS, ANSWERS)) == 3
        stub.failures = [400]
        with pytest.raises(ValueError, match=rf"--teacher='{address}' refuses a request: status 400 .*stub says no"):
            teacher.score(PROMPTS[:1], ANSWERS[:1])
        stub.failures = [302]
        with pytest.raises(ValueError, match="status 302"):
            teacher.score(PROMPTS[:1], ANSWERS[:1])
        stub.failures = [503] * teacher_server.NUM_TRIES
        with pytest.raises(ValueError, match=rf"--teacher='{address}' did not answer in 5 tries .*status 503"):
            teacher.score(PROMPTS[:1], ANSWERS[:1])
    with pytest.raises(ValueError, match=rf"--teacher='{address}' did not answer in 5 tries .*efused"):
        teacher.score(PROMPTS[:1], ANSWERS[:1])


def test_a_slow_server_is_given_up_after_the_timeout():
    stub = Stub()
    with served(stub) as address:
        teacher = opened(address, timeout=0.1)
        stub.pause = 0.4
        with pytest.raises(ValueError, match=r"did not answer in 5 tries .*timed out"):
            teacher.score(PROMPTS[:1], ANSWERS[:1])


def test_no_more_requests_wait_than_allowed():
    stub = Stub()
    with served(stub) as address:
        teacher = opened(address, most_requests=2)
        stub.pause, stub.most_waiting = 0.05, 0
        teacher.score(PROMPTS * 3, ANSWERS * 3)
    assert stub.most_waiting == 2


def test_the_key_comes_from_the_environment(monkeypatch):
    stub = Stub()
    monkeypatch.setenv("HYBRID_ENGINE_TEACHER_KEY", "secret")
    with served(stub) as address:
        opened(address)
    assert all(headers["Authorization"] == "Bearer secret" for _, headers in stub.requests)


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"form": "none"}, {}, "gives no log-probabilities of a prompt .*echo: .*prompt_logprobs: "),
        ({"shift": 1}, {}, "scores other tokens: 6 in place of 5"),
        ({"shift": 1, "form": "list"}, {}, "gives no log-probabilities of a prompt .*other tokens"),
        ({"read": [5, 6, 8]}, {}, r"reads 'abc' as the tokens \[5, 6, 8\], the actor's tokenizer as \[5, 6, 7\]"),
        ({"num_likeliest": 1}, {"num_likeliest": 5}, "reports 2 tokens at a place, not the 5 of --teacher-top-k"),
        ({"models": ["a", "b"]}, {}, r"has 2 models \(a, b\); name one of them after a #"),
    ],
)
def test_an_address_that_does_not_fit_is_refused(changes, options, words):
    stub = Stub()
    vars(stub).update(changes)
    with served(stub) as address, pytest.raises(ValueError, match=words):
        opened(address, **options)


def test_a_model_is_named_after_the_address():
    stub = Stub()
    stub.models = ["a", "b"]
    with served(stub) as address:
        assert opened(f"{address}/#b").model == "b"
    assert {body["model"] for body, _ in stub.requests} == {"b"}


def test_addresses_are_told_from_models():
    assert is_address("http://localhost:8000/v1") and is_address("https://host/v1#name")
    assert not any(map(is_address, ("Qwen/Qwen3-8B", "runs/sums/actor", "/abs/path", "base", "c:/models")))
