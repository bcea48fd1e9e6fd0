"""The attacks of `tests/tools/attack/` in a quick form; `make attack` runs them in their long one."""

import pytest

from tests.tools.attack import bad_calls, bad_commands, bad_config, bad_inputs, interrupts, kills, leaks, recipe_kills

BUILDERS = {
    "config": (bad_config.build_config_calls, 12),
    "arguments": (bad_calls.build_argument_calls, 3),
    "launcher and environment": (lambda: [*bad_commands.of_the_launcher(), *bad_commands.of_environments()], 2),
}
"""Tables of bad input, and every how many calls of them are made."""


def test_a_training_that_is_killed_loses_nothing_and_ends_with_the_same_numbers():
    outcome = kills.attack(kills.JOBS["one process, bf16, one tag replaced"], num_kills=5)
    assert outcome.num_kills == 5
    assert not (outcome.lost or outcome.different or outcome.errors)


def test_a_recipe_that_is_stopped_and_resumed_leaves_what_one_leaves_that_never_was():
    outcome = recipe_kills.attack("kto", num_stops=2)
    assert outcome.num_stops == 2 and not outcome.failures


@pytest.mark.parametrize(("name", "offset"), [("bf16, LoRA, workspace released", 17), ("fp16, accumulating", 140)])
def test_ctrl_c_at_any_line_leaves_an_engine_that_goes_on_as_if_nothing_was(name, offset):
    outcome = interrupts.attack(interrupts.VARIANTS[name], every=200, offset=offset)
    assert outcome.num_delivered >= 10
    assert not outcome.failures


@pytest.mark.parametrize("name", BUILDERS)
def test_bad_input_ends_in_a_clear_error_before_any_work(name):
    build, every = BUILDERS[name]
    answers = list(bad_inputs.ask_all(build()[::every]))
    assert len(answers) > 30
    assert [answer for answer in answers if answer.verdict != "clear"] == []


def test_nothing_grows_over_cycles():
    growth = leaks.grow("cycles", interrupts.Cycle({}).run, cycles=20)
    assert not {name: amount for name, amount in growth.leaks.items() if name != "temporary files"}
