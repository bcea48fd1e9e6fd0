"""The switch between kernels and references."""

import pytest
import torch

import hybrid_engine
from hybrid_engine.ops.dispatch import check_tensor, fallback_forced, use_triton
from tests.support.models import build_model

pytestmark = pytest.mark.quick


def test_the_switch_forces_references(kernels, monkeypatch):
    tensor = torch.zeros(3, device=kernels)
    assert use_triton(tensor) and use_triton(tensor.bfloat16())
    assert not use_triton(tensor.double()) and not use_triton(tensor.long())
    monkeypatch.setenv("HYBRID_ENGINE_FALLBACK", "1")
    assert not use_triton(tensor)


def test_a_value_nobody_knows_is_an_error_when_an_engine_is_built(monkeypatch):
    monkeypatch.setenv("HYBRID_ENGINE_FALLBACK", "yes")
    with pytest.raises(ValueError, match="HYBRID_ENGINE_FALLBACK='yes' must be 0 or 1"):
        fallback_forced()
    with pytest.raises(ValueError, match="HYBRID_ENGINE_FALLBACK='yes' must be 0 or 1"):
        hybrid_engine.initialize(
            model=build_model(), config={"train_batch_size": 1, "hybrid_engine": {"enabled": True}}
        )


@pytest.mark.parametrize(
    "tensor, rule, message",
    [
        (torch.zeros(2, 3).half(), {"dtype": torch.float32}, "weight is torch.float16; expected torch.float32"),
        (torch.zeros(2, 3), {"shape": (2, None, 1)}, r"weight has shape \[2, 3\]; expected \[2, any, 1\]"),
        (torch.zeros(3, 2).t(), {"is_dense_last": True}, r"weight has strides \(1, 2\); expected 1"),
        (torch.zeros(2, device="meta"), {"like": torch.zeros(1)}, "weight is on meta; expected cpu"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_with_what_was_expected(tensor, rule, message):
    with pytest.raises(ValueError, match=message):
        check_tensor("weight", tensor, **rule)
