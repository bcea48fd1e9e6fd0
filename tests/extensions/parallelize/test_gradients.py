"""Gradients that a module's code makes by itself are those of the plain module, or refused by name; so are writes."""

import copy
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook
from torch.utils.checkpoint import checkpoint

from hybrid_engine import ComputeConfig, Plan, build_optimizer, merge_state_dicts, parallelize, register_op
from hybrid_engine.extensions.parallelize.module.reducer import GradientSums
from tests.support.distributed import leave_process_group, run_distributed
from tests.support.raised import message
from tests.support.random_splits import random_splits


@pytest.fixture(scope="module", autouse=True)
def _one_process_alone():
    leave_process_group()


def parallel(folder, module, policy="dp", num_processes=1, arguments=None, load_module=True, **options):
    config = ComputeConfig(num_processes, **{"runtime_ngpus": num_processes, **options})
    arguments = arguments or {"x": torch.randn(4, 8)}
    return parallelize(module, arguments, policy, config, gen_savedir=folder, load_module=load_module)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor, name=None):
        return x.sign() * factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None, None


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Pair(torch.autograd.Function):
    """Two results, neither of whose gradients is that of its ops."""

    @staticmethod
    def forward(x, y):
        return x * 2, y + x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, first, second):
        x, y = ctx.saved_tensors
        return first * x, second * y


class InPlace(Reversed):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(1)


reverse = Reversed.apply  # taken before any trace, as modules often do


@register_op("* -> *")
def registered(x: Tensor) -> Tensor:
    return Reversed.apply(x)


def pair(x: Tensor) -> Tensor:
    first, second = Pair.apply(x, x.detach() + 1)
    return first * second


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        return Reversed.apply(x)


FUNCTIONS = {
    "number and text": lambda x: StraightThrough.apply(x, 3, "text"),
    "bound before": reverse,
    "two results": pair,
    "registered": registered,
    "no gradient": lambda x: x + without_gradient(x),
    "rrelu": lambda x: torch.rrelu(x, training=True),
}


class Calling(nn.Module):
    """It also writes into a buffer, for which its ops are traced twice."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.function = function
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.last(self.function(self.first(x)))


def gradients(module, *inputs):
    """Of the module's sums, by parameter; random numbers are drawn from the same seed."""
    module.zero_grad()
    for x in inputs:
        torch.manual_seed(1)
        module(x).square().sum().backward()
    return {
        name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for name, p in module.named_parameters()
    }


def build(function):
    torch.manual_seed(0)
    return Calling(function)


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_a_custom_backward_pass_is_that_of_the_module_for_every_shape(tmp_path, name):
    module = build(FUNCTIONS[name])
    poisoned = patch("torch.empty_like", lambda x, **options: torch.full_like(x, torch.nan, **options))
    run, inputs = parallel(tmp_path, module), (torch.randn(4, 8), torch.randn(3, 8))
    with poisoned:
        torch.testing.assert_close(gradients(run, *inputs), gradients(module, *inputs))


def with_saved(pack, compute):
    """The result of `compute`, whose backward pass reads what `pack` makes of saved tensors."""
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        return compute()


REFUSED = {
    "argument": (lambda x: StraightThrough.apply(x, lambda: 3), "StraightThrough.apply is given .*register_op"),
    "in place": (lambda x: InPlace.apply(x * 1), "InPlace.apply writes into its arguments"),
    "tensor": (
        lambda x: (x.register_hook(lambda g: -g), x)[1],
        r"test_gradients.py:\d+: register_hook\(\) puts",
    ),
    "tensors": (
        lambda x: (torch.autograd.graph.register_multi_grad_hook([x], lambda g: None), x)[1],
        r"register_multi_grad_hook\(\) puts a hook",
    ),
    "node": (
        lambda x: (x.grad_fn.register_hook(lambda inputs, _: tuple(None if g is None else -g for g in inputs)), x)[1],
        r"grad_fn.register_hook\(\) puts a hook",
    ),
    "node before": (
        lambda x: (x.grad_fn.register_prehook(lambda outputs: tuple(None if g is None else -g for g in outputs)), x)[1],
        r"grad_fn.register_prehook\(\) puts a hook",
    ),
    "saved": (
        lambda x: with_saved(lambda saved: -saved, lambda: x * x),
        r"saved_tensors_hooks\(\) changes what a backward pass reads",
    ),
    "reentrant": (
        lambda x: checkpoint(torch.tanh, x, use_reentrant=True),
        "use_reentrant=True hides its gradients .*pass use_reentrant=False",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_a_graph_would_lose_of_a_forward_pass_is_refused_by_name(tmp_path, name):
    function, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        parallel(tmp_path, build(function))
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: 2 * gradient)  # hooks are PyTorch's own again
    Reversed.apply(x).sum().backward()
    assert x.grad.tolist() == [-2, -2]
    assert type((x * 1).grad_fn).__name__ == "MulBackward0"


HOOKS = {
    "full": lambda module: module.last.register_full_backward_hook(lambda m, inputs, _: (-inputs[0],)),
    "pre": lambda module: module.last.register_full_backward_pre_hook(lambda m, outputs: (-outputs[0],)),
}


@pytest.mark.parametrize("name", list(HOOKS))
def test_backward_hooks_of_modules_are_kept_by_their_own_code_alone(tmp_path, name):
    module = build(torch.tanh)
    HOOKS[name](module)
    with pytest.raises(ValueError, match=r"'last' has backward hooks.*lowering='eager'"):
        parallel(tmp_path, module)
    with pytest.raises(ValueError, match="'last' has backward hooks"):
        parallel(tmp_path, module, "tp", 2, load_module=False, lowering="eager")
    x = torch.randn(4, 8)
    torch.testing.assert_close(gradients(parallel(tmp_path, module, lowering="eager"), x), gradients(module, x))
    assert not parallel(tmp_path / "inference", module, inference_only=True).eval()(x).isnan().any()


@pytest.mark.parametrize("name", ["tensor", "node", "node before", "saved", "reentrant"])
def test_so_are_hooks_and_checkpoints_of_a_forward_pass(tmp_path, name):
    module, x = build(REFUSED[name][0]), torch.randn(4, 8)
    torch.testing.assert_close(gradients(parallel(tmp_path, module, lowering="eager"), x), gradients(module, x))


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_refused_whatever_runs(tmp_path, register):
    module = build(torch.tanh)
    handle = getattr(module.first.weight, register)(lambda gradient: None)
    for lowering in ("graph", "eager"):
        with pytest.raises(ValueError, match=r"parameter 'first.weight' has gradient hooks"):
            parallel(tmp_path, module, lowering=lowering)
    handle.remove()
    parallel(tmp_path, module)


def test_hooks_of_all_modules_are_refused(tmp_path):
    handle = register_module_full_backward_hook(lambda *_: None)
    try:
        with pytest.raises(ValueError, match="hooks for all modules"):
            parallel(tmp_path, build(torch.tanh))
    finally:
        handle.remove()


def test_a_graph_with_a_custom_function_is_not_kept_in_a_file(tmp_path):
    with pytest.raises(ValueError, match=r"custom autograd.Function.*pass broadcast_strategy='none'"):
        parallelize(
            build(reverse), {"x": torch.randn(4, 8)}, "dp", ComputeConfig(1, 1), gen_savedir=tmp_path, reuse="graph"
        )


class Cached(nn.Module):
    """What its caller keeps, as a cache of keys, is filled in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, cache, place: int):
        y = self.linear(x)
        cache["keys"][:, place] = y
        return y + cache["keys"].sum(1)


def test_what_a_forward_pass_writes_into_an_argument_is_there_with_its_gradient(tmp_path):
    module = Cached()
    caches = [{"keys": torch.zeros(4, 3, 8)} for _ in range(3)]
    arguments = {"x": torch.randn(4, 8), "cache": caches[0], "place": 0}
    run = parallel(tmp_path, module, arguments=arguments)
    for place in range(3):
        x = torch.randn(4, 8)
        torch.testing.assert_close(run(x, caches[1], place), module(x, caches[2], place))
        torch.testing.assert_close(caches[1]["keys"], caches[2]["keys"])
    for cache in caches[1:]:
        cache["keys"].square().sum().backward()
    torch.testing.assert_close(run.linear.weight.grad, module.linear.weight.grad)
    assert not caches[0]["keys"].any()


class Shrinking(Cached):
    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.mul_(0.5)
        return self.linear(x)


def test_what_it_writes_into_a_parameter_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"writes into the parameter 'linear.weight'"):
        parallel(tmp_path, Shrinking())


class Layers(nn.Module):
    """A counter that nothing is computed from, and one by which layers are scaled; a batch norm in each layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, sample):
        self.calls += 1
        for layer in self.layers:
            sample = sample + layer(sample) * self.calls
        return reverse(sample).square().sum()


def inputs(number):
    return torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def interleaved(rank, world_size, folder):
    """The state after a step of two stages a process, and the gradients of a Function in two kinds of units."""
    torch.manual_seed(0)
    pipeline = {"pipeline_nmicros": 4, "pipeline_scheduler": "1f1b_interleaved"}
    options = {"use_end2end": True, "pas_config": pipeline}
    run = parallel(folder / "pp", Layers().double(), "pp", 2, {"sample": inputs(0)}, **options)
    run.train_step([inputs(number) for number in range(4)])
    states = [None, None]
    dist.all_gather_object(states, run.state_dict())
    state = merge_state_dicts(states)[0]
    found = {
        name: gradients(parallel(folder / name, build(FUNCTIONS[name]), random_splits(), 2), inputs(9).float())
        for name in ("two results", "rrelu")
    }
    gradient = {name: p.grad for name, p in run.named_parameters()}
    return state, gradient, found


def test_a_buffer_is_changed_once_a_sample_by_two_stages_of_a_process(tmp_path):
    torch.manual_seed(0)
    plain = Layers().double()
    for number in range(4):
        plain(inputs(number)).backward()
    for state, gradient, found in run_distributed(interleaved, 2, tmp_path):
        torch.testing.assert_close(state, dict(plain.state_dict()))
        for name, value in gradient.items():
            torch.testing.assert_close(value, plain.get_parameter(name).grad)
        for name, value in found.items():
            torch.testing.assert_close(value, gradients(build(FUNCTIONS[name]), inputs(9).float()))


class OneNorm(Layers):
    """A batch norm that is called after each layer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, sample):
        for layer in self.layers:
            sample = self.norm(layer(sample))
        return sample.square().sum()


class Filling(Layers):
    def forward(self, sample):
        result = super().forward(sample)
        sample.zero_()
        return result


def in_two_stages(graph, config):
    stages = [["layers.0", "layers.1"], ["layers.2", "layers.3"]]
    return Plan(graph=graph, mesh=(1,), stages=stages, num_micro_batches=2)


CHANGED = {
    OneNorm: "the buffer 'norm.running_mean' is changed in stage 1 and read in stage 0",
    Filling: "forward writes into its argument 'sample', of which each stage has a copy",
}


@pytest.mark.parametrize("kind", list(CHANGED))
def test_what_several_stages_would_have_to_change_is_refused(tmp_path, kind):
    pipeline = {"use_end2end": True}
    with pytest.raises(ValueError, match=CHANGED[kind]):
        parallel(tmp_path, kind(), in_two_stages, 2, {"sample": inputs(0).float()}, load_module=False, **pipeline)


def clipped(rank, world_size, folder):
    """Of a unit a process: the words for a clip before the sum, and how far weights are after one that comes later."""
    found = []
    for options in ({}, {"use_zero": True}):
        module = build(torch.tanh)
        plain = copy.deepcopy(module)
        run = parallel(folder / str(len(options)), module, runtime_ngpus=2, **options)
        optimizer, theirs = (build_optimizer(run, torch.optim.SGD, lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1))
        run(inputs(rank).float()).square().sum().backward()
        nn.utils.clip_grad_norm_(run.parameters(), 0.5)
        words = message(optimizer.sync_shard_grad)
        optimizer.zero_grad()
        run(inputs(rank).float()).square().sum().backward()
        sum(plain(inputs(unit).float()).square().sum() for unit in range(2)).backward()
        optimizer.sync_shard_grad()
        for one, step in ((run, optimizer), (plain, theirs)):
            nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            step.step()
        whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in run.named_parameters()}
        found.append((words, max((whole[name] - p).abs().max().item() for name, p in plain.named_parameters())))
    return found


def uneven(rank, world_size, folder):
    """What steps of one and two samples say: of units with ZeRO and without, and of the processes of one unit."""
    words = []
    for number, (policy, size, options) in enumerate([("dp", 1, {"use_zero": True}), ("dp", 1, {}), ("data", 2, {})]):
        options = {"use_end2end": True, "runtime_ngpus": 2, **options}
        run = parallel(folder / str(number), Layers(), policy, size, {"sample": inputs(0)[:4].float()}, **options)
        build_optimizer(run, torch.optim.SGD, lr=0.1)
        words.append(message(lambda run=run: run.train_step([inputs(0)[:4].float()] * (1 + rank))))
        run.train_step([inputs(0)[:4].float()])
    return words


def of_two_units(rank, world_size, folder):
    return clipped(rank, world_size, folder / "clipped"), uneven(rank, world_size, folder / "uneven")


def test_units_clip_what_is_summed_and_have_as_many_samples_where_they_meet(tmp_path):
    for found, words in run_distributed(of_two_units, 2, tmp_path, seconds=60):
        assert "clip_gnorm()" in found[0][0]
        assert found[1][0] == ""  # ZeRO sums within the backward pass
        assert all(difference < 1e-6 for _, difference in found), found
        assert "have [1, 2], and all processes, whose gradients ZeRO sums" in words[0]
        assert words[1] == ""
        assert "have [1, 2], and the processes of one unit must have equally many" in words[2]


def wrong_sizes(rank, world_size, folder):
    """The words for inputs of other sizes on rank 1: one that cannot be traced, and one that can; and in stages."""
    run = parallel(
        folder / "tp", nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), random_splits(), 2, {"input": torch.randn(4, 8)}
    )
    words = [message(lambda shape=shape: run(torch.randn(shape))) for shape in ((4, 8 - rank), (4 + rank, 8))]
    run(torch.randn(4, 8)).sum().backward()
    options = {"use_end2end": True, "pas_config": {"pipeline_nmicros": 2}}
    run = parallel(folder / "pp", Layers(), "pp", 2, {"sample": inputs(0).float()}, **options)
    words.append(message(lambda: run.train_step([inputs(0)[rank:].float()] * 2)))
    run.train_step([inputs(0).float()] * 2)
    return words


def test_a_batch_of_a_wrong_size_on_one_process_is_an_error_on_all_of_its_unit(tmp_path):
    for words in run_distributed(wrong_sizes, 2, tmp_path, seconds=60):
        for text, shapes in zip(
            words, ("[[4, 8]] and [[4, 7]]", "[[4, 8]] and [[5, 8]]", "[[5, 8]] and [[4, 8]]"), strict=True
        ):
            assert f"the processes of a unit are given tensors of shapes {shapes}" in text


class Scaled(nn.Module):
    """Its dropout and its number are in the graph."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))

    def forward(self, x, factor=2):
        return self.layers(x) * factor


def other_beginnings(rank, world_size, folder):
    """The words where rank 1 begins a pass otherwise: by a number, by a mode, without gradients, by a size."""
    words, x = [], torch.ones(4, 8)
    for number, (policy, lowering) in enumerate([(random_splits(), "graph"), ("data", "eager")]):
        run = parallel(folder / str(number), Scaled(), policy, 2, {"x": x, "factor": 2}, lowering=lowering)
        words.append(message(partial(run, x, 2 + rank)))
        run.train(rank == 0)
        words.append(message(partial(run, x)))
        run.train()
        with torch.set_grad_enabled(rank == 0):
            words.append(message(partial(run, x)))
        words.append(message(partial(run, x[rank:])))
        run(x).sum().backward()
    return words


def test_processes_of_a_unit_that_begin_a_pass_otherwise_are_told_before_it(tmp_path):
    texts = ("other arguments [2] and [3]", "parts in training", "gradients on) and ", "[[4, 8]] and [[3, 8]]")
    for words in run_distributed(other_beginnings, 2, tmp_path, seconds=60):
        for said, text in zip(words, texts * 2, strict=True):
            assert "the processes of a unit are given" in said and text in said


def test_a_gradient_that_is_gone_was_not_changed(tmp_path):
    """The module's own zero_grad, and a pass that gives one parameter fewer a gradient."""
    module = build(torch.tanh)
    run = parallel(tmp_path, module)
    sums = GradientSums(run, list(run.parameters()), run.parameters())
    run(torch.randn(4, 8)).sum().backward()
    run.zero_grad()
    assert sums.must_be_made(are_several=True, is_staged=False, may_fail=False) == (True, False)
    run(torch.randn(4, 8)).sum().backward()
    run.first.weight.grad.mul_(2)
    with pytest.raises(ValueError, match=r"clip_gnorm\(\)"):
        sums.must_be_made(are_several=True, is_staged=False, may_fail=False)
