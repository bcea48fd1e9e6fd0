"""Damaged checkpoints are refused, old ones load, and a full disk ends a save and not the run."""

import errno
import json
import random
import resource
import shutil
import signal
from contextlib import contextmanager

import pytest
import torch

from hybrid_engine.checkpoint import loading
from hybrid_engine.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
)
from tests.support.checkpoint_files import MANIFEST, as_format_1, is_same, linear_engine, snapshot, step
from tests.support.distributed import run_distributed


@pytest.fixture
def saved(tmp_path):
    engine = step(linear_engine(1.0))
    engine.save_checkpoint(tmp_path, tag="a")
    step(engine).save_checkpoint(tmp_path, tag="b")
    return tmp_path


def _assert_refused(engine, folder, name):
    before = snapshot(engine)
    with pytest.raises(ValueError, match=r"is damaged|is incomplete|has format|cannot be loaded"):
        engine.load_checkpoint(folder, "a")
    assert is_same(before, snapshot(engine)), name
    with pytest.raises(ValueError, match=r"is damaged|is incomplete|has format"):
        get_fp32_state_dict_from_zero_checkpoint(folder, "a")


def _flip(content, start, length):
    flipped = bytes(byte ^ 0xFF for byte in content[start : start + length])
    return content[:start] + flipped + content[start + length :]


def test_flipped_bytes_anywhere_and_files_of_another_checkpoint_are_refused(saved):
    engine, draw = step(linear_engine(2.0)), random.Random(0)
    for path in sorted((saved / "a").iterdir()):
        content = path.read_bytes()
        starts = [draw.randrange(len(content)) for _ in range(3)]
        for start, length in [(0, 64), (len(content) - 64, 64), *((start, 64) for start in starts), (starts[0], 1)]:
            path.write_bytes(_flip(content, start, length))
            _assert_refused(engine, saved, (path.name, start, length))
        other = saved / "b" / path.name
        if path.name not in (".metadata", MANIFEST):  # the others' are of one size, with other values
            assert other.stat().st_size == len(content) and other.read_bytes() != content
            shutil.copy(other, path)
            _assert_refused(engine, saved, path.name)
        path.write_bytes(content)
    engine.load_checkpoint(saved, "a")


def test_a_manifest_without_its_checksums_is_refused_unless_it_is_of_the_first_format(saved):
    path = saved / "a" / MANIFEST
    manifest = json.loads(path.read_text())
    engine = step(linear_engine(2.0))
    for key in ("checksum", "checksums"):
        path.write_text(json.dumps({name: value for name, value in manifest.items() if name != key}))
        _assert_refused(engine, saved, key)
    path.write_text(json.dumps({**manifest, "format": 1}))
    _assert_refused(engine, saved, "format")


def test_a_checkpoint_of_the_first_format_loads_and_goes_on_bit_for_bit(tmp_path):
    schedule = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}
    engine = step(linear_engine(1.0, **schedule), 3)
    folder = engine.save_checkpoint(tmp_path)
    as_format_1(folder)
    resumed = linear_engine(2.0, **schedule)
    resumed.load_checkpoint(tmp_path)
    assert is_same(snapshot(step(engine, 2)), snapshot(step(resumed, 2)))
    assert get_fp32_state_dict_from_zero_checkpoint(tmp_path).keys() == {"weight", "bias"}


@contextmanager
def _files_limited_to(num_bytes):
    """No file may grow beyond that, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _assert_save_fails_alone(engine, folder, num_bytes):
    """The save fails on this process with a short error, and changes nothing of the engine."""
    before = snapshot(engine)
    with _files_limited_to(num_bytes), pytest.raises(OSError, match=r"save_checkpoint\(\): .* takes [\d,]+ bytes") as e:
        engine.save_checkpoint(folder, "full")
    assert len(str(e.value)) < 600 and str(folder) in str(e.value) and e.value.errno == errno.EFBIG
    assert is_same(before, snapshot(engine))


@pytest.mark.parametrize("num_bytes", [0, 100, 6000, 13000])
def test_a_full_disk_ends_the_save_with_an_error_and_the_run_goes_on(saved, num_bytes):
    """At 0 bytes not even the first header fits, at 13000 the tensors do and the other values do not."""
    engine = step(linear_engine(2.0))
    expected = snapshot(step(linear_engine(2.0), 2))
    _assert_save_fails_alone(engine, saved, num_bytes)
    left = {path.name for path in saved.iterdir() if not path.name.startswith(".hybrid_engine")}
    assert left == {"a", "b", "latest", "zero_to_fp32.py"} and (saved / "latest").read_text() == "b"
    assert is_same(expected, snapshot(step(engine)))
    engine.save_checkpoint(saved, "full")
    assert is_same(snapshot(engine), snapshot(_loaded(saved)))


def _loaded(folder):
    engine = linear_engine(9.0)
    engine.load_checkpoint(folder)
    return engine


def test_a_full_disk_under_an_export_leaves_the_file_before_it(saved, tmp_path):
    engine = step(linear_engine(2.0))
    folder = tmp_path / "export"
    engine.save_16bit_model(folder, "model.bin")
    convert_zero_checkpoint_to_fp32_state_dict(saved, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with _files_limited_to(100):
        with pytest.raises(OSError, match="could not be written to"):
            step(engine).save_16bit_model(folder, "model.bin")
        for is_safe in (False, True):
            with pytest.raises(OSError, match="could not be written to"):
                convert_zero_checkpoint_to_fp32_state_dict(saved, folder, safe_serialization=is_safe)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def _two_processes(rank, world_size, folder):
    """A disk that is full for one process only, a file that only one of them has to read."""
    found = []
    for stage in (1, 3):
        engine = step(linear_engine(2.0, train_batch_size=2, zero_optimization={"stage": stage}))
        engine.save_checkpoint(folder, f"stage{stage}")
        before = _whole(engine)
        for full_rank in range(world_size):
            limit = _files_limited_to(100 if rank == full_rank else resource.RLIM_INFINITY)
            with limit, pytest.raises(OSError, match="could not be written to"):
                engine.save_checkpoint(folder, "full")
        engine.save_checkpoint(folder, "kept")
        path = folder / f"stage{stage}" / f"__{world_size - 1}_0.distcp"
        if rank == 0:
            path.write_bytes(_flip(path.read_bytes(), 1000, 64))
        torch.distributed.barrier()
        with pytest.raises(ValueError, match="is damaged"):
            engine.load_checkpoint(folder, f"stage{stage}")
        assert all(torch.equal(a, b) for a, b in zip(before, _whole(engine), strict=True))
        for interrupted_rank in range(world_size):
            with _interrupting("check_files", rank == interrupted_rank), pytest.raises(KeyboardInterrupt):
                engine.load_checkpoint(folder, "kept")
            assert all(torch.equal(a, b) for a, b in zip(before, _whole(engine), strict=True))
        with pytest.raises(ValueError, match="save_dir=None must be the path of a folder"):
            engine.save_checkpoint(None)
        step(engine).save_checkpoint(folder, "full")
        found.append(sorted(path.name for path in folder.iterdir()))
    return found


@contextmanager
def _interrupting(name, is_interrupted):
    """Ctrl-C on this process, or not, when the load comes to its function of that name."""
    original = getattr(loading, name)

    def interrupted(*args):
        if is_interrupted:
            signal.raise_signal(signal.SIGINT)
        return original(*args)

    setattr(loading, name, interrupted)
    try:
        yield
    finally:
        setattr(loading, name, original)


def _whole(engine):
    """The parameters, gathered only where that is stage 3's way."""
    if engine.sharding.stage == 3:
        return [param.detach().full_tensor().clone() for param in engine.module.parameters()]
    return [param.detach().clone() for param in engine.module.parameters()]


def test_on_two_processes_one_that_fails_fails_all_and_the_run_goes_on(tmp_path):
    for found in run_distributed(_two_processes, 2, tmp_path):
        assert found[-1] == [".hybrid_engine.lock", "full", "kept", "latest", "stage1", "stage3", "zero_to_fp32.py"]
