"""Hooks of reducers see gradients before and after they are summed over units, and change them, under ZeRO too."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hybrid_engine import ComputeConfig, build_optimizer, parallelize
from tests.extensions.parallelize.test_scalars import Scaled
from tests.support.distributed import leave_process_group, run_distributed
from tests.support.parallel_nets import Stack, samples_of
from tests.support.raised import message

pytestmark = pytest.mark.torch_versions


@pytest.fixture(scope="module", autouse=True)
def _one_process_alone():
    leave_process_group()


ZERO = {"use_zero": True}
EAGER = {**ZERO, "lowering": "eager"}
LAYOUTS = {
    "no ZeRO": (Stack, "dp", 1, {}),
    "ZeRO": (Stack, "dp", 1, ZERO),
    "ZeRO in units of two": (Stack, "data", 2, ZERO),
    "two groups": (Stack, "dp", 1, {**ZERO, "zero_ngroups": 2}),
    "groups of one": (Stack, "dp", 1, {**ZERO, "zero_ngroups": 4}),
    "stages": (Stack, "pp", 2, {**ZERO, "pas_config": {"pipeline_nmicros": 2}}),
    "layers and scalars": (Scaled, "dp", 1, EAGER),
}
BUCKETS = {"layers and scalars": 4}
"""Two layers, the rest of them, and scalars; elsewhere everything is one."""
COPIES = {"no ZeRO": 4, "two groups": 2, "groups of one": 4}
"""Processes that have the same part of the sum; ZeRO shares it out."""


def make(folder, kind, policy, plan_ngpus, **options):
    torch.manual_seed(0)
    config = ComputeConfig(plan_ngpus, dist.get_world_size(), **{"use_end2end": True} | options)
    sample = {"sample": samples_of(0)[0]}
    return parallelize(kind(), sample, policy, config, gen_savedir=folder, reuse="override")


def step(module, optimizer):
    """The gradients that this process has of its unit's two samples."""
    unit = dist.get_rank() // module.compute_config.plan_ngpus
    module.train_step(samples_of(0, 8)[2 * unit : 2 * unit + 2])
    optimizer.sync_shard_grad()
    return {n: local(p.grad).clone() for n, p in module.named_parameters() if p.grad is not None}


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Seen:
    """A hook that keeps what it saw, and multiplies it."""

    def __init__(self, factor=1.0):
        self.factor, self.calls = factor, []

    def __call__(self, reducer, gradient):
        self.calls.append((reducer, gradient.sum(dtype=torch.float64)))
        gradient.mul_(self.factor)

    def total(self):
        """The sum of all that all processes saw."""
        total = torch.stack([value for _, value in self.calls]).sum()
        dist.all_reduce(total)
        return total.item()


def all_layouts(rank, world_size, folder):
    found = {}
    for name, (kind, policy, plan_ngpus, options) in LAYOUTS.items():
        module = make(folder, kind, policy, plan_ngpus, **options)
        forgotten, before, after, halving = Seen(100.0), Seen(2.0), Seen(), Seen(0.5)
        build_optimizer(module, torch.optim.SGD, lr=0.1).register_reducer_pre_hook(forgotten)
        optimizer = build_optimizer(module, torch.optim.SGD, lr=0.1)
        gradients = [step(module, optimizer)]
        optimizer.register_reducer_pre_hook(before)
        optimizer.register_reducer_post_hook(after)
        gradients.append(step(module, optimizer))
        counts = len(before.calls), len(after.calls), len(forgotten.calls)
        totals = before.total(), after.total()
        shown = [p for reducer, _ in before.calls for p in reducer.parameters]
        trained = [p for p in module.parameters() if p.requires_grad]
        has_all = len(shown) == len(trained) and {id(p) for p in shown} == {id(p) for p in trained}
        optimizer.register_reducer_post_hook(halving)
        gradients.append(step(module, optimizer))
        found[name] = gradients, counts, totals, has_all
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_distributed(all_layouts, 4, tmp_path_factory.mktemp("hooks"), seconds=300)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_hooks_change_what_is_summed_and_the_sum(found, name):
    for of_rank in found:
        plain, doubled, halved_again = of_rank[name][0]
        assert plain
        assert any(gradient.abs().sum() > 0 for gradient in plain.values())
        for key, gradient in plain.items():
            assert torch.equal(doubled[key], 2 * gradient), key
            assert torch.equal(halved_again[key], gradient), key


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_hooks_of_the_last_optimizer_are_called_once_for_each_bucket_and_step(found, name):
    for of_rank in found:
        _, counts, _, has_all = of_rank[name]
        assert counts == (BUCKETS.get(name, 1), BUCKETS.get(name, 1), 0)
        assert has_all


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in BUCKETS])
def test_hooks_see_a_units_gradients_before_and_the_part_of_their_sum_after(found, name):
    for of_rank in found:
        before, after = of_rank[name][2]
        assert after == pytest.approx(2 * before * COPIES.get(name, 1), rel=1e-4)


ON_TWO = {
    "no ZeRO": (Stack, "dp", 1, {}),
    "within the backward pass": (Stack, "dp", 1, {"use_async_reducer": True}),
    "ZeRO": (Stack, "dp", 1, ZERO),
    "layers": (Stack, "dp", 1, EAGER),
    "copies in two stages": (Stack, "pp", 2, {"pas_config": {"pipeline_nmicros": 2}}),
}
WHERE = ("register_reducer_pre_hook", "register_reducer_post_hook")


class OfAHookError(Exception):
    pass


class Failing:
    """A hook that fails until it is told not to."""

    def __init__(self):
        self.is_over = False

    def __call__(self, reducer, gradient):
        if not self.is_over:
            gradient.zero_()
            raise OfAHookError("of a hook")


def one_process_fails(rank, world_size, folder):
    """By layout and kind of hook, which the second process alone has: what two steps raised, and what is left of it."""
    found = {}
    for name, (kind, policy, plan_ngpus, options) in ON_TWO.items():
        for where in WHERE:
            module = make(folder, kind, policy, plan_ngpus, **options)
            optimizer, failing = build_optimizer(module, torch.optim.SGD, lr=0.1), Failing()
            expected = step(module, optimizer)
            weights = {n: local(p).clone() for n, p in module.named_parameters()}
            if rank:
                getattr(optimizer, where)(failing)
            unit = rank // plan_ngpus
            module.train_step(samples_of(0, 8)[2 * unit : 2 * unit + 2])
            words = message(optimizer.step), message(optimizer.step)
            is_same = all(torch.equal(local(p), weights[n]) for n, p in module.named_parameters())
            failing.is_over = True
            optimizer.zero_grad()
            gradients = step(module, optimizer)
            optimizer.step()
            is_same = is_same and all(torch.equal(gradients[n], expected[n]) for n in expected)
            found[name, where] = words, is_same
    return found


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    return run_distributed(one_process_fails, 2, tmp_path_factory.mktemp("failing"), seconds=20)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", list(ON_TWO))
def test_an_error_of_a_hook_on_one_process_is_raised_on_all_and_training_goes_on(failed, name, where):
    for of_rank in failed:
        words, is_same = of_rank[name, where]
        assert "of a hook" in words[0]
        assert "some are sums while others are not" in words[1]
        assert is_same


def one_process_fails_after_clipping(rank, world_size, folder):
    """What a hook of the second process raises in a backward pass after clipping, which ZeRO sums by itself."""
    module = make(folder, Stack, "dp", 1, **EAGER, use_end2end=False)
    optimizer = build_optimizer(module, torch.optim.SGD, lr=0.1)
    module(samples_of(0)[rank])[0].backward()
    optimizer.clip_gnorm(1.0)
    if rank:
        optimizer.register_reducer_pre_hook(Failing())
    module(samples_of(1)[rank])[0].backward()
    return message(optimizer.step)


def test_an_error_of_a_hook_after_clipping_is_raised_on_all(tmp_path):
    for words in run_distributed(one_process_fails_after_clipping, 2, tmp_path, seconds=20):
        assert "of a hook" in words


def unfrozen_in_one_stage(rank, world_size, folder):
    torch.manual_seed(0)
    stack = Stack()
    stack.blocks[1].requires_grad_(False)
    config = ComputeConfig(2, use_end2end=True, pas_config={"pipeline_nmicros": 2})
    sample = {"sample": samples_of(0)[0]}
    module = parallelize(stack, sample, "pp", config, gen_savedir=folder, reuse="override")
    optimizer = build_optimizer(module, torch.optim.SGD, lr=0.1)
    holds = [n for n, _ in module.named_parameters() if n.startswith("blocks.1")]
    module.requires_grad_(True)
    module.train_step(samples_of(0)[:2])
    return len(holds), message(optimizer.step)


def test_gradients_that_one_process_cannot_sum_are_refused_on_all(tmp_path):
    numbers, words = zip(*run_distributed(unfrozen_in_one_stage, 2, tmp_path, seconds=20), strict=True)
    assert min(numbers) == 0 < max(numbers)
    assert all("was not trained when build_optimizer was called" in text for text in words), words


def own_loop(rank, world_size, folder):
    module = make(folder, Stack, "dp", 1, **EAGER, use_end2end=False)
    optimizer = build_optimizer(module, torch.optim.SGD, lr=0.1)
    before, after = Seen(2.0), Seen()
    optimizer.register_reducer_pre_hook(before)
    optimizer.register_reducer_post_hook(after)
    for batch in samples_of(0)[2 * rank : 2 * rank + 2]:
        module(batch)[0].backward()
    optimizer.sync_shard_grad()
    return len(before.calls), len(after.calls), {n: p.grad.full_tensor() for n, p in module.named_parameters()}


def test_in_a_loop_of_ones_own_each_backward_pass_is_summed_by_itself(tmp_path):
    torch.manual_seed(0)
    module = Stack()
    for batch in samples_of(0):
        module(batch)[0].backward()
    for num_before, num_after, gradients in run_distributed(own_loop, 2, tmp_path):
        assert num_before == num_after == 2 * 3
        torch.testing.assert_close(gradients, {n: 2 * p.grad for n, p in module.named_parameters()})
