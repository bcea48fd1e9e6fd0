"""Recipes compile and record before their first rollout, where that takes long, and say so in one line."""

import re

import pytest
import torch

from hybrid_engine.engine.hybrid_engine import HybridEngine
from hybrid_engine.recipes import agent, distill, grpo, online_dpo, ppo
from hybrid_engine.rlhf.experience import rollout
from hybrid_engine.rlhf.tasks import arithmetic, calculator
from tests.support.small_actors import save_small_actor, save_sums

SIZES = {"steps": 1, "rollout_size": 4, "max_new_tokens": 6, "eval_every": 0, "save_every": 0}
PROMPTED = {"minibatch_size": 4, "micro_batch_size": 2, "eval_prompts": 4, "reward": ("regex:^[0-4]",)}
LINE = re.compile(r"warm-up: [\d.]+ s, of these .* and [\d.]+ s for \d+ graphs")


class FirstRolloutError(Exception):
    """Ends a run where its first rollout would begin."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    return {
        "model": save_small_actor(folder / "model", arithmetic.build_tokenizer()),
        "dataset": save_sums(folder),
    }


@pytest.fixture
def order(monkeypatch):
    """What engines are asked for, in order, up to the first rollout."""
    asked, warm_up = [], HybridEngine.warm_up

    def warmed(engine, num_prompts, prompt_length, **options):
        asked.append(("warm_up", num_prompts, options["max_new_tokens"], options.get("num_return_sequences")))
        return warm_up(engine, num_prompts, prompt_length, **options)

    def stop(*_, **unused):
        asked.append("rollout")
        raise FirstRolloutError

    monkeypatch.setattr(HybridEngine, "warm_up", warmed)
    monkeypatch.setattr(HybridEngine, "generate", stop)
    monkeypatch.setattr(HybridEngine, "serving", stop)
    return asked


def config_of(recipe, sources, out):
    group = {"top_k": 5} if recipe is ppo else {"group_size": 2}
    teacher = {"teacher": sources["model"]} if recipe is distill else {}
    return recipe.Config(**SIZES, **PROMPTED, **group, **teacher, **sources, out=out)


@pytest.mark.parametrize(
    ("recipe", "shape"), [(grpo, (4, 6, 2)), (online_dpo, (4, 6, 2)), (distill, (4, 6, 2)), (ppo, (4, 6, 1))]
)
def test_a_recipe_warms_up_before_its_first_rollout(recipe, shape, sources, order, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rollout, "WARMED_DEVICES", ("cuda", "cpu"))
    with pytest.raises(FirstRolloutError):
        recipe.run(config_of(recipe, sources, str(tmp_path / "run")))
    assert order == [("warm_up", *shape), "rollout"]
    assert len(LINE.findall(" ".join(capsys.readouterr().out.split()))) == 1


def test_on_a_cpu_nothing_is_warmed_up(sources, order, tmp_path, capsys):
    with pytest.raises(FirstRolloutError):
        grpo.run(config_of(grpo, sources, str(tmp_path / "run")))
    assert order == ["rollout"] and "warm-up" not in capsys.readouterr().out


def test_agents_warm_up_for_as_many_episodes_as_there_are_clients(order, tmp_path, monkeypatch):
    monkeypatch.setattr(rollout, "WARMED_DEVICES", ("cuda", "cpu"))
    model = save_small_actor(tmp_path / "model", calculator.build_tokenizer())
    with pytest.raises(FirstRolloutError):
        agent.run(agent.Config(**SIZES, group_size=2, num_clients=3, model=model, out=str(tmp_path / "run")))
    assert order == [("warm_up", 3, 6, 1), "rollout"]


def test_memory_that_ends_in_the_warm_up_ends_no_run(sources, order, tmp_path, monkeypatch, capsys):
    def fail(*_, **unused):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(rollout, "WARMED_DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(HybridEngine, "warm_up", fail)
    with pytest.raises(FirstRolloutError):
        grpo.run(config_of(grpo, sources, str(tmp_path / "run")))
    assert "warm-up: out of memory; the first rollout" in " ".join(capsys.readouterr().out.split())
