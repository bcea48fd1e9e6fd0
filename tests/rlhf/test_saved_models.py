"""The folder that a recipe saves a model to: who loads it, and what its card says."""

import json
import re

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

import hybrid_engine
from hybrid_engine.cli.cli import RECIPES
from hybrid_engine.recipes import ppo, reward, sft
from hybrid_engine.rlhf.runs.run_folder import write_config
from hybrid_engine.rlhf.runs.run_log import write_json
from hybrid_engine.rlhf.runs.stages import METHODS, is_hub_name, save_stage
from hybrid_engine.rlhf.tasks.corpus import train_tokenizer

SHAPE = LlamaConfig(
    vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, num_labels=1, pad_token_id=0, eos_token_id=1, bos_token_id=None,
)  # fmt: skip
TOKENS = torch.arange(2, 12)[None]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["def f(x)"], 300)


def engine_of(model, stage=0):
    adam = {"type": "AdamW", "params": {"lr": 0.01}}
    config = {"train_batch_size": 1, "optimizer": adam, "zero_optimization": {"stage": stage}}
    return hybrid_engine.initialize(model=model, config=config)[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_with_an_adapter_loads_merged_by_transformers_and_apart_by_peft(stage, tokenizer, tmp_path):
    torch.manual_seed(0)
    base = LlamaForCausalLM(SHAPE)
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    with torch.no_grad():
        expected = model(TOKENS).logits
    save_stage(engine_of(model, stage), tokenizer, tmp_path / "actor")

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "actor")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    apart = PeftModel.from_pretrained(base, tmp_path / "actor" / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(apart(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
        with apart.disable_adapter():
            assert (apart(TOKENS).logits - expected).abs().max() > 0.01
    assert len(AutoTokenizer.from_pretrained(tmp_path / "actor")) == len(tokenizer)


def test_the_card_says_what_the_run_left_and_the_hub_reads_it(tokenizer, tmp_path):
    config = ppo.Config(out=str(tmp_path), model="Qwen/Qwen3-0.6B", dataset="trl-lib/prompts", reward=("a`b``` :c",))
    write_config(tmp_path, config)
    write_json(tmp_path / "result.json", {"before": {"score": 0.25}, "after": {"score": 0.75}})
    save_stage(engine_of(LlamaForCausalLM(SHAPE)), tokenizer, tmp_path / "actor")
    card = ModelCard.load(tmp_path / "actor" / "README.md")
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["hybrid-engine", "ppo"],
        "base_model": "Qwen/Qwen3-0.6B",
        "datasets": ["trl-lib/prompts"],
    }
    assert (
        "# A model trained by `hybrid-engine ppo`" in card.text and "AutoModelForCausalLM.from_pretrained" in card.text
    )
    assert "peft" not in card.text.split("## Evaluation")[0]
    blocks = re.findall(r"^(?P<fence>`{3,})yaml\n(.*?)\n(?P=fence)$", card.text, re.DOTALL | re.MULTILINE)
    figures, options = (yaml.safe_load(text) for _, text in blocks)
    assert figures["after"]["score"] == 0.75 and options["kl_coef"] == 0.07 and options["reward"] == ["a`b``` :c"]
    assert f"torch {torch.__version__.split('+')[0]}" in card.text


def test_the_card_says_how_the_model_was_trained_and_its_last_losses(tokenizer, tmp_path):
    data_sets, weights = ("trl-lib/prompts", str(tmp_path)), (1.0, 2.0)
    config = sft.Config(
        out=str(tmp_path), model="Qwen/Qwen3-0.6B", dataset=data_sets, dataset_weights=weights, lora_rank=4, seed=3
    )
    write_config(tmp_path / "sft-log", config)
    lines = [{"step": step, "loss": 2.5 - step, "grad_norm": 0.25, "seconds": 7.5} for step in (0, 1)]
    (tmp_path / "sft-log" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(tmp_path / "sft-log" / "result.json", {"held_out_nats_per_token": 1.25})
    save_stage(engine_of(LlamaForCausalLM(SHAPE)), tokenizer, tmp_path / "sft")
    card = ModelCard.load(tmp_path / "sft" / "README.md")
    assert card.data.base_model == "Qwen/Qwen3-0.6B" and card.data.datasets == ["trl-lib/prompts"]
    how = card.text.partition("## Training")[2].partition("\n## ")[0]
    assert (
        "Trained with supervised fine-tuning, from [Qwen/Qwen3-0.6B](https://huggingface.co/Qwen/Qwen3-0.6B), on" in how
    )
    assert "| LoRA rank | 4 |" in how and "| seed | 3 |" in how
    assert "| step 2 (last) | value |" in how and "| loss | 1.5 |" in how and "seconds" not in how
    assert "held_out_nats_per_token: 1.25" in card.text


def test_a_card_knows_the_method_of_every_recipe_that_saves_a_model():
    trains = {name.replace("-", "_") for name in RECIPES} - {"evaluate", "generate", "serve"}
    assert set(METHODS) == trains


def test_the_card_of_a_reward_model_and_of_one_whose_run_left_nothing_yet(tokenizer, tmp_path):
    write_config(tmp_path / "reward-log", reward.Config(out=str(tmp_path), model=str(tmp_path)))
    save_stage(engine_of(LlamaForSequenceClassification(SHAPE)), tokenizer, tmp_path / "reward")
    card = ModelCard.load(tmp_path / "reward" / "README.md")
    assert card.data.pipeline_tag == "text-classification" and card.data.tags == ["hybrid-engine", "reward"]
    assert card.data.base_model is None and "## Evaluation" not in card.text
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    save_stage(engine_of(LlamaForCausalLM(SHAPE)), tokenizer, tmp_path / "bare" / "model")
    assert ModelCard.load(tmp_path / "bare" / "model" / "README.md").data.tags == ["hybrid-engine"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("gpt2", True),
        ("Qwen/Qwen3-0.6B", True),
        ("runs/docs/sft", False),
        ("/tmp", False),
        ("a:b", False),
        (None, False),
    ],
)
def test_a_base_model_of_the_card_is_a_name_on_the_hub(source, expected):
    assert is_hub_name(source) == expected
