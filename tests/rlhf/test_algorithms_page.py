"""docs/algorithms.md has the presets as they are, every choice with its words, and figures that were measured."""

import csv
import re
from dataclasses import fields
from pathlib import Path

import pytest

from hybrid_engine.rlhf.algorithms import describe
from hybrid_engine.rlhf.options.algorithm import CHOICES, PRESETS, Algorithm
from hybrid_engine.rlhf.options.shared import RolloutRunOptions
from tests.tools.write_algorithms_page import BEGIN, END, PAGE, preset_table

ARXIV = re.compile(r"\b\d{4}\.\d{5}\b")
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


def paper_rows() -> list[list[str]]:
    section = TEXT.partition("## Papers")[2].partition("\n## ")[0]
    return [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]


OF_ROLLOUT = {field.name for field in fields(RolloutRunOptions)} - {field.name for field in fields(Algorithm)}


def test_the_options_of_each_paper_make_an_algorithm():
    kinds = {field.name: type(field.default) for field in fields(Algorithm)}
    commands = [command for row in paper_rows() for command in re.findall("`([^`]+)`", row[2])]
    assert len(commands) > 20
    for command in commands:
        given = {}
        for option in command.split("--")[1:]:
            name, _, value = option.strip().partition(" ")
            if name.replace("-", "_") in OF_ROLLOUT:
                continue
            kind = kinds[name.replace("-", "_")]
            given[name.replace("-", "_")] = (
                True if kind is bool else value if kind in (str, type(None)) else kind(value)
            )
        algorithm = Algorithm.from_options(given)
        assert not [line for line in describe(algorithm) if "no effect" in line], command


def test_every_paper_that_an_option_names_is_in_the_index():
    listed = {number for row in paper_rows() for number in ARXIV.findall(row[0])}
    named = {number for field in fields(Algorithm) for number in ARXIV.findall(field.metadata["text"])}
    assert named <= listed
    assert all(len(row) == 4 and all(cell.strip() for cell in row) for row in paper_rows())


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
