"""The attacks of `tests/attack/` in a quick form; `make attack` runs them in their long one."""

import pytest
from attack import interrupts


@pytest.mark.parametrize(("name", "offset"), [("bf16, LoRA, workspace released", 7), ("fp16, accumulating", 40)])
def test_ctrl_c_at_any_line_leaves_an_engine_that_goes_on_as_if_nothing_was(name, offset):
    outcome = interrupts.attack(interrupts.VARIANTS[name], every=100, offset=offset)
    assert outcome.num_delivered >= 20
    assert not outcome.failures
