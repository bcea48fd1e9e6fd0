"""What a user's module is made of can be traced, split and computed: layers and functions of PyTorch, one by one."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hybrid_engine import ComputeConfig, build_optimizer, parallelize
from hybrid_engine.extensions.parallelize.graph.graph import build_graph
from hybrid_engine.extensions.parallelize.planning.policies import batch_plan
from tests.extensions.parallelize.test_lowering import check_plan, expected_step
from tests.support.distributed import leave_process_group
from tests.support.random_splits import random_plan


@pytest.fixture(scope="module")
def two_simulated_ranks() -> Iterator[None]:
    leave_process_group()
    dist.init_process_group("fake", rank=0, world_size=2)
    yield
    leave_process_group()


class Net(nn.Module):
    """A layer between a weight and a sum."""

    def __init__(self, layer):
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.linspace(0.5, 1.5, 8)), layer

    def forward(self, x):
        result = self.layer(x * self.scale)
        return (result[0] if isinstance(result, tuple) else result).square().sum()


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


LAYERS = {
    "batch norm": (nn.BatchNorm2d(4), (4, 4, 2, 8)),
    "instance norm": (nn.InstanceNorm1d(6, affine=True), (4, 6, 8)),
    "transposed convolution": (nn.ConvTranspose2d(4, 6, 2, stride=2), (4, 4, 2, 8)),
    "transposed convolution in groups": (nn.ConvTranspose1d(4, 4, 3, groups=2), (4, 4, 8)),
    "lstm": (nn.LSTM(8, 6, num_layers=2, batch_first=True), (4, 3, 8)),
    "gru": (nn.GRU(8, 6, bidirectional=True), (3, 4, 8)),
    "prelu": (nn.PReLU(6), (4, 6, 8)),
    "cosine similarity": (Function(lambda x: F.cosine_similarity(x, x.flip(1), dim=-1)), (4, 6, 8)),
    "swapped axes": (Function(lambda x: x.swapaxes(0, 1).movedim(0, 2).mT @ x.mean(1).t()), (4, 4, 8)),
    "fourier transform": (Function(lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2)), (4, 8)),
}


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_plans_of_a_layer_compute_what_it_computes(name, is_training, two_simulated_ranks):
    torch.manual_seed(0)
    layer, shape = LAYERS[name]
    module, arguments = Net(layer).train(is_training), {"x": torch.randn(shape)}
    module.zero_grad()
    graph, expected = build_graph(module, arguments), expected_step(module, arguments)
    check_plan(graph, batch_plan(graph, (2,)), module, arguments, expected)
    check_plan(graph, random_plan(graph, (2,), 1), module, arguments, expected)


@pytest.mark.parametrize("batch_first", [True, False])
def test_samples_of_recurrent_layers_are_split(batch_first):
    x = torch.randn(4, 6, 8)
    graph = build_graph(Net(nn.LSTM(8, 6, batch_first=batch_first)), {"x": x})
    (op,) = (op for op in graph.ops.values() if op.name == "lstm")
    assert op.rule.splits(2) == ("b",)
    assert op.rule.sizes["b"] == x.shape[0 if batch_first else 1]
    dropping = nn.LSTM(8, 6, num_layers=2, dropout=0.5)
    graph = build_graph(Net(dropping), {"x": x})
    assert [op.rule.splits(2) for op in graph.ops.values() if op.name == "lstm"] == [()]


FUNCTIONS = {
    "fmax": lambda x: torch.fmax(x, x * 2),
    "logaddexp": lambda x: torch.logaddexp(x, x * 2),
    "copysign": lambda x: torch.copysign(x, x * 2),
    "cummax": lambda x: x.cummax(1)[0],
    "kthvalue": lambda x: x.kthvalue(2)[0],
    "scatter_reduce": lambda x: x.scatter_reduce(1, torch.zeros(4, 2, 8).long(), torch.ones(4, 2, 8), "mean"),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "written slices": lambda x: F.pad(x, (1, 1)).index_fill(1, torch.tensor([0]), 0.0),
    "bucketize": lambda x: x * torch.bucketize(x, torch.arange(5.0)),
    "noise": lambda x: x + torch.randn_like(x),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "channels dropped": lambda x: F.dropout2d(x.unsqueeze(-1), 0.5),
    "pixel shuffle": lambda x: F.pixel_shuffle(x[:, :4].unsqueeze(-1), 2),
    "grid": lambda x: F.grid_sample(x[:, None], torch.zeros(4, 2, 2, 2), align_corners=False),
    "linear interpolation": lambda x: F.interpolate(x, size=3, mode="linear"),
    "quantile": lambda x: x.quantile(0.5, dim=-1),
    "distances": lambda x: torch.cdist(x, x),
    "entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones_like(x)),
    "triplets": lambda x: F.triplet_margin_loss(x, x + 1, x + 2),
    "inverse": lambda x: torch.linalg.inv(x.mT @ x + torch.eye(8)),
    "tiles": lambda x: torch.hstack([x.tile(1, 2, 1), x.expand_as(x)]),
    "outer products": lambda x: torch.outer(x[0, 0], x[0, 1]) @ torch.tensordot(x, x, ([0, 1], [0, 1])),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_pytorch_are_known(name):
    assert build_graph(Net(Function(FUNCTIONS[name])), {"x": torch.randn(4, 6, 8)}).ops


def test_the_error_for_an_op_without_annotation_can_be_followed_as_printed():
    @torch.library.custom_op("nobody::knows", mutates_args=())
    def knows(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    knows.register_fake(torch.empty_like)
    with pytest.raises(ValueError, match=r'register_op\("a\^ b\^ c\^ -> ..."\)\(torch.ops.nobody.knows.default\)'):
        build_graph(Net(Function(knows)), {"x": torch.randn(4, 6, 8)})


def test_an_error_of_the_module_itself_is_not_taken_for_one_of_values():
    with pytest.raises(ValueError, match=r"test_ops.py:\d+: RuntimeError: .*\n.*runs by itself") as raised:
        build_graph(Net(Function(lambda x: x @ x)), {"x": torch.randn(4, 6, 8)})
    assert "values of tensors" not in str(raised.value)


def test_a_batch_norm_is_evaluated_as_it_was_trained(tmp_path):
    leave_process_group()
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6)), torch.randn(4, 8)
    module = parallelize(copy.deepcopy(plain), {"input": x}, "dp", ComputeConfig(1), gen_savedir=tmp_path)
    optimizer = build_optimizer(module, torch.optim.SGD, lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for one, its in ((module, optimizer), (plain, theirs)):
        one(x).square().sum().backward()
        its.step()
        one.eval()
    torch.testing.assert_close(module(x), plain(x))
    torch.testing.assert_close(dict(module.named_buffers()), dict(plain.named_buffers()))


class Remembering(nn.Module):
    """Keeps the last values that it was given: in a buffer that it replaces, or in a plain attribute."""

    def __init__(self, size=8):
        super().__init__()
        self.register_buffer("last", torch.zeros(4, size))
        self.calls = 0

    def forward(self, x):
        before, self.last = self.last, x.detach()
        return x + before


class Replacing(Remembering):
    def __init__(self):
        super().__init__(6)

    def forward(self, x):
        self.last = x.detach()
        return x


class Counting(Remembering):
    def forward(self, x):
        self.calls += 1
        return x * self.calls


@pytest.mark.parametrize("make", [Remembering, lambda: Net(Remembering())], ids=["outermost", "inside"])
def test_a_buffer_that_forward_replaces_is_there_in_the_next_call(make, tmp_path):
    leave_process_group()
    plain = make()
    module = parallelize(make(), {"x": torch.zeros(4, 8)}, "dp", ComputeConfig(1), gen_savedir=tmp_path)
    for x in (torch.ones(4, 8), torch.full((4, 8), 3.0), torch.zeros(4, 8)):
        torch.testing.assert_close(module(x), plain(x))
    torch.testing.assert_close(dict(module.named_buffers()), dict(plain.named_buffers()))


def test_a_buffer_that_changes_its_shape_is_refused():
    with pytest.raises(
        ValueError, match=r"of the buffer 'layer.last', torch.float32 of \(4, 6\), .* of \(4, 8\); it must"
    ):
        build_graph(Net(Replacing()), {"x": torch.zeros(4, 8)})


def test_a_number_that_forward_counts_is_named():
    with pytest.warns(UserWarning, match=r"sets the attributes \['layer.calls'\]; .* must be a buffer"):
        build_graph(Net(Counting()), {"x": torch.zeros(4, 8)})


@pytest.mark.parametrize("name", ["graph", "code", "lambda"])
def test_names_that_a_traced_graph_has_itself_are_refused(name):
    module = nn.Sequential()
    module.add_module(name, nn.BatchNorm1d(8))
    with pytest.raises(ValueError, match=rf"with the names \['{name}'\]; give"):
        build_graph(module, {"input": torch.zeros(4, 8)})
