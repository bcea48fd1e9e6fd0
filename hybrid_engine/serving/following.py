"""The server object on processes that share a model with the leader, which serves it."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from hybrid_engine.generation.live.batches import LiveBatch
from hybrid_engine.generation.live.shared import LiveFollower, LiveLink
from hybrid_engine.serving.clients import build_client
from hybrid_engine.serving.keys import Keys
from hybrid_engine.serving.sessions import Trajectory


class FollowingServer:
    """Takes the place of the leader's Server: has the same address, but no web server.

    Args:
        opening: opens this process's live batch, on a separate thread.
        name: the model's name for clients.
        keys: the keys that the leader's clients must send.
    """

    def __init__(
        self,
        opening: Callable[[], AbstractContextManager[LiveBatch]],
        link: LiveLink,
        *,
        name: str,
        keys: Keys,
    ):
        self.name, self.keys, self.url = name, keys, ""
        self.worker = LiveFollower(opening, link)
        self._link = link
        self._trajectories: list[Trajectory] | None = None

    def start(self) -> "FollowingServer":
        """Joins the leader's `Server.start`; raises the error that prevents it."""
        self._link.led(_nothing)
        self.url = self._link.receive()
        self._link.share_tokenizer(None)
        self.worker.start()
        return self

    def client(self) -> Any:
        """An `openai.OpenAI` connected to the leader; ValueError if the package is not installed."""
        return build_client(self.url, self.keys.first)

    @property
    def api_key(self) -> str | None:
        """The key for clients that play episodes; None if the leader needs none."""
        return self.keys.first

    num_running = 0
    """Number of running requests that came to this process."""

    def wait(self, ending: threading.Event) -> None:
        """Returns at once: the leader waits, and `close()` waits for the leader."""

    def trajectories(self) -> list[Trajectory]:
        """The leader's conversations, after `close()`; ValueError before."""
        if self._trajectories is None:
            raise ValueError(
                f"trajectories(): they are on rank {self._link.leader}, which is asked; call it there, or after serving"
            )
        return self._trajectories

    def close(self) -> None:
        """Waits until the leader has ended; raises errors that occurred meanwhile."""
        try:
            self.worker.close()
        finally:
            self._link.guides.close()
        self._trajectories = self._link.receive()

    def __enter__(self) -> "FollowingServer":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _nothing() -> None:
    pass
