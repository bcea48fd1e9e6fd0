"""The latency line is DeepSpeed's and its figures add up."""

import re
import time
from unittest.mock import Mock

import pytest
import torch

import hybrid_engine
from hybrid_engine.metrics.latency import LatencyStats
from tests.support.models import build_model, padded_prompts

pytestmark = pytest.mark.quick

LINE = re.compile(
    r"^\|E2E latency=(?P<e2e>[\d.]+)s \|Gather latency=(?P<gather>[\d.]+)s \([\d.]+%\) "
    r"\|Generate time=(?P<generate>[\d.]+)s \([\d.]+%\) \|Training time=(?P<training>[\d.]+)s \([\d.]+%\) "
    r"\|Others=(?P<others>[\d.]+) \([\d.]+%\)\|CurSamplesPerSec=[\d.]+ \|AvgSamplesPerSec=[\d.]+$"
)


def build_engine():
    config = {
        "train_batch_size": 6,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "hybrid_engine": {"enabled": True},
    }
    engine, *_ = hybrid_engine.initialize(model=build_model(), config=config)
    return engine


@pytest.fixture
def engine():
    return build_engine()


def iterate(engine):
    input_ids, mask = padded_prompts()
    engine.eval()
    output = engine.generate(
        input_ids, attention_mask=mask, do_sample=True, max_new_tokens=8, return_dict_in_generate=True
    )
    engine.train()
    engine.backward(engine(input_ids=input_ids, attention_mask=mask, labels=input_ids).loss)
    engine.step()
    return output


def test_the_line_is_printed_from_the_second_eval_on_and_adds_up(engine, capsys):
    iterate(engine)
    assert capsys.readouterr().out == ""
    iterate(engine)
    match = LINE.match(capsys.readouterr().out.strip())
    assert match
    seconds = {name: float(value) for name, value in match.groupdict().items()}
    parts = sum(seconds[name] for name in ("gather", "generate", "training", "others"))
    assert parts == pytest.approx(seconds["e2e"], abs=0.03)  # each figure is rounded to 0.01


def shares(line):
    """The four percentages of a line."""
    found = [float(share) for share in re.findall(r"\(([\d.]+)%\)", line)]
    assert len(found) == 4
    return found


def test_every_rollout_of_an_iteration_counts_and_the_shares_add_to_100(engine, capsys, monkeypatch):
    input_ids, mask = padded_prompts()
    original = engine.generator.run
    monkeypatch.setattr(engine.generator, "run", lambda *args: (time.sleep(0.1), original(*args))[1])
    engine.eval()
    for num_prompts in (6, 2, 4):
        engine.generate(input_ids[:num_prompts], attention_mask=mask[:num_prompts], max_new_tokens=4)
    engine.train()
    for _ in range(2):
        engine.backward(engine(input_ids=input_ids, attention_mask=mask, labels=input_ids).loss)
        engine.step()
    stats = engine.latency_stats()
    assert stats["num_samples"] == 12 and stats["generate_seconds"] >= 0.3
    engine.eval()
    line = capsys.readouterr().out.strip()
    seconds = {name: float(value) for name, value in LINE.match(line).groupdict().items()}
    assert seconds["generate"] >= 0.3
    assert sum(shares(line)) == pytest.approx(100, abs=0.03)  # each is rounded to 0.01
    rate = float(re.search(r"CurSamplesPerSec=([\d.]+)", line).group(1))
    assert rate == pytest.approx(12 / seconds["e2e"], rel=0.05)


def test_a_rollout_between_train_and_step_is_not_training_too(engine, capsys, monkeypatch):
    """As where a script switches the module instead of the engine."""
    input_ids, mask = padded_prompts()
    original = engine.generator.run
    monkeypatch.setattr(engine.generator, "run", lambda *args: (time.sleep(0.3), original(*args))[1])
    engine.train()
    engine.module.eval()
    engine.module.generate(input_ids, attention_mask=mask, max_new_tokens=4)
    engine.module.train()
    engine.backward(engine(input_ids=input_ids, attention_mask=mask, labels=input_ids).loss)
    engine.step()
    stats = engine.latency_stats()
    phases = ("gather", "generate", "training", "others")
    assert sum(stats[f"{phase}_seconds"] for phase in phases) == pytest.approx(stats["e2e_seconds"])
    engine.eval()
    assert sum(shares(capsys.readouterr().out)) == pytest.approx(100, abs=0.03)


def test_training_before_the_first_eval_is_part_of_the_first_iteration(engine, capsys):
    input_ids, mask = padded_prompts()
    engine.train()
    for _ in range(2):
        engine.backward(engine(input_ids=input_ids, attention_mask=mask, labels=input_ids).loss)
        engine.step()
    stats = engine.latency_stats()
    assert 0 < stats["training_seconds"] <= stats["e2e_seconds"]
    engine.eval()
    assert sum(shares(capsys.readouterr().out)) == pytest.approx(100, abs=0.03)


def test_seconds_are_charged_to_the_phase_they_were_spent_in(engine, monkeypatch):
    iterate(engine)

    for owner, method, figure in (
        (engine.generator, "gather", "gather_seconds"),
        (engine.generator, "run", "generate_seconds"),
        (engine.generator.model, "forward", "decode_seconds"),
        (engine.optimizer, "step", "training_seconds"),
    ):
        with monkeypatch.context() as patch:
            original = getattr(owner, method)
            patch.setattr(owner, method, lambda *args, call=original: (time.sleep(0.2), call(*args))[1])
            iterate(engine)
        # The least it can be, whatever the machine: what was slept inside.
        assert engine.latency_stats()[figure] >= 0.2, figure


def test_an_iteration_without_a_rollout_prints_no_samples(engine, capsys):
    engine.eval()
    engine.eval()
    assert "SamplesPerSec" not in capsys.readouterr().out


def test_stats_count_what_the_rollout_made(engine):
    output = iterate(engine)
    stats = engine.latency_stats()
    assert stats["generated_tokens"] == int(output.lengths.sum())
    assert stats["num_samples"] == 6
    assert stats["tokens_per_second"] == pytest.approx(stats["generated_tokens"] / stats["generate_seconds"])
    assert 0 < stats["prefill_seconds"] + stats["decode_seconds"] <= stats["generate_seconds"]
    assert stats["peak_kv_bytes"] == engine.generator.workspace.allocated_bytes > 0
    assert stats["gathered_bytes"] == 0  # one process has nothing to gather
    busy = stats["gather_seconds"] + stats["generate_seconds"] + stats["training_seconds"]
    assert busy + stats["others_seconds"] == pytest.approx(stats["e2e_seconds"])


def test_the_difference_to_the_trainer_is_measured_at_start_up_and_when_observed(engine):
    assert 0 < engine.logprob_difference.max < 1e-5
    rollout, trainer = torch.tensor([[-1.0, -2.0, 7.0]]), torch.tensor([[-1.5, -2.0, 0.0]])
    engine.observe_logprobs(rollout, trainer, torch.tensor([[True, True, False]]))
    assert (engine.logprob_difference.mean, engine.logprob_difference.max) == (0.25, 0.5)
    stats = engine.latency_stats()
    assert (stats["logprob_difference_mean"], stats["logprob_difference_max"]) == (0.25, 0.5)


def test_a_run_that_goes_on_has_the_difference_that_was_measured_last(engine, tmp_path, monkeypatch):
    at_start = engine.logprob_difference
    engine.observe_logprobs(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]]), torch.ones(1, 2))
    engine.save_checkpoint(tmp_path)
    resumed = build_engine()
    assert (resumed.logprob_difference.mean, resumed.logprob_difference.max) == (at_start.mean, at_start.max)
    resumed.load_checkpoint(tmp_path, load_module_only=True)  # weights alone are no run that goes on
    assert resumed.logprob_difference.max == at_start.max
    with pytest.raises(ValueError, match="no room"), monkeypatch.context() as patch:
        patch.setattr(resumed.optimizer, "restore", Mock(side_effect=ValueError("no room")))
        resumed.load_checkpoint(tmp_path)
    assert resumed.logprob_difference.max == at_start.max
    resumed.load_checkpoint(tmp_path)
    assert (resumed.logprob_difference.mean, resumed.logprob_difference.max) == (0.25, 0.5)


def test_the_report_says_what_runs_where_and_why(engine):
    report = engine.report()
    assert "all 2 LlamaDecoderLayer layers" in report
    assert "whole on this process" in report
    assert "KV workspace" in report and "apart" in report


def test_clocks_wait_for_the_device(monkeypatch):
    # A device that does its work when the host waits for it: read early, clocks would charge it to the next phase.
    now, queued = [0.0], [0.0]

    def synchronize(device):
        now[0], queued[0] = now[0] + queued[0], 0.0

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    latency = LatencyStats(1, torch.device("cuda"))
    latency.begin()
    for phase, seconds in (("gather", 2.0), ("generate", 5.0)):
        with latency.measure(phase):
            queued[0] += seconds
    latency.mark_training()
    queued[0] += 7.0
    latency.add_training()
    stats = latency.stats()
    assert [stats[f"{phase}_seconds"] for phase in ("gather", "generate", "training", "others")] == [2, 5, 7, 0]
