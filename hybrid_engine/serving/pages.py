"""Refuses requests without a key that a web page in the user's browser could have sent, before they are read.

A browser sends a form, text, or a body without a type to any address, including this machine's own, without asking the
server first. A page whose host name its owner points to 127.0.0.1 (DNS rebinding) has the same origin as a server
there. Without a key a request must therefore name this machine as its host, come from no other origin, and be JSON, for
which a browser asks first.
"""

import ipaddress
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from hybrid_engine.serving.errors import RequestError, cut

JSON_TYPE = "application/json"


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
                await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check(self, headers: Headers, method: str) -> None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if host and not self._is_own(host):
            raise _refused(f"Host {cut(host)!r} is not this server's; start it with --allow-host NAME, or with a key")
        if origin is not None and origin not in self.origins and origin != f"http://{host}":
            raise _refused(
                f"Origin {cut(origin)!r} may not ask here; start the server with --allow-origin, or with a key"
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
                raise ValueError(f"allow_host={host!r} is no name of a host; give it without scheme and port")
        for origin in self.origins:
            scheme, _, rest = origin.partition("://")
            if not scheme.isalnum() or not rest or "/" in rest:
                raise ValueError(f"allow_origin={origin!r} is no origin; give scheme://host[:port], without a path")

    def guarded(self, app: ASGIApp, *, has_keys: bool) -> ASGIApp:
        """`app` behind these checks; with keys they are not needed, because no page has a key."""
        if self.origins:
            headers = ["GET", "POST"]
            app = CORSMiddleware(app, allow_origins=list(self.origins), allow_methods=headers, allow_headers=["*"])
        return app if has_keys else PageGuard(app, self.hosts, self.origins)
