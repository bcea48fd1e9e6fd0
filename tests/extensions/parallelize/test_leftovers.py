"""What a parallel module keeps, and what it leaves behind when it is gone; experts and random numbers as they come."""

import gc
import os
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import hybrid_engine
from hybrid_engine import (
    ComputeConfig,
    build_optimizer,
    deduped_state_dict,
    load_deduped_state_dict,
    load_merged_state_dicts,
    merge_state_dicts,
    parallelize,
)
from hybrid_engine.extensions.parallelize.module import parallel_module
from tests.support.distributed import leave_process_group, run_distributed
from tests.support.parallel_nets import Stack, sample


@pytest.fixture(scope="module", autouse=True)
def _one_process_alone():
    leave_process_group()


SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {
    "qwen3": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, intermediate_size=16, num_local_experts=4)),
    "gpt-oss": lambda: GptOssForCausalLM(
        GptOssConfig(**SIZES, head_dim=8, intermediate_size=16, num_local_experts=4, num_experts_per_tok=2)
    ),
}


def batch():
    ids = torch.arange(10).view(2, 5) % 7
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def build(name):
    torch.manual_seed(0)
    return EXPERTS[name]()


def gradients(module):
    module.zero_grad()
    loss = module(**batch()).loss
    loss.backward()
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}


@pytest.mark.parametrize("name", list(EXPERTS))
def test_mixtures_of_experts_run_as_transformers_makes_them(tmp_path, name):
    model = build(name)
    run = parallelize(model, batch(), "dp", ComputeConfig(1, 1), gen_savedir=tmp_path)
    torch.testing.assert_close(gradients(run), gradients(model))


def test_experts_that_are_called_one_by_one_are_refused_with_the_others_names(tmp_path):
    model = build("qwen3")
    model.set_experts_implementation("eager")
    with pytest.raises(ValueError, match=r'set_experts_implementation\("batched_mm"\)'):
        parallelize(model, batch(), "dp", ComputeConfig(1, 1), gen_savedir=tmp_path)


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        return (torch.randint_like(y, 5) * y + y.new_ones(8)).sum()


def test_random_numbers_like_a_tensor_with_a_gradient_have_none(tmp_path):
    module, x = Drawing(), torch.randn(4, 8)
    run = parallelize(module, {"x": x}, "dp", ComputeConfig(1, 1), gen_savedir=tmp_path)
    for one in (run, module):
        torch.manual_seed(0)
        one(x).backward()
    torch.testing.assert_close(run.linear.weight.grad, module.linear.weight.grad)


def test_graphs_of_the_last_shapes_are_kept_alone(tmp_path):
    run = parallelize(Stack(), {"sample": sample(0)}, "dp", ComputeConfig(1, 1), gen_savedir=tmp_path)
    built = []

    def build_graph(*args):
        built.append(args)
        return real(*args)

    real = parallel_module.build_graph
    with patch.object(parallel_module, "MOST_GRAPHS", 2), patch.object(parallel_module, "build_graph", build_graph):
        for length in (6, 7, 8, 8, 9, 6):  # the first is traced again
            run(sample(0, length))
            assert len(run._steps) <= 2
            assert len(run._graphs) <= 2
    assert len(built) == 4


class Counting(nn.Module):
    """State beside tensors, in itself and in a part; what it is decides what is computed."""

    def __init__(self, inner=None):
        super().__init__()
        self.linear = nn.Linear(8, 8) if inner is None else inner
        self.factor = 3

    def get_extra_state(self):
        return {"factor": self.factor}

    def set_extra_state(self, state):
        self.factor = state["factor"]

    def forward(self, x):
        return self.linear(x) * self.factor


@pytest.mark.parametrize("lowering", ["graph", "eager"])
def test_extra_state_goes_from_plan_to_plan_and_counts(tmp_path, lowering):
    module, x = Counting(Counting()), torch.randn(4, 8)
    module.factor, module.linear.factor = 5, 7
    config = ComputeConfig(1, 1, lowering=lowering)
    run = parallelize(module, {"x": x}, "dp", config, gen_savedir=tmp_path)
    other = parallelize(Counting(Counting()), {"x": x}, "dp", config, gen_savedir=tmp_path / "other")
    merged = merge_state_dicts([run.state_dict()])[0]
    assert merged.keys() == module.state_dict().keys()
    expected = module(x)
    plain = Counting(Counting())
    plain.load_state_dict(merged)
    torch.testing.assert_close(plain(x), expected)
    for load in (
        lambda: load_merged_state_dicts(other, merged),
        lambda: other.load_state_dict(run.state_dict()),
        lambda: load_deduped_state_dict(other, deduped_state_dict(run)[0]),
    ):
        other.load_state_dict(Counting(Counting()).state_dict())
        assert not torch.allclose(other(x), expected)
        load()
        torch.testing.assert_close(other(x), expected)


def left_behind(rank, world_size, folder):
    """The open files and threads after two modules and engines of each kind and after six, and a step after those."""
    seen = []
    for number in range(6):
        for policy, options in (("data", {}), ("pp", {"pas_config": {"pipeline_nmicros": 2}})):
            config = ComputeConfig(2, 2, use_end2end=True, **options)
            run = parallelize(Stack(), {"sample": sample(0)}, policy, config, gen_savedir=folder / f"{policy}{number}")
            optimizer = build_optimizer(run, torch.optim.SGD, lr=0.1)  # of tied weights in two stages
            run.train_step([sample(0)] * 2)
            optimizer.step()
            del run, optimizer
            gc.collect()
        for stage in (0, 3):
            zero = {"stage": stage} | ({"mics_shard_size": 1} if stage else {})
            hybrid_engine.initialize(
                model=torch.nn.Linear(4, 4), config={"train_batch_size": 2, "zero_optimization": zero}
            )
        seen.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    copies = [
        parallelize(Stack(), {"sample": sample(0)}, "data", ComputeConfig(2, 2), gen_savedir=folder / "data")
        for _ in "ab"
    ]
    groups = {id(group) for copy in copies for group in copy.meshes.unit.get_all_groups()}
    dist.barrier()
    return seen, len(groups)


def test_a_module_or_an_engine_that_is_gone_leaves_no_open_file_and_no_thread(tmp_path):
    for seen, num_groups in run_distributed(left_behind, 2, tmp_path, seconds=120):
        assert seen[-1] == seen[1], seen
        assert num_groups == 2  # what is in use serves one module
