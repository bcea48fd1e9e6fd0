"""What keeps a GPU from being used is named when an engine, a run or `doctor` starts; torch.cuda is made up here."""

import logging
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import hybrid_engine
from hybrid_engine.cli import cli, machine_checks
from hybrid_engine.config import notices
from hybrid_engine.distributed import processes
from hybrid_engine.engine import attached
from hybrid_engine.engine.checks import check_layer_fits
from hybrid_engine.ops import gpu
from tests.support.models import build_model, padded_prompts

GIB = 1 << 30
CONFIG = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


@pytest.fixture
def card(monkeypatch):
    """A GPU as torch.cuda tells of it: an A100 with nothing on it, whose driver is one for CUDA 13.0."""
    found = SimpleNamespace(capability=(8, 0), free=79 * GIB, total=80 * GIB, driver=(13, 0), compiler=(12, 8), count=1)
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: found.count,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: "Tesla T4",
        "get_device_capability": lambda device=None: found.capability,
        "mem_get_info": lambda device=None: (found.free, found.total),
        "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "memory_snapshot": list,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(gpu, "driver_version", lambda: found.driver)
    monkeypatch.setattr(gpu, "compiler_version", lambda: found.compiler)
    monkeypatch.setenv("HYBRID_ENGINE_FALLBACK", "0")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    processes._say_foreign_memory.cache_clear()
    notices.say_once.cache_clear()
    yield found
    processes._say_foreign_memory.cache_clear()


def test_a_card_with_all_that_is_needed_is_taken_without_a_word(card, caplog):
    processes.check_gpu()
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"capability": (7, 5)}, "cuda:0 is a Tesla T4 of compute capability 7.5, and kernels need 8.0 or newer"),
        (
            {"driver": (11, 8)},
            "the driver is one for CUDA 11.8, and Triton .* compiles kernels for CUDA 12.8;",
        ),
    ],
)
def test_a_card_or_a_driver_that_is_too_old_is_refused_before_a_model_is_touched(card, monkeypatch, changes, words):
    vars(card).update(changes)
    with pytest.raises(ValueError, match=words):
        hybrid_engine.initialize(model=build_model(), config=CONFIG)
    with pytest.raises(ValueError, match=words):
        hybrid_engine.init_inference(build_model())
    monkeypatch.setenv("HYBRID_ENGINE_FALLBACK", "1")
    processes.check_gpu()


def test_a_run_of_a_recipe_says_it_in_one_line_before_its_model_loads(card, capsys, tmp_path):
    card.capability = (7, 5)
    assert cli.main(["sft", "--model", str(tmp_path / "no-model"), "--out", str(tmp_path / "out")]) == cli.REFUSED
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "kernels need 8.0" in said[0] and not (tmp_path / "out").exists()


def test_memory_of_other_processes_is_told_once_and_is_no_error(card, caplog):
    card.free = 30 * GIB
    for _ in range(2):
        processes.check_gpu()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "cuda:0 has 30.0 of 80.0 GiB free, and other processes hold 50.0 GiB" in caplog.text


def test_each_rank_tells_of_its_own_card(card, monkeypatch, caplog):
    card.free, card.count = 30 * GIB, 2
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "1")
    processes.check_gpu()
    assert "cuda:1 has 30.0 of 80.0 GiB free" in caplog.text


def test_a_process_without_a_card_of_its_own_is_refused(card, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="LOCAL_RANK=2 must be below the 1 GPUs seen here"):
        processes.check_gpu()


def test_a_card_that_does_not_hold_one_layer_is_refused(card):
    model = build_model()
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    card.free, card.total = 4 * layer, 4 * layer
    check_layer_fits(model, torch.float32)
    card.free = card.total = 4 * layer - 1
    check_layer_fits(model, torch.bfloat16)
    with pytest.raises(ValueError, match=r"model: one layer takes .* in float32, and cuda:0 has .*; use a GPU"):
        check_layer_fits(model, torch.float32)
    with pytest.raises(ValueError, match="model: one layer takes"):
        hybrid_engine.initialize(model=model, config=CONFIG)  # before any parameter moves
    card.total = 80 * GIB
    with pytest.raises(ValueError, match="another process may hold the rest"):
        check_layer_fits(model, torch.float32)


def test_an_attached_model_on_such_a_card_generates_by_itself_and_says_why(monkeypatch, caplog):
    notices.say_once.cache_clear()
    monkeypatch.setattr(attached, "kernel_problem", lambda device: f"{device} is too old")
    model, (ids, mask) = build_model(), padded_prompts()
    expected = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=4)
    hybrid_engine.attach(model)
    assert "generates with its own generate(): cpu is too old" in caplog.text
    assert torch.equal(model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=4), expected)


@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_cards_are_told_at_start_and_the_cpu_computes(monkeypatch, caplog, visible):
    notices.say_once.cache_clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for start in (partial(hybrid_engine.initialize, config=CONFIG), hybrid_engine.init_inference, hybrid_engine.attach):
        notices.say_once.cache_clear()
        caplog.clear()
        start(model=build_model())
        assert f"computing on the CPU: CUDA_VISIBLE_DEVICES={visible!r} hides every GPU; unset it" in caplog.text


@pytest.mark.parametrize(
    ("built", "words"),
    [("13.0", "the driver is one for CUDA 12.2, and torch was built for CUDA 13.0"), (None, "was built for CPUs")],
)
def test_a_driver_that_torch_cannot_use_is_told_at_start(monkeypatch, caplog, built, words):
    notices.say_once.cache_clear()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu, "driver_version", lambda: (12, 2))
    monkeypatch.setattr(torch.version, "cuda", built)
    processes.check_gpu()
    assert words in caplog.text


def test_the_version_of_tritons_assembler_is_read():
    pytest.importorskip("triton")
    assert gpu.compiler_version.__wrapped__()[0] >= 12


def test_doctor_calls_a_card_broken_that_kernels_cannot_run_on(card, monkeypatch):
    card.capability, card.free = (7, 5), 20 * GIB
    lines = [finding for finding in machine_checks._devices() if finding.name == "cuda:0"]
    assert [line.state for line in lines] == ["broken", "missing"]
    assert "kernels need 8.0" in lines[0].text and "other processes hold 60.0 GiB" in lines[1].text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES='' hides" in next(
        line.text for line in machine_checks._devices() if line.name == "cuda"
    )
