"""Access to a server: the address that it listens at, the keys of clients, and the web pages that may send requests.

`Server` and the `serve` recipe refuse an address that other machines can reach without a key. A key file has a line for
each key, `NAME KEY`, or `NAME KEY metrics` for `/metrics` alone; text after a # is ignored.

A client sends its key as `Authorization: Bearer KEY` or `x-api-key: KEY`. It may name its session inside the key,
`KEY:SESSION`: an agent that takes only an address and a key can do nothing else. Where no key is needed, KEY is `none`.

A browser sends a form, text, or a body without a type to any address, including this machine's own, without asking the
server first. A page whose host name its owner points to 127.0.0.1 (DNS rebinding) has the same origin as a server
there. Without a key a request must therefore name this machine as its host, come from no other origin, and be JSON, for
which a browser asks first.
"""

import hmac
import ipaddress
import os
import socket
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from hybrid_engine.serving.errors import RequestError, cut, error_body

BACKLOG = 1024
"""Number of connections that may wait to be accepted."""
METRICS = "metrics"
JSON_TYPE = "application/json"
NO_KEY = b"none"
"""The key that clients send to a server without keys."""
BEFORE_SESSION = b":"
"""Stands between a key and the session that is named inside it."""


def check_address(host: str, *, has_keys: bool) -> None:
    """Raises ValueError for an address that other machines can reach without a key."""
    try:
        is_own = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_own = False
    if not is_own and not has_keys:
        raise ValueError(
            f"host={host!r} is reachable from other machines, but there is no api_key; pass one, or use 127.0.0.1"
        )


def check_free(host: str, port: int) -> None:
    """Raises ValueError if the address cannot be bound now."""
    bind(host, port).close()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket bound to the address, in whose backlog connections wait; ValueError if it fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)  # before listen(), other sockets can bind the same address
    except OSError as error:
        listener.close()
        raise ValueError(f"host={host!r}, port={port}: {error.strerror or error}; choose another") from error
    return listener


class Key(NamedTuple):
    """A client's key."""

    name: str
    secret: bytes
    is_for_metrics: bool = False
    """Whether it opens only `/metrics`."""


class Admitted(NamedTuple):
    """A client whose key is known."""

    key_name: str
    session_id: str | None
    """The session inside the key; None if there is none."""
    is_for_metrics: bool = False
    """Whether the key opens only `/metrics`."""


def _sent_keys(headers: Headers) -> list[bytes]:
    """The keys of a request, in both places where clients send them."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    sent = [bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
    return [key.encode("latin-1") for key in sent if key]


class Keys:
    """The keys that clients may send; without any, no key is needed.

    Args:
        api_key: a single key without a name.
        file: a file of several keys, which `read_again` reads again.

    Raises ValueError if both are given, for a key that is empty or not valid in a header, and for a file that cannot be
    read, that other users can read, or that has an invalid line (by its number).
    """

    def __init__(self, api_key: str | None = None, file: str | Path | None = None):
        if api_key is not None and file is not None:
            raise ValueError("api_key and api_key_file are given; put the key into the file, or leave the file out")
        self.file = None if file is None else Path(file)
        self._keys = [Key("", _secret(api_key, "api_key"))] if api_key is not None else []
        self.read_again()

    def __bool__(self) -> bool:
        return bool(self._keys)

    def read_again(self) -> None:
        """Reads the keys from the file again; keeps the old keys if it raises ValueError."""
        if self.file is not None:
            self._keys = read_keys(self.file)

    def admit(self, headers: Headers) -> Admitted | None:
        """The key of a request, and the session that it names; None if the key is unknown.

        Without keys every request is admitted.
        """
        found = [admission for given in _sent_keys(headers) if (admission := self.find(given)) is not None]
        return found[0] if found else None if self else Admitted("", None)

    def find(self, given: bytes) -> Admitted | None:
        """The key that a client sent, with the session inside it; None if it is unknown.

        Comparisons take constant time.
        """
        exact = with_session = None
        for key in self._keys or [Key("", NO_KEY)]:
            size = len(key.secret)
            if not hmac.compare_digest(given[:size], key.secret):
                continue
            if len(given) == size:
                exact = Admitted(key.name, None, key.is_for_metrics)
            elif given[size : size + 1] == BEFORE_SESSION:
                with_session = Admitted(key.name, given[size + 1 :].decode("latin-1"), key.is_for_metrics)
        return exact or with_session

    @property
    def first(self) -> str | None:
        """A key with full access, for the server's own clients; None if there is none."""
        return next((key.secret.decode() for key in self._keys if not key.is_for_metrics), None)


def read_keys(path: Path) -> list[Key]:
    """The keys of a file. Raises ValueError as `Keys` does."""
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"api_key_file={str(path)!r} cannot be read: {error}") from error
    for what, bits in (("read", stat.S_IRGRP | stat.S_IROTH), ("written", stat.S_IWGRP | stat.S_IWOTH)):
        if os.name == "posix" and mode & bits:
            raise ValueError(f"api_key_file={str(path)!r} can be {what} by other users; run chmod 600 {path}")
    keys: list[Key] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"api_key_file={str(path)!r}, line {number}"
        if len(words) not in (2, 3) or words[2:] not in ([], [METRICS]):
            raise ValueError(f"{where}: expected NAME KEY, or NAME KEY {METRICS}")
        keys.append(Key(words[0], _secret(words[1], where), len(words) == 3))
    for what, values in (("name", [key.name for key in keys]), ("key", [key.secret for key in keys])):
        if len(set(values)) < len(values):
            raise ValueError(f"api_key_file={str(path)!r} has a {what} twice; give each client its own")
    if not any(not key.is_for_metrics for key in keys):
        raise ValueError(f"api_key_file={str(path)!r} has no key that clients can use; add a line NAME KEY")
    return keys


def _secret(text: str, where: str) -> bytes:
    if not text.strip():
        raise ValueError(f"{where} is empty; pass a secret, or leave it out if only this machine connects")
    if not (text.isascii() and text.isprintable()) or " " in text:
        raise ValueError(
            f"{where} has characters that a header cannot contain; use ASCII letters, digits and punctuation"
        )
    return text.encode()


class PageGuard:
    """Passes only requests that no foreign page can send.

    Args:
        hosts: names in addition to this machine's own that `Host` may have.
        origins: pages, `scheme://host[:port]`, that may send requests, in addition to those of this server.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], origins: Collection[str]):
        self.app, self.hosts, self.origins = app, {host.lower() for host in hosts}, set(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] == "http":
            try:
                self._check(Headers(scope=scope), scope["method"])
            except RequestError as error:
                body = error_body(scope["path"], error)
                await JSONResponse(body, error.status, error.headers)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check(self, headers: Headers, method: str) -> None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if host and not self._is_own(host):
            raise _refused(f"Host {cut(host)!r} is not this server's; start it with --allow-host NAME, or with a key")
        if origin is not None and origin not in self.origins and origin != f"http://{host}":
            raise _refused(
                f"Origin {cut(origin)!r} is not allowed; start the server with --allow-origin, or with a key"
            )
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and kind != JSON_TYPE:
            raise _refused(f"Content-Type {cut(kind)!r} is not served; send {JSON_TYPE}", 415, "content_type")

    def _is_own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name == "localhost" or name in self.hosts:
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False


def _refused(reason: str, status: int = 403, code: str = "forbidden") -> RequestError:
    return RequestError(reason, status=status, code=code, is_last=True)


@dataclass(frozen=True)
class Pages:
    """The web pages that may send requests to a server.

    Args:
        hosts: names that `Host` may have, in addition to this machine's own: of forwarded ports and containers.
        origins: pages that may send requests and read the answers, `scheme://host[:port]`.

    Raises ValueError for a host that is not a bare name, or an origin that no browser sends.
    """

    hosts: Collection[str] = ()
    origins: Collection[str] = ()

    def __post_init__(self) -> None:
        for host in self.hosts:
            if not host or urlsplit(f"//{host}").hostname != host.lower():
                raise ValueError(f"allow_host={host!r} is not a host name; give it without scheme and port")
        for origin in self.origins:
            scheme, _, rest = origin.partition("://")
            if not scheme.isalnum() or not rest or "/" in rest:
                raise ValueError(f"allow_origin={origin!r} is not an origin; give scheme://host[:port], without a path")

    def check_needed(self, *, has_keys: bool) -> None:
        """Raises ValueError for hosts of a server with keys, whose clients may use any `Host`."""
        if has_keys and self.hosts:
            raise ValueError(
                f"allow_host={next(iter(self.hosts))!r} is for requests without a key, but there is a key, with which "
                "every Host is served; leave one of them out"
            )

    def guarded(self, app: ASGIApp, *, has_keys: bool) -> ASGIApp:
        """`app` behind these checks; with keys they are not needed, because no page has a key."""
        if self.origins:
            headers = ["GET", "POST"]
            app = CORSMiddleware(app, allow_origins=list(self.origins), allow_methods=headers, allow_headers=["*"])
        return app if has_keys else PageGuard(app, self.hosts, self.origins)
