"""The thread of a process that shares a served model and is not asked itself: it does as the leader does."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from hybrid_engine.generation.live.batch import LiveBatch
from hybrid_engine.generation.live.link import LiveLink
from hybrid_engine.generation.live.shared import follow
from hybrid_engine.generation.openmp_pool import give_back_openmp_pool


class LiveFollower:
    """Makes the leader's calls on a batch in a thread of its own, from `start()` until the leader ends.

    Args:
        opening: opens the batch; entered and left on the thread.
    """

    def __init__(self, opening: Callable[[], AbstractContextManager[LiveBatch]], link: LiveLink):
        self._opening, self._link = opening, link
        self._opened = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hybrid-engine-follower", daemon=True)
        self.is_staying = True
        """Whether somebody on this process still has a use for the leader."""
        self.error: BaseException | None = None

    def start(self) -> None:
        """Opens the batch; raises what that raises."""
        give_back_openmp_pool()
        self._thread.start()
        self._opened.wait()
        if self.error is not None:
            self.close()

    def close(self) -> None:
        """Waits until the leader has ended; raises what ended the thread, if something did."""
        self.is_staying = False
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            with self._opening() as batch:
                self._opened.set()
                follow(batch, self._link, lambda: self.is_staying)
        except BaseException as error:
            self.error = error
        finally:
            self._opened.set()
