"""The learning-rate schedules against numbers worked out by hand from DeepSpeed's formulas."""

import logging
import math

import pytest
import torch

from hybrid_engine.config import SchedulerConfig
from hybrid_engine.optim.lr_schedules import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_scheduler,
)

pytestmark = pytest.mark.quick


def sgd(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates])


def seen_rates(scheduler, optimizer, num_steps: int) -> list[float]:
    """The rate that each of the first optimizer steps runs with."""
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_log_warmup_climbs_by_logarithms_and_stays_at_the_peak():
    optimizer = sgd(0.5)
    scheduler = WarmupLR(optimizer, warmup_min_lr=0.1, warmup_max_lr=0.9, warmup_num_steps=4)
    # log(1), log(2) = log(4) / 2, log(3), log(4) over log(4): 0, 0.5, 0.7924812503605781, 1.
    expected = [0.1, 0.1, 0.5, 0.1 + 0.8 * 0.7924812503605781, 0.9, 0.9, 0.9]
    assert seen_rates(scheduler, optimizer, 7) == pytest.approx(expected, rel=1e-12)


def test_linear_warmup_climbs_by_equal_steps():
    optimizer = sgd(0.5)
    scheduler = WarmupLR(optimizer, 0.0, 1.0, 4, "linear")
    assert seen_rates(scheduler, optimizer, 7) == pytest.approx([0, 0, 0.25, 0.5, 0.75, 1, 1])


def test_warmup_without_a_peak_climbs_to_the_optimizers_own_rate():
    optimizer = sgd(0.5)
    scheduler = WarmupLR(optimizer, warmup_num_steps=2)
    assert seen_rates(scheduler, optimizer, 4) == pytest.approx([0, 0, 0.5, 0.5])


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_warmup_of_one_step_or_none_counts_as_two(num_steps):
    optimizer = sgd(0.5)
    scheduler = WarmupLR(optimizer, 0.0, 1.0, num_steps, "linear")
    assert seen_rates(scheduler, optimizer, 5) == pytest.approx([0, 0, 0.5, 1, 1])


@pytest.mark.parametrize("total_num_steps", [1, 2, 6])
@pytest.mark.parametrize("warmup_type", ["log", "linear"])
@pytest.mark.parametrize("kind", ["WarmupDecayLR", "WarmupCosineLR"])
def test_a_schedule_that_decays_takes_no_warmup_for_two_steps_too(kind, warmup_type, total_num_steps):
    def rates(warmup_num_steps):
        params = {"total_num_steps": total_num_steps, "warmup_num_steps": warmup_num_steps, "warmup_type": warmup_type}
        optimizer = sgd(0.5)
        return seen_rates(build_scheduler(SchedulerConfig(type=kind, params=params), optimizer), optimizer, 9)

    assert rates(0) == rates(2)


def test_decay_is_a_line_from_the_peak_to_the_floor_and_stays_there():
    optimizer = sgd(0.5)
    scheduler = WarmupDecayLR(
        optimizer, total_num_steps=6, warmup_min_lr=0.2, warmup_max_lr=1.0, warmup_num_steps=2, warmup_type="linear"
    )
    # Iterations -1, 0, 1 of the warmup, then 2..5 at 4/4, 3/4, 2/4, 1/4 of the height 0.8, then the floor.
    expected = [0.2, 0.2, 0.6, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert seen_rates(scheduler, optimizer, 9) == pytest.approx(expected)


def test_cosine_falls_from_below_the_peak_to_its_floor_and_stays_there():
    optimizer = sgd(2.0)
    scheduler = WarmupCosineLR(
        optimizer,
        total_num_steps=6,
        warmup_min_ratio=0.1,
        warmup_num_steps=2,
        cos_min_ratio=0.2,
        warmup_type="linear",
    )
    # Shares of the peak: nothing, 0.1, 0.1 + 0.9 / 2; then 0.2 + 0.8 * (1 + cos(pi p)) / 2 at p = 1/4, 1/2, 3/4, 1.
    half = math.sqrt(0.5)
    shares = [0, 0.1, 0.55, 0.6 + 0.4 * half, 0.6, 0.6 - 0.4 * half, 0.2, 0.2, 0.2]
    assert seen_rates(scheduler, optimizer, 9) == pytest.approx([2.0 * share for share in shares])


def test_warmup_without_a_peak_takes_each_groups_own_rate():
    for cls, arguments in ((WarmupLR, {}), (WarmupDecayLR, {"total_num_steps": 100, "warmup_max_lr": None})):
        optimizer = sgd(0.5, 0.02)
        scheduler = cls(optimizer, warmup_num_steps=2, warmup_type="linear", **arguments)
        optimizer.step()
        scheduler.step(1)
        assert scheduler.get_last_lr() == pytest.approx([0.25, 0.01])


SCHEDULES = [
    ("WarmupLR", {"warmup_max_lr": 0.3, "warmup_num_steps": 5}),
    ("WarmupDecayLR", {"total_num_steps": 9, "warmup_num_steps": 5}),
    ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 5}),
    ("LRRangeTest", {"lr_range_test_step_size": 2}),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.4, "cycle_first_step_size": 4}),
]


@pytest.mark.parametrize(("kind", "params"), SCHEDULES)
def test_a_step_to_an_iteration_is_as_many_steps_and_counts_on_from_there(kind, params, recwarn):
    config = SchedulerConfig(type=kind, params=params)

    def rates(jump):
        optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        scheduler = build_scheduler(config, optimizer)
        assert scheduler.last_batch_iteration == -1
        optimizer.step()
        jump(scheduler)
        seen = [(scheduler.last_batch_iteration, *scheduler.get_last_lr(), optimizer.param_groups[0]["betas"])]
        for _ in range(3):
            scheduler.step()
            seen.append((scheduler.last_batch_iteration, *scheduler.get_last_lr(), optimizer.param_groups[0]["betas"]))
        return seen

    expected = rates(lambda scheduler: [scheduler.step() for _ in range(4)])
    assert expected[0][0] == 3
    assert rates(lambda scheduler: scheduler.step(3)) == expected
    assert rates(lambda scheduler: [scheduler.step(8), scheduler.step(3)]) == expected
    assert (
        rates(lambda scheduler: [scheduler.load_state_dict({"last_batch_iteration": 2}), scheduler.step()]) == expected
    )
    assert not recwarn.list


def test_a_range_test_grows_by_its_step_rate_every_step_size_at_once_or_evenly():
    optimizer = sgd(0.5)
    scheduler = LRRangeTest(optimizer, 0.1, lr_range_test_step_size=2, lr_range_test_step_rate=3.0)
    assert seen_rates(scheduler, optimizer, 5) == pytest.approx([0.1, 0.25, 0.4, 0.55, 0.7])
    optimizer = sgd(0.5)
    scheduler = LRRangeTest(optimizer, 0.1, 2, 3.0, lr_range_test_staircase=True)
    assert seen_rates(scheduler, optimizer, 5) == pytest.approx([0.1, 0.1, 0.4, 0.4, 0.7])


def test_one_cycle_climbs_falls_and_decays():
    optimizer = sgd(0.5)
    scheduler = OneCycle(
        optimizer, 0.1, 0.5, decay_lr_rate=1.0, cycle_first_step_size=4, cycle_second_step_size=2, decay_step_size=2
    )
    # Up by quarters of 0.4, down by halves; then 0.1 / (1 + n / 2) for n = 1, 2, 3.
    expected = [0.1, 0.2, 0.3, 0.4, 0.5, 0.3, 0.1, 0.1 / 1.5, 0.1 / 2, 0.1 / 2.5]
    assert seen_rates(scheduler, optimizer, 10) == pytest.approx(expected)


def test_the_stairs_of_one_cycle_hold_the_rate():
    optimizer = sgd(0.5)
    scheduler = OneCycle(
        optimizer, 0.0, 1.0, cycle_first_step_size=4, cycle_first_stair_count=2, cycle_second_stair_count=1
    )
    assert seen_rates(scheduler, optimizer, 10) == pytest.approx([0, 0, 0.5, 0.5, 1, 0, 0, 0, 0, 0])


def test_the_momentum_of_one_cycle_moves_against_the_rate_and_decays_upwards():
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = OneCycle(optimizer, 0.1, 0.5, cycle_first_step_size=2, decay_step_size=1, decay_mom_rate=0.01)
    seen = []
    for _ in range(7):
        seen.append(optimizer.param_groups[0]["betas"])
        optimizer.step()
        scheduler.step()
    # DeepSpeed begins at the minimum, then falls from the maximum to it and back.
    momenta = [0.8, 0.85, 0.8, 0.85, 0.9, 0.9 * 1.01, 0.9 * 1.02]
    assert [beta for beta, _ in seen] == pytest.approx(momenta) and {beta for _, beta in seen} == {0.99}


def test_each_parameter_group_follows_its_own_rates():
    optimizer = sgd(0.5, 0.5)
    scheduler = WarmupLR(optimizer, [0.0, 0.1], [1.0, 0.3], 2, "linear")
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.5, 0.2])


@pytest.mark.parametrize(("kind", "params"), SCHEDULES)
def test_a_schedule_loaded_in_the_middle_goes_on_as_if_never_stopped(kind, params):
    config = SchedulerConfig(type=kind, params=params)
    optimizer = sgd(0.5)
    scheduler = build_scheduler(config, optimizer)
    seen_rates(scheduler, optimizer, 3)
    saved_schedule, saved_optimizer = scheduler.state_dict(), optimizer.state_dict()
    uninterrupted = seen_rates(scheduler, optimizer, 8)

    resumed_optimizer = sgd(0.5)
    resumed = build_scheduler(config, resumed_optimizer)
    resumed_optimizer.load_state_dict(saved_optimizer)
    resumed.load_state_dict(saved_schedule)
    assert seen_rates(resumed, resumed_optimizer, 8) == uninterrupted
    assert len(set(uninterrupted)) > 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"warmup_min_lr": [0.1, 0.2]}, r"warmup_min_lr=\[0.1, 0.2\] has 2 rates for 1 parameter groups"),
        ({"warmup_num_steps": -1}, "warmup_num_steps=-1 must be a finite number of at least 0"),
        ({"warmup_type": "cubic"}, "warmup_type='cubic' must be"),
    ],
)
def test_a_warmup_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        WarmupLR(sgd(0.5), **arguments)


def test_a_run_shorter_than_its_warmup_is_reported(caplog):
    with caplog.at_level(logging.WARNING, logger="hybrid_engine"):
        WarmupDecayLR(sgd(0.5), total_num_steps=10, warmup_num_steps=20)
    assert "total_num_steps=10 is below warmup_num_steps=20" in caplog.text


@pytest.mark.parametrize(
    ("cls", "params"),
    [
        (WarmupLR, ()),
        (WarmupDecayLR, (10,)),
        (WarmupCosineLR, (10,)),
        (LRRangeTest, ()),
        (OneCycle, (0.1, 0.2)),
    ],
)
def test_schedules_begin_at_the_beginning_as_deepspeeds_do_unless_told_otherwise(cls, params):
    optimizers = sgd(0.1), sgd(0.1)
    cls(optimizers[0], *params)
    cls(optimizers[1], *params, last_batch_iteration=-1)
    assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]
    with pytest.raises(ValueError, match="last_batch_iteration=3 is not supported; load_checkpoint"):
        cls(sgd(0.1), *params, last_batch_iteration=3)
