"""`deepspeed.utils`: the logger."""

import logging
from collections.abc import Sequence

from hybrid_engine.zero.processes import get_rank

logger = logging.getLogger("hybrid_engine")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs `message` on the given ranks; None, or -1 among them, means all."""
    if ranks is None or -1 in ranks or get_rank() in ranks:
        logger.log(level, "[Rank %d] %s", get_rank(), message)


def print_rank_0(message: str) -> None:
    """Prints on rank 0."""
    if get_rank() == 0:
        print(message, flush=True)
