"""Client keys: one, or several named keys in a file, which the server can read again.

# api-keys: a line for each key; text after a # is ignored
alice   3f9c...
monitor 77ab... metrics
"""

import hmac
import os
import stat
from pathlib import Path
from typing import NamedTuple

METRICS = "metrics"


class Key(NamedTuple):
    """A client's key."""

    name: str
    secret: bytes
    is_for_metrics: bool = False
    """Whether it opens only `/metrics`."""


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

    def find(self, given: bytes) -> Key | None:
        """The key that a client sent; None if it is unknown. Comparisons take constant time."""
        found = None
        for key in self._keys:
            if hmac.compare_digest(given, key.secret):
                found = key
        return found

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
            raise ValueError(f"api_key_file={str(path)!r} has a {what} twice; each client has its own")
    if not any(not key.is_for_metrics for key in keys):
        raise ValueError(f"api_key_file={str(path)!r} has no key that clients can use; add a line NAME KEY")
    return keys


def _secret(text: str, where: str) -> bytes:
    if not text.strip():
        raise ValueError(f"{where} is empty; pass a secret, or none where only this machine connects")
    if not (text.isascii() and text.isprintable()) or " " in text:
        raise ValueError(f"{where} has characters that no header can have; use letters, digits and signs of ASCII")
    return text.encode()
