"""Fixtures of ops that have three forms."""

import pytest
import torch


@pytest.fixture(params=["reference", "compiled", pytest.param("kernel", marks=pytest.mark.kernels)])
def way(request):
    """Each form of the op: torch, compiled for the CPU, and the Triton kernel."""
    torch.manual_seed(0)
    if request.param == "kernel":
        request.getfixturevalue("on_kernels")
    elif request.param == "compiled":
        request.getfixturevalue("compiled")
    return request.param
