"""Decode steps recorded and replayed give what steps run one by one give, and are recorded once.

On a GPU as CUDA graphs, elsewhere on a tape (see tape.py), which freezes what a graph freezes.
"""

import gc
import weakref
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model

import hybrid_engine
from hybrid_engine.containers import InferenceModel
from hybrid_engine.extensions.deepspeed import comm as compat_comm
from hybrid_engine.generation import step
from hybrid_engine.generation.model.probe import LogprobDifference, compare_logprobs
from hybrid_engine.generation.recorders import batch_bucket, context_bucket
from hybrid_engine.ops import dispatch
from hybrid_engine.zero import wrapping
from tests.support.distributed import run_distributed
from tests.support.fake_cuda import kernels_on_cpu, replaced, zeroed_memory
from tests.support.model_families import BUILDERS, MORE_BUILDERS
from tests.support.models import PAD, build_model, padded_prompts
from tests.support.tape import TapeRecorder

pytestmark = [pytest.mark.gpu, pytest.mark.long, pytest.mark.quick]
CUDA = torch.cuda.is_available()


def build(family="llama", is_recorded=True, lag=1, model=None, stage=0, is_offloaded=False, **config):
    """An engine whose decode steps are recorded, reading tokens `lag` turns late.

    Offloaded parameters of stage 3 are so for FSDP2 on a CPU too, where an engine would not ask for it.
    """
    config = {"enabled": True, "max_out_tokens": 64, "kv_block_size": 4} | config
    ds_config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "hybrid_engine": config}
    ds_config["zero_optimization"] = {"stage": stage}
    if is_offloaded:
        ds_config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": CUDA}
    with patch.object(wrapping, "offloads_parameters", lambda config: config.zero_optimization.offloads_parameters):
        engine, *_ = hybrid_engine.initialize(model=model or build_model(family), config=ds_config)
    native = engine.generator.native
    native.lag = lag
    if not is_recorded:
        native.steps.recorder = None
    elif not CUDA:
        native.steps.recorder = TapeRecorder()
    return engine.eval()


def rollout(engine, seed=5, prompts=None, **options):
    input_ids, mask = prompts or padded_prompts()
    options = {"max_new_tokens": 11, "do_sample": True, "top_k": 0, "pad_token_id": PAD} | options
    return engine.generate(
        input_ids.to(engine.device),
        attention_mask=mask.to(engine.device),
        seed=seed,
        return_dict_in_generate=True,
        **options,
    )


def assert_equal(a, b):
    assert a.sequences.tolist() == b.sequences.tolist()
    assert a.finish_reason == b.finish_reason and a.lengths.tolist() == b.lengths.tolist()
    torch.testing.assert_close(a.logprobs, b.logprobs, atol=1e-5, rtol=1e-5)


OPTIONS = {
    "greedy": {"do_sample": False},
    "sampled": {},
    "filters": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "several ends": {"eos_token_id": list(range(3, 99, 5))},
    "ends, not before 4": {"eos_token_id": list(range(3, 99, 3)), "min_new_tokens": 4},
    "repetition penalty": {"repetition_penalty": 1.7, "eos_token_id": list(range(3, 99, 9))},
    "groups sharing blocks": {"num_return_sequences": 3, "eos_token_id": list(range(3, 99, 5))},
    "one token": {"max_new_tokens": 1},
    "rows that differ": {"row_options": [{}, {"do_sample": False}, {"top_k": 3}] + [{"repetition_penalty": 1.7}] * 3},
    "one row that differs, and leaves": {"row_options": [{"top_k": 3, "max_new_tokens": 4}] + [{}] * 5},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("limits", [{}, {"max_running": 3, "max_kv_blocks": 13}], ids=["roomy", "preempted"])
def test_replayed_steps_read_late_equal_steps_run_one_by_one(name, limits):
    options = OPTIONS[name]
    expected = rollout(build(is_recorded=False, lag=0, **limits), **options)
    engine = build(**limits)
    assert_equal(rollout(engine, **options), expected)
    stats = engine.latency_stats()
    assert stats["graph_captures"] > 0 or options.get("max_new_tokens") == 1
    if limits and name == "greedy":
        assert stats["preemptions"] > 0


@pytest.mark.parametrize("family", ["gpt2", "qwen3-qk-norm", "mistral-window"])
def test_replayed_steps_equal_the_models_own_generate(family):
    input_ids, mask = padded_prompts()
    model = build_model(family).to("cuda" if CUDA else "cpu")
    kwargs = {"max_new_tokens": 11, "do_sample": False, "pad_token_id": PAD}
    expected = (
        type(model).generate(model, input_ids.to(model.device), attention_mask=mask.to(model.device), **kwargs).cpu()
    )
    ours = rollout(build(model=model), **kwargs)
    assert ours.sequences.tolist() == expected.tolist()


def test_steps_read_late_without_graphs_are_the_same():
    options = OPTIONS["several ends"] | {"num_return_sequences": 3}
    assert_equal(
        rollout(build(is_recorded=False, lag=1), **options), rollout(build(is_recorded=False, lag=0), **options)
    )


def train_step(engine):
    engine.train()
    tokens = padded_prompts()[0][:1].to(engine.device)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    engine.eval()


def test_a_graph_is_recorded_again_only_when_an_address_changed():
    engine = build()
    rollout(engine, do_sample=False)
    assert engine.latency_stats()["graph_captures"] > 0
    train_step(engine)  # updates in place
    after = rollout(engine, do_sample=False)
    rollout(engine, do_sample=False, max_new_tokens=5)
    assert engine.latency_stats()["graph_captures"] == 0
    assert engine.latency_stats()["graph_capture_seconds"] == 0
    plain = build(is_recorded=False, lag=0)
    rollout(plain, do_sample=False)
    train_step(plain)
    assert_equal(after, rollout(plain, do_sample=False))  # the replay read the new weights
    weight = engine.module.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.clone() * 0.5
    plain.module.model.layers[0].mlp.up_proj.weight.data *= 0.5
    assert_equal(rollout(engine, do_sample=False), rollout(plain, do_sample=False))
    assert engine.latency_stats()["graph_captures"] > 0


def test_fused_adapters_are_what_replayed_steps_read():
    engine, plain = build(model=adapted_model()), build(model=adapted_model(), is_recorded=False, lag=0)
    for _ in range(2):
        assert_equal(rollout(engine), rollout(plain))
        train_step(engine)
        train_step(plain)


def captures(engine):
    """Steps that the last rollout recorded."""
    return engine.generator.native.steps.stats.captures


def adapted_model():
    torch.manual_seed(3)
    model = get_peft_model(build_model(), LoraConfig(r=3, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("is_released", [False, True], ids=["kept", "released"])
@pytest.mark.parametrize("make_model", [build_model, adapted_model], ids=["plain", "lora"])
def test_from_the_third_rollout_on_nothing_is_recorded(make_model, is_released):
    engine = build(model=make_model(), release_inference_cache=is_released)
    plain = build(model=make_model(), is_recorded=False, lag=0)
    taken = []  # what training takes in the mean time, of the sizes that a rollout gave back
    for index in range(4):
        options = {"seed": index, "eos_token_id": None}  # so that all have the same numbers of rows
        assert_equal(rollout(engine, **options), rollout(plain, **options))
        assert captures(engine) == 0 or index < 2
        train_step(engine)
        train_step(plain)
        taken += [torch.full((n,), torch.nan, device=engine.device) for n in (1024, 4096, 12288, 49152)]
    assert (engine.generator.workspace.allocated_bytes == 0) == is_released


SETTINGS = {
    "stage 3": (3, build_model, {}),
    "stage 3, lora": (3, adapted_model, {}),
    "stage 0": (0, build_model, {}),
    "stage 1": (1, build_model, {"release_inference_cache": True}),
    "stage 2, lora": (2, adapted_model, {}),
    "stage 3, shared": (3, build_model, {"inference_tp_size": 2}),
    "stage 3, shared, lora": (3, adapted_model, {"inference_tp_size": 2, "release_inference_cache": True}),
    "stage 2, shared": (2, build_model, {"inference_tp_size": 2}),
    "stage 3, lora, released": (3, adapted_model, {"release_inference_cache": True}),
    "stage 3, offloaded, lora, released": (3, adapted_model, {"is_offloaded": True, "release_inference_cache": True}),
    "stage 3, offloaded, shared, lora, released": (
        3,
        adapted_model,
        {"is_offloaded": True, "inference_tp_size": 2, "release_inference_cache": True},
    ),
}


def recorded_on_two(rank, world_size):
    """Whether recorded rollouts equal plain ones, and what each recorded; their weights move between all of them."""
    results = {}
    for name, (stage, make_model, options) in SETTINGS.items():
        engines = [
            build(model=make_model(), is_recorded=is_recorded, lag=int(is_recorded), stage=stage, **options)
            for is_recorded in (True, False)
        ]
        taken = []
        rollouts = []
        for index in range(3):
            options = {"seed": index, "eos_token_id": None, "max_new_tokens": 6}
            recorded, plain = (rollout(engine, **options) for engine in engines)
            rollouts.append((recorded.sequences.tolist() == plain.sequences.tolist(), captures(engines[0])))
            for engine in engines:
                train_step(engine)
            taken += [torch.full((n,), torch.nan) for n in (1024, 4096, 12288, 49152)]  # of what a rollout gave back
        results[name] = rollouts
    return results


def groups_that_go(rank, world_size):
    """Steps that are recorded, and those left when a group goes: at an error, at `destroy()`, with all groups."""
    engine, seen = build(inference_tp_size=2), []
    steps, destroy = engine.generator.native.steps, dist.destroy_process_group
    layer = engine.generator.model.layers[1]

    def fail(*arguments):
        raise ValueError("no room")

    def note(group=None):
        seen.append(sum(step.recorder.num_recorded for step in steps._kept.values()))
        if group is not None:
            destroy(group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "destroy_process_group", note)
        for end in ("error", "destroy", "all"):
            rollout(engine)
            note()
            if end == "error":
                patch.setattr(layer, "forward", fail)
                with pytest.raises(ValueError, match="no room"):
                    rollout(engine, seed=6)
                patch.undo()
                patch.setattr(dist, "destroy_process_group", note)
            elif end == "destroy":
                engine.destroy()
                note()
            else:
                compat_comm.destroy_process_group()
    return seen


def test_graphs_with_collectives_go_before_the_groups_of_these():
    for seen in run_distributed(groups_that_go, 2):
        assert all(before > 0 for before in seen[::2]) and seen[1::2] == [0, 0, 0]


def test_steps_of_a_workspace_that_is_no_more_are_dropped_at_once():
    """They keep its memory, or its addresses, and what their graphs compute with."""
    engine = build()
    rollout(engine)
    (old,) = engine.generator.native.steps._kept.values()
    old = weakref.ref(old)
    rollout(engine, prompts=padded_prompts(num_prompts=12), max_new_tokens=20)
    if isinstance(recorder := engine.generator.native.steps.recorder, TapeRecorder):
        recorder.tapes.clear()  # which hold their tensors
    gc.collect()
    assert old() is None


def test_sharded_weights_are_read_where_recorded_steps_find_them_again():
    for results in run_distributed(recorded_on_two, 2):
        for name, rollouts in results.items():
            assert all(is_equal for is_equal, _ in rollouts), name
            assert rollouts[0][1] > 0 and rollouts[2][1] == 0, name


def test_few_kinds_of_rollout_are_kept_and_an_older_one_is_recorded_anew():
    engine = build()
    for temperature in (1.0, 1.1, 1.2, 1.3, 1.4, 1.5):
        rollout(engine, temperature=temperature)
    assert engine.generator.native.steps.num_kept == 4
    rollout(engine, temperature=1.2)
    assert captures(engine) == 0
    for temperature in (0.5, 0.6, 0.7, 0.8):  # rollouts of one token record nothing and push out all that did
        rollout(engine, temperature=temperature, max_new_tokens=1)
    rollout(engine, temperature=1.2)
    assert captures(engine) > 0


def test_graphs_are_switched_off_by_the_config():
    engine = build(enable_cuda_graph=False, is_recorded=False, lag=0)
    assert engine.generator.native.steps.recorder is None
    assert rollout(engine).lengths.shape == (6,)
    assert engine.latency_stats()["graph_captures"] == 0


def test_batches_are_padded_to_the_buckets():
    assert [batch_bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 17, 129, 256)] == [1, 2, 4, 4, 8, 8, 16, 24, 192, 256]
    buckets = [batch_bucket(n) for n in range(1, 257)]
    assert len(set(buckets)) == 13
    assert all(n <= bucket < 2 * n and (n <= 16 or bucket <= 1.5 * n) for n, bucket in enumerate(buckets, 1))
    assert [context_bucket(n, 4000) for n in (1, 512, 513, 1025, 3000)] == [512, 512, 1024, 2048, 4000]


@pytest.mark.parametrize(("family", "is_recorded"), [("llama", True), ("mixtral", False)])
def test_experts_on_their_reference_are_not_recorded_because_it_reads_the_device(family, is_recorded, monkeypatch):
    engine = build(family)
    monkeypatch.setenv("HYBRID_ENGINE_FALLBACK", "1")
    monkeypatch.setattr(InferenceModel, "device", torch.device("cuda"))
    monkeypatch.setattr(step, "CudaGraphs", TapeRecorder)
    engine.generator.use_containers(engine.generator.model, None)
    assert (engine.generator.native.steps.recorder is not None) == is_recorded


@pytest.mark.skipif(CUDA, reason="on a GPU test_gpu.py records steps of wide models")
@pytest.mark.parametrize("family", [*BUILDERS, *MORE_BUILDERS])
def test_no_familys_step_reads_the_device_while_it_is_recorded(family, monkeypatch):
    """As ops choose on a GPU: by kernels, which write nothing here."""
    monkeypatch.setenv(dispatch.SWITCH, "0")
    monkeypatch.setattr(dispatch.Launch, "__call__", lambda *_: None)
    with kernels_on_cpu(), zeroed_memory(), replaced(compare_logprobs, lambda *_: LogprobDifference(0.0, 0.0)):
        engine = build(family)
        rollout(engine, do_sample=False, max_new_tokens=3)
    assert engine.generator.fallback_reason is None and captures(engine) > 0
