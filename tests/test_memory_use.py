"""What a run says of its memory at its end: the plan beside what was measured, by the same definition."""

import json
from pathlib import Path

import pytest
import torch
from distributed import run_distributed
from small_actors import save_sums
from torch import nn

from hybrid_engine.observing.live_bytes import LiveBytes
from hybrid_engine.recipes import grpo, kto, sft
from hybrid_engine.recipes.experience import policy as policies
from hybrid_engine.recipes.tasks import arithmetic
from hybrid_engine.recipes.tasks.small_llama import build_small_llama


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    torch.manual_seed(0)
    tokenizer = arithmetic.build_tokenizer()
    build_small_llama(tokenizer, hidden_size=64, num_layers=2).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    save_sums(folder)
    with (folder / "texts.jsonl").open("w") as file:
        for n in range(80):
            file.write(json.dumps({"prompt": f"{n:02}+{n:02}=", "completion": f"{2 * n:03}" * 16}) + "\n")
    return folder


def sft_config(folder, out, **options):
    texts = str(folder / "texts.jsonl")
    return sft.Config(out=str(out), model=str(folder / "model"), dataset=texts, epochs=1, save_every=0, **options)


def memory_of(out, log="sft-log"):
    return json.loads((Path(out) / log / "result.json").read_text())["memory"]


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 4}, {"tokens_per_micro_batch": 256}])
def test_a_run_takes_the_memory_that_was_planned(sources, tmp_path, options, capsys):
    sft.run(sft_config(sources, tmp_path, **options))
    memory = memory_of(tmp_path)
    assert memory["measured_bytes"] == pytest.approx(memory["planned_bytes"], rel=0.15)
    assert memory["planned_for_lengths_bytes"] is None
    assert memory["process_peak_bytes"] > memory["measured_bytes"]
    assert "memory: planned" in capsys.readouterr().out


def test_the_longest_answers_are_planned_where_they_meet_and_not_all_at_once(sources, tmp_path):
    with (tmp_path / "labelled.jsonl").open("w") as file:
        for n in range(80):
            answer = {"completion": f"{2 * n:03}" * (30 if n % 10 == 0 else 3), "label": n % 2 == 0}
            file.write(json.dumps({"prompt": f"{n:02}+{n:02}=", **answer}) + "\n")
    kto.run(
        kto.Config(
            out=str(tmp_path / "out"), model=str(sources / "model"), dataset=str(tmp_path / "labelled.jsonl"),
            batch_size=8, tokens_per_micro_batch=768, max_new_tokens=4, eval_prompts=2, eval_every=0, save_every=0,
        )
    )  # fmt: skip
    memory = memory_of(tmp_path / "out", "")
    assert memory["measured_bytes"] == pytest.approx(memory["planned_bytes"], rel=0.15)


def _run_sharded(rank, world_size, folder, out, stage):
    sft.run(sft_config(Path(folder), out, zero_stage=stage))
    return memory_of(out)


@pytest.mark.parametrize("stage", [0, 3])
def test_two_processes_take_the_memory_that_was_planned(sources, tmp_path, stage):
    for memory in run_distributed(_run_sharded, 2, str(sources), str(tmp_path), stage):
        assert memory["measured_bytes"] == pytest.approx(memory["planned_bytes"], rel=0.15)


def test_answers_that_end_early_are_planned_again_as_long_as_they_were(sources, tmp_path, monkeypatch, capsys):
    reports = []
    build = policies.hybrid_engine.initialize

    def initialize(*args, **kwargs):
        engine, *others = build(*args, **kwargs)
        reports.append(engine)
        return engine, *others

    monkeypatch.setattr(policies.hybrid_engine, "initialize", initialize)
    grpo.run(
        grpo.Config(
            out=str(tmp_path), model=str(sources / "model"), dataset=str(sources / "prompts.jsonl"), reward=("exact",),
            steps=2, rollout_size=4, group_size=4, minibatch_size=16, micro_batch_size=8, eval_prompts=2,
            eval_samples=1, eval_every=0, save_every=0, max_new_tokens=24,
        )
    )  # fmt: skip
    memory = memory_of(tmp_path, "")
    assert memory["planned_bytes"] >= memory["planned_for_lengths_bytes"]
    assert memory["measured_bytes"] == pytest.approx(memory["planned_for_lengths_bytes"], rel=0.15)
    assert memory["measured_generation_bytes"] <= memory["planned_generation_bytes"]
    report = reports[0].report()
    assert "peak of training:" in report and "KV workspace" in report and "memory: planned" in report
    assert "answers as long as they were" in capsys.readouterr().out


def test_live_bytes_are_those_of_storages_that_ops_made_and_still_are():
    given = torch.zeros(1000)
    with LiveBytes() as live:
        kept = given + 1
        view = kept[10:]
        del kept
        assert live.num_bytes == 4000
        for _ in range(3):
            nn.functional.relu(view)
        given.add_(1)
        del view
    assert (live.num_bytes, live.peak_bytes) == (0, 4000 + 4 * 990)


def test_live_bytes_follow_storages_that_grow_and_shrink():
    gathered = torch.empty(0)
    with LiveBytes([gathered.untyped_storage()]) as live:
        gathered.untyped_storage().resize_(4096)
        torch.zeros(1)
        gathered.untyped_storage().resize_(0)
        torch.zeros(1)
    assert live.peak_bytes == 4096 + 4
