"""`autodist`: the optimum of its costs, plans that behave, run and are refused where they are wrong."""

import random
import re
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hybrid_engine.cli import cli
from hybrid_engine.extensions.parallelize.arguments import plan_by
from hybrid_engine.extensions.parallelize.graph.compute_config import ComputeConfig
from hybrid_engine.extensions.parallelize.graph.graph import build_graph
from hybrid_engine.extensions.parallelize.planning.autodist import (
    PlanRequest,
    best_plan,
    best_stages,
    explain,
    plan_costs,
)
from hybrid_engine.extensions.parallelize.planning.machine import COLLECTIVES, Link, Machine, measure_machine
from hybrid_engine.extensions.parallelize.planning.op_classes import token_bytes
from hybrid_engine.extensions.parallelize.planning.plan import Plan
from hybrid_engine.extensions.parallelize.planning.policies import all_choices, choices_of
from hybrid_engine.extensions.parallelize.planning.programme import Infeasible, solve
from hybrid_engine.extensions.parallelize.planning.setting import Cost, Generation, PlanSetting, WeightFormat, peaks
from hybrid_engine.extensions.parallelize.planning.space import Space
from tests.support.distributed import leave_process_group, run_distributed

H100 = Machine.named("h100")


def evaluate_plan(plan, setting, recomputed=None):
    """The cost of a plan of one stage, op by op, and the bytes of its largest tensor."""
    space = Space(plan.graph, plan.mesh, setting, choices_of(plan), shares=False, recomputed=recomputed)
    return space.evaluate([0] * len(space.classes))


class Tied(nn.Module):
    """A weight that is read twice, and a tensor that two ops read."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(512, 256)
        self.up = nn.Linear(256, 512)

    def forward(self, ids):
        x = self.up(self.embed(ids)).relu()
        return F.linear(x[..., :256] + x[..., 256:], self.embed.weight)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, num_layers=4, width=1024):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def on_meta(build):
    with torch.device("meta"):
        return build()


@pytest.fixture(scope="module")
def blocks():
    return build_graph(on_meta(Blocks), {"x": torch.zeros(8, 128, 1024, device="meta")})


SMALL = {
    "tied": lambda: (on_meta(Tied), {"ids": torch.zeros(4, 16, dtype=torch.long)}),
    "block": lambda: (on_meta(lambda: Block(256)), {"x": torch.zeros(4, 64, 256, device="meta")}),
}


def all_plans(space):
    """The seconds of every plan, in an array with an axis for each class of ops, and its bytes at every moment."""
    sizes = [len(one.choices) for one in space.classes]
    moments = list(peaks(Cost(), 0.0, space.setting))

    def amounts(cost, largest):
        seconds = cost.seconds(space.setting.num_micro_batches)
        return [seconds, *peaks(cost, largest, space.setting).values()]

    total = np.zeros((1 + len(moments), *sizes))
    largest = np.zeros(sizes)
    for number, one in enumerate(space.classes):
        shape = [size if axis == number else 1 for axis, size in enumerate(sizes)]
        costs = np.array([amounts(cost, 0.0) for cost in one.costs]).T
        total += costs.reshape(-1, *shape)
        largest = np.maximum(largest, np.reshape(one.largest, shape))
    for tensor in space.tensors:
        involved = sorted({r.op_class for r in tensor.readers if r.op_class is not None})
        involved = sorted({*involved, *([tensor.maker[0]] if tensor.maker else [])})
        table = np.zeros((1 + len(moments), *(size if n in involved else 1 for n, size in enumerate(sizes))))
        for choices in product(*(range(sizes[n]) for n in involved)):
            assignment = [0] * len(sizes)
            for number, choice in zip(involved, choices, strict=True):
                assignment[number] = choice
            table[(slice(None), *assignment)] = amounts(space.tensor_cost(tensor, assignment), 0.0)
        total += table
    for position, num_bytes in enumerate(peaks(Cost(), 1.0, space.setting).values(), 1):
        total[position] += num_bytes * largest
    return total[0], total[1:].max(0)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("num_units", [1, 2])
def test_the_programme_finds_the_optimum_of_all_plans(name, num_units):
    graph = build_graph(*SMALL[name]())
    setting = PlanSetting(machine=H100, plan_ngpus=2, num_units=num_units, num_micro_batches=num_units)
    space = Space(graph, (2,), setting, all_choices((2,), setting))
    free = solve(space)
    cost, largest = space.evaluate(free)
    peak = max(peaks(cost, largest, setting).values())
    seconds, num_bytes = all_plans(space)
    assert cost.seconds(setting.num_micro_batches) == pytest.approx(seconds[tuple(free)])
    for memory_bytes in (float("inf"), 0.8 * peak, 0.6 * peak, 1.01 * num_bytes.min()):
        space.setting = replace(setting, memory_bytes=memory_bytes)
        fitting = num_bytes <= memory_bytes
        if not fitting.any():
            with pytest.raises(Infeasible) as caught:
                solve(space)
            assert caught.value.least_bytes == pytest.approx(num_bytes.min(), rel=1e-4)
        else:
            found = tuple(solve(space))
            assert seconds[found] == pytest.approx(seconds[fitting].min(), rel=1e-5)
            assert num_bytes[found] <= memory_bytes * (1 + 1e-6)


def test_a_space_of_shared_choices_costs_what_its_plan_costs_op_by_op(blocks):
    setting = PlanSetting(machine=H100, plan_ngpus=4, num_units=2, use_zero=True, weights=WeightFormat(is_16_bit=True))
    space = Space(blocks, (2, 2), setting, all_choices((2, 2), setting))
    assignment = [len(one.choices) // 2 for one in space.classes]
    shared, largest = space.evaluate(assignment)
    alone, largest_alone = evaluate_plan(space.plan(assignment), setting)
    assert largest == largest_alone
    for name in vars(shared):
        assert getattr(alone, name) == pytest.approx(getattr(shared, name))


def shards(plan):
    """The bytes of parameters that each rank has under a plan."""
    cost, _ = evaluate_plan(plan, PlanSetting(machine=H100, plan_ngpus=plan.plan_ngpus))
    return cost.resident_bytes


def test_less_memory_gives_more_splitting_until_nothing_fits():
    graph = build_graph(on_meta(lambda: Blocks(2)), {"x": torch.zeros(64, 128, 1024, device="meta")})
    setting = PlanSetting(machine=H100, plan_ngpus=4)

    def peak(plan):
        cost, largest = evaluate_plan(plan, setting)
        return max(peaks(cost, largest, setting).values())

    with pytest.raises(ValueError, match=r"mem_constraint=0.1 GB: the most frugal plan on 4 processes needs 0\.\d+ GB"):
        best_plan(graph, replace(setting, memory_bytes=1e8))
    with pytest.raises(Infeasible) as caught:
        tight = replace(setting, memory_bytes=1e8)
        solve(Space(graph, (4,), tight, all_choices((4,), tight)))
    most, least = peak(best_plan(graph, setting)), caught.value.least_bytes
    held = []
    for share in (1, 0.5, 0.1):
        memory_bytes = least + share * (most - least)
        plan = best_plan(graph, replace(setting, memory_bytes=memory_bytes))
        assert peak(plan) <= memory_bytes * (1 + 1e-6)
        held.append(shards(plan))
    assert held == sorted(held, reverse=True)
    assert held[-1] < held[0]


def test_slower_links_give_less_communication(blocks):
    sent = []
    for slower in (1, 30, 1000, 1e6):
        links = dict.fromkeys(COLLECTIVES, Link(10e-6 * slower, 450e9 / slower))
        plan = best_plan(blocks, PlanSetting(machine=replace(H100, near=links), plan_ngpus=4))
        cost, _ = evaluate_plan(plan, PlanSetting(machine=H100, plan_ngpus=4))
        sent.append(cost.communication_s)
    assert sent == sorted(sent, reverse=True)
    assert sent[0] > 0
    assert sent[-1] < 0.1 * sent[0]


def test_one_device_gives_one_stage_and_no_split(blocks):
    plan = best_plan(blocks, PlanSetting(machine=H100))
    assert plan.splits == {}
    assert plan.stages == ()
    assert plan.mesh == (1,)


def config(plan_ngpus=2, **options):
    return ComputeConfig(plan_ngpus=plan_ngpus, runtime_ngpus=plan_ngpus, pas_config={"costs": "h100"} | options)


def pipelined(graph, num_stages, micro=8, **options):
    """A plan of that many stages."""
    setting = PlanSetting(machine=H100, plan_ngpus=4, num_micro_batches=micro, **options)
    return best_plan(graph, setting, PlanRequest(num_stages=(num_stages,)))


def test_stages_are_the_best_of_all_divisions():
    draw = random.Random(0)
    for _ in range(20):
        times = [draw.random() for _ in range(8)]
        limit = draw.choice([1.5, 2.5, 9.0])

        def seconds(start, end, stage, times=times, limit=limit):
            taken = sum(times[start:end]) * (1 + 0.1 * stage)
            return taken if taken <= limit else None

        def cost(ends, seconds=seconds):
            taken = [seconds(*pair, number) for number, pair in enumerate(zip((0, *ends), ends, strict=False))]
            return None if None in taken else sum(taken) + 3 * max(taken)

        divisions = [(*cuts, 8) for cuts in combinations(range(1, 8), 2)]
        costs = [found for ends in divisions if (found := cost(ends)) is not None]
        ends = best_stages(8, 3, 4, seconds)
        if ends is None:
            assert not costs
        else:
            assert cost(ends) == pytest.approx(min(costs))


def test_a_pipeline_cuts_the_layers_evenly_and_counts_its_fill(blocks):
    plan = pipelined(blocks, 4)
    assert plan.mesh == (1,)
    assert plan.num_micro_batches == 8
    assert [len(stage) for stage in plan.stages] == [1, 1, 1, 1]
    setting = PlanSetting(machine=H100, plan_ngpus=4, num_micro_batches=8)
    costs = plan_costs(plan, setting)
    times = [stage.seconds for stage in costs.stages]
    assert costs.seconds == pytest.approx(sum(times) + 7 * max(times))
    kept = [stage.peaks["backward"] for stage in costs.stages]
    assert kept[0] > kept[2]  # the first stage keeps four micro-batches, the third two


def test_exploring_takes_stages_where_links_are_slow(blocks):
    slow = replace(H100, near=dict.fromkeys(COLLECTIVES, Link(10e-6, 20e9)))
    options = PlanRequest(num_stages=(1, 2, 4))
    plan = best_plan(blocks, PlanSetting(machine=slow, plan_ngpus=4, num_micro_batches=16), options)
    assert len(plan.stages) == plan.plan_ngpus == 4
    # One micro-batch fills no pipeline.
    assert best_plan(blocks, PlanSetting(machine=slow, plan_ngpus=4), options).stages == ()


def test_layers_are_recomputed_where_memory_is_short_and_as_few_as_must():
    graph = build_graph(on_meta(Blocks), {"x": torch.zeros(64, 128, 1024, device="meta")})
    setting = PlanSetting(machine=H100)
    free = plan_costs(best_plan(graph, setting), setting)
    numbers, seconds = [], []
    for share in (1.01, 0.85, 0.7):
        plan = best_plan(graph, replace(setting, memory_bytes=share * free.peak_bytes))
        costs = plan_costs(plan, setting)
        assert costs.peak_bytes <= share * free.peak_bytes
        numbers.append(len(plan.recompute))
        seconds.append(costs.seconds)
    assert numbers[0] == 0 < numbers[1] <= numbers[2]
    assert seconds[0] < seconds[1] <= seconds[2]


def test_generation_limits_memory_where_it_needs_more_than_training(blocks):
    weights = sum(value.num_bytes for value in blocks.of_kind("parameter").values())
    for use_zero, num_parts in ((False, 1), (True, 1), (False, 2), (True, 2)):
        generation = Generation(num_tokens=1, tensor_parallel=num_parts)
        setting = PlanSetting(machine=H100, plan_ngpus=2, num_units=2, use_zero=use_zero, generation=generation)
        stage = plan_costs(best_plan(blocks, setting), setting).stages[0]
        gathered = 0 if num_parts == 2 else weights  # a process holds its half; with ZeRO that is among its weights
        assert stage.peaks["generation"] == pytest.approx(stage.cost.resident_bytes + gathered)


def test_keys_and_values_are_counted_before_they_are_repeated():
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3, vocab_size=32
    )
    ids = torch.zeros(2, 8, dtype=torch.long)
    graph = build_graph(on_meta(lambda: LlamaForCausalLM(config)), {"input_ids": ids, "use_cache": False})
    ops = list(graph.ops.values())
    assert token_bytes(graph, PlanSetting(machine=H100), ops) == 3 * 2 * 2 * 16 * 4
    assert (
        token_bytes(graph, PlanSetting(machine=H100), [op for op in ops if ".layers.0." in op.path]) == 2 * 2 * 16 * 4
    )


def test_constraints_by_glob_hold_and_wrong_ones_are_refused(blocks, tmp_path):
    path = tmp_path / "constraints.yaml"

    def plan_with(*entries):
        path.write_text(yaml.safe_dump(list(entries)))
        return plan_by("autodist", blocks, config(partition_constraints_path=str(path)))

    plan = plan_with({"modules": "layers.*.up", "splits": ["*1"]}, {"modules": "layers.0.down", "splits": ["whole"]})
    assert plan.splits["layers.2.up:linear:0"] == ("*1",)
    assert "layers.0.down:linear:0" not in plan.splits
    for entry, match in [
        ({"modules": "layers.*.upp", "splits": ["n"]}, "entry 0: no op matches 'layers.*.upp'.*nearest are"),
        ({"modules": "layers.*.up", "splits": ["q"]}, r"no op of 'layers.*.up' has \['q'\]; they have"),
        ({"modules": "layers.*.up", "split": ["n"]}, "must have the keys 'modules' and 'splits'"),
        ({"modules": "layers.*.up", "splits": "n"}, "splits='n' must be a list"),
    ]:
        with pytest.raises(ValueError, match=match):
            plan_with(entry)


def test_a_plan_is_saved_and_loaded_by_options(blocks, tmp_path):
    path = str(tmp_path / "plan.json")
    plan = plan_by("autodist", blocks, config(save_plan_path=path, task_name="trial"))
    assert plan.notes["task"] == "trial"
    loaded = plan_by("autodist", blocks, config(load_plan_path=path))
    assert loaded == plan
    assert loaded == Plan.load(path, blocks)
    other = build_graph(on_meta(lambda: Blocks(2)), {"x": torch.zeros(8, 128, 1024, device="meta")})
    with pytest.raises(ValueError, match=r"is for another model: parameter layers\.2"):
        plan_by("autodist", other, config(load_plan_path=path))
    with pytest.raises(ValueError, match="the plan is for 2 processes, plan_ngpus=4"):
        plan_by("autodist", blocks, config(load_plan_path=path, plan_ngpus=4))


def test_a_plan_explains_itself_and_names_the_runner_up(blocks, capsys):
    options = config(plan_ngpus=4, verbose=True, mem_constraint=2)
    plan = plan_by("autodist", blocks, options)
    text = explain(plan, options)
    assert capsys.readouterr().out == text + "\n"
    costs = plan_costs(plan, PlanSetting(machine=H100, plan_ngpus=4, memory_bytes=2e9))
    assert (
        f"a step takes {1e3 * costs.seconds:.4g} ms, the most memory is {costs.peak_bytes / 1e9:.4g} GB of 2 GB" in text
    )
    assert "layers.0 to layers.3, 4 alike: " in text
    assert "  up linear: " + ", ".join(n or "whole" for n in plan.split_of(blocks.ops["layers.0.up:linear:0"])) in text
    slower = re.search(r"runner-up: [\d.]+ ms \(\+([\d.e-]+)%\)", text)
    assert slower
    whole = explain(Plan(graph=blocks, mesh=(4,)), options)
    assert re.search(r"runner-up: [\d.]+ ms \(-[\d.]+%\)", whole)


def measured(rank, world_size):
    return measure_machine(1 << 20, 2)


def test_links_are_measured_alike_by_all_processes():
    first, second = run_distributed(measured, 2)
    assert first.near == second.near
    assert set(first.near) == set(COLLECTIVES)
    first.check()
    assert first.collective_seconds("all_reduce", 1e6, 2, 1) > first.near["all_reduce"].latency_s


def test_the_command_refuses_a_process_that_is_alone_and_options_that_mean_nothing(capsys):
    leave_process_group()
    for arguments, match in [
        ([], "needs at least 2 processes; run `torchrun"),
        (["--megabytes", "0"], "--megabytes=0.0 must be at least 1"),
        (["--repeats", "0"], "--repeats=0 must be at least 1"),
    ]:
        assert cli.main(["measure-links", *arguments]) == 2
        assert match in capsys.readouterr().err
    leave_process_group()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"mem_constrain": 1},
            "pas_config.'mem_constrain'. is not an option of 'autodist'; did you mean 'mem_constraint'",
        ),
        ({"mem_constraint": 0}, "mem_constraint=0 must be a number above 0"),
        ({"update_freq": 1.5}, "update_freq=1.5 must be a number of at least 1"),
        ({"use_fp16": True, "use_bf16": True}, "exclude each other"),
        ({"use_fp16": 1}, "use_fp16=1 must be True or False"),
        ({"use_apex_fused_adam_v2": True}, "needs use_bf16 or use_fp16"),
        ({"parallel_profile": 1}, "parallel_profile=1 must be True or False"),
        ({"pipeline_scheduler": "zb"}, "pipeline_scheduler='zb' must be one of"),
        ({"pipeline_pivots": "layers.1"}, "needs explore_pipeline=True"),
        ({"costs": "h1000"}, "costs='h1000' must be one of"),
        ({"costs": "missing.json"}, "costs='missing.json' cannot be read"),
        ({"generation": {"num_tokens": 4}}, "must have num_tokens and tensor_parallel"),
        ({"generation": {"num_tokens": 4, "tensor_parallel": 3}}, "tensor_parallel=3 must divide plan_ngpus=2"),
    ],
)
def test_wrong_options_are_refused_by_name(blocks, options, match):
    with pytest.raises(ValueError, match=match):
        plan_by("autodist", blocks, config(**options))


def test_free_options_begin_with_an_underscore(blocks):
    assert plan_by("autodist", blocks, config(_mine=3)).splits


def test_a_measured_file_comes_back_and_a_wrong_one_is_refused(tmp_path):
    path = tmp_path / "costs.json"
    H100.save(path)
    assert Machine.load(path) == H100
    path.write_text(path.read_text().replace('"version": 1', '"version": 9'))
    with pytest.raises(ValueError, match="version=9, this is version 1"):
        Machine.load(path)
