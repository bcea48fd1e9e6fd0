"""A thread gives its pool back before another one computes; see GOMP_SPINCOUNT in the manual of GNU's OpenMP."""

import os
import threading

import pytest
import torch

from hybrid_engine.generation.live.asynchronous import LiveThread, give_back_openmp_pool

pytestmark = pytest.mark.skipif(
    not (os.path.isdir("/proc/self/task") and torch.backends.openmp.is_available()),
    reason="counts the threads of a process as Linux lists them, and OpenMP's",
)


def threads():
    return set(os.listdir("/proc/self/task"))


def compute():
    return torch.full((512, 512), 0.5) @ torch.eye(512)


@pytest.fixture
def two_threads():
    number = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    give_back_openmp_pool()
    torch.set_num_threads(number)


def in_a_thread(work):
    """What `work` returns in a new thread, which has no pool yet."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_the_pool_ends_and_comes_back_with_the_next_product(two_threads):
    def count():
        before = threads()
        first = compute()
        with_pool = threads()
        assert give_back_openmp_pool()
        given_back = threads()
        assert torch.equal(compute(), first)
        return len(with_pool - before), len(given_back - before), len(threads() - before)

    assert in_a_thread(count) == (1, 0, 1)


def test_a_live_thread_begins_without_the_pool_of_the_thread_that_started_it(two_threads):
    seen = []

    class Opening:
        def __enter__(self):
            seen.append(threads())
            raise ValueError("enough")

        def __exit__(self, *_):
            pass

    def start():
        before = threads()
        compute()
        with pytest.raises(ValueError, match="enough"):
            LiveThread(Opening, print, 1).start()
        return before

    before = in_a_thread(start)
    assert len(seen[0] - before) == 1  # the live thread alone


def test_without_openmp_nothing_is_done(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert give_back_openmp_pool() is False
