"""The preference losses against goldens and finite differences, and what holds where policy and reference agree."""

import math

import pytest
import torch

from hybrid_engine.rl.preferences import (
    LOSSES,
    SMOOTHED_LOSSES,
    PairLogprobs,
    best_and_worst,
    bradley_terry_loss,
    build_loss,
    centring_loss,
    kto_loss,
    kto_metrics,
    kto_reference_point,
    log_ratio_margins,
    pair_metrics,
)
from tests.support.goldens import assert_golden, load_golden

EVERY_LOSS = [*LOSSES, *SMOOTHED_LOSSES]
GOLDEN_NAMES = {
    "sigmoid": "sigmoid",
    "hinge": "hinge",
    "ipo": "ipo",
    "conservative": "cdpo_ls01",
    "robust": "robust_ls01",
}


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def golden_pair() -> PairLogprobs:
    golden = load_golden("dpo")
    sums = [column(golden[name]) for name in ("chosen", "rejected", "ref_chosen", "ref_rejected")]
    return PairLogprobs(*sums, column(5), column(4))


def random_pairs(num_pairs: int = 7) -> PairLogprobs:
    generator = torch.Generator().manual_seed(0)
    sums = -10 * torch.rand(4, num_pairs, generator=generator, dtype=torch.float64)
    return PairLogprobs(*sums, *torch.randint(1, 9, (2, num_pairs), generator=generator))


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_each_loss_of_a_pair_is_its_golden(name):
    golden = load_golden("dpo")
    loss = build_loss(name, golden["beta"], 0.1 if name in SMOOTHED_LOSSES else 0.0)
    assert_golden(log_ratio_margins(golden_pair()), [golden["logits"]])
    assert_golden(loss(golden_pair()), [golden[GOLDEN_NAMES[name]]])


def test_length_normalised_ipo_is_ipo_on_log_probabilities_per_token():
    # 0.5 / 5 tokens - (-1 / 4 tokens) = 0.35; (0.35 - 1 / 0.2)^2
    assert_golden(build_loss("ipo-length-normalised", 0.1)(golden_pair()), [21.6225])


def test_the_metrics_are_the_goldens():
    golden = load_golden("dpo")
    metrics = pair_metrics(golden_pair(), golden["beta"])
    assert_golden(metrics["chosen_reward"], [golden["chosen_reward"]])
    assert_golden(metrics["rejected_reward"], [golden["rejected_reward"]])
    assert_golden(metrics["reward_margin"], [golden["chosen_reward"] - golden["rejected_reward"]])
    assert metrics["accuracy"].tolist() == [1]


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_the_gradient_of_each_loss_is_that_of_finite_differences(name):
    pairs = random_pairs()
    loss = build_loss(name, 0.3, 0.1, sft_weight=0.7)
    policy = [pairs.chosen.requires_grad_(), pairs.rejected.requires_grad_()]
    assert torch.autograd.gradcheck(lambda *both: loss(PairLogprobs(*both, *pairs[2:])), policy)


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_each_loss_makes_the_chosen_answer_likelier_and_the_rejected_one_less_likely(name):
    pairs = random_pairs()
    agreeing = PairLogprobs(
        pairs.chosen.requires_grad_(), pairs.rejected.requires_grad_(), pairs.chosen.detach(),
        pairs.rejected.detach(), *pairs[4:],
    )  # fmt: skip
    build_loss(name, 0.3, 0.1)(agreeing).sum().backward()
    assert (pairs.chosen.grad < 0).all() and (pairs.rejected.grad > 0).all()


def test_where_policy_and_reference_agree_the_margin_is_0_the_loss_log_2_and_the_accuracy_one_half():
    pairs = random_pairs()
    agreeing = pairs._replace(chosen_ref=pairs.chosen, rejected_ref=pairs.rejected)
    assert not log_ratio_margins(agreeing).any()
    for name in ("sigmoid", "conservative", "robust"):
        assert_golden(build_loss(name, 0.3, 0.1)(agreeing), [math.log(2)] * 7)
    metrics = pair_metrics(agreeing, 0.3)
    assert metrics["accuracy"].tolist() == [0.5] * 7
    assert not any(metrics[name].any() for name in ("chosen_reward", "rejected_reward", "reward_margin"))


def test_the_accuracy_counts_pairs_whose_chosen_answer_has_the_higher_reward():
    zeros, ones = torch.zeros(3), torch.ones(3)
    pairs = PairLogprobs(column(1, -1, 0), column(0, 0, 0), zeros, zeros, ones, ones)
    assert pair_metrics(pairs, 0.1)["accuracy"].tolist() == [1, 0, 0.5]


def test_without_smoothing_the_smoothed_losses_are_the_sigmoid_loss():
    pairs = random_pairs()
    for name in SMOOTHED_LOSSES:
        torch.testing.assert_close(build_loss(name, 0.3)(pairs), build_loss("sigmoid", 0.3)(pairs))


def test_the_robust_loss_under_flipped_labels_is_on_average_the_sigmoid_loss_under_clean_ones():
    pairs, share = random_pairs(), 0.2
    flipped = PairLogprobs(*(pairs[i] for i in (1, 0, 3, 2, 5, 4)))
    robust = build_loss("robust", 0.3, share)
    expected = (1 - share) * robust(pairs) + share * robust(flipped)
    torch.testing.assert_close(expected, build_loss("sigmoid", 0.3)(pairs))


def test_the_sft_term_adds_the_chosen_answers_loss_per_token():
    pairs = golden_pair()
    mixed = build_loss("sigmoid", 0.1, sft_weight=0.25)(pairs)
    assert_golden(mixed - build_loss("sigmoid", 0.1)(pairs), [0.25 * 10 / 5])


def test_the_best_and_the_worst_answer_make_a_pair_unless_all_are_alike():
    best, worst, differs = best_and_worst(torch.tensor([[0.0, 2, 1, 2], [3, 3, -1, -1], [1, 1, 1, 1]]))
    assert best.tolist()[:2] == [1, 0] and worst.tolist()[:2] == [0, 2]
    assert differs.tolist() == [True, True, False]


def test_an_answer_without_a_score_is_in_no_pair():
    nan = float("nan")
    best, worst, differs = best_and_worst(torch.tensor([[nan, 2, 1], [nan, nan, 3], [nan, nan, nan], [1, nan, 1]]))
    assert (best[0], worst[0]) == (1, 2)
    assert differs.tolist() == [True, False, False, False]


def test_numbers_of_different_shapes_are_not_broadcast():
    pairs = random_pairs()
    for wrong in (pairs._replace(chosen=pairs.chosen[:1]), PairLogprobs(*(part[:, None] for part in pairs))):
        for name in EVERY_LOSS:
            with pytest.raises(AssertionError, match="shapes"):
                build_loss(name, 0.1, 0.1)(wrong)


def test_the_kto_losses_are_the_goldens():
    golden = load_golden("kto")
    ratios = column(golden["chosen_logratio"], golden["rejected_logratio"])
    point, beta, labels = column(golden["kl"])[0], golden["beta"], torch.tensor([True, False])
    both = [golden["desirable"], golden["undesirable"]]
    assert_golden(kto_loss(ratios, torch.zeros_like(ratios), labels, point, beta), both)
    weighted = kto_loss(ratios, torch.zeros_like(ratios), labels, point, beta, 3.0, 0.5)
    torch.testing.assert_close(weighted, column(3 * both[0], 0.5 * both[1]), rtol=0, atol=1e-8)


def test_the_gradient_of_the_kto_loss_is_that_of_finite_differences():
    pairs, labels = random_pairs(), torch.tensor([True, False, True, True, False, False, True])
    logprobs = pairs.chosen.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda values: kto_loss(values, pairs.chosen_ref, labels, column(0.4)[0], 0.3, 1.5, 0.7), [logprobs]
    )
    kto_loss(logprobs, pairs.chosen_ref, labels, column(0.4)[0], 0.3).sum().backward()
    assert ((logprobs.grad < 0) == labels).all()


def test_the_reference_point_is_a_mean_that_is_never_negative_and_has_no_gradient():
    ratios = column(0.5, 0.1, -0.2).requires_grad_()
    point = kto_reference_point(ratios)
    assert point.item() == pytest.approx(0.4 / 3) and not point.requires_grad
    assert kto_reference_point(-ratios).item() == 0


def test_where_policy_and_reference_agree_kto_values_every_answer_at_one_half():
    logprobs, labels = random_pairs().chosen, torch.tensor([True] * 3 + [False] * 4)
    point = kto_reference_point(logprobs - logprobs)
    assert_golden(kto_loss(logprobs, logprobs, labels, point, 0.3), [0.5] * 7)
    metrics = kto_metrics(logprobs, logprobs, labels, point, 0.3)
    assert {name: (float(total), int(count)) for name, (total, count) in metrics.items()} == {
        "chosen_reward": (0, 3),
        "rejected_reward": (0, 4),
        "accuracy": (3.5, 7),
    }


def test_kto_metrics_split_the_rewards_by_label():
    ratios, labels = column(2, 0.1, -1), torch.tensor([True, True, False])
    metrics = kto_metrics(ratios, torch.zeros_like(ratios), labels, column(0.5)[0], 0.1)
    figures = {name: (float(total), int(count)) for name, (total, count) in metrics.items()}
    assert figures["chosen_reward"] == (pytest.approx(0.21), 2)
    assert figures["rejected_reward"] == (pytest.approx(-0.1), 1)
    assert figures["accuracy"] == (2, 3)


def test_the_losses_of_the_reward_model_are_the_goldens():
    golden = load_golden("reward_model")
    scores = column(golden["chosen"]), column(golden["rejected"])
    assert_golden(bradley_terry_loss(*scores), [golden["bt"]])
    assert_golden(bradley_terry_loss(*scores, column(golden["margin"])), [golden["bt_margin"]])
    assert_golden(0.01 * centring_loss(*scores), [golden["center_coef001"]])
    trained = [score.requires_grad_() for score in scores]
    assert torch.autograd.gradcheck(lambda *both: bradley_terry_loss(*both, 0.5), trained)
    assert torch.autograd.gradcheck(centring_loss, trained)
