"""What must not change a loss and its gradients, for every choice of GRPO's family: how the rows of a step lie.

Advantages, loss and gradients of one step are computed in one piece; then in micro-batches, with more padding, in
another order, with NaN wherever the mask is False, and on two processes.
"""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.rl.advantages import teacher_advantages
from hybrid_engine.rl.losses import StepCounts, count_step
from hybrid_engine.rlhf.algorithms import (
    CLIPPED,
    POLICY_LOSSES,
    Coefficients,
    PolicyBatch,
    choose_tokens,
    compute_advantages,
    correction_weights,
    policy_figures,
    policy_objective,
)
from hybrid_engine.rlhf.options.algorithm import CHOICES, PRESETS, Algorithm
from tests.support.distributed import run_distributed

G, MAX_LENGTH = 4, 9


def algorithms() -> dict[str, Algorithm]:
    """Every word of every choice, beside defaults that it goes with; every preset; and much at once."""
    found = {preset: Algorithm.from_options({"preset": preset}) for preset in PRESETS}
    for name in ("policy_loss", "aggregation", "correction", "scale_divisor"):
        found |= {f"{name}={word}": Algorithm(**{name: word}) for word in CHOICES[name]}
    for scale in CHOICES["scale"]:
        baselines = [word for word in CHOICES["baseline"] if word != "batch-mean" or scale not in NOT_OF_THE_BATCH]
        found |= {f"{word} by {scale}": Algorithm(baseline=word, scale=scale) for word in baselines}
    for place in ("reward", "token-reward"):
        found |= {f"{word} in {place}": Algorithm(kl_place=place, kl_coef=0.1, kl_estimator=word) for word in KL_VALUES}
    for word in CHOICES["kl_estimator"][1:]:
        found[f"{word} in loss"] = Algorithm(kl_place="loss", kl_coef=0.1, kl_estimator=word)
    for word in KL_VALUES:
        found[f"{word} unbiased"] = Algorithm(kl_place="loss", kl_coef=0.1, kl_estimator=word, kl_unbiased=True)
    found["entropy"] = Algorithm(entropy_coef=0.1)
    found["highest entropy"] = Algorithm(top_entropy=0.3, entropy_coef=0.1)
    found["off-policy mask"] = Algorithm(off_policy_threshold=0.02)
    for name in ("clip-cov", "kl-cov"):
        found[f"{name} of many"] = Algorithm(policy_loss=name, cov_share=0.2, cov_low=0.1)
    found["distance to the sampler"] = Algorithm(sampler_coef=0.1)
    found["each reward"] = Algorithm(reward_aggregation="normalize-then-sum")
    found["discounted"] = Algorithm(gamma=0.9, kl_place="token-reward", kl_coef=0.1, kl_estimator="k1")
    found["much at once"] = Algorithm(
        policy_loss="gspo",
        scale="batch-whiten",
        kl_place="loss",
        kl_coef=0.1,
        kl_unbiased=True,
        entropy_coef=0.1,
        correction="geometric-masked",
        aggregation="sequence-mean-token-mean",
    )
    return found


NOT_OF_THE_BATCH = ("group-std", "leave-one-out-std", "batch-std", "group-mean")
KL_VALUES = ("k1", "k2", "k3")
ALGORITHMS = algorithms()


@dataclass(frozen=True)
class Step:
    """The rows of an optimizer step; `features` times the only parameter, `[3]`, are log-probabilities."""

    features: torch.Tensor
    logprobs_old: torch.Tensor
    logprobs_sampler: torch.Tensor
    logprobs_ref: torch.Tensor
    entropy: torch.Tensor
    mask: torch.Tensor
    scores: torch.Tensor

    def rows(self, index) -> "Step":
        return Step(**{name: value[index] for name, value in vars(self).items()})

    def padded(self, left: int, right: int) -> "Step":
        nan = float("nan")
        wide = {
            name: torch.nn.functional.pad(value.masked_fill(~self.mask, nan), (left, right), value=nan)
            for name, value in vars(self).items()
            if name.startswith(("logprobs", "entropy"))
        }
        features = self.features.masked_fill(~self.mask[:, :, None], nan)
        features = torch.nn.functional.pad(features, (0, 0, left, right), value=nan)
        return replace(self, **wide, features=features, mask=torch.nn.functional.pad(self.mask, (left, right)))


def build_step() -> Step:
    """Three groups of four; one has no variance, one response no token that counts, one sample no reward."""
    generator = torch.Generator().manual_seed(4)
    features, noise = torch.randn(2, 12, 6, 3, generator=generator, dtype=torch.float64)
    old = features @ torch.tensor([0.5, -0.3, 0.2], dtype=torch.float64)
    lengths = torch.tensor([6, 2, 1, 4, 3, 3, 6, 5, 0, 2, 4, 6])
    scores = torch.tensor([1, 0, 0.5, 1, 2, 2, 2, 2, 0.5, -1, 3, float("nan")], dtype=torch.float64)
    return Step(
        features=features,
        logprobs_old=old,
        logprobs_sampler=old + 0.2 * noise[:, :, 0],
        logprobs_ref=old + 0.4 * noise[:, :, 1],
        entropy=noise[:, :, 2].exp(),
        mask=torch.arange(6)[None] < lengths[:, None],
        scores=scores,
    )


def advantages_of(algorithm: Algorithm, step: Step, group=None) -> torch.Tensor:
    scores = step.scores
    if algorithm.is_decoupled:
        scores = torch.stack([scores, 100 * torch.where(step.mask, step.logprobs_ref, 0.0).sum(dim=1)], dim=1)
        scores[step.scores.isnan()] = float("nan")
    references = step.logprobs_old, step.logprobs_ref
    return compute_advantages(algorithm, scores, G, *references, step.mask, algorithm.kl_coef, group)


def experience_of(algorithm: Algorithm, step: Step, group=None) -> PolicyBatch:
    """What an update learns from: advantages, weights and chosen tokens of all rows of `step`."""
    batch = PolicyBatch(
        logprobs=step.logprobs_old,
        logprobs_old=step.logprobs_old,
        advantages=advantages_of(algorithm, step, group),
        mask=step.mask,
        logprobs_ref=step.logprobs_ref,
        weights=correction_weights(algorithm, 1.0, step.logprobs_old, step.logprobs_sampler, step.mask),
        logprobs_sampler=step.logprobs_sampler,
    )
    return choose_tokens(algorithm, batch, step.entropy, group)


def loss_and_gradient(
    algorithm: Algorithm, step: Step, experience: PolicyBatch, counts: StepCounts, parts: list[torch.Tensor]
) -> torch.Tensor:
    """`[4]`: the sum of the shares of the micro-batches `parts`, and the sum of their gradients."""
    parameter = torch.tensor([0.8, -0.5, 0.1], dtype=torch.float64, requires_grad=True)
    total = torch.zeros((), dtype=torch.float64)
    for index in parts:
        batch = PolicyBatch(*(None if value is None else value[index] for value in experience))
        batch = batch._replace(logprobs=step.features[index].nan_to_num() @ parameter)
        share = policy_objective(algorithm, batch, counts, Coefficients.first(algorithm))
        share.backward()
        total += share.detach()
    assert parameter.grad is not None
    return torch.cat([total[None], parameter.grad])


def in_one_piece(algorithm: Algorithm, step: Step) -> torch.Tensor:
    counts = count_step(step.mask, MAX_LENGTH)
    return loss_and_gradient(algorithm, step, experience_of(algorithm, step), counts, [torch.arange(12)])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_neither_micro_batches_nor_padding_nor_the_order_of_rows_change_loss_and_gradients(name):
    algorithm, step = ALGORITHMS[name], build_step()
    whole = in_one_piece(algorithm, step)
    assert whole.isfinite().all()
    assert whole[1:].abs().max() > 1e-3

    groups = torch.tensor([2, 0, 1])
    order = (groups[:, None] * G + torch.tensor([3, 1, 0, 2])).flatten()
    for dealt in (step.padded(2, 3), step.rows(order), step.padded(0, 1).rows(order)):
        counts, experience = count_step(dealt.mask, MAX_LENGTH), experience_of(algorithm, dealt)
        for parts in (torch.arange(12).split(5), torch.randperm(12).split(1)):
            found = loss_and_gradient(algorithm, dealt, experience, counts, list(parts))
            torch.testing.assert_close(found, whole, rtol=1e-10, atol=1e-12)


def share_of_a_process(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """The loss and the gradient of this process's groups: two of them, or one."""
    step = build_step().rows(slice(0, 4) if rank == 0 else slice(4, None))
    group, counted = dist.group.WORLD, {}
    for name, algorithm in ALGORITHMS.items():
        experience, counts = experience_of(algorithm, step, group), count_step(step.mask, MAX_LENGTH, group)
        rows = torch.arange(len(step.scores))
        counted[name] = loss_and_gradient(algorithm, step, experience, counts, list(rows.split(3)))
    return counted


def test_the_number_of_processes_changes_no_loss_and_no_gradient():
    first, second = run_distributed(share_of_a_process, 2)
    for name, algorithm in ALGORITHMS.items():
        whole = in_one_piece(algorithm, build_step())
        torch.testing.assert_close(first[name] + second[name], whole, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_zero_advantages_give_no_gradient_and_the_first_ratio_is_one(name):
    step, algorithm = build_step(), Algorithm(policy_loss=name)
    logprobs = step.logprobs_old.clone().requires_grad_()
    batch = PolicyBatch(logprobs, step.logprobs_old, torch.zeros_like(logprobs), step.mask)
    batch = choose_tokens(algorithm, batch, None)
    counts = count_step(step.mask, MAX_LENGTH)
    policy_objective(algorithm, batch, counts, Coefficients.first(algorithm)).backward()
    assert not logprobs.grad.any()
    figures = policy_figures(algorithm, batch)
    assert (figures["ratio"], figures["clip_fraction"], figures["approx_kl"]) == (1, 0, 0)


@pytest.mark.parametrize("place", ["reward", "token-reward", "loss"])
@pytest.mark.parametrize("estimator", KL_VALUES)
def test_a_reference_equal_to_the_policy_adds_nothing(place, estimator):
    step = build_step()
    step = replace(step, logprobs_ref=step.logprobs_old)
    algorithm = Algorithm(kl_place=place, kl_coef=0.5, kl_estimator=estimator, kl_unbiased=place == "loss")
    without = Algorithm()
    assert torch.equal(advantages_of(algorithm, step), advantages_of(without, step))
    batch = PolicyBatch(step.logprobs_old, step.logprobs_old, step.logprobs_old, step.mask, step.logprobs_old)
    counts = count_step(step.mask, MAX_LENGTH)
    found = policy_objective(algorithm, batch, counts, Coefficients.first(algorithm))
    assert found == policy_objective(without, batch, counts, Coefficients.first(without))
    assert policy_figures(algorithm, batch)["kl"] == 0


def test_a_sample_without_a_reward_has_no_advantage_whatever_the_baseline():
    for name in (name for name in ALGORITHMS if " by " in name):
        assert not advantages_of(ALGORITHMS[name], build_step())[11].any(), name


def test_a_step_without_a_token_has_the_loss_zero():
    step = build_step()
    mask = torch.zeros_like(step.mask)
    for algorithm in ALGORITHMS.values():
        batch = PolicyBatch(step.logprobs_old, step.logprobs_old, step.logprobs_old, mask, step.logprobs_ref)
        batch = choose_tokens(algorithm, batch, step.entropy)
        assert policy_objective(algorithm, batch, count_step(mask, MAX_LENGTH), Coefficients.first(algorithm)) == 0


def test_an_entropy_that_is_given_takes_the_place_of_the_estimate():
    step, algorithm = build_step(), Algorithm(entropy_coef=0.5)
    entropy = torch.rand(12, 6, dtype=torch.float64, requires_grad=True)
    batch = PolicyBatch(*[step.logprobs_old] * 3, step.mask, entropy=entropy)
    counts = count_step(step.mask, MAX_LENGTH)
    policy_objective(algorithm, batch, counts, Coefficients.first(algorithm)).backward()
    torch.testing.assert_close(entropy.grad, torch.where(step.mask, -0.5 / counts.num_tokens, 0.0).double())
    torch.testing.assert_close(policy_figures(algorithm, batch)["entropy"], entropy[step.mask].mean())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("clip", 2 / 4),
        ("cispo", 3 / 4),
        ("gspo", 1.0),
        ("sequence-clip", 1.0),
        ("reinforce", 0.0),
        ("sapo", 0.0),
        ("gmpo", 2 / 4),
        ("dppo", 2 / 4),
        ("vespo", 0.0),
    ],
)
def test_the_share_of_clipped_tokens_is_that_of_the_loss(name, expected):
    ratio = torch.tensor([[1.0, 1.5, 1.6, 0.5], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]).bool()
    if name in ("gspo", "sequence-clip"):
        ratio[0, 3] = 1.1
    advantages, old = torch.ones_like(ratio), torch.zeros_like(ratio)
    figures = policy_figures(Algorithm(policy_loss=name), PolicyBatch(ratio.log(), old, advantages, mask))
    assert figures["clip_fraction"] == expected
    assert set(CLIPPED) == set(POLICY_LOSSES)


def test_tokens_of_low_entropy_have_no_policy_gradient_but_that_of_a_bonus():
    step = build_step()
    for bonus in (0.0, 0.5):
        algorithm = Algorithm(top_entropy=0.3, entropy_coef=bonus)
        chosen = experience_of(algorithm, step)
        logprobs = (step.logprobs_old + 0.1).requires_grad_()
        batch = chosen._replace(logprobs=logprobs, entropy=0.01 * logprobs)
        counts = count_step(step.mask, MAX_LENGTH)
        policy_objective(algorithm, batch, counts, Coefficients.first(algorithm)).backward()
        low = step.mask & ~chosen.high_entropy
        torch.testing.assert_close(
            logprobs.grad[low], torch.full_like(logprobs.grad[low], -0.01 * bonus / counts.num_tokens)
        )


OLD = torch.tensor([[-1.2, -0.7, -2.0], [-0.4, -1.1, 0.0]], dtype=torch.float64)
"""Log-probabilities of two answers, the second of two tokens."""


def loss_with_teacher(scores, coef, present, clamp=None):
    """The loss of the answers with these scores, whose present log-probabilities are `present`."""
    teacher = torch.tensor([[-0.9, -1.5, -1.0], [-0.4, -3.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    algorithm = Algorithm(scale="none", clip_low=0.2, clip_high=0.2, aggregation="token-mean")
    of_scores = compute_advantages(algorithm, torch.tensor(scores, dtype=torch.float64), 2, OLD, None, mask, 0.0)
    advantages = of_scores + teacher_advantages(OLD, teacher, mask, coef, clamp)
    batch = PolicyBatch(present, OLD, advantages, mask)
    return policy_objective(algorithm, batch, count_step(mask, 3), Coefficients.first(algorithm))


@pytest.mark.parametrize(
    ("scores", "coef", "expected"),
    [
        # max(-A r, -A clip(r, 0.8, 1.2)) with A = advantage of the score - coef (log p_old - log p_teacher), the mean
        # over the five tokens, in fp64. Without scores it is verl's distillation_ppo_loss with use_policy_gradient, k1
        # and "vanilla", but for its present log-probability in place of log p_old.
        ([0.0, 0.0], 1.0, 0.16),
        ([0.0, 0.0], 0.5, 0.08),
        ([1.0, 0.0], 1.0, 0.05051709180756481),
        ([1.0, 0.0], 0.5, -0.026889309113147998),
    ],
)
def test_the_loss_of_a_teachers_advantages_alone_and_added_to_those_of_scores(scores, coef, expected):
    present = OLD + torch.tensor([[0.3, -0.4, 0.0], [0.1, -0.25, 0.0]])
    loss = loss_with_teacher(scores, coef, present)
    assert loss.item() == pytest.approx(expected, abs=1e-9)


def test_in_the_first_update_loss_and_gradient_with_a_teacher_are_verls():
    """verl adds a clipped loss of the teacher's advantages to that of the scores'; at ratio 1 nothing is clipped."""
    present = OLD.clone().requires_grad_()
    loss = loss_with_teacher([1.0, 0.0], 0.5, present)
    (gradient,) = torch.autograd.grad(loss, present)
    assert loss.item() == pytest.approx(0.04, abs=1e-12)
    expected = torch.tensor([[-0.13, -0.02, -0.2], [0.1, 0.29, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=0)


def test_a_teacher_alone_with_a_clamp_is_verls_distillation_loss_in_the_first_update():
    """Of verl 0.9.1 (verl/trainer/distillation/losses.py) with use_policy_gradient, k1, loss_max_clamp=0.9 and vanilla.

    The differences from the teacher are -0.3, 0.8, -1 and 0, 1.9 nats; loss and gradient are those of the clamped ones
    over five tokens.
    """
    present = OLD.clone().requires_grad_()
    loss = loss_with_teacher([0.0, 0.0], 1.0, present, clamp=0.9)
    (gradient,) = torch.autograd.grad(loss, present)
    assert loss.item() == pytest.approx(0.1, abs=1e-12)
    expected = torch.tensor([[-0.06, 0.16, -0.18], [0.0, 0.18, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=0)
