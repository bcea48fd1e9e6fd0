"""Every recipe takes some steps on the real model, and an interrupted run goes on to the bit."""

import json
from dataclasses import replace
from pathlib import Path

import openai
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import hybrid_engine
from hybrid_engine.recipes import agent, dpo, evaluate, generate, grpo, kto, online_dpo, ppo, reward, sft
from hybrid_engine.rlhf.runs.run_folder import read_metrics
from hybrid_engine.rlhf.runs.run_log import RunLog

pytest.importorskip("reasoning_gym", reason="pip install 'hybrid-engine[real]'")
QUESTIONS = "reasoning_gym:chain_sum:max_terms=2,max_digits=1,size=40,held_out=4,shots=1"
ROLLOUT = {
    "steps": 2, "save_every": 1, "rollout_size": 2, "micro_batch_size": 4, "eval_every": 0, "lora_rank": 2,
    "max_new_tokens": 6, "dtype": "fp32",
}  # fmt: skip
ASKED = {"dataset": QUESTIONS, "reward": ("reasoning_gym",), "max_prompt_tokens": 256, "eval_prompts": 2}
PAIRS = [
    {
        "prompt": [{"role": "user", "content": f"Add {n} and {n + 1}."}],
        "chosen": [{"role": "assistant", "content": f"{2 * n + 1}"}],
        "rejected": [{"role": "assistant", "content": f"It may be {n}."}],
    }
    for n in range(12)
]
SUPERVISED = {
    "held_out_share": 0.4,
    "save_every": 1,
    "batch_size": 3,
    "micro_batch_size": 3,
    "lora_rank": 2,
    "dtype": "fp32",
    "epochs": 1,
}
ANSWERED = {"eval_every": 0, "eval_prompts": 2, "max_new_tokens": 4}
OPTIONS = {
    "sft": (sft, {**SUPERVISED, "max_examples": 6}),
    "reward": (reward, {**SUPERVISED, "max_pairs": 6}),
    "dpo": (dpo, {**SUPERVISED, **ANSWERED, "max_pairs": 6}),
    "kto": (kto, {**SUPERVISED, **ANSWERED, "max_answers": 6}),
    "grpo": (grpo, {**ROLLOUT, **ASKED, "group_size": 2, "minibatch_size": 4, "eval_samples": 1}),
    "ppo": (ppo, {**ROLLOUT, **ASKED, "rollout_size": 4, "minibatch_size": 4, "ppo_epochs": 1}),
    "online-dpo": (online_dpo, {**ROLLOUT, **ASKED, "group_size": 2, "minibatch_size": 2}),
    "agent": (agent, {**ROLLOUT, "group_size": 2, "num_clients": 1, "eval_prompts": 2}),
}


def config_of(name, folder, real_model):
    """The recipe and its options on the real model; supervised recipes learn from a file of pairs."""
    recipe, options = OPTIONS[name]
    if name in ("sft", "reward", "dpo", "kto"):
        options = {**options, "dataset": str(write_pairs(folder.parent / "pairs.jsonl", name))}
    return recipe, recipe.Config(model=real_model, out=str(folder), **options)


def write_pairs(file, name):
    rows = [{"messages": row["prompt"] + row["chosen"]} for row in PAIRS] if name == "sft" else PAIRS
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def metrics_of(folder):
    (file,) = [path for path in Path(folder).rglob("metrics.jsonl") if path.stat().st_size]
    rows = read_metrics(file)
    return [{name: value for name, value in row.items() if not is_measured(name)} for row in rows]


def is_measured(name):
    return name.endswith(("seconds", "per_second", "_ms")) or "latency" in name or "memory" in name


def saved_weights(folder):
    (file,) = [path for path in Path(folder).glob("*/model.safetensors") if path.parent.name != "best"]
    return load_file(file)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_recipe_trains_and_an_interrupted_run_goes_on_to_the_bit(name, real_model, tmp_path, monkeypatch):
    recipe, whole = config_of(name, tmp_path / "whole", real_model)
    recipe.run(whole)
    rows = metrics_of(whole.out)
    assert len(rows) == 2 and all(torch.tensor(row["loss"]).isfinite() for row in rows if "loss" in row)
    if "first_ratio" in rows[0]:
        ratios = [row["first_ratio"] for row in rows if row.get("trained_share") != 0]  # else nothing was trained
        assert ratios == pytest.approx([1.0] * len(ratios), abs=1e-5)
    torn = replace(whole, out=str(tmp_path / "torn"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunLog, "write", stop_at_the_second_step)
        recipe.run(torn)
    recipe.run(replace(torn, resume=True))
    assert metrics_of(torn.out) == rows
    ours, theirs = saved_weights(torn.out), saved_weights(whole.out)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def stop_at_the_second_step(log, step, metrics, shown=(), write=RunLog.write):
    """Writes the step's line, and is interrupted before its checkpoint."""
    write(log, step, metrics, shown)
    if step == 1:
        raise KeyboardInterrupt


def test_evaluate_and_generate_give_the_answers_of_transformers(real_model, tmp_path):
    options = {"model": real_model, "dtype": "fp32", "max_new_tokens": 8}
    asked = {"dataset": QUESTIONS, "reward": ("reasoning_gym",), "held_out": True, "k": 2}
    evaluate.run(evaluate.Config(**options, **asked, out=str(tmp_path / "evaluation")))
    result = json.loads((tmp_path / "evaluation" / "result.json").read_text())
    assert result["num_prompts"] == 4 and 0 <= result["figures"]["pass_at_1"] <= result["figures"]["pass_at_2"] <= 1
    prompts = write_pairs(tmp_path / "prompts.jsonl", "generate")
    answers = tmp_path / "answers.jsonl"
    generate.run(generate.Config(**options, prompts=str(prompts), out=str(answers), temperature=0.0))
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    tokenizer, model = AutoTokenizer.from_pretrained(real_model), AutoModelForCausalLM.from_pretrained(real_model)
    for line, row in list(zip(lines, PAIRS, strict=True))[:3]:
        assert answer_of(model, tokenizer, row["prompt"]) in json.dumps(line, ensure_ascii=False)


def answer_of(model, tokenizer, turns):
    """The greedy answer of transformers, as JSON has it."""
    inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=8)[0, inputs["input_ids"].shape[1] :]
    return json.dumps(tokenizer.decode(tokens, skip_special_tokens=True), ensure_ascii=False)[1:-1]


def test_a_served_answer_is_that_of_transformers(real_model):
    tokenizer, model = AutoTokenizer.from_pretrained(real_model), AutoModelForCausalLM.from_pretrained(real_model)
    engine = hybrid_engine.init_inference(AutoModelForCausalLM.from_pretrained(real_model), dtype=torch.float32)
    with engine.serving(tokenizer, model_name="smollm2", longest=256) as server:
        client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
        turns = PAIRS[0]["prompt"]
        answer = client.chat.completions.create(model="smollm2", messages=turns, temperature=0, max_tokens=8)
    assert json.dumps(answer.choices[0].message.content, ensure_ascii=False)[1:-1] == answer_of(model, tokenizer, turns)
