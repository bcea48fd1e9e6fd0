"""Parallel modules in loops as people write them: modes of parts, torch.autocast, torch.compile, plain state dicts."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hybrid_engine import ComputeConfig, parallelize
from tests.support.distributed import leave_process_group, run_distributed
from tests.support.parallel_nets import columns_then_rows


@pytest.fixture(scope="module", autouse=True)
def _one_process_alone():
    leave_process_group()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.down(F.gelu(self.norm(self.up(x))))


class WithoutNorm(Net):
    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def net(kind=Net):
    torch.manual_seed(0)
    return kind()


def inputs(seed, size=4):
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))


def make(module, folder, policy="dp", reuse="override", **options):
    config = ComputeConfig(**{"plan_ngpus": 1} | options)
    return parallelize(module, {"x": inputs(0)}, policy, config, gen_savedir=folder, reuse=reuse)


@pytest.mark.parametrize("lowering", ["graph", "eager"])
def test_each_submodule_keeps_its_mode_also_for_other_sizes(tmp_path, lowering):
    plain = net()
    plain.norm.eval()
    module = make(copy.deepcopy(plain), tmp_path, lowering=lowering)
    for number, (is_training, size) in enumerate([(False, 4), (False, 5), (True, 5), (False, 7), (True, 4)]):
        for one in (plain, module):
            one.norm.train(is_training)
        x = inputs(number, size)
        torch.testing.assert_close(module(x), plain(x))
    assert not torch.equal(plain.norm.running_mean, torch.zeros(8))
    torch.testing.assert_close(dict(module.named_buffers()), dict(plain.named_buffers()))


def test_a_kept_graph_is_of_the_modes_that_it_was_traced_in(tmp_path):
    for is_training in (True, False):
        plain = net()
        plain.norm.train(is_training)
        module = make(copy.deepcopy(plain), tmp_path, reuse="graph")
        torch.testing.assert_close(module(inputs(1)), plain(inputs(1)))


class Writing(Net):
    """Writes into a part of what it trains, and into a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        hidden = self.up(x)
        hidden = hidden.clone()
        hidden[:, 0] += 1
        hidden[1:, 2:4] = x[1:, :2]
        with torch.no_grad():
            self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
            share = hidden.softmax(-1)
        return self.down(self.norm(share * hidden - self.mean))


def test_writing_into_parts_of_what_is_trained_has_its_gradients(tmp_path):
    plain = net(Writing)
    module = make(copy.deepcopy(plain), tmp_path)
    for number in range(2):
        for one in (plain, module):
            one(inputs(number)).square().sum().backward()
    torch.testing.assert_close(
        {n: p.grad for n, p in module.named_parameters()}, {n: p.grad for n, p in plain.named_parameters()}
    )
    torch.testing.assert_close(dict(module.named_buffers()), dict(plain.named_buffers()))


class Autocast(Net):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


def test_autocast_inside_of_a_forward_pass_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"torch\.autocast inside of a forward pass is not traced"):
        make(Autocast(), tmp_path)


class Rotated(Net):
    """Switches autocast off where it is on, as rotary embeddings of transformers do."""

    def forward(self, x):
        with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext():
            x = x @ x.mT @ x
        return super().forward(x)


def test_a_graph_is_traced_anew_under_autocast_and_without_it(tmp_path):
    plain = net()
    module = make(copy.deepcopy(plain), tmp_path)
    for number, is_enabled in enumerate([True, False, True]):
        for size in (4, 5):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_enabled):
                found, expected = module(inputs(number, size)), plain(inputs(number, size))
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_parts_that_switch_autocast_off_are_not_run_under_it(tmp_path):
    module = make(net(Rotated), tmp_path)
    torch.testing.assert_close(module(inputs(0)), net(Rotated)(inputs(0)))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="take lowering='eager'"):
        module(inputs(0))


def in_parts(rank, world_size, folder):
    """What a compiled module in parts gives, and the error for a state dict of whole tensors."""
    outcomes = []
    for lowering in ("graph", "eager"):
        module = make(net(WithoutNorm), folder, columns_then_rows, plan_ngpus=2, lowering=lowering)
        assert module.up.weight.to_local().shape == (4, 6)
        compiled = torch.compile(module, backend="eager")
        found = [compiled(inputs(1)), compiled(inputs(2, 6))]
        with pytest.raises(ValueError, match=r"load_merged_state_dicts") as error:
            module.load_state_dict(net(WithoutNorm).state_dict())
        outcomes.append((found, str(error.value)))
    return outcomes


def test_parts_are_compiled_as_they_run_and_refuse_whole_tensors_by_name(tmp_path):
    plain = net(WithoutNorm)
    for outcomes in run_distributed(in_parts, 2, tmp_path):
        for found, error in outcomes:
            torch.testing.assert_close(found, [plain(inputs(1)), plain(inputs(2, 6))])
            assert "is whole in the state dict, and in parts here" in error
