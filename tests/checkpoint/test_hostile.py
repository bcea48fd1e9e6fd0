"""Nothing that a checkpoint holds is executed, whoever wrote it, and nothing outside of it is read."""

import dataclasses
import io
import json
import os
import pickle
import shutil

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from hybrid_engine.extensions.megatron.loading import MegatronCheckpoint
from hybrid_engine.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.support.checkpoint_files import MANIFEST, as_format_1, is_same, linear_engine, replace_index, snapshot, step

pytestmark = pytest.mark.quick


class Touch:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def _global(module, name):
    """Pushes a global by two strings, as newer pickles do."""
    return b"\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93"


def _text(value):
    return b"\x8c" + bytes([len(value)]) + value.encode()


def _forged_indices(path, true_index):
    """Indices that run a command, by the way they take."""
    command, metadata = f"touch {path}", "torch.distributed.checkpoint.metadata"
    call = _text(command) + b"\x85R."
    yield "a call", pickle.dumps(Touch(path))
    yield "a call, in the oldest protocol", pickle.dumps(Touch(path), protocol=0)
    yield "an object inside", pickle.dumps(dataclasses.replace(true_index, planner_data={"a": [Touch(path)]}))
    yield "a key inside", pickle.dumps(dataclasses.replace(true_index, storage_meta=Touch(path)))
    yield "an instance", f"(S'{command}'\nios\nsystem\n.".encode()
    evaluation = f"__import__('os').system('{command}')"
    yield "an evaluation", b"\x80\x04" + _global("builtins", "eval") + _text(evaluation) + b"\x85R."
    attribute = _global("builtins", "getattr") + _global("os", "path") + _text("os") + b"\x86R"
    yield "an attribute", b"\x80\x04" + attribute + _text("system") + b"\x86R" + call
    yield "a dotted name", b"\x80\x04" + _global(metadata, "os.system") + call
    yield "a dotted name of a class", b"\x80\x04" + _global(metadata, "Metadata.__init__.__globals__") + b"."
    yield "a name imported there", b"\x80\x04" + _global(metadata, "os") + b"."
    yield "a loader of torch", b"\x80\x04" + _global("torch", "load") + _text(str(path)) + b"\x85R."
    yield "a persistent id", b"\x80\x04Pos.system\n."
    state = b"N}" + _text("__init__") + _global("os", "system") + b"s\x86b."
    yield "a class's attribute", b"\x80\x04" + _global(metadata, "Metadata") + state
    yield "no index", pickle.dumps({"state_dict_metadata": {}})
    yield "nothing", b""


@pytest.fixture
def saved(tmp_path):
    step(linear_engine(1.0)).save_checkpoint(tmp_path / "checkpoints", tag="a")
    return tmp_path / "checkpoints" / "a"


def _assert_refused_unexecuted(folder, engine, mark, way):
    before = snapshot(engine)
    with pytest.raises(ValueError, match=r"is damaged|is not in its folder|cannot be loaded"):
        engine.load_checkpoint(folder.parent)
    with pytest.raises(ValueError, match=r"is damaged|is not in its folder|cannot be loaded"):
        get_fp32_state_dict_from_zero_checkpoint(folder.parent)
    assert not mark.exists(), way
    assert is_same(before, snapshot(engine)), way


def test_an_index_that_names_anything_else_than_tensors_is_refused_and_runs_nothing(saved, tmp_path):
    engine, mark = step(linear_engine(2.0)), tmp_path / "executed"
    true_index = pickle.loads((saved / ".metadata").read_bytes())
    init = Metadata.__init__
    for way, forged in _forged_indices(mark, true_index):
        replace_index(saved, forged)
        _assert_refused_unexecuted(saved, engine, mark, way)
    assert Metadata.__init__ is init
    replace_index(saved, true_index)
    engine.load_checkpoint(saved.parent)


def test_tensors_that_would_be_unpickled_as_objects_are_refused(saved, tmp_path):
    engine, mark = step(linear_engine(2.0)), tmp_path / "executed"
    index = pickle.loads((saved / ".metadata").read_bytes())
    (key,) = [key for key in index.storage_data if key.fqn == "weights.bias"]
    place, file = index.storage_data[key], saved / "__0_0.distcp"
    # As an object in place of a tensor, and as a tensor whose bytes are another pickle.
    buffer = io.BytesIO()
    torch.save(Touch(mark), buffer)
    forged = dataclasses.replace(place, offset=file.stat().st_size, length=len(buffer.getvalue()))
    file.write_bytes(file.read_bytes() + buffer.getvalue())
    index.storage_data[key] = forged
    replace_index(saved, index)
    _assert_refused_unexecuted(saved, engine, mark, "a tensor's bytes")
    index.state_dict_metadata["weights.bias"] = BytesStorageMetadata()
    replace_index(saved, index)
    _assert_refused_unexecuted(saved, engine, mark, "an object")


def test_the_other_values_are_read_without_running_code_too(saved, tmp_path):
    engine, mark = step(linear_engine(2.0)), tmp_path / "executed"
    values = torch.load(saved / "state.pt", weights_only=True)
    torch.save({**values, "client_state": Touch(mark)}, saved / "state.pt")
    as_format_1(saved)
    with pytest.raises(ValueError, match=r"is damaged: state.pt cannot be read"):
        engine.load_checkpoint(saved.parent)
    assert not mark.exists()


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x80\x02X\xff", None])
def test_a_megatron_checkpoint_runs_nothing_and_its_errors_name_the_file(tmp_path, content):
    path, mark = tmp_path / "megatron" / "mp_rank_00" / "model_optim_rng.pt", tmp_path / "executed"
    path.parent.mkdir(parents=True)
    if content is None:
        torch.save({"args": Touch(mark), "model": {}}, path)
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model_optim_rng.pt is not a file of tensors"):
        MegatronCheckpoint(path.parents[1])
    assert not mark.exists()


def test_files_outside_of_the_checkpoint_are_not_read(saved, tmp_path):
    engine, mark = step(linear_engine(2.0)), tmp_path / "executed"
    shutil.copy(saved / "__0_0.distcp", tmp_path / "elsewhere")
    true_index = pickle.loads((saved / ".metadata").read_bytes())
    for path in ("../../elsewhere", str(tmp_path / "elsewhere"), "elsewhere", 5):
        index = pickle.loads(pickle.dumps(true_index))
        places = index.storage_data
        index.storage_data = {key: dataclasses.replace(place, relative_path=path) for key, place in places.items()}
        replace_index(saved, index)
        _assert_refused_unexecuted(saved, engine, mark, path)
    replace_index(saved, true_index)
    manifest = json.loads((saved / MANIFEST).read_text())
    manifest["files"]["../../elsewhere"] = (tmp_path / "elsewhere").stat().st_size
    (saved / MANIFEST).write_text(json.dumps(manifest))
    _assert_refused_unexecuted(saved, engine, mark, "the manifest")
    # Nor removed, when the checkpoint is replaced.
    linear_engine(3.0).save_checkpoint(saved.parent, tag="a")
    assert (tmp_path / "elsewhere").exists()
