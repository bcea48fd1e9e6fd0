"""`hybrid-engine diff`: what it says of two runs, and how it ends."""

import json
import shutil

import pytest

from hybrid_engine.cli import cli

STEPS = [{"step": step, "score": 0.1 * step, "loss": 2.0 - step, "generate_seconds": 1.0 + step} for step in range(4)]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A function that writes a run's folder in the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(name, steps=STEPS, options="steps: 4\n"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        (tmp_path / name / "config.yaml").write_text(f"out: runs/{name}\n{options}")

    return write


def changed(step, **figures):
    return [line | figures if line["step"] == step else line for line in STEPS]


def test_runs_that_differ_in_times_and_place_alone_are_the_same(runs, capsys):
    runs("a")
    runs("b", changed(2, generate_seconds=9.0))
    assert cli.main(["diff", "a", "b"]) == 0
    assert capsys.readouterr().out == "no difference in 4 steps of 2 figures\n"


def test_the_options_and_the_first_step_with_its_figures_are_told(runs, capsys):
    runs("a", options="steps: 4\nseed: 0\nreward: [x, y]\n")
    steps = changed(2, score=0.25, loss=float("nan"))
    runs("b", [line | ({"loss": 7.0} if line["step"] == 3 else {}) for line in steps], options="steps: 4\nseed: 1\n")
    assert cli.main(["diff", "a", "b"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "option seed: 0 | 1",
        "option reward: x y | absent",
        "step 2: score 0.2 | 0.25 (apart by 0.05)",
        "step 2: loss 0.0 | nan (apart by nan)",
    ]


@pytest.mark.parametrize(("tolerance", "status"), [("0.06", 0), ("0.04", 1)])
def test_numbers_within_the_tolerance_are_the_same(tolerance, status, runs):
    runs("a")
    runs("b", changed(2, score=0.25))
    assert cli.main(["diff", "a", "b", "--tolerance", tolerance]) == status


def test_not_a_number_is_the_same_as_itself(runs):
    for name in "ab":
        runs(name, changed(1, loss=float("nan")))
    assert cli.main(["diff", "a", "b"]) == 0


def test_a_step_or_a_figure_that_one_run_has_not_is_a_difference(runs, capsys):
    runs("a")
    runs("short", STEPS[:3])
    runs("more", changed(1, accuracy=0.5))
    assert cli.main(["diff", "a", "short"]) == 1 and capsys.readouterr().out == "step 3: only a has it\n"
    assert cli.main(["diff", "a", "more"]) == 1 and capsys.readouterr().out == "step 1: accuracy absent | 0.5\n"


def test_runs_written_with_other_names_of_figures_are_compared_by_ours(runs, capsys):
    runs("a")
    runs("b", [{"reward" if name == "score" else name: value for name, value in line.items()} for line in STEPS])
    with open("b/config.yaml", "a") as file:
        file.write("metric_names: trl\n")
    assert cli.main(["diff", "a", "b"]) == 1
    assert capsys.readouterr().out == "option metric_names: absent | trl\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("a nothing", "'nothing' is not a folder; give the folder of a run"),
        ("a empty", "'empty' has no metrics.jsonl, so it is not the folder of a run; did you mean"),
        ("a torn", "'torn/metrics.jsonl', line 1, is not JSON"),
        ("a strange", "'strange/result.json' must hold a JSON dict"),
        ("a a --tolerance -1", "--tolerance=-1.0 must be finite and at least 0"),
    ],
)
def test_what_cannot_be_read_is_named_and_the_status_is_2(arguments, message, runs, tmp_path, capsys):
    for name in ("a", "torn", "strange"):
        runs(name)
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn" / "metrics.jsonl").write_text("{step\n")
    (tmp_path / "strange" / "result.json").write_text("[]")
    assert cli.main(["diff", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_last_line_that_was_cut_short_does_not_count(runs, tmp_path):
    runs("a")
    shutil.copytree("a", "b")
    with open("b/metrics.jsonl", "a") as file:
        file.write('{"step": 4, "sco')
    assert cli.main(["diff", "a", "b"]) == 0
