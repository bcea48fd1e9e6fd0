"""An error on one rank alone is everyone's, at every phase, and the ranks are in step afterwards."""

import os
import time

import pytest
import torch

from hybrid_engine.generation.rollout import preparing
from hybrid_engine.inference import init_inference
from tests.support.distributed import run_distributed, run_to_the_end
from tests.support.models import PAD, build_model, padded_prompts
from tests.support.one_rank import Broken, build_engine, check_error, local_parameters, outcome

pytestmark = pytest.mark.long

GREEDY = {"do_sample": False, "max_new_tokens": 3, "pad_token_id": PAD}
SAMPLED = {"do_sample": True, "max_new_tokens": 4, "pad_token_id": PAD, "seed": 3}
ENGINES = {"whole": (0, True), "gathered": (3, True), "streamed": (3, False)}


PREPARE = {
    "an unknown option": {"max_new_tokenz": 3},
    "an option out of range": {"max_new_tokens": 0},
    "an option of another type": {"generation_config": 3},
    "a prompt outside the vocabulary": {"input_ids": torch.full((2, 3), 10**6)},
    "something that is no prompt": {"input_ids": "text"},
    "no tensors where dicts are taken": {"attention_mask": torch.ones(1, 1)},
}
RUN_ERRORS = {
    "ValueError": ValueError("no"),
    "TypeError": TypeError("no"),
    "OutOfMemoryError": torch.OutOfMemoryError("no"),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "OSError": OSError(28, "no space"),
}


def go_on(input_ids, scores):
    return torch.zeros(len(input_ids), dtype=torch.bool)


def generate_cases(rank, world_size):
    input_ids, mask = (tensor.chunk(world_size)[rank] for tensor in padded_prompts())
    results = {}
    for kind, (stage, pinned) in ENGINES.items():
        engine = build_engine(stage, pinned)
        engine.eval()

        def generate(engine=engine, **options):
            given = {"input_ids": input_ids, "attention_mask": mask, **GREEDY, **options}
            return engine.generate(given.pop("input_ids"), **given)

        expected = generate()
        for who in range(world_size):
            fails = rank == who
            for name, options in PREPARE.items() if kind != "whole" else ():
                found = outcome(lambda options=options, fails=fails: generate(**(options if fails else {})))
                results[kind, who, name] = found, torch.equal(generate(), expected)
            layer = engine.generator.model.layers[1]
            for number, (name, error) in enumerate(RUN_ERRORS.items() if kind != "whole" else ()):
                with Broken(layer, "forward", error, number % 3 if fails else 10**9):
                    found = outcome(generate)
                results[kind, who, f"{name} in run"] = found, torch.equal(generate(), expected)
            for phase, owner, method in (
                ("gather", engine.generator.workspace, "take"),
                ("prepare", preparing, "read_call"),
                ("begin", engine, "_check_not_generating"),
                ("draw", engine.generator.native.steps, "for_rollout"),
            ):
                with Broken(owner, method, MemoryError("no"), 0 if fails else 10**9):
                    found = outcome(generate)
                results[kind, who, f"MemoryError in {phase}"] = found, torch.equal(generate(), expected)
            with Broken(engine.generator, "_stay_in_step", MemoryError("no"), 0 if fails else 10**9):
                found = outcome(
                    lambda: generate(input_ids=input_ids[:2], attention_mask=mask[:2], stopping_criteria=[go_on])
                )
            results[kind, who, "MemoryError before rows in step"] = found, torch.equal(generate(), expected)
    return results


def different_wishes(rank, world_size):
    """What each rank gets that asks for something else than the other, and what it would get beside a like one."""
    input_ids, mask = (tensor.chunk(world_size)[rank] for tensor in padded_prompts())
    results = {}
    for kind, (stage, pinned) in ENGINES.items():
        engine = build_engine(stage, pinned)
        engine.eval()

        def generate(prompts=input_ids, mask=mask, engine=engine, **options):
            return engine.generate(prompts, attention_mask=mask, **{**GREEDY, **options})

        everyone = [generate(max_new_tokens=count) for count in (1, 3)]
        own_way = generate(encoder_no_repeat_ngram_size=500)
        torch.manual_seed(rank)
        found = {"lengths": torch.equal(generate(max_new_tokens=(1, 3)[rank]), everyone[rank])}
        for who in range(world_size):
            fails = rank == who
            beams = generate(num_beams=2 if fails else 1)
            found["own", who] = fails or torch.equal(beams, own_way)
            found["sampled", who] = generate(**(SAMPLED if fails else {})).shape[0] == len(input_ids)
            parts = (input_ids[:0], mask[:0]) if fails else (input_ids, mask)
            for way in ({}, {"encoder_no_repeat_ngram_size": 500}):
                output = generate(*parts, return_dict_in_generate=True, **way)
                rows = output.sequences
                is_right = len(rows) == len(output.logprobs) == 0 if fails else torch.equal(rows, everyone[1])
                found["empty", who, str(way)] = is_right
            # The containers of one rank are gone: its model has no policy any more.
            kept = engine.generator.fallback_reason
            engine.generator.fallback_reason = "no policy" if fails else None
            found["no policy", who] = torch.equal(generate(), own_way)
            engine.generator.fallback_reason = kept
        # Two samples on rank 0 and three on rank 1 of one prompt are five different ones.
        same = torch.full((1, 4), 9)
        options = {**SAMPLED, "max_new_tokens": 12, "num_return_sequences": 2 + rank, "top_k": 0}
        found["samples"] = engine.generate(same, **options)
        found["all empty"] = outcome(lambda: generate(input_ids[:0], mask[:0]))
        found["still right"] = torch.equal(generate(), everyone[1])
        results[kind] = found
    return results


def shared_cases(rank, world_size):
    """What an error in the middle of a rollout gives where both ranks share the model, and the rollout after it.

    The other rank waits for a sum inside a layer then.
    """
    input_ids, mask = (tensor.chunk(world_size)[rank] for tensor in padded_prompts())
    engine, results = build_engine(3, inference_tp_size=world_size), {}
    engine.eval()
    model, native = engine.generator.model, engine.generator.native
    expected = engine.generate(input_ids, attention_mask=mask, **GREEDY)
    layer = model.layers[1]
    places = {
        "at once": (layer.mixer, "vector_matmul", 0),
        "in the second layer": (layer, "forward", 0),
        "later": (layer, "forward", 3),
        "at the head": (model, "_head", 1),
        "in the draw": (native, "start", 0),
    }
    for who in range(world_size):
        for (place, (owner, method, calls)), (name, error) in zip(places.items(), RUN_ERRORS.items(), strict=True):
            with Broken(owner, method, error, calls if rank == who else 10**9):
                found = outcome(lambda: engine.generate(input_ids, attention_mask=mask, **GREEDY))
            again = engine.generate(input_ids, attention_mask=mask, **GREEDY)
            results[place, who, name] = found, torch.equal(again, expected)
    return results


def generations_of_both(rank, world_size):
    shared = shared_cases(rank, world_size)
    return generate_cases(rank, world_size), different_wishes(rank, world_size), shared


@pytest.fixture(scope="module")
def generations():
    return run_distributed(generations_of_both, 2, seconds=30)


def test_an_error_on_one_rank_in_a_rollout_is_raised_on_all_and_the_next_rollout_is_right(generations):
    first, second = (cases for cases, *_ in generations)
    assert first.keys() == second.keys() and len(first) == 2 * (5 + 2 * 16)
    for key in first:
        who = key[1]
        check_error([first[key], second[key]], who, key)
        assert first[key][1] and second[key][1], key


def test_an_error_of_a_rank_that_others_wait_for_inside_a_layer_is_raised_on_all_and_the_next_rollout_is_right(
    generations,
):
    first, second = (shared for *_, shared in generations)
    assert first.keys() == second.keys() and len(first) == 2 * len(RUN_ERRORS)
    for key in first:
        check_error([first[key], second[key]], key[1], key)
        assert first[key][1] and second[key][1], key


@pytest.mark.parametrize("kind", ENGINES)
def test_ranks_that_want_different_things_get_them_and_stay_together(generations, kind):
    parts = [wishes[kind] for _, wishes, _ in generations]
    for part in parts:
        for name, is_right in part.items():
            if name == "all empty":
                assert is_right[0] == "ValueError" and "empty on every process" in is_right[1]
            elif name != "samples":
                assert is_right, name
    samples = [tuple(row) for part in parts for row in part["samples"].tolist()]
    assert len(samples) == len(set(samples)) == 5


SPOILERS = {
    "a loss of two numbers": lambda loss: torch.stack([loss, loss]),
    "a loss without gradients": lambda loss: loss.detach(),
    "no tensor": lambda loss: 3,
}


def train(engine, input_ids, spoil=None, broken=None, error=None):
    """One step; `spoil` changes the loss, and the backward pass raises `error` in the module `broken`."""

    def break_backward(module, args, output):
        output.register_hook(Broken(None, "", error))

    handles = [] if broken is None else [broken.register_forward_hook(break_backward)]
    try:
        loss = engine(input_ids=input_ids, labels=input_ids).loss
        engine.backward(loss if spoil is None else spoil(loss))
        engine.step()
    finally:
        for handle in handles:
            handle.remove()


def fail_in_training(engine, input_ids, fails):
    """What happens where rank `fails`: by the name of the case."""
    found = {}
    for name, spoil in SPOILERS.items():
        found[name] = outcome(lambda spoil=spoil: train(engine, input_ids, spoil if fails else None))
    layers = engine.module.model.layers
    places = {"the last layer": layers[1].mlp, "the first layer": layers[0].mlp, "the head": engine.module.lm_head}
    errors = ValueError("no"), torch.OutOfMemoryError("no"), KeyboardInterrupt()
    for (name, place), error in zip(places.items(), errors, strict=True):
        broken = place if fails else None
        found[name] = outcome(lambda broken=broken, error=error: train(engine, input_ids, None, broken, error))
    found["save_dir"] = outcome(lambda: engine.save_checkpoint(3 if fails else "unused"))
    return found


def training_cases(rank, world_size):
    """Errors in training and saving on one rank, and whether the next step is that of an engine that had none."""
    input_ids = padded_prompts()[0].chunk(world_size)[rank]
    results = {}
    for stage in (0, 2, 3):
        expected = build_engine(stage)
        train(expected, input_ids)
        expected = local_parameters(expected)
        for who in range(world_size):
            engine = build_engine(stage)
            found = fail_in_training(engine, input_ids, rank == who)
            train(engine, input_ids)
            results[stage, who] = found, all(map(torch.equal, expected, local_parameters(engine)))
    return results


@pytest.fixture(scope="module")
def trainings():
    return run_distributed(training_cases, 2, seconds=30)


@pytest.mark.parametrize("who", (0, 1))
@pytest.mark.parametrize("stage", (0, 2, 3))
def test_an_error_on_one_rank_in_training_is_raised_on_all_and_the_next_step_is_right(trainings, stage, who):
    parts = [part[stage, who] for part in trainings]
    assert len(parts[0][0]) == 7
    for name in parts[0][0]:
        check_error([(part[0][name], None) for part in parts], who, name)
    assert parts[0][1] and parts[1][1]


PHASES = {"generate()": 1, "backward()": 0, "step()": 1, "save_checkpoint()": 0}
"""Who dies in each of them."""
STAGES = "generate() on stages"


def die(*unused):
    os._exit(7)


def die_in(rank, world_size, phase, who, folder):
    """What the other rank is told when rank `who` dies in the middle of `phase`."""
    engine = build_engine(3)
    input_ids, mask = (tensor.chunk(world_size)[rank] for tensor in padded_prompts())
    engine.eval()
    dies = rank == who

    def run():
        if phase == "generate()":
            if dies:
                engine.generator.model.layers[1].forward = die
            engine.generate(input_ids, attention_mask=mask, **GREEDY)
        engine.train()
        output = engine(input_ids=input_ids, attention_mask=mask, labels=input_ids)
        if phase == "backward()" and dies:
            output.loss.register_hook(die)
        engine.backward(output.loss)
        if phase == "step()" and dies:
            engine.optimizer.step = die
        engine.step()
        if phase == "save_checkpoint()" and dies:
            engine.optimizer.masters.renew = die
        engine.save_checkpoint(folder)

    return outcome(run)


def die_in_a_stage(rank, world_size):
    """What the first stage is told when the second dies in a rollout."""
    engine = init_inference(build_model(), pipeline_parallel_size=2)
    input_ids, mask = padded_prompts()
    if rank == 1:
        engine.generator.model.layers[0].forward = die
    return outcome(lambda: engine.generate(input_ids, attention_mask=mask, **GREEDY))


def stop_in_forward(rank, world_size):
    """Rank 1 catches an error of its forward pass, which gathers nothing, and comes to no backward pass."""
    engine = build_engine(0)
    layer = engine.module.model.layers[0]
    engine.train()
    input_ids = torch.ones(1, 4, dtype=torch.int64)
    with Broken(layer.mlp, "forward", KeyError("no data"), 0 if rank == 1 else 10**9):
        found = outcome(lambda: engine.backward(engine(input_ids=input_ids, labels=input_ids).loss))
    if rank == 1:
        time.sleep(12)
    return found


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("saved"))
    dying = [(die_in, phase, who, folder) for phase, who in PHASES.items()]
    results = run_to_the_end([*dying, (stop_in_forward,), (die_in_a_stage,)], seconds=8)
    return dict(zip([*PHASES, "forward()", STAGES], results, strict=True))


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_dies_ends_the_other_with_a_line_that_names_it(ended, phase):
    who, results = PHASES[phase], ended[phase]
    assert results[who] is None
    kind, words = results[1 - who]
    assert kind == "RuntimeError" and words.startswith(f"{phase}: rank {who} is gone")


def test_a_stage_that_dies_ends_the_others_with_a_line_that_names_it(ended):
    assert ended[STAGES][1] is None
    kind, words = ended[STAGES][0]
    assert kind == "RuntimeError" and words.startswith("generate(): rank 1 is gone")


def test_a_rank_that_stops_at_an_error_is_named_when_the_time_of_the_other_is_up(ended):
    assert ended["forward()"][1] == ("KeyError", "'no data'")
    kind, words = ended["forward()"][0]
    assert kind == "RuntimeError" and "rank 1 stopped at forward(): KeyError: 'no data'" in words
