"""What serving is on a process that shares the model with the one that is asked."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from hybrid_engine.generation.live.batch import LiveBatch
from hybrid_engine.generation.live.shared import LiveFollower, LiveLink
from hybrid_engine.serving.clients import build_client
from hybrid_engine.serving.keys import Keys
from hybrid_engine.serving.sessions import Trajectory


class FollowingServer:
    """Stands where the leader has its Server: the same address to ask at, no web side of its own.

    Args:
        opening: opens this process's live batch, on a thread of its own.
        name: of the model, as clients call it.
        keys: what the leader's clients must send.
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
        """Joins the leader's `Server.start`; raises what prevents that."""
        self._link.led(_nothing)
        self.url = self._link.receive()
        self.worker.start()
        return self

    def client(self) -> Any:
        """An `openai.OpenAI` that talks to the leader; ValueError where the package is not installed."""
        return build_client(self.url, self.keys.first)

    @property
    def api_key(self) -> str | None:
        """The key to hand to whoever plays episodes; None: the leader needs none."""
        return self.keys.first

    num_running = 0
    """Of requests that came here."""

    def wait(self, ending: threading.Event) -> None:
        """Returns at once: the leader is who waits, and `close()` waits for it."""

    def trajectories(self) -> list[Trajectory]:
        """The leader's conversations, after `close()`; before it a ValueError."""
        if self._trajectories is None:
            raise ValueError(
                f"trajectories(): they are on rank {self._link.leader}, which is asked; call it there, or after serving"
            )
        return self._trajectories

    def close(self) -> None:
        """Waits until the leader has ended; raises what went wrong meanwhile."""
        self.worker.close()
        self._trajectories = self._link.receive()

    def __enter__(self) -> "FollowingServer":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _nothing() -> None:
    pass
