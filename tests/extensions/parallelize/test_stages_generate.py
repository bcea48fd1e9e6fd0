"""A causal model in stages trains and generates through one engine as the same model does on one process."""

import pytest
import torch
import torch.nn.functional as F

import hybrid_engine
from hybrid_engine import ComputeConfig, deduped_state_dict, load_merged_state_dicts, merge_state_dicts
from hybrid_engine.distributed.processes import get_rank, get_world_size
from hybrid_engine.zero.sharding import full_tensor
from tests.extensions.parallelize.test_generate import GREEDY, SAMPLED, build
from tests.support.distributed import leave_process_group, run_distributed
from tests.support.eager_plans import megatron
from tests.support.models import padded_prompts
from tests.tools.parity import autodist_stages

pytestmark = pytest.mark.torch_versions

MICRO_BATCHES = 2
FAMILIES = ("llama", "gpt2", "adapted", "four layers")


STAGES = {
    "llama": (("model.embed_tokens", "model.layers.0"), ("model.layers.1", "model.norm", "lm_head")),
    "gpt2": (
        ("transformer.wte", "transformer.wpe", "transformer.h.0"),
        ("transformer.h.1", "transformer.ln_f", "lm_head"),
    ),
}


def in_stages(graph, config):
    """Two stages, in each of which Megatron's layout is over the processes that are left."""
    num_parts = config.plan_ngpus // 2
    plan = megatron(graph, ComputeConfig(plan_ngpus=num_parts, runtime_ngpus=num_parts))
    plan.stages, plan.num_micro_batches = STAGES[config.pas_config["_family"]], MICRO_BATCHES
    return plan


def without_dropout(family):
    """In the mode in which one parallelises a model to train it; each stage would draw its own masks."""
    model = build(family).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def parallel(family, plan_ngpus, folder, policy="pp", **changes):
    arguments, _ = next(micro_batches(0, get_world_size() // plan_ngpus))
    options = {"_family": family, "_stages": 2, "_micros": MICRO_BATCHES}
    if policy in ("pp", "hybrid"):
        options = {"pipeline_nmicros": MICRO_BATCHES, "pipeline_scheduler": "gpipe"}
    if policy == "hybrid":
        options["pipeline_nstages"] = 2
    config = ComputeConfig(
        **{"plan_ngpus": plan_ngpus, "runtime_ngpus": get_world_size(), "use_end2end": True, "pas_config": options}
        | changes
    )
    return hybrid_engine.parallelize(without_dropout(family), arguments, policy, config, gen_savedir=folder)


def build_engine(model, stage=0, **changes):
    config = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4}},
        "hybrid_engine": {"enabled": True, "max_running": 3},
    }
    return hybrid_engine.initialize(model=model, config=config | changes)[0]


def prompts(unit=0, num_units=1):
    ids, mask = (torch.cat([tensor, tensor[:2]]) for tensor in padded_prompts())
    return tuple(tensor.chunk(num_units)[unit] for tensor in (ids, mask))


def micro_batches(unit, num_units):
    """Each unit's rows of each micro-batch of all units: arguments, and labels as targets."""
    halves = zip(*(tensor.chunk(MICRO_BATCHES) for tensor in prompts()), strict=True)
    for ids, mask in halves:
        ids, mask = (tensor.chunk(num_units)[unit] for tensor in (ids, mask))
        yield {"input_ids": ids, "attention_mask": mask, "use_cache": False}, ids.masked_fill(mask == 0, -100)


def next_token_loss(output, labels):
    logits, labels = output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, labels, reduction="sum") / len(labels)


def cycles(engine, unit=0, num_units=1):
    """Several times generated and trained; what the prompts of this unit came to, and the weights in the end."""
    ids, mask = prompts(unit, num_units)
    found = {"native": engine.generator.fallback_reason, "rollouts": [], "norms": [], "losses": [], "scores": []}
    for options in (GREEDY, SAMPLED):
        engine.eval()
        output = engine.generate(ids, attention_mask=mask, return_dict_in_generate=True, **options)
        found["rollouts"].append((output.sequences, output.logprobs))
        found["scores"].append([output.logits for output in engine.eval_batch(micro_batches(unit, num_units))])
        engine.train()
        found["losses"].append(engine.train_batch(micro_batches(unit, num_units), next_token_loss))
        found["norms"].append(engine.get_global_grad_norm())
    found["gathered"] = engine.latency_stats()["gathered_bytes"]
    engine.sharding.settle()
    found["weights"] = {name: full_tensor(p).clone() for name, p in engine.module.named_parameters()}
    return found


SETTINGS = {
    2: [("llama", 2, "pp", 0), ("gpt2", 2, in_stages, 0), ("adapted", 2, "pp", 0)],
    4: [
        ("llama", 2, "pp", 1),
        ("gpt2", 4, in_stages, 0),
        ("llama", 4, "hybrid", 0),
        ("four layers", 4, "pp", 0),
        ("llama", 4, autodist_stages, 0),
    ],
}
"""By the number of processes: the family, the processes of a unit, the policy, the stage of ZeRO."""


def all_settings(rank, world_size, folder):
    outcomes = []
    for number, (family, plan_ngpus, policy, stage) in enumerate(SETTINGS[world_size]):
        engine = build_engine(parallel(family, plan_ngpus, folder / str(number), policy), stage)
        outcomes.append(cycles(engine, rank // plan_ngpus, world_size // plan_ngpus))
        outcomes[-1]["state"] = deduped_state_dict(engine, engine.optimizer)
    return outcomes, refusals(folder) if world_size == 2 else None


@pytest.fixture(scope="module")
def expected():
    leave_process_group()
    return {family: cycles(build_engine(without_dropout(family))) for family in FAMILIES}


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    return run_distributed(all_settings, 2, tmp_path_factory.mktemp("stages"), seconds=300)


def check(found, expected, unit, num_units):
    assert found["native"] is None
    torch.testing.assert_close(found["norms"], expected["norms"], rtol=1e-5, atol=1e-6)
    for own, whole in zip(found["rollouts"], expected["rollouts"], strict=True):
        tokens, logprobs = (tensor.chunk(num_units)[unit] for tensor in whole)
        width = min(tokens.shape[1], own[0].shape[1])
        assert torch.equal(own[0][:, :width], tokens[:, :width])
        width = min(logprobs.shape[1], own[1].shape[1])
        torch.testing.assert_close(own[1][:, :width], logprobs[:, :width], rtol=1e-5, atol=1e-5)
    for own, whole in zip(found["scores"], expected["scores"], strict=True):
        for logits, of_all in zip(own, whole, strict=True):
            torch.testing.assert_close(logits, of_all.chunk(num_units)[unit], rtol=1e-5, atol=1e-4)
    for name, weight in found["weights"].items():
        torch.testing.assert_close(weight, expected["weights"][name], rtol=1e-5, atol=1e-5, msg=f"{name}: {weight}")


def check_all(outcomes, expected, world_size):
    for number, (family, plan_ngpus, policy, _) in enumerate(SETTINGS[world_size]):
        num_units, held = world_size // plan_ngpus, set()
        for rank, (of_rank, _) in enumerate(outcomes):
            # What `autodist` may have split otherwise than generation reads it, as columns of an embedding.
            assert of_rank[number]["gathered"] == 0 or policy is autodist_stages
            check(of_rank[number], expected[family], rank // plan_ngpus, num_units)
            assert of_rank[number]["weights"].keys() < expected[family]["weights"].keys()
            held |= of_rank[number]["weights"].keys()
        assert held >= expected[family]["weights"].keys()
        losses = [torch.stack(of_rank[number]["losses"]) for of_rank, _ in outcomes]
        mean = torch.stack(losses[::plan_ngpus]).mean(0)
        torch.testing.assert_close(mean, torch.stack(expected[family]["losses"]), rtol=1e-5, atol=1e-6)


def test_two_stages_generate_and_train_as_one_process_does(two_processes, expected):
    check_all(two_processes, expected, 2)


def test_stages_of_several_processes_and_several_units_do_so_too(tmp_path, expected):
    check_all(run_distributed(all_settings, 4, tmp_path, seconds=300), expected, 4)


def test_what_stages_save_goes_on_in_an_engine_without_them(two_processes):
    """As in the engine of one process that has done the same: norms of the next two steps say so."""
    leave_process_group()
    one, engine = build_engine(without_dropout("gpt2")), build_engine(without_dropout("gpt2"))
    cycles(one)
    states, optimizer_states = zip(*(outcomes[1]["state"] for outcomes, _ in two_processes), strict=True)
    state, optimizer_state = merge_state_dicts(states, optimizer_states)
    load_merged_state_dicts(engine, state, engine.optimizer, optimizer_state)
    assert cycles(engine)["norms"] == pytest.approx(cycles(one)["norms"], rel=1e-5)


def fails(output, labels):
    raise ArithmeticError("no loss")


def refusals(folder):
    """What each of these raises on this process, by a word that it must have."""
    engine = build_engine(parallel("llama", 2, folder / "refusing"))
    batches = list(micro_batches(0, 1))
    ids, mask = prompts()
    engine.eval()
    untouched = parallel("llama", 2, folder / "refused")

    def build_refused(changes=None, stage=0, model=untouched):
        return lambda: build_engine(model, stage, **changes or {})

    interleaved = {"pipeline_nmicros": MICRO_BATCHES, "pipeline_scheduler": "1f1b_interleaved"}
    two_each = parallel("llama", 2, folder / "interleaved", pas_config=interleaved)
    uneven = parallel("gpt2", 2, folder / "uneven")
    overlapping = parallel("llama", 2, folder / "overlapping", use_async_reducer=True)
    cases = {
        "forward(): the module runs in 2 stages": lambda: engine(**batches[0][0]),
        "backward(): the module runs in 2 stages": lambda: engine.backward(torch.zeros((), requires_grad=True)),
        "save_checkpoint(): the module runs in 2 stages": lambda: engine.save_checkpoint(folder / "checkpoint"),
        "save_16bit_model(): the module runs in 2 stages": lambda: engine.save_16bit_model(folder / "model"),
        "load_checkpoint(): the module runs in 2 stages": lambda: engine.load_checkpoint(folder / "checkpoint"),
        "batches: 1 micro-batches are left": lambda: engine.train_batch(batches[: 1 + get_rank()], next_token_loss),
        "the loss must be one number": lambda: engine.train_batch(batches),
        "no loss": lambda: engine.train_batch(batches, fails),
        "set plan_ngpus=1": lambda: engine.generate(ids, attention_mask=mask, encoder_no_repeat_ngram_size=9, **GREEDY),
        "zero_optimization.stage=2": build_refused(stage=2),
        "gradient_accumulation_steps=4 must be": build_refused({"gradient_accumulation_steps": 4}),
        "managed_gradient_accumulation=False": build_refused({"managed_gradient_accumulation": False}),
        "module_dtype=torch.bfloat16": build_refused({"bf16": {"enabled": True}}),
        "inference_tp_size=2": build_refused({"hybrid_engine": {"enabled": True, "inference_tp_size": 2}}),
        "hybrid_engine.exact": build_refused({"hybrid_engine": {"enabled": True, "exact": True}}),
        "schedule='1f1b_interleaved'": build_refused(model=two_each),
        "the 2 layers belong to the stages [1, 1]": build_refused(model=uneven),
        "use_async_reducer=True is for build_optimizer": build_refused(model=overlapping),
    }
    found = {}
    for words, action in cases.items():
        with pytest.raises((ValueError, ArithmeticError)) as error:
            action()
        found[words] = str(error.value)
    engine.train()
    return (
        found,
        engine.train_batch(batches, next_token_loss),
        build_engine(untouched).train_batch(batches, next_token_loss),
    )


def test_what_stages_cannot_do_is_refused_by_name_on_every_process_which_go_on(two_processes, expected):
    for _, (found, *losses) in two_processes:
        for words, text in found.items():
            assert words in text
        torch.testing.assert_close(losses, [expected["llama"]["losses"][0]] * 2, rtol=1e-5, atol=1e-6)
