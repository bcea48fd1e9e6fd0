"""Gradients in buckets, summed over units after the backward pass or within it: the same sums to the bit."""

import copy

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from torch import Tensor, nn

from hybrid_engine import ComputeConfig, build_optimizer, parallelize
from hybrid_engine.parallel.reducer import in_buckets

NUM_STEPS, NUM_SAMPLES = 3, 2
EACH_ALONE = 1e-6


class Net(nn.Module):
    """Layers that give the loss of a sample; one of them is for samples of three rows alone, one for none."""

    def __init__(self):
        super().__init__()
        self.seldom = nn.Linear(4, 2, bias=False)
        self.never = nn.Linear(4, 2, bias=False)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, sample):
        result = self.layers(sample["x"])
        if sample["x"].shape[0] == 3:
            result = result + self.seldom(sample["x"])
        return result.square().mean()


def build():
    torch.manual_seed(0)
    return Net()


def sample(step, place, unit, num_rows=4):
    torch.manual_seed(100 * step + 10 * place + unit)
    return {"x": torch.randn(num_rows, 4)}


def make(folder, policy="dp", plan_ngpus=1, lowering="graph", pas_config=None, **changes):
    config = ComputeConfig(
        plan_ngpus=plan_ngpus, use_end2end=True, lowering=lowering, pas_config=pas_config or {}, **changes
    )
    module = parallelize(build(), {"sample": sample(0, 0, 0)}, policy, config, gen_savedir=folder, reuse="override")
    return module, build_optimizer(module, torch.optim.Adam, lr=0.01)


def train(module, optimizer, rows=lambda step, place, unit: 4):
    """The losses, norms and weights of some steps."""
    unit = dist.get_rank() // module.compute_config.plan_ngpus
    results = []
    for step in range(NUM_STEPS):
        places = range(NUM_SAMPLES)
        results += module.train_step([sample(step, place, unit, rows(step, place, unit)) for place in places])
        results.append(optimizer.clip_gnorm(1.0))
        optimizer.step()
        optimizer.zero_grad()
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
    return [tensor.detach().clone() for tensor in (*results, *weights)]


WAYS = [
    {"reducer_bucket_cap_mb": EACH_ALONE},
    {"use_async_reducer": True},
    {"use_async_reducer": True, "reducer_bucket_cap_mb": EACH_ALONE},
    {"use_async_reducer": True, "reducer_bucket_cap_mb": 3e-4},
]


def two_units(rank, world_size, folder):
    """All ways beside the plain one, also where units use other layers, and what hooks see."""

    def seldom(step, place, unit):  # the two units leave the layer out at different times
        return 3 if (step + place + unit) % 2 else 4

    results = {"same": []}
    for lowering, rows in (("graph", lambda *_: 4), ("eager", seldom)):
        expected = train(*make(folder, lowering=lowering), rows)
        results["same"] += [same(expected, train(*make(folder, lowering=lowering, **way), rows)) for way in WAYS]
    module, optimizer = make(folder, use_async_reducer=True, reducer_bucket_cap_mb=EACH_ALONE)
    first, seen, after = module.get_parameter("layers.0.weight"), [], []
    optimizer.register_reducer_pre_hook(lambda reducer, grad: (seen.append(first.grad is None), grad.mul_(2)))
    optimizer.register_reducer_post_hook(lambda reducer, grad: after.append(grad.clone()))
    module.train_step([sample(0, 0, rank)])
    results["begun in the backward pass"] = list(seen)
    optimizer.sync_shard_grad()
    results["buckets"] = len(seen), len(after)
    gathered = [{"x": sample(0, 0, unit)["x"]} for unit in range(world_size)]
    plain = build()
    sum(plain(each) for each in gathered).backward()
    expected = plain.get_parameter("layers.0.weight").grad * 2
    results["doubled"] = (first.grad - expected).abs().max().item()
    return results


def test_gradients_in_buckets_are_those_of_one_sum_to_the_bit(tmp_path):
    for results in run_distributed(two_units, 2, tmp_path):
        assert results["same"] == [True] * 8
        begun = results["begun in the backward pass"]
        assert begun[0] and not begun[-1]
        assert results["buckets"] == (8, 8)  # six of the layers, two of what no sample uses
        assert results["doubled"] < 1e-6


def same(expected, found):
    return all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


class FailingError(Exception):
    pass


def message(action):
    try:
        action()
    except Exception as error:
        return str(error)
    return ""


def two_units_fail(rank, world_size, folder):
    """Errors and misuse, after which training goes on."""
    results = {}
    expected = train(*make(folder))
    module, optimizer = make(folder, use_async_reducer=True, reducer_bucket_cap_mb=EACH_ALONE)

    def failing(loss):
        raise FailingError("in the middle")

    before = [p.detach().clone() for p in module.parameters()]
    batches = [sample(0, 0, rank), sample(0, 1, rank)]
    count = iter(range(9))
    scale = (lambda loss: failing(loss) if next(count) else loss) if rank else None
    results["one fails"] = message(lambda: module.train_step(batches, scale_fn=scale))
    module.train_step(batches)
    results["grown"] = message(lambda: (module.get_parameter("layers.0.weight").sum() * 2).backward())
    optimizer.zero_grad()
    optimizer.step()
    results["nothing left"] = same(before, module.parameters())
    module.train_step(batches)  # a step that nobody takes
    results["same"] = same(expected, train(module, optimizer))
    copied = copy.deepcopy(module)
    results["copied"] = copied.overlapping_reducer is None
    return results


def test_an_error_in_a_step_is_raised_on_all_and_training_goes_on(tmp_path):
    for results in run_distributed(two_units_fail, 2, tmp_path):
        assert "in the middle" in results["one fails"]
        assert "use_async_reducer=True: a backward pass adds to a gradient" in results["grown"]
        assert results["nothing left"] and results["same"] and results["copied"]


def units_of_two(rank, world_size, folder):
    results = {}
    for policy, options in (("data", {}), ("tp", {}), ("pp", {"pipeline_nmicros": NUM_SAMPLES})):
        make_one = {"policy": policy, "plan_ngpus": 2, "pas_config": options}
        expected = train(*make(folder, **make_one))
        results[policy] = [same(expected, train(*make(folder, **make_one, **way))) for way in WAYS]
    zero = train(*make(folder, use_zero=True))
    found = train(*make(folder, use_zero=True, use_async_reducer=True))
    results["ZeRO"] = [same(zero, found)]
    module, _ = make(folder, "tp", 2, use_async_reducer=True)

    def failing(loss: Tensor) -> Tensor:
        raise FailingError("in a unit")

    scale = failing if rank < 2 else None
    results["fails"] = (
        message(lambda: module.train_step([sample(0, 0, 0)], scale_fn=scale)),
        message(lambda: module.train_step([sample(0, 0, 0)]) if rank < 2 else None),
    )
    return results


def test_units_of_several_processes_have_the_same_sums(tmp_path):
    for rank, results in enumerate(run_distributed(units_of_two, 4, tmp_path)):
        fails = results.pop("fails")
        assert all(all(same) for same in results.values()), results
        if rank < 2:
            assert "in a unit" in fails[0] and "start all processes again" in fails[1]


def test_buckets_hold_parameters_of_one_dtype_the_last_first():
    sizes = [4, 2, 6, 3]
    parameters = [nn.Parameter(torch.zeros(size, dtype=torch.float32)) for size in sizes]
    parameters.insert(2, nn.Parameter(torch.zeros(1, dtype=torch.float64)))
    found = [[p.numel() for p in bucket] for bucket in in_buckets(parameters, 4 * 8)]
    assert found == [[3], [2, 6], [1], [4]]
    assert [len(bucket) for bucket in in_buckets(parameters, float("inf"))] == [4, 1]
    assert in_buckets([], 1) == []


@pytest.mark.parametrize("lowering", ["graph", "eager"])
def test_one_process_trains_with_every_way(tmp_path, lowering):
    def run(**way):
        config = ComputeConfig(1, 1, use_end2end=True, lowering=lowering, **way)
        module = parallelize(build(), {"sample": sample(0, 0, 0)}, "dp", config, gen_savedir=tmp_path, reuse="override")
        optimizer = build_optimizer(module, torch.optim.SGD, lr=0.1)
        module.train_step([sample(0, 0, 0), sample(0, 1, 0)])
        optimizer.register_reducer_pre_hook(lambda reducer, grad: grad.mul_(3))
        optimizer.step()
        return list(module.parameters())

    expected = run()
    for way in WAYS:
        assert same(expected, run(**way))
