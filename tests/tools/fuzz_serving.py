"""Generated requests by the hundred thousand, over the server's own OpenAPI document: `make fuzz-serving`.

    python tests/tools/fuzz_serving.py --requests 100000 --seed 0

A small random model is served in a process of its own. Hypothesis draws bodies from the document's schemas, most of
them with the model's name and few tokens, so that they come through; some have fields of other types or are no JSON.
Wrong is an answer of 500 or above, none within SECONDS, a body that is not the protocol's, an answer to a body that the
document does not allow, and a server that has rows or blocks left at the end. Needs hypothesis and jsonschema.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.support.served import serving, write_model
from tests.tools.soak_page import machine, table, write_section

SECONDS = 60.0
AT_ONCE = 16
PIECE = 500
"""Requests drawn with one seed."""
KEY = "fuzz-secret"
OPTIONS = ("--longest", "200", "--max-running", "16")
NAMED = ("hi", "a", "", "\u00e9\U0001f600", "<eos>", "</think>", "[", "{}", "(", "user", "[a-z]", "\x00", "a" * 150)
ODD = (
    None, True, False, 0, 1, -1, 2**31, 2**64, -(2**63), 0.0, -0.5, 1e308, "", "hi", "null", [], [[]], {}, [None],
    [0, 1], ["a", "b"], {"": None}, {"a": {"b": [1, 2.5, "c"]}}, {"type": "object"}, {"type": "json_object"},
    {"type": "function", "function": {"name": "f"}}, [[1], [2]], [{"role": "user", "content": "hi"}],
    [{"type": "text", "text": "a"}],
)  # fmt: skip
TEXT = st.sampled_from(NAMED) | st.text(max_size=8)
KEYS = TEXT | st.integers(0, 300).map(str)
JSON = st.sampled_from(ODD) | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
JSON = JSON | st.lists(JSON, max_size=3) | st.dictionaries(TEXT, JSON, max_size=2)


class Document:
    """Strategies for the schemas of an OpenAPI document."""

    def __init__(self, document: dict[str, Any]):
        self.document = document
        self.schemas = document["components"]["schemas"]
        self.bodies = {
            path: operations["post"]["requestBody"]["content"]["application/json"]["schema"]
            for path, operations in document["paths"].items()
            if "post" in operations
        }
        self._validators = {path: self._validator(schema) for path, schema in self.bodies.items()}

    def _validator(self, schema: dict[str, Any]) -> Any:
        whole = schema | {"components": self.document["components"]}
        return jsonschema.Draft202012Validator(whole)

    def allows(self, path: str, body: Any) -> bool:
        """Whether a body fits the document."""
        return bool(self._validators[path].is_valid(body))

    def requests(self, model: str) -> st.SearchStrategy[tuple[str, Any]]:
        """Paths with bodies for them, answers' three times as often; bytes where the body is no JSON."""
        paths = [path for path in self.bodies for _ in range(3 if "completions" in path else 1)]
        of_each = {path: self._body(path, model) for path in self.bodies}
        return st.sampled_from(paths).flatmap(lambda path: st.tuples(st.just(path), of_each[path]))

    def _body(self, path: str, model: str) -> st.SearchStrategy[Any]:
        """Six in ten as the document has them, three with one field changed, one that is no JSON."""
        schema = self.schemas[self.bodies[path]["$ref"].rpartition("/")[2]]
        names = st.sampled_from(sorted(schema["properties"])) | TEXT
        few = {"model": st.just(model)}
        if "completions" in path:  # so that an answer costs little
            few |= {"max_tokens": st.integers(0, 4), "n": st.integers(1, 3)}
        if "max_completion_tokens" in schema["properties"]:
            few["max_completion_tokens"] = st.none()
        valid = st.tuples(self.of(schema), st.fixed_dictionaries(few)).map(lambda both: both[0] | both[1])
        changed = st.tuples(valid, names, JSON).map(lambda drawn: drawn[0] | {drawn[1]: drawn[2]})
        raw = st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode())
        cut = st.tuples(valid, st.integers(1, 30)).map(lambda drawn: json.dumps(drawn[0]).encode()[: -drawn[1]])
        kinds = [valid] * 6 + [changed] * 3 + [raw | cut]
        return st.integers(0, len(kinds) - 1).flatmap(kinds.__getitem__)

    def of(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        """Values that fit `schema`."""
        if "$ref" in schema:
            return self.of(self.schemas[schema["$ref"].rpartition("/")[2]])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        if "const" in schema:
            return st.just(schema["const"])
        if "anyOf" in schema:
            return st.one_of([self.of(each) for each in schema["anyOf"]])
        return getattr(self, f"_{schema.get('type', 'any')}")(schema)

    def _any(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        return JSON

    def _null(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        return st.none()

    def _boolean(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        return st.booleans()

    def _string(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        least = schema.get("minLength", 0)
        return TEXT.filter(lambda text: len(text) >= least) if least else TEXT

    def _integer(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        least, most = schema.get("minimum", -(2**70)), schema.get("maximum", 2**70)
        small = st.integers(least, min(most, max(least, 0) + 250))
        return st.integers(0, 9).flatmap(lambda place: small if place else st.integers(least, most))

    def _number(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        least, most = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
        return st.floats(least, most, allow_nan=False, allow_infinity=False, exclude_min="exclusiveMinimum" in schema)

    def _array(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        least = schema.get("minItems", 0)
        return st.lists(self.of(schema.get("items", {})), min_size=least, max_size=max(least, 4))

    def _object(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        fields, required = schema.get("properties", {}), schema.get("required", [])
        if "role" in required:  # most chat templates want it
            required = [*required, "content"]
        shapes = {name: self.of(shown) for name, shown in fields.items()}
        others = sorted(set(fields) - set(required))
        more = schema.get("additionalProperties", True)
        values = JSON if more is True else self.of(more)
        names = st.lists(st.sampled_from(others), max_size=3, unique=True) if others else st.just([])

        @st.composite
        def draw_object(draw: Any) -> dict[str, Any]:
            drawn = {name: draw(shapes[name]) for name in (*required, *draw(names))}
            return drawn if fields and draw(st.booleans()) else draw(st.dictionaries(KEYS, values, max_size=2)) | drawn

        return draw_object()


class Fuzz:
    """Sends requests and counts what comes back."""

    def __init__(self, url: str, document: Document):
        self.root, self.document = url.removesuffix("/v1"), document
        self.counts: Counter[tuple[str, int]] = Counter()
        self.failures: list[str] = []
        self.slowest = 0.0
        self._web = httpx.Client(timeout=SECONDS, headers={"Authorization": f"Bearer {KEY}"})
        self._free, self._lock = threading.Semaphore(AT_ONCE), threading.Lock()
        self._pool = ThreadPoolExecutor(AT_ONCE)

    def send_soon(self, path: str, body: Any) -> None:
        """Sends a request as soon as fewer than AT_ONCE are on their way."""
        self._free.acquire()
        self._pool.submit(self._send, path, body)

    def wait(self) -> None:
        """Returns when all answers are there."""
        self._pool.shutdown()

    def _send(self, path: str, body: Any) -> None:
        try:
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            begin = time.monotonic()
            try:
                answer = self._web.post(self.root + path, content=raw, headers={"Content-Type": "application/json"})
                status, wrong = answer.status_code, self._wrong(path, body, answer)
            except httpx.HTTPError as error:
                status, wrong = 0, f"{type(error).__name__}: {error}"
            with self._lock:
                self.counts[path, status] += 1
                self.slowest = max(self.slowest, time.monotonic() - begin)
                if wrong:
                    self.failures.append(f"{wrong}: {path} {raw[:2000]!r}")
                    print(self.failures[-1], flush=True)
        except BaseException as error:
            self.failures.append(f"the fuzz itself: {error!r}")
            raise
        finally:
            self._free.release()

    def _wrong(self, path: str, body: Any, answer: httpx.Response) -> str:
        """What is wrong with an answer; nothing where it is right."""
        if answer.status_code >= 500:
            return f"{answer.status_code} {answer.text[:300]}"
        if answer.status_code != 200:
            error = answer.json().get("error", {})
            return "" if isinstance(error.get("message"), str) else f"no error of the protocol: {answer.text[:300]}"
        if isinstance(body, bytes):
            body = json.loads(body)
        if not self.document.allows(path, body):
            return "answered, and the document does not allow it"
        if answer.headers["content-type"].startswith("text/event-stream"):
            return _wrong_events(answer.text)
        return "" if isinstance(answer.json(), dict) else "the answer is no object"


def _wrong_events(text: str) -> str:
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    if not events or events[-1] != "[DONE]":
        last = json.loads(events[-1]) if events else {}
        code = last.get("error", {}).get("code")
        return "" if code in ("guide_failed",) else f"a stream ends with {events[-1:]}"
    for event in events[:-1]:
        json.loads(event)
    return ""


def run(fuzz: Fuzz, requests: st.SearchStrategy[tuple[str, Any]], count: int, first_seed: int) -> None:
    """Sends `count` requests, PIECE of each seed."""
    for piece in range(-(-count // PIECE)):
        left = min(PIECE, count - piece * PIECE)

        @seed(first_seed + piece)
        @settings(
            max_examples=left,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(requests)
        def send(request: tuple[str, Any]) -> None:
            fuzz.send_soon(*request)

        send()
        if piece % 20 == 19:
            print(f"{sum(fuzz.counts.values()):,} requests, {len(fuzz.failures)} wrong", flush=True)


def left_at_the_end(root: str) -> dict[str, float]:
    """Rows and blocks that the server still uses, once nothing is asked."""
    names = ("running_sequences", "waiting_sequences", "kv_blocks_used")
    for _ in range(100):
        text = httpx.get(f"{root}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
        gauges = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        left = {name: float(gauges[f"hybrid_engine_{name}"]) for name in names}
        if not any(left.values()):
            break
        time.sleep(0.1)
    return left


def write_page(fuzz: Fuzz, seconds: float, first_seed: int) -> None:
    """The section of docs/soak.md."""
    total = sum(fuzz.counts.values())
    paths = sorted({path for path, _ in fuzz.counts})
    statuses = sorted({status for _, status in fuzz.counts})
    rows = [(f"`{path}`", *(fuzz.counts[path, status] for status in statuses)) for path in paths]
    text = (
        f"`make fuzz-serving` sent {total:,} requests in {seconds / 60:.0f} minutes, drawn by Hypothesis (seeds from "
        f"{first_seed}) from the server's `/openapi.json`, {AT_ONCE} at once, to a small random model with few tokens. "
        f"{machine()}\n\nAnswers by status (0: none within {SECONDS:g} s):\n\n"
        f"{table(('path', *map(str, statuses)), rows)}\n"
        f"The slowest took {fuzz.slowest:.1f} s. Wrong answers: {len(fuzz.failures)}.\n"
    )
    write_section("Generated requests", text + "".join(f"- {failure[:300]}\n" for failure in fuzz.failures[:20]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write-page", action="store_true", help="write docs/soak.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "tiny")
        (folder / "keys").touch(0o600)
        (folder / "keys").write_text(f"fuzz {KEY}\n")
        with serving(folder / "tiny", folder / "log", "--api-key-file", str(folder / "keys"), *OPTIONS) as served:
            root = served.url.removesuffix("/v1")
            assert httpx.get(f"{root}/openapi.json").status_code == 401
            told = httpx.get(f"{root}/openapi.json", headers={"Authorization": f"Bearer {KEY}"}).json()
            document = Document(told)
            fuzz, begin = Fuzz(served.url, document), time.monotonic()
            run(fuzz, document.requests("tiny"), options.requests, options.seed)
            fuzz.wait()
            seconds = time.monotonic() - begin
            left = left_at_the_end(root)
            if any(left.values()) or httpx.get(f"{root}/health").status_code != 200:
                fuzz.failures.append(f"at the end: {left}")
        if "Traceback" in (folder / "log").read_text():
            fuzz.failures.append(f"a traceback in the log: {(folder / 'log').read_text()[-3000:]}")
    for (path, status), count in sorted(fuzz.counts.items()):
        print(f"{path:<22} {status:>3} {count:>7}")
    print(f"{sum(fuzz.counts.values()):,} requests in {seconds:.0f} s, slowest {fuzz.slowest:.1f} s")
    print("\n".join(fuzz.failures[-20:]) or "no wrong answers")
    if options.write_page:
        write_page(fuzz, seconds, options.seed)
    return int(bool(fuzz.failures))


if __name__ == "__main__":
    sys.exit(main())
