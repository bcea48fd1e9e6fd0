"""`deepspeed.launcher.runner`: the launcher, and the file that DeepSpeed's reads variables from; ours reads none."""

import importlib
from collections.abc import Sequence

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"


def main(args: Sequence[str] | None = None) -> int:
    """Starts a script as `hybrid-engine launch` does; returns its exit status."""
    status: int = importlib.import_module("hybrid_engine.cli.launcher").main(args)
    return status
