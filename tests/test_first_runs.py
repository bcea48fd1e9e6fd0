"""Defaults of a first run on a user's model: lengths as the model reads them, sizes that follow from one another."""

import json
from dataclasses import replace

import pytest
import torch
from distributed import run_distributed
from small_actors import save_small_actor, save_sums
from transformers import AutoModelForCausalLM, AutoTokenizer, MambaConfig, MambaForCausalLM

from hybrid_engine.command.plan import Wishes
from hybrid_engine.recipes import evaluate, grpo, online_dpo, ppo
from hybrid_engine.recipes.planning.fitting import plan
from hybrid_engine.recipes.rewards.loading import load_rewards
from hybrid_engine.recipes.runs.checkpoints import begin_run
from hybrid_engine.recipes.runs.options import fit_minibatch
from hybrid_engine.recipes.tasks.arithmetic import build_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("actor")
    save_small_actor(folder, build_tokenizer())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    return str(folder)


@pytest.fixture(scope="module")
def given(model, tmp_path_factory):
    return {"model": model, "dataset": save_sums(tmp_path_factory.mktemp("data")), "reward": ("regex:[0-4]$",)}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (32, 32)),
        ({"max_new_tokens": 50}, (14, 50)),
        ({"max_prompt_tokens": 60}, (60, 4)),
        ({"max_prompt_tokens": 8, "max_new_tokens": 9}, (8, 9)),
        ({"tokens_per_micro_batch": 40}, (20, 20)),
    ],
)
def test_lengths_that_nobody_gave_are_those_that_the_model_reads(given, tmp_path, capsys, options, expected):
    config = begin_run(grpo.Config(**given, out=str(tmp_path), **options), "grpo")
    assert (config.max_prompt_tokens, config.max_new_tokens) == expected
    said = (
        f"prompts of up to {expected[0]} tokens, longer ones lose their beginning, and answers of up to {expected[1]}"
    )
    assert (said in capsys.readouterr().out) == (len(options) < 2)


@pytest.mark.parametrize(("recipe", "expected"), [(grpo, (96, 48)), (online_dpo, (96, 48)), (ppo, (96, 40))])
def test_the_small_models_of_recipes_keep_their_lengths(recipe, expected):
    config = recipe.Config()
    assert (config.max_prompt_tokens, config.max_new_tokens) == expected


def test_a_run_goes_on_with_the_lengths_that_it_began_with(given, tmp_path):
    options = tmp_path / "checkpoints" / "options.json"
    options.parent.mkdir()
    options.write_text(json.dumps({"max_prompt_tokens": 9, "max_new_tokens": 11}))
    config = begin_run(grpo.Config(**given, out=str(tmp_path), resume=True), "grpo")
    assert (config.max_prompt_tokens, config.max_new_tokens) == (9, 11)


def test_a_plan_has_the_lengths_of_the_run(given, tmp_path):
    config = grpo.Config(**given, out=str(tmp_path))
    wishes = Wishes(memory="1GB", processes=1, as_json=False)
    lengths = {"max_prompt_tokens": 32, "max_new_tokens": 32}
    assert (
        plan("grpo", config, wishes).plan.peak_bytes == plan("grpo", replace(config, **lengths), wishes).plan.peak_bytes
    )


@pytest.mark.parametrize(
    ("recipe", "options", "expected"),
    [
        (grpo, {}, 256),
        (grpo, {"rollout_size": 2}, 16),
        (grpo, {"rollout_size": 50}, 200),
        (ppo, {"rollout_size": 24}, 24),
        (ppo, {"rollout_size": 80}, 20),
        (online_dpo, {"rollout_size": 6}, 6),
    ],
)
def test_rollout_size_alone_makes_a_run(recipe, options, expected):
    assert recipe.Config(**options).minibatch_size == expected


@pytest.mark.parametrize(
    ("recipe", "options", "num_processes", "expected"),
    [
        (ppo, {"rollout_size": 50}, 1, 25),
        (ppo, {"rollout_size": 50}, 2, 10),
        (ppo, {"rollout_size": 64}, 64, 64),  # a response each, which is above the bound
        (grpo, {"rollout_size": 50}, 5, 200),
        (online_dpo, {"rollout_size": 130}, 2, 26),
        (ppo, {"rollout_size": 50, "minibatch_size": 25}, 2, 25),  # given: refused later by its name
        (ppo, {"rollout_size": 51}, 2, 17),  # --rollout-size is refused later
    ],
)
def test_a_minibatch_that_nobody_gave_is_shared_by_the_processes(recipe, options, num_processes, expected):
    assert fit_minibatch(recipe.Config(**options), num_processes).minibatch_size == expected


def begin_ppo(rank, world_size, config):
    return begin_run(config, "ppo").minibatch_size


def test_runs_and_plans_on_two_processes_have_such_a_minibatch(given, tmp_path):
    config = ppo.Config(**given, out=str(tmp_path), rollout_size=50, max_prompt_tokens=8, max_new_tokens=8)
    assert run_distributed(begin_ppo, 2, config) == [10, 10]
    wishes = Wishes(memory="1GB", processes=2, as_json=False)
    peak = plan("ppo", config, wishes).plan.peak_bytes
    assert peak == plan("ppo", replace(config, minibatch_size=10), wishes).plan.peak_bytes


def test_a_run_goes_on_with_the_minibatch_that_it_began_with(given, tmp_path):
    options = tmp_path / "checkpoints" / "options.json"
    options.parent.mkdir()
    options.write_text(json.dumps({"minibatch_size": 10, "max_prompt_tokens": 8, "max_new_tokens": 8}))
    assert begin_run(ppo.Config(**given, out=str(tmp_path), resume=True, rollout_size=50), "ppo").minibatch_size == 10


@pytest.mark.parametrize(("recipe", "options"), [(grpo, {"rollout_size": 3, "minibatch_size": 7})])
def test_a_size_that_is_given_must_divide(recipe, options):
    with pytest.raises(ValueError, match="--minibatch-size=7 must divide the 24 answers of a step"):
        recipe.Config(**options)


def test_an_evaluation_at_temperature_0_gives_the_answers_of_transformers_greedy_search(given, tmp_path, capsys):
    config = evaluate.Config(**given, out=str(tmp_path), temperature=0.0, max_prompts=3)
    evaluate.run(config)
    assert "answers of up to 60: --model has 64 positions" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    model, tokenizer = (cls.from_pretrained(given["model"]) for cls in (AutoModelForCausalLM, AutoTokenizer))
    for line in lines:
        prompt = tokenizer(line["prompt"], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected = model.generate(prompt, do_sample=False, max_new_tokens=60, pad_token_id=0)[0, prompt.shape[1] :]
        assert line["responses"] == [tokenizer.decode(expected, skip_special_tokens=True)]


def test_a_model_without_positions_is_said_to_have_none(given, tmp_path, capsys):
    folder = tmp_path / "mamba"
    tokenizer = AutoTokenizer.from_pretrained(given["model"])
    config = MambaConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, state_size=4)
    MambaForCausalLM(config).save_pretrained(folder)
    asked = evaluate.Config(**{**given, "model": str(folder)}, out=str(tmp_path), max_prompts=3)
    found, _ = evaluate.load_rows(asked, tokenizer, load_rewards(given["reward"]))
    assert (found.max_prompt_tokens, found.max_new_tokens) == (4096, 4096)
    begin_run(grpo.Config(**{**given, "model": str(folder)}, out=str(tmp_path)), "grpo")
    said = " ".join(capsys.readouterr().out.split())
    assert "the config of --model names no positions, and prompt and answer have 8192 tokens at most" in said
    assert "since the config of --model=" in said and "has 8192 positions" not in said


@pytest.mark.parametrize("options", [{"k": 2}, {"num_samples": 2}])
def test_greedy_answers_are_not_drawn_several_times(given, options):
    with pytest.raises(ValueError, match="--temperature=0 gives a prompt the same answer again and again"):
        evaluate.Config(**given, temperature=0.0, **options)
    assert evaluate.Config(**given).pass_k == 8
