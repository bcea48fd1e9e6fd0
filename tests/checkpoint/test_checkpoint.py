"""Checkpoints: a resumed run gives the numbers of one that never stopped, and a kill at any moment loses nothing."""

import copy
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import hybrid_engine
from hybrid_engine.checkpoint.manifest import MANIFEST
from hybrid_engine.checkpoint.saving import LOCK_FILE
from hybrid_engine.ops.adam import DeepSpeedCPUAdam, FusedAdam
from hybrid_engine.ops.lamb import FusedLamb
from hybrid_engine.ops.lion import DeepSpeedCPULion, FusedLion
from tests.support.distributed import run_distributed
from tests.support.training_reference import (
    engine_config,
    relative_error,
    tiny_llama,
    train_engine,
    train_plainly,
    whole_weights,
)

pytestmark = [pytest.mark.long, pytest.mark.torch_versions]

BEFORE, AFTER = 3, 4
# Stages, and whether the engine ran before it loads: at the first forward pass FSDP may lay its shards out anew.
CASES = [(0, False), (1, True), (3, False), (3, True)]


def _samples():
    return [{"input_ids": torch.arange(i, i + 12) % 65} for i in range(21)]


def _engine(stage=0, *, seed=0, **config):
    """An engine whose numbers depend on the random state (dropout) and on the position in the data."""
    model = tiny_llama(seed, dropout=0.1)
    engine, *_ = hybrid_engine.initialize(model=model, training_data=_samples(), config=engine_config(stage, **config))
    return engine.train()


def _train_on_loader(engine, num_steps):
    losses = []
    until = engine.global_steps + num_steps
    while engine.global_steps < until:
        for batch in engine.training_dataloader:
            loss = engine(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
            engine.backward(loss)
            engine.step()
            losses.append((loss.item(), random.random(), np.random.rand()))
            if engine.global_steps == until:
                break
    return losses


@pytest.mark.parametrize(
    "precision", [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale_window": 3}}]
)
def test_resuming_gives_bit_for_bit_the_run_that_never_stopped(tmp_path, precision):
    engine = _engine(**precision)
    _train_on_loader(engine, BEFORE)
    path = engine.save_checkpoint(tmp_path, client_state={"best": 0.5, "table": torch.ones(2)})
    expected = _train_on_loader(engine, AFTER)

    resumed = _engine(seed=9, **precision)
    _train_on_loader(resumed, 1)
    torch.manual_seed(77)
    loaded_path, client_state = resumed.load_checkpoint(tmp_path)
    assert loaded_path == str(path) and path.name == f"global_step{BEFORE}"
    assert client_state["best"] == 0.5 and torch.equal(client_state["table"], torch.ones(2))
    assert _train_on_loader(resumed, AFTER) == expected
    for (name, a), b in zip(engine.module.named_parameters(), resumed.module.parameters(), strict=True):
        assert torch.equal(a, b), name
    for counter in ("global_steps", "micro_steps", "global_samples", "skipped_steps"):
        assert getattr(engine, counter) == getattr(resumed, counter), counter
    assert engine.get_lr() == resumed.get_lr()
    assert engine.optimizer.loss_scaler.state_dict() == resumed.optimizer.loss_scaler.state_dict()


RATES = {"lr": 1e-2, "weight_decay": 0.1}
UNCORRECTED = {**RATES, "bias_correction": False}
OPTIMIZERS = {
    "FusedAdam": lambda groups: FusedAdam(groups, **RATES),
    "FusedAdam, uncorrected": lambda groups: FusedAdam(groups, **UNCORRECTED),
    "DeepSpeedCPUAdam, uncorrected": lambda groups: DeepSpeedCPUAdam(groups, **UNCORRECTED),
    "FusedLamb": lambda groups: FusedLamb(groups, **RATES),
    "FusedLion": lambda groups: FusedLion(groups, **RATES),
    "DeepSpeedCPULion": lambda groups: DeepSpeedCPULion(groups, **RATES),
    "Adam of the config, uncorrected": {"type": "Adam", "params": UNCORRECTED},
    "Adam of the config, uncorrected and coupled": {"type": "Adam", "params": {**UNCORRECTED, "adam_w_mode": False}},
    "Lamb of the config": {"type": "Lamb", "params": RATES},
    "Lion of the config": {"type": "Lion", "params": RATES},
}


def _engine_on_noise(seed, optimizer):
    """An engine with an optimizer that is passed, or is the config's."""
    torch.manual_seed(seed)
    config = {"train_batch_size": 1, "bf16": {"enabled": True}}
    if callable(optimizer):
        return hybrid_engine.initialize(model=nn.Linear(5, 3), optimizer=optimizer, config=config)[0]
    return hybrid_engine.initialize(model=nn.Linear(5, 3), config={**config, "optimizer": optimizer})[0]


def _train_on_noise(engine, first_step, num_steps):
    for step in range(first_step, first_step + num_steps):
        # Other inputs at each step, so that moments are no multiple of the gradient.
        inputs = torch.randn(1, 5, generator=torch.Generator().manual_seed(step)).bfloat16()
        engine.backward(engine(inputs).float().square().sum())
        engine.step()
    return [trained.master.detach().clone() for trained in engine.optimizer.parameters]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_resumes_bit_for_bit(tmp_path, name):
    engine = _engine_on_noise(0, OPTIMIZERS[name])
    _train_on_noise(engine, 0, BEFORE)
    engine.save_checkpoint(tmp_path)
    resumed = _engine_on_noise(1, OPTIMIZERS[name])
    resumed.load_checkpoint(tmp_path)
    expected, continued = (_train_on_noise(each, BEFORE, AFTER) for each in (engine, resumed))
    assert all(torch.equal(a, b) for a, b in zip(expected, continued, strict=True))


def test_saving_changes_nothing(tmp_path):
    engine, other = _engine(), _engine()
    torch.manual_seed(3)
    expected = [loss for loss, *_ in _train_on_loader(other, BEFORE + AFTER)]
    torch.manual_seed(3)
    losses = _train_on_loader(engine, BEFORE)
    engine.save_checkpoint(tmp_path)
    losses += _train_on_loader(engine, AFTER)
    assert [loss for loss, *_ in losses] == expected


def test_adapters_and_their_frozen_base_are_both_saved(tmp_path):
    def adapted(seed):
        model = get_peft_model(tiny_llama(seed), LoraConfig(r=2, target_modules=["q_proj"]))
        return hybrid_engine.initialize(model=model, config=engine_config())[0]

    engine, resumed = adapted(0), adapted(1)
    train_engine(engine, BEFORE)
    engine.save_checkpoint(tmp_path)
    resumed.load_checkpoint(tmp_path)
    for (name, a), b in zip(engine.module.named_parameters(), resumed.module.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert train_engine(engine, 2, first_step=BEFORE).losses == train_engine(resumed, 2, first_step=BEFORE).losses


def test_an_engine_without_an_optimizer_takes_the_weights_and_leaves_the_random_state_alone(tmp_path):
    engine = _engine(bf16={"enabled": True})
    _train_on_loader(engine, BEFORE)
    engine.save_checkpoint(tmp_path)
    config = {"train_batch_size": 1, "bf16": {"enabled": True}}
    evaluation, optimizer, *_ = hybrid_engine.initialize(model=tiny_llama(4), config=config)
    state = torch.get_rng_state()
    evaluation.load_checkpoint(tmp_path)
    assert optimizer is None and torch.equal(torch.get_rng_state(), state)
    for a, b in zip(engine.module.parameters(), evaluation.module.parameters(), strict=True):
        assert torch.equal(a, b)


def _two_processes(rank, world_size, folder, from_one):
    saving, *_ = hybrid_engine.initialize(model=tiny_llama(), config=engine_config(3, world_size))
    train_engine(saving, BEFORE)
    saving.save_checkpoint(folder, tag="of_two", client_state={"rank": rank})
    results = {"continued": train_engine(saving, AFTER, first_step=BEFORE)}
    for stage, has_run in CASES:
        engine, *_ = hybrid_engine.initialize(model=tiny_llama(7), config=engine_config(stage, world_size))
        if has_run:
            train_engine(engine, 1)
        _, client_state = engine.load_checkpoint(from_one, tag="of_one")
        assert engine.global_steps == BEFORE and client_state == {}
        results["from one", stage, has_run] = train_engine(engine, AFTER, first_step=BEFORE)
    results["uncorrected"] = []
    uncorrected = {"type": "Adam", "params": {"lr": 1e-2, "bias_correction": False}}
    for has_saved in (True, False):
        engine, *_ = hybrid_engine.initialize(
            model=tiny_llama(0 if has_saved else 7), config=engine_config(3, world_size, optimizer=uncorrected)
        )
        if has_saved:
            train_engine(engine, BEFORE)
            engine.save_checkpoint(folder / "uncorrected")
        else:
            engine.load_checkpoint(folder / "uncorrected")
        results["uncorrected"].append(train_engine(engine, 2, first_step=BEFORE).weights)
    try:
        engine.load_checkpoint(from_one, tag="absent")
    except ValueError as error:
        results["error"] = str(error)
    return results


def test_a_checkpoint_continues_on_another_number_of_processes_and_at_another_stage(tmp_path):
    engine, *_ = hybrid_engine.initialize(model=tiny_llama(), config=engine_config(2))
    train_engine(engine, BEFORE)
    engine.save_checkpoint(tmp_path, tag="of_one")
    plain = train_plainly(tiny_llama(), BEFORE + AFTER)
    ranks = run_distributed(_two_processes, 2, tmp_path / "two", tmp_path)
    for results in ranks:
        assert relative_error(results["continued"].weights, plain.weights) < 1e-6
        for stage, has_run in CASES:
            continued = results["from one", stage, has_run]
            assert relative_error(continued.weights, plain.weights) < 1e-6
            assert continued.norms == pytest.approx(plain.norms[BEFORE:], rel=1e-6)
        never_stopped, resumed = results["uncorrected"]
        assert all(torch.equal(never_stopped[name], resumed[name]) for name in never_stopped)
        assert "no such checkpoint" in results["error"] and "of_one" in results["error"]

    one, *_ = hybrid_engine.initialize(model=tiny_llama(7), config=engine_config(1))
    _, client_state = one.load_checkpoint(tmp_path / "two")
    assert client_state == {"rank": 0}
    continued = train_engine(one, AFTER, first_step=BEFORE)
    assert continued.losses == pytest.approx(plain.losses[BEFORE:], rel=1e-6)
    assert relative_error(continued.weights, plain.weights) < 1e-6


# The moments of a save at which the process is killed, as (function, which of its calls).
KILLS = [
    *(("touch", 1), ("write_data", 1), ("fsync", 2), ("rename", 1), ("rename", 2), ("rename", 3)),
    *(("replace", 1), ("unlink", 1), ("unlink", 2), ("unlink", 4), ("rmdir", 1)),
]

KILLED_SAVE = """
import os, pathlib, signal, sys
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
import hybrid_engine

torch.set_num_threads(1)

def build(value):
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    return hybrid_engine.initialize(
        model=model, config={"train_batch_size": 1, "optimizer": {"type": "AdamW"}}
    )[0]

def kill_at(owner, name, count):
    original, calls = getattr(owner, name), [0]
    def dying(*args, **kwargs):
        calls[0] += 1
        if calls[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    setattr(owner, name, dying)

path = pathlib.Path
owners = {"write_data": FileSystemWriter, "fsync": os}

def save_in_child(folder, value, *kill):
    child = os.fork()
    if child == 0:
        if kill:
            kill_at(owners.get(kill[0], path), *kill)
        build(value).save_checkpoint(folder, tag="kept")
        os._exit(0)
    return os.waitpid(child, 0)[1]

build(0.0)  # imports what a child would import anew
for number, (name, count) in enumerate(KILLS):
    folder = os.path.join(sys.argv[1], str(number))
    assert save_in_child(folder, 1.0) == 0
    status = save_in_child(folder, 2.0, name, count)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (name, count, status)
"""


def test_a_save_over_the_same_tag_killed_at_any_moment_leaves_the_old_or_the_new_one(tmp_path):
    script = f"KILLS = {KILLS!r}\n{KILLED_SAVE}"
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    found = []
    for number in range(len(KILLS)):
        folder = tmp_path / str(number)
        engine = _linear_engine(0.0)
        engine.load_checkpoint(folder)
        found.append(engine.module.weight[0, 0].item())
        # The next save clears up and works.
        _linear_engine(3.0).save_checkpoint(folder, tag="kept")
        engine.load_checkpoint(folder)
        assert engine.module.weight[0, 0].item() == 3.0
        assert sorted(path.name for path in folder.iterdir()) == [LOCK_FILE, "kept", "latest", "zero_to_fp32.py"]
        assert not list((folder / "kept").glob(".*hybrid_engine*"))
    # Killed before the new one had its name, and after.
    assert found == [1.0] * 6 + [2.0] * 5


def _linear_engine(value, size=3, **more):
    model = nn.Linear(size, 2)
    nn.init.constant_(model.weight, value)
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, **more}
    return hybrid_engine.initialize(model=model, config=config)[0]


def _snapshot(engine):
    return copy.deepcopy((dict(engine.module.named_parameters()), engine.optimizer.state_dict(), engine.global_steps))


def _assert_refuses(engine, folder, pattern, tag=None):
    before = _snapshot(engine)
    with pytest.raises(ValueError, match=pattern):
        engine.load_checkpoint(folder, tag)
    after = _snapshot(engine)
    assert after[2] == before[2] and after[1].keys() == before[1].keys()
    assert all(torch.equal(a, b) for a, b in zip(after[0].values(), before[0].values(), strict=True))
    assert str(after[1]) == str(before[1])


def _step(engine):
    engine.backward(engine(torch.ones(1, engine.module.in_features)).sum())
    engine.step()
    return engine


@pytest.fixture
def saved(tmp_path) -> Path:
    _step(_linear_engine(1.0)).save_checkpoint(tmp_path, tag="a")
    return tmp_path


@pytest.mark.parametrize("name", ["state.pt", "__0_0.distcp", ".metadata", "checkpoint.json"])
@pytest.mark.parametrize("damage", ["missing", "cut off"])
def test_an_incomplete_checkpoint_is_refused_and_the_engine_unchanged(saved, name, damage):
    path = saved / "a" / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    _assert_refuses(_step(_linear_engine(2.0)), saved, "is incomplete|is damaged")


def test_a_checkpoint_of_another_model_is_refused_naming_the_first_ten_differences(saved, tmp_path):
    _assert_refuses(_step(_linear_engine(2.0, size=4)), saved, r"1 differences.*weight has shape \[2, 4\] in the model")
    many = nn.ModuleDict({f"part{i}": nn.Linear(1, 1) for i in range(8)})
    engine, *_ = hybrid_engine.initialize(model=many, config={"train_batch_size": 1, "optimizer": {"type": "AdamW"}})
    with pytest.raises(ValueError, match="of another model: 18 differences") as error:
        engine.load_checkpoint(saved)
    assert str(error.value).count("is not in the") == 10


def _without_checksums(folder):
    """Makes the manifest one of format 1."""
    manifest = json.loads((folder / MANIFEST).read_text())
    kept = {key: value for key, value in manifest.items() if key not in ("checksum", "checksums")}
    (folder / MANIFEST).write_text(json.dumps({**kept, "format": 1}))


def test_a_newer_format_is_refused_whatever_else_its_manifest_says(saved):
    path = saved / "a" / MANIFEST
    manifest = json.loads(path.read_text())
    for newer in (manifest, {}, {"files": ["state.pt"]}, {"files": {"state.pt": {"bytes": 5}}}):
        path.write_text(json.dumps({**newer, "format": 3}))
        _assert_refuses(_step(_linear_engine(2.0)), saved, "has format 3, this version reads up to 2")


def test_a_manifest_of_another_shape_is_refused_as_damaged(saved):
    path = saved / "a" / MANIFEST
    manifest = json.loads(path.read_text())
    manifest = {key: value for key, value in manifest.items() if key not in ("checksum", "checksums")} | {"format": 1}
    without_format = {key: value for key, value in manifest.items() if key != "format"}
    for damaged in ([], None, without_format, {**manifest, "format": "1"}, {**manifest, "files": []}, {"format": 1}):
        path.write_text(json.dumps(damaged))
        _assert_refuses(_step(_linear_engine(2.0)), saved, "is damaged: its manifest")


@pytest.mark.parametrize("content", [b"\0", b"garbage", b"\x80\x02X\xff"])
def test_a_garbled_state_of_the_right_size_is_refused_as_damaged(saved, content):
    path = saved / "a" / "state.pt"
    size = path.stat().st_size
    path.write_bytes((content * size)[:size])
    _assert_refuses(_step(_linear_engine(2.0)), saved, "is damaged: state.pt is not what was saved")
    _without_checksums(saved / "a")
    _assert_refuses(_step(_linear_engine(2.0)), saved, "is damaged: state.pt cannot be read; load another tag")


def test_a_function_that_would_load_the_state_dict_itself_is_refused(saved):
    engine = _step(_linear_engine(2.0))
    before = engine.module.weight.detach().clone()
    with pytest.raises(ValueError, match=r"custom_load_fn=<function .* is not supported, as the weights are read as"):
        engine.load_checkpoint(saved, None, True, True, True, False, lambda source, target: None)
    assert torch.equal(engine.module.weight, before)
    engine.load_checkpoint(saved, custom_load_fn=None)
    assert not torch.equal(engine.module.weight, before)


def test_a_missing_tag_or_folder_is_refused_naming_what_there_is(saved, tmp_path):
    engine = _step(_linear_engine(2.0))
    _assert_refuses(engine, saved, "tag='b': there is no such checkpoint.*found a", tag="b")
    _assert_refuses(
        engine, tmp_path / "nowhere", "nowhere' is not a folder; give the one that was passed to save_checkpoint"
    )
    _assert_refuses(
        engine, saved / "a", "has no file 'latest'; it is a checkpoint itself, give load_dir=.* and tag='a'"
    )
    (saved / "a_model_for_transformers").mkdir()
    (saved / "latest").write_text(" ")
    _assert_refuses(engine, saved, "latest' is empty; give the tag of a checkpoint; found a$")
    (saved / "latest").write_bytes(b"\xff")
    _assert_refuses(engine, saved, "there is no such checkpoint in .*; found a$")
    (saved / "latest").unlink()
    _assert_refuses(engine, saved, "has no file 'latest'; give the tag of a checkpoint in it; found a$")


def test_without_a_client_state_an_empty_one_is_loaded_as_in_deepspeed(saved):
    assert _linear_engine(1.0).load_checkpoint(saved)[1] == {}


def test_other_groups_or_another_scheduler_are_refused(saved):
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}}
    frozen, *_ = hybrid_engine.initialize(model=model, config=config)
    _assert_refuses(frozen, saved, r"2 in 1 group\(s\) there, 1 in 1 group\(s\) here")
    scheduled = _linear_engine(2.0, scheduler={"type": "WarmupLR"})
    _assert_refuses(scheduled, saved, "saved with no learning-rate scheduler")


def _engine_with(optimizer_class, **options):
    return hybrid_engine.initialize(
        model=nn.Linear(3, 2),
        optimizer=lambda groups: optimizer_class(groups, **options),
        config={"train_batch_size": 1},
    )[0]


def test_the_state_of_another_optimizer_is_refused_and_the_next_step_works(saved):
    class LookAhead(torch.optim.AdamW):
        def __init__(self, params):
            super().__init__(params)
            self.add_option("horizon", 5)

        def add_option(self, name, value):
            self.defaults[name] = value
            for group in self.param_groups:
                group[name] = value

    for optimizer_class, options in ((torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.Adam, {})):
        engine = _step(_engine_with(optimizer_class, **options))
        _assert_refuses(engine, saved, f"the optimizer AdamW, the engine has {optimizer_class.__name__}")
        assert _step(engine).global_steps == 2
    LookAhead.__name__ = "AdamW"
    _assert_refuses(_step(_engine_with(LookAhead)), saved, "another optimizer AdamW: .*, the engine's .*horizon")


def test_group_entries_that_a_scheduler_added_are_no_other_optimizer(tmp_path):
    engine = _step(_engine_with(torch.optim.AdamW))
    torch.optim.lr_scheduler.StepLR(engine.optimizer.inner, 1)
    engine.save_checkpoint(tmp_path)
    resumed = _engine_with(torch.optim.AdamW)
    resumed.load_checkpoint(tmp_path)
    # torch's own way to resume a schedule needs the entry.
    scheduler = torch.optim.lr_scheduler.StepLR(resumed.optimizer.inner, 1, last_epoch=resumed.global_steps)
    assert scheduler.base_lrs == [1e-3]


class _RaisesWhenPickled:
    def __reduce__(self):
        raise KeyError("own code")


def test_a_client_state_that_cannot_be_stored_or_needs_code_to_load_is_refused(tmp_path):
    looped = {"f": print}
    looped["self"] = looped
    cases = {
        r"client_state\['f'\] holds a function": {"step": 1, "f": lambda: 1},
        r"client_state\['f'\] holds a builtin_function": {"f": print},
        r"client_state\['f'\] holds a builtin": looped,
        r"client_state\['a'\]\[1\] holds a lock": {"a": [1, threading.Lock()]},
        r"client_state\[0\]\['x'\] holds a _RaisesWhenPickled": ({"x": _RaisesWhenPickled()},),
        r"client_state\[<built-in function print>\] holds a builtin": {print: 1},
        r"client_state holds a PosixPath": tmp_path,
        r"client_state\['signal'\] holds a Signals": {"signal": signal.Signals.SIGKILL},
    }
    for message, client_state in cases.items():
        with pytest.raises(ValueError, match=message) as error:
            _linear_engine(1.0).save_checkpoint(tmp_path / "new", client_state=client_state)
        assert str(error.value).endswith("; use numbers, strings, lists, dicts and tensors only")
        # No text of torch, and none as a cause: it advises to load with running code, in escape codes.
        assert "\x1b" not in str(error.value) and error.value.__cause__ is None and error.value.__context__ is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tag", ["", "../a", ".hidden", "latest", "a/b"])
def test_a_tag_that_is_no_folder_name_is_refused(tmp_path, tag):
    with pytest.raises(ValueError, match="must be a plain folder name"):
        _linear_engine(1.0).save_checkpoint(tmp_path, tag=tag)


def test_a_number_is_a_tag_for_saving_and_loading(saved):
    _linear_engine(4.0).save_checkpoint(saved, 5)
    _linear_engine(1.0).save_checkpoint(saved, 0)
    engine = _linear_engine(2.0)
    path, _ = engine.load_checkpoint(saved, tag=5)
    assert path == str(saved / "5") and engine.module.weight[0, 0].item() == 4.0
    engine.load_checkpoint(saved, tag=0)
    assert engine.module.weight[0, 0].item() == 1.0


def test_latest_names_the_newest_and_older_tags_stay_loadable(tmp_path):
    engine = _linear_engine(1.0)
    for value in (1.0, 2.0):
        nn.init.constant_(engine.module.weight, value)
        engine.save_checkpoint(tmp_path, tag=f"v{value:g}")
    loaded = _linear_engine(0.0)
    for tag, value in ((None, 2.0), ("v1", 1.0), ("v2", 2.0)):
        path, _ = loaded.load_checkpoint(tmp_path, tag)
        assert loaded.module.weight[0, 0].item() == value and path.endswith(f"v{value:g}")
    assert whole_weights(loaded)["weight"][0, 0] == 2.0


def test_only_the_weights_are_taken_where_that_is_asked_for(tmp_path):
    config = engine_config(bf16={"enabled": True})
    saved, *_ = hybrid_engine.initialize(model=tiny_llama(), config=config)
    train_engine(saved, 3)
    saved.save_checkpoint(tmp_path, client_state={"epoch": 2})
    for options, steps in (({"load_module_only": True}, 0), ({"load_optimizer_states": False}, 3)):
        fresh, *_ = hybrid_engine.initialize(model=tiny_llama(seed=7), config=config)
        _, client_state = fresh.load_checkpoint(tmp_path, **options)
        for ours, theirs in zip(fresh.optimizer.parameters, saved.optimizer.parameters, strict=True):
            assert torch.equal(ours.master, theirs.master) and torch.equal(ours.param, theirs.param)
        assert client_state == {"epoch": 2} and fresh.global_steps == steps and not fresh.optimizer.state
    resumed, *_ = hybrid_engine.initialize(model=tiny_llama(seed=7), config=config)
    resumed.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert resumed.global_steps == 3 and resumed.lr_scheduler.last_epoch == 0


STAGE_2 = ("mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
STAGE_3 = ("zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")
UNIVERSAL = ("zero/weight/fp32.pt",)


@pytest.mark.parametrize(
    ("files", "advice"),
    [
        (("mp_rank_00_model_states.pt",), "its weights are the entry 'module' of '.*/mp_rank_00_model_states.pt'"),
        (STAGE_2, "convert its weights with .*`python -m deepspeed.utils.zero_to_fp32 .* -t global_step7`"),
        ((*STAGE_3, "../zero_to_fp32.py"), "convert its weights with DeepSpeed's own `python .*/zero_to_fp32.py .*`"),
        (UNIVERSAL, "convert its weights with"),
    ],
)
def test_a_checkpoint_of_deepspeed_is_recognised_at_each_stage_and_the_way_to_its_weights_is_named(
    tmp_path, files, advice
):
    for name in files:
        path = tmp_path / "global_step7" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"pickled")
    engine = _step(_linear_engine(2.0))
    _assert_refuses(engine, tmp_path, "has no file 'latest'; give the tag of a checkpoint in it; found global_step7")
    (tmp_path / "latest").write_text("global_step7")
    _assert_refuses(engine, tmp_path, rf"was written by DeepSpeed; {advice}.* give that model to initialize\(\)")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_consolidated_weights_of_deepspeed_load(tmp_path, dtype):
    """What its zero_to_fp32.py and save_16bit_model() write is a state dict by the module's own names."""
    torch.save(tiny_llama(seed=3).to(dtype).state_dict(), tmp_path / "pytorch_model.bin")
    model = tiny_llama()
    model.load_state_dict(torch.load(tmp_path / "pytorch_model.bin", weights_only=True))
    engine, *_ = hybrid_engine.initialize(model=model, config=engine_config())
    expected = tiny_llama(seed=3).to(dtype).float()
    assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), expected.parameters(), strict=True))
    # A folder that from_pretrained reads, as the Trainer leaves it.
    model.config.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    engine, *_ = hybrid_engine.initialize(model=loaded, config=engine_config())
    assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), expected.parameters(), strict=True))


def test_a_checkpoint_may_be_saved_beside_the_latest(tmp_path):
    engine, *_ = hybrid_engine.initialize(model=tiny_llama(), config=engine_config())
    engine.save_checkpoint(tmp_path, "first")
    engine.save_checkpoint(tmp_path, "aside", save_latest=False)
    assert engine.load_checkpoint(tmp_path)[0].endswith("first")
    assert engine.load_checkpoint(tmp_path, "aside")[0].endswith("aside")
