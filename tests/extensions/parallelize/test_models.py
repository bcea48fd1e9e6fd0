"""Training under plans is the module's own: a sample of all that `make parity` runs, on real processes."""

import pytest
import torch

from tests.support.distributed import leave_process_group
from tests.tools.parity import Layout, difference, differences, plain_training

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", autouse=True)
def _one_process_alone():
    leave_process_group()


NUM_STEPS = 2
"""Of Adam: the second one with moments of the first. `make parity` takes five."""


def pipelined(policy, plan_ngpus, micros, use_zero=False, **options):
    pas_config = {"pipeline_nmicros": micros} | options
    return Layout(policy=policy, plan_ngpus=plan_ngpus, use_zero=use_zero, pas_config=pas_config)


def random_splits(plan_ngpus, seed, use_zero=False):
    return Layout(policy="random splits", plan_ngpus=plan_ngpus, use_zero=use_zero, pas_config={"_seed": seed})


CASES = {
    2: [
        ("llama", random_splits(2, 5)),
        ("qwen2", Layout(policy="tp", plan_ngpus=2)),
        ("gpt2", pipelined("pp", 2, 4)),
        ("convolutions", Layout(policy="dp", use_zero=True)),
        ("nested", Layout(policy="data", plan_ngpus=2)),
    ],
    4: [
        ("llama", pipelined("hybrid", 4, 4, pipeline_nstages=2)),
        ("opt", random_splits(4, 3)),
        ("qwen2", random_splits(2, 4, use_zero=True)),
        ("experts", Layout(policy="autodist", plan_ngpus=4)),
    ],
}


@pytest.mark.parametrize("num_processes", list(CASES))
def test_training_under_a_plan_is_that_of_the_module(num_processes, tmp_path):
    found = differences(CASES[num_processes], num_processes, tmp_path, NUM_STEPS)
    assert {f"{name}, {layout}": words for (name, layout), words in zip(CASES[num_processes], found, strict=True)} == {
        f"{name}, {layout}": "" for name, layout in CASES[num_processes]
    }


def test_a_training_with_another_weight_is_told_apart():
    found = plain_training("mlp")
    assert difference(plain_training("mlp"), [found], Layout(policy="dp")) == ""
    found.weights["layers.0.bias"] = found.weights["layers.0.bias"] + 1e-4 * torch.eye(8)[0]
    assert "weights of rank 0" in difference(plain_training("mlp"), [found], Layout(policy="dp"))
