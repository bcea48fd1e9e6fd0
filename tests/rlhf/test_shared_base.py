"""PPO's roles as adapters on one base compute what separate models of the same weights do, and leave the base alone."""

import copy
import json
import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import hybrid_engine
from hybrid_engine.optim.state_offload import count_bytes
from hybrid_engine.recipes import ppo
from hybrid_engine.rlhf.batches.sequences import ValueModel, build_sequences
from hybrid_engine.rlhf.data.prompts import PromptTokens
from hybrid_engine.rlhf.experience.policy import TrainedPolicy, engine_config_of, playing
from hybrid_engine.rlhf.experience.roles import CriticExperience, Roles
from hybrid_engine.rlhf.experience.start import Start
from hybrid_engine.rlhf.planning.comparison import fuses_at_once
from hybrid_engine.rlhf.planning.memory_plan import Setting, plan_memory
from hybrid_engine.rlhf.planning.reading import read_run
from hybrid_engine.rlhf.rewards.learned import LearnedReward
from hybrid_engine.rlhf.rewards.loading import load_rewards
from hybrid_engine.rlhf.rewards.scores import Answers
from hybrid_engine.rlhf.runs.engine_config import Schedule
from hybrid_engine.rlhf.runs.run_folder import read_metrics
from hybrid_engine.rlhf.tasks import arithmetic
from tests.support.distributed import run_distributed
from tests.support.interrupted_runs import stopped_after
from tests.support.small_actors import save_small_actor, save_sums

TINY = ppo.Config(
    steps=2, rollout_size=8, minibatch_size=4, micro_batch_size=2, max_new_tokens=6, eval_prompts=4, eval_every=0,
    save_every=1, lora_rank=2, shared_base=True, actor_lr=1e-2, critic_lr=3e-2,
)  # fmt: skip
RATES = (1e-2, 3e-2)
SCHEDULE = Schedule(kind="linear", num_steps=8, num_warmup_steps=2)


def randomise(model, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)


def save_reward(folder, base):
    """A reward model of peft's on `base`: its adapter by itself, and merged beside it."""
    torch.manual_seed(3)
    classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    classifier.config.score_mean, classifier.config.score_std, classifier.config.pad_token_id = 0.3, 0.5, 0
    model = get_peft_model(classifier, LoraConfig(r=3, target_modules="all-linear", task_type="SEQ_CLS"))
    randomise(model, 4)
    model.save_pretrained(folder / "adapter")
    model.merge_and_unload().save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    base = save_small_actor(folder / "base", arithmetic.build_tokenizer())
    reward = save_reward(folder / "judge", base)
    return replace(TINY, out=str(folder / "run"), model=base, dataset=save_sums(folder), reward=(reward,))


def build_shared(config):
    start = Start(
        config=config, source=config.model, train=[], held_out=[], rewards=load_rewards(config.reward),
        answered=PromptTokens(1, 1),
    )  # fmt: skip
    at_once = fuses_at_once("ppo", config, start)
    return ppo.build_roles(config, start, *RATES, SCHEDULE, fuses_at_once=at_once)


def build_separate(config, shared):
    """Models of their own with the weights that the roles have, each with an engine of its own."""
    module = shared.policy.actor.module

    def lora_of(role):
        named = dict(module.named_parameters())
        return {
            name.replace(f".{role}.", ".default."): p.detach().clone()
            for name, p in named.items()
            if "lora_" in name and f".{role}." in name
        }

    actor = get_peft_model(AutoModelForCausalLM.from_pretrained(config.model), lora("CAUSAL_LM", 2))
    body = get_peft_model(AutoModel.from_pretrained(config.model), lora("FEATURE_EXTRACTION", 3))
    actor.load_state_dict(lora_of("actor"), strict=False)
    critic = lora_of("critic")
    found = body.load_state_dict(
        {name.replace(".model.model.", ".model."): p for name, p in critic.items()}, strict=False
    )
    assert not found.unexpected_keys
    critic = ValueModel(body, copy.deepcopy(module.heads["critic"]))
    engines = [
        hybrid_engine.initialize(
            model=model, config=engine_config_of(config, rate, generates=first), lr_scheduler=SCHEDULE.build
        )[0]
        for model, rate, first in ((actor, RATES[0], True), (critic, RATES[1], False))
    ]
    policy = TrainedPolicy(actor=engines[0], tokenizer=shared.policy.tokenizer, reference=None, refers_to_base=True)
    return Roles(policy=policy, critic=engines[1], rewards=load_rewards(config.reward))


def lora(task, rank):
    return LoraConfig(r=rank, target_modules="all-linear", task_type=task)


def some_experience(roles, config):
    torch.manual_seed(1)
    prompts = [torch.randint(4, 12, (n,)).tolist() for n in (5, 3, 4, 6)]
    answers = [torch.randint(4, 12, (n,)).tolist() for n in (4, 6, 2, 5)]
    batch = build_sequences(prompts, answers, 0, roles.policy.actor.device)
    with torch.no_grad():
        logprobs = roles.policy.reference_logprobs(batch, config.temperature)
        values = ppo.response_values(roles.critic, batch)
    noise = torch.randn(logprobs.shape) * batch.response_mask
    return CriticExperience(
        sequences=batch, logprobs=logprobs, logprobs_old=logprobs, values_old=values, advantages=noise,
        returns=values + 20 * noise,
    )  # fmt: skip


def base_weights(module):
    return {
        name: p.detach().clone() for name, p in module.named_parameters() if "lora_" not in name and "heads" not in name
    }


def some_answers():
    return Answers(
        prompts=["1+1=", "12+30="], responses=["2", "4"], prompt_ids=[[1], [1]], response_ids=[[2], [3]],
        is_cut_off=[False, False],
    )  # fmt: skip


@pytest.mark.parametrize("recomputes", [False, True])
def test_losses_norms_and_weights_are_those_of_separate_models(config, recomputes):
    shared = build_shared(replace(config, activation_checkpointing=recomputes))
    before = base_weights(shared.policy.actor.module)
    randomise(shared.policy.actor.module, 7)
    separate = build_separate(config, shared)
    experience = some_experience(separate, config)
    ours = some_experience(shared, config)
    torch.testing.assert_close(ours.logprobs, experience.logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.values_old, experience.values_old, atol=1e-5, rtol=1e-5)
    for _ in range(2):
        found, expected = (ppo.update(roles, experience, config, 0) for roles in (shared, separate))
        assert expected["critic_grad_norm"] > 1, "clipped by its own norm"
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    weights = dict(shared.policy.actor.module.named_parameters())
    for name, parameter in separate.policy.actor.module.named_parameters():
        if "lora_" in name:
            torch.testing.assert_close(weights[name.replace("default", "actor")], parameter, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(weights["heads.critic.weight"], separate.critic.module.head.weight, atol=1e-5, rtol=1e-4)
    after = base_weights(shared.policy.actor.module)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_the_reward_and_the_first_critic_are_the_merged_model(config):
    roles = build_shared(config)
    expected = LearnedReward.load(config.reward[0])(some_answers())
    assert roles.rewards(some_answers()).total == pytest.approx(expected, abs=1e-5)
    batch = build_sequences([[5, 6]], [[7, 8, 9]], 0, roles.policy.actor.device)
    with torch.no_grad():
        values = ppo.response_values(LearnedReward.load(config.reward[0]).model, batch)
        torch.testing.assert_close(ppo.response_values(roles.critic, batch), values, atol=1e-5, rtol=1e-5)


def test_without_a_reward_model_the_critic_begins_at_0_and_has_an_adapter_of_its_own(config):
    roles = build_shared(replace(config, reward=("exact",)))
    batch = build_sequences([[5, 6]], [[7, 8, 9]], 0, roles.policy.actor.device)
    assert ppo.response_values(roles.critic, batch).abs().max() == 0
    trained = {name for name, p in roles.policy.actor.module.named_parameters() if p.requires_grad}
    linears = {name.partition(".lora_")[0] for name in trained if "lora_" in name}
    assert trained == {
        f"{one}.lora_{ab}.{role}.weight" for one in linears for ab in "AB" for role in ("actor", "critic")
    } | {
        "heads.critic.weight",
        "heads.critic.bias",
    }


def test_rollouts_have_the_actors_adapter_alone(config):
    roles = build_shared(config)
    module, actor = roles.policy.actor.module, roles.policy.actor
    randomise(module, 11)
    alone = get_peft_model(AutoModelForCausalLM.from_pretrained(config.model), lora("CAUSAL_LM", 2))
    named = dict(module.named_parameters())
    lora_of = {
        name: named[name.replace("default", "actor")].detach()
        for name, _ in alone.named_parameters()
        if "lora_" in name
    }
    alone.load_state_dict(lora_of, strict=False)
    prompts = torch.tensor([[5, 6, 7], [9, 8, 4]])
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}
    expected = alone.generate(input_ids=prompts, **options)
    assert torch.equal(actor.eval().generate(prompts, **options), expected)
    with playing(module, None):
        base = actor.generate(prompts, **options)
    assert torch.equal(base, AutoModelForCausalLM.from_pretrained(config.model).generate(input_ids=prompts, **options))
    assert not torch.equal(base, expected)
    assert torch.equal(actor.generate(prompts, **options), expected)


def test_a_run_that_was_interrupted_goes_on_to_the_bit_from_adapters_and_heads_alone(config, tmp_path):
    whole, torn = (replace(config, out=str(tmp_path / name)) for name in ("whole", "torn"))
    ppo.run(whole)
    with stopped_after(1):
        ppo.run(torn)
    saved = tmp_path / "torn" / "checkpoints" / "actor" / "step1"
    stored = set(dcp.FileSystemReader(saved).read_metadata().state_dict_metadata)
    names = {name.removeprefix("weights.") for name in stored if name.startswith("weights.")}
    assert {"heads.critic.weight", "heads.critic.bias"} <= names
    assert all(".actor." in name or ".critic." in name for name in names - {"heads.critic.weight", "heads.critic.bias"})
    assert not (tmp_path / "torn" / "checkpoints" / "critic").exists()
    ppo.run(replace(torn, resume=True))
    ours, theirs = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("torn", "whole"))
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("score", "kl_per_sequence", "policy_loss", "value_loss", "actor_grad_norm", "critic_grad_norm"):
            assert mine[name] == other[name], name
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "actor") for name in ("torn", "whole")]
    assert all(map(torch.equal, *(model.state_dict().values() for model in models)))
    peft = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(config.model), tmp_path / "whole/actor/adapter"
    )
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(peft(ids).logits, models[1](ids).logits, atol=1e-5, rtol=1e-5)


def run_ppo(rank, world_size, config):
    ppo.run(config)


def test_two_processes_under_zero_3_learn_what_one_does(config, tmp_path):
    alone, shared = (
        replace(config, out=str(tmp_path / name), minibatch_size=8, ppo_epochs=1, save_every=0)
        for name in ("alone", "shared")
    )
    ppo.run(alone)
    run_distributed(run_ppo, 2, replace(shared, zero_stage=3, micro_batch_size=1))
    ours, theirs = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("shared", "alone"))
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("score", "policy_loss", "value_loss", "kl_per_token", "actor_grad_norm", "critic_grad_norm"):
            assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=1e-4), name


def refusal(config, **options):
    with pytest.raises(ValueError) as raised:
        ppo.run(replace(config, **options))
    return str(raised.value)


def test_a_role_without_its_adapter_is_refused_with_the_remedy(config, tmp_path):
    AutoModelForSequenceClassification.from_pretrained(config.model, num_labels=1).save_pretrained(tmp_path / "whole")
    AutoTokenizer.from_pretrained(config.model).save_pretrained(tmp_path / "whole")
    line = refusal(config, out=str(tmp_path / "run"), reward=(str(tmp_path / "whole"),))
    assert "is not an adapter, but all roles share one base; train one with `hybrid-engine reward" in line
    other = save_small_actor(tmp_path / "other", arithmetic.build_tokenizer())
    line = refusal(config, out=str(tmp_path / "run"), model=other)
    assert (
        f"belongs to the base '{config.model}', but the actor's base is '{other}'; train the reward on that base"
    ) in line
    assert "give --lora-rank" in refusal(config, lora_rank=0)
    assert "--exact does not support --shared-base" in refusal(config, exact=True)
    assert not (tmp_path / "run").exists()


def without(name):
    return lambda weights, config: [weights.pop(key) for key in list(weights) if name in key]


def resized(name, *shape):
    return lambda weights, config: weights.update({key: torch.ones(shape) for key in weights if name in key})


DAMAGED = {
    "no adapter": (without("lora_"), "with all its weights"),
    "a part missing": (without("layers.0.self_attn.q_proj.lora_A"), "q_proj.lora_A.weight has shape none"),
    "another width": (resized("q_proj.lora_A", 3, 10), "q_proj.lora_A.weight has shape (3, 10)"),
    "a wide head": (resized("score", 1, 128), "its head reads 128"),
    "two labels": (resized("score", 2, 32), "one head named score"),
    "another rank": (lambda weights, config: config.update(r=7), "has shape"),
    "no rank": (lambda weights, config: config.update(r=0), "peft refuses its adapter_config.json"),
    "other targets": (lambda weights, config: config.update(target_modules=["nosuch"]), "peft refuses its adapter"),
    "biases": (lambda weights, config: config.update(bias="all"), "peft refuses its adapter"),
    "dora without magnitudes": (lambda weights, config: config.update(use_dora=True), "has shape none"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_adapter_of_a_role_is_refused_by_name(kind, config, tmp_path):
    folder = shutil.copytree(config.reward[0], tmp_path / "judge")
    damage, words = DAMAGED[kind]
    weights = load_file(folder / "adapter" / "adapter_model.safetensors")
    settings = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    damage(weights, settings)
    save_file(weights, folder / "adapter" / "adapter_model.safetensors")
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    line = refusal(config, out=str(tmp_path / "run"), reward=(str(folder),))
    assert f"--reward={str(folder)!r}" in line and words in line
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("std", [0, "x", None])
def test_a_score_that_cannot_be_normalised_is_refused(std, config, tmp_path):
    folder = shutil.copytree(config.reward[0], tmp_path / "judge")
    noted = json.loads((folder / "config.json").read_text()) | {"score_std": std}
    (folder / "config.json").write_text(json.dumps(noted))
    assert "score_std in its config.json" in refusal(config, out=str(tmp_path / "run"), reward=(str(folder),))


def test_a_plan_counts_one_base_and_what_the_roles_add_to_it(config):
    planned = read_run("ppo", config)
    plan = plan_memory(planned.read, Setting(recipe="ppo", config=planned.config, num_processes=1, device="cpu"))
    roles = build_shared(config)
    engine = roles.policy.actor
    ppo.update(roles, some_experience(roles, config), config, 0)
    held = count_bytes(engine.sharding, engine.optimizer)
    kept = [part for role in plan.roles for part in role.kept]
    assert [role.name for role in plan.roles] == ["actor", "critic", "reward model"]
    assert sum(part.num_bytes for part in kept if part.name == "weights") == held.parameters
    assert sum(part.num_bytes for part in kept if part.name == "optimizer state") == held.state
    fused = next(part for part in plan.generation if part.name == "fused adapters")
    assert fused.num_bytes == engine.generator.model.buffer_bytes(engine.generator.gatherer.is_streamed)


@pytest.mark.parametrize(("rows", "is_streamed"), [(1, True), (16, False)])
def test_rollouts_fuse_layer_by_layer_where_they_would_take_more_than_training(config, rows, is_streamed):
    config = replace(config, micro_batch_size=rows, minibatch_size=16, rollout_size=16, max_prompt_tokens=8)
    planned = read_run("ppo", config)
    plan = plan_memory(planned.read, Setting(recipe="ppo", config=planned.config, num_processes=1, device="cpu"))
    assert plan.fuses_at_once is not is_streamed
    if not is_streamed:
        assert plan.generation_peak_bytes <= plan.training_peak_bytes
    assert build_shared(config).policy.actor.generator.gatherer.is_streamed is is_streamed
