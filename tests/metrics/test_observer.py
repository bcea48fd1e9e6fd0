"""Progress lines of an engine."""

import re

import pytest
import torch
from torch import nn

import hybrid_engine

pytestmark = pytest.mark.quick


class Squares(nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()


def test_the_printed_loss_is_the_mean_also_after_the_batch_size_changed(capsys):
    config = {"train_batch_size": 1, "steps_per_print": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
    torch.manual_seed(0)
    engine, *_ = hybrid_engine.initialize(model=Squares(3, 2), config=config)
    engine.set_train_batch_size(4)
    losses = []
    for size in range(1, 5):
        loss = engine(torch.full((1, 3), float(size)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    printed = float(re.search(r"step=1 loss=([\d.e+-]+)", capsys.readouterr().out)[1])
    assert printed == pytest.approx(sum(losses) / 4, rel=1e-5)
