"""Every recipe in fp16 on a CPU: losses are scaled, and steps that overflow are left out and told."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hybrid_engine.recipes import dpo, grpo, kto, online_dpo, ppo, reward, sft
from hybrid_engine.rlhf.runs import engine_config
from hybrid_engine.rlhf.tasks.arithmetic import build_tokenizer
from tests.support.small_actors import save_small_actor, save_sums

PAIRS, STEPS = 40, 4
ROLLOUT = {
    "rollout_size": 4, "max_prompt_tokens": 8, "max_new_tokens": 4, "eval_prompts": 2, "eval_every": 0, "steps": STEPS,
}  # fmt: skip
BATCHES = {"batch_size": 8, "epochs": 1, "held_out_share": 0.2}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Options of each recipe, for a tiny model and its data; PPO has a reward model and a critic of its own."""
    folder = tmp_path_factory.mktemp("made")
    model, sums = save_small_actor(folder / "actor", build_tokenizer()), save_sums(folder)
    classifier = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    classifier.save_pretrained(folder / "judge")
    AutoTokenizer.from_pretrained(model).save_pretrained(folder / "judge")
    pairs = [
        {"prompt": f"{n}+{n}=", "chosen": f"{2 * n}", "rejected": f"{2 * n + 1}", "completion": f"{2 * n}"}
        for n in range(PAIRS)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    rate = {"learning_rate": 1e-3}
    own = {"model": model, "dataset": sums, "reward": ("regex:[0-4]$",)}
    learned = {"model": model, "dataset": str(folder / "pairs.jsonl")}
    return {
        "sft": (sft, {**learned, **BATCHES, **rate}),
        "reward": (reward, {**learned, **BATCHES, **rate}),
        "dpo": (dpo, {**learned, **BATCHES, **rate, "eval_prompts": 2}),
        "kto": (kto, {**learned, **BATCHES, **rate, "eval_prompts": 2}),
        "online_dpo": (online_dpo, {**own, **ROLLOUT, **rate}),
        "grpo": (grpo, {**own, **ROLLOUT, **rate, "group_size": 4, "minibatch_size": 16}),
        "ppo": (ppo, {**own, **ROLLOUT, "reward": (str(folder / "judge"),), "minibatch_size": 4, "actor_lr": 1e-3}),
    }


RECIPES = ("sft", "reward", "dpo", "kto", "online_dpo", "grpo", "ppo")


def lines_of(out, recipe):
    folder = out / f"{recipe}-log" if recipe in ("sft", "reward") else out
    return list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))


def scaling_of(line, recipe):
    """The loss scale and the steps left out, of every model that is trained."""
    roles = ("actor_", "critic_") if recipe == "ppo" else ("",)
    return [(line[f"{role}loss_scale"], line[f"{role}skipped_steps"], line[f"{role}grad_norm"]) for role in roles]


def saved_weights(folder):
    return {name: value for name, value in load_file(folder / "model.safetensors").items() if "score" not in name}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("power", [12, 30])
def test_losses_are_scaled_and_steps_that_overflow_are_left_out_and_told(recipe, power, made, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_config, "FIRST_LOSS_SCALE_POWER", power)
    module, options = made[recipe]
    module.run(module.Config(out=str(tmp_path), dtype="fp16", **options))
    lines = lines_of(tmp_path, recipe)
    overflows = power == 30
    for line in lines:
        for scale, num_skipped, norm in scaling_of(line, recipe):
            # The first overflow is forgiven, each one after it halves the scale (DeepSpeed's hysteresis of 2).
            assert scale == 2.0 ** (power - max(0, num_skipped - 1))
            assert math.isfinite(norm) != overflows
            assert num_skipped > line["step"] if overflows else num_skipped == 0
    saved = saved_weights(tmp_path / (recipe if recipe in ("sft", "reward") else "actor"))
    began = load_file(f"{options['model']}/model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float16}
    is_kept = [torch.equal(value, began[name].half()) for name, value in saved.items()]
    assert all(is_kept) if overflows else not all(is_kept)
