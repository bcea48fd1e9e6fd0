"""Evaluation: what is measured of answers, alike in parts and by several processes, and the command around it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hybrid_engine.cli import cli
from hybrid_engine.generation.step import ContainerRollouts
from hybrid_engine.recipes import evaluate as recipe
from hybrid_engine.rl.estimates import pass_at_k
from hybrid_engine.rlhf.experience import evaluation
from hybrid_engine.rlhf.runs.run_folder import read_config
from hybrid_engine.rlhf.tasks.corpus import train_tokenizer


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder with an untrained model, and a dataset whose answers are lengths."""
    folder = tmp_path_factory.mktemp("source")
    tokenizer = train_tokenizer([f"def f{n}(x): return the value of x, or {n * 7}" for n in range(50)], 300)
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=300, n_positions=64, n_embd=16, n_layer=1, n_head=2,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder / "model")
    rows = [{"prompt": f"def f{n}(x):\n", "answer": n % 3} for n in range(7)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rules.py").write_text(
        "def is_even(responses, answer): return [float((len(t) + int(a)) % 2) for t, a in zip(responses, answer)]\n"
    )
    return folder


@pytest.fixture
def config(source, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(source))
    return recipe.Config(
        model=str(source / "model"), dataset=str(source / "data.jsonl"), reward=("rules:is_even", "length:target=4"),
        reward_weights=(1.0, 0.0), k=2, num_samples=3, max_new_tokens=6, out=str(tmp_path / "out"),
    )  # fmt: skip


def results(config):
    folder = recipe.run(config)
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return json.loads((folder / "result.json").read_text()), lines


def test_every_prompt_is_answered_and_the_figures_are_those_of_the_answers(config, capsys):
    result, groups = results(config)
    figures = result["figures"]
    assert all(len(group["lengths"]) == len(group["responses"]) and "response_ids" not in group for group in groups)
    assert [group["prompt"] for group in groups] == [f"def f{n}(x):\n" for n in range(7)]
    assert result["num_prompts"] == 7 and read_config(Path(config.out))["num_samples"] == 3
    scores = [score for group in groups for score in group["scores"]]
    assert len(scores) == 21 and 0 < sum(scores) < 21
    mean = pytest.approx(sum(scores) / 21)
    assert figures["score"] == mean and figures["pass_at_1"] == mean and figures["reward_is_even"] == mean
    expected = [pass_at_k(3, int(sum(group["scores"])), 2) for group in groups]
    assert figures["pass_at_2"] == pytest.approx(sum(expected) / 7)
    assert figures["pass_at_2_low"] < figures["pass_at_2"] < figures["pass_at_2_high"]
    lengths = [value for group in groups for value in group["by_name"]["length"]]
    assert figures["reward_length"] == pytest.approx(sum(lengths) / 21)
    assert "7 prompts, 3 answers to each" in capsys.readouterr().out


def test_answers_do_not_depend_on_how_many_prompts_are_answered_at_a_time(config, tmp_path, monkeypatch):
    whole, whole_groups = results(config)
    monkeypatch.setattr(evaluation, "PROMPTS_PER_PASS", 2)
    parts, groups = results(replace(config, out=str(tmp_path / "parts")))
    assert groups == whole_groups
    assert parts["figures"] == pytest.approx(whole["figures"], abs=1e-6)
    _, other = results(replace(config, out=str(tmp_path / "other"), seed=1))
    assert other != groups


def test_a_chosen_part_of_the_prompts_is_answered(config):
    _, groups = results(replace(config, max_prompts=2, num_samples=None))
    assert [len(group["responses"]) for group in groups] == [2, 2]


@pytest.mark.parametrize(("number", "most"), [(1, 4), (4, 4), (5, 4), (9, 4), (64, 8), (65, 8)])
def test_parts_are_of_equal_lengths(number, most):
    parts = evaluation.split_evenly(range(number), most)
    assert [item for part in parts for item in part] == list(range(number))
    sizes = {len(part) for part in parts}
    assert max(sizes) <= most and max(sizes) - min(sizes) <= 1 and len(parts) == -(-number // most)


def test_the_groups_of_several_processes_come_back_in_the_order_of_the_prompts(monkeypatch):
    parts = evaluation.split_evenly(range(13), 3 * 2)
    by_rank = [[item for part in parts for item in part[rank::3]] for rank in range(3)]
    monkeypatch.setattr(evaluation, "gather_objects", lambda groups: by_rank)
    assert evaluation._in_order([], [len(part) for part in parts]) == list(range(13))


def test_the_command_evaluates_and_keeps_what_an_earlier_evaluation_left(config, capsys, tmp_path):
    options = f"--model {config.model} --dataset {config.dataset} --out {config.out} --max-new-tokens 4 -k 2"
    command = f"evaluate {options} --reward rules:is_even length:most=9 --reward-weights 1 0.5".split()
    assert cli.main(command) == 0
    assert cli.main(command) == 2
    line = f"--out='{config.out}' contains an earlier evaluation (result.json, samples.jsonl): --restart moves it aside"
    assert line in capsys.readouterr().err
    assert cli.main([*command, "--restart"]) == 0
    assert (tmp_path / "out" / "previous-1" / "result.json").exists() and (tmp_path / "out" / "result.json").exists()


def test_memory_that_does_not_do_is_answered_in_the_commands_own_options(config, caplog, monkeypatch):
    run, tried = ContainerRollouts.run, []

    def limited(self, plan, *arguments):
        tried.append(plan.max_running)
        if plan.max_running > 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(self, plan, *arguments)

    monkeypatch.setattr(ContainerRollouts, "run", limited)
    options = f"--model {config.model} --dataset {config.dataset} --max-new-tokens 4 -k 2 --reward rules:is_even"
    assert cli.main(f"evaluate {options} --out {config.out}".split()) == 0 and tried == [14, 7, 3]
    assert "goes on with 7: --max-running=7, or" in caplog.text
    tried.clear()
    assert cli.main(f"evaluate {options} --out {config.out}-few --max-running 3".split()) == 0 and tried == [3]
    results = [Path(f"{config.out}{name}/samples.jsonl").read_text() for name in ("", "-few")]
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "--model is missing"),
        ({"dataset": None}, "--dataset is missing"),
        ({"reward": ()}, "--reward is missing"),
        ({"reward": ("exact", "")}, "--reward='' is empty"),
        ({"k": 0}, "--k=0 must be at least 1"),
        ({"num_samples": 1}, "--num-samples=1 must be at least 2"),
        ({"max_prompts": 0}, "--max-prompts=0 must be at least 1"),
        ({"temperature": -0.1}, "--temperature=-0.1 must be at least 0"),
        ({"threshold": float("nan")}, "--threshold=nan must be finite"),
        ({"dtype": "fp8"}, "--dtype=fp8 must be one of auto, fp32, bf16, fp16"),
        ({"max_running": -1}, "--max-running=-1 must be at least 0"),
        ({"seed": -1}, "--seed=-1 must be from 0"),
    ],
)
def test_options_that_cannot_work_are_refused(config, changes, message):
    with pytest.raises(ValueError, match=message):
        replace(config, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"reward": ("exact:column=right",), "reward_weights": ()},
            r"reads the column 'right', but the data has 'answer'",
        ),
        ({"reward_weights": (1.0,)}, r"--reward-weights='1' must be 2 numbers"),
        ({"max_new_tokens": 64}, r"--max-new-tokens=64 after prompts of up to .* more than the 64 positions"),
    ],
)
def test_what_does_not_fit_data_or_model_is_refused_before_the_model_loads(config, changes, message, monkeypatch):
    monkeypatch.setattr(recipe, "load_model", None)
    with pytest.raises(ValueError, match=message):
        recipe.run(replace(config, **changes))


def test_a_conversation_is_shown_with_its_roles():
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "well?"}]
    assert evaluation.prompt_shown(chat) == "user: hello\nassistant: well?"


def test_a_prompt_that_comes_again_in_a_later_pass_is_answered_anew(config, source, tmp_path, monkeypatch):
    data = tmp_path / "again.jsonl"
    data.write_text("".join(json.dumps({"prompt": "def f0(x):\n", "answer": 0}) + "\n" for _ in range(3)))
    monkeypatch.setattr(evaluation, "PROMPTS_PER_PASS", 1)
    _, groups = results(replace(config, dataset=str(data)))
    assert len({tuple(group["responses"]) for group in groups}) == 3
