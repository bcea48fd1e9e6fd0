"""Passes that take recorded experts: packed, in micro-batches, recomputed, sharded; and what they are for, in bf16."""

from dataclasses import replace

import peft
import pytest
import torch
import transformers as hf

import hybrid_engine
from hybrid_engine.containers.routing import find_routers
from hybrid_engine.recipes import grpo, ppo
from hybrid_engine.rlhf.batches.head_log_probs import replay_routing
from hybrid_engine.rlhf.batches.packable import pack_where_exact
from hybrid_engine.rlhf.batches.packing import Layout, set_layout
from hybrid_engine.rlhf.batches.sequences import (
    attach_responses,
    build_sequences,
    recompute_activations,
    response_logprobs,
)
from hybrid_engine.rlhf.options.reinforcement import AgentConfig
from hybrid_engine.rlhf.options.shared import TrainingOptions
from hybrid_engine.rlhf.runs.run_folder import read_metrics
from hybrid_engine.rlhf.tasks import arithmetic
from hybrid_engine.zero.sharding import full_tensor
from tests.support.distributed import run_distributed
from tests.support.model_families import BUILDERS, MORE_BUILDERS
from tests.support.models import build_model, padded_prompts, randomised
from tests.support.small_actors import save_small_actor, save_sums

BUDGET = TrainingOptions(tokens_per_micro_batch=64)
CPU = torch.device("cpu")


def recorded_batch(num_layers=2, num_experts=4):
    """Groups of four answers to each of three prompts, with experts at random; as a rollout, not of last tokens."""
    chance = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 90, (length,), generator=chance).tolist() for length in (5, 2, 7)]
    prompts = [prompt for prompt in prompts for _ in range(4)]
    lengths = torch.randint(1, 12, (len(prompts),), generator=chance).tolist()
    responses = [torch.randint(3, 90, (length,), generator=chance).tolist() for length in lengths]
    experts = [
        torch.rand(len(prompt) + length, num_layers, num_experts, generator=chance).argsort(2)[..., :2].byte()
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    for row, prompt in enumerate(prompts):  # a prompt is computed once for its group
        experts[row][: len(prompt)] = experts[row // 4 * 4][: len(prompt)]
    return replace(build_sequences(prompts, responses, 0, CPU), routing=tuple(part[:-1] for part in experts))


def values_and_gradient(model, batch, parts=1):
    """Log-probabilities, and the gradient of a loss on them, in `parts` passes."""
    model.zero_grad()
    weights = torch.randn(batch.response_mask.shape, generator=torch.Generator().manual_seed(1))
    values = torch.zeros_like(weights)
    for rows in torch.arange(len(weights)).split(len(weights) // parts):
        part = batch.rows(rows)
        found = response_logprobs(model, part, 0.7)
        (found * weights[rows, : found.shape[1]]).sum().backward()
        values[rows, : found.shape[1]] = found.detach()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return values, gradient / gradient.abs().max()


@pytest.mark.parametrize(("family", "layout"), [("mixtral", Layout.ROWS), ("qwen3-moe", Layout.SPANS)])
def test_packed_recomputed_and_divided_passes_take_the_experts_that_padded_ones_take(family, layout):
    model, batch = build_model(family), recorded_batch()
    own = values_and_gradient(model, batch)
    replay_routing(model)
    padded = values_and_gradient(model, batch)
    assert not torch.allclose(own[0], padded[0], atol=1e-2)
    torch.testing.assert_close(values_and_gradient(model, replace(batch, routing=None)), own)
    assert pack_where_exact(model, BUDGET) is layout
    found = [values_and_gradient(model, batch), values_and_gradient(model, batch, parts=3)]
    recompute_activations(model.train(), TrainingOptions(activation_checkpointing=True))
    found.append(values_and_gradient(model, batch))
    set_layout(model, Layout.PADDED)
    found.append(values_and_gradient(model, batch, parts=2))
    for one in found:
        torch.testing.assert_close(one, padded, atol=1e-5, rtol=1e-4)


def step_on_two_processes(rank, world_size, stages):
    """Log-probabilities before and after a step, and the weights after it, for each of `stages` and adapters."""
    results = []
    for stage, has_lora in stages:
        model = build_model("mixtral")
        if has_lora:
            torch.manual_seed(0)
            targets = {"target_modules": ["q_proj", "v_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
            model = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **targets))
        config = {
            "train_micro_batch_size_per_gpu": 12 // world_size,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "hybrid_engine": {"enabled": True, "max_out_tokens": 64},
        }
        engine = hybrid_engine.initialize(model=model, config=config)[0].train()
        replay_routing(engine)
        batch = recorded_batch()
        batch = batch.rows(torch.arange(12).chunk(world_size)[rank])
        before = response_logprobs(engine, batch)
        engine.backward(-before.sum(1).mean())
        engine.step()
        after = response_logprobs(engine, batch)
        weights = [full_tensor(p).detach() for p in engine.module.parameters() if p.requires_grad]
        results.append((before.detach(), after.detach(), torch.cat([weight.flatten() for weight in weights])))
    return results


def test_sharded_engines_train_with_the_recorded_experts_as_one_process_does():
    stages = [(0, False), (1, False), (2, False), (3, False), (3, True)]
    shared = run_distributed(step_on_two_processes, 2, stages)
    alone = step_on_two_processes(0, 1, [(0, False), (0, True)])
    for place, (_, has_lora) in enumerate(stages):
        *values, weights = alone[has_lora]
        for of_rank, rows in zip(shared, torch.arange(12).chunk(2), strict=True):
            *found, its_weights = of_rank[place]
            for one, other in zip(found, values, strict=True):
                torch.testing.assert_close(one, other[rows][:, : one.shape[1]], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(its_weights, weights, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(alone[0][0], alone[0][1], atol=1e-3)


MIXTURES = (
    "mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss", "deepseek-v3", "deepseek-v3-halves", "deepseek-v2",
    "deepseek-v2-lite", "glm4-moe-lite", "mistral4", "glm4-moe", "glm4-moe-head-norms", "minimax-m2", "olmoe",
    "qwen3-next", "qwen3.5-moe", "granite4-moe", "lfm2-moe", "gemma4-experts", "nemotron-h-moe", "jamba",
    "llama4", "kimi-linear",
)  # fmt: skip


def test_every_mixture_on_containers_is_replayed_below():
    models = {family: build() for family, build in (BUILDERS | MORE_BUILDERS).items()}
    found = {name for name, model in models.items() if any("expert" in part for part, _ in model.named_modules())}
    assert found <= {*MIXTURES, "phimoe"}


def test_a_router_that_chooses_its_experts_one_after_another_is_refused():
    engine, *_ = hybrid_engine.initialize(model=randomised(MORE_BUILDERS["phimoe"]), config={"train_batch_size": 1})
    input_ids, _ = padded_prompts(num_prompts=2)
    with pytest.raises(ValueError, match=r"PhimoeTopKRouter.* cannot replay its choice"):
        replay_routing(engine)
        engine(input_ids=input_ids)


@pytest.mark.parametrize("family", [family for family in MIXTURES if family in BUILDERS | MORE_BUILDERS])
def test_routers_of_every_kind_are_recorded_and_replayed(family):
    """In fp32 rollout and trainer choose alike; other experts on record give other log-probabilities."""
    model, (input_ids, mask) = randomised((BUILDERS | MORE_BUILDERS)[family]), padded_prompts(num_prompts=4)
    engine = hybrid_engine.initialize(model=model, config={"train_batch_size": 1, "hybrid_engine": {"enabled": True}})
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 6, "seed": 1, "eos_token_id": None, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "record_routing": True}
    output = engine[0].eval().generate(input_ids, attention_mask=mask, **options)
    replay_routing(engine[0])
    batch = attach_responses(mask, output.sequences, output.lengths, routing=output.routing)
    num_experts = find_routers(model)[0].num_experts
    others = tuple((row.int() + 1).remainder(num_experts).byte() for row in output.routing)
    with torch.no_grad():
        own, replayed, changed = (
            response_logprobs(engine[0], replace(batch, routing=routing)) for routing in (None, output.routing, others)
        )
    assert torch.equal(own, replayed)
    torch.testing.assert_close(output.logprobs, replayed, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(own, changed, atol=0.01)  # a thousand times the tolerance above


SIZES = {
    "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 199,
    "intermediate_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "dense": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=2, sliding_window=None)
    ),
    "qwen3-moe": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(
            **SIZES, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=64, head_dim=32, norm_topk_prob=True
        )
    ),
}


def difference_in_bf16(name):
    """Mean distance of rollout and trainer in nats per token: with recorded experts, and with the trainer's own."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for parameter in model.parameters():
        parameter.data *= 3 if parameter.dim() > 1 else 1
    config = {"train_batch_size": 1, "bf16": {"enabled": True}, "hybrid_engine": {"enabled": True}}
    engine = hybrid_engine.initialize(model=model, config=config)[0].eval()
    input_ids = torch.randint(3, 190, (16, 12), generator=torch.Generator().manual_seed(1))
    mask, is_moe = torch.ones_like(input_ids), name != "dense"
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 48, "seed": 1, "pad_token_id": 0, "eos_token_id": None}
    output = engine.generate(input_ids, **options, return_dict_in_generate=True, record_routing=is_moe)
    if is_moe:
        replay_routing(engine)
    batch = attach_responses(mask, output.sequences, output.lengths, routing=output.routing)
    with torch.no_grad():
        found = [response_logprobs(engine, part) for part in (batch, replace(batch, routing=None))]
    return [(logprobs - output.logprobs).abs().mean().item() for logprobs in found]


def test_in_16_bits_replay_brings_rollout_and_trainer_as_close_as_those_of_a_dense_model():
    dense, _ = difference_in_bf16("dense")
    for name in ("mixtral", "qwen3-moe"):
        replayed, own = difference_in_bf16(name)
        assert replayed < 1.2 * dense and own > 1.7 * replayed


@pytest.fixture(scope="module")
def actors(tmp_path_factory):
    """Folders of a mixture of experts and of a dense model, and a file of sums."""
    folder, tokenizer = tmp_path_factory.mktemp("actors"), arithmetic.build_tokenizer()
    dense = save_small_actor(folder / "dense", tokenizer)
    config = hf.AutoConfig.from_pretrained(dense)
    torch.manual_seed(0)
    mixture = hf.MixtralForCausalLM(
        hf.MixtralConfig(
            **{**SIZES, "vocab_size": len(tokenizer), "hidden_size": 64, "num_hidden_layers": 2},
            num_local_experts=8, num_experts_per_tok=2, sliding_window=None,
        )
    )  # fmt: skip
    mixture.config.eos_token_id = mixture.generation_config.eos_token_id = config.eos_token_id
    mixture.config.pad_token_id = mixture.generation_config.pad_token_id = config.pad_token_id
    mixture.save_pretrained(folder / "mixture")
    tokenizer.save_pretrained(folder / "mixture")
    return str(folder / "mixture"), dense, save_sums(folder)


RUN = {
    "steps": 2, "rollout_size": 4, "micro_batch_size": 4, "max_new_tokens": 6, "eval_every": 0, "eval_prompts": 4,
    "save_every": 0, "dtype": "bf16", "router_replay": True, "reward": ("regex:[0-4]$",),
}  # fmt: skip


def test_recipes_report_the_difference_with_and_without_replay(actors, tmp_path):
    mixture, _, dataset = actors
    given = {**RUN, "model": mixture, "dataset": dataset}
    options = {"group_size": 4, "epochs": 2, "replay_best": True, "activation_checkpointing": True, "logprob_bound": 0}
    grpo.run(grpo.Config(out=str(tmp_path / "grpo"), **given, **options))
    ppo.run(ppo.Config(out=str(tmp_path / "ppo"), **given, minibatch_size=4, tokens_per_micro_batch=256))
    for name in ("grpo", "ppo"):
        lines = read_metrics(tmp_path / name / "metrics.jsonl")
        assert all(
            line["logprob_difference_with_replay"] <= line["logprob_difference_without_replay"] < 0.1 for line in lines
        )
        # The trained tokens and those of the figure are the same.
        assert lines[0]["logprob_difference_mean"] == pytest.approx(lines[0]["logprob_difference_with_replay"], rel=0.5)
        assert lines[0]["first_ratio"] == pytest.approx(1, abs=1e-2)


def test_what_cannot_be_replayed_is_refused_before_training(actors, tmp_path):
    _, dense, dataset = actors
    with pytest.raises(ValueError, match="--router-replay: LlamaForCausalLM has no mixture of experts; leave it out"):
        grpo.run(grpo.Config(out=str(tmp_path / "run"), **RUN, model=dense, dataset=dataset))
    with pytest.raises(ValueError, match="leave it or --router-replay out"):
        grpo.Config(exact=True, router_replay=True)
    with pytest.raises(ValueError, match="--router-replay: the conversations of agent"):
        AgentConfig(router_replay=True)
    batch, model = recorded_batch(num_layers=3), build_model("mixtral")
    replay_routing(model)
    with pytest.raises(ValueError, match="recorded for 3 mixtures, but the model has 2"):
        response_logprobs(model, batch)
