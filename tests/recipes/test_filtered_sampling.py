"""Recipes that sample with top-k, top-p or min-p: every log-probability is over the recorded supports."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

import hybrid_engine
from hybrid_engine.cli import cli
from hybrid_engine.recipes import distill, grpo, online_dpo, ppo
from hybrid_engine.rlhf.batches.sequences import response_logprobs, response_logprobs_and_entropy
from hybrid_engine.rlhf.experience.rollout import AnswerSampling, choose_groups, join, sample
from hybrid_engine.rlhf.options.algorithm import Algorithm
from hybrid_engine.rlhf.runs.run_folder import read_metrics
from hybrid_engine.rlhf.tasks import arithmetic
from tests.support.distributed import run_distributed
from tests.support.interrupted_runs import stopped_after
from tests.support.small_actors import save_small_actor, save_sums

SIZES = {
    "steps": 2, "rollout_size": 4, "minibatch_size": 4, "micro_batch_size": 3, "max_new_tokens": 6, "eval_every": 0,
    "eval_prompts": 4, "save_every": 0,
}  # fmt: skip
FILTERS = {"top_k": 6, "top_p": 0.8, "temperature": 0.7}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_small_actor(tmp_path_factory.mktemp("model"), arithmetic.build_tokenizer())


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return save_sums(tmp_path_factory.mktemp("data"))


@pytest.fixture
def tiny(model, dataset, tmp_path):
    def build(recipe, name="run", **options):
        given = {"out": str(tmp_path / name), "model": model, "dataset": dataset, "reward": ("regex:[0-4]$",)}
        return recipe.Config(**{**SIZES, **FILTERS, **given, **options})

    return build


def grpo_config(tiny, name="run", **options):
    algorithm = Algorithm(kl_place="loss", kl_coef=0.1, dynamic_sampling=2)
    given = {"group_size": 4, "minibatch_size": 8, "learning_rate": 1e-2, "algorithm": algorithm}
    return tiny(grpo, name, **(given | options))


def rollout_of(actor, seed, count=3):
    rows, options = arithmetic.prompt_rows(0)[0][:count], {"max_prompt_tokens": 16, "max_new_tokens": 5}
    return sample(actor, arithmetic.build_tokenizer(), rows, AnswerSampling(num_samples=2, **options, **FILTERS), seed)


@torch.no_grad()
def test_a_rollouts_log_probabilities_are_those_of_a_masked_softmax(model):
    config = {"train_batch_size": 4, "hybrid_engine": {"enabled": True, "max_out_tokens": 64}}
    plain = AutoModelForCausalLM.from_pretrained(model).eval()
    actor = hybrid_engine.initialize(model=AutoModelForCausalLM.from_pretrained(model), config=config)[0].eval()
    first, second = rollout_of(actor, 1), rollout_of(actor, 2, count=2)
    chosen = choose_groups(first, torch.tensor([True, False, True]))
    joined = join([chosen, second], arithmetic.build_tokenizer().pad_token_id)
    for rollout in (first, joined):
        batch, mask = rollout.sequences, rollout.sequences.response_mask
        logits = plain(batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids).logits
        logits = logits[:, -mask.shape[1] - 1 : -1][mask] / FILTERS["temperature"]
        largest = logits.topk(6).values  # top-k, then the fewest of these that reach 0.8
        before = largest.softmax(-1).cumsum(-1) - largest.softmax(-1)
        least = largest.masked_fill(before >= 0.8, torch.inf).amin(-1, keepdim=True)
        logprobs = logits.masked_fill(logits < least, -torch.inf).log_softmax(-1)
        expected = logprobs.gather(1, batch.responses[mask][:, None]).squeeze(1)
        found, entropy = response_logprobs_and_entropy(actor, batch, FILTERS["temperature"])
        torch.testing.assert_close(rollout.logprobs[mask], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found[mask], expected, atol=1e-5, rtol=1e-5)
        of_kept = -(logprobs.exp() * logprobs.masked_fill(logprobs.isinf(), 0.0)).sum(-1)
        torch.testing.assert_close(entropy[mask], of_kept, atol=1e-5, rtol=1e-5)
        assert batch.supports.sizes.max() <= 6 and 1 < batch.supports[mask.numpy()].sizes.mean() < 6
        assert (rollout.logprobs[~mask] == 0).all() and (found[~mask] == 0).all()
    unfiltered = response_logprobs(actor, replace(joined.sequences, supports=None), FILTERS["temperature"])
    assert (unfiltered[joined.sequences.response_mask] < joined.logprobs[joined.sequences.response_mask] - 1e-3).any()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tokens_per_micro_batch": 102},
        {"lora_rank": 2},
        {"logprob_bound": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.7},
        {"exact": True},
    ],
    ids=["padded", "packed", "adapter", "min-p, old pass", "exact"],
)
def test_the_first_ratio_is_1_and_the_first_kl_0(options, tiny, tmp_path):
    grpo.run(grpo_config(tiny, **options))
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(line["first_ratio"] == pytest.approx(1, abs=1e-5) for line in lines)
    assert lines[0]["kl_per_sequence"] == pytest.approx(0, abs=1e-4) and lines[1]["kl_per_sequence"] != 0
    num_tokens = len(arithmetic.build_tokenizer())
    assert all(1 < line["support_size"] < (options.get("top_k", 6) or num_tokens) for line in lines)
    assert all(line["logprob_difference_max"] < 1e-4 for line in lines)


def run_all(rank, world_size, configs):
    for config in configs:
        grpo.run(config)


def test_two_processes_train_as_one_does_and_packed_rows_as_padded_ones(tiny, tmp_path):
    ways = {"one": {}, "packed": {"tokens_per_micro_batch": 102}, "micro": {"micro_batch_size": 1}}
    whole = {"steps": 1, "minibatch_size": 16, "epochs": 2}  # the second with other weights than those that sampled
    run_all(0, 1, [grpo_config(tiny, name, **whole, **way) for name, way in ways.items()])
    configs = [grpo_config(tiny, f"stage-{stage}", zero_stage=stage, **whole) for stage in (0, 3)]
    run_distributed(run_all, 2, configs)
    one, *others = (read_metrics(tmp_path / name / "metrics.jsonl") for name in (*ways, "stage-0", "stage-3"))
    for other in others:
        for ours, theirs in zip(one, other, strict=True):
            for figure in ("score", "kl_per_sequence", "entropy_estimate", "policy_loss", "grad_norm", "support_size"):
                assert ours[figure] == pytest.approx(theirs[figure], rel=1e-3, abs=1e-4), figure


def test_an_interrupted_run_that_replays_answers_goes_on_to_the_bit(tiny, tmp_path):
    given = {
        "steps": 4, "save_every": 1, "replay_best": True, "rollout_size": 40, "group_size": 2, "minibatch_size": 80,
        "micro_batch_size": 80, "reward": ("regex:^[0-1]",), "algorithm": Algorithm(),
    }  # fmt: skip
    whole, torn = (grpo_config(tiny, name, **given) for name in ("whole", "torn"))
    grpo.run(whole)
    with stopped_after(2):
        grpo.run(torn)
    with pytest.raises(ValueError, match=r"--resume: --top-k=5 but the interrupted run had 6"):
        grpo.run(replace(torn, resume=True, top_k=5))
    grpo.run(replace(torn, resume=True))
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name / "actor").state_dict() for name in ("torn", "whole")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    replaying = [line for line in read_metrics(tmp_path / "torn" / "metrics.jsonl") if line["replayed_share"] > 0]
    assert replaying and replaying[0]["step"] >= 2  # from the checkpoint
    assert all(abs(line["first_ratio"] - 1) > 1e-3 > line["logprob_difference_mean"] for line in replaying)


@pytest.mark.parametrize(
    ("recipe", "options"),
    [(ppo, {}), (online_dpo, {"group_size": 4}), (distill, {"teacher": True})],
    ids=["ppo", "online-dpo", "distill"],
)
def test_other_recipes_sample_with_filters_too(recipe, options, tiny, model, tmp_path):
    options = {name: model if value is True else value for name, value in options.items()}
    recipe.run(tiny(recipe, **options))
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(1 < line["support_size"] < 6 for line in lines)
    if recipe is ppo:
        assert all(line["first_ratio"] == pytest.approx(1, abs=1e-5) for line in lines)
        assert lines[0]["kl_per_sequence"] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--top-k 1", "--top-k=1 leaves one token"),
        ("--min-p 1", "--min-p=1.0 leaves one token"),
        ("--top-p 0", "--top-p=0.0 must be above 0"),
        ("--top-p 1.5", "--top-p=1.5 must be from 0 to 1"),
        ("--top-k -1", "--top-k=-1 must be at least 0"),
    ],
)
def test_filters_that_make_no_sense_are_refused(options, message, tmp_path, capsys):
    assert cli.main(["grpo", "--out", str(tmp_path / "run"), *options.split()]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_more_tokens_than_the_vocabulary_has_are_refused_before_anything_is_made(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"--top-k=200 exceeds the \d+ tokens of --model="):
        grpo.run(grpo_config(tiny, top_k=200))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
