"""The learning rate of a recipe, step by step: transformers' schedules without their step at rate 0."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, get_scheduler

from hybrid_engine.recipes import grpo, sft
from hybrid_engine.rlhf.options.shared import SCHEDULES, ScheduleOptions
from hybrid_engine.rlhf.runs.checkpoints import begin_run
from hybrid_engine.rlhf.runs.engine_config import Schedule
from hybrid_engine.rlhf.runs.run_folder import read_metrics
from hybrid_engine.rlhf.tasks.arithmetic import build_tokenizer
from tests.support.small_actors import save_small_actor, save_sums

PEAK = 1e-3
OF_TRANSFORMERS = [name for name in SCHEDULES if name != "WarmupDecayLR"]


def rates_of(build, num_steps):
    """The rates at which a plain optimizer makes its steps."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler, rates = build(optimizer), []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("kind", OF_TRANSFORMERS)
@pytest.mark.parametrize("num_warmup_steps", [0, 1, 3])
def test_rates_are_those_of_transformers_behind_its_step_at_rate_0(kind, num_warmup_steps):
    num_left_out = int(num_warmup_steps > 0)
    found = rates_of(Schedule(kind=kind, num_steps=9, num_warmup_steps=num_warmup_steps).build, 9)
    theirs = rates_of(lambda optimizer: get_scheduler(kind, optimizer, num_warmup_steps, 9 + num_left_out), 10)
    assert found == theirs[num_left_out:][:9]
    assert found[0] > 0


def test_the_peak_is_reached_in_the_last_step_of_the_warm_up():
    rates = rates_of(Schedule(kind="linear", num_steps=10, num_warmup_steps=4).build, 10)
    assert rates[:4] == pytest.approx([0.25 * PEAK, 0.5 * PEAK, 0.75 * PEAK, PEAK])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] > 0


@pytest.mark.parametrize(("num_steps", "expected"), [(1, 0), (9, 0), (30, 3), (600, 50)])
def test_without_an_option_the_warm_up_is_a_tenth_of_the_steps_up_to_a_most(num_steps, expected):
    schedule = Schedule.of(ScheduleOptions(), num_steps, "sft")
    assert schedule.num_warmup_steps == expected
    assert max(rates_of(schedule.build, num_steps)) == PEAK


def test_the_warm_up_is_given_in_steps_or_as_a_share_of_all():
    assert Schedule.of(ScheduleOptions(warmup_steps=7), 20, "grpo").num_warmup_steps == 7
    assert Schedule.of(ScheduleOptions(warmup_ratio=0.25), 20, "grpo").num_warmup_steps == 5
    short = Schedule.of(ScheduleOptions(warmup_steps=7), 5, "grpo")
    assert short.describe().endswith("a warm-up of 7; the peak is not reached")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"lr_scheduler_type": "triangle"}, "--lr-scheduler-type=triangle must be one of linear, cosine"),
        ({"warmup_steps": -1}, "--warmup-steps=-1 must be at least 0"),
        ({"warmup_ratio": 1.5}, "--warmup-ratio=1.5 must be from 0 to 1"),
        ({"warmup_ratio": 0.1, "warmup_steps": 3}, "--warmup-steps=3 and --warmup-ratio=0.1 set the same warm-up"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 3}, "--lr-scheduler-type=constant has no warm-up"),
    ],
)
def test_options_that_make_no_schedule_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        ScheduleOptions(**options)


@pytest.fixture(scope="module")
def actor(tmp_path_factory):
    folder = tmp_path_factory.mktemp("actor")
    return save_small_actor(folder, build_tokenizer()), save_sums(folder)


def rollouts(actor, out, **options):
    model, dataset = actor
    sizes = {"rollout_size": 4, "group_size": 4, "minibatch_size": 16, "eval_prompts": 2, "eval_samples": 2}
    lengths = {"max_prompt_tokens": 8, "max_new_tokens": 4, "save_every": 0, "eval_every": 0}
    given = {"model": model, "dataset": dataset, "reward": ("regex:[0-4]$",), "out": str(out), "learning_rate": 1e-3}
    return grpo.Config(**sizes | lengths | given | options)


def moved(before, after):
    """The largest change of a weight."""
    models = [AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (before, after)]
    return max((models[0][name] - models[1][name]).abs().max().item() for name in models[0])


def test_a_run_of_one_update_moves_the_weights_at_its_peak_rate(actor, tmp_path):
    folder = grpo.run(rollouts(actor, tmp_path, steps=1))
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["learning_rate"] == 1e-3
    assert moved(actor[0], folder) > 5e-4  # Adam's first step is about the rate


def test_a_short_run_of_sft_reaches_its_rate(actor, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+1=", "completion": str(n + 1)}) + "\n" for n in range(20)))
    given = {"model": actor[0], "dataset": str(rows), "out": str(tmp_path), "held_out_share": 0.0}
    folder = sft.run(sft.Config(**given, batch_size=10, learning_rate=1e-3))
    assert [line["learning_rate"] for line in read_metrics(tmp_path / "sft-log" / "metrics.jsonl")] == [1e-3, 5e-4]
    assert moved(actor[0], folder) > 5e-4


def test_a_run_goes_on_under_the_schedule_that_it_began_with(actor, tmp_path):
    config = rollouts(actor, tmp_path, steps=1, save_every=1)
    assert begin_run(config, "grpo").lr_scheduler_type == "linear"
    options = tmp_path / "checkpoints" / "options.json"
    options.parent.mkdir()
    options.write_text('{"lr_scheduler_type": "cosine"}')
    assert begin_run(replace(config, resume=True), "grpo").lr_scheduler_type == "cosine"
    options.write_text("{}")  # of a version without the option
    earlier = Schedule.of(begin_run(replace(config, resume=True), "grpo"), 8, "grpo")
    assert rates_of(earlier.build, 8) == pytest.approx(
        [PEAK * share for share in (0, 0, 0.25, 0.5, 0.75, 1, 0.75, 0.5)]
    )
