"""Plans with stages train as the module does, in every schedule; what a plan recomputes changes no number."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_engine import ComputeConfig, deduped_state_dict, load_merged_state_dicts, parallelize
from hybrid_engine.extensions.parallelize.graph.graph import build_graph
from hybrid_engine.extensions.parallelize.planning.plan import Plan
from hybrid_engine.extensions.parallelize.planning.policies import equal_stages, replicated_plan
from tests.extensions.parallelize.test_checkpoints import gathered, make_optimizer, parallel_steps
from tests.support.distributed import leave_process_group, run_distributed
from tests.support.parallel_nets import Stack, build, plain_training, sample, samples_of
from tests.support.random_splits import random_plan

pytestmark = pytest.mark.torch_versions


@pytest.fixture(scope="module", autouse=True)
def _one_process_alone():
    leave_process_group()


class Views(torch.nn.Module):
    """What goes from its first part to its second, and its result, are views that are not stored row by row."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(4, 6), torch.nn.Linear(3, 5)

    def forward(self, sample):
        result = self.second(self.first(sample).t().expand(2, 6, 3)).transpose(1, 2)
        return result.square().mean(), result, result[0].t()


def step_of_views(rank, world_size, folder):
    config = ComputeConfig(2, 2, use_end2end=True, pas_config={"pipeline_nmicros": 2})
    module = parallelize(Views(), {"sample": torch.zeros(3, 4)}, "pp", config, gen_savedir=folder, reuse="override")
    samples = [torch.arange(12.0).view(3, 4) / 10, torch.ones(3, 4)]
    results = module.train_step(samples)
    return [[t.detach() for t in one] for one in results], {n: p.grad for n, p in module.named_parameters()}


def test_views_of_any_strides_go_from_stage_to_stage_and_to_all_processes(tmp_path):
    module = Views()
    expected = [module(x) for x in (torch.arange(12.0).view(3, 4) / 10, torch.ones(3, 4))]
    sum(loss for loss, *_ in expected).backward()
    gradients = {}
    for results, found in run_distributed(step_of_views, 2, tmp_path):
        torch.testing.assert_close(results, [[t.detach() for t in one] for one in expected])
        gradients |= found
    torch.testing.assert_close(gradients, {name: p.grad for name, p in module.named_parameters()})


LAYOUTS = {
    "pp": ("pp", 4, {}, {"pipeline_nmicros": 4}),
    "pp with ZeRO": ("pp", 2, {"use_zero": True}, {"pipeline_nmicros": 2}),
    "hybrid": ("hybrid", 4, {}, {"pipeline_nstages": 2, "pipeline_nmicros": 4, "pipeline_scheduler": "gpipe"}),
    "interleaved": ("pp", 2, {}, {"pipeline_nmicros": 2, "pipeline_scheduler": "1f1b_interleaved"}),
}


def make(folder, policy, plan_ngpus, options, pas_config):
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    config = ComputeConfig(
        plan_ngpus=plan_ngpus, runtime_ngpus=world_size, use_end2end=True, pas_config=pas_config, **options
    )
    return parallelize(build(), {"sample": sample(0)}, policy, config, gen_savedir=folder, reuse="override")


def three_steps(rank, world_size, folder):
    outcomes = {}
    merged = None
    for name, layout in LAYOUTS.items():
        module = make(folder, *layout)
        optimizer = make_optimizer(module, "adam")
        names = sorted(n for n, _ in module.named_parameters(remove_duplicate=False))
        norms = parallel_steps(module, optimizer, range(3))
        merged = gathered(*deduped_state_dict(module, optimizer))
        count = module.plan.num_micro_batches
        longer = module.infer_step([sample(number, 9) for number in range(count)])
        outcomes[name] = norms, merged, [(loss, logits) for loss, logits in longer], names
        outcomes[name, "shown"] = repr(module)
        if name in ERRORS:
            outcomes[name, "errors"] = [error_where(module, *case) for case in ERRORS[name]]
        if name in FORWARD_ERRORS:
            outcomes[name, "error"] = error_of_one(module)
    back = make(folder, "pp", 4, {}, {"pipeline_nmicros": 4})
    back_optimizer = make_optimizer(back, "adam")
    load_merged_state_dicts(back, merged[0], back_optimizer, merged[1])
    outcomes["back"] = parallel_steps(back, back_optimizer, range(3, 5))
    return outcomes


def fail(gradient):
    raise RuntimeError(f"no gradient on rank {dist.get_rank()}")


def fails_backward(loss):
    loss.register_hook(fail)
    return loss


ERRORS = {"pp": [("parameter", 1)], "pp with ZeRO": [("backward", 3), ("loss", 3)]}
"""Where, and on which process, the backward pass or the loss fails."""
FORWARD_ERRORS = ("pp with ZeRO", "interleaved")


def error_where(module, where, rank):
    """What this process raises, and how many results it has in the next step."""
    is_here = dist.get_rank() == rank
    hook = next(module.parameters()).register_hook(fail) if is_here and where == "parameter" else None
    scale_fn = {"backward": fails_backward, "loss": fail}.get(where) if is_here else None
    samples = samples_of(0, module.plan.num_micro_batches)
    with pytest.raises(RuntimeError, match=f"no gradient on rank {rank}") as caught:
        module.train_step(samples, scale_fn=scale_fn)
    if hook is not None:
        hook.remove()
    return str(caught.value), len(module.train_step(samples))


def error_of_one(module):
    """What each process raises where the sample of one unit has a token that there is not, and whether it goes on."""
    wrong = sample(0) if dist.get_rank() > 1 else {**sample(0), "ids": torch.full((4, 6), 99)}
    with pytest.raises(Exception, match=r"out of (range|bounds)") as caught:
        module.train_step([wrong, wrong])
    return str(caught.value), len(module.train_step([sample(0), sample(1)]))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_distributed(three_steps, 4, tmp_path_factory.mktemp("pipelines"), seconds=200)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_stages_train_as_the_module_does(outcomes, name):
    weights, expected_norms = plain_training("adam", 3)
    for of_rank in outcomes:
        torch.testing.assert_close(of_rank[name][0], expected_norms, rtol=1e-5, atol=1e-6)
    merged = outcomes[0][name][1]
    for key, weight in weights.items():
        torch.testing.assert_close(merged[0][key], weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_every_process_gets_all_results_also_for_another_length(outcomes, name):
    module = build()
    module.load_state_dict(outcomes[0][name][1][0])
    for of_rank in outcomes:
        for number, found in enumerate(of_rank[name][2]):
            torch.testing.assert_close(
                found, tuple(t.detach() for t in module(sample(number, 9))), rtol=1e-5, atol=1e-5
            )


def test_a_process_holds_the_parameters_of_its_stages_alone(outcomes):
    names = [name for of_rank in outcomes for name in of_rank["pp"][3]]
    tied = {"embed.weight", "head.weight"}
    assert {name: names.count(name) for name in names} == {
        name: 2 if name in tied else 1 for name, _ in Stack().named_parameters(remove_duplicate=False)
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_modules_in_stages_are_shown_whole(outcomes, name):
    for outcome in outcomes:
        assert all(f"({child}): " in outcome[name, "shown"] for child, _ in build().named_children())


def test_a_checkpoint_of_stages_goes_on_in_others(outcomes):
    assert outcomes[0]["back"] == pytest.approx(plain_training("adam", 5)[1][3:], rel=1e-5)


@pytest.mark.parametrize("name", FORWARD_ERRORS)
def test_an_error_of_one_process_is_raised_on_all_which_go_on(outcomes, name):
    for of_rank in outcomes:
        text, num_results = of_rank[name, "error"]
        assert "out of" in text
        assert num_results == 2


@pytest.mark.parametrize("name", list(ERRORS))
def test_an_error_of_a_backward_pass_is_raised_on_all_which_go_on(outcomes, name):
    for rank, of_rank in enumerate(outcomes):
        for (_, failing), (text, num_results) in zip(ERRORS[name], of_rank[name, "errors"], strict=True):
            assert text == f"{'' if rank == failing else f'rank {failing}: '}no gradient on rank {failing}"
            assert num_results == LAYOUTS[name][3]["pipeline_nmicros"]


def graph_of_stack():
    return build_graph(build(), {"sample": sample(0)})


def test_stages_are_about_equal_and_in_the_order_in_which_modules_run():
    stages = equal_stages(graph_of_stack(), 2)
    assert [path for stage in stages for path in stage] == ["embed", "blocks.0", "blocks.1", "norm", "head"]
    assert stages[0] == ("embed", "blocks.0")


class Turns(torch.nn.Module):
    """Runs its first layers in turns, and another one behind them."""

    def __init__(self):
        super().__init__()
        self.there, self.back, self.last = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return self.last(self.back(self.there(self.back(self.there(x)))).tanh()).sum()


def test_modules_that_run_in_turns_stay_in_one_stage():
    graph = build_graph(Turns(), {"x": torch.randn(2, 4)})
    assert equal_stages(graph, 2) == (("there", "back"), ("last",))
    with pytest.raises(ValueError, match=r"has 2 modules that .*\['there with back', 'last'\], for 3 stages"):
        equal_stages(graph, 3)


@pytest.mark.parametrize(
    ("policy", "options", "pas_config", "match"),
    [
        ("hybrid", {}, {}, "needs pas_config.'pipeline_nmicros'"),
        ("hybrid", {}, {"pipeline_nmicros": 2, "pipeline_nstages": 3}, "pipeline_nstages=3 must share plan_ngpus=4"),
        ("pp", {}, {"pipeline_scheduler": "1f1b_plus"}, "'1f1b_plus' is not one of PyTorch's; take '1f1b'"),
        ("pp", {}, {"pipeline_scheduler": "chimera_direct"}, "take '1f1b_interleaved'"),
        ("pp", {}, {"pipeline_scheduler": "x"}, "must be one of .'gpipe'"),
        ("pp", {}, {"pipeline_nmicros": 2}, "pipeline_nmicros=2 must be at least the number of stages, 4"),
        ("pp", {"use_end2end": False}, {}, "needs use_end2end=True"),
        ("pp", {"inference_only": True}, {"pipeline_scheduler": "1f1b"}, "inference_only=True does not go with"),
        ("pp", {}, {"pipeline_scheduler": "infer_pipe"}, "inference_only=False does not go with"),
        ("pp", {"plan_ngpus": 8}, {}, "has 5 modules .* for 8 stages"),
    ],
)
def test_stages_that_cannot_be_run_are_refused(tmp_path, policy, options, pas_config, match):
    options = {"plan_ngpus": 4, "runtime_ngpus": 8, "use_end2end": True} | options
    config = ComputeConfig(**options, pas_config=pas_config)
    with pytest.raises(ValueError, match=match):
        parallelize(build(), {"sample": sample(0)}, policy, config, gen_savedir=tmp_path, load_module=False)


@pytest.mark.parametrize(
    ("stages", "match"),
    [
        ((("blocks", "norm", "head"), ("embed",)), "blocks.0.up:linear:0 of stage 0 reads what stage 1 makes"),
        ((("embed",), ("blox",)), "stages.1. has 'blox', which is no module"),
    ],
)
def test_stages_that_do_not_follow_each_other_are_refused(stages, match):
    with pytest.raises(ValueError, match=match):
        Plan(graph=graph_of_stack(), mesh=(1,), stages=stages, num_micro_batches=2).check_runs()


def recomputing(graph, config):
    plan = random_plan(graph, (2,), 3) if config.plan_ngpus == 2 else replicated_plan(graph, (1,))
    plan.recompute = config.pas_config["_recompute"]
    return plan


def recomputed_steps(rank, world_size, folder):
    module = make(folder, recomputing, 2, {}, {"_recompute": ("blocks.*",)})
    return parallel_steps(module, make_optimizer(module, "adam"), range(3))


def test_what_is_recomputed_on_two_processes_changes_no_number(tmp_path):
    norms = run_distributed(recomputed_steps, 2, tmp_path)[1]
    torch.testing.assert_close(norms, plain_training("adam", 3)[1], rtol=1e-5, atol=1e-6)


class Calls(TorchDispatchMode):
    """Counts the calls of `gelu`."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.gelu.default
        return func(*args, **(kwargs or {}))


def test_the_ops_of_a_recomputed_module_run_twice_and_those_of_others_once(tmp_path):
    counts, gradients = [], []
    for globs in ((), ("blocks.1",), ("blocks.*",)):
        module = make(tmp_path, recomputing, 1, {}, {"_recompute": globs})
        module.train_step(samples_of(0, 1))  # traces the graph for these shapes, which calls its ops too
        with Calls() as calls:
            module.train_step(samples_of(0, 1))
        counts.append(calls.count)
        gradients.append([p.grad for p in module.parameters()])
    assert counts == [2, 3, 4]
    torch.testing.assert_close(gradients[1:], [gradients[0]] * 2, rtol=0, atol=0)


def test_a_module_that_is_not_there_is_not_recomputed(tmp_path):
    with pytest.raises(ValueError, match=r"recompute='layers\.\*' is no module of the graph"):
        make(tmp_path, recomputing, 1, {}, {"_recompute": ("layers.*",)})
