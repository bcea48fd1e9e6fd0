"""Launches that are prepared once: only for arguments that Triton and the op would treat alike."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from hybrid_engine.ops import dispatch
from hybrid_engine.ops.dispatch import Launch, forget_prepared, prepared
from tests.support import launch_ops
from tests.support.fake_cuda import kernels_on_cpu, zeroed_memory


class Rows(NamedTuple):
    ptr: torch.Tensor | None
    stride: int


class Kernel:
    """As Triton's: a call with a grid compiles, starts and returns what was compiled."""

    __name__ = "kernel"
    arg_names = ("x", "scale", "TILE")

    def __init__(self):
        self.looked, self.started = [], []

    def __getitem__(self, grid):
        def run(*args, **meta):
            self.looked.append((grid, args, meta))
            compiled = len(self.looked)
            return SimpleNamespace(
                run=lambda *given: self.started.append((compiled, given)), function="f", packed_metadata="m"
            )

        return run


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(
        dispatch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 70 + device))
    )
    return Kernel()


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(dispatch, "_kept", {})


def test_the_second_start_takes_what_the_first_compiled(kernel):
    first, second = Rows(torch.zeros(64), 8), Rows(torch.ones(64), 8)
    launch = Launch(kernel, (7, 2), torch.device("cpu", 0), TILE=32, num_warps=4)
    launch(first, 0.5)
    launch(second, 0.25)
    assert kernel.looked == [((7, 2), (first, 0.5), {"TILE": 32, "num_warps": 4})]
    assert kernel.started == [(1, (7, 2, 1, 70, "f", "m", None, None, None, second, 0.25, 32))]


def test_a_parameter_that_has_only_its_default_is_never_bound(kernel):
    launch = Launch(kernel, (5,), torch.device("cpu"), num_warps=4)
    for _ in range(2):
        launch(Rows(torch.zeros(4), 1), 0.5)
    assert len(kernel.looked) == 2 and not kernel.started


def test_few_forms_are_kept(monkeypatch):
    monkeypatch.setattr(dispatch, "MAX_KEPT", 4)
    for stride in range(50):
        prepared(lambda number: (number,), stride)
    assert len(dispatch._kept) <= 4


def sizes_of(number, *tensors):
    asked.append(number)
    return [number, *(None if tensor is None else tensor.shape for tensor in tensors)]


asked: list[int] = []


def test_what_an_op_prepares_is_kept_for_tensors_of_one_form_alone():
    x = torch.zeros(4, 8)
    asked.clear()
    first = prepared(sizes_of, 1, x, None)
    assert prepared(sizes_of, 1, torch.ones(4, 8), None) is first
    assert prepared(sizes_of, 1, torch.nn.Parameter(torch.ones(4, 8)), None) is first and asked == [1]
    others = [
        (2, x, None), (1, torch.zeros(5, 8), None), (1, torch.zeros(8, 4).t(), None), (1, x.half(), None), (1, x, x),
        (1, torch.zeros(33)[1:].view(4, 8), None), (1, torch.empty_strided((4, 8), (16, 1)), None),
        (1, torch.zeros(8), None), (1, None, x), (1, torch.zeros(4, 8, device="meta"), None),
    ]  # fmt: skip
    for number, other in enumerate(others, 2):
        prepared(sizes_of, *other)
        assert len(asked) == number
    assert prepared(sizes_of, 1, x, None) is first and len(asked) == 1 + len(others)
    forget_prepared()
    assert prepared(sizes_of, 1, x, None) == first and len(asked) == 2 + len(others)


def test_what_an_op_refuses_it_refuses_again():
    def refuse(x):
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            prepared(refuse, torch.zeros(1))


def compiled_for(args):
    """The properties of arguments that Triton compiles a kernel for."""
    for arg in args:
        if isinstance(arg, tuple):
            yield from compiled_for(arg)
        elif isinstance(arg, torch.Tensor):
            yield arg.dtype, arg.data_ptr() % 16 == 0
        else:
            yield type(arg), arg if isinstance(arg, int) else None


def test_a_prepared_launch_of_an_op_takes_only_what_triton_compiles_alike(monkeypatch):
    taken = {}
    kernels = set()

    def note(launch, *args):
        kernels.add(launch.kernel.__name__)
        form = tuple(compiled_for(args))
        assert taken.setdefault(launch, form) == form, launch.kernel.__name__

    def aligned_or_not(dtype, *shape):
        numbers = torch.rand(torch.Size(shape).numel() + 1) / shape[-1] ** 0.5
        return numbers.to(dtype)[torch.randint(2, ()) :][: torch.Size(shape).numel()].view(shape)

    monkeypatch.setenv(dispatch.SWITCH, "0")
    monkeypatch.setattr(Launch, "__call__", note)
    monkeypatch.setattr(launch_ops, "randn", aligned_or_not)
    torch.manual_seed(0)
    num_calls = 0
    with kernels_on_cpu(), zeroed_memory():
        for _ in range(4):
            for name, call in launch_ops.op_checks(torch.float32):
                if "2100 rows" not in name and "256 rows" not in name:
                    call()
                    num_calls += 1
    assert len(kernels) > 25 and len(taken) > num_calls / 4
