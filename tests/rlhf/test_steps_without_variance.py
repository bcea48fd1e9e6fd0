"""Steps in which answers teach nothing: no weight moves, and rows without a gradient do not go through the model."""

import pytest
import torch

from hybrid_engine.recipes import grpo
from hybrid_engine.rlhf.algorithms import Coefficients, PolicyBatch
from hybrid_engine.rlhf.batches.sequences import build_sequences, response_logprobs
from hybrid_engine.rlhf.experience.policy import Experience, build_policy, has_gradient
from hybrid_engine.rlhf.options.algorithm import Algorithm
from hybrid_engine.rlhf.runs.engine_config import Schedule
from hybrid_engine.rlhf.tasks.arithmetic import build_tokenizer
from tests.support.distributed import run_distributed
from tests.support.small_actors import save_small_actor

NUM_ROWS = 8
VARIED = [1.0, -1.0, 0.0, 0.0, 0.5, -0.5, 0.0, 0.0]
NOTHING = [0.0] * NUM_ROWS
MEANS = ("token-mean", "sequence-mean-token-mean")
KL = Algorithm(kl_place="loss", kl_coef=0.1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_small_actor(tmp_path_factory.mktemp("actor"), build_tokenizer())


def config_of(model, **options):
    sizes = {"rollout_size": 2, "group_size": 4, "minibatch_size": NUM_ROWS, "micro_batch_size": 1}
    return grpo.Config(model=model, **{**sizes, "max_prompt_tokens": 8, "max_new_tokens": 4, **options})


def policy_of(config):
    schedule = Schedule(kind="linear", num_steps=8, num_warmup_steps=2)
    return build_policy(config, config.model, 1e-2, schedule)


def experience_of(policy, advantages, rows=slice(None)):
    """Random answers of two to four tokens, each with one advantage on all of them."""
    numbers = torch.Generator().manual_seed(0)
    lengths = [2, 3, 4, 2, 3, 4, 2, 3]
    prompts = [torch.randint(3, 12, (4,), generator=numbers).tolist() for _ in lengths]
    responses = [torch.randint(3, 12, (length,), generator=numbers).tolist() for length in lengths]
    sequences = build_sequences(prompts[rows], responses[rows], 0, policy.actor.device)
    mask = sequences.response_mask
    with torch.no_grad():
        logprobs = response_logprobs(policy.actor, sequences)
    spread = torch.where(mask, torch.tensor(advantages[rows])[:, None], 0.0)
    return Experience(sequences, logprobs, PolicyBatch(logprobs, logprobs, spread, mask, logprobs - 0.1, None))


def state_of(actor):
    """Weights and optimizer state, as they are."""
    weights = [p.detach().clone() for p in actor.module.parameters()]
    moments = [v.clone() for state in actor.optimizer.inner.state.values() for v in state.values()]
    return weights + moments


def update(policy, advantages, config, rows=slice(None)):
    return grpo.update(policy, experience_of(policy, advantages, rows), config, Coefficients(0.1, 0.0, 0.0), seed=0)


def is_same(before, after):
    return len(before) == len(after) and all(map(torch.equal, before, after))


def test_a_step_without_variance_leaves_weights_and_optimizer_as_they_are_and_the_schedule_goes_on(model):
    config = config_of(model)
    policy = policy_of(config)
    update(policy, VARIED, config)  # Adam has a momentum now
    before, rate = state_of(policy.actor), policy.actor.get_lr()[0]
    figures = update(policy, NOTHING, config)
    assert is_same(before, state_of(policy.actor))
    assert figures == {"grad_norm": 0.0, "learning_rate": rate, "trained_share": 0.0}
    assert policy.actor.global_steps == 2
    assert policy.actor.get_lr()[0] != rate
    assert update(policy, VARIED, config)["trained_share"] == 0.5
    assert not is_same(before, state_of(policy.actor))


def test_the_first_step_may_be_one_without_variance(model, recwarn):
    config = config_of(model)
    policy = policy_of(config)
    before = state_of(policy.actor)
    update(policy, NOTHING, config)
    assert is_same(before, state_of(policy.actor))
    assert not [warning for warning in recwarn if "lr_scheduler.step" in str(warning.message)]


@pytest.mark.parametrize("algorithm", [KL, Algorithm(entropy_coef=0.1)])
def test_where_a_term_of_the_loss_depends_on_them_all_rows_are_trained_on(model, algorithm):
    config = config_of(model, algorithm=algorithm)
    policy = policy_of(config)
    before = state_of(policy.actor)
    assert update(policy, NOTHING, config)["trained_share"] == 1.0
    assert not is_same(before, state_of(policy.actor))


@pytest.mark.parametrize(
    ("policy_loss", "aggregation"),
    [
        *(
            (word, aggregation)
            for word in ("clip", "gspo", "cispo", "reinforce", "sequence-clip")
            for aggregation in MEANS
        ),
        *((word, MEANS[0]) for word in ("sapo", "gmpo", "dppo", "dppo-kl", "vespo")),
    ],
)
def test_gradients_are_those_of_all_rows(model, monkeypatch, policy_loss, aggregation):
    config = config_of(model, algorithm=Algorithm(policy_loss=policy_loss, aggregation=aggregation))
    found = []
    for skips in (True, False):
        if not skips:
            monkeypatch.setattr(grpo, "has_gradient", lambda algorithm, batch: batch.mask.any(dim=1))
        policy = policy_of(config)
        share = update(policy, VARIED, config)["trained_share"]
        assert share == (0.5 if skips else 1.0)
        found.append(state_of(policy.actor))
    assert is_same(*found)


def test_masked_rows_and_rows_of_weight_0_have_no_gradient(model):
    batch = experience_of(policy_of(config_of(model)), VARIED).batch
    weights = torch.ones_like(batch.advantages)
    weights[0] = 0
    mask = batch.mask.clone()
    mask[1] = False
    batch = batch._replace(weights=weights, mask=mask)
    assert has_gradient(Algorithm(), batch).tolist() == [False] * 4 + [True, True, False, False]
    assert has_gradient(KL, batch).tolist() == [True, False] + [True] * 6


def test_chosen_tokens_give_rows_a_gradient_or_take_it_away(model):
    batch = experience_of(policy_of(config_of(model)), VARIED).batch
    chosen = torch.zeros_like(batch.mask)
    chosen[:3] = batch.mask[:3]
    varied = [value != 0 for value in VARIED]
    of_high_entropy = batch._replace(high_entropy=chosen)
    assert has_gradient(Algorithm(top_entropy=0.2), of_high_entropy).tolist() == [True, True] + [False] * 6
    covariant = batch._replace(covariant=chosen)  # the third row has no advantage
    assert has_gradient(Algorithm(policy_loss="kl-cov"), covariant).tolist() == [True, True, True, *varied[3:]]
    assert has_gradient(Algorithm(policy_loss="clip-cov"), covariant).tolist() == varied
    assert has_gradient(Algorithm(sampler_coef=0.1), batch).all()


def _two(rank, world_size, model, zero_stage):
    """Of the second process no row teaches in the first step, and of none in the second."""
    config = config_of(model, zero_stage=zero_stage)
    policy = policy_of(config)
    half = slice(rank * 4, rank * 4 + 4)
    norms = [update(policy, [1.0, -1.0] + [0.0] * 6, config, half)["grad_norm"]]
    weights = [p.detach().clone() for p in policy.actor.optimizer.inner.param_groups[0]["params"]]
    norms.append(update(policy, NOTHING, config, half)["grad_norm"])
    is_kept = all(map(torch.equal, weights, policy.actor.optimizer.inner.param_groups[0]["params"]))
    return norms, is_kept, policy.actor.global_steps


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_two_processes_agree_also_where_one_of_them_has_nothing_to_learn(model, zero_stage):
    first, second = run_distributed(_two, 2, model, zero_stage)
    assert first == second
    norms, is_kept, num_steps = first
    config = config_of(model)
    assert norms == [pytest.approx(update(policy_of(config), [1.0, -1.0] + [0.0] * 6, config)["grad_norm"]), 0.0]
    assert is_kept and num_steps == 2


def test_a_step_cannot_be_passed_over_after_a_backward_pass(model):
    policy = policy_of(config_of(model))
    policy.actor.backward(policy.actor(torch.ones(1, 2, dtype=torch.int64)).logits.mean())
    with pytest.raises(ValueError, match="micro-batches of a step are done; end it with step"):
        policy.actor.pass_step()
