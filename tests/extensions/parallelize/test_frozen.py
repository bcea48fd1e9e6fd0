"""Modules of which a process trains nothing, or nothing of one group: stages whose parameters are all frozen."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hybrid_engine
from hybrid_engine import (
    ComputeConfig,
    build_optimizer,
    deduped_state_dict,
    load_deduped_state_dict,
    load_merged_state_dicts,
    parallelize,
)
from tests.extensions.parallelize.test_checkpoints import gathered
from tests.support.distributed import leave_process_group, run_distributed
from tests.support.random_splits import random_splits

STEPS, MICROS = 3, 2


class Halves(nn.Module):
    """Two halves of weights alone, as Muon wants them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2))) for _ in range(2))

    def forward(self, x):
        return F.gelu(self.second(F.gelu(self.first(x)))).square().sum()


def halves(frozen):
    torch.manual_seed(0)
    module = Halves()
    for name in frozen:
        module.get_submodule(name).requires_grad_(False)
    return module


def batches(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(4, 8, generator=generator) for _ in range(MICROS)]


def one_group(named):
    return [{"params": [p for _, p in named]}]


def group_for_each_half(named):
    """The second half learns faster."""
    listed = list(named)
    return [
        {"params": [p for name, p in listed if name.startswith("first")]},
        {"params": [p for name, p in listed if name.startswith("second")], "lr": 0.03},
    ]


OPTIMIZERS = {
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "sgd": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "muon": (torch.optim.Muon, {"lr": 0.01}),
}
CASES = {
    "adam, first stage frozen": ("adam", ["first"], one_group),
    "muon, first stage frozen": ("muon", ["first"], one_group),
    "sgd, last stage frozen": ("sgd", ["second"], one_group),
    "adam, a group for each stage": ("adam", [], group_for_each_half),
    "adafactor, a group for each stage, one of them frozen": ("adafactor", ["first"], group_for_each_half),
}


def make(folder, frozen, policy, **options):
    pas_config = {"pipeline_nmicros": MICROS} if policy == "pp" else {}
    config = ComputeConfig(options.pop("plan_ngpus", 2), use_end2end=True, pas_config=pas_config, **options)
    arguments = {"x": torch.ones(4, 8)}
    return parallelize(halves(frozen), arguments, policy, config, gen_savedir=folder, reuse="override")


def steps(module, optimizer, numbers):
    """The norms of the gradients."""
    norms = []
    for number in numbers:
        module.train_step(batches(number))
        norms.append(float(optimizer.clip_gnorm(0.7)))
        optimizer.scale_grads(0.5)
        optimizer.step()
    return norms


def plain_steps(module, optimizer, numbers):
    norms = []
    for number in numbers:
        optimizer.zero_grad()
        sum(module(x) for x in batches(number)).backward()
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), 0.7).item())
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad *= 0.5
        optimizer.step()
    return norms


def trained(module):
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def journey(folder, name, frozen, groups):
    """Steps in stages; their checkpoints in the same stages again, in no stages, and from there in stages."""
    kind, options = OPTIMIZERS[name]

    def build(policy, **more):
        module = make(folder, frozen, policy, **more)
        return module, build_optimizer(module, kind, param_groups=groups, **options)

    module, optimizer = build("pp")
    norms = steps(module, optimizer, range(STEPS))
    merged = gathered(module.state_dict(), optimizer.state_dict())
    own = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    deduped = copy.deepcopy(deduped_state_dict(module, optimizer))
    found = [steps(module, optimizer, [STEPS])]
    again, optimizer = build("pp")
    again.load_state_dict(own[0])
    optimizer.load_state_dict(own[1])
    found.append(steps(again, optimizer, [STEPS]))
    again, optimizer = build("pp")
    load_deduped_state_dict(again, deduped[0], optimizer, deduped[1])
    found.append(steps(again, optimizer, [STEPS]))
    other, optimizer = build(random_splits())
    load_merged_state_dicts(other, merged[0], optimizer, merged[1])
    found.append(steps(other, optimizer, [STEPS]))
    back, optimizer = build("pp")
    load_merged_state_dicts(back, merged[0], optimizer, merged[1])
    rates = [group["lr"] for group in optimizer.param_groups]
    found.append(steps(back, optimizer, [STEPS]))
    return norms, merged, found, gathered(back.state_dict(), optimizer.state_dict()), rates


def all_journeys(rank, world_size, folder):
    found = {name: journey(folder / name, *case) for name, case in CASES.items()}
    everything = ["first", "second"]
    with pytest.raises(ValueError) as caught:
        build_optimizer(make(folder / "nothing", everything, "pp"), torch.optim.Adam)
    found["nothing"] = str(caught.value)
    with pytest.raises(ValueError) as caught:
        build_optimizer(make(folder / "lbfgs", [], "pp"), torch.optim.LBFGS)
    found["lbfgs"] = str(caught.value)
    engine_config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICROS,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    with pytest.raises(ValueError) as caught:
        hybrid_engine.initialize(model=make(folder / "engine", ["second"], "pp"), config=engine_config)
    found["engine"] = str(caught.value)
    return found


@pytest.fixture(scope="module", autouse=True)
def _one_process_alone():
    leave_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_distributed(all_journeys, 2, tmp_path_factory.mktemp("frozen"), seconds=300)


@pytest.mark.parametrize("case", list(CASES))
def test_a_process_that_trains_nothing_goes_on_with_the_others_and_from_their_checkpoints(outcomes, case):
    name, frozen, groups = CASES[case]
    kind, options = OPTIMIZERS[name]
    module = halves(frozen)
    optimizer = kind(groups(trained(module)), **options)
    expected = plain_steps(module, optimizer, range(STEPS))
    before = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    expected_next = plain_steps(module, optimizer, [STEPS])
    for norms, merged, found, last, rates in (outcome[case] for outcome in outcomes):
        torch.testing.assert_close(norms, expected)
        torch.testing.assert_close(merged[0], dict(before[0]))
        for one in found:
            torch.testing.assert_close(one, expected_next)
        torch.testing.assert_close(last[0], dict(module.state_dict()))
        assert rates == [group["lr"] for group in optimizer.param_groups]
        again = halves(frozen)
        again.load_state_dict(merged[0])
        optimizer_again = kind(groups(trained(again)), **options)
        optimizer_again.load_state_dict(merged[1])
        torch.testing.assert_close(plain_steps(again, optimizer_again, [STEPS]), expected_next)


def test_what_trains_nothing_anywhere_and_what_needs_all_parameters_at_once_are_refused(outcomes):
    for outcome in outcomes:
        assert "trains no parameter" in outcome["nothing"]
        assert "LBFGS" in outcome["lbfgs"]
        assert "stages" in outcome["lbfgs"]
        assert "all parameters of stage 1 are frozen" in outcome["engine"]
