"""The first step of a recipe that samples, on the real model: its loss and gradient are TRL's on the same answers."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hybrid_engine.recipes import agent, grpo, online_dpo, ppo, reward
from hybrid_engine.rlhf.options.algorithm import Algorithm, with_preset
from hybrid_engine.rlhf.runs.run_folder import read_metrics
from tests.real.test_losses import norm

trl = pytest.importorskip("trl")
pytest.importorskip("reasoning_gym", reason="pip install 'hybrid-engine[real]'")
QUESTIONS = "reasoning_gym:chain_sum:max_terms=2,max_digits=1,size=40,held_out=4,shots=1"
OPTIONS = {
    "dataset": QUESTIONS, "steps": 1, "save_every": 0, "rollout_size": 3, "micro_batch_size": 5, "eval_every": 0,
    "eval_prompts": 2, "max_new_tokens": 6, "max_prompt_tokens": 256, "dtype": "fp32", "warmup_steps": 0,
}  # fmt: skip
REWARD = """
def score(completions, **_):
    return [len(str(completion)) % 7 / 7 for completion in completions]
"""
TRL_ARGUMENTS = {"report_to": [], "use_cpu": True, "bf16": False, "activation_checkpointing": False}


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    """A reward that tells answers to one question apart, since this model answers few of them rightly."""
    (tmp_path / "real_model_reward.py").write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "real_model_reward", raising=False)
    return ("real_model_reward:score",)


def watch(monkeypatch, module, name):
    """The arguments and the result of each call of a recipe's function."""
    calls, real = [], getattr(module, name)

    def watched(*args, **kwargs):
        calls.append((args, real(*args, **kwargs)))
        return calls[-1][1]

    monkeypatch.setattr(module, name, watched)
    return calls


def first_step(folder):
    return read_metrics(folder / "metrics.jsonl")[0]


def agree(step, names, loss, gradient):
    """The loss to 1e-5, the norm of the gradient to 1e-5 of it."""
    assert step[names[0]] == pytest.approx(loss, abs=1e-5)
    assert step[names[1]] == pytest.approx(gradient, rel=1e-5)
    assert gradient > 1e-3


def grpo_by_trl(real_model, folder, sequences, advantages, loss_type, max_new_tokens):
    """Loss and gradient of TRL's `GRPOTrainer`, whose old log-probabilities are those of its own model."""
    from datasets import Dataset

    num_answers, width = sequences.response_mask.shape
    arguments = trl.GRPOConfig(
        output_dir=str(folder), loss_type=loss_type, per_device_train_batch_size=num_answers, beta=0.0,
        num_generations=num_answers, max_completion_length=max_new_tokens, temperature=1.0, **TRL_ARGUMENTS,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(real_model),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "never drawn"}]),
        processing_class=AutoTokenizer.from_pretrained(real_model),
    )
    trainer.current_gradient_accumulation_steps = 1
    model = trainer.model.train()
    inputs = {
        "prompt_ids": sequences.input_ids[:, :-width],
        "prompt_mask": sequences.attention_mask[:, :-width],
        "completion_ids": sequences.responses,
        "completion_mask": sequences.response_mask.long(),
        "advantages": advantages,
        "num_items_in_batch": sequences.response_mask.sum(),
    }
    loss = trainer._compute_loss(model, inputs)
    loss.backward()
    return loss.item(), norm(model)


@pytest.mark.parametrize(("preset", "loss_type"), [("trl", "dapo"), ("deepseekmath", "grpo")])
def test_grpo_has_the_loss_and_the_gradient_of_trl(preset, loss_type, real_model, tmp_path, monkeypatch, rewards):
    calls = watch(monkeypatch, grpo, "build_experience")
    algorithm = Algorithm(**with_preset({"preset": preset, "scale_eps": 1e-4}))
    out = tmp_path / "run"
    grpo.run(grpo.Config(model=real_model, out=str(out), group_size=4, reward=rewards, algorithm=algorithm, **OPTIONS))
    (_, groups, config, _), (experience, _) = calls[0]
    scores = groups.scores.view(-1, config.group_size)
    advantages = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-4)
    told = experience.sequences, advantages.flatten(), loss_type, config.max_new_tokens
    agree(first_step(out), ("policy_loss", "grad_norm"), *grpo_by_trl(real_model, tmp_path / "trl", *told))


def test_the_agents_update_has_the_loss_and_the_gradient_of_trl(real_model, tmp_path, monkeypatch):
    """Tokens of the tools' turns count as a hole in the answer, which TRL has as its mask."""
    steps = []

    def update(policy, episodes, config):
        # This model solves nothing, and what both solve or neither does is not trained on.
        marked = [replace(episode, score=float(index % 2)) for index, episode in enumerate(episodes)]
        experience = agent.build_experience(policy, marked, config)
        steps.append((experience, real_update(policy, marked, config)))
        return steps[-1][1]

    real_update = agent.update
    monkeypatch.setattr(agent, "update", update)
    options = {name: value for name, value in OPTIONS.items() if name not in ("dataset", "max_prompt_tokens")}
    algorithm = Algorithm(**with_preset({"preset": "trl", "correction": "none"}))
    agent.run(
        agent.Config(
            model=real_model, out=str(tmp_path / "run"), group_size=2, num_clients=2, algorithm=algorithm,
            **options | {"rollout_size": 2},
        )
    )  # fmt: skip
    experience, figures = steps[0]
    advantages = torch.tensor([-1.0, 1.0] * 2) * 0.5 / (0.5**0.5 + 1e-4)
    found = grpo_by_trl(real_model, tmp_path / "trl", experience.sequences, advantages, "dapo", 6)
    agree({"loss": 0.0} | figures, ("loss", "grad_norm"), 0.0, found[1])


def test_ppo_has_the_losses_of_its_formulas(real_model, tmp_path, monkeypatch, rewards):
    """TRL's `experimental/ppo/ppo_trainer.py`, whose loop has no function of the loss, written on plain models."""
    calls = watch(monkeypatch, ppo, "build_experience")
    out = tmp_path / "run"
    options = {**OPTIONS, "rollout_size": 6, "minibatch_size": 6, "ppo_epochs": 1, "temperature": 1.0}
    ppo.run(ppo.Config(model=real_model, out=str(out), reward=rewards, **options))
    experience, _ = calls[0][1]
    sequences, step = experience.sequences, first_step(out)
    mask, width = sequences.response_mask, sequences.response_mask.shape[1]
    inputs = {"input_ids": sequences.input_ids, "attention_mask": sequences.attention_mask}
    inputs["position_ids"] = (sequences.attention_mask.cumsum(1) - 1).clamp(min=0)

    actor = AutoModelForCausalLM.from_pretrained(real_model)
    logits = actor(**inputs).logits[:, -width - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(2, sequences.responses[..., None])[..., 0]
    ratio = (logprobs - logprobs.detach()).exp()
    surrogate = torch.max(-experience.advantages * ratio, -experience.advantages * ratio.clamp(0.8, 1.2))
    loss = surrogate[mask].mean()
    loss.backward()
    agree(step, ("policy_loss", "actor_grad_norm"), loss.item(), norm(actor))

    body = AutoModel.from_pretrained(real_model)
    critic = nn.ModuleDict({"body": body, "head": nn.Linear(body.config.hidden_size, 1)})
    for parameter in critic["head"].parameters():
        nn.init.zeros_(parameter)
    values = critic["head"](body(**inputs).last_hidden_state)[:, -width - 1 : -1, 0]
    loss = 0.5 * (values - experience.returns)[mask].square().mean()
    loss.backward()
    agree(step, ("value_loss", "critic_grad_norm"), loss.item(), norm(critic))


def test_online_dpo_has_the_loss_and_the_gradient_of_trls_dpo(real_model, tmp_path, monkeypatch, rewards):
    from datasets import Dataset

    calls = watch(monkeypatch, online_dpo, "choose_pairs")
    out = tmp_path / "run"
    options = {**OPTIONS, "group_size": 3, "minibatch_size": 3, "reward": rewards}
    online_dpo.run(online_dpo.Config(model=real_model, out=str(out), **options))
    pairs = [pair.tokens for pair in calls[0][1] if pair.weight]
    examples = [
        {
            "prompt_ids": pair.chosen.prompt_ids,
            "chosen_ids": pair.chosen.response_ids,
            "rejected_ids": pair.rejected.response_ids,
        }
        for pair in pairs
    ]
    trainer = trl.DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(real_model),
        ref_model=AutoModelForCausalLM.from_pretrained(real_model),
        args=trl.DPOConfig(
            output_dir=str(tmp_path / "trl"), max_length=None, beta=0.1, disable_dropout=True, **TRL_ARGUMENTS
        ),
        train_dataset=Dataset.from_list([{"prompt": "never", "chosen": "used", "rejected": "at all"}]),
        processing_class=AutoTokenizer.from_pretrained(real_model),
    )
    loss = trainer.compute_loss(trainer.model.train(), trainer.data_collator(examples))
    loss.backward()
    agree(first_step(out), ("loss", "grad_norm"), loss.item(), norm(trainer.model))


def test_a_reward_model_has_the_loss_and_the_gradient_of_trl(real_model, tmp_path, monkeypatch):
    from datasets import Dataset

    pairs = [(f"Add {n} and {n + 1}.", f"{2 * n + 1}", f"It may be {n}.") for n in range(12)]
    rows = [
        {
            "prompt": [{"role": "user", "content": question}],
            "chosen": [{"role": "assistant", "content": right}],
            "rejected": [{"role": "assistant", "content": wrong}],
        }
        for question, right, wrong in pairs
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    built, loaded = watch(monkeypatch, reward, "build_classifier"), watch(monkeypatch, reward, "load_pair_corpus")
    heads = []
    real_initialize = reward.hybrid_engine.initialize

    def initialize(*args, model, **kwargs):
        heads.append(model.score.weight.detach().clone())
        return real_initialize(*args, model=model, **kwargs)

    monkeypatch.setattr(reward.hybrid_engine, "initialize", initialize)
    out = tmp_path / "run"
    options = {"batch_size": 4, "micro_batch_size": 3, "max_pairs": 4, "epochs": 1, "held_out_share": 0.4}
    reward.run(
        reward.Config(
            model=real_model, dataset=str(file), out=str(out), dtype="fp32", warmup_steps=0, save_every=0, **options
        )
    )
    corpus = loaded[0][1]
    examples = [
        {"chosen_ids": pair.chosen, "rejected_ids": pair.rejected}
        for pair in (corpus.train[index] for index in corpus.batches[0])
    ]
    assert len(built) == 1 and len(examples) == 4
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    model = AutoModelForSequenceClassification.from_pretrained(real_model, num_labels=1)
    tokenizer.pad_token = tokenizer.bos_token  # its own padding ends answers, where the score is read
    model.config.pad_token_id = tokenizer.pad_token_id
    model.score.weight.data.copy_(heads[0])
    trainer = trl.RewardTrainer(
        model=model,
        args=trl.RewardConfig(output_dir=str(tmp_path / "trl"), max_length=None, **TRL_ARGUMENTS),
        train_dataset=Dataset.from_list([{"chosen": "never used", "rejected": "at all"}]),
        processing_class=tokenizer,
    )
    loss = trainer.compute_loss(trainer.model.train(), trainer.data_collator(examples))
    loss.backward()
    agree(first_step(out / "reward-log"), ("loss", "grad_norm"), loss.item(), norm(trainer.model))
