"""zero.GatheredParameters: whole parameters inside, the modifier's changes everywhere after, nobody else's."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import hybrid_engine as deepspeed
from tests.support.distributed import run_distributed
from tests.support.training_reference import (
    engine_config,
    relative_error,
    tiny_llama,
    train_engine,
    train_plainly,
    whole_weights,
)

pytestmark = pytest.mark.torch_versions

STATUS = deepspeed.runtime.zero.partition_parameters.ZeroParamStatus


def build(world_size, **more):
    return deepspeed.initialize(model=tiny_llama(), config=engine_config(3, world_size, **more))[0]


def to_fetch(params):
    """As the scripts write it."""
    return [p for p in params if hasattr(p, "ds_id") and p.ds_status == STATUS.NOT_AVAILABLE]


def moving_average(engine, average, beta, rank):
    with torch.no_grad():
        for param, mean in zip(engine.module.parameters(), average.module.parameters(), strict=True):
            params = to_fetch([param, mean])
            with deepspeed.zero.GatheredParameters(params, modifier_rank=0, enabled=bool(params)):
                mean.data.copy_(torch.lerp(param.data, mean.data, beta))


def _checks(rank, world_size):
    results = {}
    engine = build(world_size)
    named = dict(engine.module.named_parameters())
    embedding = named["model.embed_tokens.weight"]
    whole = tiny_llama().model.embed_tokens.weight.detach()
    results["marks"] = (embedding.ds_numel, tuple(embedding.ds_shape), len({p.ds_id for p in named.values()}))
    results["shard"] = embedding.ds_tensor.numel()
    results["in forward"] = _marks_in_a_forward_pass(engine, embedding)
    with deepspeed.zero.GatheredParameters(list(named.values())):
        results["whole"] = all(type(p.data) is torch.Tensor for p in named.values())
        results["same"] = torch.equal(embedding.data, whole) and torch.equal(embedding.cpu().detach(), whole)
        results["layer"] = engine.module.lm_head(torch.ones(1, 32)).detach()
        results["inside"] = embedding.ds_status == STATUS.AVAILABLE and embedding.requires_grad
        embedding.data.zero_()
    results["discarded"] = torch.equal(whole_weights(engine)["model.embed_tokens.weight"], whole)
    norm = named["model.norm.weight"]
    with deepspeed.zero.GatheredParameters(norm, modifier_rank=world_size - 1):
        norm.data.fill_(rank + 5.0)
    results["modified"] = whole_weights(engine)["model.norm.weight"].unique().tolist()
    try:
        with deepspeed.zero.GatheredParameters([norm, embedding]), deepspeed.zero.GatheredParameters([embedding]):
            pass
    except ValueError as error:
        results["overlap"] = str(error)
    with deepspeed.zero.GatheredParameters([]), deepspeed.zero.GatheredParameters([norm], enabled=False):
        results["disabled"] = "ds_whole" not in vars(norm)
    try:
        with deepspeed.zero.GatheredParameters([embedding], modifier_rank=0):
            embedding.data.zero_()
            raise KeyError("inside")
    except KeyError:
        results["after error"] = embedding.ds_status == STATUS.AVAILABLE or bool(to_fetch([embedding]))
    if world_size > 1:
        results["kept after error"] = torch.equal(whole_weights(engine)["model.embed_tokens.weight"], whole)
    engine = build(world_size)
    average = deepspeed.initialize(
        model=tiny_llama(), config={"train_batch_size": 2 * world_size, "zero_optimization": {"stage": 3}}
    )[0]
    train_engine(engine, 3)
    moving_average(engine, average, 0.75, rank)
    results["average"] = whole_weights(average)
    results["refused"] = _refused_uses(engine)
    results["resumes"] = train_engine(engine, 1, first_step=3).weights
    state = {}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(to_fetch([param])):
            state[name] = param.data.cpu().clone()
    results["saved"] = state
    results["evaluation"] = _evaluation_below_stage_3(world_size)
    results["bf16"] = _set_in_bf16(world_size)
    return results


def _marks_in_a_forward_pass(engine, tied):
    """What a head's forward asks of its parameters, as TRL's does, and whether they are those of outside."""
    seen = []

    def look(part, inputs):
        with deepspeed.zero.GatheredParameters(to_fetch(part.parameters())):
            seen.append((part.weight.ds_id, part.weight.ds_status, part.weight.ds_numel, tuple(part.weight.shape)))

    handle = engine.module.lm_head.register_forward_pre_hook(look)
    with torch.no_grad():
        engine(input_ids=torch.arange(6)[None])
    handle.remove()
    return seen == [(tied.ds_id, STATUS.AVAILABLE, tied.ds_numel, tuple(tied.ds_shape))]


def _refused_uses(engine):
    """What would be lost: gradients of gathered parameters, and changes of those that a forward pass gathered."""
    weight, tokens = engine.module.model.embed_tokens.weight, torch.arange(6)[None]
    found = []

    def change(part, inputs):
        block = deepspeed.zero.GatheredParameters(part.parameters(), modifier_rank=0)
        with pytest.raises(ValueError, match="that a forward pass has gathered; change it before"):
            block.__enter__()
        found.append("change")

    if isinstance(weight, DTensor):  # on several processes
        handle = engine.module.lm_head.register_forward_pre_hook(change)
        with torch.no_grad():
            engine(input_ids=tokens)
        handle.remove()
        with deepspeed.zero.GatheredParameters(weight):
            loss = weight.square().sum()
        with pytest.raises(ValueError, match="depends on a parameter inside GatheredParameters"):
            loss.backward()
        found.append("gradient")
    else:
        with deepspeed.zero.GatheredParameters(weight):
            loss = weight.square().sum()
            weight.data.zero_()
        loss.backward()
        found.append(torch.equal(weight.grad, 2 * weight / engine.gradient_accumulation_steps()))
        weight.grad = None
    return found


def _evaluation_below_stage_3(world_size):
    engine = deepspeed.initialize(model=tiny_llama(), config={"train_batch_size": 2 * world_size})[0]
    with torch.no_grad():
        for param in engine.module.parameters():
            param.data.copy_(torch.lerp(param.data, torch.ones_like(param), 0.25))
    plain = all(type(p) is nn.Parameter for p in engine.module.parameters())
    return plain, engine(input_ids=torch.arange(9)[None]).logits.detach(), engine.report()


def _set_by_one_process(rank, stage, trains):
    """What every process has where one alone has written, before and after a step that changes nothing."""
    config = {"train_batch_size": 2, "zero_optimization": {"stage": stage}, "bf16": {"enabled": stage == 2}}
    if trains:
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.0}}
    engine = deepspeed.initialize(model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), config=config)[0]
    weight, bias = engine.module[0].weight, engine.module[1].bias
    found = []
    for modifier in (0, 1):
        with deepspeed.zero.GatheredParameters([bias, weight, engine.module[0].bias], modifier_rank=modifier):
            if rank == modifier:
                weight.data.fill_(5.0 + modifier)
                bias.data = torch.full_like(bias, 3.0 + modifier)
        loss = engine(torch.ones(1, 4, dtype=weight.dtype)).mean()
        if trains:
            engine.backward(loss)
            engine.step()
        whole = whole_weights(engine)
        found.append([whole[name].unique().tolist() for name in ("0.weight", "1.bias")])
    return found


def _sets_below_stage_3(rank, world_size):
    return {(s, trains): _set_by_one_process(rank, s, trains) for s in (0, 1, 2) for trains in (True, False)}


def test_the_modifiers_changes_reach_every_rank_below_stage_3_too():
    for results in run_distributed(_sets_below_stage_3, 2):
        for case, found in results.items():
            assert found == [[[5.0], [3.0]], [[6.0], [4.0]]], case


def _set_without_a_modifier(rank, stage):
    """What a step says where one process alone wrote, and after all have; and what every process has then."""
    config = {"train_batch_size": 2, "zero_optimization": {"stage": stage}}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.0}}
    engine = deepspeed.initialize(model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), config=config)[0]
    said = []
    for writers in ((0,), (0, 1), (), (1,)):
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            if rank in writers:
                engine.module[0].weight.data.fill_(3.0 + len(writers))
        engine.backward(engine(torch.ones(1, 4)).mean())
        try:
            engine.step()
            said.append(whole_weights(engine)["0.weight"].unique().tolist())
        except ValueError as error:
            said.append(str(error))
            engine.zero_grad()
    return said


def _sets_without_a_modifier(rank, world_size):
    return {stage: _set_without_a_modifier(rank, stage) for stage in (0, 1, 2)}


def test_what_one_process_alone_has_written_below_stage_3_is_an_error_on_all():
    for results in run_distributed(_sets_without_a_modifier, 2):
        for stage, (alone, both, nobody, other) in results.items():
            for said in (alone, other):
                assert "shape (4, 4) inside GatheredParameters" in said and "modifier_rank=" in said, stage
            assert both == nobody == [5.0], stage


def _set_in_bf16(world_size):
    """A value that is set must survive the next step, whose masters are another copy."""
    engine = build(world_size, bf16={"enabled": True}, scheduler=None)
    for param in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
            param.data.fill_(0.5)
    train_engine(engine, 1)
    return max((w.float() - 0.5).abs().max().item() for w in whole_weights(engine).values())


@pytest.fixture(scope="module")
def runs():
    return [_checks(0, 1), *run_distributed(_checks, 2)]


def test_parameters_carry_deepspeeds_marks(runs):
    whole = tiny_llama().model.embed_tokens.weight
    for results in runs:
        assert results["marks"] == (whole.numel(), tuple(whole.shape), 20)
    assert runs[0]["shard"] == whole.numel() and runs[1]["shard"] + runs[2]["shard"] == whole.numel()


def test_parameters_carry_the_same_marks_where_a_forward_pass_meets_them(runs):
    assert all(results["in forward"] for results in runs)


def test_inside_they_are_plain_whole_tensors_and_layers_can_be_called(runs):
    expected = tiny_llama().lm_head(torch.ones(1, 32)).detach()
    for results in runs:
        assert results["whole"] and results["same"] and results["inside"]
        torch.testing.assert_close(results["layer"], expected)


def test_what_would_be_lost_is_refused(runs):
    assert runs[0]["refused"] == [True] and runs[1]["refused"] == runs[2]["refused"] == ["change", "gradient"]


def test_without_a_modifier_changes_are_discarded(runs):
    assert all(results["discarded"] for results in runs)


def test_the_modifiers_changes_reach_every_rank(runs):
    assert [results["modified"] for results in runs] == [[5.0], [6.0], [6.0]]


def test_overlapping_blocks_are_an_error_and_empty_or_disabled_ones_do_nothing(runs):
    for results in runs:
        assert "is gathered already by a block around this one" in results["overlap"] and results["disabled"]


def test_an_exception_inside_leaves_the_parameters_as_they_were(runs):
    assert all(results["after error"] for results in runs)
    assert all(results["kept after error"] for results in runs[1:])


def test_a_moving_average_and_a_save_by_gathering_are_those_of_plain_training(runs):
    three, four = (train_plainly(tiny_llama(), steps).weights for steps in (3, 4))
    start = {name: p.detach() for name, p in tiny_llama().named_parameters()}
    expected = {name: torch.lerp(three[name], start[name], 0.75) for name in start}
    for results in runs:
        assert relative_error(results["average"], expected) < 1e-6
        assert relative_error(results["resumes"], four) < 1e-6
        assert all(torch.equal(results["saved"][name], results["resumes"][name]) for name in four)


def test_what_is_set_is_what_the_next_step_starts_from(runs):
    # The first step of AdamW moves by the learning rate, 0.01, and the decay of 0.1 times that.
    assert all(results["bf16"] < 0.02 for results in runs)


def test_an_engine_that_only_evaluates_below_stage_3_keeps_plain_parameters_that_scripts_may_change(runs):
    model = tiny_llama()
    for param in model.parameters():
        param.data.lerp_(torch.ones_like(param), 0.25)
    for results in runs:
        plain, logits, report = results["evaluation"]
        assert plain and "unwrapped" in report
        torch.testing.assert_close(logits, model(input_ids=torch.arange(9)[None]).logits.detach())


def test_parameters_of_another_stage_are_left_alone():
    param = nn.Parameter(torch.zeros(2))
    with deepspeed.zero.GatheredParameters([param]):
        param.data.fill_(1)
    assert param.tolist() == [1, 1]
