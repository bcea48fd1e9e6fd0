"""Training state: moved to other storage meanwhile with the same objects and bits, and its bytes as counted."""

import gc

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

import hybrid_engine
from hybrid_engine.extensions.deepspeed.utils import OffloadDeviceEnum, OffloadStateTypeEnum
from hybrid_engine.metrics.memory import format_bytes
from hybrid_engine.optim.state_offload import count_bytes
from hybrid_engine.zero.sharding import local_tensor
from tests.optim.test_torch_style_backward import build, masters
from tests.support.distributed import run_distributed
from tests.support.live_tensors import live_storages
from tests.support.training_reference import batches, engine_config, tiny_llama, whole_weights

pytestmark = pytest.mark.long
Kind = OffloadStateTypeEnum
PRECISIONS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
GENERATES = {"hybrid_engine": {"enabled": True, "max_out_tokens": 32}}
OPTIMIZER = [Kind.optim_states, "hp_params", Kind.contiguous_grad_buffer]  # what OpenRLHF asks for
CASES = [(stage, sixteen_bits) for stage in (0, 1, 2, 3) for sixteen_bits in (False, True)]


def step(engine, number, rank=0):
    for i in range(engine.gradient_accumulation_steps()):
        tokens = batches(1, number)[0][(i + rank) % 4]
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()


def rollout(engine):
    engine.eval()
    tokens = engine.generate(batches(1)[0][0], max_new_tokens=4, do_sample=False)
    engine.train()
    return tokens


def storages(engine):
    """Of every kind: which storages there are, none of them kept alive."""
    optimizer, sharding = engine.optimizer, engine.sharding
    kinds = {
        Kind.lp_params: [shard for shard, _ in sharding.twins()] or list(engine.module.parameters()),
        Kind.hp_params: [t.master for t in optimizer.parameters if t.has_master],
        Kind.optim_states: [
            value for state in optimizer.state.values() for key, value in state.items() if key.startswith("exp_avg")
        ],
    }
    return {
        kind: [StorageWeakRef(local_tensor(x).untyped_storage()) for x in tensors if local_tensor(x).numel()]
        for kind, tensors in kinds.items()
    }


def objects(engine):
    optimizer = engine.optimizer
    groups = [param for group in optimizer.param_groups for param in group["params"]]
    pairs = [(t.param, t.master) for t in optimizer.parameters]
    return [id(x) for x in (*engine.module.parameters(), *groups, *(x for pair in pairs for x in pair))]


def is_same(expected, found):
    return expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)


def compare(stage, precision, include, rank=0):
    """Two runs, one offloaded in the middle; whether its storages went, objects stayed, and numbers are the same."""
    plain, moved = (build(stage, **PRECISIONS[precision], **GENERATES) for _ in range(2))
    for engine in (plain, moved):
        step(engine, 0, rank)
    expected, before, ids = rollout(plain), rollout(moved), objects(moved)
    old = storages(moved)
    moved.offload_states(include=include)
    kinds = set(Kind) if include is None else set(include)
    gone = {kind.value: all(ref.expired() for ref in refs) for kind, refs in old.items() if kind in kinds}
    stayed = {kind.value: not any(ref.expired() for ref in refs) for kind, refs in old.items() if kind not in kinds}
    messages = refusals(moved, rank)
    moved.offload_states(include=include)  # nothing is left to do
    away = storages(moved)
    moved.reload_states()
    back = {kind.value: all(ref.expired() for ref in refs) for kind, refs in away.items() if kind in kinds}
    moved.reload_states()
    same_objects = ids == objects(moved)
    after = rollout(moved)
    for engine in (plain, moved):
        step(engine, 1, rank)
    same = is_same(masters(plain), masters(moved)) and is_same(whole_weights(plain), whole_weights(moved))
    tokens = all(torch.equal(x, expected) for x in (before, after)) and torch.equal(rollout(plain), rollout(moved))
    return gone, stayed, back, same_objects, same, tokens, messages


def refusals(engine, rank):
    tokens = batches(1)[0][0]
    with torch.no_grad():
        calls = {
            "forward": lambda: engine(input_ids=tokens),
            "generate": lambda: rollout(engine),
            "backward": lambda: engine.backward(torch.ones((), requires_grad=True)),
            "step": engine.step,
            "save": lambda: engine.save_checkpoint("/nowhere"),
            "load": lambda: engine.load_checkpoint("/nowhere"),
        }
    messages = {}
    for name, call in calls.items():
        try:
            call()
            messages[name] = ""
        except ValueError as error:
            messages[name] = str(error)
    engine.train()
    return messages


def check(result, include):
    gone, stayed, back, same_objects, same, tokens, messages = result
    assert all(gone.values()) and all(stayed.values()) and all(back.values()), (gone, stayed, back)
    assert same_objects and same and tokens
    has_weights = include is not None
    assert (messages["forward"], messages["generate"]) == ("", "") or not has_weights
    if not has_weights:
        assert "forward(): lp_params are offloaded; call reload_states() first" in messages["forward"]
        assert "generate(): lp_params are offloaded" in messages["generate"]
    for name in ("backward", "step", "save", "load"):
        assert "are offloaded; call reload_states() first" in messages[name], (name, messages)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("include", [None, OPTIMIZER], ids=["all", "optimizer"])
def test_on_one_process_everything_moves_and_comes_back(precision, include):
    check(compare(0, precision, include), include)


def work(rank, world_size):
    results = {(stage, "bf16", "all"): compare(stage, "bf16", None, rank) for stage in range(4)}
    results |= {(stage, "bf16", "optimizer"): compare(stage, "bf16", OPTIMIZER, rank) for stage in (2, 3)}
    results |= {(stage, "fp32", "all"): compare(stage, "fp32", None, rank) for stage in (1, 3)}
    results["grads"] = [gradients_wait(stage, rank) for stage in range(4)]
    return results


def gradients_wait(stage, rank):
    """Offloaded between the backward pass and its step; and in the middle of an accumulation."""
    plain, moved = (build(stage, micro_batches=1, **PRECISIONS["bf16"]) for _ in range(2))
    for number in range(2):
        tokens = batches(1, number)[0][rank]
        for engine in (plain, moved):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        moved.offload_states(device=OffloadDeviceEnum.cpu, pin_memory=False, non_blocking=True)
        no_grads = all(t.param.grad is None and t.master.grad is None for t in moved.optimizer.parameters)
        moved.reload_states(non_blocking=True)
        for engine in (plain, moved):
            engine.step()
    same = is_same(masters(plain), masters(moved))
    accumulates = build(stage, micro_batches=2)
    accumulates.backward(accumulates(input_ids=tokens, labels=tokens).loss)
    accumulates.step()
    try:
        accumulates.offload_states()
        message = ""
    except ValueError as error:
        message = str(error)
    return no_grads, same, message


@pytest.fixture(scope="module")
def two_ranks():
    return run_distributed(work, 2)


def test_at_every_stage_on_two_processes_everything_moves_and_comes_back(two_ranks):
    for results in two_ranks:
        for key, result in results.items():
            if key != "grads":
                check(result, None if key[2] == "all" else OPTIMIZER)


def test_gradients_wait_offloaded_and_those_that_are_not_reduced_are_refused(two_ranks):
    for results in two_ranks:
        for stage, (no_grads, same, message) in enumerate(results["grads"]):
            assert no_grads and same
            assert ("the gradients of earlier backward passes are not reduced yet" in message) == (stage < 2)


def test_the_optimizer_has_them_too_and_what_cannot_be_is_refused():
    engine = build(0)
    step(engine, 0)
    engine.optimizer.offload_states(include=[Kind.optim_states], device=OffloadDeviceEnum.cpu, pin_memory=True)
    with pytest.raises(ValueError, match=r"step\(\): optim_states are offloaded"):
        step(engine, 1)
    engine.zero_grad()
    engine.optimizer.reload_states()
    step(engine, 1)
    for device in ("nvme", "none", "cuda"):
        with pytest.raises(ValueError, match=f"device='{device}' must be \"cpu\""):
            engine.offload_states(device=device)
    with pytest.raises(ValueError, match="include has 'moments'; use optim_states, hp_params, lp_params"):
        engine.offload_states(include=["moments"])
    evaluates = hybrid_engine.initialize(model=tiny_llama(), config={"train_batch_size": 1})[0]
    with pytest.raises(ValueError, match=r"offload_states\(\): this engine only evaluates"):
        evaluates.offload_states()


def test_values_that_are_offloaded_can_be_read():
    engine = build(0, **PRECISIONS["bf16"])
    step(engine, 0)
    before = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    engine.offload_states()
    assert all(torch.equal(param, before[name]) for name, param in engine.module.named_parameters())
    assert not any(isinstance(param, DTensor) for param in engine.module.parameters())
    from hybrid_engine.runtime.zero.offload_config import OffloadStateTypeEnum as imported

    assert imported is Kind


def _bytes_of_engines(rank, world_size):
    """For each case what an engine counts in the middle of a step, what lies there, and the report."""
    engines, results = [], []
    for stage, sixteen_bits in CASES:
        gc.collect()  # what is garbage now may give its address to the engine
        before = live_storages()  # held, so that the engine gets no address of theirs
        config = engine_config(stage, world_size, bf16={"enabled": sixteen_bits})
        engine, optimizer, *_ = hybrid_engine.initialize(model=tiny_llama(), config=config)
        tokens = torch.full((2, 12), 3)
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engines.append(engine)  # an address that was free could be taken again
        gc.collect()
        added = live_storages()
        buffers = {buffer.untyped_storage().data_ptr() for buffer in engine.module.buffers()}
        lies_there = sum(s.nbytes() for place, s in added.items() if place not in before and place not in buffers)
        counted = vars(count_bytes(engine.sharding, optimizer))
        results.append((counted, lies_there, engine.report()))
        for module in engine.sharding.fsdp_modules():
            module.unshard()
        assert vars(count_bytes(engine.sharding, optimizer)) == counted  # what is gathered is counted elsewhere
        engine.sharding.settle()
    return results


def test_the_bytes_of_an_engine_are_those_of_its_storages_at_every_stage_on_two_processes():
    for results in run_distributed(_bytes_of_engines, 2):
        for (stage, sixteen_bits), (counted, lies_there, report) in zip(CASES, results, strict=True):
            # Besides there are the tokens, and single numbers as the sum of the losses.
            assert sum(counted.values()) == pytest.approx(lies_there, abs=512), (stage, sixteen_bits, counted)
            assert f"parameters: {format_bytes(counted['parameters'])}" in report
            assert (f"and {format_bytes(counted['shards'])} of shards" in report) == (stage < 3)
            assert (counted["masters"] > 0) == sixteen_bits and counted["gradients"] > 0
