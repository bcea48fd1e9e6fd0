"""Saving removes and overwrites nothing that it did not write, and one run saves into a folder at a time."""

import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_engine.checkpoint.folder import SCRIPT, discard
from hybrid_engine.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
from tests.support.checkpoint_files import is_same, linear_engine, snapshot, step
from tests.support.paths import ROOT

pytestmark = pytest.mark.quick

LOCK = ".hybrid_engine.lock"


def _contents(folder):
    """Everything below `folder`, the lock apart: files' bytes, links' targets, and folders."""
    return {
        path.relative_to(folder): os.readlink(path) if path.is_symlink() else path.is_dir() or path.read_bytes()
        for path in folder.rglob("*")
        if path.name != LOCK
    }


def _fill(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")


OWN_FOLDERS = {
    "a folder of notes": ["a/notes.txt"],
    "files named like a checkpoint's": ["a/state.pt", "a/__0_0.distcp", "a/.metadata"],
    "a manifest of something else": ["a/checkpoint.json"],
    "a checkpoint of DeepSpeed": ["a/mp_rank_00_model_states.pt"],
    "the name it is written under": [".a.writing/notes.txt"],
    "the name it is written under, with a file named like a checkpoint's": [".a.writing/state.pt"],
    "the name of a replaced one": [".a.replaced/notes.txt"],
    "a file in place of it": ["a"],
    "a file where it is written": [".a.writing"],
    "a folder in place of latest": ["latest/notes.txt"],
}


@pytest.mark.parametrize("what", OWN_FOLDERS)
def test_what_is_no_checkpoint_is_never_replaced(tmp_path, what):
    _fill(tmp_path, OWN_FOLDERS[what])
    before = _contents(tmp_path)
    engine = step(linear_engine())
    expected = snapshot(engine)
    with pytest.raises(ValueError, match="move it away"):
        engine.save_checkpoint(tmp_path, "a")
    assert _contents(tmp_path) == before and is_same(expected, snapshot(engine))
    if "latest" not in what:  # another tag is not concerned, and the folder not blocked
        engine.save_checkpoint(tmp_path, "b")
        engine.save_checkpoint(tmp_path, "b")
        after = _contents(tmp_path)
        assert before.items() <= after.items()
        assert {path.parts[0] for path in after.keys() - before.keys()} == {"b", "latest", SCRIPT}


@pytest.mark.parametrize("target", ["elsewhere", "nowhere", "file"])
def test_a_link_in_place_of_a_checkpoint_is_neither_followed_nor_removed(tmp_path, target):
    _fill(tmp_path, ["elsewhere/notes.txt", "file"])
    folder, engine = tmp_path / "checkpoints", step(linear_engine())
    engine.save_checkpoint(folder, "b")
    for name in ("a", ".a.writing", ".a.replaced", "latest"):
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / target)
        before = _contents(tmp_path)
        with pytest.raises(ValueError, match="move it away"):
            engine.save_checkpoint(folder, "a")
        assert _contents(tmp_path) == before
        link.unlink()
    engine.save_checkpoint(folder, "a")


def test_files_that_somebody_put_into_a_checkpoint_survive_its_replacement(tmp_path):
    engine = step(linear_engine())
    folder = engine.save_checkpoint(tmp_path, "a")
    _fill(folder, ["notes.txt", "export/model.bin"])
    step(engine).save_checkpoint(tmp_path, "a")
    assert (folder / "notes.txt").read_text() == (folder / "export/model.bin").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"a", "latest", SCRIPT, LOCK}
    other = linear_engine(9.0)
    other.load_checkpoint(tmp_path)
    assert is_same(snapshot(engine)["weights"], snapshot(other)["weights"])


def test_an_empty_folder_gives_way_and_what_killed_runs_left_is_cleared(tmp_path):
    (tmp_path / "a").mkdir()
    # What a run left that was killed before there were marks.
    _fill(tmp_path, [".x.writing/__0_0.distcp", ".x.writing/.metadata"])
    step(linear_engine()).save_checkpoint(tmp_path, "a")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "latest", SCRIPT, LOCK}


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_file_in_the_place_of_a_folder_is_named(tmp_path, name):
    (tmp_path / "file").write_text("mine")
    engine = step(linear_engine())
    for act in (engine.save_16bit_model, engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(ValueError, match=r"_dir=.* must be a folder, and .*file' is a file"):
            act(tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"


def test_only_checkpoints_that_were_saved_here_are_discarded(tmp_path):
    engine = step(linear_engine())
    for tag in ("step1", "step2"):
        engine.save_checkpoint(tmp_path, tag)
    _fill(tmp_path, ["step3/notes.txt", "step1/notes.txt"])
    for tag in ("step1", "step2", "step3"):
        discard(tmp_path, tag, "step2")
    assert {path.name for path in tmp_path.iterdir()} == {"step2", "step3", "latest", SCRIPT, LOCK}
    assert (tmp_path / "step3" / "notes.txt").is_file() and (tmp_path / "step2" / "notes.txt").is_file()


OUTSIDE = ["../x", "/tmp/x", "a/b", "..", ".", "", "a\\b", "x" * 300, "a\0b"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_that_leave_the_folder_are_refused(tmp_path, name):
    engine, folder = step(linear_engine()), tmp_path / "in" / "folder"
    with pytest.raises(ValueError, match="must be the plain name of a file"):
        engine.save_16bit_model(folder, name)
    for act in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(ValueError, match=r"must be a plain folder name|is not a folder"):
            act(folder, name)
    engine.save_checkpoint(folder, "a")
    with pytest.raises(ValueError, match="must be a plain folder name"):
        engine.load_checkpoint(folder, name)
    with pytest.raises(ValueError, match="must be a plain folder name"):
        convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path / "out", tag=name)
    assert {path.name for path in tmp_path.rglob("*") if path.parent != folder / "a"} == {
        "in",
        "folder",
        "a",
        "latest",
        SCRIPT,
        LOCK,
    }


@pytest.mark.parametrize("folder", [None, "", 5, True, b"bytes", "a\0b"])
def test_what_is_no_path_of_a_folder_is_refused(tmp_path, folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = step(linear_engine())
    for act in (engine.save_checkpoint, engine.load_checkpoint, engine.save_16bit_model):
        with pytest.raises(ValueError, match=r"(save|load)_dir=.* must (be the path of a folder|not hold a null)"):
            act(folder)
    with pytest.raises(ValueError, match=r"output_dir=.* must"):
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path, folder)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("block", ["tensorboard", "csv_monitor"])
@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/../../x", ".."])
def test_curves_stay_in_their_folder(block, name):
    with pytest.raises(ValueError, match=f"{block}.job_name=.* must be a relative path"):
        linear_engine(**{block: {"job_name": name}})


def test_an_export_leaves_what_is_not_its_own(tmp_path):
    _fill(tmp_path, [".writing/notes.txt", "notes.txt"])
    engine = step(linear_engine())
    with pytest.raises(ValueError, match="is in the way"):
        engine.save_16bit_model(tmp_path, "model.bin")
    assert set(_contents(tmp_path)) == {Path(".writing"), Path(".writing/notes.txt"), Path("notes.txt")}


SAVE_AND_WAIT = """
import sys, time
sys.path.insert(0, sys.argv[1])
from tests.support.checkpoint_files import linear_engine, step
engine = step(linear_engine(5.0))
engine.save_checkpoint(sys.argv[2], "theirs")
print("saved", flush=True)
time.sleep(100)
"""


def test_one_run_at_a_time_saves_into_a_folder_until_it_ends_however_it_ends(tmp_path):
    script = [sys.executable, "-c", SAVE_AND_WAIT, str(ROOT), str(tmp_path)]
    other = subprocess.Popen(script, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        assert other.stdout.readline() == "saved\n"
        engine = step(linear_engine(1.0))
        before = _contents(tmp_path)
        for _ in range(2):
            with pytest.raises(ValueError, match=f"is in use: process {other.pid} on .* give each run a folder"):
                engine.save_checkpoint(tmp_path, "ours")
        assert _contents(tmp_path) == before
        engine.load_checkpoint(tmp_path)  # who only reads may
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
    engine.save_checkpoint(tmp_path, "ours")


def _is_free_for_others(folder):
    child = os.fork()
    if child == 0:
        import fcntl

        file = os.open(folder / LOCK, os.O_RDWR)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_engines_of_one_process_share_a_folder_and_the_last_one_frees_it(tmp_path):
    actor, critic = step(linear_engine(1.0)), step(linear_engine(2.0))
    for _ in range(2):
        actor.save_checkpoint(tmp_path, "actor")
        critic.save_checkpoint(tmp_path, "critic")
    assert not _is_free_for_others(tmp_path)
    del actor
    gc.collect()
    assert not _is_free_for_others(tmp_path)
    critic.save_checkpoint(tmp_path / "elsewhere")
    assert _is_free_for_others(tmp_path) and not _is_free_for_others(tmp_path / "elsewhere")
    critic.save_checkpoint(tmp_path, "critic")
    assert json.loads((tmp_path / "critic" / "checkpoint.json").read_text())["format"] == 2
