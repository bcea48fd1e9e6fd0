"""Defaults of a first run on a user's model: lengths that fit data and model, sizes that follow from one another."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MambaConfig, MambaForCausalLM

from hybrid_engine.recipes import dpo, evaluate, grpo, kto, online_dpo, ppo, reward, sft
from hybrid_engine.rlhf.data.prompts import long_answer, settle_lengths
from hybrid_engine.rlhf.data.rows import PromptRow
from hybrid_engine.rlhf.experience.start import Stages, prepare
from hybrid_engine.rlhf.options.shared import fit_minibatch
from hybrid_engine.rlhf.planning.comparison import plan
from hybrid_engine.rlhf.planning.reading import read_run
from hybrid_engine.rlhf.rewards.loading import load_rewards
from hybrid_engine.rlhf.runs.checkpoints import begin_run
from hybrid_engine.rlhf.tasks.arithmetic import build_tokenizer
from tests.support.distributed import run_distributed
from tests.support.small_actors import save_small_actor, save_sums


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


@pytest.fixture(scope="module")
def long_data(tmp_path_factory):
    """Sums of 4 characters, one of 40, and answers of which the longest, one of 200, has 50."""
    sums = [f"{first}+{second}=" for first in range(10) for second in range(10)] + ["1+" * 19 + "1="]
    answers = ["1" * 10] * 200
    answers[7] = "1" * 50
    rows = [{"prompt": sums[row % 101], "answer": answers[row]} for row in range(200)]
    path = tmp_path_factory.mktemp("data") / "long.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("options", "expected", "said"),
    [
        (
            {},
            (32, 32),
            "32 tokens (the longest of the data has 40), answers of up to 32 (what is left): --model has 64 pos",
        ),
        (
            {"max_new_tokens": 20},
            (40, 20),
            "40 tokens (the longest of the data), answers of up to 20 (as given): --mod",
        ),
        (
            {"max_new_tokens": 50},
            (14, 50),
            "14 tokens (the longest of the data has 40), answers of up to 50 (as given)",
        ),
        ({"max_prompt_tokens": 60}, (60, 24), "60 tokens (as given), answers of up to 24 (what is left)"),
        ({"max_prompt_tokens": 44, "tokens_per_micro_batch": 62}, (44, 18), "(what is left): a pass of --tokens-per"),
        ({"max_prompt_tokens": 8, "max_new_tokens": 9}, (8, 9), None),
        ({"tokens_per_micro_batch": 40}, (20, 20), "(what is left): a pass of --tokens-per-micro-batch=40 holds 40"),
    ],
)
def test_lengths_that_nobody_gave_are_those_of_the_data_that_the_model_reads(
    given, long_data, tmp_path, capsys, options, expected, said
):
    config = grpo.Config(**{**given, "dataset": long_data}, out=str(tmp_path), **options)
    found = prepare(begin_run(config, "grpo"), Stages(sft.run, reward.run)).config
    assert (found.max_prompt_tokens, found.max_new_tokens) == expected
    assert (said or "") in (shown := " ".join(capsys.readouterr().out.split()))
    assert ("answers of up to" in shown) == (said is not None)
    assert ("prompts have more tokens than --max-prompt-tokens=" in shown) == (expected[0] < 40)


@pytest.mark.parametrize(
    ("answer", "most", "expected", "reason"),
    [
        (0, 256, (40, 256), "the default"),
        (11, 256, (40, 256), "the default"),
        (300, 256, (40, 300), "99% of the answers in the data are not longer"),
        (9000, 256, (40, 960), "what is left"),
        (0, 4096, (40, 960), "what is left"),  # as evaluate asks
    ],
)
def test_answers_are_as_long_as_those_of_the_data(given, tmp_path, capsys, answer, most, expected, reason):
    with_positions(given["model"], tmp_path / "model", 1000)
    config = grpo.Config(**{**given, "model": str(tmp_path / "model")})
    found = settle_lengths(config, [3, 40], answer, most=most)
    assert (found.max_prompt_tokens, found.max_new_tokens) == expected
    assert f"answers of up to {expected[1]} ({reason}): --model has 1000 positions" in capsys.readouterr().out


def test_one_answer_that_is_much_longer_than_the_others_counts_for_nothing(given, long_data):
    tokenizer = AutoTokenizer.from_pretrained(given["model"])
    rows = [PromptRow(prompt="1", columns=json.loads(line)) for line in Path(long_data).read_text().splitlines()]
    assert long_answer(rows, tokenizer) == 11  # with the end
    turns = [{"role": "user", "content": "1" * 30}, {"role": "assistant", "content": "1" * 20}]
    assert long_answer([PromptRow(prompt="1", columns={"chosen": turns})], tokenizer) == 21
    rows = [PromptRow(prompt="1", columns={"answer": 3}), PromptRow(prompt="1", columns={"context": "1" * 99})]
    assert long_answer(rows, tokenizer) == 0


@pytest.mark.parametrize(("recipe", "module"), [("dpo", dpo), ("kto", kto)])
def test_lengths_of_preference_recipes_are_those_of_the_answered_prompts(given, tmp_path, recipe, module, monkeypatch):
    pairs = [{"prompt": "1+" * n + "1=", "chosen": "2", "rejected": "3" * 9} for n in range(1, 18)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    config = module.Config(
        model=given["model"], dataset=str(tmp_path / "pairs.jsonl"), out=str(tmp_path / "run"), batch_size=2,
        held_out_share=0.4,
    )  # fmt: skip
    settled = []

    def stop(config, *_):
        settled.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "build_actor", stop)
    with pytest.raises(KeyboardInterrupt):
        module.run(config)
    rows = (module.load_pairs if module is dpo else module.load_answers)(config)[1]
    longest = max(len(row.prompt) for row in rows)  # a character is a token
    lengths = settled[0].max_prompt_tokens, settled[0].max_new_tokens
    assert lengths == (min(32, longest), 64 - min(32, longest))
    planned = read_run(recipe, config).config
    assert (planned.max_prompt_tokens, planned.max_new_tokens) == lengths


def with_positions(model, folder, num_positions):
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": num_positions}))


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


def test_a_plan_has_the_lengths_of_the_run(given, long_data, tmp_path):
    config = grpo.Config(**{**given, "dataset": long_data}, out=str(tmp_path))
    found, asked = (
        plan("grpo", options, "1GB", 1)
        for options in (config, replace(config, max_prompt_tokens=32, max_new_tokens=32))
    )
    assert found.title.startswith("grpo, prompts of up to 32 tokens, answers of up to 32, on 1 process")
    assert found.plan.peak_bytes == asked.plan.peak_bytes


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
    peak = plan("ppo", config, "1GB", 2).plan.peak_bytes
    assert peak == plan("ppo", replace(config, minibatch_size=10), "1GB", 2).plan.peak_bytes


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
    assert "answers of up to 60 (what is left): --model has 64 positions" in capsys.readouterr().out
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
    assert (found.max_prompt_tokens, found.max_new_tokens) == (4, 4096)
    said = " ".join(capsys.readouterr().out.split())
    assert "the config of --model has no position limit, so both together have at most 8192" in said
    assert "has 8192 positions" not in said


@pytest.mark.parametrize("options", [{"k": 2}, {"num_samples": 2}])
def test_greedy_answers_are_not_drawn_several_times(given, options):
    with pytest.raises(ValueError, match="--temperature=0 gives the same answer to a prompt every time"):
        evaluate.Config(**given, temperature=0.0, **options)
    assert evaluate.Config(**given).pass_k == 8
