"""The eager lowering: a module under hooks computes what it computes alone, and stays what it is."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hybrid_engine.extensions.parallelize.graph.compute_config import ComputeConfig
from hybrid_engine.extensions.parallelize.graph.graph import build_graph
from hybrid_engine.extensions.parallelize.parallelize import parallelize
from tests.support.distributed import leave_process_group, run_distributed
from tests.support.eager_plans import MODELS, megatron, train_alone, train_parallel
from tests.support.parallel_nets import Stack, build, sample
from tests.tools.parity import MACHINE

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", autouse=True)
def _one_process_alone():
    leave_process_group()


LAYOUTS = [(2, False), (1, False), (1, True)]
"""Processes of a unit of two, and ZeRO."""


def all_models(rank, world_size, folder):
    found = {}
    for name in MODELS:
        for plan_ngpus, use_zero in LAYOUTS if name in ("llama", "mlp") else LAYOUTS[:1]:
            found[name, plan_ngpus, use_zero] = train_parallel(name, plan_ngpus, use_zero, folder)
    return found


def test_two_processes_train_every_model_as_one_does(tmp_path):
    for results in run_distributed(all_models, 2, tmp_path, seconds=300):
        for (name, plan_ngpus, _), found in results.items():
            expected = train_alone(name, num_units=2 // plan_ngpus)
            check_same(found, expected, name)


def check_same(found, expected, name):
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-5, atol=1e-6, msg=lambda m: f"{name}: {m}")
    for what in ("gradients", "weights"):
        for key, tensor in getattr(expected, what).items():
            other = getattr(found, what)[key]
            torch.testing.assert_close(other, tensor, rtol=1e-5, atol=1e-5, msg=lambda m, k=key: f"{name} {k}: {m}")
    assert found.num_split >= expected.least_split, name


def one_of_each(rank, world_size, folder):
    model, arguments = MODELS["llama"]()
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2, lowering="eager")
    parallel = parallelize(model, arguments, megatron, config, gen_savedir=folder)
    attention = parallel.model.layers[0].self_attn
    assert isinstance(parallel, type(model))
    assert list(parallel.state_dict()) == list(model.state_dict())
    assert isinstance(attention.q_proj.weight, DTensor)
    ids = arguments["input_ids"]
    shapes = [list(ids.shape), list(parallel(input_ids=ids[:1, :3]).logits.shape)]
    expected = model.generate(ids[:, :4], max_new_tokens=6, do_sample=False)
    assert torch.equal(parallel.generate(ids[:, :4], max_new_tokens=6, do_sample=False), expected)
    with pytest.raises(IndexError):
        parallel(input_ids=ids + 100)
    assert isinstance(attention.q_proj.weight, DTensor)
    return shapes


def test_a_model_stays_of_its_class_and_generates_by_itself(tmp_path):
    results = run_distributed(one_of_each, 2, tmp_path, seconds=300)
    assert results == [[[4, 6], [1, 3, 32]]] * 2


def eager(policy, module, arguments, folder, **changes):
    changes = {"plan_ngpus": 2, "runtime_ngpus": 2, **changes}
    config = ComputeConfig(**changes, lowering="eager")
    return parallelize(module, arguments, policy, config, gen_savedir=folder, load_module=False)


def placed(*places, follows=None):
    def policy(graph, config):
        plan = megatron(graph, config, globs=())
        for path, out in places:
            plan.place(path, out=out)
        if follows:
            plan.follow(follows)
        return plan

    return policy


class Owned(nn.Module):
    """Code that reads a parameter of a module which it does not call, and one that says a size of its own."""

    def __init__(self, shape=None):
        super().__init__()
        self.up, self.down, self.shape = nn.Linear(8, 16), nn.Linear(16, 8), shape

    def forward(self, x):
        if self.shape is None:
            return nn.functional.linear(self.up(x), self.down.weight)
        return self.down(self.up(x).view(self.shape).relu().view(-1, 16))


REFUSED = {
    "a change between ops": (placed(("model.layers.0", "b")), "llama", "layouts change at borders of modules alone"),
    "a part as the result": (placed(("lm_head", "n"), follows="*"), "llama", "cannot carry this plan|lies in parts"),
    "stages": ("pp", None, "lowering='eager' has no stages"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_hooks_cannot_carry_is_refused_by_name(tmp_path, name):
    policy, model, match = REFUSED[name]
    if model is None:
        changes = {"use_end2end": True, "pas_config": {"pipeline_nmicros": 2}}
        module, arguments = build(Stack), {"sample": sample(0)}
    else:
        changes, (module, arguments) = {}, MODELS[model]()
    with pytest.raises(ValueError, match=match):
        eager(policy, module, arguments, tmp_path, **changes)


def test_parameters_and_sizes_of_other_modules_are_refused_by_name(tmp_path):
    x = {"x": torch.randn(4, 8)}
    with pytest.raises(ValueError, match=r":linear:0 reads down.weight, a parameter of another module"):
        eager(placed(("up", "n")), Owned(), x, tmp_path / "1")
    with pytest.raises(ValueError, match=r"does not run on parts|gives"):
        eager(placed(("up", "n"), ("down", "k"), follows="*"), Owned((4, 2, 8)), x, tmp_path / "2")


def test_recomputation_is_left_to_the_model(tmp_path):
    def policy(graph, config):
        plan = megatron(graph, config)
        plan.recompute = ("model.layers.*",)
        return plan

    with pytest.raises(ValueError, match="gradient checkpointing, or pass lowering='graph'"):
        eager(policy, *MODELS["llama"](), tmp_path)


def test_one_process_has_no_hooks_and_a_class_gives_a_class(tmp_path):
    module = build(Stack)
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=1, use_end2end=True, lowering="eager")
    parallel = parallelize(module, {"sample": sample(0)}, "dp", config, gen_savedir=tmp_path)
    expected = copy.deepcopy(module)(sample(1))
    parallel.train_step([sample(1)])
    assert parallel.hooks is None
    torch.testing.assert_close(parallel.infer_step([sample(1)])[0][1], expected[1])
    with pytest.raises(ValueError, match="call train_step"):
        parallel(sample(1))
    kind = parallelize(Stack, {"sample": sample(0)}, "dp", config, gen_savedir=tmp_path)
    made = kind()
    assert isinstance(made, Stack)
    assert isinstance(made, kind)
    made.train_step([sample(0)])


def planned(rank, world_size, folder):
    """Training under the plans of `autodist` for devices so slow that all is split that can be."""
    if rank == 0:  # which makes the plans
        MACHINE.save(folder / "costs.json")
    options = {"costs": str(folder / "costs.json")}
    return {name: train_parallel(name, 2, False, folder, ("autodist", options)) for name in MODELS}


def test_two_processes_train_every_model_under_plans_of_autodist_as_one_does(tmp_path):
    for results in run_distributed(planned, 2, tmp_path, seconds=300):
        for name in MODELS:
            check_same(results[name], train_alone(name, num_units=1), name)


@pytest.mark.parametrize("options", [{"explore_pipeline": True}, {"recompute_modules": "layers.*"}], ids=str)
def test_what_the_eager_lowering_lacks_is_no_option_of_autodist(options, tmp_path):
    with pytest.raises(ValueError, match=r"does not go with lowering='eager'.*pass lowering='graph'"):
        eager("autodist", *MODELS["mlp"](), tmp_path, pas_config=options)


def test_a_vocabulary_in_parts_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"embed:embedding:0 is split along \['v'\], where the op of a part"):
        eager(placed(("embed", "v")), *MODELS["transformer"](), tmp_path)


def test_ops_that_nobody_placed_follow_what_they_read():
    graph = build_graph(*MODELS["llama"]())
    plan = megatron(graph, ComputeConfig(plan_ngpus=2, runtime_ngpus=2))
    assert plan.splits["model.layers.0.self_attn:scaled_dot_product_attention:0"] == ("b",)
    assert plan.splits["model.layers.0.mlp.act_fn:silu:0"] == ("c",)
    assert not any(key.startswith("model.norm") for key in plan.splits)


def test_an_unknown_lowering_is_refused():
    with pytest.raises(ValueError, match="lowering='jit' must be one of"):
        ComputeConfig(plan_ngpus=1, runtime_ngpus=1, lowering="jit")
