"""A checkpoint of any plan goes on under any other, in the module itself and in the training engine."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

import hybrid_engine
from hybrid_engine import (
    ComputeConfig,
    broadcast_weights,
    build_optimizer,
    deduped_state_dict,
    load_deduped_state_dict,
    load_merged_state_dicts,
    merge_state_dicts,
    parallelize,
)
from tests.support.distributed import leave_process_group, run_distributed
from tests.support.parallel_nets import (
    OPTIMIZERS,
    adam,
    build,
    plain_optimizer,
    plain_steps,
    plain_training,
    samples_of,
)
from tests.support.random_splits import random_splits

pytestmark = [pytest.mark.long, pytest.mark.torch_versions]


@pytest.fixture(scope="module", autouse=True)
def _one_process_alone():
    leave_process_group()


def make(folder, policy, plan_ngpus, **options):
    """A parallel module, of whose name none in the folder has the plan."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    pas_config = options.pop("pas_config", {})
    call = {name: options.pop(name) for name in ("init_module_params",) if name in options}
    config = ComputeConfig(
        plan_ngpus=plan_ngpus, runtime_ngpus=world_size, use_end2end=True, pas_config=pas_config, **options
    )
    return parallelize(
        build(), {"sample": samples_of(0)[0]}, policy, config, gen_savedir=folder, reuse="override", **call
    )


def make_optimizer(module, name):
    kind, options = OPTIMIZERS[name]
    return build_optimizer(module, kind, param_groups=lambda named: adam(list(named)), **options)


def parallel_steps(module, optimizer, steps):
    """The norms of the gradients of each step; units share its samples out."""
    num_units, rank = module.compute_config.num_units, dist.get_rank() if dist.is_initialized() else 0
    unit, count = rank // module.compute_config.plan_ngpus, 4 // num_units
    norms = []
    for step in steps:
        module.train_step(samples_of(step)[unit * count : (unit + 1) * count])
        norms.append(float(optimizer.clip_gnorm(0.7)))
        optimizer.step()
    return norms


def merged_of(module, optimizer, folder, name):
    """The whole state dicts, from the files that all processes saved."""
    torch.save((module.state_dict(), optimizer.state_dict()), folder / f"{name}-{dist.get_rank()}.pt")
    dist.barrier()
    files = [torch.load(folder / f"{name}-{rank}.pt") for rank in range(dist.get_world_size())]
    return merge_state_dicts([file[0] for file in files], [file[1] for file in files])


LAYOUTS = {
    "random 2 x 2 ZeRO": (random_splits(), 2, {"use_zero": True}),
    "data parallel": ("dp", 1, {}),
    "batch 4": ("data", 4, {}),
    "two groups of ZeRO": ("dp", 1, {"use_zero": True, "zero_ngroups": 2}),
    "batch 2 x 2 ZeRO": ("data", 2, {"use_zero": True, "zero_use_reduce_scatter": True}),
    "random 4": (random_splits(3), 4, {}),
}
JOURNEYS = {
    "adam": ["random 2 x 2 ZeRO", "data parallel", "batch 4", "two groups of ZeRO"],
    "sgd": ["batch 2 x 2 ZeRO", "random 4"],
}
STEPS_EACH = 3


def go_on_elsewhere(rank, world_size, folder):
    """For each optimizer a few steps under one layout after another, each begun with what the one before saved."""
    outcomes = {}
    for name, layouts in JOURNEYS.items():
        merged, norms = [], []
        for number, layout in enumerate(layouts):
            policy, plan_ngpus, options = LAYOUTS[layout]
            module = make(folder, policy, plan_ngpus, **options)
            if merged:
                for parameter in module.parameters():
                    nn.init.zeros_(parameter)
            optimizer = make_optimizer(module, name)
            if merged:
                load_merged_state_dicts(module, merged[-1][0], optimizer, merged[-1][1])
            norms += parallel_steps(module, optimizer, range(STEPS_EACH * number, STEPS_EACH * (number + 1)))
            merged.append(merged_of(module, optimizer, folder, f"{name}-{number}"))
        outcomes[name] = merged, norms
    return outcomes if rank == 0 else None


@pytest.fixture(scope="module")
def journeys(tmp_path_factory):
    return run_distributed(go_on_elsewhere, 4, tmp_path_factory.mktemp("journeys"), seconds=300)[0]


@pytest.mark.parametrize("name", list(JOURNEYS))
def test_training_that_goes_from_plan_to_plan_is_that_of_the_module(journeys, name):
    merged, norms = journeys[name]
    weights, expected_norms = plain_training(name, STEPS_EACH * len(merged))
    torch.testing.assert_close(norms, expected_norms, rtol=1e-5, atol=1e-6)
    for key, weight in weights.items():
        torch.testing.assert_close(merged[-1][0][key], weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", list(JOURNEYS))
def test_a_merged_checkpoint_goes_on_in_the_module_itself(journeys, name):
    merged, norms = journeys[name]
    module = build()
    module.load_state_dict(merged[0][0])
    optimizer = plain_optimizer(module, name)
    optimizer.load_state_dict(merged[0][1])
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
    steps = range(STEPS_EACH, 2 * STEPS_EACH)
    found = plain_steps(module, optimizer, steps)
    torch.testing.assert_close(found, norms[STEPS_EACH : 2 * STEPS_EACH], rtol=1e-5, atol=1e-6)


def through_the_engine(rank, world_size, folder):
    module = make(folder, random_splits(), 2)
    optimizer = make_optimizer(module, "adam")
    parallel_steps(module, optimizer, range(5))
    merged = merged_of(module, optimizer, folder, "parallel")
    model = build()
    engine, *_ = hybrid_engine.initialize(
        model=model,
        optimizer=plain_optimizer(model, "adam"),
        config={"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_optimization": {"stage": 3}},
    )
    load_merged_state_dicts(engine, merged[0], engine.optimizer, merged[1])
    parts = deduped_state_dict(engine, engine.optimizer)
    again = gathered(*parts)
    total = 0.0
    for batch in samples_of(5)[2 * rank : 2 * rank + 2]:
        total = total + engine(batch)[0]
    engine.backward(total * world_size)
    engine.step()
    after = gathered(*deduped_state_dict(engine, engine.optimizer))
    back = make(folder, "data", 2)
    back_optimizer = make_optimizer(back, "adam")
    load_merged_state_dicts(back, after[0], back_optimizer, after[1])
    parallel_steps_unclipped(back, back_optimizer, 6)
    last = gathered(*deduped_state_dict(back, back_optimizer))
    return merged, again, after, last


def assert_same(found, expected):
    """Equal to the bit."""
    found, expected = (pytree.tree_flatten_with_path(value)[0] for value in (found, expected))
    assert [path for path, _ in found] == [path for path, _ in expected]
    for (path, one), (_, two) in zip(found, expected, strict=True):
        assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two, path


def gathered(state, optimizer_state):
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, (state, optimizer_state))
    return merge_state_dicts([s[0] for s in states], [s[1] for s in states])


def parallel_steps_unclipped(module, optimizer, step):
    module.train_step(samples_of(step))
    optimizer.step()


def test_a_checkpoint_goes_into_the_training_engine_and_back(tmp_path):
    merged, again, after, last = run_distributed(through_the_engine, 2, tmp_path, seconds=300)[0]
    assert_same(again, merged)
    module = build()
    module.load_state_dict(merged[0])
    optimizer = plain_optimizer(module, "adam")
    optimizer.load_state_dict(merged[1])
    for step, found in ((5, after), (6, last)):
        plain_steps(module, optimizer, [step], clip=1e9)
        for name, weight in module.named_parameters():
            torch.testing.assert_close(found[0][name], weight.detach(), rtol=1e-5, atol=1e-5)


def deduped(rank, world_size, folder):
    found = []
    for policy, plan_ngpus, use_zero in ((random_splits(), 2, False), ("dp", 1, True)):
        module = make(folder, policy, plan_ngpus, use_zero=use_zero)
        optimizer = make_optimizer(module, "adam")
        parallel_steps(module, optimizer, range(2))
        state, optimizer_state = deduped_state_dict(module, optimizer)
        expected = gathered(module.state_dict(), optimizer.state_dict())
        held = [value for entries in optimizer_state["state"].values() for value in entries.values()]
        other = make(folder, policy, plan_ngpus, use_zero=use_zero)
        for parameter in other.parameters():
            nn.init.zeros_(parameter)
        other_optimizer = make_optimizer(other, "adam")
        load_deduped_state_dict(other, state, other_optimizer, optimizer_state)
        found.append((expected, gathered(state, optimizer_state), gathered(*both(other, other_optimizer)), len(held)))
        if not use_zero:
            nn.init.zeros_(other.embed.weight)
            other.load_state_dict(module.state_dict())
            found.append((expected, gathered(*both(other, other_optimizer)), expected, len(held)))
    units = make(folder, "dp", 1, init_module_params=rank < 1)
    if rank:
        nn.init.zeros_(units.embed.weight)
    broadcast_weights(units, 1)
    return found, units.embed.weight.detach(), sorted(deduped_state_dict(units)[0])


def both(module, optimizer):
    return module.state_dict(), optimizer.state_dict()


def test_deduplicated_parts_are_the_whole_and_load_again(tmp_path):
    first, second = run_distributed(deduped, 2, tmp_path, seconds=300)
    for expected, merged, loaded, _ in first[0]:
        assert_same(merged, expected)
        assert_same(loaded, expected)
    assert "blocks.0.up.weight" in first[2]
    assert second[2] == [], "the second process has nothing that the first has not"
    assert torch.equal(second[1], first[1])
    assert first[1].abs().sum() > 0


def test_what_does_not_fit_is_refused(tmp_path):
    module = make(tmp_path, "dp", 1)
    optimizer = make_optimizer(module, "adam")
    state, optimizer_state = merge_state_dicts([module.state_dict()], [optimizer.state_dict()])
    with pytest.raises(ValueError, match="module_state_dict has no 'calls'"):
        load_merged_state_dicts(module, {})
    with pytest.raises(ValueError, match=r"'norm\.bias' has shape \[3\] in module_state_dict and \[8\]"):
        load_merged_state_dicts(module, {**state, "norm.bias": torch.zeros(3)})
    with pytest.raises(ValueError, match="go together"):
        load_merged_state_dicts(module, state, optimizer)
    plain = torch.optim.Adam(module.parameters()).state_dict()
    with pytest.raises(ValueError, match="groups without param_names"):
        load_merged_state_dicts(module, state, optimizer, plain)
    one_group = build_optimizer(make(tmp_path, "dp", 1), torch.optim.Adam)
    with pytest.raises(ValueError, match="are in 2 groups of optimizer_state_dict"):
        load_merged_state_dicts(module, state, one_group, optimizer_state)
    with pytest.raises(ValueError, match="stride=2 must be plan_ngpus=1"):
        broadcast_weights(module, 2)
