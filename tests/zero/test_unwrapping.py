"""Copies and pickles of a module that several processes train, and engines that follow another on one model."""

import copy
import pickle

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import hybrid_engine
from hybrid_engine.zero import GatheredParameters
from tests.support.distributed import run_distributed
from tests.support.training_reference import (
    batches,
    engine_config,
    tiny_llama,
    train_engine,
    train_plainly,
    whole_weights,
)


def weights_of(module):
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def copies(rank, world_size, stage):
    """What copies of an engine's module are, after a step that they do not take part in."""
    tokens = batches(1)[0][0]
    engine = hybrid_engine.initialize(model=tiny_llama(), config=engine_config(stage, world_size))[0]
    calls = []
    engine.module.register_forward_pre_hook(lambda module, args: calls.append(type(module)))
    train_engine(engine, 2)
    before = whole_weights(engine)
    with GatheredParameters(list(engine.module.parameters())):
        made = {"copy": copy.deepcopy(engine.module), "average": AveragedModel(engine.module).module}
    if stage < 3:
        engine.module._forward_pre_hooks.popitem()  # a function of this function, which nothing pickles
        made["pickle"] = pickle.loads(pickle.dumps(engine.module))
    train_engine(engine, 1, first_step=2)
    found = {}
    for name, module in made.items():
        plain = [type(part) for part in module.modules()] == [type(part) for part in tiny_llama().modules()]
        num_calls = len(calls)
        logits = module(input_ids=tokens).logits.detach()
        module.load_state_dict(module.state_dict())
        has_hook = len(calls) - num_calls
        found[name] = plain, weights_of(module), logits, has_hook
    trained = hybrid_engine.initialize(model=made["copy"], config=engine_config(stage, world_size))[0]
    return before, found, train_engine(trained, 1).norms, whole_weights(engine)


def taken_over(rank, world_size, stage, with_init):
    """Trained by an engine of `stage` after two at stage 3 have only evaluated it, which go on beside it."""
    training, tokens = engine_config(stage, world_size), batches(1)[0][0]
    evaluating = {"train_batch_size": 2 * world_size, "zero_optimization": {"stage": 3}}
    with hybrid_engine.zero.Init(config_dict_or_path=evaluating, enabled=with_init):
        model = tiny_llama()
    first, second = (hybrid_engine.initialize(model=model, config=evaluating)[0] for _ in range(2))
    with torch.no_grad():
        logits = [engine(input_ids=tokens).logits for engine in (first, second, first)]
    engine = hybrid_engine.initialize(model=model, config=training)[0]
    weights = train_engine(engine, 2).weights
    with torch.no_grad():
        logits.append(first(input_ids=tokens).logits)
    with pytest.raises(ValueError, match="another engine has sharded it already to train it"):
        hybrid_engine.initialize(model=model, config=training)
    return logits, weights


def copies_at_every_stage(rank, world_size):
    found = [copies(rank, world_size, stage) for stage in range(4)] + [refused(rank, world_size)]
    return [*found, {case: taken_over(rank, world_size, *case) for case in TAKEN_OVER}]


TAKEN_OVER = [(0, False), (1, True), (3, False), (3, True)]


@pytest.fixture(scope="module")
def runs():
    return run_distributed(copies_at_every_stage, 2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_copies_are_plain_modules_with_the_weights_of_that_moment(runs, stage):
    two, three = (train_plainly(tiny_llama(), steps).weights for steps in (2, 3))
    reference = tiny_llama()
    for before, found, norms, after in (results[stage] for results in runs):
        torch.testing.assert_close(before, two)
        reference.load_state_dict({**before, "lm_head.weight": before["model.embed_tokens.weight"]})
        for name, (is_plain, weights, logits, has_hook) in found.items():
            assert is_plain and has_hook == (name != "pickle"), name
            torch.testing.assert_close(weights, before, rtol=0, atol=0)
            torch.testing.assert_close(logits, reference(input_ids=batches(1)[0][0]).logits)
        assert norms == pytest.approx(train_plainly(reference, 1).norms)
        torch.testing.assert_close(after, three)


def refused(rank, world_size):
    engine = hybrid_engine.initialize(model=tiny_llama(), config=engine_config(3, world_size))[0]
    with pytest.raises(ValueError, match=r"embed_tokens.weight this process has a shard only.*GatheredParameters"):
        copy.deepcopy(engine.module)
    with pytest.raises(ValueError, match=r"pickle: .*a shard only"):
        pickle.dumps(engine.module)
    return train_engine(engine, 1).weights


def test_shards_are_not_copied_and_the_engine_goes_on(runs):
    for results in runs:
        torch.testing.assert_close(results[4], train_plainly(tiny_llama(), 1).weights)


@pytest.mark.parametrize("case", TAKEN_OVER)
def test_a_model_that_was_only_evaluated_is_trained_by_another_engine(runs, case):
    expected, tokens = train_plainly(tiny_llama(), 2).weights, batches(1)[0][0]
    trained = tiny_llama()
    trained.load_state_dict({**expected, "lm_head.weight": expected["model.embed_tokens.weight"]})
    for results in runs:
        (*before, after), weights = results[5][case]
        torch.testing.assert_close(weights, expected)
        for logits, model in [*((logits, tiny_llama()) for logits in before), (after, trained)]:
            torch.testing.assert_close(logits, model(input_ids=tokens).logits)
