"""Ctrl-C at awkward moments: what is under way is finished or undone, and nothing of the process stays changed."""

import signal
import threading

import pytest
import torch

import hybrid_engine
from hybrid_engine.distributed import verdict
from hybrid_engine.distributed.verdict import holding_interrupts, restoring_modes
from tests.support.training_reference import tiny_llama
from tests.tools.attack.interrupts import Cycle

pytestmark = pytest.mark.quick


def press():
    signal.raise_signal(signal.SIGINT)


def test_what_is_inside_is_done_before_the_interrupt_is_raised():
    done = []
    with pytest.raises(KeyboardInterrupt), holding_interrupts():
        press()
        done.append("inner half")
        with holding_interrupts():
            press()
        done.append("outer half")
    assert done == ["inner half", "outer half"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_comes_through_where_it_is_allowed_and_is_held_again_after_it():
    seen = []
    with pytest.raises(KeyboardInterrupt), holding_interrupts() as held:
        try:
            with held.allowed():
                press()
                seen.append("not reached")
        finally:
            press()  # cleaning up
            seen.append("clean")
    assert seen == ["clean"]
    with pytest.raises(KeyboardInterrupt), holding_interrupts() as held:
        press()
        with held.allowed():
            seen.append("not reached")
    assert seen == ["clean"]


def test_who_insists_is_not_held(monkeypatch):
    monkeypatch.setattr(verdict, "INSISTS_AFTER", 0.0)
    seen = []
    with pytest.raises(KeyboardInterrupt), holding_interrupts():
        press()
        seen.append("held")
        press()
        seen.append("not reached")
    assert seen == ["held"]


def test_other_threads_and_other_handlers_are_left_alone():
    thread = threading.Thread(target=lambda: holding_interrupts().__enter__())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with holding_interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_modes_that_an_error_left_behind_are_put_back():
    with pytest.raises(KeyboardInterrupt), restoring_modes():
        torch.set_grad_enabled(False)
        torch.autocast_increment_nesting()
        raise KeyboardInterrupt
    assert torch.is_grad_enabled()
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0


def interrupt_in(monkeypatch, owner, name, error=None):
    """Ctrl-C, or `error`, once `owner.name` has done its work."""
    original = getattr(owner, name)

    def interrupted(*args, **kwargs):
        result = original(*args, **kwargs)
        if error is not None:
            raise error
        press()
        return result

    monkeypatch.setattr(owner, name, interrupted)


def test_a_step_is_finished_before_the_interrupt_is_raised(monkeypatch):
    cycle, other = Cycle({}), Cycle({})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_in(patch, cycle.engine.optimizer.inner, "step")
        cycle.run()
    other.run()
    assert cycle.counters() == other.counters()
    assert all(torch.equal(value, other.state()[name]) for name, value in cycle.state().items())


def test_after_a_step_that_broke_off_in_the_middle_only_a_checkpoint_helps(monkeypatch, tmp_path):
    cycle = Cycle({})
    cycle.run()
    cycle.engine.save_checkpoint(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        interrupt_in(patch, cycle.engine.optimizer.inner, "step", MemoryError())
        cycle.run()
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    for use in (
        lambda: cycle.engine(input_ids=tokens),
        lambda: cycle.engine.generate(tokens),
        lambda: cycle.engine.save_checkpoint(tmp_path, "torn"),
        lambda: cycle.engine.save_16bit_model(tmp_path / "torn"),
        lambda: cycle.engine.step(),
    ):
        with pytest.raises(ValueError, match=r"the last step\(\) failed midway.*load_checkpoint\(\)"):
            use()
    assert not (tmp_path / "torn").exists()
    cycle.engine.load_checkpoint(tmp_path)
    cycle.has_gradients = False
    cycle.run()
    assert cycle.engine.global_steps == 2


def test_an_interrupted_backward_pass_drops_its_gradients_and_those_before(monkeypatch):
    cycle = Cycle({"gradient_accumulation_steps": 2})
    engine, tokens = cycle.engine, torch.ones(2, 4, dtype=torch.int64)
    engine.train()
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    loss = engine(input_ids=tokens, labels=tokens).loss
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_in(patch, engine.optimizer, "accumulate_gradients")
        engine.backward(loss)
    assert all(trained.master.grad is None for trained in engine.optimizer.parameters)
    assert (engine.micro_steps, engine.num_pending_micro_batches) == (0, 0)
    with pytest.raises(ValueError, match="there are no gradients"):
        engine.step()


def test_a_block_that_is_interrupted_while_it_gathers_is_left(monkeypatch):
    model = tiny_llama()
    engine, *_ = hybrid_engine.initialize(
        model=model, config={"train_batch_size": 1, "zero_optimization": {"stage": 3}}
    )
    params = list(engine.module.parameters())
    block = hybrid_engine.zero.GatheredParameters(params)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_in(patch, block, "_enter")
        block.__enter__()
    with hybrid_engine.zero.GatheredParameters(params):
        pass
    assert torch.is_grad_enabled()
