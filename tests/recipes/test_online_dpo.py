"""Online DPO end to end with a tiny model: pairs of the actor's own answers, ties, going on, two processes."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_engine.cli import cli
from hybrid_engine.recipes import online_dpo
from hybrid_engine.rlhf.planning.memory_plan import Setting, plan_memory
from hybrid_engine.rlhf.planning.reading import read_run
from hybrid_engine.rlhf.runs.run_folder import read_answers, read_metrics
from hybrid_engine.rlhf.tasks import arithmetic
from tests.support.answers import check_followed
from tests.support.distributed import run_distributed
from tests.support.interrupted_runs import stopped_after
from tests.support.small_actors import save_small_actor, save_sums

SIZES = {
    "steps": 4, "rollout_size": 8, "group_size": 4, "minibatch_size": 4, "micro_batch_size": 2, "max_new_tokens": 6,
    "learning_rate": 3e-3, "eval_every": 2, "eval_prompts": 4, "save_every": 0,
}  # fmt: skip
SAME = ("score", "length", "loss", "chosen_reward", "rejected_reward", "grad_norm", "pairs", "groups_without_variance")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_small_actor(tmp_path_factory.mktemp("model"), arithmetic.build_tokenizer())


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return save_sums(tmp_path_factory.mktemp("data"))


@pytest.fixture
def tiny(model, dataset, tmp_path):
    """Answers should begin with a low digit, as some do by chance."""
    return online_dpo.Config(**SIZES, model=model, dataset=dataset, reward=("regex:^[0-4]",), out=str(tmp_path / "run"))


def test_a_run_learns_from_its_own_answers_and_keeps_the_best_weights(tiny, tmp_path):
    config = replace(tiny, steps=8, learning_rate=1e-2)
    online_dpo.run(config)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == 8 and lines[-1]["score"] > lines[0]["score"] + 0.2
    for line in lines:
        assert line["pairs"] == pytest.approx(8 * (1 - line["groups_without_variance"]))
        assert (
            line["generate_seconds"] > 0
            and line["training_seconds"] > 0
            and {"reward_regex", "length", "entropy_estimate"} <= line.keys()
        )
        assert line["pairs"] == 0 or {"loss", "accuracy", "reward_margin", "grad_norm"} <= line.keys()
    assert lines[0]["pairs"] > 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert abs(result["before"]["kl_per_sequence"]) < 1e-3 < abs(result["after"]["kl_per_sequence"])
    assert result["best"]["score"] == max(line.get("held_out_score", 0) for line in lines)
    check_followed(read_answers(tmp_path / "run" / "answers.jsonl"), {0, 2, 4, 6, 8})
    for name in ("actor", "best"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "run" / name)


def test_answers_that_are_all_alike_make_no_pair_and_change_nothing(tiny, tmp_path, monkeypatch):
    (tmp_path / "constant_reward.py").write_text(
        "def score(prompts, responses):\n    return [7.0 for _ in responses]\n"
    )
    monkeypatch.chdir(tmp_path)
    online_dpo.run(replace(tiny, steps=2, eval_every=0, reward=("constant_reward:score",)))
    for line in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        assert line["pairs"] == 0 and line["groups_without_variance"] == 1 and "loss" not in line
    before = AutoModelForCausalLM.from_pretrained(tiny.model).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "actor").state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tiny, tmp_path):
    whole, torn = (replace(tiny, save_every=1, out=str(tmp_path / name)) for name in ("whole", "torn"))
    online_dpo.run(whole)
    with stopped_after(2):
        online_dpo.run(torn)
    online_dpo.run(replace(torn, resume=True))
    lines = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("torn", "whole")]
    for ours, theirs in zip(*lines, strict=True):
        assert all(ours.get(name) == theirs.get(name) for name in (*SAME, "held_out_score"))
    results = [json.loads((tmp_path / name / "result.json").read_text())["best"] for name in ("torn", "whole")]
    assert results[0] == results[1]
    actors = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "actor") for name in ("torn", "whole")]
    assert all(map(torch.equal, *(actor.state_dict().values() for actor in actors)))


def run_it(rank, world_size, config):
    online_dpo.run(config)


def test_two_processes_under_zero_3_make_the_pairs_of_one(tiny, tmp_path):
    config = replace(tiny, steps=2, eval_every=0, minibatch_size=8)
    online_dpo.run(config)
    run_distributed(run_it, 2, replace(config, out=str(tmp_path / "two"), zero_stage=3))
    lines = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("run", "two")]
    for one, two in zip(*lines, strict=True):
        for name in SAME:
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name


def test_an_adapter_has_its_base_as_reference(tiny, tmp_path):
    options = "--lora-rank 2 --steps 2 --rollout-size 4 --minibatch-size 4 --eval-every 0 --eval-prompts 2"
    sources = f"--model {tiny.model} --dataset {tiny.dataset} --reward regex:^[0-4] --max-new-tokens 4 --loss ipo"
    assert cli.main(f"online-dpo {sources} {options} --out {tmp_path / 'lora'}".split()) == 0
    result = json.loads((tmp_path / "lora" / "result.json").read_text())
    assert result["before"]["kl_per_sequence"] == pytest.approx(0, abs=1e-3)
    AutoModelForCausalLM.from_pretrained(tmp_path / "lora" / "actor")


def test_a_loss_without_a_reference_keeps_none_in_memory_and_in_the_plan(tiny, tmp_path):
    config = replace(tiny, loss="simpo", beta=None, steps=2, eval_every=0)
    online_dpo.run(config)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert "kl_per_sequence" not in result["after"] and "loss" in read_metrics(tmp_path / "run" / "metrics.jsonl")[0]
    for loss, roles in (("sigmoid", ["actor", "reference"]), ("simpo", ["actor"])):
        read, config = read_run("online-dpo", replace(tiny, loss=loss))
        plan = plan_memory(read, Setting(recipe="online-dpo", config=config, num_processes=1, device="cpu"))
        assert [role.name for role in plan.roles] == roles


def test_one_answer_to_a_prompt_makes_no_pair_and_is_refused():
    with pytest.raises(ValueError, match="--group-size=1 must be at least 2"):
        online_dpo.Config(group_size=1)
