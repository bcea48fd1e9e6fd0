"""The recipes take the steps that they took: 30 of each on a tiny model, against `data/trajectories.json`.

What another CPU's rounding makes of the figures is far below the tolerance; a changed sign, normaliser, schedule or
order of the data is far above it. After a change that is meant: `python -m tests.tools.trajectories`.
"""

import pytest

from tests.tools import trajectories

TOLERANCE = 1e-5
"""Relative; with the instructions of older CPUs (AVX2, SSE4) the figures differ by 2e-7."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trajectories")


def test_every_recipe_of_the_table_has_its_reference():
    assert trajectories.read_references().keys() == trajectories.RUNS.keys()


@pytest.mark.parametrize("recipe", trajectories.RUNS)
def test_a_recipe_takes_the_steps_that_it_took(recipe, folder):
    measured, expected = trajectories.measure(recipe, folder), trajectories.read_references()[recipe]["steps"]
    for name, values in expected.items():
        # A sum over a sequence of differences of log-probabilities, of which each rounds by some 1e-7.
        near_zero = TOLERANCE if name == "kl_per_sequence" else TOLERANCE / 10
        assert measured[name] == pytest.approx(values, rel=TOLERANCE, abs=near_zero), name
