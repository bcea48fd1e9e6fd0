"""A save in the middle of an accumulation changes nothing of the run, to the bit, and says what it leaves out."""

import logging

import pytest
import torch

import hybrid_engine
from tests.support.checkpoint_files import linear_engine, step
from tests.support.distributed import run_distributed
from tests.support.training_reference import batches, engine_config, tiny_llama, whole_weights

PRECISIONS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "loss_scale": 8}}}


def _train(stage, world_size, precision, folder=None):
    """Two steps; with a folder, saves after each `backward()` and each `step()`. The losses, norms and weights."""
    config = engine_config(stage, world_size, **PRECISIONS[precision])
    engine, *_ = hybrid_engine.initialize(model=tiny_llama(), config=config)
    numbers = []
    for micro_batches in batches(2):
        for tokens in micro_batches[engine.sharding.rank :: world_size]:
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            if folder is not None:
                engine.save_checkpoint(folder, "between")
            engine.step()
            if folder is not None:
                engine.save_checkpoint(folder, "after")
            numbers.append(loss.item())
        numbers.append(engine.get_global_grad_norm())
    return numbers, whole_weights(engine)


def _assert_equal(saved, unsaved):
    assert saved[0] == unsaved[0]
    assert all(torch.equal(saved[1][name], unsaved[1][name]) for name in unsaved[1])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_saves_between_backward_and_step_change_nothing_on_one_process(tmp_path, precision):
    _assert_equal(_train(1, 1, precision, tmp_path), _train(1, 1, precision))


def _two_processes(rank, world_size, folder):
    for stage, precision in ((0, "fp32"), (1, "bf16"), (2, "bf16"), (3, "fp32")):
        _assert_equal(_train(stage, world_size, precision, folder), _train(stage, world_size, precision))
    return True


def test_saves_between_backward_and_step_change_nothing_on_two_processes_at_any_stage(tmp_path):
    assert run_distributed(_two_processes, 2, tmp_path) == [True, True]


@pytest.mark.parametrize(("num_done", "is_between"), [(0, True), (1, False), (1, True), (2, False)])
def test_the_accumulation_starts_anew_where_such_a_checkpoint_is_loaded(tmp_path, caplog, num_done, is_between):
    """With 3 micro-batches a step: after two steps and `num_done` micro-batches, or in the middle of the next."""
    config = {"train_batch_size": 3, "gradient_accumulation_steps": 3}
    engine = step(linear_engine(1.0, **config), 6 + num_done)
    if is_between:
        engine.backward(engine(torch.ones(1, 3)).square().sum())
    engine.save_checkpoint(tmp_path)
    resumed = step(linear_engine(2.0, **config), 4)
    resumed.backward(resumed(torch.ones(1, 3)).sum())
    with caplog.at_level(logging.WARNING):
        resumed.load_checkpoint(tmp_path)
    assert f"of the {num_done + is_between} micro-batches since the last step are not in it" in caplog.text
    assert resumed.global_steps == 2 and resumed.num_pending_micro_batches == 0
    with pytest.raises(ValueError, match="there are no gradients"):
        resumed.step()
    never_stopped = step(linear_engine(1.0, **config), 9)
    step(resumed, 3)
    assert resumed.global_steps == 3
    assert torch.equal(resumed.module.weight, never_stopped.module.weight)


def test_a_load_of_the_weights_alone_in_the_middle_of_a_step_begins_that_step_again(tmp_path):
    config = {"train_batch_size": 3, "gradient_accumulation_steps": 3}
    engine = step(linear_engine(1.0, **config), 3)
    engine.save_checkpoint(tmp_path)
    step(engine, 2)
    engine.load_checkpoint(tmp_path, load_module_only=True)
    assert [step(engine, 1).global_steps for _ in range(3)] == [1, 1, 2]
