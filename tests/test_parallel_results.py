"""What a parallel module gives back: its parameters and views of them, containers of any kind, what is no tensor."""

import pytest
import torch
from distributed import leave_process_group, run_distributed
from torch import nn

from hybrid_engine import ComputeConfig, build_optimizer, parallelize


@pytest.fixture(scope="module", autouse=True)
def _one_process_alone():
    leave_process_group()


class Showing(nn.Module):
    """Its results lie in its parameters' memory, and are a view of something that is computed."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.down(torch.relu(self.up(x)))
        weight = self.up.weight
        shown = {"whole": weight, "view": weight[:2].t(), "again": weight.view(4, 16), "detached": weight.detach()}
        return y.view(-1), shown


def showing():
    torch.manual_seed(0)
    return Showing()


def loss_of(y, shown):
    """Also changes a result in place, as callers may."""
    y += 1
    return y.square().sum() + sum(part.square().sum() for name, part in shown.items() if name != "detached")


X = torch.linspace(-1, 1, 32).view(4, 8)


def kept_results(rank, world_size, folder):
    """By lowering what was returned, read after the backward pass, and the gradients."""
    found = {}
    for lowering in ("graph", "eager"):
        config = ComputeConfig(1, 2, use_zero=True, lowering=lowering)
        module = parallelize(showing(), {"x": X}, "dp", config, gen_savedir=folder / lowering)
        optimizer = build_optimizer(module, torch.optim.SGD, lr=0.1)
        y, shown = module(X)
        loss_of(y, shown).backward()
        optimizer.sync_shard_grad()
        gradients = {name: p.grad.full_tensor() for name, p in module.named_parameters()}
        optimizer.step()
        module.eval()
        with torch.no_grad():
            after = module(X)[1]["whole"]
        found[lowering] = y.detach(), {name: part.detach() for name, part in shown.items()}, gradients, after
    return found


def test_parameters_that_a_module_returns_are_there_after_the_backward_pass_under_zero(tmp_path):
    module = showing()
    expected_y, expected = module(X)
    (2 * loss_of(expected_y, expected)).backward()  # of two units
    gradients = {name: p.grad for name, p in module.named_parameters()}
    for outcome in run_distributed(kept_results, 2, tmp_path):
        for y, shown, found, after in outcome.values():
            torch.testing.assert_close(y, expected_y.detach())
            torch.testing.assert_close(shown, {name: part.detach() for name, part in expected.items()})
            torch.testing.assert_close(found, gradients)
            torch.testing.assert_close(after, expected["whole"].detach() - 0.1 * gradients["up.weight"])
