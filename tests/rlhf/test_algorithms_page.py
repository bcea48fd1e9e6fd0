"""docs/algorithms.md has the presets as they are, every choice with its words, and figures that were measured."""

import csv
from dataclasses import fields
from pathlib import Path

import pytest

from hybrid_engine.rlhf.options.algorithm import CHOICES, PRESETS, Algorithm
from tests.tools.write_algorithms_page import BEGIN, END, PAGE, preset_table

TEXT = PAGE.read_text()
RESULTS = PAGE.parents[1] / "benchmarks" / "results" / "trl.csv"


def test_the_table_of_presets_is_the_one_that_is_written_now():
    assert TEXT.partition(BEGIN)[2].partition(END)[0] == preset_table()


@pytest.mark.parametrize("name", CHOICES)
def test_every_word_of_a_choice_has_a_row_with_formula_and_source_and_no_other_has(name):
    section = TEXT.partition(f"### `--{name.replace('_', '-')}`")[2].partition("\n### ")[0].partition("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    assert tuple(row[0].strip(" `") for row in rows) == CHOICES[name]
    assert all(len(row) == 3 and all(cell.strip() for cell in row) for row in rows)


def test_every_option_of_an_algorithm_is_named():
    assert [field.name for field in fields(Algorithm) if f"--{field.name.replace('_', '-')}" not in TEXT] == []


def test_every_preset_has_its_source():
    section = TEXT.partition("### Sources of the presets")[2].partition("\n## ")[0]
    assert [line.split("`")[1] for line in section.splitlines() if line.startswith("- `")] == list(PRESETS)


def test_the_figures_against_trl_are_those_that_were_measured():
    with RESULTS.open() as file:
        rows = list(csv.DictReader(file))
    assert all(row["agrees"] == "True" for row in rows)
    largest = max(float(row[name]) for row in rows for name in ("loss_difference", "gradient_difference"))
    assert f"{len(rows)} settings" in TEXT
    assert f"{largest:.1e}" in TEXT
    assert rows[0]["versions"] in TEXT
    assert Path(RESULTS).name in TEXT
