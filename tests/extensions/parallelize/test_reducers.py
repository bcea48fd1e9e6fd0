"""Gradients in buckets, summed over units after the backward pass or within it: the same sums to the bit."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybrid_engine import ComputeConfig, build_optimizer, parallelize
from hybrid_engine.extensions.parallelize.module.reducer import in_buckets
from tests.support.distributed import run_distributed
from tests.support.raised import message
from tests.support.random_splits import random_splits

pytestmark = pytest.mark.torch_versions

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


WHERE = ("register_reducer_pre_hook", "register_reducer_post_hook")


def two_units_misuse(rank, world_size, folder):
    """Errors of hooks, changed gradients and a second optimizer, after each of which gradients are the sums."""
    results = {}
    plain = build()
    sum(plain(sample(1, 0, unit)) for unit in range(world_size)).backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}

    def difference(module, optimizer):
        module.train_step([sample(1, 0, rank)])
        optimizer.sync_shard_grad()
        return max((module.get_parameter(name).grad - grad).abs().max().item() for name, grad in expected.items())

    for way in ({}, {"use_async_reducer": True, "reducer_bucket_cap_mb": EACH_ALONE}):
        for where in WHERE:
            module, optimizer = make(folder, **way)
            is_over = []

            def failing(reducer, gradient, is_over=is_over):
                if not is_over:
                    raise FailingError("of a hook")

            getattr(optimizer, where)(failing)

            def train_once(module=module, optimizer=optimizer):
                module.train_step([sample(0, 0, rank)])
                optimizer.step()

            words = [message(train_once), message(optimizer.step) if where == WHERE[1] else ""]
            is_over.append(True)
            optimizer.zero_grad()
            results["hook", where, len(way)] = words, difference(module, optimizer)

    module, optimizer = make(folder, use_async_reducer=True, reducer_bucket_cap_mb=EACH_ALONE)
    is_over = []

    def failing_on_one(reducer, gradient):
        if rank and not is_over:
            raise FailingError("of one")

    optimizer.register_reducer_pre_hook(failing_on_one)
    words = message(lambda: (module.train_step([sample(0, 0, rank)]), optimizer.step()))
    is_over.append(True)
    results["one"] = words, difference(module, optimizer)
    for divide in (lambda p: p.grad.div_(2), lambda p: setattr(p, "grad", p.grad / 2)):
        module.train_step([sample(0, 0, rank)])
        divide(module.get_parameter("layers.0.weight"))
        results["changed", len(results)] = message(optimizer.step), difference(module, optimizer)
    module.train_step([sample(0, 0, rank)])
    second = build_optimizer(module, torch.optim.SGD, lr=0.1)
    results["second"] = "", difference(module, second)
    return results


def test_after_errors_of_hooks_and_changed_gradients_nothing_of_them_is_left(tmp_path):
    for results in run_distributed(two_units_misuse, 2, tmp_path):
        assert all(difference < 1e-6 for _, difference in results.values()), results
        for key, (words, _) in results.items():
            if key[0] == "hook":
                assert "of a hook" in words[0]
                assert key[1] == WHERE[0] or "some are sums while others are not" in words[1]
            elif key[0] == "changed":
                assert "call sync_shard_grad() before it" in words
        assert "of one" in results["one"][0]


def halve(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad *= 0.5


def two_units_step_twice(rank, world_size, folder):
    """By way: how far weights are from a plain module's after steps on the same gradients, scaled between them."""
    found = {}
    for way in ({}, {"use_async_reducer": True}, {"use_zero": True}, {"use_zero": True, "lowering": "eager"}):
        module, optimizer = make(folder, **way)
        plain = build()
        plain_optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
        for step in range(2):
            plain_optimizer.zero_grad()
            sum(plain(sample(step, 0, unit)) for unit in range(world_size)).backward()
            module.train_step([sample(step, 0, rank)])
            for number in range(4 - step):
                plain_optimizer.step()
                optimizer.step()
                if number == 1:
                    nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
                    optimizer.clip_gnorm(1e-3)
                elif number == 2:
                    halve(plain)
                    optimizer.scale_grads(0.5)
        whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in module.named_parameters()}
        found[str(way)] = max((whole[name] - p).abs().max().item() for name, p in plain.named_parameters())
    return found


def test_a_second_step_uses_the_same_sums(tmp_path):
    for found in run_distributed(two_units_step_twice, 2, tmp_path):
        assert all(difference < 1e-6 for difference in found.values()), found


def sums_on_one_process_alone(rank, world_size, folder):
    module, optimizer = make(folder)
    module.train_step([sample(0, 0, rank)])
    optimizer.sync_shard_grad()
    weight = module.get_parameter("layers.0.weight")
    if rank:
        weight.grad = weight.grad / 2
    return message(optimizer.step)


def test_gradients_that_are_sums_on_one_process_alone_are_refused_on_all(tmp_path):
    for words in run_distributed(sums_on_one_process_alone, 2, tmp_path, seconds=20):
        assert "gradients are sums over units on some processes" in words


class Shared(nn.Module):
    """Layers of which two, which are stages of one process, are the same."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(4, 4)
        self.layers = nn.Sequential(shared, nn.Linear(4, 4), shared, nn.Linear(4, 2))

    def forward(self, sample):
        return self.layers(sample["x"]).square().mean()


def stages_of_one(rank, world_size, folder):
    options = {"pipeline_nmicros": 2, "pipeline_nstages": 4, "pipeline_scheduler": "1f1b_interleaved"}
    found = []
    for way in ({}, {"use_async_reducer": True, "reducer_bucket_cap_mb": EACH_ALONE}):
        torch.manual_seed(0)
        config = ComputeConfig(2, use_end2end=True, pas_config=options, **way)
        module = parallelize(
            Shared(), {"sample": sample(0, 0, 0)}, "hybrid", config, gen_savedir=folder, reuse="override"
        )
        found.append(train(module, build_optimizer(module, torch.optim.SGD, lr=0.1)))
    return same(*found)


def test_a_layer_in_two_stages_of_one_process_is_summed_after_both(tmp_path):
    assert run_distributed(stages_of_one, 2, tmp_path) == [True, True]


def stages_with_a_failing_hook(rank, world_size, folder):
    """A hook fails in the last backward pass of one stage, whose sums are taken or not; training goes on."""
    one = {"policy": "pp", "plan_ngpus": 2, "pas_config": {"pipeline_nmicros": NUM_SAMPLES}}
    expected = train(*make(folder, **one))
    module, optimizer = make(folder, **one, use_async_reducer=True, reducer_bucket_cap_mb=EACH_ALONE)
    is_over = []

    def failing(reducer, gradient):
        if rank == 3 and not is_over:
            raise FailingError("of a stage")

    optimizer.register_reducer_pre_hook(failing)
    batches = [sample(0, 0, 0), sample(0, 1, 0)]
    words = message(lambda: (module.train_step(batches), optimizer.step()))
    module.train_step(batches)  # a step that nobody takes
    is_over.append(True)
    return words, same(expected, train(module, optimizer))


def test_an_error_of_a_hook_in_a_stage_is_raised_on_all_and_training_goes_on(tmp_path):
    for words, is_same in run_distributed(stages_with_a_failing_hook, 4, tmp_path):
        assert "of a stage" in words and is_same


def units_of_two(rank, world_size, folder):
    results = {}
    for policy, options in (("data", {}), (random_splits(), {}), ("pp", {"pipeline_nmicros": NUM_SAMPLES})):
        make_one = {"policy": policy, "plan_ngpus": 2, "pas_config": options}
        expected = train(*make(folder, **make_one))
        results[str(policy)] = [same(expected, train(*make(folder, **make_one, **way))) for way in WAYS]
    zero = train(*make(folder, use_zero=True))
    found = train(*make(folder, use_zero=True, use_async_reducer=True))
    results["ZeRO"] = [same(zero, found)]
    module, _ = make(folder, random_splits(), 2, use_async_reducer=True)

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
