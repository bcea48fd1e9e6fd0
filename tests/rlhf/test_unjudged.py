"""Answers that every reward calls None, "not mine": told once, counted, and nothing is learned from them."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_engine.recipes import evaluate, grpo, online_dpo, ppo
from hybrid_engine.rlhf.data.prompts import load_prompt_rows
from hybrid_engine.rlhf.options.algorithm import Algorithm
from hybrid_engine.rlhf.runs.run_folder import read_answers, read_metrics
from hybrid_engine.rlhf.tasks import arithmetic
from tests.support.small_actors import save_small_actor, save_sums

SIZES = {
    "steps": 1, "rollout_size": 4, "minibatch_size": 4, "micro_batch_size": 2, "max_new_tokens": 6, "eval_every": 0,
    "eval_prompts": 4, "save_every": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    return {"model": save_small_actor(folder / "model", arithmetic.build_tokenizer()), "dataset": save_sums(folder)}


@pytest.fixture
def reward_of(sources, tmp_path, monkeypatch):
    """Rewards that judge held-out prompts alone, and those that judge answers of even length too."""
    held_out = [row.prompt for row in load_prompt_rows(sources["dataset"])[1]]
    lines = [f"HELD_OUT = {held_out!r}"]
    for name, rule in (("none", "False"), ("even", "len(text) % 2 == 0")):
        judged = f"prompt in HELD_OUT or {rule}"
        lines += [
            f"def {name}(prompts, responses):",
            f"    return [float(text[:1] < '5') if {judged} else None for prompt, text in zip(prompts, responses)]",
        ]
    module = f"unjudged_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    return lambda name: (f"{module}:{name}",)


def run(recipe, sources, folder, reward, **options):
    recipe.run(recipe.Config(**{**SIZES, **sources, "out": str(folder), "reward": reward, **options}))
    return read_metrics(folder / "metrics.jsonl")


@pytest.mark.parametrize("recipe", [grpo, online_dpo])
def test_a_step_whose_answers_nobody_judges_changes_nothing_and_is_told_once(
    recipe, sources, tmp_path, reward_of, capsys
):
    lines = run(recipe, sources, tmp_path / "run", reward_of("none"), steps=2, group_size=2)
    assert [line["unjudged_share"] for line in lines] == [1.0, 1.0]
    assert all(math.isfinite(value) for line in lines for value in line.values() if isinstance(value, float))
    weights = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "run/actor", sources["model"]))
    assert all(map(torch.equal, *(model.state_dict().values() for model in weights)))
    output = " ".join(capsys.readouterr().out.split())
    assert output.count("scores the answer to the prompt") == 1


def test_what_nobody_judges_is_in_no_mean_of_a_group_and_in_no_loss(sources, tmp_path, reward_of, monkeypatch):
    seen = []
    update = grpo.update
    monkeypatch.setattr(grpo, "update", lambda *args, **kwargs: seen.append(args[1]) or update(*args, **kwargs))
    algorithm = Algorithm(scale="none", entropy_coef=0.1, kl_place="loss", kl_coef=0.1)
    reward = reward_of("even")
    (line,) = run(grpo, sources, tmp_path / "run", reward, group_size=4, minibatch_size=16, algorithm=algorithm)
    batch = seen[0].batch
    judged = batch.mask.any(dim=1)
    assert 0 < line["unjudged_share"] < 1
    assert line["unjudged_share"] == pytest.approx(1 - judged.double().mean().item())
    answers = seen[0].sequences.response_mask.any(dim=1)
    assert answers.all() and not batch.advantages[~judged].any()
    for advantages, is_judged in zip(batch.advantages[:, 0].view(-1, 4), judged.view(-1, 4), strict=True):
        assert advantages[is_judged].sum().item() == pytest.approx(0, abs=1e-6)
    assert 0 <= line["score"] <= 1 and all(math.isfinite(v) for v in line.values() if isinstance(v, float))


def test_ppo_learns_nothing_from_them_but_judges_what_was_cut_off(sources, tmp_path, reward_of, monkeypatch):
    seen = []
    update = ppo.update
    monkeypatch.setattr(ppo, "update", lambda *args: seen.append(args[1]) or update(*args))
    (line,) = run(ppo, sources, tmp_path / "run", reward_of("none"), rollout_size=16, missing_eos_score=-3.0)
    learned = seen[0].sequences.response_mask.any(dim=1)
    assert (
        line["unjudged_share"] == pytest.approx(1 - learned.double().mean().item()) and 0 < line["unjudged_share"] < 1
    )
    assert line["score"] == -3.0  # of those that were cut off
    assert not seen[0].advantages[~learned].any() and not seen[0].returns[~learned].any()
    assert all(math.isfinite(value) for value in line.values() if isinstance(value, float))


def test_in_an_evaluation_they_have_no_score_and_do_not_pass(sources, tmp_path, reward_of):
    reward = reward_of("even")
    options = {"max_new_tokens": 6, "k": 2, "out": str(tmp_path / "found"), "max_prompts": 20}
    evaluate.run(evaluate.Config(**sources, **options, reward=reward, threshold=-1.0))
    figures = evaluate.json.loads((tmp_path / "found" / "result.json").read_text())["figures"]
    assert 0 < figures["unjudged_share"] < 1
    assert figures["pass_at_1"] == pytest.approx(1 - figures["unjudged_share"])
    with pytest.raises(ValueError, match=r"^--reward scores no answer to any of the 3 held-out prompts"):
        (tmp_path / "nobody.py").write_text("def judges(responses): return [None] * len(responses)")
        options |= {"out": str(tmp_path / "other"), "max_prompts": 3}
        evaluate.run(evaluate.Config(**sources, **options, reward=("nobody:judges",)))


def test_answers_without_a_reward_are_kept_as_such(sources, tmp_path, reward_of):
    held_out = [row.prompt for row in load_prompt_rows(sources["dataset"])[1]]
    (tmp_path / "one.py").write_text(
        f"def judges(prompts, responses): return [1.0 if p == {held_out[0]!r} else None for p in prompts]"
    )
    run(grpo, sources, tmp_path / "run", ("one:judges",), group_size=2, eval_samples=1, eval_prompts=2)
    assert [line["rewards"] for line in read_answers(tmp_path / "run" / "answers.jsonl")][:2] == [[1.0], [None]]
