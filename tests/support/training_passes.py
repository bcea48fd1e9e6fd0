"""One optimizer step as recipes make it, as a function of losses."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hybrid_engine.rlhf.batches.micro_batches import DeviceFigures, Figures, TrainingPasses
from hybrid_engine.rlhf.batches.passes import Items, RunPasses

LossOf = Callable[[list[int]], tuple[torch.Tensor, DeviceFigures]]


def train_in_parts(
    engines: Sequence[Any], items: Items, sizes: RunPasses, losses: Sequence[tuple[Any, LossOf]]
) -> list[Figures]:
    """A step of `engines`, with a backward pass of each of `losses` (what goes backward, and its loss) in each pass."""
    passes = TrainingPasses(engines, items, sizes)
    for rows in passes:
        with passes.fitting():
            for trained, loss_of in losses:
                trained.backward(passes.loss(partial(loss_of, rows)))
    for engine in engines:
        engine.step()
    return passes.figures()
