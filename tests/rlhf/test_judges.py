"""Judges as rewards: what they are shown, how replies are read, and what is said of a server that fails."""

import json
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

import hybrid_engine
from hybrid_engine.recipes import grpo
from hybrid_engine.rlhf.planning.memory_plan import Setting, plan_memory
from hybrid_engine.rlhf.planning.reading import read_run
from hybrid_engine.rlhf.rewards import judges
from hybrid_engine.rlhf.rewards.judges import KEY_VARIABLE, Pairwise, Ruler, read_better, read_scores, verdict_of
from hybrid_engine.rlhf.rewards.loading import load_rewards
from hybrid_engine.rlhf.rewards.scores import Answers, RewardError
from hybrid_engine.rlhf.runs import server_requests
from hybrid_engine.rlhf.runs.run_folder import read_metrics
from hybrid_engine.rlhf.tasks import arithmetic
from tests.support.answers import answers_of
from tests.support.chat import build_chat_tokenizer
from tests.support.served import build_llama, write_model
from tests.support.small_actors import save_small_actor, save_sums


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(server_requests, "FIRST_PAUSE", 0.01)


GROUPS = answers_of(["p", "p", "p", "q", "q"], ["bb", "a", "bb", "cccc", "ddd"], answer=["x"] * 3 + ["yyyyy"] * 2)


class Told:
    """A judge that replies by a function, and notes what it is asked."""

    model = None

    def __init__(self, reply):
        self.reply, self.seen = reply, []

    def ask(self, conversations):
        self.seen += [messages[-1]["content"] for messages in conversations]
        return [self.reply(messages[-1]["content"]) for messages in conversations]


def shown_answers(text: str) -> list[str]:
    """The answers in a judge's conversation, in order."""
    return [part.partition(">\n")[2].partition("\n</answer")[0] for part in text.split("<answer ")[1:]]


def by_length(text: str) -> str:
    """Scores and verdicts of a judge that prefers long answers."""
    lengths = [len(answer) for answer in shown_answers(text)]
    if "scores" in text:
        return json.dumps({"scores": [length / 10 for length in lengths]})
    first, second = lengths
    return f"Well.\n{json.dumps({'better': 'A' if first > second else 'B' if second > first else 'tie'})}"


def test_two_adjacent_groups_with_the_same_prompt_are_judged_apart():
    answers = replace(answers_of(["p"] * 4, ["bbbb", "a", "cc", "ddd"]), group_size=2)
    told = Told(by_length)
    assert Ruler(language_model=told)(answers) == [0.4, 0.1, 0.2, 0.3]
    assert list(map(shown_answers, told.seen)) == [["bbbb", "a"], ["cc", "ddd"]]
    assert Pairwise(language_model=Told(by_length))(answers) == [1.0, 0.0, 0.0, 1.0]
    assert Answers.join([answers, answers]).group_size == 2 and answers.choose([0]).group_size is None


def test_a_ruler_sees_each_group_once_and_equal_answers_once():
    told = Told(by_length)
    assert Ruler(language_model=told)(GROUPS) == [0.2, 0.1, 0.2, 0.4, 0.3]
    assert [shown_answers(text) for text in told.seen] == [["bb", "a"], ["cccc", "ddd"]]
    assert "<request>\np\n</request>" in told.seen[0] and "Standard:" in told.seen[0]


def test_texts_are_compared_once_in_each_order_and_equal_answers_tie_unasked():
    told = Told(by_length)
    assert Pairwise(language_model=told)(GROUPS) == [0.75, 0.0, 0.75, 1.0, 0.0]
    seen = Counter(tuple(shown_answers(text)) for text in told.seen)
    assert seen == {("bb", "a"): 1, ("a", "bb"): 1, ("cccc", "ddd"): 1, ("ddd", "cccc"): 1}


@pytest.mark.parametrize("letter", ["A", "B"])
def test_a_judge_that_prefers_a_place_says_nothing(letter):
    told = Told(lambda text: json.dumps({"better": letter}))
    assert Pairwise(language_model=told)(GROUPS) == [0.5] * 5


def test_answers_are_compared_with_a_column_if_one_is_named():
    told = Told(by_length)
    assert Pairwise(language_model=told, against="answer")(GROUPS) == [1.0, 0.5, 1.0, 0.0, 0.0]
    assert ["x", "bb"] in map(shown_answers, told.seen) and ["bb", "x"] in map(shown_answers, told.seen)


def test_what_cannot_be_read_has_no_score():
    replies = iter(['{"scores": [0.5, "high"]}', "no idea"])
    assert Ruler(language_model=Told(lambda text: next(replies)))(GROUPS) == [0.5, None, 0.5, None, None]
    assert Pairwise(language_model=Told(lambda text: ""))(GROUPS) == [0.5, None, 0.5, None, None]
    alone = answers_of(["p"], ["a"])
    assert Pairwise(language_model=Told(by_length))(alone) == [None] and Ruler(language_model=Told(by_length))(
        alone
    ) == [0.1]


@pytest.mark.parametrize(
    ("reply", "scores"),
    [
        ('{"scores": [1, 0.25]}', [1.0, 0.25]),
        ('Of {"scores": [0, 0]} I think better: ```json\n{"scores": [0.5, 1]}\n```', [0.5, 1.0]),
        ('{"scores": [1.5, true]}', [None, None]),
        ('{"scores": [NaN, null]}', [None, None]),
        ('{"scores": [0.5]}', [None, None]),
        ('{"better": "A"}', [None, None]),
        ("{" * 50, [None, None]),
        ('{"scores": ' + "[" * 100_000, [None, None]),
    ],
)
def test_scores_are_those_of_the_last_object(reply, scores):
    assert read_scores(reply, 2) == scores


def test_verdicts_of_both_orders():
    assert read_better('{"better": "A"} {"better": "tie"}') == "tie" and read_better('{"better": ["A"]}') is None
    both = {pair: verdict_of(*pair) for pair in [("A", "B"), ("B", "A"), ("A", "A"), ("tie", "B"), ("A", None)]}
    assert list(both.values()) == [1.0, 0.0, 0.5, 0.5, None]


class Stub:
    """An OpenAI-compatible server of the standard library; `answer(path, body, number)` gives status and body."""

    def __init__(self, answer):
        self.requests, self.running, self.most_running = [], 0, 0
        lock, stub = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                with lock:
                    stub.requests.append((self.path, json.loads(body or b"null"), dict(self.headers)))
                    number = len(stub.requests)
                    stub.running += 1
                    stub.most_running = max(stub.most_running, stub.running)
                status, text = answer(self.path, stub.requests[number - 1][1], number)
                with lock:
                    stub.running -= 1
                self.send_response(status)
                self.send_header("Retry-After", "0")
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_POST

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda *_: None  # a client that has gone
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"


@contextmanager
def served(answer):
    stub = Stub(answer)
    thread = threading.Thread(target=stub.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        stub.server.shutdown()
        stub.server.server_close()
        thread.join()


def chat(body) -> tuple[int, str]:
    """The reply of a judge that prefers long answers, in OpenAI's form."""
    return 200, json.dumps({"choices": [{"message": {"content": by_length(body["messages"][-1]["content"])}}]})


def test_a_server_is_asked_for_its_model_with_its_key_and_few_requests_at_a_time(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    prompts = [f"p{index // 2}" for index in range(24)]
    with served(
        lambda path, body, _: (200, '{"data": [{"id": "judge-1"}]}') if path == "/v1/models" else chat(body)
    ) as stub:
        rewards = load_rewards([f"ruler:address={stub.url}/,in_flight=3,tokens=77"])
        scores = rewards(answers_of(prompts, ["a" * (index % 7) + "b" for index in range(24)]))
    assert scores.total == pytest.approx([(index % 7 + 1) / 10 for index in range(24)])
    assert [path for path, *_ in stub.requests] == ["/v1/models", *["/v1/chat/completions"] * 12]
    body, headers = stub.requests[1][1:]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("judge-1", 77, 0)
    assert headers["Authorization"] == "Bearer secret"
    assert 1 <= stub.most_running <= 3


def test_a_busy_server_is_asked_again():
    with served(lambda path, body, number: (503, "busy") if number % 3 else chat(body)) as stub:
        assert load_rewards([f"ruler:address={stub.url}#m,in_flight=1"])(GROUPS).total[0] == pytest.approx(0.2)
    assert len(stub.requests) == 6 and {body["model"] for _, body, _ in stub.requests} == {"m"}


@pytest.mark.parametrize(
    ("answer", "message", "num_requests"),
    [
        ((400, "no such model"), "refuses a request: status 400 no such model", 1),
        ((429, "slower"), r"did not answer in 2 tries \(status 429 slower\)", 2),
        ((200, "hello"), "answers something that is not JSON", 1),
        ((200, '{"choices": []}'), "answers in another form than OpenAI's", 1),
    ],
)
def test_an_error_names_the_address_and_asks_no_further(answer, message, num_requests):
    with (
        served(lambda *_: answer) as stub,
        pytest.raises(RewardError, match=rf"--reward='pairwise:address={stub.url}#m.*{message}"),
    ):
        load_rewards([f"pairwise:address={stub.url}#m,tries=2,in_flight=1"])(answers_of(["p", "p"], ["a", "b"]))
    assert num_requests <= len(stub.requests) <= 2 * num_requests  # the other order may have been on its way


def test_after_an_error_no_other_request_is_tried_again(monkeypatch):
    monkeypatch.setattr(server_requests, "FIRST_PAUSE", 0.2)
    may_refuse = threading.Event()

    def answer(path, body, number):
        if number == 2:
            may_refuse.set()
            return 503, "busy"
        return (may_refuse.wait(5) and 400), "refused"

    with served(answer) as stub:
        with pytest.raises(RewardError, match="refuses a request: status 400"):
            load_rewards([f"pairwise:address={stub.url}#m,in_flight=2"])(answers_of(["p", "p"], ["a", "b"]))
        for thread in threading.enumerate():
            if thread.name.startswith("asks"):
                thread.join(5)
        assert len(stub.requests) == 2


def test_a_server_that_is_not_there_or_does_not_answer_in_time_is_named():
    with served(lambda *_: (200, "")) as stub:
        pass
    with pytest.raises(RewardError, match=rf"{stub.url} did not answer in 1 tries \(ConnectionRefusedError"):
        load_rewards([f"ruler:address={stub.url}#m,tries=1"])(GROUPS)
    may_end = threading.Event()
    with served(lambda *_: (may_end.wait(20) and 200, "{}")) as stub:
        with pytest.raises(RewardError, match=r"did not answer in 1 tries \(TimeoutError"):
            load_rewards([f"ruler:address={stub.url}#m,tries=1,seconds=0.05"])(GROUPS)
        may_end.set()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ruler", "must name a judge, by either its address or its model"),
        ("pairwise:address=http://h/v1,model=m", "must name a judge"),
        ("ruler:address=host:80", "must begin with http:// or https://"),
        ("ruler:address=http://h/v1,against=answer", "'against=answer' is not one of its options"),
        ("ruler:address=http://h/v1,rubric=none.txt", "rubric='none.txt' cannot be read"),
        ("ruler:address=http://h/v1,in_flight=0", "in_flight='0' must be a number of at least 1"),
        ("ruler:model=nowhere/none", "--reward='nowhere/none' must be a Hugging Face folder or name"),
    ],
)
def test_a_spec_that_cannot_work_is_refused_before_any_work(spec, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=message):
        load_rewards([spec])


def test_a_rubric_comes_from_a_file(tmp_path):
    (tmp_path / "rubric.txt").write_text("Prefer rhymes.\n")
    with served(lambda path, body, _: chat(body)) as stub:
        load_rewards([f"ruler:address={stub.url}#m,rubric={tmp_path / 'rubric.txt'}"])(GROUPS)
    assert "Standard: Prefer rhymes.\n" in stub.requests[0][1]["messages"][-1]["content"]


def test_this_projects_server_is_such_an_address():
    tokenizer = build_chat_tokenizer()
    engine = hybrid_engine.init_inference(build_llama(tokenizer, max_position_embeddings=2048), dtype=torch.float32)
    with engine.serving(tokenizer, model_name="tiny") as server:
        scores = load_rewards([f"ruler:address={server.url},tokens=4"])(GROUPS)
    assert all(score is None for score in scores.by_name["ruler"])  # a random model scores nothing


@pytest.fixture(scope="module")
def judge_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judge")
    write_model(folder)
    return str(folder)


def test_a_model_of_this_process_replies_with_its_likeliest_tokens(judge_folder, monkeypatch):
    (reward,) = load_rewards([f"pairwise:model={judge_folder},tokens=5"]).rewards
    conversations = [[{"role": "user", "content": text}] for text in ("hello", "x" * 5000, "bye")]
    replies = reward.judge.language_model.ask(conversations)
    model, tokenizer = reward.judge.model.float(), reward.judge.language_model.tokenizer
    for conversation, reply in zip(conversations, replies, strict=True):
        ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        if ids.shape[1] > 4096:
            assert reply == ""  # no room
            continue
        expected = model.generate(ids, do_sample=False, max_new_tokens=5)[0, ids.shape[1] :]
        assert reply == tokenizer.decode(expected, skip_special_tokens=True)
    monkeypatch.setattr(judges, "num_positions", lambda config: None)
    assert reward.judge.language_model.ask([]) == []  # of a process without prompts


def test_the_plan_of_a_run_counts_its_judge(judge_folder, tmp_path):
    actor = save_small_actor(tmp_path, arithmetic.build_tokenizer())
    config = grpo.Config(model=actor, dataset=save_sums(tmp_path), reward=(f"ruler:model={judge_folder}",))
    read, config = read_run("grpo", config)
    plan = plan_memory(read, Setting(recipe="grpo", config=config, num_processes=1, device="cpu"))
    sizes = {role.name: role.kept for role in plan.roles}
    assert list(sizes) == ["actor", "reference", "judge"] and sum(part.num_bytes for part in sizes["judge"]) > 50_000


def test_a_run_learns_what_its_judge_prefers(tmp_path):
    actor = save_small_actor(tmp_path, arithmetic.build_tokenizer())
    with served(lambda path, body, _: chat(body)) as stub:
        config = grpo.Config(
            model=actor, dataset=save_sums(tmp_path), reward=(f"ruler:address={stub.url}#m",), steps=6, rollout_size=8,
            group_size=4, max_new_tokens=6, learning_rate=1e-2, eval_every=0, eval_prompts=4, out=str(tmp_path / "run"),
        )  # fmt: skip
        grpo.run(replace(config, save_every=0))
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert lines[-1]["score"] > lines[0]["score"]
