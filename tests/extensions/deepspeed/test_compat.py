"""DeepSpeed's names: what scripts import and call, in one process and in two."""

import argparse
import importlib
import operator
import os
import re
import socket
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import hybrid_engine as deepspeed
from hybrid_engine.distributed.processes import describe_process, first_host
from tests.support import fresh_python
from tests.support.distributed import free_port, run_distributed
from tests.support.training_reference import engine_config, tiny_llama, train_engine

pytestmark = pytest.mark.long

IMPORTS = """
import {root}
import {root}.comm as dist
from {root}.accelerator import get_accelerator
from {root}.ops.adam import DeepSpeedCPUAdam, FusedAdam
from {root}.ops.lamb import FusedLamb
from {root}.ops.lion import FusedLion
from {root} import comm, zero, checkpointing, add_config_arguments, init_distributed, initialize
from {root}.runtime.zero.partition_parameters import ZeroParamStatus
from {root}.runtime.lr_schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from {root}.runtime.activation_checkpointing import checkpointing
from {root}.compression.helper import recursive_getattr, recursive_setattr
from {root}.runtime.rollout import HybridEngineRollout, RolloutConfig, SamplingConfig, build_rollout
from {root}.runtime.rollout.base import RolloutBatch, RolloutEngine, RolloutRequest
from {root}.runtime.rollout.hybrid_engine_rollout import HybridEngineRolloutConfig
from {root}.utils import logger, log_dist
from {root}.utils.logging import logger
from {root}.comm.comm import all_reduce
from {root}.ops.adam.cpu_adam import DeepSpeedCPUAdam as same_adam
from {root}.ops.adam.fused_adam import FusedAdam
from {root}.runtime.engine import DeepSpeedEngine
from {root}.runtime.hybrid_engine import DeepSpeedHybridEngine
from {root}.runtime.dataloader import RepeatingLoader
from {root}.checkpoint.utils import clone_tensors_for_torch_save
from {root}.utils import RepeatingLoader, instrument_w_nvtx, safe_get_full_fp32_param, safe_get_full_grad
from {root}.utils import OnDevice, set_z3_leaf_modules
from {root}.utils.tensor_fragment import safe_get_full_fp32_param
from {root}.runtime.utils import see_memory_usage
from {root} import OnDevice, log_dist, logger
from {root}.inference.config import InferenceConfig
from {root}.inference.engine import InferenceEngine
assert InferenceEngine is {root}.InferenceEngine and {root}.__version__
assert same_adam is DeepSpeedCPUAdam and DeepSpeedEngine is {root}.DeepSpeedEngine
assert "WarmupDecayLR" in {root}.runtime.lr_schedules.VALID_LR_SCHEDULES
assert {root}.runtime.zero.partition_parameters.ZeroParamStatus.NOT_AVAILABLE is ZeroParamStatus.NOT_AVAILABLE
assert {root}.get_accelerator().device_name() in ("cpu", "cuda")
assert {root}.DeepSpeedEngine is not {root}.DeepSpeedHybridEngine
import hybrid_engine
assert {root}.initialize is hybrid_engine.initialize and FusedAdam is hybrid_engine.ops.adam.FusedAdam
"""


def run_python(source, environment=None):
    return fresh_python.run_python("-c", source, env=environment)


def test_every_import_of_the_scripts_works_below_our_name():
    exec(IMPORTS.format(root="hybrid_engine"), {})


def test_enable_compat_makes_the_same_imports_work_below_deepspeeds():
    result = run_python("import hybrid_engine\nhybrid_engine.enable_compat()\n" + IMPORTS.format(root="deepspeed"))
    assert result.returncode == 0, result.stderr


def test_under_deepspeeds_name_the_version_is_that_of_its_names_and_other_modules_are_missing():
    source = """
import importlib.metadata, importlib.util
import hybrid_engine
hybrid_engine.enable_compat()
hybrid_engine.enable_compat()
import deepspeed
assert deepspeed.__version__ == importlib.metadata.version("deepspeed") != hybrid_engine.__version__
assert importlib.util.find_spec("deepspeed") is not None
try:
    import deepspeed.warp_drive
except ModuleNotFoundError:
    print("missing")
"""
    result = run_python(source)
    assert result.stdout == "missing\n", result.stderr


def test_hooks_that_gather_may_be_taken_off_and_put_back_as_trl_does():
    engine, optimizer, *_ = deepspeed.initialize(model=tiny_llama(), config=engine_config(3))
    expected = engine(input_ids=torch.arange(6)[None]).logits
    with deepspeed.zero.GatheredParameters(engine.parameters()):
        offload = optimizer.parameter_offload
        for _, param in [*offload.module.named_parameters(recurse=True), *offload.module.ds_external_parameters()]:
            param.ds_active_sub_modules.clear()
        for hook in offload.forward_hooks + offload.backward_hooks:
            hook.remove()
        offload.forward_hooks = offload.backward_hooks = []
        inside = engine.module(input_ids=torch.arange(6)[None]).logits
        offload._register_deepspeed_module(offload.module)
    assert torch.equal(inside, expected) and torch.equal(engine(input_ids=torch.arange(6)[None]).logits, expected)


def test_without_enable_compat_there_is_no_deepspeed_here():
    assert "deepspeed" not in sys.modules


def test_enable_compat_refuses_when_the_real_one_is_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", type(sys)("deepspeed"))
    with pytest.raises(ValueError, match="the real deepspeed is already imported"):
        deepspeed.enable_compat()


@pytest.mark.parametrize("path", ["comm", "comm.comm", "utils.groups", "runtime.config", "ops.adam.cpu_adam"])
def test_a_path_of_deepspeed_has_the_very_objects_of_our_module(path):
    module = importlib.import_module(f"hybrid_engine.{path}")
    ours = {
        "comm": "extensions.deepspeed.comm",
        "utils": "extensions.deepspeed.comm",
        "runtime": "extensions.deepspeed.runtime_names",
        "ops": "ops.fused_adam",
    }[path.split(".")[0]]
    source = vars(importlib.import_module(f"hybrid_engine.{ours}"))
    names = [name for name in source.get("__all__", source) if not name.startswith("_")]
    assert len(names) > 4 and all(getattr(module, name) is source[name] for name in names)
    assert operator.attrgetter(path)(deepspeed) is module


def test_arguments_are_added_and_the_local_rank_comes_from_torchrun(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    assert deepspeed.add_config_arguments(parser) is parser
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"])
    assert (args.deepspeed, args.deepspeed_config, args.deepscale, args.local_rank) == (True, "ds.json", False, -1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    deepspeed.add_config_arguments(parser)
    assert parser.parse_args([]).local_rank == 3 and parser.parse_args(["--local_rank", "1"]).local_rank == 1


COLLECTIVES_ALONE = """
import hybrid_engine as deepspeed, torch
deepspeed.init_distributed(dist_init_required=False)
assert not deepspeed.comm.is_initialized()
if {joins}:
    deepspeed.init_distributed()
    assert torch.distributed.get_rank() == 0 and torch.distributed.get_world_size() == 1
    torch.distributed.barrier()
comm = deepspeed.comm
assert comm.is_initialized() is {joins} and (comm.get_rank(), comm.get_world_size()) == (0, 1)
assert comm.get_global_rank(comm.get_world_group(), 0) == 0 and comm.get_all_ranks_from_group() == [0]
assert (comm.new_group(ranks=[0]) is None) is not {joins}
mine = torch.arange(4.0)


def arrives(collective, make, *args, **kwargs):
    for is_async in (False, True):
        out = make()
        handle = collective(out, *args, **kwargs, async_op=is_async)
        assert (handle is not None) is is_async and (not is_async or handle.wait() is not False)
        assert torch.equal(out[0] if isinstance(out, list) else out, mine), collective


def empty():
    return torch.zeros(4)


comm.barrier()
comm.barrier(group=None)
comm.monitored_barrier()
arrives(comm.all_reduce, mine.clone, op=comm.ReduceOp.SUM, group=None, prof=False, log_name="name", debug=None)
arrives(comm.reduce, mine.clone, dst=0)
arrives(comm.broadcast, mine.clone, src=0)
arrives(comm.all_gather, lambda: [empty()], tensor=mine)
arrives(comm.all_gather_into_tensor, empty, tensor=mine)
arrives(comm.allgather_fn, empty, mine)
arrives(comm.reduce_scatter, empty, [mine])
arrives(comm.reduce_scatter_tensor, empty, tensor=mine, op=comm.ReduceOp.SUM)
arrives(comm.all_to_all_single, empty, tensor=mine)
out = empty()
comm.reduce_scatter_tensor(output_tensor=out, tensor=mine)
assert torch.equal(out, mine)
arrives(comm.scatter, empty, scatter_list=[mine], src=0)
parts = [empty()]
comm.gather(mine, gather_list=parts, dst=0)
assert torch.equal(parts[0], mine)
objects = [None]
comm.all_gather_object(objects, {{"a": 1}})
assert objects == [{{"a": 1}}]
comm.broadcast_object_list(objects, src=0)
comm.destroy_process_group()
assert not comm.is_initialized()
"""


@pytest.mark.parametrize("joins", [False, True])
def test_collectives_of_a_single_process_are_what_they_come_to(joins):
    """Before init_distributed() there is no group; after it torch.distributed's own functions answer too."""
    environment = {**_clean_environment(), "CUDA_VISIBLE_DEVICES": ""}
    result = run_python(COLLECTIVES_ALONE.format(joins=joins), environment)
    assert result.returncode == 0, result.stderr


def _collectives(rank, world_size):
    comm = deepspeed.comm
    deepspeed.init_distributed("nccl")  # on a machine without GPU, as scripts write it
    mine = torch.full((2,), float(rank + 1))
    results = {"numbers": (comm.get_rank(), comm.get_world_size(), comm.get_local_rank())}
    total = mine.clone()
    comm.all_reduce(total, op=comm.ReduceOp.SUM, async_op=True, log_name="total").wait()
    results["all_reduce"] = total
    results["all_gather_into_tensor"] = torch.empty(4)
    comm.all_gather_into_tensor(results["all_gather_into_tensor"], tensor=mine)
    results["reduce_scatter_tensor"] = torch.empty(1)
    comm.reduce_scatter_tensor(output_tensor=results["reduce_scatter_tensor"], tensor=mine, op=comm.ReduceOp.SUM)
    group = comm.new_group(ranks=[0, 1])
    pieces = [torch.empty(2) for _ in range(2)]
    comm.all_gather(tensor_list=pieces, tensor=mine, group=group)
    results["all_gather"] = torch.cat(pieces)
    results["broadcast"] = mine.clone()
    comm.broadcast(tensor=results["broadcast"], src=1, group=group)
    results["all_to_all_single"] = torch.empty(2)
    comm.all_to_all_single(results["all_to_all_single"], tensor=mine * torch.tensor([1.0, 10.0]))
    objects = [None, None]
    comm.all_gather_object(objects, rank)
    results["objects"] = torch.tensor(objects)
    alone = [comm.new_group(ranks=[r]) for r in range(2)][rank]
    results["ranks"] = torch.tensor([*comm.get_all_ranks_from_group(alone), comm.get_global_rank(alone, 0)])
    return results


def _overflow_of_one_of_two_engines(rank, world_size):
    """The alignment of DeepSpeed-Chat: when one model overflows, both skip their step, on every rank."""
    config = engine_config(1, world_size, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1})
    actor, critic = (deepspeed.initialize(model=tiny_llama(), config=config)[0] for _ in range(2))
    tokens = torch.full((2, 12), 3)
    for step in range(actor.gradient_accumulation_steps()):
        for engine in (actor, critic):
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss * (float("inf") if engine is critic and rank == 1 else 1.0))
        if step < actor.gradient_accumulation_steps() - 1:
            actor.step()
            critic.step()
    before = [p.detach().clone() for p in actor.parameters()]
    found = [engine.optimizer.check_overflow(external=True) for engine in (actor, critic)]
    if found[1] and not found[0]:
        actor.optimizer.skip_step = True
    actor.step()
    critic.step()
    kept = all(torch.equal(p.detach(), b) for p, b in zip(actor.parameters(), before, strict=True))
    scales = actor.optimizer.cur_scale, critic.optimizer.cur_scale
    skipped = actor.skipped_steps, critic.skipped_steps, actor.was_step_applied()
    training = train_engine(actor, 1)
    return found, kept, scales, skipped, actor.was_step_applied(), training.losses


def _refusal(config):
    try:
        deepspeed.initialize(model=nn.Linear(2, 2), config=config)
    except ValueError as error:
        return str(error)
    return None


def _configs_that_differ(rank, world_size):
    """The config of rank 1 differs, is broken, or differs in what each process may choose alone."""
    base = {"train_batch_size": 4, "zero_optimization": {"stage": 1}}
    return (
        _refusal({**base, "gradient_clipping": float(rank), "zero_optimization": {"stage": 1 + rank}}),
        _refusal({**base, "steps_per_prin": 3} if rank == 1 else base),
        _refusal({**base, "seed": rank, "steps_per_print": rank, "wall_clock_breakdown": rank == 0}),
    )


def _consolidated(rank, world_size):
    """What accelerate saves of a model at stage 3."""
    config = engine_config(3, world_size, bf16={"enabled": True})
    engine, *_ = deepspeed.initialize(model=tiny_llama(tie=False), config=config)
    engine.module.model.embed_tokens.requires_grad_(False)
    names = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    return engine._zero3_consolidated_16bit_state_dict(), list(names)


def _processes(rank, world_size):
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 2})
    return engine.local_rank, engine.global_rank, engine.world_size, engine.dp_world_size


def _two_processes(rank, world_size):
    return (
        _collectives(rank, world_size),
        _overflow_of_one_of_two_engines(rank, world_size),
        _configs_that_differ(rank, world_size),
        _consolidated(rank, world_size),
        _processes(rank, world_size),
    )


@pytest.fixture(scope="module")
def two_ranks():
    return run_distributed(_two_processes, 2)


def test_collectives_are_those_of_torch_under_deepspeeds_names_of_arguments(two_ranks):
    for rank, (results, *_) in enumerate(two_ranks):
        assert results.pop("numbers") == (rank, 2, rank)
        assert {name: tensor.tolist() for name, tensor in results.items()} == {
            "all_reduce": [3, 3],
            "all_gather_into_tensor": [1, 1, 2, 2],
            "reduce_scatter_tensor": [3],
            "all_gather": [1, 1, 2, 2],
            "broadcast": [2, 2],
            "all_to_all_single": [1, 2] if rank == 0 else [10, 20],
            "objects": [0, 1],
            "ranks": [rank, rank],
        }


def test_engines_whose_overflows_are_aligned_skip_together_and_only_the_overflowing_scale_falls(two_ranks):
    for _, (found, kept, scales, skipped, goes_on, _), *_ in two_ranks:
        assert found == [False, True] and kept
        assert scales == (2.0**8, 2.0**7) and skipped == (1, 1, False) and goes_on


def test_a_config_that_differs_or_is_wrong_on_one_process_is_an_error_on_all(two_ranks):
    for rank, (_, _, (differ, wrong, may_differ), *_) in enumerate(two_ranks):
        assert f"config: rank {rank} and rank {1 - rank} differ in zero_optimization (" in differ
        assert f"gradient_clipping ({float(rank)} and {float(1 - rank)})" in differ
        assert wrong.startswith("config of rank 1: " if rank == 0 else "steps_per_prin is not a known option")
        assert "did you mean steps_per_print?" in wrong and may_differ is None


def test_the_state_dict_of_a_sharded_model_is_whole_on_rank_0(two_ranks):
    expected = {name: value.detach().bfloat16() for name, value in tiny_llama(tie=False).state_dict().items()}
    for rank, (*_, (state, trained), _) in enumerate(two_ranks):
        assert bool(state) == (rank == 0) == bool(trained)
        if rank == 0:
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[name], expected[name]) for name in expected)
            assert set(expected) - set(trained) == {"model.embed_tokens.weight"}


def test_an_engine_says_which_process_of_how_many_it_is_in(two_ranks, monkeypatch):
    assert [processes for *_, processes in two_ranks] == [(0, 0, 2, 2), (1, 1, 2, 2)]
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert _processes(0, 1) == (3, 0, 1, 1)


def test_helpers_of_utils_do_what_their_names_say():
    utils = deepspeed.utils
    loader = utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1] and iter(loader) is loader
    rows = torch.arange(6.0).view(2, 3)
    copied = deepspeed.checkpoint.utils.clone_tensors_for_torch_save({"a": [rows[0]], "b": 1})
    assert copied["b"] == 1 and torch.equal(copied["a"][0], rows[0])
    assert copied["a"][0].untyped_storage().nbytes() == 3 * 4
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert utils.set_z3_leaf_modules(model, [nn.ReLU]) == utils.set_z3_leaf_modules(model, ["ReLU"]) == [model[1]]
    assert utils.instrument_w_nvtx(print) is print


def test_memory_is_logged_where_it_is_forced(caplog):
    deepspeed.runtime.utils.see_memory_usage("before", force=False)
    deepspeed.runtime.utils.see_memory_usage("after", force=True)
    assert "before" not in caplog.text and re.search(r"after \| allocated \d+\.\d\d GiB", caplog.text)


def test_a_step_that_is_skipped_on_request_changes_neither_weights_nor_scale():
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "fp16": {"enabled": True, "loss_scale_window": 1}}
    engine, optimizer, *_ = deepspeed.initialize(model=nn.Linear(3, 2), config=config)
    before, scale = engine.module.weight.detach().clone(), optimizer.loss_scale
    optimizer.skip_step = True
    engine.backward(engine(torch.ones(1, 3).half()).float().sum() * 1e-3)
    assert optimizer.check_overflow() is False
    engine.step()
    assert torch.equal(engine.module.weight, before) and optimizer.overflow and optimizer.cur_scale == scale
    assert engine.skipped_steps == 1 and not optimizer.skip_step
    assert optimizer.quantize_nontrainable_params() is None


def test_an_engine_answers_to_deepspeeds_names_before_its_module_is_asked():
    config = {
        "train_batch_size": 4,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"betas": [0.8, 0.9]}},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = deepspeed.initialize(model=tiny_llama(), config=config)
    assert (engine.zero_optimization_stage(), engine.zero_optimization()) == (2, True)
    assert (engine.bfloat16_enabled(), engine.fp16_enabled(), engine.loss_scale()) == (True, False, 1.0)
    assert engine.gradient_clipping() == 0.5 and engine.get_mom() == [(0.8, 0.9)]
    assert engine.optimizer_name() == "adamw" and engine.scheduler_name() is None
    assert engine.optimizer_params()["betas"] == (0.8, 0.9) and engine.scheduler_params() is None
    assert engine.get_batch_info() == (4, 4, 1) and engine.zero_gather_16bit_weights_on_model_save()
    engine.set_lr(0.25)
    assert engine.get_lr() == [0.25]
    engine.empty_partition_cache()
    assert engine.config["zero_optimization"] == {"stage": 2} and engine.config.get("seed") is None
    assert engine.basic_optimizer is engine.optimizer.inner
    assert not engine.monitor.enabled and not engine.was_step_applied() and engine.get_global_grad_norm() is None
    assert engine.model is engine.module.model and {p.device for p in engine.parameters()} == {engine.device}
    engine.gradient_checkpointing_enable()
    assert engine.module.is_gradient_checkpointing
    engine.custom = 3
    assert engine.custom == 3 and not hasattr(engine.module, "custom")


def test_the_throughput_timer_counts_epochs_and_steps():
    engine, *_ = deepspeed.initialize(model=tiny_llama(), config=engine_config())
    train_engine(engine, 3)
    timer = engine.tput_timer
    assert (timer.global_step_count, timer.micro_step_count) == (3, 12) and timer.avg_samples_per_sec() > 0
    timer.update_epoch_count()
    assert (timer.epoch_count, timer.micro_step_count) == (1, 0)


def test_attributes_are_read_and_written_by_their_dotted_path():
    engine, *_ = deepspeed.initialize(model=tiny_llama(), config={"train_batch_size": 1})
    helper = deepspeed.compression.helper
    name = "module.model.layers.1.self_attn.q_proj"
    assert helper.recursive_getattr(engine, name) is engine.module.model.layers[1].self_attn.q_proj
    new = nn.Linear(2, 2)
    helper.recursive_setattr(engine, name, new)
    assert engine.module.model.layers[1].self_attn.q_proj is new


def test_a_function_is_computed_again_in_the_backward_pass_and_has_the_same_gradients():
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    calls = []

    def function(y, factor):
        calls.append(factor)
        return layer(y).relu() * factor

    for cpu_checkpointing in (False, True):
        block = {"cpu_checkpointing": cpu_checkpointing}
        deepspeed.checkpointing.configure(None, deepspeed_config={"activation_checkpointing": block})
        assert deepspeed.checkpointing.is_configured()
        out = deepspeed.checkpointing.checkpoint(function, x, 3.0)
        assert calls == [3.0]
        gradients = torch.autograd.grad(out.sum(), (x, layer.weight))
        assert calls == [3.0, 3.0]
        expected = torch.autograd.grad((layer(x).relu() * 3.0).sum(), (x, layer.weight))
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
        calls.clear()


def test_the_accelerator_is_the_cpu_where_there_is_no_gpu():
    accelerator = deepspeed.get_accelerator()
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert (accelerator.device_name(), accelerator.device_name(1), accelerator.current_device_name()) == ("cpu",) * 3
    assert accelerator.communication_backend_name() == "gloo" and accelerator.device_count() == 1
    assert accelerator.is_bf16_supported() and accelerator.is_fp16_supported() and accelerator.is_available()
    accelerator.set_device(0)
    for seed in (accelerator.manual_seed, accelerator.manual_seed_all):
        torch.manual_seed(4)
        seed(3)
        first = torch.rand(2)
        assert torch.equal(first, torch.rand(2, generator=torch.Generator().manual_seed(3)))
        assert accelerator.initial_seed() == 3
    state = accelerator.get_rng_state()
    assert torch.equal(state, torch.get_rng_state())
    following = torch.rand(2)
    accelerator.set_rng_state(state)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(torch.rand(2), following)
    accelerator.synchronize()
    accelerator.empty_cache()
    assert 0 < accelerator.memory_allocated() <= accelerator.total_memory()
    assert accelerator.on_accelerator(torch.empty(1))
    environment = {}
    accelerator.set_visible_devices_envs(environment, [1, 3])
    assert environment == {"CUDA_VISIBLE_DEVICES": "1,3"} and accelerator.get_compile_backend() == "inductor"


def test_the_accelerators_streams_graphs_ranges_and_tensor_types_answer_without_a_gpu():
    accelerator = deepspeed.get_accelerator()
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with accelerator.stream(accelerator.Stream()), accelerator.capture_to_graph(accelerator.create_graph()):
        accelerator.current_stream().wait_stream(accelerator.default_stream())
        accelerator.Event().record()
    accelerator.replay_graph(None)
    accelerator.range_push("part")
    accelerator.range_pop()
    assert accelerator.lazy_call(lambda: 3) == 3 and accelerator.amp() is torch.cpu.amp
    for name in (
        "use_host_timers",
        "resolves_data_dependency",
        "handles_memory_backpressure",
        "is_synchronized_device",
    ):
        assert getattr(accelerator, name)() is True
    assert accelerator.is_triton_supported() is False and accelerator.random() is torch.random
    assert accelerator.default_generator(0) is torch.default_generator
    tensor = accelerator.LongTensor([1, 2])
    assert tensor.dtype == torch.int64 and accelerator.BFloat16Tensor([1.5]).dtype == torch.bfloat16
    with pytest.raises(AttributeError, match="the accelerator has no 'warp_drive'"):
        _ = accelerator.warp_drive


PEAKS = """
import os
import hybrid_engine as deepspeed, torch
accelerator = deepspeed.get_accelerator()
assert accelerator.max_memory_allocated() < accelerator.memory_allocated() + 200e6
for _ in range(200):
    current = accelerator.memory_allocated()
    assert accelerator.max_memory_allocated() >= current and accelerator.max_memory_reserved() >= current
    held = torch.ones(1000, 100)
large = torch.ones(50_000_000)  # 200 MB
most = accelerator.memory_allocated()
del large
small = accelerator.memory_allocated()
assert small < most - 150e6 and accelerator.max_memory_allocated() >= most
stats = accelerator.memory_stats()
assert 0 < stats["allocated_bytes.all.current"] < most <= stats["allocated_bytes.all.peak"]
accelerator.reset_peak_memory_stats()
assert accelerator.memory_allocated() <= accelerator.max_memory_allocated() < most - 100e6
large = torch.ones(25_000_000)  # 100 MB, between two readings
del large
assert accelerator.max_memory_cached() < most
if os.path.exists("/proc/self/clear_refs"):  # elsewhere the system cannot forget its peak
    assert small + 50e6 < accelerator.max_memory_cached()
"""


def test_the_peaks_of_a_process_are_never_below_a_reading_and_begin_anew_after_a_reset():
    # Linux hands the peak of the process that starts another on to it; this one's is then above all of the other's.
    held = torch.ones(250_000_000)
    result = run_python(PEAKS, {**_clean_environment(), "CUDA_VISIBLE_DEVICES": ""})
    del held
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {}),
        ({"RANK": "1", "WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "9"}, {}),
        (
            {
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "3",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
            },
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_ADDR": "127.0.0.1"},
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "host"},
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
        ),
        (
            {
                "SLURM_PROCID": "5",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_NUM_TASKS": "8",
                "SLURM_STEP_NODELIST": "gpu[07-08]",
            },
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu07"},
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, {}),  # a batch script without srun
    ],
)
def test_the_environment_of_torchrun_mpi_or_slurm_says_which_process_this_is(environment, expected):
    assert describe_process(environment) == expected


def test_mpi_on_several_machines_needs_an_address_to_meet_at():
    environment = {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    }
    with pytest.raises(ValueError, match="MASTER_ADDR is not set; set it to the machine of rank 0"):
        describe_process(environment)


@pytest.mark.parametrize(
    ("nodelist", "first"), [("a,b", "a"), ("gpu[03-05,9],x", "gpu03"), ("n[1,3]", "n1"), ("one", "one")]
)
def test_the_first_host_of_slurms_list(nodelist, first):
    assert first_host(nodelist) == first


def test_processes_started_by_mpi_meet(tmp_path):
    script = tmp_path / "script.py"
    port = free_port()
    script.write_text(
        textwrap.dedent(f"""
        import os
        import hybrid_engine as deepspeed, torch
        deepspeed.init_distributed(distributed_port={port})
        assert os.environ["MASTER_PORT"] == "{port}"
        total = torch.ones(1)
        deepspeed.comm.all_reduce(total)
        print(deepspeed.comm.get_rank(), total.item())
        """)
    )
    mpi = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    processes = [
        fresh_python.start_python(script, env={**_clean_environment(), **mpi, "OMPI_COMM_WORLD_RANK": str(rank)})
        for rank in range(2)
    ]
    assert sorted(process.wait(120).stdout.strip() for process in processes) == ["0 2.0", "1 2.0"]


def _clean_environment():
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in launched}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rank": 0, "world_size": 2}, r"the environment \(RANK, .* says otherwise"),
        ({"rank": 7}, r"the environment \(RANK, .* says otherwise"),
        ({"init_method": "tcp://127.0.0.1:1"}, "RANK and WORLD_SIZE is missing; pass rank= and world_size="),
        ({"init_method": "file:///x", "rank": 1}, "WORLD_SIZE is missing; pass rank= and world_size="),
        ({"init_method": "mpi://x", "rank": 0, "world_size": 1}, 'must be "env://", "tcp://host:port" or "file'),
    ],
)
def test_who_a_process_is_must_be_said_once(monkeypatch, wrong, words):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=words):
        deepspeed.init_distributed(**wrong)


def test_arguments_that_contradict_the_environment_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"the environment .* says otherwise"):
        deepspeed.init_distributed(init_method="file:///x", rank=1, world_size=2)


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_processes_meet_where_init_method_says_without_an_environment(scheme, tmp_path):
    place = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/meeting"
    source = f"""
import sys, torch
import hybrid_engine as deepspeed
deepspeed.init_distributed("gloo", init_method={place!r}, rank=int(sys.argv[1]), world_size=2)
model = torch.nn.Linear(1, 1)
engine = deepspeed.initialize(model=model, config={{"train_batch_size": 2, "optimizer": {{"type": "SGD"}}}})[0]
engine.backward(engine(torch.ones(1, 1)).sum())
engine.step()
print(deepspeed.comm.get_rank(), engine.train_micro_batch_size_per_gpu())
"""
    environment = {**_clean_environment(), "CUDA_VISIBLE_DEVICES": ""}
    processes = [fresh_python.start_python("-c", source, rank, env=environment) for rank in (0, 1)]
    assert sorted(process.wait(120).stdout.strip() for process in processes) == ["0 1", "1 1"]


def test_a_process_waits_for_the_others_as_long_as_the_timeout_says():
    source = """
import datetime, torch
import hybrid_engine as deepspeed
try:
    deepspeed.init_distributed(timeout=datetime.timedelta(seconds=1))
except torch.distributed.DistStoreError as error:
    print(error)
"""
    first_of_two = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": str(free_port())}
    environment = {**_clean_environment(), **first_of_two, "CUDA_VISIBLE_DEVICES": ""}
    result = run_python(source, environment)
    assert re.match(r"Timed out after [12] seconds waiting for clients", result.stdout), result.stderr


def test_initialize_meets_the_other_processes_at_the_port_that_it_is_given():
    second_of_two = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": ""}
    with socket.socket() as meeting_point:
        meeting_point.bind(("127.0.0.1", 0))
        meeting_point.listen()
        meeting_point.settimeout(60)
        port = meeting_point.getsockname()[1]
        source = f"""
import hybrid_engine as deepspeed, torch
deepspeed.initialize(model=torch.nn.Linear(1, 1), config={{"train_batch_size": 2}}, distributed_port={port})
"""
        process = subprocess.Popen([sys.executable, "-c", source], env={**_clean_environment(), **second_of_two})
        try:
            meeting_point.accept()[0].close()
        finally:
            process.kill()
            process.wait()


def test_what_the_environment_says_may_be_said_again():
    source = """
import hybrid_engine as deepspeed
deepspeed.init_distributed("gloo", init_method="env://", rank=0, world_size=1)
assert deepspeed.comm.get_world_size() == 1
"""
    for environment in ({"RANK": "0", "WORLD_SIZE": "1"}, {}):
        result = run_python(source, {**_clean_environment(), **environment, "CUDA_VISIBLE_DEVICES": ""})
        assert result.returncode == 0, result.stderr
