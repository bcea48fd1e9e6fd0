"""An error on one process in the middle of a unit's pass is everybody's, without waiting for a time limit."""

import os
import signal
from contextlib import nullcontext
from itertools import count
from unittest.mock import patch

import pytest
import torch
from torch import nn

import hybrid_engine
from hybrid_engine import ComputeConfig, parallelize
from hybrid_engine.distributed.verdict import LOST
from hybrid_engine.extensions.parallelize.module.steps import Steps
from tests.extensions.parallelize.test_generate import build as build_model_of
from tests.extensions.parallelize.test_generate import build_engine, cycles, parallel
from tests.extensions.parallelize.test_stages_generate import build_engine as build_staged
from tests.extensions.parallelize.test_stages_generate import in_stages, micro_batches, next_token_loss
from tests.extensions.parallelize.test_stages_generate import parallel as parallel_in_stages
from tests.support.distributed import leave_process_group, run_distributed, run_to_the_end
from tests.support.models import padded_prompts
from tests.support.one_rank import Broken, outcome
from tests.support.parallel_nets import Stack, build, sample
from tests.support.random_splits import random_splits

pytestmark = pytest.mark.torch_versions

WHO = 1
GOES_ON = "backward"
"""After which the processes make a new module and engine."""


def loss_of(engine):
    ids, mask = padded_prompts(num_prompts=2)
    return engine(input_ids=ids, attention_mask=mask, labels=ids).loss


def in_forward(engine, fails):
    broken = Broken(engine.module.model.layers[1].mlp.act_fn, "forward", torch.OutOfMemoryError("no"))
    with broken if fails else nullcontext():
        return outcome(lambda: loss_of(engine).item())


def in_backward(engine, fails, run):
    def break_backward(module, args, output):
        if fails:
            output.register_hook(Broken(None, "", ArithmeticError("no")))

    with engine.module.model.layers[0].mlp.register_forward_hook(break_backward):
        loss = loss_of(engine)
    return outcome(lambda: run(loss))


def engine_of(folder, number):
    return build_engine(parallel("llama", 2, 2, folder / str(number)), 0)


def forward(engine, fails, folder):
    """Before it an error of both, in either pass, after which they go on."""
    alike = in_forward(engine, True), in_backward(engine, True, engine.backward)
    assert alike == (("OutOfMemoryError", "no"), ("ArithmeticError", "no"))
    assert isinstance(loss_of(engine).item(), float)
    return in_forward(engine, fails)


def backward(engine, fails, folder):
    return in_backward(engine, fails, engine.backward)


def own_backward(engine, fails, folder):
    """The process that fails says so in its next call of the engine."""
    found = in_backward(engine, fails, lambda loss: loss.backward())
    if fails:
        assert "start them again" in outcome(lambda: loss_of(engine))[1]
    return found


def train_step(engine, fails, folder):
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2, use_end2end=True)
    engine = hybrid_engine.parallelize(build(Stack), {"sample": sample(0)}, "data", config, gen_savedir=folder)

    def scale(loss):
        if fails:
            raise ArithmeticError("no")
        return loss

    return outcome(lambda: engine.train_step([sample(0)], scale_fn=scale))


PASSES = {function.__name__: function for function in (forward, backward, own_backward, train_step)}


def in_a_unit(rank, world_size, name, folder):
    """What the pass of that name gives on this process, and what its engine says then."""
    engine = build_engine(parallel("llama", 2, 2, folder / name), 0)
    found = PASSES[name](engine, rank == WHO, folder / f"{name} more")
    after = outcome(lambda: loss_of(engine)) if name != "train_step" else found
    if name != GOES_ON:
        return found, after, None
    again = build_engine(parallel("llama", 2, 2, folder / name), 0)
    return found, after, cycles(again)["norms"]


def test_an_error_in_the_middle_of_a_pass_is_everybodys_and_a_new_module_goes_on(tmp_path):
    leave_process_group()
    expected = cycles(build_engine(build_model_of("llama"), 0))
    results = run_to_the_end([(in_a_unit, name, tmp_path) for name in PASSES], seconds=60)
    for name, outcomes in zip(PASSES, results, strict=True):
        own, (other, after, _) = outcomes[WHO], outcomes[1 - WHO]
        assert own[0][1] == "no", name
        assert other[0] == "RuntimeError", name
        if name == "own_backward":  # no call of the engine is around it, which would name the process
            assert any(words in other[1] for words in LOST), other
        else:
            assert f"rank {WHO}: " in other[1], (name, other)
            assert "Error: no" in other[1], (name, other)
        assert "start them again" in after[1], (name, after)
        for _, _, norms in outcomes:
            assert norms is None or norms == pytest.approx(expected["norms"], rel=1e-5), name


def in_a_stage(rank, world_size, folder):
    engine = build_staged(parallel_in_stages("llama", 4, folder, in_stages))
    engine.train()
    values, calls = Steps.values, count()

    def broken(*args):
        if next(calls) > 0:
            raise MemoryError("no")
        return values(*args)

    with patch.object(Steps, "values", broken) if rank == 2 else nullcontext():
        return outcome(lambda: engine.train_batch(micro_batches(0, 1), next_token_loss))


def test_so_is_one_of_a_process_that_shares_its_stage(tmp_path):
    found = run_distributed(in_a_stage, 4, tmp_path, seconds=60)
    assert found[2] == ("MemoryError", "no")
    for kind, words in (found[0], found[1], found[3]):
        assert kind in ("MemoryError", "RuntimeError")
        assert "rank 2: " in words
        assert "no" in words


def killed(rank, world_size, folder):
    """The words where rank 1 is killed before a pass."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    run = parallelize(net, {"input": torch.ones(4, 8)}, random_splits(), ComputeConfig(2, 2), gen_savedir=folder)
    run(torch.ones(4, 8))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        run(torch.ones(4, 8))
    except RuntimeError as error:
        return str(error)


def test_a_process_that_is_killed_is_named_by_those_that_wait_for_it(tmp_path):
    ((words, nothing),) = run_to_the_end([(killed, tmp_path)], seconds=60)
    assert nothing is None and words.startswith("rank 1 is gone, or never came; the 2 processes of a unit")
