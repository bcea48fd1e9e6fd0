"""Runs of recipes that Ctrl-C stops at a step, to go on with --resume."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hybrid_engine.rlhf.runs.run_log import RunLog


@contextmanager
def stopped_after(step: int) -> Iterator[None]:
    """Inside, a run must come to `step`, whose line of metrics is its last: Ctrl-C comes before its checkpoint."""
    write = RunLog.write

    def stop_there(log, number, metrics, shown=()):
        write(log, number, metrics, shown)
        if number == step:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunLog, "write", stop_there)
        yield
