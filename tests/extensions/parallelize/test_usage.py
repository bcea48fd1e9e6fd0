"""What training scripts do with a parallel module besides calling it: as with the plain module, or a refusal."""

import copy
import pickle

import pytest
import torch
from torch import nn

from hybrid_engine import ComputeConfig, build_optimizer, parallelize
from tests.support.distributed import leave_process_group, run_distributed
from tests.support.parallel_nets import Block, columns_then_rows


class Net(nn.Module):
    """A batch norm, dropout and a number that its forward reads."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.block, self.head = Block(), nn.Linear(8, 3)
        self.block.scale = 1.0

    def forward(self, x):
        return self.head(self.drop(self.block(self.norm(x)) * self.block.scale))


def batch(seed, rows=4):
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def net(kind=Net):
    torch.manual_seed(0)
    return kind()


def make(folder, module=None, policy="dp", plan_ngpus=1, runtime_ngpus=1, lowering="graph"):
    config = ComputeConfig(plan_ngpus=plan_ngpus, runtime_ngpus=runtime_ngpus, lowering=lowering)
    return parallelize(module or net(), {"x": batch(0)}, policy, config, gen_savedir=folder, reuse="override")


def losses_of_training(module, optimizer, seeds):
    """The losses of a step for each seed; gradients are those of the sum over rows."""
    losses = []
    for seed in seeds:
        optimizer.zero_grad()
        loss = module(batch(seed)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module", autouse=True)
def _one_process_alone():
    leave_process_group()


def no_dropout(module):
    module.drop.p = 0.0


def scaled(module):
    module.drop.eval()
    module.block.scale = 3.0


def frozen_norm(module):
    module.drop.eval()
    module.norm.eval()


@pytest.mark.parametrize("change", [no_dropout, scaled, frozen_norm])
@pytest.mark.parametrize("rows", [4, 6])
def test_modes_and_attributes_of_parts_hold_from_when_they_are_set(tmp_path, change, rows):
    plain, parallel = net(), make(tmp_path)
    for module in (plain, parallel):
        module(batch(0))
        change(module)
    for seed in (1, 2):
        torch.testing.assert_close(parallel(batch(seed, rows)), plain(batch(seed, rows)))
    torch.testing.assert_close(parallel.norm.running_mean, plain.norm.running_mean)


def test_what_is_set_before_holds_for_other_shapes_too(tmp_path):
    plain = net()
    frozen_norm(plain)
    parallel = make(tmp_path, copy.deepcopy(plain))
    assert not parallel.norm.training
    torch.testing.assert_close(parallel(batch(1, 7)), plain(batch(1, 7)))


class Detaching(Block):
    def forward(self, x):
        with torch.no_grad():
            scale = self.up(x).sum()
        return super().forward(x) * scale


@pytest.mark.parametrize("region", [torch.no_grad, torch.inference_mode])
def test_what_is_traced_where_there_are_no_gradients_is_trained_as_anything_else(tmp_path, region):
    plain, module = net(Detaching), net(Detaching)
    with torch.no_grad():
        parallel = make(tmp_path, module)
    with region():
        parallel(batch(1, 6))
    for module in (plain, parallel):
        for rows in (4, 6):
            module(batch(1, rows)).sum().backward()
    for (name, expected), found in zip(plain.named_parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, msg=name)


def test_a_parameter_that_is_trained_later_needs_another_optimizer(tmp_path):
    module = net(Block)
    module.up.requires_grad_(False)
    parallel = make(tmp_path, module)
    optimizer = build_optimizer(parallel, torch.optim.SGD, lr=0.1)
    parallel.up.requires_grad_(True)
    parallel(batch(0)).sum().backward()
    with pytest.raises(ValueError, match=r"'up.weight' was not trained when .* call build_optimizer again"):
        optimizer.step()
    before = parallel.up.weight.detach().clone()
    build_optimizer(parallel, torch.optim.SGD, lr=0.1).step()
    assert not torch.equal(parallel.up.weight, before)


def test_gradients_go_on_adding_up_on_one_process_until_they_are_zeroed(tmp_path):
    plain, parallel = net(Block), make(tmp_path, net(Block))
    optimizers = torch.optim.Adam(plain.parameters()), build_optimizer(parallel, torch.optim.Adam)
    for module, optimizer in zip((plain, parallel), optimizers, strict=True):
        for seed in range(3):
            module(batch(seed)).sum().backward()
            optimizer.step()
    for expected, found in zip(plain.parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("lowering", ["graph", "eager"])
def test_a_parallel_module_is_not_pickled(tmp_path, lowering):
    with pytest.raises(ValueError, match="is not pickled; save its state_dict"):
        pickle.dumps(make(tmp_path, net(Block), lowering=lowering))


LAYOUTS = [("graph", "dp", 1), ("eager", columns_then_rows, 2), ("graph", columns_then_rows, 2)]


def usage(rank, world_size, folder):
    return [on_two(rank, folder / str(number), *layout) for number, layout in enumerate(LAYOUTS)]


def on_two(rank, folder, lowering, policy, plan_ngpus):
    """What a copy gives after the module was trained, and the copy; what compiling gives; what is refused."""
    module = make(folder, net(Block), policy, plan_ngpus, 2, lowering)
    module(batch(0))
    copied = copy.deepcopy(module)
    losses = losses_of_training(module, build_optimizer(module, torch.optim.SGD, lr=0.01), range(2))
    optimizer = build_optimizer(copied, torch.optim.SGD, lr=0.01)
    losses_of_copy = losses_of_training(copied, optimizer, range(2))
    compiled = torch.compile(copied, backend="eager")(batch(5)) if lowering == "eager" else None
    optimizer.zero_grad()
    copied(batch(0)).sum().backward()
    optimizer.sync_shard_grad()
    copied(batch(0)).sum().backward()
    try:
        optimizer.step()
    except ValueError as error:
        return losses, losses_of_copy, compiled, str(error)
    return losses, losses_of_copy, compiled, None


def test_copies_train_by_themselves_and_sums_do_not_grow_on_two_processes(tmp_path):
    outcomes = run_distributed(usage, 2, tmp_path, seconds=300)
    for number, (_, _, plan_ngpus) in enumerate(LAYOUTS):
        plain = net(Block)
        # Both units of dp see the same here, so that gradients are twice as large.
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.01 * (2 // plan_ngpus))
        expected = losses_of_training(plain, optimizer, range(2))
        for outcome in outcomes:
            losses, losses_of_copy, compiled, refusal = outcome[number]
            torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(losses_of_copy, expected, rtol=1e-5, atol=1e-6)
            if compiled is not None:
                torch.testing.assert_close(compiled, plain(batch(5)), rtol=1e-5, atol=1e-6)
            assert (refusal is None) == (plan_ngpus == 2)
            assert refusal is None or "zero_grad() before it" in refusal
