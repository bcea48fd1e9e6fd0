"""`parallelize` and `build_optimizer`: one process, and two that train as one."""

import dataclasses
import functools
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hybrid_engine.extensions.parallelize.checkpoints import broadcast_weights
from hybrid_engine.extensions.parallelize.graph.compute_config import ComputeConfig
from hybrid_engine.extensions.parallelize.module.parallel_module import ParallelModule
from hybrid_engine.extensions.parallelize.optimizer import build_optimizer
from hybrid_engine.extensions.parallelize.parallelize import parallelize
from hybrid_engine.extensions.parallelize.planning.plan import Plan
from tests.support.distributed import leave_process_group, run_distributed
from tests.support.parallel_nets import Block
from tests.support.random_splits import random_splits


@pytest.fixture(scope="module", autouse=True)
def _one_process_alone():
    leave_process_group()


class Net(nn.Module):
    """Tied weights, a buffer that is written into, a dict as its sample: end to end."""

    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(16, 8), Block(), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, sample):
        self.calls += 1
        logits = self.head(self.block(self.embed(sample["ids"])))
        return F.cross_entropy(logits.flatten(0, 1), sample["ids"].roll(1).flatten(), reduction="sum"), logits


class Whole(nn.Module):
    """A plain module around one that may be parallel."""

    def __init__(self):
        super().__init__()
        self.first, self.block = nn.Linear(8, 8), Block()

    def forward(self, x):
        return self.block(self.first(x).tanh())


def sample(seed, length=6):
    return {"ids": torch.randint(0, 16, (4, length), generator=torch.Generator().manual_seed(seed))}


def config(**changes):
    return ComputeConfig(**{"plan_ngpus": 1, "runtime_ngpus": 1, "use_end2end": True} | changes)


def make(tmp_path, policy="dp", module=None, **options):
    return parallelize(
        module or Net(),
        {"sample": sample(0)},
        policy,
        config(**options.pop("config", {})),
        gen_savedir=tmp_path,
        **options,
    )


def plain_training(batches, clip=0.7):
    """Weights and gradient norms of five Adam steps of the plain module, each on the sum of `batches(step)`."""
    torch.manual_seed(0)
    module = Net()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    norms = []
    for step in range(5):
        optimizer.zero_grad()
        for batch in batches(step):
            module(batch)[0].backward()
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), clip).item())
        optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}, norms


def parallel_training(rank, world_size, folder, policy, plan_ngpus, use_zero):
    torch.manual_seed(rank)
    unit, num_units = rank // plan_ngpus, world_size // plan_ngpus
    if rank == 0:
        torch.manual_seed(0)
    options = {"plan_ngpus": plan_ngpus, "runtime_ngpus": world_size, "use_zero": use_zero}
    module = make(folder, policy, config=options)
    optimizer = build_optimizer(module, torch.optim.Adam, lr=0.01)
    norms = []
    for step in range(5):
        results = module.train_step([sample(100 * step + 2 * unit + i, 6 + step % 2) for i in range(2)])
        assert results[0][1].shape == (4, 6 + step % 2, 16)
        norms.append(float(optimizer.clip_gnorm(0.7)))
        optimizer.step()
    weights = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in module.named_parameters()}
    return {name: weight.detach() for name, weight in weights.items()}, norms, num_units, module.calls.item()


LAYOUTS = [("tp", 2, False), (random_splits(), 2, False), ("data", 2, False), ("dp", 1, False), ("dp", 1, True)]


class Partly(nn.Module):
    """The first linear is always run, the second where it is asked for, the third never."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, both):
        return self.second(self.first(x)) if both else self.first(x)


def train_partly(module, optimizer, *used):
    for step in range(2):
        optimizer.zero_grad()
        for both in used:
            module(torch.ones(4, 8), both and step == 0).sum().backward()
        optimizer.step()
    return [p.detach() for p in module.parameters()]


def partly_used(rank, world_size, folder):
    """Weights after two steps: the second linear has a gradient on one process in the first, then on none."""
    module = Partly()
    arguments = {"x": torch.ones(4, 8), "both": True}
    compute = ComputeConfig(plan_ngpus=1, runtime_ngpus=world_size, lowering="eager")
    module = parallelize(module, arguments, "dp", compute, gen_savedir=folder)
    return train_partly(module, build_optimizer(module, torch.optim.AdamW, lr=0.1), rank == 0)


def train_groups(module, build, units):
    """Two groups: the biases of what is parallel, and the rest, of which some is plain."""

    def groups(named):
        named = list(named)
        biases = [p for name, p in named if "block" in name and "bias" in name]
        others = [p for name, p in named if not ("block" in name and "bias" in name)]
        return [{"params": biases, "lr": 0.02}, {"params": others}]

    optimizer = build(module, groups)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for step in range(2):
        optimizer.zero_grad()
        for unit in units:
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + unit))
            module(x).square().mean().backward()
        optimizer.step()
        schedule.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]


def train_with(kind, rank=None, folder=None):
    """In a unit of two, or the module itself; what torch has no sharded form of is stepped on whole tensors."""
    torch.manual_seed(0)
    module = Whole()
    if rank is None:
        return train_groups(module, lambda m, groups: kind(groups(m.named_parameters()), lr=0.01), (0,))
    compute = ComputeConfig(plan_ngpus=2, runtime_ngpus=2)
    module.block = parallelize(module.block, {"x": torch.ones(4, 8)}, random_splits(), compute, gen_savedir=folder)
    return train_groups(module, lambda m, groups: build_optimizer(m, kind, lr=0.01, param_groups=groups), (0,))


def all_layouts(rank, world_size, folder):
    if world_size == 2:
        plain = Partly()
        expected = train_partly(plain, torch.optim.AdamW(plain.parameters(), lr=0.1), True, False)
        torch.testing.assert_close(partly_used(rank, world_size, folder / "partly"), expected)
        for kind in (torch.optim.Adafactor, torch.optim.Rprop, torch.optim.RMSprop):
            torch.testing.assert_close(train_with(kind, rank, folder / "kinds"), train_with(kind))
    return [parallel_training(rank, world_size, folder / str(number), *layout) for number, layout in enumerate(LAYOUTS)]


def test_two_processes_train_as_one_under_every_layout(tmp_path):
    outcomes = run_distributed(all_layouts, 2, tmp_path, seconds=300)
    for results in zip(*outcomes, strict=True):
        num_units = results[0][2]
        expected = plain_training(lambda step, units=num_units: samples_of(step, 2 * units))
        for weights, norms, _, calls in results:
            assert calls == 10
            torch.testing.assert_close(norms, expected[1], rtol=1e-5, atol=1e-6)
            for name, weight in expected[0].items():
                torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-5)


def samples_of(step, count):
    return [sample(100 * step + i, 6 + step % 2) for i in range(count)]


def test_one_process_computes_what_the_module_computes_also_for_another_length(tmp_path):
    module = Net()
    parallel = make(tmp_path, module=module)
    assert isinstance(parallel, ParallelModule)
    assert list(parallel.state_dict()) == list(module.state_dict())
    for length in (6, 9):
        assert torch.equal(parallel.infer_step([sample(1, length)])[0][1], module(sample(1, length))[1])
    assert parallel.calls == module.calls == 2
    module.embed.weight.data.zero_()
    assert parallel.embed.weight.abs().sum() > 0


def test_a_class_gives_a_class(tmp_path):
    kind = parallelize(Net, {"sample": sample(0)}, "dp", config(), gen_savedir=tmp_path)
    assert issubclass(kind, ParallelModule)
    assert parallelize(kind, {}, "dp", config()) is kind
    assert len(kind().infer_step([sample(0)])) == 1


def test_a_submodule_may_be_parallel_in_a_plain_module(tmp_path):
    torch.manual_seed(0)
    module, x = Whole(), torch.randn(4, 8)
    module(x).sum().backward()
    expected = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    module.block = parallelize(module.block, {"x": x}, "dp", config(use_end2end=False), gen_savedir=tmp_path)
    groups = lambda named: [{"params": [p], "lr": 0.1} for _, p in named]  # noqa: E731
    optimizer = build_optimizer(module, torch.optim.SGD, lr=1.0, momentum=0.9, param_groups=groups)
    module(x).sum().backward()
    assert len(optimizer.param_groups) == 6
    assert [p.shape for p in optimizer._non_parallel_module_reducer.parameters] == [(8, 8), (8,)]
    for name, p in module.named_parameters():
        torch.testing.assert_close(p.grad, expected[name])


def test_parameters_without_a_gradient_are_left_as_they_are(tmp_path):
    plain = Partly()
    expected = train_partly(plain, torch.optim.AdamW(plain.parameters(), lr=0.1), True)
    torch.testing.assert_close(partly_used(0, 1, tmp_path), expected)


def test_gradients_are_scaled_after_they_are_synced_alone(tmp_path):
    optimizer = build_optimizer(make(tmp_path), torch.optim.SGD, lr=0.1)
    seen = []
    optimizer.register_reducer_post_hook(lambda reducer, flat: seen.append(flat.numel()))
    with pytest.raises(ValueError, match="call sync_shard_grad"):
        optimizer.scale_grads(0.5)
    optimizer.sync_shard_grad()
    optimizer.scale_grads(0.5)
    assert len(seen) == 1


def test_gradients_of_the_next_step_are_synced_also_where_the_last_was_left_out(tmp_path):
    module = make(tmp_path)
    optimizer = build_optimizer(module, torch.optim.SGD, lr=0.1)
    seen = []
    optimizer.register_reducer_pre_hook(lambda reducer, flat: seen.append(flat.sum().item()))
    for number in (0, 1):  # as where a step is left out for a norm that is not finite
        module.train_step([sample(number)])
        optimizer.clip_gnorm(1.0)
        optimizer.clip_gnorm(0.5)
    assert len(seen) == 2


def test_a_dummy_batch_counts_nothing_and_losses_are_scaled(tmp_path):
    module = make(tmp_path)
    module.train_step([sample(0)])
    gradient = module.block.up.weight.grad
    module.train_step([sample(0), sample(1)], is_dummy_batch=[False, True], scale_fn=lambda loss: 3 * loss)
    torch.testing.assert_close(module.block.up.weight.grad, 3 * gradient)


def test_a_plan_is_used_again_for_the_same_model_and_config_alone(tmp_path):
    made = []

    def policy(graph, compute_config):
        from hybrid_engine.extensions.parallelize.planning.policies import replicated_plan

        made.append(1)
        return replicated_plan(graph, (1,))

    make(tmp_path, policy)
    make(tmp_path, policy)
    assert len(made) == 1
    with pytest.raises(ValueError, match=r"holds a plan for another user_config.*reuse='moo'"):
        make(tmp_path, policy, config={"user_config": {"a": 1}})
    make(tmp_path, policy, config={"user_config": {"a": 1}}, reuse="moo")
    make(tmp_path, policy, config={"user_config": {"a": 1}}, reuse="override")
    assert len(made) == 3


class Chosen:
    """A policy that is an object, another one in each run."""

    def __call__(self, graph, compute_config):
        return Plan(graph=graph, mesh=(1,))


def untraceable(self, sample):
    return self.head(self.embed(sample["ids"])).sum() if sample["ids"].sum() > 0 else None


@pytest.mark.parametrize("reuse", ["override", "moo", "graph"])
def test_a_plan_that_is_not_to_be_matched_goes_also_where_the_next_one_cannot_be_made(tmp_path, monkeypatch, reuse):
    make(tmp_path)
    monkeypatch.setattr(Net, "forward", untraceable)
    with pytest.raises(ValueError, match="Net cannot be traced at"):
        make(tmp_path, reuse=reuse)
    assert not list(tmp_path.glob("**/plan.json"))


def test_a_plan_for_another_config_is_not_used_again(tmp_path):
    make(tmp_path)
    for changes in ({"inference_only": True}, {"lowering": "eager"}, {"use_end2end": False}):
        with pytest.raises(ValueError, match=f"holds a plan for another {next(iter(changes))}; pass reuse='moo'"):
            make(tmp_path, config=changes)


def test_a_policy_that_is_made_anew_is_the_same_one(tmp_path):
    for _ in range(2):
        make(tmp_path, Chosen())
        make(tmp_path, functools.partial(Chosen.__call__, Chosen()), instance_name="partial")


class Tables(Block):
    """Two buffers of different sizes that no state dict has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.tensor(2.0), persistent=False)
        self.register_buffer("table", torch.arange(8.0), persistent=False)

    def forward(self, x):
        return super().forward(x * self.factor + self.table)


def test_a_graph_is_kept_of_a_module_with_several_buffers_that_no_state_dict_has(tmp_path):
    module, x = Tables(), torch.ones(4, 8)
    options = {"compute_config": config(use_end2end=False), "gen_savedir": tmp_path, "reuse": "graph"}
    for _ in range(2):
        torch.testing.assert_close(parallelize(module, {"x": x}, "dp", **options)(x), module(x))


class Traced(Net):
    """Counts how often it is traced or run."""

    calls_of_forward = 0
    factor = 1.0

    def forward(self, sample):
        type(self).calls_of_forward += 1
        loss, logits = super().forward(sample)
        return loss * self.factor, logits


def test_a_graph_is_traced_again_for_another_module_sample_or_user_config_alone(tmp_path, monkeypatch):
    def traced(seed, **options):
        monkeypatch.setattr(Traced, "calls_of_forward", 0)
        options = {"config": {"pas_config": {"_seed": seed}}} | options
        module = make(tmp_path, "tp", Traced(), reuse="graph", **options)
        found = module.infer_step([sample(0)])[0]
        torch.manual_seed(0)
        return Traced.calls_of_forward, found

    torch.manual_seed(0)
    assert [traced(1)[0], traced(1)[0], traced(2)[0]] == [1, 0, 0]  # another plan, the same graph
    plain = Traced()
    torch.manual_seed(0)
    torch.testing.assert_close(traced(3)[1], plain(sample(0)))
    assert traced(3, config={"user_config": {"a": 1}})[0] == 1
    monkeypatch.setattr(Traced, "factor", 2.0)
    changed = Traced()
    changed.factor = 2.0
    assert make(tmp_path, "tp", changed, reuse="graph") is not None
    assert Traced.calls_of_forward > 0


def sent(rank, world_size, folder, strategy):
    """Traces of this process, the files of its node, and its first weight, where each process is a node of its own."""
    os.environ["LOCAL_RANK"] = "0"
    torch.manual_seed(rank)
    options = {"plan_ngpus": 1, "runtime_ngpus": world_size}
    module = make(folder / f"node{rank}", "dp", Traced(), broadcast_strategy=strategy, config=options)
    count = Traced.calls_of_forward
    files = sorted(file.name for file in (folder / f"node{rank}").glob("**/*") if file.is_file())
    before = module.embed.weight.detach().clone()
    if strategy == "no_weights":
        broadcast_weights(module, 1)
    return count, files, before, module.embed.weight.detach(), module.infer_step([sample(0)])[0][1]


def all_sent(rank, world_size, folder):
    found = {}
    for strategy in ("none", "all", "no_weights", "code"):
        Traced.calls_of_forward = 0
        found[strategy] = sent(rank, world_size, folder / strategy, strategy)
    return found


def test_what_is_sent_to_other_nodes_is_what_the_strategy_says(tmp_path):
    first, second = run_distributed(all_sent, 2, tmp_path)
    plan, graph = ["made_for.json", "plan.json"], ["graph.pt2", "graph.sha256"]
    files = {"none": [], "all": sorted(plan + graph), "no_weights": sorted(plan + graph), "code": plan}
    for strategy, expected in files.items():
        assert second[strategy][1] == expected
        assert first[strategy][1] == (expected or plan)
        assert first[strategy][0] == 1
        assert second[strategy][0] == (0 if graph[0] in expected else 1)
        has_weights = strategy in ("none", "all")
        assert torch.equal(first[strategy][2], second[strategy][2]) is has_weights
    for strategy in ("none", "all", "no_weights"):
        assert torch.equal(first[strategy][3], second[strategy][3])
        torch.testing.assert_close(first[strategy][4], second[strategy][4])


def test_a_plan_for_other_processes_is_made_without_a_process_group(tmp_path):
    assert make(tmp_path, "tp", config={"plan_ngpus": 4, "runtime_ngpus": 8}, load_module=False) is None
    assert len(list(tmp_path.glob("*.Net/_/plan.json"))) == 1


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"plan_ngpus": 2, "runtime_ngpus": 3}, "runtime_ngpus=3 must be a multiple of plan_ngpus=2"),
        ({"plan_ngpus": 0}, "plan_ngpus=0 must be"),
        ({"trace_strategy": "x"}, "trace_strategy='x' must be one of"),
        ({"zero_ngroups": 2}, "zero_ngroups=2 must divide the number of units, 1"),
        ({"use_async_reducer": True, "use_end2end": False}, "use_async_reducer=True needs use_end2end"),
        ({"reducer_bucket_cap_mb": 25.0, "use_end2end": False}, "reducer_bucket_cap_mb=25.0 needs use_end2end"),
        ({"reducer_bucket_cap_mb": 25.0, "use_zero": True}, "reducer_bucket_cap_mb=25.0: with use_zero=True FSDP2"),
        ({"constant_folding": True, "lowering": "eager"}, "constant_folding=True needs lowering='graph'"),
        ({"zero_ngroups": 2, "runtime_ngpus": 4}, "zero_ngroups=2 needs use_zero=True"),
        ({"zero_use_reduce_scatter": True}, "zero_use_reduce_scatter=True needs use_zero"),
    ],
)
def test_a_wrong_config_is_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        config(**changes)


@pytest.mark.parametrize(
    ("policy", "changes", "match"),
    [
        ("dpp", {}, "pas_policy='dpp' must be one of"),
        ("dp", {"config": {"pas_config": {"seed": 2}}}, "pas_config.'seed'. is not an option of 'dp'"),
        ("tp", {"config": {"plan_ngpus": 2, "runtime_ngpus": 2}}, "runtime_ngpus=2 must be the number of processes, 1"),
        ("dp", {"broadcast_strategy": "all"}, "broadcast_strategy='all' needs a process group.*pass 'none'"),
        ("dp", {"broadcast_strategy": "most"}, "broadcast_strategy='most' must be one of"),
        ("dp", {"reuse": "grap"}, "reuse='grap' must be one of"),
        ("dp", {"module_fn": Net}, "module_fn=.* builds a class's modules"),
    ],
)
def test_a_wrong_call_is_refused(tmp_path, policy, changes, match):
    with pytest.raises(ValueError, match=match):
        make(tmp_path, policy, **changes)


def test_a_plan_that_cannot_be_run_is_refused_before_it_is_kept_and_where_it_was_edited(tmp_path):
    def policy(graph, compute_config):
        return Plan(graph=graph, mesh=(1,), schedule="gpipe")

    with pytest.raises(ValueError, match="schedule='gpipe' and no stages"):
        make(tmp_path, policy)
    assert not list(tmp_path.glob("**/plan.json"))
    make(tmp_path)
    (file,) = tmp_path.glob("**/plan.json")
    file.write_text(file.read_text().replace('"schedule": "1f1b"', '"schedule": "gpipe"'))
    with pytest.raises(ValueError, match="schedule='gpipe' and no stages"):
        make(tmp_path)


def test_what_an_end_to_end_module_does_not_do_is_refused(tmp_path):
    module = make(tmp_path)
    with pytest.raises(ValueError, match="call train_step"):
        module(sample(0))
    with pytest.raises(ValueError, match="is_dummy_batch has 2 entries, samples 1"):
        module.train_step([sample(0)], [True, False])
    module.compute_config = dataclasses.replace(module.compute_config, inference_only=True)
    with pytest.raises(ValueError, match="inference_only"):
        module.train_step([sample(0)])
    with pytest.raises(ValueError, match="inference_only"):
        build_optimizer(module, torch.optim.SGD, lr=0.1)
