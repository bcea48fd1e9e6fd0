"""The preference losses against goldens, TRL and finite differences, and what holds where both models agree."""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from trl import DPOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

from hybrid_engine.rl.preferences import (
    EVERY_LOSS,
    REFERENCE_FREE,
    SMOOTHED_LOSSES,
    PairLogprobs,
    alignment,
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

OF_GOLDEN_PAIR = {
    "sigmoid-length-normalised": 0.675800297745,
    "exo": 0.431388457223,
    "apo-zero": 0.962523416037,
    "apo-down": 0.975067551140,
    "nca": 1.349887802057,
    "bco": 1.312856308087,
    "sppo": 36.250000000000,
    "discopop": 0.849337579289,
    "cpo": 0.598138869382,
    "orpo": 0.028875078434,
    "simpo": 0.913015252400,
}
"""Each paper's formula at the golden pair, with beta 0.1, smoothing 0.1 and SimPO's margin 0.5, by Python's `math`."""
OF_TRL = {
    "sigmoid": "sigmoid",
    "sigmoid-length-normalised": "sigmoid_norm",
    "hinge": "hinge",
    "ipo-length-normalised": "ipo",
    "robust": "robust",
    "exo": "exo_pair",
    "nca": "nca_pair",
    "bco": "bco_pair",
    "sppo": "sppo_hard",
    "apo-zero": "apo_zero",
    "apo-down": "apo_down",
    "discopop": "discopop",
}
"""Our names, and those of TRL's `DPOTrainer`."""
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


@pytest.mark.parametrize("name", OF_GOLDEN_PAIR)
def test_each_other_loss_of_the_golden_pair_is_its_papers_formula(name):
    loss = build_loss(name, 0.1, 0.1, target_margin=0.5)
    assert_golden(loss(golden_pair()), [OF_GOLDEN_PAIR[name]])


def test_each_loss_has_literal_values():
    assert {*GOLDEN_NAMES, *OF_GOLDEN_PAIR, "ipo-length-normalised"} == set(EVERY_LOSS)


class TokenNumbers:
    """B pairs whose tokens' log-probabilities are the parameters, as the output of a model that TRL runs."""

    def __init__(self, num_pairs: int = 3, num_tokens: int = 6):
        generator = torch.Generator().manual_seed(5)
        shape, self.num_pairs = (2 * num_pairs, num_tokens), num_pairs
        lengths = torch.randint(1, num_tokens + 1, (2 * num_pairs, 1), generator=generator)
        self.mask = torch.arange(num_tokens) < lengths  # [2 B, T]
        numbers = -3 * torch.rand(3, *shape, generator=generator, dtype=torch.float64) * self.mask
        self.log_probs, self.logprobs_ref = numbers[0].requires_grad_(), numbers[1]
        self.log_sum_sq_probs = numbers[2]

    @property
    def pairs(self) -> PairLogprobs:
        sharper = 2 * self.log_probs - self.log_sum_sq_probs
        weights = alignment(self.log_probs, sharper, self.mask).view(2, -1).sum(dim=0).exp()
        parts = (self.log_probs.sum(dim=1), self.logprobs_ref.sum(dim=1), self.mask.sum(dim=1))
        return PairLogprobs(*(half for part in parts for half in part.chunk(2)), on_policy_weights=weights)

    def dpo_loss_of_trl(self, loss_type: str, beta: float, weighs: bool) -> torch.Tensor:
        """`DPOTrainer._compute_loss` on these numbers; the prompt is a token, whose place log-probabilities lack."""
        zeros = torch.zeros_like(self.logprobs_ref)
        outputs = SimpleNamespace(
            log_probs=self.log_probs, log_sum_sq_probs=self.log_sum_sq_probs, entropy=zeros, mean_logits=zeros,
            is_top1=zeros.bool(),
        )  # fmt: skip

        class Model:
            training = True

            def __call__(self, **inputs):
                return outputs

        same = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
        trainer = SimpleNamespace(
            model=Model(), accelerator=same, loss_types=[loss_type], loss_weights=[1.0], beta=beta, ld_alpha=None,
            f_divergence_type="reverse_kl", label_smoothing=0.1, use_weighting=weighs, aux_loss_enabled=False,
            precompute_ref_logps=True, args=SimpleNamespace(discopop_tau=0.05), _total_train_tokens=0, _tp_size=1,
            _metrics={"train": defaultdict(list)},
        )  # fmt: skip
        completion_mask = torch.cat([torch.zeros(2 * self.num_pairs, 1), self.mask], dim=1)
        of_reference = dict(zip(("ref_chosen_logps", "ref_rejected_logps"), self.pairs[2:4], strict=True))
        inputs = {"completion_mask": completion_mask, "input_ids": completion_mask, "attention_mask": completion_mask}
        return DPOTrainer._compute_loss(trainer, trainer.model, inputs | of_reference, False)

    def free_loss_of_trl(self, name: str, beta: float) -> torch.Tensor:
        """The preference term of `CPOTrainer` or `ORPOTrainer`, whose log-probabilities are means where `get_` is."""
        sums, lengths = self.log_probs.sum(dim=1), self.mask.sum(dim=1)
        both = (sums if name == "cpo" else sums / lengths).chunk(2)
        kind = "sigmoid" if name == "cpo" else "simpo"
        trainer = SimpleNamespace(
            beta=beta, alpha=0.0, loss_type=kind, simpo_gamma=0.5, label_smoothing=0.0,
            accelerator=SimpleNamespace(device="cpu"),
        )  # fmt: skip
        if name == "orpo":
            return -ORPOTrainer.odds_ratio_loss(trainer, *both)[0].mean()
        return CPOTrainer.cpo_loss(trainer, *both)[0].mean()


def assert_same_loss_and_gradient(numbers: TokenNumbers, ours: torch.Tensor, theirs: torch.Tensor):
    torch.testing.assert_close(ours, theirs.to(ours), rtol=0, atol=1e-5)
    gradients = [torch.autograd.grad(loss, numbers.log_probs, retain_graph=True)[0] for loss in (ours, theirs)]
    assert gradients[0].abs().max() > 1e-3
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "weighs"),
    # TRL multiplies in place, which its hinge's backward pass does not allow.
    [(name, weighs) for name in OF_TRL for weighs in (False, True) if (name, weighs) != ("hinge", True)],
)
def test_value_and_gradient_are_those_of_trls_dpo_trainer(name, weighs):
    numbers = TokenNumbers()
    pairs = numbers.pairs if weighs else numbers.pairs._replace(on_policy_weights=None)
    ours = build_loss(name, 0.3, 0.1, is_weighted=weighs)(pairs).mean()
    assert_same_loss_and_gradient(numbers, ours, numbers.dpo_loss_of_trl(OF_TRL[name], 0.3, weighs))


@pytest.mark.parametrize("name", sorted(REFERENCE_FREE))
def test_value_and_gradient_without_a_reference_are_those_of_trls_trainers(name):
    numbers = TokenNumbers()
    ours = build_loss(name, 0.7, target_margin=0.5)(numbers.pairs._replace(on_policy_weights=None)).mean()
    assert_same_loss_and_gradient(numbers, ours, numbers.free_loss_of_trl(name, 0.7))


@pytest.mark.parametrize("name", sorted(REFERENCE_FREE))
def test_a_loss_without_a_reference_reads_none(name):
    pairs = random_pairs()
    other = pairs._replace(chosen_ref=pairs.rejected_ref, rejected_ref=pairs.chosen_ref)
    assert torch.equal(build_loss(name, 0.3)(pairs), build_loss(name, 0.3)(other))


def test_a_certain_answer_has_a_finite_odds_ratio_loss():
    pairs = PairLogprobs(column(0.0).float().requires_grad_(), *(column(value).float() for value in (-2, 0, 0, 3, 3)))
    loss = build_loss("orpo", 0.1)(pairs)
    loss.backward()
    assert torch.isfinite(loss).all() and torch.isfinite(pairs.chosen.grad).all()


def test_the_alignment_of_a_token_is_that_of_its_whole_distribution():
    logits = torch.randn(4, 3, 11, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    tokens, mask = logits.argmin(dim=2, keepdim=True), torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 1, 1]]).bool()
    logprobs = logits.log_softmax(-1)
    purity = logprobs.exp().square().sum(dim=2).log()
    expected = ((logprobs.gather(2, tokens).squeeze(2) - purity) * mask).sum(dim=1) / mask.sum(dim=1)
    sharper = (2 * logits).log_softmax(-1).gather(2, tokens).squeeze(2)
    torch.testing.assert_close(alignment(logprobs.gather(2, tokens).squeeze(2), sharper, mask), expected)


def test_weights_scale_the_preference_term_and_not_the_sft_term():
    pairs, weights = random_pairs(), torch.linspace(0.1, 2, 7, dtype=torch.float64)
    loss = build_loss("sigmoid", 0.3, sft_weight=0.7)
    preference = build_loss("sigmoid", 0.3)(pairs)
    found = loss(pairs._replace(on_policy_weights=weights))
    torch.testing.assert_close(found, weights * preference + loss(pairs) - preference)


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


# DiscoPOP's loss is not monotone: it rises around h = 0.
@pytest.mark.parametrize("name", sorted({*EVERY_LOSS} - {"apo-down", "discopop"}))
def test_each_loss_makes_the_chosen_answer_likelier_and_the_rejected_one_less_likely(name):
    pairs = random_pairs()
    agreeing = PairLogprobs(
        pairs.chosen.requires_grad_(), pairs.rejected.requires_grad_(), pairs.chosen.detach(),
        pairs.rejected.detach(), *pairs[4:],
    )  # fmt: skip
    build_loss(name, 0.3, 0.1)(agreeing).sum().backward()
    assert (pairs.chosen.grad < 0).all() and (pairs.rejected.grad > 0).all()


def test_apo_down_lowers_both_answers_where_the_chosen_one_is_likelier_than_under_the_reference():
    pairs = random_pairs()
    both = pairs.chosen.requires_grad_(), pairs.rejected.requires_grad_()
    apart = PairLogprobs(*both, pairs.chosen.detach() - 1, pairs.rejected.detach() + 1, *pairs[4:])
    build_loss("apo-down", 0.3)(apart).sum().backward()
    assert (pairs.chosen.grad > 0).all() and (pairs.rejected.grad > 0).all()


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


def test_rewards_per_token_are_divided_by_the_lengths():
    pairs = random_pairs()._replace(chosen_ref=torch.zeros(7), rejected_ref=torch.zeros(7))
    for name in EVERY_LOSS:
        metrics = build_loss(name, 0.3).metrics(pairs)
        divisor = pairs.chosen_lengths if name in ("simpo", "orpo") else 1
        torch.testing.assert_close(metrics["chosen_reward"], 0.3 * pairs.chosen / divisor, check_dtype=False)


def test_without_smoothing_the_smoothed_losses_are_the_sigmoid_loss():
    pairs = random_pairs()
    for name in ("conservative", "robust"):
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
    for wrong in (pairs._replace(chosen=pairs.chosen[:1]), PairLogprobs(*(part[:, None] for part in pairs[:6]))):
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
