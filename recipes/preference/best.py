"""The best of a run's measurements on held-out rows, whose weights are kept in the folder `best`."""

import math
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from hybrid_engine.recipes.runs.stages import save_stage


class Best(NamedTuple):
    """The measurement with the lowest loss so far; it goes into checkpoints."""

    loss: float = math.inf
    step: int = 0
    """After how many steps it was; 0 before the first."""


def keep_best(best: Best, loss: float, step: int, actor: Any, tokenizer: PreTrainedTokenizerBase, out: Path) -> Best:
    """The better of `best` and of `loss` after `step` steps, whose weights are then saved below `out`; collective."""
    if loss >= best.loss:
        return best
    save_stage(actor, tokenizer, out / "best")
    return Best(loss, step)
