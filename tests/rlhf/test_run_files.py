"""What a run leaves for others to read: its options, its figures by anybody's names, and what trackers get."""

import json
import os
import sys
from dataclasses import replace
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch

from hybrid_engine.cli import cli
from hybrid_engine.cli.recipe_options import read_config_file, read_recipe_help
from hybrid_engine.metrics.latency import Iteration
from hybrid_engine.recipes import dpo, sft
from hybrid_engine.rlhf.options import shared
from hybrid_engine.rlhf.runs import run_folder, run_log
from hybrid_engine.rlhf.runs.run_folder import (
    PromptAnswers,
    flat_options,
    read_answers,
    read_metrics,
    write_answers,
    write_config,
)
from hybrid_engine.rlhf.runs.run_log import RunLog
from tests.support.paths import ROOT


@pytest.mark.parametrize("name", cli.RECIPES)
def test_the_written_options_of_a_recipe_give_the_same_config_again(name, tmp_path):
    config_class = import_module(f"hybrid_engine.recipes.{name.replace('-', '_')}").Config
    options = read_recipe_help(name).options
    given = {
        "out": str(tmp_path / "a: b #c"),
        "seed": 7,
        "metric_names": "verl",
        "model": "on",
        "dataset": "1e-3",
        "prompts": "-",
    }
    given |= {option.name: ("exact", "number") for option in options if option.name == "reward" and option.is_list}
    known = {option.name for option in options}
    config = cli.build_config(config_class, options, {name: given[name] for name in given.keys() & known})
    write_config(tmp_path, config)
    read = read_config_file(str(tmp_path / "config.yaml"), options)
    assert read.keys() == known - {"resume", "restart"}
    assert cli.build_config(config_class, options, read) == config


def test_options_that_are_lists_small_numbers_and_words_of_yaml_come_back(tmp_path):
    options = read_recipe_help("sft").options
    config = sft.Config(out="on", learning_rate=1e-5, tracker=())
    write_config(tmp_path, config)
    assert cli.build_config(sft.Config, options, read_config_file(str(tmp_path / "config.yaml"), options)) == config


def test_how_a_run_began_is_no_option_of_the_run():
    options = flat_options(replace(sft.Config(), restart=True))
    assert "restart" not in options and options["zero_stage"] == 0


def log_two_steps(folder, config, first_step=0):
    with RunLog(folder, "SFT", 2, config, first_step) as log:
        for step in range(first_step, 2):
            log.write(step, {"loss": 2.0 - step, "score": 0.5, "length": 3.0, "mine": None}, ["loss"])


@pytest.mark.parametrize(
    ("framework", "names"),
    [
        (None, {"step", "loss", "score", "length", "mine"}),
        ("trl", {"step", "loss", "reward", "completions/mean_length", "mine"}),
        ("verl", {"step", "train/loss", "critic/score/mean", "response_length/mean", "mine"}),
        ("openrlhf", {"step", "loss", "reward", "response_length", "mine"}),
    ],
)
def test_figures_are_written_with_the_names_asked_for_and_read_with_ours(framework, names, tmp_path):
    log_two_steps(tmp_path, sft.Config(metric_names=framework))
    log_two_steps(tmp_path, sft.Config(metric_names=framework), first_step=1)  # goes on, and keeps step 0
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in written] == [0, 1] and all(set(line) == names for line in written)
    expected = [{"step": step, "loss": 2.0 - step, "score": 0.5, "length": 3.0, "mine": None} for step in (0, 1)]
    assert read_metrics(tmp_path / "metrics.jsonl") == expected


@pytest.mark.parametrize("framework", shared.FRAMEWORKS)
def test_every_name_of_a_framework_stands_for_one_figure_of_ours(framework):
    names = run_folder.names_of(framework)
    assert len(set(names.values())) == len(names)
    # A name that is both ours and theirs means the same figure.
    assert all(names[name] == name for name in names.keys() & set(names.values()))


def test_a_figure_whose_new_name_is_taken_keeps_the_old_one_and_comes_back():
    figures = {"score": 1.0, "reward": 2.0}
    assert run_folder.to_framework(figures, "trl") == figures
    assert run_folder.from_framework(figures, "trl") == figures


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--tracker wanb", "--tracker=wanb must be one of tensorboard, wandb"),
        ("--tracker wandb", "--tracker=wandb needs the package wandb, which is not installed"),
        ("--metric-names ours", "--metric-names=ours must be one of trl, verl, openrlhf"),
    ],
)
def test_a_tracker_or_names_that_there_are_not_are_refused_before_any_work(
    options, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(shared.importlib.util, "find_spec", lambda name: None)
    assert cli.main(f"sft --out {tmp_path / 'run'} {options}".split()) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "run").exists()


class Service:
    """What a tracker writes to; remembers each call."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, *args, *kwargs.values()))


def install(monkeypatch, name, **members):
    """A package in place of one that is not installed."""
    package = ModuleType(name)
    package.__spec__ = ModuleSpec(name, None)
    package.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, package)


def test_each_tracker_gets_the_options_and_the_figures_of_each_step_by_the_names_asked_for(monkeypatch, tmp_path):
    """accelerate's own classes, over packages with the functions and names of arguments that it calls."""
    asked, writer, run, settings = [], Service(), Service(), Service()
    summaries = SimpleNamespace(SummaryWriter=lambda folder, purge_step: asked.append((folder, purge_step)) or writer)
    install(monkeypatch, "tensorboard")
    monkeypatch.setattr(torch.utils, "tensorboard", summaries, raising=False)
    install(monkeypatch, "wandb", init=lambda project, name: asked.append((project, name)) or run, config=settings)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    log_two_steps(tmp_path, sft.Config(tracker=("tensorboard", "wandb"), metric_names="trl"), first_step=1)
    assert asked == [(str(tmp_path / "tensorboard"), 1), ("hybrid-engine", str(tmp_path))]
    figures = {"train/loss": 1.0, "train/reward": 0.5, "train/completions/mean_length": 3.0}
    assert run.calls == [("log", figures, 1), ("finish",)]
    assert [call for call in writer.calls if call[0] == "add_scalar"] == [
        ("add_scalar", name, value, 1) for name, value in figures.items()
    ]
    (_, options, _) = settings.calls[0]
    assert options["zero_stage"] == 0 and options["tracker"] == "tensorboard wandb"


@pytest.mark.parametrize("name", shared.TRACKERS)
def test_every_tracker_is_one_of_accelerates_and_can_be_built(name, tmp_path):
    """Only built: beginning a run at one needs its package."""
    assert run_log._build_tracker(name, tmp_path, 0).name == name


def answers_of(step, responses):
    return [PromptAnswers(prompt=f"p{index}", responses=[text], rewards=[None]) for index, text in enumerate(responses)]


def test_answers_of_a_step_replace_those_it_had_and_the_others_stay(tmp_path):
    for step, responses in ((0, ["a", "b"]), (10, ["c", "d"]), (20, ["e", "f"]), (10, ["g", "h"])):
        write_answers(tmp_path, step, answers_of(step, responses))
    lines = read_answers(tmp_path / "answers.jsonl")
    assert [(line["step"], line["prompt"], *line["responses"]) for line in lines] == [
        (0, "p0", "a"), (0, "p1", "b"), (10, "p0", "g"), (10, "p1", "h"), (20, "p0", "e"), (20, "p1", "f"),
    ]  # fmt: skip
    assert "tokens" not in lines[0] and lines[0]["rewards"] == [None]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1, is not JSON"),
        ("[]", "needs a step of type int"),
        ('{"step": 0, "prompt": "p", "responses": ["a"], "rewards": []}', "needs a reward, or null, for each response"),
    ],
)
def test_a_line_of_answers_that_is_none_is_named(line, message, tmp_path):
    (tmp_path / "answers.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        read_answers(tmp_path / "answers.jsonl")


@pytest.mark.parametrize("name", [name for name in run_folder.TABLE if name not in vars(Iteration(start=0.0))])
def test_every_figure_of_the_table_is_one_that_is_written_somewhere(name):
    sources = (
        path
        for folder in ("recipes", "hybrid_engine")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "metric_names.py"
    )
    assert any(f'"{name}"' in path.read_text() for path in sources)


def test_a_folder_that_a_run_of_another_process_writes_into_is_left_alone(tmp_path):
    config = dpo.Config(out=str(tmp_path))
    with RunLog(tmp_path, "DPO", 2, config) as log:
        log.write(0, {"loss": 1.0})
        before = (tmp_path / "metrics.jsonl").read_text()
        for options in ({}, {"resume": True}, {"restart": True}):
            assert refusal_in_another_process(lambda given=options: dpo.run(replace(config, **given))).startswith(
                f"--out: another run is writing into {str(tmp_path)!r}; wait for it, stop it"
            )
        assert "another run is writing" in refusal_in_another_process(lambda: RunLog(tmp_path, "DPO", 2, config))
        assert (tmp_path / "metrics.jsonl").read_text() == before
    del log
    assert refusal_in_another_process(lambda: RunLog(tmp_path, "DPO", 2, config)) == ""


def refusal_in_another_process(action) -> str:
    """The ValueError of `action` in a fork of this process; empty without one."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            action()
        except ValueError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader) as file:
        return file.read()
