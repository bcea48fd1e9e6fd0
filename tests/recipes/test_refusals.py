"""What the recipes refuse before they train anything: options out of range, and sources that cannot serve."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
)

from hybrid_engine.cli import cli
from hybrid_engine.recipes import (
    agent,
    distill,
    dpo,
    evaluate,
    generate,
    grpo,
    kto,
    online_dpo,
    ppo,
    reward,
    serve,
    sft,
)
from hybrid_engine.rlhf.batches.sequences import epochs_of_similar_length
from hybrid_engine.rlhf.data.prompts import PromptTokens
from hybrid_engine.rlhf.experience.start import Start
from hybrid_engine.rlhf.options.algorithm import Algorithm
from hybrid_engine.rlhf.rewards.learned import LearnedReward, build_critic, load_value_model
from hybrid_engine.rlhf.rewards.loading import load_rewards
from hybrid_engine.rlhf.runs.engine_config import Schedule, largest_micro_batch
from hybrid_engine.rlhf.runs.stages import load_model
from hybrid_engine.rlhf.tasks.corpus import train_tokenizer
from hybrid_engine.rlhf.tasks.stdlib_docs import split, stdlib_examples
from tests.support.answers import answers_of

pytestmark = pytest.mark.quick

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("recipe", "option", "values", "rule"),
    [
        (ppo, "minibatch_size", (-1, -32), "must be at least 1"),
        (ppo, "kl_coef", (-0.1,), "must be at least 0"),
        (ppo, "logprob_bound", (-1.0,), "must be at least 0"),
        (ppo, "kl_bound", (-1.0,), "must be at least 0"),
        (ppo, "save_every", (-1,), "must be at least 0"),
        (ppo, "temperature", (0.0, -1.0), "must be above 0"),
        (ppo, "clip", (0.0, -1.0), "must be above 0"),
        (ppo, "value_clip", (0.0, -1.0), "must be above 0"),
        (ppo, "actor_lr", (0.0, -1.0), "must be above 0"),
        (ppo, "critic_lr", (0.0, -1.0), "must be above 0"),
        (ppo, "gamma", (-0.1, 2.0, NAN), "must be from 0 to 1"),
        (ppo, "lam", (-0.1, 2.0, NAN), "must be from 0 to 1"),
        (ppo, "zero_stage", (-1, 7), "must be from 0 to 3"),
        (ppo, "missing_eos_score", (NAN, INFINITY), "must be finite"),
        (ppo, "missing_eos_penalty", (-1.0,), "must be at least 0"),
        (ppo, "temperature", (NAN, INFINITY), "must be finite"),
        (ppo, "kl_coef", (NAN, INFINITY), "must be finite"),
        (ppo, "clip", (NAN, INFINITY), "must be finite"),
        (ppo, "actor_lr", (NAN, INFINITY), "must be finite"),
        (reward, "learning_rate", (0.0, -1.0), "must be above 0"),
        (reward, "learning_rate", (NAN, INFINITY), "must be finite"),
        (reward, "max_examples", (-1,), "must be at least 0"),
        (reward, "max_pairs", (-1,), "must be at least 0"),
        (reward, "zero_stage", (-1, 7), "must be from 0 to 3"),
        (sft, "learning_rate", (0.0, -1.0), "must be above 0"),
        (sft, "learning_rate", (NAN, INFINITY), "must be finite"),
        (sft, "max_examples", (-1,), "must be at least 0"),
        (sft, "zero_stage", (-1, 7), "must be from 0 to 3"),
    ],
)
def test_a_number_out_of_range_is_refused_with_its_option_and_rule(recipe, option, values, rule):
    for value in values:
        with pytest.raises(ValueError, match=re.escape(f"--{option.replace('_', '-')}={value} {rule}")):
            recipe.Config(**{option: value})


@pytest.mark.parametrize("recipe", [sft, reward, ppo])
def test_every_option_refuses_an_empty_text_and_a_number_of_the_wrong_sign_or_none(recipe):
    wrong = {
        "str": [""],
        "str | None": [""],
        "str | tuple[str, ...] | None": ["", ("",), ("a", "")],
        "int": [-1],
        "float": [-1.0, NAN, INFINITY, -INFINITY],
        "bool": [],
        "tuple": [("",)],
    }
    wrong |= {f"{kind} | None": wrong[kind] for kind in ("int", "float")}
    for field in fields(recipe.Config):
        values = wrong[field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))]
        for value in values:
            if field.name == "missing_eos_score" and value == -1.0:
                continue
            with pytest.raises(ValueError, match=f"^--{field.name.replace('_', '-')}="):
                recipe.Config(**{field.name: value})


GIVEN = {generate: {"model": "m", "prompts": "-", "out": "-"}, serve: {"model": "m"}}
GIVEN[evaluate] = {"model": "m", "dataset": "d.jsonl", "reward": ("exact",)}


@pytest.mark.parametrize(
    "recipe", [sft, reward, ppo, grpo, dpo, kto, online_dpo, distill, agent, evaluate, generate, serve]
)
def test_every_count_refuses_an_absurd_number_with_its_option(recipe):
    counts = [field for field in fields(recipe.Config) if field.type in (int, int | None) and field.name != "seed"]
    for field in counts:
        for value in (10**12, 10**100):
            with pytest.raises(ValueError, match=f"^--{field.name.replace('_', '-')}={value} must be"):
                recipe.Config(**GIVEN.get(recipe, {}), **{field.name: value})
    assert counts


def test_counts_that_are_too_much_together_are_refused():
    for recipe in (grpo, online_dpo, distill, agent):
        with pytest.raises(ValueError, match=r"^--rollout-size=2048 times --group-size=1024 makes 2097152 answers"):
            recipe.Config(rollout_size=2048, group_size=1024)
    with pytest.raises(ValueError, match=r"^--hidden-size=8192 with --num-layers=512 and --vocab-size=2048 makes"):
        sft.Config(hidden_size=8192, num_layers=512)
    with pytest.raises(ValueError, match=r"^--epochs=10000 over 20000 training examples makes more than 100000000"):
        epochs_of_similar_length([1] * 20_000, 16, 10_000, seed=0)
    with pytest.raises(ValueError, match=r"^--dynamic-sampling=1000000000000 must be at most"):
        Algorithm(dynamic_sampling=10**12)


def test_micro_batches_of_any_size_at_most_are_told_at_once():
    assert largest_micro_batch(24, 10**9) == 24
    assert largest_micro_batch(24, 9) == 8


def test_a_count_is_a_whole_number():
    for value in (64.0, True, "64"):
        with pytest.raises(ValueError, match=f"^--rollout-size={value!r} must be a whole number"):
            ppo.Config(rollout_size=value)


def test_a_folder_that_cannot_be_written_is_refused_by_every_recipe(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "reward").write_text("")
    (tmp_path / "strange" / "metrics.jsonl").mkdir(parents=True)
    for name in ("sft", "reward", "ppo"):
        for out, rule in (
            ("file", "must be a folder, and"),
            ("file/below", "must be a folder, and"),
            ("odd", "reward must be a folder and is a file"),
            ("strange", "metrics.jsonl must be a file and is a folder"),
            ("x" * 300, "cannot be a folder"),
            *([("/proc/run", "cannot be written")] if Path("/proc").is_dir() else []),
        ):
            assert cli.main([name, "--out", str(tmp_path / out)]) == 2
            line = capsys.readouterr().err
            assert line.startswith("hybrid-engine: --out=") and rule in line and line.count("\n") == 1


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Folders of tiny untrained models by name, each with a tokenizer beside it unless its name says otherwise."""
    folder = tmp_path_factory.mktemp("sources")
    tokenizer = train_tokenizer((example.summary for example in split(stdlib_examples())[0][:50]), 300)
    sizes = {"vocab_size": 300, "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    gpt2 = {**sizes, "bos_token_id": None, "n_embd": 16, "n_layer": 1, "n_head": 2}  # dropouts: the default, 0.1
    bert = {**sizes, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    models = {
        "actor": GPT2LMHeadModel(GPT2Config(**gpt2)),
        "actor without tokenizer": GPT2LMHeadModel(GPT2Config(**gpt2)),
        "one label": GPT2ForSequenceClassification(GPT2Config(**gpt2, num_labels=1)),
        "three labels": GPT2ForSequenceClassification(GPT2Config(**gpt2, num_labels=3)),
        "bert": BertForSequenceClassification(BertConfig(**bert, num_labels=1)),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        if "without tokenizer" not in name:
            tokenizer.save_pretrained(folder / name)
    return folder


def refusal_of_ppo(capsys, out, *options):
    """The line with which the command refuses `options`, having written nothing."""
    assert cli.main(["ppo", "--out", str(out), *options]) == 2
    assert not out.exists()
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("three labels", "must be a sequence classifier with one label, the score, but has 3"),
        ("actor", "must be a sequence classifier with one label, the score, but has 2"),
        ("bert", "loads as BertForSequenceClassification, which has no linear head named score"),
        ("actor without tokenizer", "must hold a tokenizer and encodes text to no tokens"),
    ],
)
def test_a_reward_folder_without_a_single_score_is_refused(sources, tmp_path, capsys, name, rule):
    line = refusal_of_ppo(capsys, tmp_path / "run", "--reward", str(sources / name))
    assert f"reward='{sources / name}' {rule}" in line


def test_lengths_beyond_the_models_positions_are_refused_before_any_work(sources, tmp_path, capsys):
    short = tmp_path / "short"
    GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=32, n_embd=16, n_layer=1, n_head=2)).save_pretrained(short)
    AutoTokenizer.from_pretrained(sources / "actor").save_pretrained(short)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"p{n}"}) + "\n" for n in range(100, 160)))
    data = ["--dataset", str(tmp_path / "prompts.jsonl")]
    both = ["--max-prompt-tokens", "30", "--max-new-tokens"]
    line = refusal_of_ppo(capsys, tmp_path / "run", "--model", str(short), *both, "30", *data)
    assert "--max-new-tokens=30 after prompts of up to 4 tokens makes 34, more than the 32 positions of" in line
    line = refusal_of_ppo(capsys, tmp_path / "run", "--model", str(short), *both, "40")
    assert "makes 70, more than the 32 positions of --model=" in line
    line = refusal_of_ppo(capsys, tmp_path / "run", "--max-new-tokens", "600")
    assert "more than the 512 positions of the model that stage sft makes" in line
    line = refusal_of_ppo(
        capsys, tmp_path / "run", "--model", str(short), "--lora-rank", "17", "--max-new-tokens", "2", *data
    )
    assert "--lora-rank=17 exceeds the width of --model=" in line
    with pytest.raises(ValueError, match=r"the standard library.s .* tokens, more than the 32 positions of --model="):
        reward.run(reward.Config(out=str(tmp_path / "run"), model=str(short)))


def test_a_reward_model_reads_the_end_of_what_exceeds_its_positions(tmp_path):
    tokenizer = train_tokenizer((example.summary for example in split(stdlib_examples())[0][:50]), 300)
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, n_positions=24, n_embd=16, n_layer=1, n_head=2, num_labels=1, pad_token_id=0)
    GPT2ForSequenceClassification(config).save_pretrained(tmp_path)
    reward_model = LearnedReward.load(str(tmp_path))

    def score(prompts, responses):
        return reward_model(answers_of(prompts, responses))

    end = "0123456789" * 3
    long, longer = score(["a prompt\n" * 20] * 2, [end, "x" * 40 + end])
    assert long == longer == score(["\n"], [end])[0] != score(["\n"], ["another"])[0]


def test_a_reward_model_reads_a_conversation_by_its_chat_template_and_needs_one(tmp_path):
    tokenizer = train_tokenizer((example.summary for example in split(stdlib_examples())[0][:50]), 300)
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, n_positions=64, n_embd=16, n_layer=1, n_head=2, num_labels=1, pad_token_id=0)
    model = GPT2ForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    answers = answers_of([[{"role": "user", "content": "Which?"}]], ["This one."])
    with pytest.raises(ValueError, match="has no chat template, but the prompts are conversations; add the template"):
        load_rewards([str(tmp_path)])(answers)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    tokens = tokenizer("user: Which?<eos>assistant: This one.<eos>", return_tensors="pt", add_special_tokens=False)
    expected = model(input_ids=tokens["input_ids"]).logits.item()
    assert load_rewards([str(tmp_path)])(answers).total == pytest.approx([expected], abs=1e-5)


@pytest.mark.parametrize("damage", ["lacking", "not finite"])
def test_a_model_with_a_layer_that_is_missing_or_not_finite_is_refused(damage, sources, tmp_path):
    model = GPT2LMHeadModel.from_pretrained(sources / "actor")
    weights, name = model.state_dict(), "transformer.h.0.mlp.c_fc.weight"
    if damage == "lacking":
        del weights[name]
        rule = f"lacks weights of {name}; save the model again"
    else:
        weights[name][0, 0] = NAN
        rule = f"has weights that are not finite in {name}; save the model again"
    model.save_pretrained(tmp_path / "model", state_dict=weights)
    for auto_class, options in ((AutoModelForCausalLM, {}), (AutoModelForSequenceClassification, {"num_labels": 1})):
        with pytest.raises(ValueError, match=re.escape(f"--model='{tmp_path / 'model'}' {rule}")):
            load_model(auto_class, tmp_path / "model", has_new_head=bool(options), **options)
    with pytest.raises(ValueError, match=re.escape(f"--reward='{sources / 'actor'}' lacks weights of score.weight")):
        load_model(AutoModelForSequenceClassification, sources / "actor", "reward", num_labels=1)


def test_a_reward_model_is_not_trained_on_a_body_without_a_score_head(sources, tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"model='{sources / 'bert'}' loads as Bert")):
        reward.run(reward.Config(out=str(tmp_path), model=str(sources / "bert")))


def test_a_model_folder_without_a_tokenizer_is_refused(sources, tmp_path, capsys):
    folder = sources / "actor without tokenizer"
    line = refusal_of_ppo(capsys, tmp_path / "run", "--model", str(folder))
    assert f"model='{folder}' must hold a tokenizer and encodes text to no tokens" in line


def test_a_folder_that_is_no_dataset_is_refused_by_name(tmp_path, monkeypatch, capsys):
    (tmp_path / "notes.txt").write_text("no prompt")  # datasets takes it for data, of a dataset without a name
    monkeypatch.chdir(tmp_path)
    line = refusal_of_ppo(capsys, tmp_path / "run", "--dataset", ".")
    assert "--dataset='.' must be a file (.jsonl, .json, .csv, .parquet), a folder or a hub name" in line


@pytest.mark.parametrize(("spec", "part"), [(":score", "module"), ("json:", "function")])
def test_a_reward_without_a_module_or_a_function_is_refused(tmp_path, capsys, spec, part):
    line = refusal_of_ppo(capsys, tmp_path / "run", "--reward", spec)
    assert f"reward='{spec}' has no {part}; write module:function" in line


def test_dropout_is_off_in_every_role_of_a_model_whose_config_asks_for_it(sources):
    rewards = load_rewards(["json:dumps", str(sources / "one label")])
    start = Start(
        config=ppo.Config(), source=str(sources / "actor"), train=[], held_out=[], rewards=rewards,
        answered=PromptTokens(1, 1),
    )  # fmt: skip
    schedule = Schedule(kind="constant", num_steps=1, num_warmup_steps=0)
    roles, adapted = (ppo.build_roles(ppo.Config(lora_rank=rank), start, 1e-4, 1e-4, schedule) for rank in (0, 2))
    critic_of_body = build_critic(str(sources / "actor"), ["json:dumps"])
    scorer = load_value_model(str(sources / "one label"))
    actors = (roles.policy.actor.module, adapted.policy.actor.module, roles.policy.reference)
    for model in (*actors, roles.critic.module, critic_of_body, scorer):
        rates = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
        assert rates and set(rates) == {0.0}
