"""A causal model under a plan trains and generates through one engine as the same model does on one process."""

import math
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import hybrid_engine
from hybrid_engine import ComputeConfig, Plan
from hybrid_engine.extensions.parallelize.planning.autodist import autodist, plan_costs
from hybrid_engine.extensions.parallelize.planning.setting import Generation, PlanSetting
from hybrid_engine.zero.sharding import full_tensor
from tests.support.distributed import leave_process_group, run_distributed
from tests.support.eager_plans import megatron
from tests.support.models import PAD, build_model, padded_prompts, randomised
from tests.tools.parity import MACHINE

pytestmark = [pytest.mark.long, pytest.mark.torch_versions]

GREEDY = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": PAD, "eos_token_id": [7, 11, 23]}
SAMPLED = {**GREEDY, "do_sample": True, "top_k": 0, "num_return_sequences": 2, "seed": 5}
CYCLES = 2


def build(family):
    """A small model; Llama's vocabulary divides, the others' do not, so that their heads are whole."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": PAD, "vocab_size": 100, "intermediate_size": 48}
    if family in ("llama", "four layers", "adapted"):
        sizes["num_hidden_layers"] = 4 if family == "four layers" else 2
        model = randomised(lambda: LlamaForCausalLM(LlamaConfig(**sizes, **ends)))
        return adapted(model) if family == "adapted" else model
    return build_model(family)


def adapted(model):
    """With adapters on linears that Megatron splits by columns and by rows."""
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter.data, std=0.1)
    return model


def with_adapters(graph, config):
    """Megatron's layout: the second factor of an adapter as the columns of its linear, the first as the rows."""
    plan = Plan(graph=graph, mesh=(config.plan_ngpus,))
    for path in ("q_proj.base_layer", "q_proj.lora_B.*", "k_proj", "v_proj.base_layer", "v_proj.lora_B.*"):
        plan.place(f"*.{path}", out="n", op="linear")
    for path in ("gate_proj", "up_proj"):
        plan.place(f"*.{path}", out="n", op="linear")
    for path in ("o_proj", "down_proj.base_layer", "down_proj.lora_A.*"):
        plan.place(f"*.{path}", out="k", op="linear")
    plan.follow("*.layers.*")
    return plan


def parallel(family, plan_ngpus, world_size, folder, policy=None, **changes):
    model = build(family)
    ids, mask = padded_prompts(num_prompts=2)
    arguments = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    lowering = "graph" if policy in OF_GRAPHS else "eager"
    config = ComputeConfig(**{"plan_ngpus": plan_ngpus, "runtime_ngpus": world_size, "lowering": lowering} | changes)
    policy = policy or (megatron if plan_ngpus > 1 else "dp")
    return hybrid_engine.parallelize(model, arguments, policy, config, gen_savedir=folder, broadcast_strategy="all")


def build_engine(model, stage, batch_size=6, **options):
    config = {
        "train_batch_size": batch_size,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4}},
        "hybrid_engine": {"enabled": True, "max_running": 3, **options},
    }
    return hybrid_engine.initialize(model=model, config=config)[0]


def cycles(engine, unit=0, num_units=1, num_cycles=CYCLES):
    """Several times generated and trained; what the prompts of this unit came to, and the weights in the end."""
    ids, mask = (tensor.chunk(num_units)[unit] for tensor in padded_prompts())
    found = {"native": engine.generator.fallback_reason, "rollouts": [], "norms": []}
    parts = engine.generator.group.parts
    copied = [] if parts is None else counted_copies(parts)
    for cycle in range(num_cycles):
        engine.eval()
        options = (GREEDY, SAMPLED)[cycle % 2]
        output = engine.generate(ids, attention_mask=mask, return_dict_in_generate=True, **options)
        found["rollouts"].append((output.sequences, output.logprobs))
        # A bound no 6 tokens reach: the option sends the same request to the model's own generate().
        if engine.generator.group.has_whole_module and cycle == 1:
            found["own"] = engine.generate(ids, attention_mask=mask, encoder_no_repeat_ngram_size=500, **GREEDY)
        engine.train()
        labels = ids.masked_fill(mask == 0, -100)
        logits = engine(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / 20 * num_units
        engine.backward(loss)
        engine.step()
        found["norms"].append(engine.get_global_grad_norm())
    found["gathered"] = engine.latency_stats()["gathered_bytes"]
    found["copied"] = None if parts is None else (max(copied), planned_copies(engine.module))
    engine.sharding.settle()
    found["weights"] = {name: full_tensor(p).clone() for name, p in engine.module.named_parameters()}
    return found


def counted_copies(parts):
    """A list to which the bytes of copies are added whenever they are given back."""
    found, release = [], parts.release

    def counting():
        found.append(parts.num_bytes)
        release()

    parts.release = counting
    return found


def planned_copies(module):
    """The bytes that the planner counts for what a process of a unit copies while it generates."""
    generation = Generation(num_tokens=1, tensor_parallel=math.prod(module.plan.mesh))
    setting = PlanSetting(machine=MACHINE, plan_ngpus=module.compute_config.plan_ngpus, generation=generation)
    return max(stage.cost.copied_bytes for stage in plan_costs(module.plan, setting).stages)


def otherwise(graph, config):
    """Besides Megatron's parts columns of the embedding, of which generation reads rows."""
    plan = megatron(graph, config)
    plan.place("model.embed_tokens", out="e")
    return plan


def planned(graph, config):
    """What `autodist` finds for devices so slow that all is split that can be."""
    with tempfile.TemporaryDirectory() as folder:
        MACHINE.save(costs := Path(folder) / "costs.json")
        return autodist(graph, replace(config, pas_config={"costs": str(costs)}))


def over_second_axis(graph, config):
    """Megatron's layout over the second of two axes; the MLPs and the head over both."""
    plan = megatron(graph, replace(config, plan_ngpus=2, runtime_ngpus=2))
    plan.mesh = (2, 2)
    plan.splits = {key: (None, *names) for key, names in plan.splits.items()}
    for path, name in (("gate_proj", "n"), ("up_proj", "n"), ("down_proj", "k")):
        plan.place(f"*.{path}", out=name, axis=0)
    plan.place("lm_head", out="n", axis=0)
    plan.follow("*.mlp*")
    return plan


def planned_over_two_axes(graph, config):
    """What autodist plans where every op may be split: the first axis splits the samples."""
    plan = planned(graph, config)
    assert plan.mesh == (2, 2)
    return plan


def over_one_of_two_axes(graph, config):
    """Megatron's layout over the second of two axes, the first of which is one process."""
    plan = megatron(graph, config)
    plan.mesh = (1, config.plan_ngpus)
    plan.splits = {key: (None, *names) for key, names in plan.splits.items()}
    return plan


OF_GRAPHS = (planned_over_two_axes, over_one_of_two_axes)
"""Policies whose plans run as graphs, as hooks do not carry the first one's."""


SETTINGS = {
    2: [
        ("llama", 2, 0, None),
        ("gpt2", 2, 0, None),
        ("opt", 2, 0, None),
        ("llama", 1, 3, None),
        ("llama", 2, 0, planned),
        ("adapted", 2, 0, with_adapters),
        ("adapted", 1, 3, None),
    ],
    4: [
        ("llama", 2, 0, None),
        ("llama", 2, 3, otherwise),
        ("llama", 2, 3, over_one_of_two_axes),
        ("llama", 4, 0, planned),
        ("llama", 4, 0, over_second_axis),
        ("llama", 4, 0, planned_over_two_axes),
    ],
}
"""By the number of processes: the family, the processes of a unit, the stage of ZeRO, the policy."""


def all_settings(rank, world_size, folder):
    found = []
    if world_size == 4:
        saved(rank, world_size, folder / "saved", stage=1, policy=over_one_of_two_axes)
    for number, (family, plan_ngpus, stage, policy) in enumerate(SETTINGS[world_size]):
        model = parallel(family, plan_ngpus, world_size, folder / str(number), policy)
        found.append(cycles(build_engine(model, stage), rank // plan_ngpus, world_size // plan_ngpus))
    return found


@pytest.mark.parametrize("world_size", SETTINGS)
def test_processes_generate_and_train_under_a_plan_as_one_does(tmp_path, world_size):
    expected = {}
    outcomes = run_distributed(all_settings, world_size, tmp_path, seconds=300)
    for rank, outcome in enumerate(outcomes):
        for (family, plan_ngpus, stage, policy), found in zip(SETTINGS[world_size], outcome, strict=True):
            if family not in expected:
                leave_process_group()
                expected[family] = cycles(build_engine(build(family), 0))
            num_units = world_size // plan_ngpus
            check(found, expected[family], rank // plan_ngpus, num_units, f"{family} {plan_ngpus} {stage} {policy}")
            if num_units == 1:  # among four some train other parts than they generate with
                assert (found["gathered"] > 0) == (plan_ngpus == 4)
    for found in zip(*outcomes, strict=True):
        copied = [one["copied"] for one in found if one["copied"] is not None]
        assert max((num_bytes for num_bytes, _ in copied), default=0) == max(
            (planned for _, planned in copied), default=0
        )


def check(found, expected, unit, num_units, name):
    assert found["native"] is None, name
    if "own" in found:
        width = min(found["own"].shape[1], expected["own"].shape[1])
        assert torch.equal(found["own"][:, :width], expected["own"].chunk(num_units)[unit][:, :width]), name
    torch.testing.assert_close(found["norms"], expected["norms"], rtol=1e-5, atol=1e-6)
    for own, whole in zip(found["rollouts"], expected["rollouts"], strict=True):
        tokens, logprobs = (tensor.chunk(num_units)[unit] for tensor in whole)
        width = min(tokens.shape[1], own[0].shape[1])
        assert torch.equal(own[0][:, :width], tokens[:, :width]), name
        width = min(logprobs.shape[1], own[1].shape[1])
        torch.testing.assert_close(own[1][:, :width], logprobs[:, :width], rtol=1e-5, atol=1e-5)
    for key, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][key], weight, rtol=1e-5, atol=1e-5, msg=lambda m: f"{name}: {m}")


def saved(rank, world_size, folder, stage=0, policy=None):
    """What an engine under a plan has written, as an engine without one and transformers read it; and the way back."""
    unit, num_units = rank // 2, world_size // 2
    engine = build_engine(parallel("llama", 2, world_size, folder / "plan", policy), stage)
    found = cycles(engine, unit, num_units, num_cycles=1)["weights"]
    engine.save_checkpoint(folder / "checkpoint")
    engine.save_16bit_model(folder / "model")
    plain = build_engine(build("llama"), 3, batch_size=world_size)
    plain.load_checkpoint(folder / "checkpoint")
    plain.save_checkpoint(folder / "plain")
    other = build_engine(parallel("llama", 2, world_size, folder / "other", policy), 3 if stage else 0)
    other.load_checkpoint(folder / "plain")
    other.sharding.settle()
    read = LlamaForCausalLM.from_pretrained(folder / "model")
    assert [entry.name for entry in other.optimizer.parameters] == list(found)
    for name, weight in found.items():
        for model in (plain.module, other.module, read):
            assert torch.equal(full_tensor(model.get_parameter(name)), weight), name
    norms = [cycles(one, unit, num_units)["norms"] for one in (engine, other)]
    torch.testing.assert_close(*norms, rtol=1e-5, atol=0.0)


def refusals(rank, world_size, folder):
    saved(rank, world_size, folder)
    found = []

    def refused(action):
        with pytest.raises(ValueError) as error:
            action()
        found.append(str(error.value))

    refused(lambda: build_engine(parallel("llama", 2, 2, folder / "2"), 0, inference_tp_size=2))
    refused(lambda: build_engine(parallel("llama", 2, 2, folder / "3"), 0, exact=True))
    refused(lambda: build_engine(parallel("llama", 1, 2, folder / "4", lowering="graph"), 0))
    refused(lambda: build_engine(parallel("llama", 1, 2, folder / "5", use_zero=True), 0))
    return found


def test_checkpoints_go_to_engines_without_a_plan_and_what_cannot_be_trained_or_generated_from_is_refused(tmp_path):
    for found in run_distributed(refusals, 2, tmp_path, seconds=300):
        words = [
            "inference_tp_size=2",
            "exact",
            "lowering='eager'",
            "stage 1, 2 or 3",
        ]
        assert len(found) == len(words)
        for text, word in zip(found, words, strict=True):
            assert word in text
