"""Lines for the user that come up again with every engine and on every process, and are worth reading once."""

import logging
import os
import sys
from functools import cache

logger = logging.getLogger("hybrid_engine")


@cache
def say_once(line: str) -> None:
    """Logs a warning on rank 0, the first time that it comes up in this process.

    Python shows warnings on stderr if logging is not configured.
    """
    if _is_first_process():
        logger.warning("%s", line)


def _is_first_process() -> bool:
    # Before processes have met, their launcher's word counts.
    dist = sys.modules.get("torch.distributed")  # not imported here: the command reads its options without torch
    if dist is not None and dist.is_initialized():
        return bool(dist.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"
