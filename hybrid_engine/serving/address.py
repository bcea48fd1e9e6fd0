"""Checks and binds the address that a server listens at.

`Server` and the `serve` recipe refuse an address that other machines can reach without a key.
"""

import ipaddress
import socket

BACKLOG = 1024
"""Number of connections that may wait to be accepted."""


def check_address(host: str, *, has_keys: bool) -> None:
    """Raises ValueError for an address that other machines can reach without a key."""
    try:
        is_own = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_own = False
    if not is_own and not has_keys:
        raise ValueError(
            f"host={host!r} can be reached by other machines and there is no api_key; pass one, or 127.0.0.1"
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
