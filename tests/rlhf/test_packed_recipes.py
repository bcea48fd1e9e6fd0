"""Every recipe under `--tokens-per-micro-batch` and `--activation-checkpointing`: the training of padded rows."""

import contextlib
import io
import json
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.llama.modeling_llama import LlamaAttention

from hybrid_engine.recipes import dpo, grpo, kto, online_dpo, ppo, reward, sft
from hybrid_engine.rlhf.experience.start import stage_options
from hybrid_engine.rlhf.tasks import arithmetic
from tests.support.small_actors import save_small_actor, save_sums

COMMON = {"save_every": 0, "eval_every": 0}
DPO = {
    "learning_rate": 1e-3,
    "batch_size": 4,
    "max_prompt_tokens": 24,
    "max_new_tokens": 6,
    "eval_prompts": 2,
    "eval_rows": 4,
}
LOOP: dict[str, Any] = {"steps": 3, "rollout_size": 8, "max_prompt_tokens": 24, "max_new_tokens": 16, "eval_prompts": 2}
GROUPS = {**LOOP, "rollout_size": 4, "learning_rate": 1e-3, "group_size": 4, "reward": ("regex:[0-4]",)}
RECIPES: dict[str, Any] = {
    "sft": (sft, "labelled", {"epochs": 1, "batch_size": 8, "max_examples": 24}, 40),
    "reward": (reward, "pairs", {"epochs": 1, "batch_size": 4}, 60),
    "dpo": (dpo, "pairs", {**DPO, "epochs": 1, "max_pairs": 16}, 60),
    "kto": (kto, "pairs", {**DPO, "epochs": 1, "max_answers": 16}, 60),
    "ppo": (
        ppo,
        "prompts",
        {
            **LOOP,
            "actor_lr": 1e-3,
            "critic_lr": 1e-3,
            "minibatch_size": 4,
            "ppo_epochs": 1,
            "reward": ("regex:[0-4]",),
        },
        40,
    ),
    "grpo": (grpo, "prompts", {**GROUPS, "minibatch_size": 16, "eval_samples": 1}, 80),
    "online-dpo": (online_dpo, "prompts", {**GROUPS, "minibatch_size": 4}, 80),
}
"""The recipe, its data, its options and a budget that holds a few sequences."""
ON_ONE_BASE = {**RECIPES["ppo"][2], "lora_rank": 2, "shared_base": True, "actor_lr": 1e-2, "critic_lr": 1e-2}
RECIPES["ppo on one base"] = (ppo, "prompts", ON_ONE_BASE, 40)


class Run(NamedTuple):
    """What a run left, and its passes over layers."""

    weights: dict[str, torch.Tensor]
    said: str
    num_kept: int
    """Forward passes of layers that a backward pass follows."""
    num_recomputed: int
    """Those of layers within a backward pass."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A small actor and a file for each kind of data."""
    folder = tmp_path_factory.mktemp("sources")
    rows = [{"prompt": f"{n}+{n * 37}=", "good": str(n * 38), "bad": "9" * (3 + n % 5)} for n in range(80)]
    (folder / "labelled").mkdir()
    files = {"prompts": save_sums(folder)}
    for name, columns in (("labelled", {"completion": "good"}), ("pairs", {"chosen": "good", "rejected": "bad"})):
        path = folder / f"{name}.jsonl"
        lines = [{"prompt": row["prompt"], **{new: row[old] for new, old in columns.items()}} for row in rows]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        files[name] = str(path)
    return {**files, "model": save_small_actor(folder / "model", arithmetic.build_tokenizer())}


@pytest.fixture(scope="module", params=RECIPES)
def runs(request, sources, tmp_path_factory):
    """A recipe's run on padded rows, and one on packed rows whose activations are computed again."""
    recipe, data, options, budget = RECIPES[request.param]
    folder = tmp_path_factory.mktemp("runs")
    ways = {"padded": {"micro_batch_size": 2}}
    ways["packed"] = {"tokens_per_micro_batch": budget, "activation_checkpointing": True}
    kind = AutoModelForSequenceClassification if request.param == "reward" else AutoModelForCausalLM
    return [
        run(
            recipe,
            recipe.Config(
                **{**COMMON, **options, **way}, model=sources["model"], dataset=sources[data], out=str(folder / name)
            ),
            kind,
        )
        for name, way in ways.items()
    ]


def run(recipe, config, kind):
    # Not of the layers, whose own forward is what recomputes them.
    forward, within_backward = LlamaAttention.forward, []

    def counted(attention, *args, **kwargs):
        if torch.is_grad_enabled() and attention.training:  # not of the passes that look for leaks
            within_backward.append(torch._C._current_graph_task_id() != -1)
        return forward(attention, *args, **kwargs)

    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(LlamaAttention, "forward", counted)
        folder = recipe.run(config)
    weights = kind.from_pretrained(folder).state_dict()
    return Run(weights, said.getvalue(), within_backward.count(False), within_backward.count(True))


def test_packed_rows_train_the_weights_that_padded_rows_do(runs, sources):
    padded, packed = runs
    assert "padded, not packed" not in packed.said
    start = AutoModelForCausalLM.from_pretrained(sources["model"]).state_dict()
    assert any(not torch.equal(value, start[name]) for name, value in padded.weights.items() if name in start)
    for name, value in padded.weights.items():
        torch.testing.assert_close(packed.weights[name], value, rtol=1e-4, atol=2e-5)


def test_every_trained_layer_is_computed_again_under_activation_checkpointing_and_without_it_none(runs):
    kept, recomputed = runs
    assert kept.num_recomputed == 0 < kept.num_kept
    assert recomputed.num_recomputed == recomputed.num_kept > 0


@pytest.mark.parametrize("name", ["sft", "reward", "dpo", "kto"])
def test_a_budget_below_the_longest_sequence_is_refused_before_any_training(name, sources, tmp_path):
    recipe, data, options, _ = RECIPES[name]
    given = {"model": sources["model"], "dataset": sources[data], "out": str(tmp_path / "run")}
    with pytest.raises(ValueError, match="--tokens-per-micro-batch=5 must hold the largest"):
        recipe.run(recipe.Config(**{**COMMON, **options, **given, "tokens_per_micro_batch": 5}))
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_a_loops_budget_is_that_of_the_stages_before_it_which_may_read_longer_rows():
    for given, expected in ((0, 0), (400, 1024), (2048, 2048)):
        config = ppo.Config(tokens_per_micro_batch=given)
        stage = sft.Config(**stage_options(config))
        assert stage.tokens_per_micro_batch == expected
