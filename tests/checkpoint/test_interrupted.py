"""A save or a load that ends early leaves the engine, and what was saved, as they were."""

import linecache
import logging
import signal

import pytest
import torch
from torch import nn

import hybrid_engine
from tests.support.checkpoint_files import as_format_1, is_same, linear_engine, snapshot, step
from tests.tools.attack.interrupts import interrupting, record_points

BF16 = {
    "bf16": {"enabled": True},
    "gradient_accumulation_steps": 2,
    "train_batch_size": 2,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
}
NUM_POINTS = 25


def _is_in_destructor(point):
    """Whether the point is a file object's last `close()`, which its destructor calls, dropping whatever it raises."""
    return point.visit > 1 and linecache.getline(point.file, point.line).strip() in ("self.flush()", "self.raw.flush()")


def _some(points):
    """Points evenly spread over a call, and its last ones, where it commits itself."""
    points = [point for point in points if not _is_in_destructor(point)]
    return [*points[:: max(1, len(points) // NUM_POINTS)], *points[-5:]]


def _interrupt(point, action):
    """Runs `action` with Ctrl-C at `point`; whether that ended it."""
    try:
        with interrupting(point):
            action()
    except KeyboardInterrupt:
        return True
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return False


def test_ctrl_c_at_any_line_of_a_load_leaves_an_engine_that_is_the_old_or_the_loaded_one(tmp_path):
    saving = step(linear_engine(1.0, **BF16), 6)
    saving.save_checkpoint(tmp_path)
    loaded, engine = linear_engine(3.0, **BF16), linear_engine(2.0, **BF16)
    loaded.load_checkpoint(tmp_path)
    expected, was_old = snapshot(loaded), 0
    for point in _some(record_points(lambda: engine.load_checkpoint(tmp_path))):
        torch.manual_seed(7)
        step(engine, 3)  # the last micro-batch is of a step that is not done
        before = snapshot(engine)
        assert _interrupt(point, lambda: engine.load_checkpoint(tmp_path)), point
        after = snapshot(engine)
        was_old += is_same(before, after)
        assert is_same(before, after) or is_same(expected, after), point
        engine.load_checkpoint(tmp_path)
        assert is_same(expected, snapshot(engine)), point
    assert was_old > NUM_POINTS // 2


def test_ctrl_c_at_any_line_of_a_save_leaves_the_engine_and_a_whole_latest_checkpoint(tmp_path):
    engine, loaded = step(linear_engine(1.0, **BF16), 2), linear_engine(3.0, **BF16)
    engine.save_checkpoint(tmp_path, "kept")
    kept = snapshot(engine)
    points = record_points(lambda: engine.save_checkpoint(tmp_path, "kept"))
    was_old = 0
    for point in _some(points):
        step(engine, 2)
        before = snapshot(engine)
        assert _interrupt(point, lambda: engine.save_checkpoint(tmp_path, "kept")), point
        assert is_same(before, snapshot(engine)), point
        loaded.load_checkpoint(tmp_path)
        found = snapshot(loaded)
        was_old += is_same(kept["masters"], found["masters"])
        assert any(is_same(each["masters"], found["masters"]) for each in (kept, before)), point
        engine.save_checkpoint(tmp_path, "kept")
        kept = snapshot(engine)
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"kept", "latest", "zero_to_fp32.py", ".hybrid_engine.lock"}, point
    assert was_old > NUM_POINTS // 2


class _Fails:
    """Parts of an engine that take a state over halfway and fail."""

    class Scheduler(torch.optim.lr_scheduler.StepLR):
        is_broken = False

        def load_state_dict(self, state_dict):
            super().load_state_dict(state_dict)
            if self.is_broken:
                type(self).is_broken = False
                raise RuntimeError("the scheduler fails")

    class Optimizer(torch.optim.AdamW):
        is_broken = False

        def load_state_dict(self, state_dict):
            super().load_state_dict(state_dict)
            if self.is_broken:
                raise KeyError("the optimizer fails")


def _fragile_engine(value):
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    return hybrid_engine.initialize(
        model=model,
        optimizer=lambda groups: _Fails.Optimizer(groups, lr=0.1),
        lr_scheduler=lambda optimizer: _Fails.Scheduler(optimizer, 1),
        config={"train_batch_size": 1},
    )[0]


@pytest.mark.parametrize("part", ["scheduler", "optimizer"])
def test_a_part_that_fails_to_take_its_state_leaves_all_of_them_as_they_were(tmp_path, part):
    step(_fragile_engine(1.0), 2).save_checkpoint(tmp_path)
    engine = step(_fragile_engine(2.0))
    before = snapshot(engine)
    broken = type(engine.lr_scheduler if part == "scheduler" else engine.optimizer.inner)
    broken.is_broken = True
    with pytest.raises(ValueError, match=f"cannot be loaded .*the {part} fails"):
        engine.load_checkpoint(tmp_path)
    broken.is_broken = False
    assert is_same(before, snapshot(engine))
    engine.load_checkpoint(tmp_path)
    assert engine.global_steps == 2 and step(engine).global_steps == 3


def test_values_that_are_missing_or_of_another_form_are_refused(tmp_path):
    folder = step(linear_engine(1.0, **BF16), 2).save_checkpoint(tmp_path)
    values = torch.load(folder / "state.pt", weights_only=True)
    engine = step(linear_engine(2.0, **BF16), 3)
    before = snapshot(engine)
    for name in values:
        if name == "client_state":
            continue
        others = {key: other for key, other in values.items() if key != name}
        missing = [] if name == "measured" else [others]  # earlier versions stored none
        for damaged in (*missing, {**values, name: "text"}, {**values, name: {"a": 1}}):
            torch.save(damaged, folder / "state.pt")
            as_format_1(folder)
            with pytest.raises(ValueError, match=r"cannot be loaded|is damaged"):
                engine.load_checkpoint(tmp_path)
            assert is_same(before, snapshot(engine)), (name, damaged)
    torch.save([1], folder / "state.pt")
    as_format_1(folder)
    with pytest.raises(ValueError, match="is damaged"):
        engine.load_checkpoint(tmp_path)


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}
STATIC = {"fp16": {"enabled": True, "loss_scale": 8}}


@pytest.mark.parametrize(
    ("saved", "own", "scale"), [(FP16, STATIC, 8), (STATIC, FP16, 16), (FP16, {}, 1), ({}, FP16, 16)]
)
def test_a_loss_scale_of_another_kind_stays_the_engines_own_and_a_warning_says_so(tmp_path, saved, own, scale, caplog):
    saving = step(linear_engine(1.0, **saved), 2)
    saving.save_checkpoint(tmp_path)
    engine = step(linear_engine(2.0, **own))
    own_state = engine.optimizer.loss_scaler.state_dict()
    engine.load_checkpoint(tmp_path)
    assert engine.optimizer.loss_scaler.state_dict() == own_state and engine.optimizer.cur_scale == scale
    assert "this engine's stays" in caplog.text and engine.global_steps == 2
    ours, theirs = snapshot(engine)["masters"], snapshot(saving)["masters"]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _scheduled(kind, **params):
    return {"scheduler": {"type": kind, "params": {"warmup_num_steps": 5, "total_num_steps": 20, **params}}}


def test_another_schedule_is_refused_and_may_be_kept(tmp_path):
    step(linear_engine(1.0, **_scheduled("WarmupDecayLR")), 3).save_checkpoint(tmp_path)
    engine = step(linear_engine(2.0, **_scheduled("WarmupCosineLR")))
    before = snapshot(engine)
    with pytest.raises(ValueError, match=r"scheduler WarmupDecayLR, the engine has WarmupCosineLR.*states=False"):
        engine.load_checkpoint(tmp_path)
    assert is_same(before, snapshot(engine))
    engine.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert engine.global_steps == 3 and is_same(before["scheduler"], engine.lr_scheduler.state_dict())
    without = step(linear_engine(2.0))
    without.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert without.global_steps == 3


def test_options_that_were_changed_since_are_named_and_those_that_were_not_are_not(tmp_path, caplog):
    linear = {**_scheduled("WarmupLR", warmup_max_lr=0.1)}
    linear["scheduler"]["params"].pop("total_num_steps")

    def build(**params):
        return linear_engine(2.0, optimizer={"type": "AdamW", "params": params}, **linear)

    step(build(lr=1e-3, betas=[0.9, 0.95], weight_decay=0.1), 3).save_checkpoint(tmp_path)
    with caplog.at_level(logging.WARNING):
        same = step(build(lr=1e-3, betas=[0.9, 0.95], weight_decay=0.1))
        caplog.clear()
        same.load_checkpoint(tmp_path)
        assert not caplog.text
        linear["scheduler"]["params"]["warmup_max_lr"] = 0.5
        other = step(build(lr=2e-3, betas=[0.9, 0.99], weight_decay=0.2))
        caplog.clear()
        other.load_checkpoint(tmp_path)
    for text in (
        "lr is 0.001 there and 0.002 here",
        "betas is [0.9, 0.95] there and [0.9, 0.99] here",
        "weight_decay is 0.1 there and 0.2 here",
        "max_lrs of the schedule is [0.1] there and [0.5] here",
    ):
        assert text in caplog.text
    assert caplog.text.count("was saved with other options") == 1
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.1


def test_without_the_optimizers_state_schedule_counters_and_data_go_on_and_another_optimizer_may(tmp_path):
    data = [{"x": torch.full((3,), float(i))} for i in range(8)]
    config = {"train_batch_size": 1, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}

    def build(value, kind):
        model = nn.Linear(3, 2)
        nn.init.constant_(model.weight, value)
        config["optimizer"] = {"type": kind, "params": {"lr": 0.01}}
        return hybrid_engine.initialize(model=model, config=config, training_data=data)[0]

    engine = build(1.0, "AdamW")
    for batch, _ in zip(engine.training_dataloader, range(3), strict=False):
        engine.backward(engine(batch["x"]).sum())
        engine.step()
    engine.save_checkpoint(tmp_path, client_state={"epoch": 1})
    for kind in ("AdamW", "SGD"):
        other = step(build(2.0, kind))
        state = other.optimizer.state_dict()["optimizer"]["state"]
        _, client_state = other.load_checkpoint(tmp_path, load_optimizer_states=False)
        assert client_state == {"epoch": 1}
        assert [other.global_steps, other.global_samples, other.skipped_steps] == [3, 3, 0]
        assert other.get_lr() == engine.get_lr() and other.lr_scheduler.state_dict() == engine.lr_scheduler.state_dict()
        assert is_same(state, other.optimizer.state_dict()["optimizer"]["state"])
        assert is_same(dict(engine.module.named_parameters()), dict(other.module.named_parameters()))
        assert other.training_dataloader.state_dict() == engine.training_dataloader.state_dict()
