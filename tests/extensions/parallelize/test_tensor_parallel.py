"""Policy `tp`: Megatron-LM's layout, on models whose layout is known, and what it computes on simulated ranks."""

import pytest
import torch
from torch import nn

from hybrid_engine.extensions.parallelize.graph.compute_config import ComputeConfig
from hybrid_engine.extensions.parallelize.graph.graph import build_graph
from hybrid_engine.extensions.parallelize.parallelize import parallelize
from hybrid_engine.extensions.parallelize.planning.policies import tensor_parallel
from tests.support.distributed import leave_process_group, run_distributed
from tests.support.eager_plans import MODELS, megatron, train_alone, train_parallel

QKV, MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def traced(name, num_processes, lowering="graph"):
    """The graph of a model and the plan of `tp` for it."""
    graph = build_graph(*MODELS[name]())
    return graph, tensor_parallel(graph, ComputeConfig(num_processes, num_processes, lowering=lowering))


def split_of(plan, path, op="linear"):
    """The name along which the op of a module is split."""
    return plan.splits.get(f"{path}:{op}:0", (None,))[0]


def test_a_decoder_is_split_by_heads_by_columns_then_rows_and_by_vocabulary():
    graph, plan = traced("llama", 2)
    for layer in ("model.layers.0", "model.layers.1"):
        columns = [f"{layer}.self_attn.{name}" for name in QKV] + [f"{layer}.mlp.{name}" for name in MLP]
        assert [split_of(plan, path) for path in columns] == ["n"] * 5
        assert split_of(plan, f"{layer}.self_attn.o_proj") == split_of(plan, f"{layer}.mlp.down_proj") == "k"
    assert split_of(plan, "model.embed_tokens", "embedding") == "v"
    assert split_of(plan, "lm_head") == "n"
    assert split_of(plan, "", "cross_entropy_loss") == "c"
    assert plan.splits == traced("llama", 2)[1].splits
    norms = [op.key for op in graph.ops.values() if "norm" in op.path]
    assert norms and not set(norms) & set(plan.splits)


# The transformer calls unflatten(), which each process computes whole.
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"transformer"}))
def test_under_eager_it_is_the_layout_that_is_written_by_hand(name):
    graph, plan = traced(name, 2, "eager")
    assert plan.splits == megatron(graph, ComputeConfig(2, 2)).splits


def test_keys_with_fewer_heads_than_processes_are_whole_and_queries_are_not():
    _, plan = traced("llama", 4)
    attention = "model.layers.0.self_attn"
    assert [split_of(plan, f"{attention}.{name}") for name in (*QKV, "o_proj")] == ["n", None, None, "k"]


def test_what_does_not_divide_is_whole():
    _, plan = traced("llama", 3)
    assert {path for path in plan.splits if "self_attn" in path} == set()
    assert split_of(plan, "model.layers.0.mlp.down_proj") == "k"  # 24 features
    assert split_of(plan, "lm_head") is None  # 32 tokens


def test_queries_keys_and_values_of_one_linear_are_whole():
    _, plan = traced("gpt2", 2)
    assert not any(".attn" in key for key in plan.splits)
    assert split_of(plan, "transformer.h.0.mlp.c_fc", "addmm") == "n"


def test_a_seed_of_the_random_splits_of_earlier_releases_is_refused(tmp_path):
    config = ComputeConfig(2, 2, pas_config={"seed": 3})
    with pytest.raises(ValueError, match=r"seed'\]=3: policy 'tp' is tensor parallelism .* leave seed out"):
        parallelize(nn.Linear(8, 8), {"input": torch.ones(4, 8)}, "tp", config, gen_savedir=tmp_path, load_module=False)


def by_policy(rank, world_size, folder):
    return {name: train_parallel(name, 2, False, folder, ("tp", {})) for name in ("llama", "qwen2", "gpt2", "opt")}


@pytest.mark.long
def test_two_processes_train_under_it_as_one_does(tmp_path):
    leave_process_group()
    for results in run_distributed(by_policy, 2, tmp_path, seconds=300):
        for name, found in results.items():
            expected = train_alone(name, num_units=1)
            torch.testing.assert_close(found.losses, expected.losses, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(
                found.weights, {k: w.detach() for k, w in expected.weights.items()}, rtol=1e-5, atol=1e-5
            )
            assert found.num_split >= expected.least_split
