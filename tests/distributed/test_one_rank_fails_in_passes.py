"""An error on one rank alone in `forward()` at stage 3, or in `step()`, is everyone's, and leaves the same on all."""

from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run_distributed
from tests.support.models import padded_prompts
from tests.support.one_rank import Broken, build_engine, check_error, local_parameters, outcome

STAGES = 0, 2, 3


def before_anything_changes(engine):
    """By the name of the place: what breaks `step()` where nothing was stepped yet."""
    return {
        "a check": Broken(engine.checks, "check_whole", ValueError("no")),
        "parameters": Broken(engine.checks.watch, "check", TypeError("no")),
        "gradients": Broken(engine.optimizer.masters, "take_gradients", MemoryError("no")),
        "masters": Broken(engine.optimizer.masters, "renew", torch.OutOfMemoryError("no")),
    }


def accumulate(engine, input_ids):
    engine.backward(engine(input_ids=input_ids, labels=input_ids).loss)


def step_with(engine, broken, fails):
    if not fails:
        return outcome(engine.step)
    with broken:
        return outcome(engine.step)


def one_stage(stage, rank, who, input_ids, folder):
    """What each place that breaks gives, whether the next step is the right one, and what a torn engine says."""
    torch.manual_seed(0)
    expected, engine = build_engine(stage), build_engine(stage)
    accumulate(expected, input_ids)
    expected.step()
    found = {}
    for name, broken in before_anything_changes(engine).items():
        accumulate(engine, input_ids)
        found[name] = step_with(engine, broken, rank == who)
    is_whole = stage == 3 or all(type(param) is torch.nn.Parameter for param in engine.module.parameters())
    engine.save_checkpoint(folder)
    accumulate(engine, input_ids)
    inner = engine.optimizer.inner
    found["moments"] = step_with(engine, Broken(inner, "step", torch.OutOfMemoryError("no")), rank == who)
    torn = [outcome(call) for call in (partial(accumulate, engine, input_ids), partial(engine.save_checkpoint, folder))]
    engine.load_checkpoint(folder)
    accumulate(engine, input_ids)
    engine.step()
    return found, is_whole, torn, all(map(torch.equal, local_parameters(expected), local_parameters(engine)))


def places_in_forward(engine):
    """By the name of the place: what breaks `forward()` there."""
    model = engine.module.model
    return {
        "a check": Broken(engine.checks, "check_whole", ValueError("no")),
        "the embedding": Broken(model.embed_tokens, "forward", torch.OutOfMemoryError("no")),
        "the first layer": Broken(model.layers[0].mlp, "forward", AssertionError("no")),
        "the last layer": Broken(model.layers[1].self_attn, "forward", KeyboardInterrupt()),
        "the head": Broken(engine.module.lm_head, "forward", TypeError("no")),
    }


def broken_forward(engine, input_ids, name, fails):
    """What a forward pass gives that breaks at the place of that name where it `fails`."""
    with places_in_forward(engine)[name] if fails else nullcontext():
        return outcome(lambda: engine(input_ids=input_ids, labels=input_ids).loss.item())


def forwards_that_fail(rank, world_size):
    """What an error gives at each place in a forward pass, by rank and mode, and whether the next pass is right.

    Each place breaks an engine's first pass, too: that of one that trains or one that only evaluates.
    """
    input_ids = padded_prompts()[0].chunk(world_size)[rank]
    whole = build_engine(3)
    expected = whole(input_ids=input_ids, labels=input_ids).loss.item()
    results = {}
    for number, name in enumerate(places_in_forward(whole)):
        for who in range(world_size):
            fresh = build_engine(3, trains=(number + who) % 2 == 0)
            for kind, engine, enabled in (("fresh", fresh, True), ("no_grad", whole, False), ("used", whole, True)):
                with torch.set_grad_enabled(enabled):
                    found = broken_forward(engine, input_ids, name, rank == who)
                    again = engine(input_ids=input_ids, labels=input_ids).loss.item()
                results[name, who, kind] = found, again == expected
    accumulate(whole, input_ids)
    whole.step()
    return results


def places_in_backward(engine):
    """By the name of the place: what breaks `loss.backward()` there, the module of a hook or nothing at its end."""
    layers = engine.module.model.layers
    return {
        "the head": (engine.module.lm_head, ValueError("no")),
        "the last layer": (layers[1].mlp, torch.OutOfMemoryError("no")),
        "the first layer": (layers[0].mlp, KeyboardInterrupt()),
        "the end": (None, MemoryError("no")),
    }


def broken_backward(engine, input_ids, name, fails):
    """What `loss.backward()` gives that breaks at the place of that name where it `fails`."""
    place, error = places_in_backward(engine)[name]
    at_end = Broken(engine.optimizer, "accumulate_gradients", error) if fails and place is None else nullcontext()

    def break_backward(module, args, output):
        if fails:
            output.register_hook(Broken(None, "", error))

    with nullcontext() if place is None else place.register_forward_hook(break_backward):
        loss = engine(input_ids=input_ids, labels=input_ids).loss
    with at_end:
        return outcome(loss.backward)


def backwards_that_fail(rank, world_size):
    """What an error gives at each place in `loss.backward()`, and whether the step after that is right."""
    input_ids = padded_prompts()[0].chunk(world_size)[rank]
    results = {}
    for stage in STAGES:
        expected = build_engine(stage)
        accumulate(expected, input_ids)
        expected.step()
        for who in range(world_size):
            engine = build_engine(stage)
            found = {name: broken_backward(engine, input_ids, name, rank == who) for name in places_in_backward(engine)}
            engine(input_ids=input_ids, labels=input_ids).loss.backward()
            engine.step()
            is_right = all(map(torch.equal, local_parameters(expected), local_parameters(engine)))
            results[stage, who] = found, is_right
    return results


def small_all_reduces(rank, world_size):
    """How many all-reduces, verdicts and norms, a forward pass, a backward pass and a step take, by stage."""
    input_ids = padded_prompts()[0].chunk(world_size)[rank]
    counts = {}
    for stage in STAGES:
        engine, calls = build_engine(stage), []
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            loss = engine(input_ids=input_ids, labels=input_ids).loss
            calls.append(all_reduce.call_count)
            engine.backward(loss)
            calls.append(all_reduce.call_count)
            engine.step()
            calls.append(all_reduce.call_count)
        counts[stage] = calls[0], calls[1] - calls[0], calls[2] - calls[1]
    return counts


def passes_that_fail(rank, world_size, folder):
    forwards, backwards = forwards_that_fail(rank, world_size), backwards_that_fail(rank, world_size)
    return steps_that_fail(rank, world_size, folder), forwards, backwards, small_all_reduces(rank, world_size)


def steps_that_fail(rank, world_size, folder):
    input_ids = padded_prompts()[0].chunk(world_size)[rank]
    return {
        (stage, who): one_stage(stage, rank, who, input_ids, f"{folder}/{stage}-{who}")
        for stage in STAGES
        for who in range(world_size)
    }


@pytest.fixture(scope="module")
def passes(tmp_path_factory):
    return run_distributed(passes_that_fail, 2, str(tmp_path_factory.mktemp("saved")), seconds=15)


@pytest.fixture(scope="module")
def steps(passes):
    return [steps for steps, *_ in passes]


def test_an_error_of_one_rank_in_a_forward_pass_at_stage_3_is_that_of_all_and_the_next_pass_is_right(passes):
    parts = [forwards for _, forwards, *_ in passes]
    assert len(parts[0]) == 5 * 2 * 3
    for name, who, kind in parts[0]:
        found = [part[name, who, kind] for part in parts]
        check_error(found, who, (name, who, kind))
        assert found[0][1] and found[1][1], (name, who, kind)


def test_what_the_verdicts_of_a_step_take(passes):
    # A verdict ends a forward pass at stage 3, and is at both ends of a backward pass and of a step. Between those of
    # a step is the norm where gradients are sharded. FSDP2 adds up the gradients at stage 0, for three groups.
    assert passes[0][-1] == {0: (0, 2 + 3, 2), 2: (0, 2, 3), 3: (1, 2, 3)}


@pytest.mark.parametrize("who", (0, 1))
@pytest.mark.parametrize("stage", STAGES)
def test_an_error_of_one_rank_in_loss_backward_is_raised_on_all_and_the_next_step_is_right(passes, stage, who):
    parts = [backwards[stage, who] for _, _, backwards, _ in passes]
    assert parts[0][1] and parts[1][1] and len(parts[0][0]) == 4
    for name, (_, words) in parts[who][0].items():
        told = parts[1 - who][0][name]
        if name == "the end":  # of which the engine knows
            check_error([(part[0][name], None) for part in parts], who, name)
        else:
            assert words in ("no", "") and told[0] == "RuntimeError"
            assert told[1].startswith(f"rank {who}: loss.backward() ended there with an error"), told


@pytest.mark.parametrize("who", (0, 1))
@pytest.mark.parametrize("stage", STAGES)
def test_an_error_of_one_rank_in_a_step_is_that_of_all(steps, stage, who):
    parts = [part[stage, who] for part in steps]
    assert len(parts[0][0]) == 5
    for name in parts[0][0]:
        check_error([(part[0][name], None) for part in parts], who, name)


@pytest.mark.parametrize("stage", STAGES)
def test_the_step_after_one_that_changed_nothing_is_right_and_after_a_torn_one_all_ask_for_a_checkpoint(steps, stage):
    for part in steps:
        for who in (0, 1):
            _, is_whole, torn, is_right = part[stage, who]
            assert is_whole and is_right
            assert all(kind == "ValueError" and "the last step() failed midway" in words for kind, words in torn), torn
