"""Launches that are prepared once: only for arguments that Triton and the op would treat alike."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from hybrid_engine.ops import dispatch
from hybrid_engine.ops.dispatch import Launch, forget_prepared, prepared


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
    monkeypatch.setattr(dispatch, "_launches", {})
    monkeypatch.setattr(
        dispatch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 70 + device))
    )
    return Kernel()


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(dispatch, "_kept", {})


def start(kernel, *args, device=0, grid=(5,), **meta):
    dispatch.launch(kernel, grid, *args, device=torch.device("cpu", device), **(meta or {"TILE": 32, "num_warps": 4}))


def test_the_second_start_takes_what_the_first_compiled(kernel):
    first, second = Rows(torch.zeros(64), 8), Rows(torch.ones(64), 8)
    launch = Launch(kernel, (7, 2), torch.device("cpu", 0), TILE=32, num_warps=4)
    launch(first, 0.5)
    launch(second, 0.25)
    assert kernel.looked == [((7, 2), (first, 0.5), {"TILE": 32, "num_warps": 4})]
    assert kernel.started == [(1, (7, 2, 1, 70, "f", "m", None, None, None, second, 0.25, 32))]


def test_arguments_that_are_compiled_for_otherwise_are_looked_at_again(kernel):
    x = torch.zeros(64)
    given = [
        (Rows(x, 8), 0.5), (Rows(x, 1), 0.5), (Rows(None, 8), 0.5), (Rows(x.bfloat16(), 8), 0.5), (Rows(x[1:], 8), 0.5),
        (Rows(x, 8), 1), (Rows(x, 8), True), (Rows(x, 8), None),
    ]  # fmt: skip
    for args in given:
        start(kernel, *args)
    start(kernel, *given[0], TILE=64, num_warps=4)
    start(kernel, *given[0], TILE=32, num_warps=8)
    start(kernel, *given[0], grid=(6,))
    assert len(kernel.looked) == len(given) + 3 and not kernel.started
    start(kernel, Rows(x[4:], 8), 1.0)  # at an address that divides by 16 too, and a float as any other
    assert [compiled for compiled, _ in kernel.started] == [1]


def test_another_device_has_a_launch_of_its_own(kernel):
    args = (Rows(torch.zeros(4), 1), 0.5)
    launches = [
        dispatch.find_launch(kernel, (5,), args, torch.device("cuda", index), {"TILE": 32}) for index in (0, 1, 0)
    ]
    assert launches[0] is launches[2] and launches[0] is not launches[1]


def test_a_parameter_that_has_only_its_default_is_never_bound(kernel):
    for _ in range(2):
        start(kernel, Rows(torch.zeros(4), 1), 0.5, num_warps=4)
    assert len(kernel.looked) == 2 and not kernel.started


def test_few_launches_and_few_forms_are_kept(kernel, monkeypatch):
    monkeypatch.setattr(dispatch, "MAX_KEPT", 4)
    for stride in range(50):
        start(kernel, Rows(None, stride), 0.5)
        prepared(lambda number: (number,), stride)
    assert len(dispatch._launches) <= 4 and len(dispatch._kept) <= 4


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
        (1, torch.zeros(8), None), (1, None, x),
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
