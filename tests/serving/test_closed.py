"""A server is closed to strangers: to web pages where it has no key, and to whoever has none of its keys."""

import os
import signal

import httpx
import pytest

from hybrid_engine.recipes.serve import Config, reload_on_hangup
from hybrid_engine.serving.web.access import Key, Keys, Pages
from tests.serving.test_server import build
from tests.support.chat import build_chat_tokenizer

GOOD = {"model": "tiny", "prompt": "hi", "max_tokens": 2}


@pytest.fixture(scope="module")
def opened():
    """Opens servers of one engine, one at a time."""
    tokenizer = build_chat_tokenizer()
    engine = build(tokenizer)
    return lambda **options: engine.serving(tokenizer, **({"model_name": "tiny", "longest": 160} | options))


def ask(server, **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    with httpx.Client(timeout=300) as web:
        return web.post(f"{server.url}/completions", json=GOOD, headers=headers)


def status(server, key, path="/v1/models"):
    headers = [] if key is None else [(b"Authorization", b"Bearer " + key)]
    return httpx.get(server.url.removesuffix("/v1") + path, headers=headers).status_code


def test_without_a_key_only_this_machines_own_programs_and_pages_may_ask(opened):
    with opened(allow_hosts=["forwarded"], allow_origins=["https://chat.example"]) as server:
        own = f"127.0.0.1:{server.port}"
        for headers in (
            {}, {"Host": own}, {"Host": f"localhost:{server.port}"}, {"Host": f"[::1]:{server.port}"},
            {"Host": "forwarded:80"}, {"Host": own, "Origin": f"http://{own}"}, {"Origin": "https://chat.example"},
        ):  # fmt: skip
            assert ask(server, **headers).status_code == 200, headers
        for headers, what in (
            ({"Host": "evil.example"}, "Host 'evil.example'"),
            ({"Host": "evil.example:80", "Origin": "http://evil.example:80"}, "Host 'evil.example:80'"),
            ({"Host": "127.0.0.1.evil.example"}, "Host '127"), ({"Host": "user@[::1"}, "Host 'user"),
            ({"Origin": "null"}, "Origin 'null'"), ({"Origin": "http://localhost:1"}, "Origin 'http://localhost:1'"),
        ):  # fmt: skip
            answer = ask(server, **headers)
            assert answer.status_code == 403 and answer.json()["error"]["message"].startswith(what), headers
            assert "Access-Control-Allow-Origin" not in answer.headers
        for path in ("/health", "/nothing"):
            answer = httpx.get(server.url.removesuffix("/v1") + path, headers={"Host": "evil.example"})
            assert answer.status_code == 403


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
def test_a_body_that_a_browser_sends_without_asking_is_refused(opened, kind):
    with opened() as server:
        headers = {} if kind is None else {"Content-Type": kind}
        answer = httpx.post(f"{server.url}/completions", content='{"model": "tiny"}', headers=headers)
        assert answer.status_code == 415 and "send application/json" in answer.text
        json = httpx.post(
            f"{server.url}/completions", content="{}", headers={"Content-Type": "Application/JSON; charset=utf-8"}
        )
        assert json.status_code == 400 and "model is missing" in json.text


def test_a_page_that_is_allowed_may_read_answers_and_no_redirect_names_the_clients_host(opened):
    with opened(allow_origins=["https://chat.example"]) as server:
        asked = {
            "Origin": "https://chat.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "content-type",
        }
        before = httpx.options(f"{server.url}/completions", headers=asked)
        assert before.status_code == 200
        for answer in (before, ask(server, Origin="https://chat.example")):
            assert answer.headers["Access-Control-Allow-Origin"] == "https://chat.example"
        assert httpx.get(f"{server.url}/models/", headers={"Host": "localhost"}).status_code == 404


def write_keys(path, text):
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_each_client_has_a_key_of_a_file_that_is_read_again(opened, tmp_path, caplog):
    file = write_keys(tmp_path / "keys", "# name key\nalice one\nmonitor two metrics  # of Prometheus\n")
    with opened(api_key_file=file) as server:
        reload_on_hangup(server)
        assert status(server, b"one") == 200 and status(server, b"one", "/metrics") == 200
        assert status(server, b"two") == 401 and status(server, b"two", "/metrics") == 200
        for wrong in (None, b"on", b"onee", b"\xff\xfe", "eins\u00e9".encode()):
            assert status(server, wrong) == 401, wrong
        assert status(server, None, "/health") == 200
        assert server.client().models.list().data[0].id == "tiny"
        evil = {"Host": "evil.example", "Authorization": "Bearer one", "Content-Type": "text/plain"}
        answer = httpx.post(f"{server.url}/completions", content='{"model": "tiny"}', headers=evil)
        assert answer.status_code == 400  # no page has the key
        write_keys(file, "bob three\n")
        os.kill(os.getpid(), signal.SIGHUP)
        assert status(server, b"one") == 401 and status(server, b"three") == 200
        write_keys(file, "bob three four\n")
        os.kill(os.getpid(), signal.SIGHUP)
        assert status(server, b"three") == 200 and "the keys stay as they were: api_key_file" in caplog.text


@pytest.fixture(autouse=True)
def hangup_as_before():
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no key that clients can use"), ("a one metrics\n", "has no key that clients can use"),
        ("alone\n", "line 1: expected NAME KEY"), ("\na one two\n", "line 2: expected NAME KEY"),
        ("a one\na two\n", "has a name twice"), ("a one\nb one\n", "has a key twice"),
        ("a one\u00e9\n", "characters that a header cannot contain"),
    ],
)  # fmt: skip
def test_a_file_of_keys_that_is_wrong_is_named_with_its_line(tmp_path, text, reason):
    with pytest.raises(ValueError, match=reason):
        Keys(file=write_keys(tmp_path / "keys", text))


def test_keys_that_others_can_read_that_are_empty_or_doubled_are_refused_at_start(tmp_path, monkeypatch):
    file = write_keys(tmp_path / "keys", "a one\n")
    for options in ({"api_key": "x", "api_key_file": str(file)}, {"api_key": " "}, {"api_key": "a b"}):
        with pytest.raises(ValueError, match="api_key"):
            Config(model="m", **options)
    monkeypatch.setenv("HYBRID_ENGINE_API_KEY", "")
    with pytest.raises(ValueError, match="HYBRID_ENGINE_API_KEY is set and empty"):
        Config(model="m")
    monkeypatch.setenv("HYBRID_ENGINE_API_KEY", "secret")
    with pytest.raises(ValueError, match="HYBRID_ENGINE_API_KEY is set and --api-key-file is given"):
        Config(model="m", api_key_file=str(file))
    monkeypatch.delenv("HYBRID_ENGINE_API_KEY")
    file.chmod(0o644)
    with pytest.raises(ValueError, match="can be read by other users; run chmod 600"):
        Config(model="m", api_key_file=str(file))
    file.chmod(0o622)
    with pytest.raises(ValueError, match="can be written by other users; run chmod 600"):
        Config(model="m", api_key_file=str(file))
    with pytest.raises(ValueError, match="cannot be read"):
        Config(model="m", api_key_file=str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"session_ids": "abc"}, "session_ids='abc' is one string"),
        ({"session_ids": ["a", ""]}, "'' is not a string of 1 to 256 characters"),
        ({"session_ids": ["a" * 257]}, "is not a string of 1 to 256 characters"),
        ({"session_ids": [1]}, "1 is not a string of 1 to 256 characters"),
        ({"session_ids": ["a", "b", "a"]}, "session_ids has an id twice"),
        ({"session_ids": ["a", "b"], "max_sessions": 1}, "max_sessions=1 is less than the 2 session_ids"),
        ({"api_key": ""}, "api_key is empty"),
        ({"api_key": "a", "api_key_file": "b"}, "api_key and api_key_file are given"),
        ({"api_key": "a", "allow_hosts": ["b"]}, "allow_host='b' is for requests without a key, but there is a key"),
        ({"finish_seconds": float("inf")}, "finish_seconds=inf"),
        ({"stall_seconds": float("nan")}, "stall_seconds=nan"),
        ({"longest": 1}, "longest=1"),
        ({"max_waiting": 0}, "max_waiting=0"),
    ],
)
def test_options_that_contradict_each_other_or_fit_no_request_are_refused_at_start(opened, options, told):
    with pytest.raises(ValueError, match=told), opened(**options):
        pass


def test_the_command_refuses_a_longest_that_fits_no_request():
    with pytest.raises(ValueError, match="--longest=1 must be at least 2"):
        Config(model="m", longest=1)


def test_hosts_are_not_allowed_beside_a_key_that_allows_all(tmp_path, monkeypatch):
    told = "allow_host='forwarded' is for requests without a key"
    file = write_keys(tmp_path / "keys", "a one\n")
    for options in ({"api_key": "secret"}, {"api_key_file": str(file)}):
        with pytest.raises(ValueError, match=told):
            Config(model="m", allow_host=("forwarded",), **options)
    monkeypatch.setenv("HYBRID_ENGINE_API_KEY", "secret")
    with pytest.raises(ValueError, match=told):
        Config(model="m", allow_host=("forwarded",))
    assert Config(model="m", allow_origin=("https://chat.example",)).key == "secret"


@pytest.mark.parametrize("seconds", ["finish_seconds", "stall_seconds"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0])
def test_a_time_is_a_finite_number(seconds, value):
    with pytest.raises(ValueError, match=seconds.replace("_", ".")):
        Config(model="m", **{seconds: value})


@pytest.mark.parametrize("host", ["", "http://a", "a:80", "a/b", "user@a"])
def test_an_allowed_host_is_a_bare_name(host):
    with pytest.raises(ValueError, match="allow_host"):
        Pages([host])


@pytest.mark.parametrize("origin", ["", "*", "null", "chat.example", "https://a/b", "https://", "://a"])
def test_an_allowed_origin_is_one_that_browsers_send(origin):
    with pytest.raises(ValueError, match="allow_origin"):
        Pages(origins=[origin])


def test_another_address_than_this_machines_needs_a_key_of_either_kind(tmp_path):
    with pytest.raises(ValueError, match="is reachable from other machines"):
        Config(model="m", host="0.0.0.0")
    file = write_keys(tmp_path / "keys", "a one\n")
    assert Config(model="m", host="0.0.0.0", api_key_file=str(file)).key is None


def test_a_key_is_looked_for_as_long_wherever_it_stands(monkeypatch):
    compared = []
    monkeypatch.setattr("hmac.compare_digest", lambda one, other: compared.append(other) or one == other)
    keys = Keys.__new__(Keys)
    keys._keys = [Key("", bytes([65 + place])) for place in range(3)]
    for given in (b"A", b"C", b"x"):
        keys.find(given)
    assert compared == [b"A", b"B", b"C"] * 3


def refused(server, body, path="completions"):
    answer = httpx.post(f"{server.url}/{path}", json={"model": "tiny", "max_tokens": 1} | body, timeout=300)
    error = answer.json()["error"]
    assert len(error["message"]) < 700
    return answer.status_code, error["code"], error["message"]


def test_what_is_too_much_is_refused_before_it_is_tokenised_or_built(opened, monkeypatch):
    with opened(max_waiting=200) as server:
        tokenizer = server.app.model.tokenizer
        encode = type(tokenizer).encode
        encoded = []
        monkeypatch.setattr(
            type(tokenizer), "encode", lambda own, text, **more: encoded.append(text) or encode(own, text, **more)
        )
        message = [{"role": "user", "content": "word " * 100_000}]
        for body, path, code in (
            ({"prompt": ["a", "b"], "n": 101}, "completions", "too_many_answers"),
            ({"prompt": [[1]] * 3, "n": 67}, "completions", "too_many_answers"),
            ({"prompt": "word " * 100_000}, "completions", "context_length_exceeded"),
            ({"messages": message}, "chat/completions", "context_length_exceeded"),
            ({"messages": message, "session_id": "a"}, "chat/completions", "context_length_exceeded"),
            ({"prompt": [[1] * 150] * 3, "n": 66, "echo": True, "logprobs": 20}, "completions", "answer_too_large"),
            ({"prompt": "a", "guided_choice": ["a"] * 10_001}, "completions", "invalid_value"),
            ({"prompt": "a", "guided_regex": "a" * (2**18 + 1)}, "completions", "invalid_value"),
            ({"prompt": "a", "guided_json": {"enum": ["a" * 2**18]}}, "completions", "invalid_value"),
            ({"prompt": "a", "logit_bias": {str(n): 1 for n in range(4097)}}, "completions", "invalid_value"),
            ({"prompt": "a", "logit_bias": {"9" * 3000: 1}}, "completions", "invalid_value"),
        ):  # fmt: skip
            assert refused(server, body, path)[:2] == (400, code), body.keys()
        for path, body in (("tokenize", {"prompt": "word " * 100_000}), ("tokenize", {"messages": message})):
            answer = httpx.post(f"{server.url.removesuffix('v1')}{path}", json=body)
            assert answer.status_code == 400 and "shorten the text" in answer.text
        assert not encoded
        assert ask(server).status_code == 200
        most = {"prompt": [[1] * 100] * 3, "n": 66, "echo": True, "logprobs": 10, "max_tokens": 0}
        assert httpx.post(f"{server.url}/completions", json={"model": "tiny"} | most, timeout=300).status_code == 200


def test_a_text_as_long_as_the_model_takes_is_not_refused_by_its_bytes(opened):
    with opened() as server:
        model = server.app.model
        longest = max(model.tokenizer.get_vocab(), key=len)
        text = model.tokenizer.decode(model.tokenizer.encode(longest, add_special_tokens=False) * (model.longest - 2))
        answer = httpx.post(f"{server.url.removesuffix('v1')}tokenize", json={"prompt": text})
        assert answer.status_code == 200 and answer.json()["count"] <= model.longest


@pytest.mark.parametrize("arguments", ["{" * 50, "[" * 100_000, '{"a":' * 5000, "[" * 150 + "]" * 150, "9" * 5000])
def test_arguments_of_calls_that_are_no_json_or_deep_stay_text(opened, arguments):
    call = {"type": "function", "id": "a", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "a"},
    ]
    with opened() as server:
        body = {"model": "tiny", "messages": messages, "max_tokens": 1}
        answer = httpx.post(f"{server.url}/chat/completions", json=body, timeout=300)
        assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize(
    "field", ["metadata", "tools", "chat_template_kwargs", "guided_json", "logit_bias", "messages"]
)
def test_a_body_that_nests_deep_is_no_json(opened, field):
    with opened() as server:
        raw = '{"model": "tiny", "' + field + '": ' + '{"a":' * 300 + "1" + "}" * 301
        answer = httpx.post(f"{server.url}/chat/completions", content=raw, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"


def test_what_a_client_sent_is_told_in_at_most_200_characters(opened):
    with opened() as server:
        for body in (
            {"prompt": "a", "model": "m" * 3000},
            {"prompt": "a", "n": "x" * 3000},
            {"prompt": "a", "logit_bias": {"x" * 3000: 1}},
        ):
            _, _, message = refused(server, body)
            assert "..." in message and max(map(len, message.replace("'", " ").split())) <= 210
        path = httpx.get(f"{server.url}/{'p' * 3000}")
        assert path.status_code == 404 and len(path.text) < 400


def chat(server, session, key=None):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "session_id": session}
    return httpx.post(f"{server.url}/chat/completions", json=body, headers=headers, timeout=300)


def test_only_conversations_that_were_handed_out_are_recorded(opened):
    with opened(session_ids=["a", "b"], max_sessions=2) as server:
        assert chat(server, "a").status_code == chat(server, "b").status_code == 200
        for session in ("c", "A", "0"):
            answer = chat(server, session)
            assert answer.status_code == 403 and answer.json()["error"]["code"] == "unknown_session"
            told = ask(server, X_Session_Id=session)
            assert told.status_code == 403
        assert ask(server).status_code == 200  # without a session: answered, and not recorded
        assert server.api_key is None
        assert [trajectory.session_id for trajectory in server.trajectories()] == ["a", "b"]


def test_a_script_with_ids_of_its_own_goes_on_with_the_runs_key(opened):
    """As MIGRATION.md says; another program of the machine records nothing."""
    with opened(api_key="of-this-run") as server:
        message = [{"role": "user", "content": "hi"}]
        server.client().chat.completions.create(
            model="tiny", messages=message, max_tokens=2, extra_body={"session_id": "0"}
        )
        assert chat(server, "1", server.api_key).status_code == 200
        assert chat(server, "0").status_code == chat(server, "0", "none").status_code == 401
        assert [trajectory.session_id for trajectory in server.trajectories()] == ["0", "1"]


def test_clients_of_other_keys_have_conversations_of_their_own(opened, tmp_path):
    file = write_keys(tmp_path / "keys", "alice s3cret-1\nbob s3cret-2\n")
    with opened(api_key_file=file) as server:
        for key in ("s3cret-1", "s3cret-2", "s3cret-1"):
            assert chat(server, "episode-0", key).status_code == 200
        found = server.trajectories()
        assert [(trajectory.session_id, trajectory.key) for trajectory in found] == [
            ("episode-0", "alice"), ("episode-0", "alice"), ("episode-0", "bob"),
        ]  # fmt: skip
        assert not any("s3cret" in str(value) for trajectory in found for value in vars(trajectory).values())
