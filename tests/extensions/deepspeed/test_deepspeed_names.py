"""DeepSpeed's names: those that work, and those that say when they are used what to use instead."""

import ast
import importlib.util
import itertools
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

import hybrid_engine as deepspeed
from hybrid_engine.distributed.dataloader import TrainingDataLoader
from hybrid_engine.extensions.deepspeed.absent import Absence
from hybrid_engine.extensions.deepspeed.flops_profiler import FlopsProfiler, get_model_profile, number_to_string
from tests.extensions.deepspeed.test_compat import run_python
from tests.support.deepspeed_names import check_names
from tests.support.distributed import run_distributed
from tests.support.paths import ROOT
from tests.support.training_reference import engine_config, tiny_llama

pytestmark = pytest.mark.quick


def test_what_public_code_imports_below_our_name_works_or_says_what_to_use():
    check_names("hybrid_engine")


def imports_of_deepspeed(package):
    """`module name` of every import from deepspeed in the sources of an installed package, but for its own tests."""
    folder = Path(importlib.util.find_spec(package).origin).parent
    for path in folder.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "deepspeed" in text and "test" not in path.relative_to(folder).parts[0]:
            for node in ast.walk(ast.parse(text)):
                if (
                    isinstance(node, ast.ImportFrom)
                    and (node.module or "").split(".")[0] == "deepspeed"
                    and not node.level
                ):
                    yield from (f"{node.module} {alias.name}" for alias in node.names)


ENABLED = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}]
import hybrid_engine
hybrid_engine.enable_compat()
"""


def test_what_public_code_imports_below_deepspeeds_name_works_or_says_what_to_use():
    clients = sorted({entry for name in ("transformers", "accelerate", "peft") for entry in imports_of_deepspeed(name)})
    assert len(clients) > 8
    source = f"""{ENABLED}
from tests.support.deepspeed_names import check_names
check_names("deepspeed")
for entry in {clients!r}:
    exec("from {{}} import {{}}".format(*entry.split()), {{}})
import deepspeed, importlib.util
import hybrid_engine.cli.launcher
assert hybrid_engine.cli.launcher.build_parser and deepspeed.launcher.runner.DEEPSPEED_ENVIRONMENT_NAME
assert deepspeed.__version_major__ == 0 and isinstance(deepspeed.__git_hash__, str)
assert importlib.util.find_spec("deepspeed.ops.op_builder") and not hasattr(deepspeed, "warp_drive")
try:
    import deepspeed.warp_drive
except ModuleNotFoundError as error:
    print(error)
"""
    result = run_python(source)
    assert result.stdout == "No module named 'deepspeed.warp_drive'\n", result.stderr


def test_an_absent_class_may_be_inherited_from_and_asked_for_and_only_its_use_is_an_error():
    from hybrid_engine.moe.layer import MoE
    from hybrid_engine.pipe import PipelineModule

    class Pipeline(PipelineModule, nn.Module):
        def forward(self, x: "PipelineModule | None") -> "Pipeline":
            return self

    assert not isinstance(nn.Linear(1, 1), (PipelineModule, Pipeline)) and issubclass(Pipeline, PipelineModule)
    assert not hasattr(PipelineModule, "from_pretrained") and (PipelineModule | None) and isinstance(MoE, Absence)
    with pytest.raises(
        NotImplementedError, match=r"deepspeed.pipe.PipelineModule is not supported: there is no pipeline"
    ):
        Pipeline(layers=[])
    with pytest.raises(
        NotImplementedError, match=r"deepspeed.moe.layer.MoE is not supported: experts are sharded like"
    ):
        MoE(8)
    with pytest.raises(AttributeError, match=r"ops.op_builder.CPUAdamBuilder is not supported: .*Triton"):
        _ = deepspeed.ops.op_builder.CPUAdamBuilder.NAME


class TwoLinears(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(10, 20), nn.Linear(20, 5, bias=False)

    def forward(self, x):
        return self.second(self.first(x).relu())

    generate = forward


def test_a_profile_counts_two_operations_for_each_product_of_the_weights(tmp_path, capsys):
    model = TwoLinears()
    flops, macs, params = get_model_profile(model, input_shape=(3, 10), as_string=False)
    assert (flops, macs, params) == (2 * 3 * (200 + 100), 3 * (200 + 100), 320) and not model.training
    printed = capsys.readouterr().out
    assert "1.8 KFLOPS, 900 MACs, 320 parameters" in printed and re.search(r"1,200  TwoLinears.first\n", printed)
    inputs = {"kwargs": {"x": torch.ones(3, 10)}, "print_profile": False}
    assert get_model_profile(model, **inputs, mode="generate") == ("1.8 KFLOPS", "900 MACs", "320")
    assert get_model_profile(model, **inputs, ignore_modules=[nn.Linear]) == ("0 FLOPS", "0 MACs", "320")
    assert [number_to_string(n) for n in (999, 1000, 2.5e9)] == ["999 ", "1 K", "2.5 G"]
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    for _ in range(2):
        model(torch.ones(1, 10))
    profiler.stop_profile()
    model(torch.ones(1, 10))
    profiler.print_model_profile(output_file=str(tmp_path / "profile"), detailed=False)
    assert profiler.get_total_flops() == 2 * 2 * 300 and profiler.get_total_duration() > 0
    assert "1.2 KFLOPS" in (tmp_path / "profile").read_text()
    profiler.end_profile()
    assert profiler.get_total_flops() == 0
    with pytest.raises(ValueError, match="there is no input; give input_shape"):
        get_model_profile(model)


@pytest.mark.parametrize(
    ("in_splits", "out_splits", "bias"), list(itertools.product((1, 2, 3), (1, 4, 5), (True, False)))
)
def test_a_tiled_linear_is_the_linear_it_was_copied_from(in_splits, out_splits, bias):
    whole = nn.Linear(7, 5, bias=bias)
    x = torch.randn(2, 3, 7)
    sizes = {"in_splits": in_splits, "out_splits": out_splits}
    tiled = deepspeed.zero.TiledLinear(7, 5, bias, init_linear=whole, **sizes)
    assert torch.allclose(tiled(x), whole(x), atol=1e-6)
    assert sum(p.numel() for p in tiled.parameters()) == sum(p.numel() for p in whole.parameters())
    parts = deepspeed.zero.TiledLinear(7, 5, bias, input_is_already_split=True, combine_out_splits=False, **sizes)
    parts.load_state_dict(tiled.state_dict())
    given = x if in_splits == 1 else x.split(tiled.in_sizes, dim=-1)
    assert [output.shape[-1] for output in parts(given)] == tiled.out_sizes
    assert torch.equal(torch.cat(parts(given), dim=-1), tiled(x))


def test_a_tiled_linear_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="in_splits=8 must be an integer from 1 to 7"):
        deepspeed.zero.TiledLinear(7, 5, in_splits=8)
    with pytest.raises(
        ValueError, match=r"a layer of shape \(5, 7\), bias=True, does not fit one of \(5, 7\), bias=False"
    ):
        deepspeed.zero.TiledLinear(7, 5, bias=False, init_linear=nn.Linear(7, 5))


def test_leaf_modules_are_marked_by_class_by_name_and_unmarked():
    model = TwoLinears()
    assert not deepspeed.utils.get_z3_leaf_modules(model)
    assert deepspeed.utils.set_z3_leaf_modules(model, [nn.Linear]) == [model.first, model.second]
    assert deepspeed.utils.z3_leaf_module(model.first) and deepspeed.utils.z3_leaf_parameter(model.first.weight)
    assert deepspeed.utils.unset_z3_leaf_modules(model, ["torch.nn.modules.linear.Linear"])
    assert not deepspeed.utils.z3_leaf_module(model.first) and not deepspeed.utils.z3_leaf_parameter(model.first.weight)
    assert deepspeed.utils.set_z3_leaf_modules(model, ["TwoLinears"]) == [model]
    assert deepspeed.utils.set_z3_leaf_modules_by_name(model, ["second"]) == ([model.second], [])
    assert deepspeed.utils.get_z3_leaf_modules(model) == [model, model.second]
    with pytest.raises(ValueError, match="no module of them; choose from its own"):
        deepspeed.utils.set_z3_leaf_modules(model, [nn.Conv1d])


def test_a_config_object_reads_what_initialize_would():
    config = deepspeed.DeepSpeedConfig(engine_config(2, bf16={"enabled": True}))
    assert (config.zero_enabled, config.zero_optimization_stage, config.fp16_enabled) == (True, 2, False)
    assert config.bfloat16_enabled and config.optimizer_name == "adamw" and "lr" in config.optimizer_params
    assert config.train_batch_size == config._param_dict.get("train_batch_size", config.train_batch_size)
    with pytest.raises(deepspeed.DeepSpeedConfigError, match=r"did you mean train_batch_size\?"):
        deepspeed.DeepSpeedConfig({"train_batch_sise": 4})


class Counting(IterableDataset):
    def __iter__(self):
        return iter(range(6))


def test_deepspeed_io_gives_the_training_loader_or_pytorchs():
    data = list(range(12))
    engine, _, training, _ = deepspeed.initialize(
        model=nn.Linear(2, 2), config={"train_batch_size": 4, "seed": 3}, training_data=data, collate_fn=tuple
    )
    again = engine.deepspeed_io(data)
    assert isinstance(again, TrainingDataLoader) and list(again) == list(training)
    assert len(next(iter(engine.deepspeed_io(data, batch_size=3)))) == 3
    evaluating = engine.deepspeed_io(data, route="eval")
    assert isinstance(evaluating, DataLoader) and list(evaluating) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert list(engine.deepspeed_io(Counting(), collate_fn=list)) == [[0, 1, 2, 3], [4, 5]]
    sampled = engine.deepspeed_io(data, data_sampler=RandomSampler(data))
    assert sorted(itertools.chain(*sampled)) == data


def test_recomputation_takes_keyword_arguments_of_the_function_and_of_pytorchs_checkpoint():
    layer, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    runs = []

    def scaled(x, scale=1.0):
        runs.append(torch.is_grad_enabled())
        return layer(x) * scale

    for checkpoint in (deepspeed.checkpointing.checkpoint, deepspeed.checkpointing.non_reentrant_checkpoint):
        runs.clear()
        y = checkpoint(scaled, x, scale=2.0, use_reentrant=True, preserve_rng_state=False)
        (grad,) = torch.autograd.grad(y.sum(), x)
        (expected,) = torch.autograd.grad((layer(x) * 2.0).sum(), x)
        assert torch.equal(grad, expected) and len(runs) == 2


def _step(engine):
    tokens = torch.full((2, 6), 3)
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        if engine.is_gradient_accumulation_boundary():
            return
        engine.step()


def _rows(whole, param):
    """This process's part of a whole value, by the parameter's own sharding."""
    if not isinstance(param, torch.distributed.tensor.DTensor):
        return whole
    return torch.distributed.tensor.distribute_tensor(
        whole, param.device_mesh, param.placements, src_data_rank=None
    ).to_local()


def _local_values(world_size):
    """Local values are parts of the whole ones, before and after they are set."""
    utils = deepspeed.utils
    config = engine_config(3, world_size, bf16={"enabled": True})
    engine, optimizer, *_ = deepspeed.initialize(model=tiny_llama(), config=config)
    param = engine.module.model.layers[0].mlp.up_proj.weight
    _step(engine)
    checks = [torch.equal(utils.safe_get_local_grad(param), _rows(utils.safe_get_full_grad(param), param))]
    utils.safe_set_local_grad(param, torch.ones_like(utils.safe_get_local_grad(param)).flatten())
    checks.append(bool((utils.safe_get_full_grad(param) == 1).all()))
    utils.safe_update_full_grad_vectorized([param], lambda grad, param: grad * 3)
    checks.append(bool((utils.safe_get_local_grad(param) == 3).all()))
    engine.step()
    for get_local, get_full, set_local, *key in (
        (utils.safe_get_local_fp32_param, utils.safe_get_full_fp32_param, utils.safe_set_local_fp32_param),
        (
            utils.safe_get_local_optimizer_state,
            utils.safe_get_full_optimizer_state,
            utils.safe_set_local_optimizer_state,
            "exp_avg",
        ),
    ):
        local = get_local(param, *key)
        checks.append(torch.equal(local, _rows(get_full(param, *key), param)) and local.dtype == torch.float32)
        set_local(param, local + 1.0, *key)
        checks.append(torch.equal(_rows(get_full(param, *key), param), local + 1.0))
    checks.append(torch.equal(engine.module.model.layers[0].mlp.up_proj.weight, param))
    try:
        utils.safe_set_local_fp32_param(param, torch.ones(3))
    except ValueError as error:
        checks.append("of the shape of param.ds_tensor" in str(error))
    zero = deepspeed.runtime.zero
    kinds = (
        isinstance(optimizer, zero.stage3.DeepSpeedZeroOptimizer_Stage3),
        isinstance(optimizer, zero.stage_1_and_2.DeepSpeedZeroOptimizer),
    )
    tokens = torch.full((1, 4), 3)
    with zero.unwrap_model_for_generation(engine) as unwrapped:
        shape = tuple(unwrapped.module.lm_head.weight.detach().shape)
        generated = unwrapped.module.generate(tokens, max_new_tokens=3, do_sample=False)
    return checks, kinds, shape, generated


def _groups(world_size):
    groups = deepspeed.utils.groups
    total = torch.ones(1)
    torch.distributed.all_reduce(total, group=groups._get_sequence_parallel_group())
    everywhere = torch.ones(1)
    torch.distributed.all_reduce(everywhere, group=groups._get_data_parallel_group())
    sizes = groups._get_sequence_parallel_world_size(), groups._get_data_parallel_world_size()
    return total.item(), everywhere.item(), sizes, groups._get_data_parallel_rank()


class Tiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = deepspeed.zero.TiledLinear(6, 8, in_splits=2, out_splits=2)
        self.narrow = nn.Linear(8, 1)

    def forward(self, x):
        return self.narrow(self.wide(x)).mean()


def _tiles_under_mics_init(world_size):
    """A model with tiles, built under MiCS_Init; its losses."""
    config = engine_config(3, world_size)
    torch.manual_seed(0)
    with deepspeed.zero.MiCS_Init(config_dict_or_path=config):
        model = Tiled()
    whole = nn.Linear(6, 8)
    model.wide.copy_params_from(whole)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    losses = []
    for _ in range(4):
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(torch.ones(2, 6))
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    return losses


def _two_processes(rank, world_size):
    return _local_values(world_size), _groups(world_size), _tiles_under_mics_init(world_size)


def _check_local_values(found):
    checks, kinds, shape, generated = found
    assert len(checks) == 9 and all(checks), checks
    assert kinds == (True, False) and shape == tuple(tiny_llama().lm_head.weight.shape)
    assert generated.shape == (1, 7)


def test_local_values_are_parts_of_the_whole_ones_on_one_process():
    _check_local_values(_local_values(1))
    engine, optimizer, *_ = deepspeed.initialize(model=tiny_llama(), config=engine_config(2))
    with pytest.raises(
        ValueError, match="the parameter is not of a stage 3 engine, it has no shard; use safe_get_full"
    ):
        deepspeed.utils.safe_get_local_fp32_param(engine.module.lm_head.weight)
    assert isinstance(optimizer, deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer)
    assert not isinstance(optimizer, deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3)


def test_names_that_work_on_two_processes():
    alone = _tiles_under_mics_init(1)
    for rank, (values, groups, losses) in enumerate(run_distributed(_two_processes, 2)):
        _check_local_values(values)
        assert groups == (1.0, 2.0, (1, 2), rank)
        assert losses[0] > losses[-1] and losses == pytest.approx(alone, rel=1e-5)
