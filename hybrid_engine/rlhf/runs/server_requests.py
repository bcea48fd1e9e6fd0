"""Requests to OpenAI-compatible servers at an address that an option names: judges and teachers.

A server that is busy, or does not answer, is asked again after growing pauses.
"""

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Event
from typing import Any, TypeVar

Row = TypeVar("Row")
Reply = TypeVar("Reply")

FIRST_PAUSE = 0.5
"""Seconds before the second try; each further pause is twice as long."""
LONGEST_PAUSE = 30.0
BUSY = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses of a server that may answer the same request later."""
MOST_BYTES = 2**30
"""Largest body of an answer."""


class RefusedRequest(Exception):
    """The server answered, and will not answer this request otherwise; the text continues its name."""


class NoReply(Exception):
    """The server did not answer; the text continues its name."""


@dataclass(frozen=True, kw_only=True)
class OpenAIServer:
    """An address."""

    url: str
    """Without a slash at its end, such as http://localhost:8000/v1."""
    key_variable: str
    """Environment variable with the key that is sent; nothing is sent if it is not set."""
    seconds: float
    """Time limit of one try of one request."""
    num_tries: int

    def exchange(self, path: str, body: Mapping[str, Any] | None = None, has_ended: Event | None = None) -> Any:
        """The JSON that the server answers; raises RefusedRequest or NoReply.

        Once `has_ended` is set, no further try begins.
        """
        has_ended = has_ended or Event()
        reason, requested = "", 0.0
        for number in range(self.num_tries):
            if number and has_ended.wait(min(max(FIRST_PAUSE * 2 ** (number - 1), requested), LONGEST_PAUSE)):
                break
            try:
                return self._try_once(path, body)
            except urllib.error.HTTPError as error:
                reason, requested = _status_of(error), _requested_pause(error)
                if error.code not in BUSY:
                    raise RefusedRequest(f"refuses a request: {reason}") from error
            except (OSError, http.client.HTTPException) as error:  # refused, timed out, or ended early
                cause = getattr(error, "reason", None) or error
                reason, requested = f"{type(cause).__name__}: {cause}", 0.0
            except ValueError as error:
                raise RefusedRequest("answers something that is not JSON") from error
        raise NoReply(f"did not answer in {self.num_tries} tries ({reason}); start its server")

    def only_model(self) -> str:
        """The name of the server's only model; raises RefusedRequest, also if it has several, or NoReply."""
        answer = self.exchange("models")
        try:
            names = [str(entry["id"]) for entry in answer["data"]]
        except (KeyError, TypeError) as error:
            raise RefusedRequest("does not list its models; name one after a #") from error
        if len(names) != 1:
            raise RefusedRequest(f"has {len(names)} models ({', '.join(names)}); name one of them after a #")
        return names[0]

    def _try_once(self, path: str, body: Mapping[str, Any] | None) -> Any:
        key = os.environ.get(self.key_variable)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data, headers)
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=self.seconds) as answer:
            return json.loads(answer.read(MOST_BYTES))


def ask_all(ask: Callable[[Event, Row], Reply], rows: Sequence[Row], most_requests: int) -> list[Reply]:
    """`ask(has_ended, row)` for each row, up to `most_requests` at a time.

    The first error is raised at once. `has_ended` is set then, and no further row or try begins.
    """
    pool, has_ended = ThreadPoolExecutor(most_requests, thread_name_prefix="asks"), Event()
    try:
        asked = [pool.submit(ask, has_ended, row) for row in rows]
        done, _ = wait(asked, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        return [future.result() for future in asked]
    finally:
        has_ended.set()
        pool.shutdown(wait=False, cancel_futures=True)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The key is for the address that the user named."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _status_of(error: urllib.error.HTTPError) -> str:
    try:
        text = error.read(10_000).decode(errors="replace")
    except OSError:
        text = ""
    return " ".join(f"status {error.code} {text or error.reason}".split())[:300]


def _requested_pause(error: urllib.error.HTTPError) -> float:
    """Seconds of the header `Retry-After`; 0 without it."""
    try:
        return max(0.0, float(error.headers.get("Retry-After", 0)))
    except ValueError:
        return 0.0
