"""The hybrid engine as scripts for DeepSpeed call it: modes, generate()'s arguments, and what changes between calls."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

import hybrid_engine as deepspeed
from hybrid_engine.runtime.rollout import RolloutConfig, RolloutRequest, SamplingConfig, build_rollout
from tests.support.distributed import run_distributed
from tests.support.models import PAD, build_model, padded_prompts

ENDS = [7, 11, 23]


def build_engine(model, **options):
    config = {
        "train_batch_size": 6,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "hybrid_engine": {"enabled": True, "max_out_tokens": 96},
    }
    return deepspeed.initialize(model=model, config=config | options)[0]


def generate(engine, input_ids, mask, max_length, **options):
    """As DeepSpeed-Chat's trainer writes it."""
    return engine.module.generate(
        input_ids, attention_mask=mask, max_length=max_length, pad_token_id=PAD, do_sample=False, **options
    )


def own_answers(model, input_ids, mask, max_length, **options):
    """What the model's class generates, whoever has replaced the object's method."""
    return type(model).generate(
        model, input_ids, attention_mask=mask, max_length=max_length, pad_token_id=PAD, do_sample=False, **options
    )


def train_step(engine, input_ids, mask):
    loss = engine(input_ids=input_ids, attention_mask=mask, labels=input_ids).loss
    engine.backward(loss)
    engine.step()
    return loss.item()


def test_training_and_generating_in_turns_is_training_alone_with_the_models_own_answers():
    """The reference: the same model under torch.optim, which generates by itself."""
    engine = build_engine(build_model(), gradient_clipping=1.0)
    reference = build_model().train()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.0)
    answers = []
    for _ in range(4):
        input_ids, mask = padded_prompts()
        engine.eval()
        ours = generate(engine, input_ids, mask, 24, eos_token_id=ENDS, synced_gpus=False)
        engine.train()
        reference.eval()
        assert torch.equal(ours, own_answers(reference, input_ids, mask, 24, eos_token_id=ENDS))
        reference.train()
        batch = ours[:, :20]
        attended = torch.cat([mask, torch.ones_like(batch[:, 9:])], dim=1)
        loss = reference(input_ids=batch, attention_mask=attended, labels=batch).loss
        assert train_step(engine, batch, attended) == pytest.approx(loss.item(), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        answers.append(ours)
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in pairwise(answers))


def test_the_modes_are_those_of_a_module():
    engine = build_engine(build_model())
    assert engine.eval() is engine and not engine.module.training
    assert engine.train() is engine and engine.module.training
    assert engine.train(False) is engine and not engine.module.training


def test_the_modules_generate_has_the_arguments_of_transformers():
    engine = build_engine(build_model()).eval()
    input_ids, mask = padded_prompts()
    config = GenerationConfig(max_new_tokens=7, do_sample=False, pad_token_id=PAD)
    expected = build_model().generate(input_ids, config, attention_mask=mask)
    generate = engine.module.generate
    for ours in (
        generate(input_ids, config, attention_mask=mask),
        generate(inputs=input_ids, generation_config=config, attention_mask=mask),
        generate(input_ids=input_ids, attention_mask=mask, generation_config=config),
    ):
        assert torch.equal(ours, expected)
    with pytest.raises(ValueError, match="both name the prompts"):
        generate(input_ids, input_ids=input_ids)


@pytest.mark.parametrize("release", [False, True])
def test_batches_and_lengths_change_from_call_to_call(release):
    """Smaller, larger, wider, and longer than any before: the first call settles nothing."""
    model = build_model()
    options = {"enabled": True, "max_out_tokens": 96, "release_inference_cache": release}
    engine = build_engine(build_model(), hybrid_engine=options).eval()
    for num_prompts, width, max_length in ((2, 5, 9), (6, 9, 12), (1, 3, 8), (4, 30, 40), (6, 12, 90), (3, 4, 6)):
        input_ids, mask = padded_prompts(num_prompts=num_prompts, width=max(width, 9))
        expected = own_answers(model, input_ids, mask, max(max_length, 10))
        assert torch.equal(generate(engine, input_ids, mask, max(max_length, 10)), expected)
        assert (engine.generator.workspace.allocated_bytes == 0) == release


def test_more_tokens_than_were_configured_is_an_error_that_says_so_and_harms_nothing():
    engine = build_engine(build_model()).eval()
    input_ids, mask = padded_prompts()
    with pytest.raises(ValueError, match="max_out_tokens=96"):
        generate(engine, input_ids, mask, 97)
    assert torch.equal(generate(engine, input_ids, mask, 20), own_answers(build_model(), input_ids, mask, 20))


def test_padding_on_the_right_is_an_error_that_says_so():
    engine = build_engine(build_model()).eval()
    input_ids, mask = (tensor.flip(1) for tensor in padded_prompts())
    with pytest.raises(ValueError, match="must be padded on the left: set tokenizer.padding_side='left'"):  # noqa: RUF043
        generate(engine, input_ids, mask, 20)


def test_the_arguments_of_a_schedulers_step_are_passed_on():
    """ReduceLROnPlateau, whose step needs the metric."""
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    def schedule(optimizer):
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    engine, optimizer, _, _ = deepspeed.initialize(
        model=build_model(),
        config={"train_batch_size": 6, "optimizer": {"type": "Adam"}, "hybrid_engine": {"enabled": True}},
        lr_scheduler=schedule,
    )
    alone = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=optimizer.param_groups[0]["lr"])
    alone_schedule = schedule(alone)
    input_ids, mask = padded_prompts()
    rates = []
    for metric in (1.0, 2.0, 3.0, 0.5, 0.6):
        engine.backward(engine(input_ids=input_ids, attention_mask=mask, labels=input_ids).loss)
        engine.step(lr_kwargs={"metrics": metric})
        alone_schedule.step(metric)
        rates.append(engine.get_lr()[0])
        assert rates[-1] == alone.param_groups[0]["lr"]
    assert len(set(rates)) == 4


def prompts_of(rank):
    """Two prompts that end after at most three tokens, and four that end by length; with their end tokens."""
    input_ids, mask = padded_prompts()
    rows = slice(0, 2) if rank == 0 else slice(2, 6)
    ends = own_answers(build_model(), input_ids[rows], mask[rows], 30)[:, 11].tolist() if rank == 0 else None
    return input_ids[rows], mask[rows], ends


def uneven_ranks(rank, world_size):
    """ZeRO-3, by containers, by the model's own generate() (under a bound that nothing reaches) and by the rollout API,
    around a step; and whether the names of parameters by layer are those of the sharded ones.
    """
    results = {}
    input_ids, mask, ends = prompts_of(rank)
    for pinned in (True, False):
        options = {"enabled": True, "pin_parameters": pinned, "max_running": 2}
        engine = build_engine(build_model(), zero_optimization={"stage": 3}, hybrid_engine=options)
        for turn in ("before", "after"):
            engine.eval()
            for backend, more in (("native", {}), ("own", {"encoder_no_repeat_ngram_size": 500})):
                answers = generate(engine, input_ids, mask, 30, eos_token_id=ends, synced_gpus=True, **more)
                results[pinned, turn, backend] = answers
            engine.train()
            rollout = build_rollout(RolloutConfig(), engine, SimpleNamespace(eos_token_id=None, pad_token_id=PAD))
            batch = rollout.generate(RolloutRequest(input_ids, mask), SamplingConfig(max_new_tokens=21, temperature=0))
            results[pinned, turn, "rollout"] = batch.input_ids
            train_step(engine, input_ids, mask)
            of_layers = [id(p) for params in engine.layer_params for p in params if p is not None]
            results[pinned, turn, "names"] = of_layers == [id(p) for p in ordered_layer_params(engine.module)]
    return results


def ordered_layer_params(model):
    """As DeepSpeed orders them: the norms first."""
    for layer in model.model.layers:
        norms = [layer.post_attention_layernorm.weight, layer.input_layernorm.weight]
        yield from norms
        yield from (p for p in layer.parameters() if all(p is not norm for norm in norms))


@pytest.fixture(scope="module")
def two_ranks():
    return run_distributed(uneven_ranks, 2)


@pytest.mark.parametrize("backend", ["native", "own"])
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "streamed"])
def test_ranks_whose_prompts_end_at_different_times_answer_as_alone(two_ranks, pinned, backend):
    widths = []
    for rank in (0, 1):
        input_ids, mask, ends = prompts_of(rank)
        alone = own_answers(build_model(), input_ids, mask, 30, eos_token_id=ends)
        assert torch.equal(two_ranks[rank][pinned, "before", backend], alone)
        widths.append(alone.shape[1])
    assert widths[0] <= 12 and widths[1] == 30


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "streamed"])
def test_ranks_with_different_numbers_of_prompts_roll_out_as_alone(two_ranks, pinned):
    for rank in (0, 1):
        input_ids, mask, _ = prompts_of(rank)
        assert torch.equal(
            two_ranks[rank][pinned, "before", "rollout"], own_answers(build_model(), input_ids, mask, 30)
        )


def test_parameters_by_layer_are_the_models_own_also_while_they_are_sharded(two_ranks):
    for results in two_ranks:
        assert all(results[pinned, turn, "names"] for pinned in (True, False) for turn in ("before", "after"))


def test_after_a_step_they_answer_alike_however_weights_are_gathered(two_ranks):
    for results in two_ranks:
        for pinned in (True, False):
            for backend in ("native", "own"):
                assert torch.equal(results[pinned, "after", backend], results[True, "after", "native"])
    before, after = (two_ranks[1][True, turn, "native"] for turn in ("before", "after"))
    assert not torch.equal(before, after)
