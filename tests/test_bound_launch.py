"""Starts of a compiled kernel without Triton's look at its arguments: only where they are what it was compiled for."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from hybrid_engine.ops import bound_launch


class Rows(NamedTuple):
    ptr: torch.Tensor | None
    stride: int


class Kernel:
    """As Triton's: a call with a grid compiles, starts and returns what was compiled."""

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
    monkeypatch.setattr(bound_launch, "_bound", {})
    monkeypatch.setattr(
        bound_launch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 70 + device))
    )
    return Kernel()


def start(kernel, *args, device=0, grid=(5,), **meta):
    bound_launch.start(kernel, grid, args, meta or {"TILE": 32, "num_warps": 4}, device)


def test_the_second_start_takes_what_the_first_compiled(kernel):
    first, second = Rows(torch.zeros(64), 8), Rows(torch.ones(64), 8)
    start(kernel, first, 0.5)
    start(kernel, second, 0.25, grid=(7, 2))
    assert len(kernel.looked) == 1
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
    start(kernel, *given[0], device=1)
    assert len(kernel.looked) == len(given) + 3 and not kernel.started
    start(kernel, Rows(x[4:], 8), 1.0)  # at an address that divides by 16 too, and a float as any other
    assert [compiled for compiled, _ in kernel.started] == [1]


def test_a_parameter_that_has_only_its_default_is_never_bound(kernel):
    for _ in range(2):
        start(kernel, Rows(torch.zeros(4), 1), 0.5, num_warps=4)
    assert len(kernel.looked) == 2 and not kernel.started


def test_few_kinds_of_arguments_are_kept(kernel, monkeypatch):
    monkeypatch.setattr(bound_launch, "MAX_BOUND", 4)
    for stride in range(50):
        start(kernel, Rows(None, stride), 0.5)
    assert len(bound_launch._bound) <= 4
