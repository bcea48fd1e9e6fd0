"""What is said of a module that cannot be traced: one error with a remedy, and nothing besides."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from hybrid_engine import ComputeConfig, build_optimizer, parallelize
from tests.support.distributed import leave_process_group


@pytest.fixture(scope="module", autouse=True)
def _one_process_alone():
    leave_process_group()


@dataclasses.dataclass
class Unknown:
    x: Tensor


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)


class Average(Base):
    """Its batch norm divides by how often it was called, a number that is made of a tensor."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8, momentum=None)

    def forward(self, x):
        return self.norm(self.linear(x))


class Branch(Base):
    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else x


class Number(Base):
    def forward(self, x):
        return self.linear(x) * x.sum().item()


class Masked(Base):
    def forward(self, x):
        return self.linear(x)[x.sum(-1) > 0].square().sum()


class WrongShape(Base):
    def forward(self, x):
        return self.linear(x[:, :5])


class ResultOfUnknown(Base):
    def forward(self, x):
        return Unknown(self.linear(x))


class ArgumentOfUnknown(Base):
    def forward(self, x):
        return self.linear(x.x)


LIBRARY = torch.library.Library("untraceable", "DEF")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.impl("twice", lambda x: 2 * x, "CPU")
LIBRARY.define("thrice(Tensor x) -> Tensor")
LIBRARY.impl("thrice", lambda x: 3 * x, "CPU")
LIBRARY.impl("thrice", torch.empty_like, "Meta")


class WithoutShape(Base):
    def forward(self, x):
        return torch.ops.untraceable.twice(self.linear(x))


class WithoutAnnotation(Base):
    def forward(self, x):
        return torch.ops.untraceable.thrice(self.linear(x))


class Keyword(Base):
    """Its random_ is an op called from, a word of Python's."""

    def forward(self, x):
        return self.linear(x) * torch.empty_like(x).random_(0, 9)


X = torch.ones(4, 8)
REGISTERING = r"torch.export.register_dataclass\(Unknown\)"
REFUSED = {
    Average: (X, "must not depend on the values of tensors"),
    Branch: (X, "must not depend on the values of tensors"),
    Number: (X, "makes a number of the values of a tensor.*without item"),
    Masked: (X, "square.* reads a tensor whose shape depends on the values of another.*torch.where"),
    WrongShape: (X, "Check first that the module runs by itself"),
    ResultOfUnknown: (X, REGISTERING),
    ArgumentOfUnknown: (Unknown(X), REGISTERING),
    Keyword: (X, r"take torch.randint\(from, to, size\)"),
    WithoutShape: (X, "torch.library.register_fake"),
    WithoutAnnotation: (X, "untraceable::thrice has no annotation.*write register_op"),
}


@pytest.mark.parametrize("kind", list(REFUSED))
@pytest.mark.parametrize("lowering", ["graph", "eager"])
def test_an_error_with_a_remedy_is_all_that_is_said(tmp_path, capfd, kind, lowering):
    x, words = REFUSED[kind]
    config = ComputeConfig(1, 1, lowering=lowering)
    with pytest.raises(ValueError, match=f"(?s){words}"):
        parallelize(kind(), {"x": x}, "dp", config, gen_savedir=tmp_path)
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")


class Speaking(Base):
    def forward(self, x):
        print("forward of a module")
        return self.linear(x)


def test_what_a_module_prints_itself_is_there(tmp_path, capsys):
    parallelize(Speaking(), {"x": X}, "dp", ComputeConfig(1, 1), gen_savedir=tmp_path)
    assert "forward of a module" in capsys.readouterr().out


class Sparse(Base):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 8, sparse=True)

    def forward(self, x):
        return self.linear(x) + self.table((x > 0).long()).sum(1)


def test_sparse_gradients_are_for_one_process(tmp_path):
    module, arguments = Sparse(), {"x": X}
    parallelize(module, arguments, "dp", ComputeConfig(1, 1), gen_savedir=tmp_path)(X).sum().backward()
    with pytest.raises(ValueError, match=r"sparse=True, .* pass sparse=False to the embedding at 'table'"):
        parallelize(module, arguments, "dp", ComputeConfig(1, 2), gen_savedir=tmp_path / "2", load_module=False)


def test_the_norm_of_sparse_gradients_is_that_of_dense_ones(tmp_path):
    module = Sparse()
    parallel = parallelize(module, {"x": X}, "dp", ComputeConfig(1, 1), gen_savedir=tmp_path)
    optimizer = build_optimizer(parallel, torch.optim.SGD, lr=0.1)
    parallel(X).sum().backward()
    module.table.sparse = False
    module(X).sum().backward()
    expected = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    torch.testing.assert_close(optimizer.clip_gnorm(0.5), expected)
    torch.testing.assert_close(parallel.table.weight.grad.to_dense(), module.table.weight.grad)


class Tied(Base):
    """A table that the last linear shares, which is in another stage."""

    def __init__(self, is_tied):
        super().__init__()
        self.table, self.head = nn.Embedding(8, 8, sparse=True), nn.Linear(8, 8, bias=False)
        if is_tied:
            self.head.weight = self.table.weight

    def forward(self, sample):
        return self.head(self.linear(self.table(sample))).square().mean()


def test_sparse_gradients_of_one_stage_alone_need_no_sum(tmp_path):
    arguments = {"sample": torch.zeros(4, dtype=torch.long)}
    config = ComputeConfig(2, 2, use_end2end=True, pas_config={"pipeline_nmicros": 2})
    parallelize(Tied(False), arguments, "pp", config, gen_savedir=tmp_path / "apart", load_module=False)
    with pytest.raises(ValueError, match=r"sparse=True, .* pass sparse=False to the embedding at 'table'"):
        parallelize(Tied(True), arguments, "pp", config, gen_savedir=tmp_path / "tied", load_module=False)
