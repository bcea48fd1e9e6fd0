"""The weights that did best on held-out data, kept in `best/` as a run goes on."""

import math
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from hybrid_engine.rlhf.runs.stages import save_stage

BEST = "best"


class Best(NamedTuple):
    """The best measurement so far, as it goes into checkpoints."""

    value: float | None = None
    """None before the first."""
    step: int = 0
    """After how many steps it was."""

    def result(self, figure: str) -> dict[str, dict[str, float]]:
        """What `result.json` says of it, `figure` being what was measured; nothing before the first."""
        return {} if self.value is None else {"best": {figure: self.value, "step": self.step}}


def keep_highest(
    best: Best, value: float, step: int, actor: Any, tokenizer: PreTrainedTokenizerBase, out: Path
) -> Best:
    """The better of `best` and of `value` after `step` steps, whose weights are then saved below `out`; collective.

    What is not a number is never better.
    """
    is_better = value > (-math.inf if best.value is None else best.value)
    return _save(Best(value, step), actor, tokenizer, out) if is_better else best


def keep_lowest(best: Best, value: float, step: int, actor: Any, tokenizer: PreTrainedTokenizerBase, out: Path) -> Best:
    """Keeps the checkpoint of the lowest loss, as `keep_highest` keeps that of the highest score."""
    is_better = value < (math.inf if best.value is None else best.value)
    return _save(Best(value, step), actor, tokenizer, out) if is_better else best


def _save(best: Best, actor: Any, tokenizer: PreTrainedTokenizerBase, out: Path) -> Best:
    save_stage(actor, tokenizer, out / BEST)
    return best
