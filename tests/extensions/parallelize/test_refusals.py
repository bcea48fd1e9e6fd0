"""What `parallelize` refuses, on every process, and what becomes of the others where one process alone has an error."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hybrid_engine import (
    ComputeConfig,
    Plan,
    build_optimizer,
    deduped_state_dict,
    load_deduped_state_dict,
    load_merged_state_dicts,
    parallelize,
)
from tests.support.distributed import leave_process_group, run_to_the_end
from tests.support.parallel_nets import Stack, build, sample
from tests.support.random_splits import random_splits


@pytest.fixture(scope="module", autouse=True)
def _one_process_alone():
    leave_process_group()


class Outer(nn.Module):
    """Two linears."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x))


class Unreduced(Stack):
    """Its first result is no number."""

    def forward(self, sample):
        loss, logits = super().forward(sample)
        return logits, loss


class Table(nn.Module):
    """A buffer that no checkpoint has and nobody filled."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.empty(8, device="meta"), persistent=False)

    def forward(self, x):
        return self.linear(x) + self.table


def make(folder, module, policy="dp", arguments=None, **changes):
    options = {"plan_ngpus": 1, "runtime_ngpus": dist.get_world_size(), "use_end2end": True} | changes
    config = ComputeConfig(**options)
    return parallelize(module, arguments or {"sample": sample(0)}, policy, config, gen_savedir=folder, reuse="override")


X = {"x": torch.ones(4, 8)}


def nested(folder):
    outer = Outer()
    outer.first = make(folder, outer.first, arguments={"input": X["x"]}, use_end2end=False)
    make(folder, outer, arguments=X, use_end2end=False)


def parts_of_different_units(folder):
    outer = Outer()
    linear = {"arguments": {"input": X["x"]}, "use_end2end": False}
    outer.first = make(folder, outer.first, **linear)
    outer.second = make(folder, outer.second, "data", plan_ngpus=2, **linear)
    build_optimizer(outer, torch.optim.SGD, lr=0.1)


def step_of(folder, module, count=1, **options):
    make(folder, module, **options).train_step([sample(0)] * count)


def stages(micros, **options):
    return {"policy": "pp", "plan_ngpus": 2, "pas_config": {"pipeline_nmicros": micros}} | options


def apart(folder, **options):
    """Rank 1 is given something else."""
    make(folder, nn.Linear(8, 8), arguments={"input": X["x"]}, **options if dist.get_rank() else {"use_end2end": False})


def swapped_checkpoints(folder):
    """Each process loads what the other one saved, of which the shapes are the same."""
    module = make(folder, build(), random_splits(), plan_ngpus=2)
    mine = deduped_state_dict(module)[0]
    torch.save(mine, folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    load_deduped_state_dict(module, mine)
    load_deduped_state_dict(module, torch.load(folder / f"{1 - dist.get_rank()}.pt", weights_only=False))


def with_two_names(graph, config):
    return Plan(graph=graph, mesh=(1,), notes={"second": True})


def with_one_name(graph, config):
    return Plan(graph=graph, mesh=(1,))


def linear(folder, policy="dp", arguments=None, **options):
    given = {"input": X["x"]} if arguments is None else arguments
    return make(folder, nn.Linear(8, 8), policy, given, use_end2end=False, **options)


def optimizer_of(folder, **kwargs):
    return build_optimizer(linear(folder), torch.optim.SGD, **kwargs)


def of_rank(*values):
    return values[dist.get_rank()]


REFUSED = {
    "another policy on rank 1": (
        lambda folder: linear(folder, of_rank("dp", "data")),
        "pas_policy='dp' on rank 0 and 'data' on rank 1; pass the same on all processes",
    ),
    "another callable on rank 1": (
        lambda folder: linear(folder, of_rank(with_one_name, with_two_names)),
        "pas_policy=.*with_one_name on rank 0 and .*with_two_names on rank 1",
    ),
    "another option of the policy on rank 1": (
        lambda folder: linear(folder, "pp", plan_ngpus=2, pas_config={"pipeline_nmicros": of_rank(1, 2)}),
        r"pas_config\['pipeline_nmicros'\]=1 on rank 0 and 2 on rank 1",
    ),
    "one option more on rank 1": (
        lambda folder: linear(folder, "pp", plan_ngpus=2, pas_config=of_rank({}, {"pipeline_nmicros": 1})),
        r"pas_config=a dict of \[\] on rank 0 and a dict of \['pipeline_nmicros'\] on rank 1",
    ),
    "another user_config on rank 1": (
        lambda folder: linear(folder, user_config={"long": "a" * 200 + of_rank("b", "c")}),
        r"user_config\['long'\]=\.\.\.a+b'\.\.\. on rank 0 and \.\.\.a+c'\.\.\. on rank 1",
    ),
    "a longer sample on rank 1": (
        lambda folder: linear(folder, arguments={"input": torch.ones(4 + dist.get_rank(), 8)}),
        r"dummy_forward_args\['input'\]=\[4, 8\] torch.float32 on rank 0 and \[5, 8\] torch.float32 on rank 1",
    ),
    "a class on rank 1": (
        lambda folder: make(folder, of_rank(Outer(), Outer), arguments=X, use_end2end=False),
        "module_or_module_class=an object of .*Outer on rank 0 and the class .*Outer on rank 1",
    ),
    "a module in evaluation on rank 1": (
        lambda folder: make(folder, of_rank(Outer(), Outer().eval()), arguments=X, use_end2end=False),
        "the module's training=True on rank 0 and False on rank 1",
    ),
    "an option that the optimizer lacks on rank 1": (
        lambda folder: optimizer_of(folder, **of_rank({"lr": 0.1}, {"lrr": 0.1})),
        "lrr=0.1 is not an option of optimizer_fn=torch.optim.sgd.SGD; did you mean 'lr'",
    ),
    "another learning rate on rank 1": (
        lambda folder: optimizer_of(folder, lr=of_rank(0.1, 0.2)),
        "group 0 of the optimizer: lr=0.1 on rank 0 and 0.2 on rank 1",
    ),
    "a scale of two arguments on rank 1": (
        lambda folder: make(folder, build()).train_step([sample(0)], scale_fn=of_rank(None, lambda a, b: a)),
        "scale_fn=.* must be a callable of one argument, the loss",
    ),
    "a scale of two arguments in a unit": (
        lambda folder: make(folder, build(), "data", plan_ngpus=2).train_step([sample(0)], scale_fn=lambda a, b: a),
        "scale_fn=.* must be a callable of one argument, the loss",
    ),
    "a checkpoint of another model on rank 1": (
        lambda folder: load_merged_state_dicts(linear(folder), nn.Linear(8, of_rank(8, 9)).state_dict()),
        r"'weight' has shape \[9, 8\] in module_state_dict and \[8, 8\] in the module",
    ),
    "another config on rank 1": (
        lambda folder: apart(folder, use_zero=True, use_end2end=False),
        "use_zero=False on rank 0 and True on rank 1; pass the same on all processes",
    ),
    "another model on rank 1": (
        lambda folder: make(folder, nn.Linear(8, 8 + dist.get_rank()), arguments={"input": X["x"]}, use_end2end=False),
        "is for another model: parameter weight has shape",
    ),
    "a wrong value on rank 1": (
        lambda folder: make(folder, build(), policy=["dp", 3][dist.get_rank()]),
        "pas_policy=3 must be one of",
    ),
    "checkpoints of the other process": (swapped_checkpoints, "module_state_dict"),
    "a parallel module in one": (nested, "'first' of the module is parallel already; parallelize the parts, or"),
    "parts of different units": (parts_of_different_units, r"have plan_ngpus of \[1, 2\]; all must have the same"),
    "a first result that is no loss": (
        lambda folder: step_of(folder, build(Unreduced)),
        "first result of an end-to-end module must be its loss",
    ),
    "the same in stages": (
        lambda folder: step_of(folder, build(Unreduced), 2, **stages(2)),
        "first result of an end-to-end module must be its loss",
    ),
    "too few samples": (
        lambda folder: step_of(folder, build(), 3, **stages(2)),
        "3 samples are given; with stages there must be as many as pipeline_nmicros=2",
    ),
    "a buffer that nobody filled": (
        lambda folder: make(folder, Table(), arguments=X, use_end2end=False)(**X),
        r"buffers \['table'\] were never initialised; load a state dict that has them",
    ),
    "dp with units of two": (
        lambda folder: make(folder, build(), plan_ngpus=2),
        "policy 'dp' needs plan_ngpus=1, not 2",
    ),
}


def raised(call, *args, **options):
    """The error in words, None where there is none."""
    try:
        call(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def fails_on_rank_1(loss):
    if dist.get_rank():
        raise OSError("no loss here")
    return loss


def refusals(rank, world_size, folder):
    """What every case raises, what an error of rank 1 does in `dp`, and what a pipeline for inference gives."""
    found = {name: raised(case, folder / name) for name, (case, _) in REFUSED.items()}
    module = make(folder, build())
    alone = raised(module.train_step, [sample(rank)], scale_fn=fails_on_rank_1), len(module.train_step([sample(rank)]))
    options = stages(2, inference_only=True)
    options["pas_config"]["pipeline_scheduler"] = "infer_pipe"
    pipe = make(folder, build(), **options)
    refused = raised(pipe.train_step, [sample(0), sample(1)])
    results = [(loss, logits) for loss, logits in pipe.infer_step([sample(0), sample(1)])]
    longer = pipe.infer_step([sample(2, 9), sample(3, 9)])[1][1]
    return found, alone, (refused, results, longer, len(list(pipe.parameters())))


def ends_alone(rank, world_size, folder, policy):
    """What the other process of a unit raises whose first one stops in the middle of a step, and ends."""
    module = make(folder / str(policy), build(), policy, plan_ngpus=2)

    def fail(gradient):
        raise OSError("no gradient here")

    if rank:
        next(module.parameters()).register_hook(fail)
        module.train_step([sample(0)])
    return raised(lambda: [module.train_step([sample(0)]) for _ in range(3)])


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusals")
    return run_to_the_end([(refusals, folder), (ends_alone, folder, "data")], seconds=280)


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_wrong_is_refused_on_every_process(outcomes, name):
    for found, _, _ in outcomes[0]:
        assert found[name] is not None
        assert re.match(f"ValueError: .*{REFUSED[name][1]}", found[name]), found[name]


def test_an_error_of_one_process_under_dp_is_raised_on_all_which_go_on(outcomes):
    texts = [alone for _, alone, _ in outcomes[0]]
    assert texts == [("OSError: rank 1: no loss here", 1), ("OSError: no loss here", 1)]


def test_a_pipeline_for_inference_gives_every_process_what_the_module_gives(outcomes):
    module = build().eval()
    module.requires_grad_(False)
    for _, _, (refused, results, longer, _) in outcomes[0]:
        assert refused.startswith("ValueError: inference_only=True: train_step needs a plan for training")
        for number, result in enumerate(results):
            torch.testing.assert_close(result, module(sample(number)), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(longer, module(sample(3, 9))[1], rtol=1e-5, atol=1e-6)


def test_a_process_that_ends_in_the_middle_of_a_step_ends_the_others_of_its_unit_before_any_time_limit(outcomes):
    first, second = outcomes[1]
    assert second is None
    assert first.startswith("RuntimeError: rank 1: OSError: no gradient here")
