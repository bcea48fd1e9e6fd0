"""TRL's online trainers with `attach`: the same losses under greedy decoding as without it, and its `rollout_func`.

Rewards are given by row, so that equal greedy answers of a group have different advantages.
"""

from functools import partial

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

import hybrid_engine
from tests.support.distributed import run_distributed
from tests.support.models import build_model

PROMPTS = ["w1 w2 w3", "w4 w5", "w6", "w7 w8 w9 w10"]
COMMON = {
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "learning_rate": 0.02,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "disable_tqdm": True,
    "seed": 3,
}
GROUPS = {"num_generations": 4, "max_completion_length": 6, "generation_kwargs": {"do_sample": False}}


@pytest.fixture(scope="module")
def tokenizer():
    """One of words."""
    words = {"<pad>": 0, "<eos>": 1, **{f"w{index}": index + 2 for index in range(38)}}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}w0"
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """Where a small model is, as a reference is loaded from there."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=40, pad_token_id=0, eos_token_id=1, initializer_range=0.4, **sizes)
    path = tmp_path_factory.mktemp("policy")
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


class Rewards:
    """Given rewards by row; keeps the answers and what the trainer asked for."""

    __name__ = "rewards"

    def __init__(self):
        self.answers = []

    def __call__(self, completions, completion_ids, **others):
        self.answers.append([list(ids) for ids in completion_ids])
        return [float((7 * row + len(self.answers)) % 5) for row in range(len(completions))]


def run(trainer_class, arguments, folder, tokenizer, is_attached, prompts=PROMPTS, **more):
    """Losses of the steps, the answers, and what `attach` returned."""
    rewards = Rewards()
    model = AutoModelForCausalLM.from_pretrained(folder)
    attached = hybrid_engine.attach(model) if is_attached else None
    if is_attached and more.pop("rollout", False):
        more["rollout_func"] = attached.rollout_func
    trainer = trainer_class(
        model=model,
        reward_funcs=rewards,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        **more,
    )
    trainer.train()
    assert trainer.model.training
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == COMMON["max_steps"]
    return losses, rewards.answers, attached, trainer


class TwoAnswersTrainer(OnlineDPOTrainer):
    """The second greedy answer of a pair is changed, as equal ones teach nothing."""

    def _generate(self, *args, **kwargs):
        *prompts, answers, mask, images = super()._generate(*args, **kwargs)
        answers[len(answers) // 2 :, 0] = (answers[len(answers) // 2 :, 0] + 7) % 38 + 2
        return *prompts, answers, mask, images


TRAINERS = {
    "GRPO": (trl.GRPOTrainer, trl.GRPOConfig, {**GROUPS, "beta": 0.1, "gradient_checkpointing": True}, {}),
    "GRPO with an adapter": (
        trl.GRPOTrainer,
        trl.GRPOConfig,
        {**GROUPS, "beta": 0.1},
        {"peft_config": {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}},
    ),
    "RLOO": (trl.RLOOTrainer, trl.RLOOConfig, GROUPS, {}),
    "online DPO": (
        TwoAnswersTrainer,
        OnlineDPOConfig,
        {"max_new_tokens": 6, "max_length": 32, "missing_eos_penalty": None},
        {},
    ),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_losses_are_those_without_it_under_greedy_decoding(name, folder, tokenizer, tmp_path):
    trainer_class, config_class, options, more = TRAINERS[name]
    runs = []
    for is_attached in (False, True):
        arguments = config_class(output_dir=str(tmp_path), **COMMON, **options)
        given = {"peft_config": LoraConfig(task_type="CAUSAL_LM", **more["peft_config"])} if more else {}
        if name == "online DPO":
            arguments.generation_kwargs = {"do_sample": False}
        torch.manual_seed(1)
        runs.append(run(trainer_class, arguments, folder, tokenizer, is_attached, **given))
    (plain, answers, *_), (losses, followed, attached, _) = runs
    assert attached.generator.model is not None, attached.report()
    assert followed == answers
    assert len({str(batch) for batch in answers}) > 1 and len(set(plain)) == len(plain)
    assert losses == pytest.approx(plain, abs=1e-6)


@pytest.mark.parametrize("family", ["gemma4", "qwen3.5", "deepseek-v3", "lfm2"])
def test_losses_of_new_families_are_those_without_it(family, tokenizer, tmp_path):
    """Layers of Gemma 4 share keys and values, and recomputing them reads those of the pass."""
    build_model(family).save_pretrained(tmp_path / "policy")
    arguments = trl.GRPOConfig(output_dir=str(tmp_path), **COMMON, **GROUPS, beta=0.1, gradient_checkpointing=True)
    runs = []
    for is_attached in (False, True):
        torch.manual_seed(1)
        runs.append(run(trl.GRPOTrainer, arguments, str(tmp_path / "policy"), tokenizer, is_attached))
    (plain, answers, *_), (losses, followed, attached, _) = runs
    assert attached.generator.model is not None, attached.report()
    assert followed == answers and len(set(plain)) == len(plain)
    assert losses == pytest.approx(plain, abs=1e-5)


def grpo_on_each(rank, world_size, folder, out):
    """Losses and answers of a process of GRPO under DDP, without `attach` and with it."""
    tokenizer, found = PreTrainedTokenizerFast.from_pretrained(folder), []
    for is_attached in (False, True):
        arguments = trl.GRPOConfig(output_dir=out, **COMMON, **GROUPS, beta=0.1)
        assert arguments.world_size == world_size
        torch.manual_seed(1)
        losses, answers, attached, _ = run(trl.GRPOTrainer, arguments, folder, tokenizer, is_attached)
        found.append((losses, answers))
    assert attached.generator.model is not None, attached.report()
    return found


def test_losses_are_those_without_it_on_two_processes(folder, tmp_path):
    results = run_distributed(partial(grpo_on_each, folder=folder, out=str(tmp_path)), 2)
    answers = []
    for (plain, expected), (losses, followed) in results:
        assert followed == expected
        assert losses == pytest.approx(plain, abs=1e-6)
        answers.append(expected)
    assert answers[0] != answers[1]  # each process answers its own prompts


@pytest.mark.parametrize("is_conversational", [False, True])
def test_rollout_func_hands_over_the_samplers_log_probabilities(is_conversational, folder, tokenizer, tmp_path):
    options = {**GROUPS, "temperature": 0.8, "generation_kwargs": None}
    prompts = [[{"role": "user", "content": text}] for text in PROMPTS] if is_conversational else PROMPTS
    arguments = trl.GRPOConfig(output_dir=str(tmp_path), **COMMON, **options)
    *_, attached, trainer = run(trl.GRPOTrainer, arguments, folder, tokenizer, True, prompts=prompts, rollout=True)
    assert trainer.rollout_func == attached.rollout_func
    inputs = trainer._generate_and_score_completions([{"prompt": prompt} for prompt in prompts for _ in range(4)])
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    width = inputs["completion_ids"].shape[1]
    with torch.no_grad():
        expected = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)[0]
    found, is_token = inputs["sampling_per_token_logps"], inputs["completion_mask"].bool()
    assert is_token.any() and len({str(row) for row in inputs["completion_ids"].tolist()}) > 4
    torch.testing.assert_close(found[is_token], expected[is_token], atol=1e-5, rtol=0)
    own = trainer._tokenize_prompts(prompts)[0]
    assert attached.rollout_func(prompts, trainer)["prompt_ids"] == own


def test_rollout_func_of_a_model_without_containers_is_an_error(folder, tokenizer, tmp_path):
    arguments = trl.GRPOConfig(output_dir=str(tmp_path), **COMMON, **{**GROUPS, "generation_kwargs": {"num_beams": 2}})
    with pytest.raises(ValueError, match="there are no log-probabilities of the sampler"):
        run(trl.GRPOTrainer, arguments, folder, tokenizer, True, rollout=True)
